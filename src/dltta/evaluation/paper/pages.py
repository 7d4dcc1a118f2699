"""9 report. The reproduced tables and figures as pages, from the results of finished runs.

FOLDER/
  index.md                what there is, and what a reader must know first
  NAME.md NAME.csv        one table or figure each, ours beside the published numbers
  NAME.png                of figures
  provenance.json         of every run: configuration, code, data, machine, summary
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dltta.errors import DataError
from dltta.evaluation.paper.published import Published, comparison_csv, comparison_markdown
from dltta.evaluation.paper.reproduce import REPRODUCTIONS, Runs, Setup, make_table, runs_of
from dltta.evaluation.results import Results, strict
from dltta.files import write_atomically

NOT_AT_HAND = (
    "The published data were not at hand: our numbers are from synthetic scanners at reduced size and do not compare "
    "with the published ones beside them; they show how the methods behave."
)
AT_HAND = "Our numbers are from the published data."


def write_pages(names: Sequence[str], setup: Setup, folder: Path) -> list[Path]:
    """A page for each name, an index of them, and where their numbers come from; the files written, the index first."""
    found = {name: Finished.load(name, setup) for name in names}
    pages: dict[str, bytes | str] = {"index.md": _index(found, setup)}
    for name, finished in found.items():
        pages |= finished.files(name, setup)
    pages["provenance.json"] = _provenance(found)
    for file, content in pages.items():
        write_atomically(folder / file, content)
    return [folder / file for file in pages]


@dataclass(frozen=True)
class Finished:
    """What one name left behind."""

    caption: str
    table: str  # Markdown
    rows: str  # CSV
    figure: bytes | None
    results: Mapping[str, Results]

    @classmethod
    def load(cls, name: str, setup: Setup) -> "Finished":
        """Tables are made again from results.json; of figures, what was drawn is taken."""
        runs, reproduction = runs_of(name, setup), REPRODUCTIONS[name]
        results, caption = load_results(name, runs), Published.load(reproduction.numbers or name).caption
        if reproduction.draw is None:
            table = make_table(name, setup, runs, results)
            return cls(caption, comparison_markdown(table), comparison_csv(table), None, results)
        drawn = [setup.folder(name) / file for file in ("table.md", "table.csv", "figure.png")]
        if missing := [str(file) for file in drawn if not file.is_file()]:
            raise DataError(f"there is no {missing[0]}; run `dltta reproduce {name}` first")
        return cls(caption, drawn[0].read_text("utf-8"), drawn[1].read_text("utf-8"), drawn[2].read_bytes(), results)

    def files(self, name: str, setup: Setup) -> dict[str, bytes | str]:
        command = (
            f"dltta reproduce {name} {'--phantom' if setup.data is None else '--data FOLDER'} --seeds {setup.seeds}"
        )
        figure = f"\n![{self.caption}]({name}.png)\n" if self.figure is not None else ""
        page = f"# {self.caption}\n\n{_first(setup)}\n\n```bash\n{command}\n```\n\n{self.table}{figure}"
        drawn: dict[str, bytes | str] = {} if self.figure is None else {f"{name}.png": self.figure}
        return {f"{name}.md": page, f"{name}.csv": self.rows, **drawn}


def load_results(name: str, runs: Runs) -> dict[str, Results]:
    """The results of every run; one that may diverge, and has none, did."""
    files = {run: Path(experiment.output) / "results.json" for run, experiment in runs.experiments.items()}
    missing = [run for run, file in files.items() if not file.is_file()]
    if lacking := [run for run in missing if run not in runs.may_diverge]:
        raise DataError(f"there is no {files[lacking[0]]}; run `dltta reproduce {name}` first")
    return {run: Results.load(file) for run, file in files.items() if run not in missing}


def _first(setup: Setup) -> str:
    return NOT_AT_HAND if setup.data is None else AT_HAND


def _index(found: Mapping[str, Finished], setup: Setup) -> str:
    lines = [f"- [{name}]({name}.md): {finished.caption}" for name, finished in found.items()]
    return (
        f"# The paper's tables and figures, reproduced\n\n{_first(setup)}\n\n"
        "Every number of ours is from `results.json` of the command on its page (`provenance.json` has settings, code, "
        "data and machine); published ones are as printed.\n\n" + "\n".join(lines) + "\n"
    )


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
    return json.dumps(strict(content), indent=1, ensure_ascii=False) + "\n"
