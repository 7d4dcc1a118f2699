"""The paper's tables and figures, ours beside the published numbers: what `dltta reproduce` runs.

ROOT/
  work/TASK/…             models and streams that all names of a task share; never trained or run twice
  NAME/RUN/…              results.json, tables and report of each experiment
  NAME/table.md table.tex table.csv
  NAME/figure.png         for figures; figure-loss and figure-rates also have curves.json
Names end in `-phantom` on synthetic scanners.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dltta.config import make_uda
from dltta.errors import NonFiniteError, SettingError, require
from dltta.evaluation.bench import run_experiment
from dltta.evaluation.demo import NOTES
from dltta.evaluation.experiment import Experiment
from dltta.evaluation.listener import Listener
from dltta.evaluation.paper import drawings, needs, tasks
from dltta.evaluation.paper.drawings import Drawing, Files
from dltta.evaluation.paper.needs import Runs
from dltta.evaluation.paper.published import (
    Comparison,
    ComparisonCell,
    ComparisonRow,
    Number,
    Published,
    compare,
    comparison_csv,
    comparison_latex,
    comparison_markdown,
)
from dltta.evaluation.paper.tasks import PAPER_METHODS, TASKS, Bed, Setup
from dltta.evaluation.results import Results
from dltta.evaluation.runners import Runner
from dltta.evaluation.tables import NAMES as METHOD_NAMES
from dltta.evaluation.tracking import Tracker
from dltta.files import write_atomically

ALIASES = {"camelyon17": "histology"}


@dataclass(frozen=True)
class Reproduction:
    """One table or figure of the paper. `numbers` names the published file when it is another one's."""

    bed: Bed
    runs: Callable[[Experiment, Setup], Runs]
    draw: Callable[[Drawing], tuple[Files, Comparison]] | None = None
    numbers: str | None = None


REPRODUCTIONS: dict[str, Reproduction] = {
    "oct": Reproduction("oct", needs.oct),
    "histology": Reproduction("histology", needs.histology),
    "prostate": Reproduction("prostate", needs.prostate),
    "initial-rates": Reproduction("oct", needs.initial_rates),
    "orders": Reproduction("oct", needs.orders),
    "image-specific": Reproduction("oct", needs.image_specific),
    "steps": Reproduction("oct", needs.steps),
    "retrieval-size": Reproduction("oct", needs.retrieval_size),
    "similarity": Reproduction("oct", needs.similarity),
    "figure-rates": Reproduction("oct", needs.tent, drawings.draw_rates),
    "figure-segmentation": Reproduction("oct", needs.static_rates, drawings.draw_segmentation),
    "figure-loss": Reproduction("oct", needs.tent, drawings.draw_loss),
    "figure-retrieval": Reproduction("oct", needs.retrieval_size, drawings.draw_retrieval, "retrieval-size"),
}


def chosen(name: str) -> list[str]:
    """The names that one argument stands for."""
    require("table or figure", name, (*REPRODUCTIONS, *ALIASES, "all"))
    return list(REPRODUCTIONS) if name == "all" else [ALIASES.get(name, name)]


def runs_of(name: str, setup: Setup) -> Runs:
    """The experiments of one name, each with its own folder for results and the task's folder for work."""
    reproduction = REPRODUCTIONS[name]
    base = tasks.base_experiment(reproduction.bed, setup)
    if name not in TASKS:  # the paper's comparison of all methods
        base = replace(base, methods=tuple(method for method in base.methods if method in PAPER_METHODS), uda={})
    runs = reproduction.runs(base, setup)
    experiments = {
        run: replace(experiment, output=str(setup.folder(name) / run)) for run, experiment in runs.experiments.items()
    }
    return replace(runs, experiments=experiments)


def check(name: str, setup: Setup) -> Runs:
    """The experiments of one name, once all that can be wrong before they run has been looked at."""
    for file, network in ((setup.weights, "densenet121"), (setup.vgg, "vgg19")):
        if file is not None and not file.is_file():
            raise SettingError(f"there is no file {file}; give torchvision's state dict of {network}")
    runs = runs_of(name, setup)
    tasks.require_data(REPRODUCTIONS[name].bed, setup)
    return runs


def reproduce(
    name: str,
    setup: Setup,
    *,
    device: str = "cpu",
    runner: Runner | None = None,
    listener: Listener | None = None,
    tracker: Tracker | None = None,
) -> list[Path]:
    """Run what one table or figure needs and write it; the files written, the table in Markdown first."""
    reproduction = REPRODUCTIONS[name]
    runs = check(name, setup)
    said = tasks.about(reproduction.bed, setup)
    notes = (said, *NOTES) if setup.data is None else (said,)
    results = {}
    for run, experiment in runs.experiments.items():
        try:
            results[run] = run_experiment(
                experiment, device=device, runner=runner, listener=listener, tracker=tracker, notes=notes
            )
        except NonFiniteError:
            if run not in runs.may_diverge:
                raise
    drawn_on = device if runner is None or runner.here(1) else "cpu"  # workers may have what this machine has not
    return write_reproduction(name, setup, runs, results, drawn_on)


def write_reproduction(
    name: str, setup: Setup, runs: Runs, results: Mapping[str, Results], device: str = "cpu"
) -> list[Path]:
    """The table or figure of one name from finished runs."""
    reproduction = REPRODUCTIONS[name]
    if reproduction.draw is None:
        return _write(setup.folder(name), make_table(name, setup, runs, results), {})
    published, said = Published.load(reproduction.numbers or name), tasks.about(reproduction.bed, setup)
    files, table = reproduction.draw(Drawing(published, runs, results, said, device))
    return _write(setup.folder(name), table, files)


def make_table(name: str, setup: Setup, runs: Runs, results: Mapping[str, Results]) -> Comparison:
    """The table of one name, ours beside the published numbers."""
    published, said = Published.load(name), tasks.about(REPRODUCTIONS[name].bed, setup)
    diverged = runs.may_diverge - results.keys()
    table = compare(published, runs.places, results, said, derived=runs.derived, diverged=diverged)
    table = replace(table, notes=(*table.notes, *_reductions(runs)))
    return _with_cost(table, runs) if runs.cost else table


def _with_cost(table: Comparison, runs: Runs) -> Comparison:
    """With a last row: what each column costs, as passes of the network, against one update per image."""
    costs = {
        column: step_cost(runs.experiments[place.run].adaptation.steps or 1) for column, place in runs.places.items()
    }
    row = ComparisonRow("Cost, x one update", "", "", tuple(ComparisonCell(Number(cost)) for cost in costs.values()))
    note = "Cost: n updates take n + 1 forward and n backward passes; a backward pass counts as two forward ones."
    return replace(table, rows=(*table.rows, row), notes=(*table.notes, note))


def step_cost(updates: int) -> float:
    """Passes of the network for so many updates of one image, against one update: 2 forward and 1 backward."""
    return (updates + 1 + 2 * updates) / 4


def _reductions(runs: Runs) -> list[str]:
    """What methods that learn with target images were given instead of their defaults; a line for each."""
    settings = {method: given for run in runs.experiments.values() for method, given in run.uda.items()}
    lines = []
    for method, given in settings.items():
        usual = asdict(make_uda(method))
        changed = ", ".join(f"{name} {value} (usually {usual[name]})" for name, value in given.items())
        lines.append(f"{METHOD_NAMES[method]}: {changed}.")
    return lines


def _write(folder: Path, table: Comparison, files: Files) -> list[Path]:
    tables: Files = {
        "table.md": comparison_markdown(table),
        "table.tex": comparison_latex(table),
        "table.csv": comparison_csv(table),
    }
    for name, content in (tables | files).items():
        write_atomically(folder / name, content)
    return [folder / name for name in tables | files]
