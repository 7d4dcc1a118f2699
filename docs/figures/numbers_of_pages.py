"""Fills the numbers that pages quote, from docs/results: python docs/figures/numbers_of_pages.py

A quoted passage stands between `<!-- NAME -->` and `<!-- end of NAME -->`. A test compares them.
"""

import json
import re
from pathlib import Path
from statistics import fmean

from dltta.evaluation.formats import markdown
from dltta.evaluation.results import Results
from dltta.evaluation.story import story
from dltta.evaluation.tables import by_target, method_label
from dltta.recipes import NO_RATE

DOCS = Path(__file__).parent.parent
PAGES = [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]
BLOCK = re.compile(
    r"<!-- (demo table|demo story|recommended|methods against PTBN) -->\n(.*?)<!-- end of \1 -->", re.DOTALL
)


def passages() -> dict[str, str]:
    """What each passage says, by name."""
    results = DOCS / "results"
    demo, changing = (Results.load(results / f"{name}.json") for name in ("demo_oct", "demo_changing"))
    lines = [f"{number}. **{line.head}** {line.text}" for number, line in enumerate(story(demo, changing), start=1)]
    real = json.loads((results / "real.json").read_text())
    once = {name: task for name, task in real.items() if "again" not in task}  # targets of another task once more
    return {
        "demo table": markdown(by_target(demo)).strip(),
        "demo story": "\n".join(lines),
        "recommended": recommended(json.loads((results / "recommended.json").read_text())),
        "methods against PTBN": against_ptbn(once),
    }


def recommended(rows: list[dict]) -> str:
    """The default recipe against the better of source model and PTBN, at real sites."""
    scores = [row["scores"] for row in rows]
    gains = [100 * (each["recommended"] - max(each["source"], each["ptbn"])) for each in scores]
    over_source = [100 * (each["recommended"] - each["source"]) for each in scores]
    tasks = len({row["task"] for row in rows})
    few, many = min(row["seeds"] for row in rows), max(row["seeds"] for row in rows)
    seeds = "one seed" if many == 1 else f"{many} seeds" if few == many else f"{few} to {many} seeds"
    return (
        f"At {len(rows)} real target sites of {tasks} tasks (small models, {seeds}) the default was on average "
        f"{_side(fmean(over_source))} the source model (worst site: {_side(min(over_source))}) and "
        f"{_side(fmean(gains))} the better of source model and PTBN (worst site: {_side(min(gains))}). It was at most "
        f"a point below the better one at {sum(gain >= -1 for gain in gains)} of {len(gains)} sites."
    )


def against_ptbn(real: dict) -> str:
    """Each method as its authors set it, at every real target where it was run."""
    lines = ["| method | targets | mean | best | worst |", "|:--|--:|--:|--:|--:|"]
    found: dict[str, list[tuple[float, str]]] = {}
    for task in real.values():
        rows = {(row["method"], row["rate"]): row["cells"] for row in task["rows"]}
        for (method, rate), cells in rows.items():
            if rate not in (NO_RATE, "fixed") or method == "ptbn":
                continue
            for target, cell in cells.items():
                ours, theirs = _by_seed(cell), _by_seed(rows["ptbn", NO_RATE][target])
                gain = fmean(ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys()))
                found.setdefault(method, []).append((gain, target))
    for method, gains in sorted(found.items(), key=lambda each: -fmean(gain for gain, _ in each[1])):
        best, worst = max(gains), min(gains)
        lines.append(
            f"| {method_label(method, NO_RATE)} | {len(gains)} | {_signed(fmean(gain for gain, _ in gains))} | "
            f"{_signed(best[0])} ({best[1]}) | {_signed(worst[0])} ({worst[1]}) |"
        )
    return "\n".join(lines)


def _by_seed(cell: dict) -> dict[str, float]:
    """The mean of each source training: methods are compared on the same ones."""
    return cell.get("by_seed", {"0": cell["mean"]})


def _signed(points: float) -> str:
    return f"{points:+.1f}".replace("-", "−")


def _side(points: float) -> str:
    return f"{abs(points):.1f} points {'below' if points < 0 else 'above'}"


def filled(text: str, found: dict[str, str]) -> str:
    """A page with its passages as the results give them."""
    return BLOCK.sub(lambda block: f"<!-- {block[1]} -->\n\n{found[block[1]]}\n\n<!-- end of {block[1]} -->", text)


def main() -> None:
    found = passages()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := filled(text, found)) != text:
            page.write_text(new, encoding="utf-8")
            print(f"{page.relative_to(DOCS.parent)}: numbers written")


if __name__ == "__main__":
    main()
