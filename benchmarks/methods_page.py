"""The generated parts of docs/methods.md: what is said about each method, and the table of all of them.

python benchmarks/methods_page.py rewrites them from the one table in src/dltta/methods.py and, where they are there,
from docs/results/methods_oct.json (synthetic scanners) and docs/results/real.json (real sites).
"""

import json
import re
from pathlib import Path
from statistics import fmean

from dltta.evaluation.formats import markdown
from dltta.evaluation.results import Results
from dltta.evaluation.tables import by_target
from dltta.methods import METHODS, Facts, Method, Normalization, Step

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "methods.md"
RESULTS = ROOT / "docs" / "results" / "methods_oct.json"
REAL = ROOT / "docs" / "results" / "real.json"
SOURCE, PTBN = "source", "ptbn"
HELPED = 0.5  # points above the source model from which a method is said to have helped


def main() -> None:
    PAGE.write_text(page(PAGE.read_text()))
    print(f"wrote {PAGE}")


def page(text: str) -> str:
    """The page with its generated parts made anew."""
    results = Results.load(RESULTS) if RESULTS.is_file() else None
    every = json.loads(REAL.read_text()) if REAL.is_file() else {}
    real = {name: task for name, task in every.items() if "again" not in task}  # targets of another task once more
    parts = {"table": property_table(), "methods": entries(results, real), "results": results_part(results)}
    for name, part in parts.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, _, rest = text.partition(begin)
        after = rest.partition(end)[2]
        text = f"{before}{begin}\n{part}\n{end}{after}"
    return text


def property_table() -> str:
    """Methods × properties."""
    heads = ["method", "gradient", "needs from the source", "batch of 1", "3-D", "normalization", "predicts", "passes"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for method in Method:
        facts = method.facts
        cells = [
            f"[`{method}`](#{anchor(facts)})",
            "yes" if facts.loss else "no",
            "–" if facts.source == "nothing" else facts.source,
            facts.batch_of_one,
            facts.volumes,
            _normalizations(facts),
            "–" if not facts.loss else f"{facts.predict} the update",
            facts.passes,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _normalizations(facts: Facts) -> str:
    if not facts.normalizations:
        return "any"
    return "any affine" if len(facts.normalizations) == len(Normalization) else " and ".join(facts.normalizations)


def anchor(facts: Facts) -> str:
    """As heading links are made: lower case, without signs; a second heading of the same letters is numbered."""
    letters = re.sub(r"[^a-z0-9-]", "", facts.title.lower())
    before = [other.facts for other in Method if re.sub(r"[^a-z0-9-]", "", other.facts.title.lower()) == letters]
    number = before.index(facts)
    return f"{letters}-{number}" if number else letters


def entries(results: Results | None, real: dict) -> str:
    """A few lines on each method."""
    return "\n\n".join(entry(method, results, real) for method in Method)


def entry(method: Method, results: Results | None, real: dict) -> str:
    facts = method.facts
    tasks = f"{facts.tasks[0]} only" if len(facts.tasks) == 1 else "segmentation and classification"
    needs = "nothing" if facts.source == "nothing" else facts.source
    if facts.part is not None:
        needs += f" (`dltta train --with {facts.part}`)"
    lines = [
        f"### {facts.title}",
        "",
        f"*{facts.paper}.* `--method {method}`, `{facts.path.rpartition(':')[2]}` in "
        f"`{facts.path.rpartition(':')[0].replace('.', '/')}.py`.",
        "",
        f"- **Idea**: {facts.idea}",
        f"- **Moves**: {facts.moves}. **Needs** from the source: {needs}.",
        f"- **Works for**: {tasks}, 2-D and 3-D; normalization: {_normalizations(facts)}; "
        f"a batch of one: {facts.batch_of_one}.",
        f"- **Cost**, passes of the network forward + backward: {facts.passes}.",
        f"- **Settings**: {_settings(facts)}.",
    ]
    if (said := _scores(method, results)) is not None:
        lines.append(f"- **On [synthetic OCT](#on-the-synthetic-oct-scanners)**: {said}.")
    if (said := helped(method, real)) is not None:
        lines.append(f"- **When it helped** ([real sites](real.md)): {said}.")
    if (ROOT / "docs" / "methods" / f"{method}.md").is_file():
        lines.append(f"- [More](methods/{method}.md)")
    return "\n".join(lines)


def _settings(facts: Facts) -> str:
    if facts.of_paper:
        return "the DLTTA paper's" if facts.loss else "none"
    said = []
    for task in facts.tasks:
        step = facts.step(task)
        rate = f"{facts.rate} rate, α {step.alpha:.4g}, {step.optimizer}" if facts.loss else "no rate"
        rate += f" momentum {step.momentum:g}" if step.momentum and facts.loss else ""
        rate += f" β {step.betas}" if step.betas != Step.betas else ""
        rate += f", {step.updates} steps" if step.updates > 1 else ""
        said.append(f"{task}: {rate}, batch {step.batch_size} ({step.of})")
    return "; ".join(said)


def _scores(method: str, results: Results | None) -> str | None:
    """Its mean scores beside that of the source model, by target."""
    if results is None:
        return None
    if (why := results.config.get("left_out", {}).get(method)) is not None:
        return f"left out: {why}"
    metric = "dice"
    rows = [row for row in results.summary if row.metric == metric]
    home = {row.target: row.mean for row in rows if row.method == SOURCE}
    said = []
    for target in sorted(_targets(results) & set(home)):
        found = [row for row in rows if row.method == method != SOURCE and row.target == target]
        scores = ", ".join(f"{100 * row.mean:.1f}{_rate(row.rate)}" for row in found)
        said += [f"Dice {scores} at {target}; source model {100 * home[target]:.1f}"] if found else []
    return "; ".join(said) or None


def _rate(rate: str) -> str:
    return "" if rate == "none" else f" ({rate} rate)"


def helped(method: str, real: dict) -> str | None:
    """At which real targets it was better than the source model, as its authors run it; None where it was not run.

    Beside it what batch statistics alone (PTBN) gave there: most methods take these too, and learn on top.
    """
    found, alone = _gains(method, real), _gains(PTBN, real)
    if not found or method == SOURCE:
        return None
    better = [place for place, gain in found.items() if gain >= HELPED]
    best, worst = (choose(found, key=lambda place: found[place]) for choose in (max, min))
    shown = [f"most {_gain(found, best)}", f"least {_gain(found, worst)}"] if len(found) > 1 else [_gain(found, best)]
    number = f"at {len(better)} of {len(found)} targets by {HELPED} points or more"
    said = f"{number}, {fmean(found.values()):+.1f} in the mean"
    if method != PTBN and set(found) <= set(alone):
        said += f" (PTBN there {fmean(alone[place] for place in found):+.1f})"
    return f"{said}; {', '.join(shown)}".replace("-", "−")


def _gains(method: str, real: dict) -> dict[tuple[str, str], float]:
    """Over the source model in points, by task and target."""
    rows = [(name, row) for name, task in real.items() for row in task["rows"] if row["method"] == method]
    return {
        (name, target): cell["gain"]
        for name, row in rows
        if row["rate"] in ("none", METHODS[method].facts.rate)
        for target, cell in row["cells"].items()
    }


def _gain(found: dict, place: tuple[str, str]) -> str:
    return f"{found[place]:+.1f} ({place[0]}, {place[1]})"


def _targets(results: Results) -> set[str]:
    return {stream.target for stream in results.streams if stream.method != SOURCE}


def results_part(results: Results | None) -> str:
    return "Not measured yet." if results is None else markdown(by_target(results)).rstrip()


if __name__ == "__main__":
    main()
