"""Writes docs/real.md from finished benchmarks on real sites: python docs/figures/real.py runs/real.

The full results stay where they are: they name every case. What is kept beside the page is each benchmark's
configuration, provenance and summary (docs/results/real.json) with the table made from the full results.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from dltta.evaluation import Results, by_target, markdown, sentences
from dltta.evaluation.results import _strict

DOCS = Path(__file__).parent.parent
TITLES = {
    "oct_layers": "Retinal layers, Optovue → Cirrus",
    "nuclei_tissue": "Nuclei in stained tissue, white → lilac",
    "nuclei_fluo": "Nuclei in fluorescence, one acquisition format → another",
    "wbc_cells": "White blood cells, segmentation, one laboratory → two others",
    "wbc_types": "White blood cells, kinds, one laboratory → two others",
    "spinal_cord": "Spinal cord MRI, one scanner → three others",
}


def main(folder: Path) -> None:
    kept = {}
    for name in TITLES:
        if (folder / name / "results.json").is_file():
            results = Results.load(folder / name / "results.json")
            kept[name] = {
                "config": results.config,
                "provenance": asdict(results.provenance),
                "summary": [asdict(row) for row in results.summary],
                "table": markdown(by_target(results)),
                "headline": sentences(results),
            }
    (DOCS / "results" / "real.json").write_text(json.dumps(_strict(kept), indent=1, ensure_ascii=False) + "\n")
    (DOCS / "real.md").write_text(page(kept))


def page(kept: dict) -> str:
    missing = [name for name in TITLES if name not in kept]
    parts = [(DOCS / "figures" / "real_head.md").read_text().strip()]
    for name, entry in kept.items():
        training = entry["config"]["training"]
        parts.append(
            f"## {TITLES[name]}\n\n`configs/real/{name}.toml`: {training['epochs']} epochs of source training, seed 0, "
            f"one order.\n\n{entry['table'].strip()}\n\n" + " ".join(entry["headline"])
        )
    if missing:
        parts.append(
            "## Not run yet\n\n" + "\n".join(f"- {TITLES[name]} (`configs/real/{name}.toml`)" for name in missing)
        )
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
