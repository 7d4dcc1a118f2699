"""9 report. The reproduced tables and figures as pages, from the results of finished runs.

FOLDER/
  index.md                what there is, and what a reader must know first
  NAME.md NAME.csv        one table or figure each, ours beside the published numbers
  NAME.png                of figures
  provenance.json         of every run: configuration, code, data, machine, summary
"""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from PIL import Image

from dltta.errors import DataError
from dltta.evaluation.paper.needs import Runs
from dltta.evaluation.paper.published import Published, comparison_csv, comparison_markdown, trainings
from dltta.evaluation.paper.reproduce import REPRODUCTIONS, make_table, runs_of
from dltta.evaluation.paper.tasks import Setup
from dltta.evaluation.results import Results, strict
from dltta.files import write_atomically

NOT_AT_HAND = (
    "The published data were not at hand: our numbers are from synthetic scanners at reduced size and do not compare "
    "with the published ones beside them; they show how the methods behave."
)
WIDEST = 1400  # pixels of a page's figure
DRAWN = ("table.md", "table.csv", "figure.png")
AT_HAND = "Our numbers are from the published data."


def write_pages(names: Sequence[str], setup: Setup, folder: Path, *, unfinished: bool = False) -> list[Path]:
    """A page for each name, an index of them, and where their numbers come from; the files written, the index first.

    A name whose runs are not finished is an error, or with `unfinished` a page that says so.
    """
    found: dict[str, Finished] = {}
    for name in names:
        runs = runs_of(name, setup)
        if (absent := missing(name, setup, runs)) is None:
            found[name] = Finished.load(name, setup, runs)
        elif not unfinished:
            raise DataError(f"there is no {absent}; run `dltta reproduce {name}` first")
    pages: dict[str, bytes | str] = {"index.md": _index(names, found, setup)}
    for name in names:
        pages |= found[name].files(name, setup) if name in found else {f"{name}.md": _not_run(name, setup)}
    pages["provenance.json"] = _provenance(found)
    for file, content in pages.items():
        write_atomically(folder / file, content)
    return [folder / file for file in pages]


def missing(name: str, setup: Setup, runs: Runs) -> Path | None:
    """The first file that a page needs and that is not there; a run that may diverge, and has none, did."""
    needed = [
        Path(experiment.output) / "results.json"
        for run, experiment in runs.experiments.items()
        if run not in runs.may_diverge
    ]
    if REPRODUCTIONS[name].draw is not None:
        needed += [setup.folder(name) / file for file in DRAWN]
    return next((file for file in needed if not file.is_file()), None)


@dataclass(frozen=True)
class Finished:
    """What one name left behind."""

    caption: str
    table: str  # Markdown
    rows: str  # CSV
    figure: bytes | None
    results: Mapping[str, Results]

    @classmethod
    def load(cls, name: str, setup: Setup, runs: Runs) -> "Finished":
        """Tables are made again from results.json; of figures, what was drawn is taken."""
        files = {run: Path(experiment.output) / "results.json" for run, experiment in runs.experiments.items()}
        results = {run: Results.load(file) for run, file in files.items() if file.is_file()}
        if REPRODUCTIONS[name].draw is None:
            table = make_table(name, setup, runs, results)
            return cls(_caption(name), comparison_markdown(table), comparison_csv(table), None, results)
        markdown, rows, figure = (setup.folder(name) / file for file in DRAWN)
        shown = for_page(figure.read_bytes())
        return cls(_caption(name), markdown.read_text("utf-8"), rows.read_text("utf-8"), shown, results)

    @property
    def seeds(self) -> int:
        return max(map(trainings, self.results.values()))

    def files(self, name: str, setup: Setup) -> dict[str, bytes | str]:
        figure = f"\n![{self.caption}]({name}.png)\n" if self.figure is not None else ""
        page = f"{_top(name, setup, self.seeds)}{self.table}{figure}"
        drawn: dict[str, bytes | str] = {} if self.figure is None else {f"{name}.png": self.figure}
        return {f"{name}.md": page, f"{name}.csv": self.rows, **drawn}


def _top(name: str, setup: Setup, seeds: int) -> str:
    """Caption, what a reader must know first, and the command."""
    data = f"--phantom{' --small' if setup.small else ''}" if setup.data is None else "--data FOLDER"
    command = f"dltta reproduce {name} {data} --seeds {seeds}"
    return f"# {_caption(name)}\n\n{_first(setup)}\n\n```bash\n{command}\n```\n\n"


def _not_run(name: str, setup: Setup) -> str:
    return f"{_top(name, setup, setup.seeds)}Not run yet.\n"


def _caption(name: str) -> str:
    return Published.load(REPRODUCTIONS[name].numbers or name).caption


def for_page(figure: bytes) -> bytes:
    """A PNG as a page shows it: no wider than a screen, with 256 colors, so that it takes a third of the bytes."""
    drawn = Image.open(io.BytesIO(figure)).convert("RGB")
    if drawn.width > WIDEST:
        drawn = drawn.resize((WIDEST, round(drawn.height * WIDEST / drawn.width)), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    drawn.quantize(256).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _first(setup: Setup) -> str:
    return NOT_AT_HAND if setup.data is None else AT_HAND


def _index(names: Sequence[str], found: Mapping[str, Finished], setup: Setup) -> str:
    lines = [f"- [{name}]({name}.md): {_caption(name)} ({_extent(found.get(name))})" for name in names]
    return (
        f"# The paper's tables and figures, reproduced\n\n{_first(setup)}\n\n"
        "Every number of ours is from `results.json` of the command on its page (`provenance.json` has settings, code, "
        "data and machine); published ones are as printed.\n\n" + "\n".join(lines) + "\n"
    )


def _extent(finished: Finished | None) -> str:
    """How many source models its numbers are from."""
    if finished is None:
        return "not run yet"
    return f"{finished.seeds} source training{'s' if finished.seeds > 1 else ''}"


def _provenance(found: Mapping[str, Finished]) -> str:
    content = {
        name: {
            run: {
                "config": results.config,
                "provenance": asdict(results.provenance),
                "summary": [asdict(row) for row in results.summary],
            }
            for run, results in finished.results.items()
        }
        for name, finished in found.items()
    }
    return json.dumps(strict(content), ensure_ascii=False) + "\n"
