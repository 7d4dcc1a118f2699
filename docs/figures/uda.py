"""Fills the cost table of docs/uda.md from finished reproductions: python docs/figures/uda.py [runs/reproduce].

Training seconds are those in each model's record, seconds per image those in each stream; both as measured. What was
read is kept in docs/results/uda_cost.json, from which the table is made again without an argument.
"""

import json
import sys
from pathlib import Path
from statistics import fmean

from dltta.evaluation.results import Results
from dltta.evaluation.tables import NAMES, SEE_TARGET, method_label

DOCS = Path(__file__).parent.parent
TITLES = {"oct": "OCT", "histology": "Histology", "prostate": "Prostate"}


def main(root: Path | None = None) -> None:
    kept = DOCS / "results" / "uda_cost.json"
    if root is not None:
        finished = [bed for bed in TITLES if (root / f"{bed}-phantom" / "paper" / "results.json").is_file()]
        kept.write_text(json.dumps({bed: measured(root, bed) for bed in finished}, indent=1) + "\n")
    found = json.loads(kept.read_text())
    fill(f"{table(found)}\n\n{made_with(found)}")


def made_with(found: dict) -> str:
    """Which code and machine; before 0.2 one network learned its task and TTT's rotation."""
    origins = {(each["version"], each["machine"]["cpu"]) for each in (entry["provenance"] for entry in found.values())}
    said = "; ".join(f"dltta {version} on {cpu}" for version, cpu in sorted(origins))
    joint = any(version.startswith("0.1.") for version, _ in origins)
    since = " There one network learned its task jointly with TTT's rotation; since 0.2 TTT has a network of its own, "
    return f"Measured with {said}.{since + 'and source training takes longer.' if joint else ''}"


def measured(root: Path, bed: str) -> dict:
    results = Results.load(root / f"{bed}-phantom" / "paper" / "results.json")
    work = root / "work" / f"{bed}-phantom"
    training: dict[str, list[float]] = {}
    for model in sorted((work / "models").glob("*/model.json")):
        record = json.loads(model.read_text())["record"]
        training.setdefault(record.get("uda", {}).get("method", "source"), []).append(seconds(record["history"]))
    image: dict[str, list[float]] = {}
    for file in sorted((work / "streams").glob("*.json")):
        for stream in Results.load(file).streams:
            label = f"{stream.method} {stream.rate}"
            image.setdefault(label, []).append(fmean(case.seconds for case in stream.cases if case.seconds is not None))
    return {
        "provenance": {"version": results.provenance.version, "machine": results.provenance.machine},
        "settings": results.config["uda"],
        "training seconds": {method: fmean(values) for method, values in training.items()},
        "models": {method: len(values) for method, values in training.items()},
        "seconds per image": {label: fmean(values) for label, values in image.items()},
    }


def seconds(history: list[dict]) -> float:
    """Every stage counts from its own beginning, so its last row is its length."""
    return sum({row["stage"]: row["seconds"] for row in history}.values())


def table(found: dict) -> str:
    lines = ["| Images | Method | Training for one target, s | Per test image, s |", "|:--|:--|--:|--:|"]
    for bed, entry in found.items():
        base, costs = entry["training seconds"]["source"], entry["seconds per image"]
        for label in ("source none", "tent dynamic", "ttt dynamic", "atta dynamic"):
            if label in costs:
                name = method_label(*label.split())
                lines.append(f"| {TITLES[bed]} | {name} | – | {costs[label]:.2f} |")
        for method in SEE_TARGET:
            if method in entry["models"]:
                more = entry["training seconds"][method]
                cost = costs[f"{method} none"]
                lines.append(f"| {TITLES[bed]} | {NAMES[method]} | {more:.0f} | {cost:.2f} |")
        lines.append(f"| {TITLES[bed]} | source training, with what TTT and ATTA need | {base:.0f} (once) | |")
    return "\n".join(lines)


def fill(text: str) -> None:
    page = DOCS / "uda.md"
    head, rest = page.read_text().split("<!-- cost -->")
    page.write_text(f"{head}<!-- cost -->\n{text}\n{rest[rest.index('<!-- end of cost -->') :]}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
