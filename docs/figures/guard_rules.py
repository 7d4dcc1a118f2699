"""What is each rule of the guard worth? Streams of simulated sites with the whole guard and with one rule less.

    dltta train configs/train/oct_phantom.toml
    python docs/figures/guard_rules.py runs/models/oct_phantom phantom:oct:spectralis:8:777

writes docs/results/guard_rules.json and the table in docs/guard.md.
"""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from dltta.config import make_adapter, make_guard, open_dataset
from dltta.data.shifts import HARMFUL, SOURCE_SITE, draw_sites
from dltta.evaluation.home import of_site
from dltta.evaluation.recorded import Stream, scores_of, sizes_of
from dltta.evaluation.rehearsal import SMOOTHING, strong_and_mild
from dltta.models.io.opening import open_model
from dltta.models.predictions import probabilities
from dltta.quality.guard import SourceGuard
from dltta.quality.guarded import GuardedAdapter
from dltta.recipes import recipe_for

DOCS = Path(__file__).parent.parent
BEGIN, END = "<!-- guard rules: begin -->", "<!-- guard rules: end -->"
WITHOUT = {
    "in-distribution": {"in_distribution": None}, "ood-score": {"ood_score": None}, "entropy": {"entropy": None},
    "flip-consistency": {"source_consistency": None}, "rate": {"rate": math.inf}, "drift": {"drift": math.inf},
    "change": {"max_change": math.inf, "max_probability_shift": math.inf}, "class-share": {"shares": None},
    "collapse": {"collapse": 0.0},
}  # fmt: skip
METHODS = {"ATTA": ("atta", "adam:5e-3")}
SITES = 2


def adapter_of(opened, method, rate, without):
    """The method with the guard, less one rule; `without` None is no guard at all."""
    recipe = recipe_for(method, rate, statistics="batch", guard=without is not None)
    made = make_adapter(opened, recipe)
    if isinstance(made, GuardedAdapter) and without:
        guard = make_guard(opened.calibration, method)
        assert isinstance(guard, SourceGuard)
        made.guard = SourceGuard(replace(guard.limits, **WITHOUT[without]), opened.calibration)
    return made


def measured(opened, cases, streams):
    smooth = SMOOTHING * sizes_of([label for _, label in cases], len(opened.classes))
    rows = []
    for name, (method, rate) in METHODS.items():
        for without in (None, "", *WITHOUT):
            scores = {}
            for stream in streams:
                adapter = adapter_of(opened, method, rate, without)
                found = []
                for image, label in stream.pairs(cases, 0):
                    prediction = probabilities(adapter.step(image[None]).logits)[:, None]
                    found.append(scores_of(prediction, [label], smooth)[0, 0])
                scores[stream.name] = 100 * float(np.mean(found))
            print(name, without, {site: round(score, 1) for site, score in scores.items()}, flush=True)
            rows.append({"method": name, "without": without, "scores": scores})
    return rows


def table(results):
    """Means over the simulated sites that something can be learned from, and over the harmful ones."""
    kinds = {"sites": results["sites"], "home": ["source"], "harmful": results["harmful"]}
    lines = [
        "| " + " | ".join(["", *(f"{m}: {kind}" for m in METHODS for kind in kinds)]) + " |",
        "|:--|" + "--:|" * len(kinds) * len(METHODS),
    ]
    names = {None: "no guard", "": "whole guard", **{rule: f"without `{rule}`" for rule in WITHOUT}}
    for without, name in names.items():
        cells = []
        for method in METHODS:
            row = next(r for r in results["rows"] if (r["method"], r["without"]) == (method, without))
            cells += [f"{np.mean([row['scores'][site] for site in sites]):.1f}" for sites in kinds.values()]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("site", help="labeled images of the source site that training did not see")
    given = parser.parse_args()
    torch.set_num_threads(1)
    opened = open_model(given.model)
    cases = of_site(opened, open_dataset(given.site)).pairs
    channels, *spatial = cases[0][0].shape
    drawn = strong_and_mild(draw_sites(SITES, seed=11, spatial_dims=len(spatial), channels=channels))
    harmful = [site for site in HARMFUL if site.name == "negative"]
    streams = [Stream(site.name, (site,)) for site in (SOURCE_SITE, *drawn, *harmful)]
    results = {
        "command": f"python docs/figures/guard_rules.py MODEL {given.site}", "cases": len(cases),
        "sites": [site.name for site in drawn], "harmful": [site.name for site in harmful],
        "rows": measured(opened, cases, streams),
    }  # fmt: skip
    (DOCS / "results" / "guard_rules.json").write_text(json.dumps(results, indent=1) + "\n")
    page = DOCS / "guard.md"
    before, _, rest = page.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n{table(results)}\n{END}{after}")


if __name__ == "__main__":
    main()
