"""Which gradient steps are worth rehearsing? Tent and ATTA at several sizes, by Adam and by SGD, at simulated sites.

    python docs/figures/steps.py MODEL SITE [--sites N] [--cases N]

writes docs/results/steps.json and the table in docs/rehearsal.md. MODEL was trained with `--with atta`; SITE is labeled
images of its source site that training did not see, such as phantom:oct:spectralis:12:77:128x64. Every step begins from
the source's parameters and batch statistics; no target is involved.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

import torch

from dltta.config import make_objective, open_dataset
from dltta.core.gradients import displaced
from dltta.core.passes import run
from dltta.core.update import loss_gradient
from dltta.evaluation.home import of_site
from dltta.evaluation.recorded import scores_of, sizes_of
from dltta.evaluation.rehearsal import SMOOTHING, Setup
from dltta.files import write_atomically
from dltta.models.io.opening import open_model
from dltta.models.predictions import probabilities
from dltta.models.statistics import AvailableStatistics

DOCS = Path(__file__).parent.parent
BEGIN, END = "<!-- steps: begin -->", "<!-- steps: end -->"
SIZES = {"adam": (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1), "sgd": (0.001, 0.01, 0.1, 1.0)}
METHODS = {"tent": "Tent", "atta": "ATTA"}
TIMED = 5  # gradients


@dataclass(frozen=True)
class Row:
    """A step at all sites; scores from 0 to 1."""

    method: str
    rule: str
    size: float
    gain: float  # over batch statistics, mean over sites
    worst: float  # site
    better: int  # sites
    sites: int


class Taken:
    """A network and an objective's gradient for one image at a time."""

    def __init__(self, opened, method):
        self.objective = make_objective(method, opened, AvailableStatistics())
        self.network = opened.model
        self.parameters = list(self.objective.prepare(self.network))
        for parameter in self.network.parameters():
            parameter.requires_grad_(False)
        for parameter in self.parameters:
            parameter.requires_grad_(True)

    def begin(self, x):
        seen = run(self.network, x, features=False, learning=True)
        _, self.gradient = loss_gradient(self.objective, self.network, x, seen.logits, self.parameters)
        return seen.logits.detach()

    def after(self, x, rule, size):
        parts = [None if g is None else -size * (g / (g.abs() + 1e-8) if rule == "adam" else g) for g in self.gradient]
        with displaced(self.parameters, parts), torch.no_grad():
            return self.network(x)


def measured(model, site, most, cases):
    """Rows of all steps, and what a gradient costs in plain passes, by method."""
    opened = open_model(model)
    setup = Setup.of(opened, of_site(opened, open_dataset(site)).pairs[:cases], 0)
    streams = [each for each in setup.streams() if not each.harmful][: most + 1]
    smooth = SMOOTHING * sizes_of([label for _, label in setup.cases], len(opened.classes))
    rows, costs, before = [], {}, []
    for method in METHODS:
        taken = Taken(open_model(model), method)
        gains = {(rule, size): [] for rule, sizes in SIZES.items() for size in sizes}
        plain = []
        for stream in streams:
            found = {key: [] for key in gains}
            for image, label in stream.pairs(setup.cases, 0):
                x = image[None]
                first = score(taken.begin(x), label, smooth)
                plain.append(first)
                for (rule, size), each in found.items():
                    each.append(score(taken.after(x, rule, size), label, smooth) - first)
            for key, each in found.items():
                gains[key].append(fmean(each))
            print(f"{METHODS[method]}: {stream.name}", flush=True)
        before.append(fmean(plain))
        for (rule, size), each in gains.items():
            better = sum(gain > 0.001 for gain in each)
            rows.append(Row(METHODS[method], rule, size, fmean(each), min(each), better, len(each)))
        x = setup.cases[0][0][None]
        pass_takes = timed(lambda x=x: opened.model(x))
        costs[METHODS[method]] = timed(lambda x=x, taken=taken: taken.begin(x)) / pass_takes - 1
    return {"site": site, "before": before[0], "costs": costs, "rows": [asdict(row) for row in rows]}


def score(logits, label, smooth):
    return float(scores_of(probabilities(logits)[:, None], [label], smooth)[0, 0])


def timed(call):
    """Processor seconds, median."""
    found = []
    with torch.no_grad():
        for _ in range(TIMED + 1):
            began = time.process_time()
            call()
            found.append(time.process_time() - began)
    return median(found[1:])


def page(found):
    """The table and what a gradient costs."""
    cost = ", ".join(f"on {method} as long as {each:.1f} plain passes" for method, each in found["costs"].items())
    rows = [
        f"| {row['method']} | {row['rule'].upper() if row['rule'] == 'sgd' else 'Adam'} | {row['size']:g} | "
        f"{100 * row['gain']:+.1f} | {100 * row['worst']:+.1f} | {row['better']} of {row['sites']} |"
        for row in found["rows"]
    ]
    head = "| step on | by | size | mean over sites | worst site | better at |\n|:--|:--|--:|--:|--:|--:|"
    return (
        f"Batch statistics alone: {100 * found['before']:.1f}. A gradient takes, beside the pass before it, {cost}.\n\n"
        f"{head}\n" + "\n".join(rows)
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="trained with `--with atta`")
    parser.add_argument("site", help="labeled images of its source site")
    parser.add_argument("--sites", type=int, default=10, help="simulated sites beside the source [%(default)s]")
    parser.add_argument("--cases", type=int, default=8, help="images of each [%(default)s]")
    given = parser.parse_args()
    found = measured(given.model, given.site, given.sites, given.cases)
    write_atomically(DOCS / "results" / "steps.json", json.dumps(found, indent=1) + "\n")
    text = (DOCS / "rehearsal.md").read_text()
    before, _, rest = text.partition(BEGIN)
    (DOCS / "rehearsal.md").write_text(f"{before}{BEGIN}\n{page(found)}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
