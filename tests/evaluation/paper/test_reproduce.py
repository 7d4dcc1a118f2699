"""The paper's tables and figures: published numbers as printed, our own from results, and both in one table."""

import io
import json
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from PIL import Image as Pillow

import dltta.data.datasets.prostate
import dltta.evaluation.paper.needs
import dltta.evaluation.paper.reproduce
import dltta.evaluation.paper.tasks
from commands import typed
from dltta.config import default_preprocessing, open_dataset
from dltta.core.objectives import Tent
from dltta.data.case import Case
from dltta.data.datasets.camelyon17 import PUBLISHED_SIZES
from dltta.data.datasets.oct import CIRRUS_SPACING, LAYERS, SPECTRALIS_SPLIT
from dltta.data.preprocessing import Preprocessing
from dltta.errors import DataError, NonFiniteError, SettingError
from dltta.evaluation.experiment import Experiment
from dltta.evaluation.paper.drawings import Spread
from dltta.evaluation.paper.pages import for_page, write_pages
from dltta.evaluation.paper.published import (
    RATE,
    Derived,
    Number,
    Place,
    Published,
    PublishedRow,
    compare,
    comparison_csv,
    comparison_latex,
    comparison_markdown,
)
from dltta.evaluation.paper.reproduce import REPRODUCTIONS, chosen, reproduce, runs_of, step_cost
from dltta.evaluation.paper.tasks import (
    ON_PHANTOMS,
    ON_PUBLISHED_DATA,
    PAPER_METHODS,
    WITH_TARGET,
    Setup,
    about,
    base_experiment,
)
from dltta.evaluation.results import Results
from dltta.recipes import Recipe
from dltta.training import TrainingSettings
from dltta.training.examples import split_by_group
from evaluation.small_results import results, stream

NAMES = list(REPRODUCTIONS)


def printed(name, row, column, rate=None):
    """A published number by row and column; DLTTA rows by the method they extend."""
    table = Published.load(name)
    rows = [each for each in table.rows if each.method == row and rate in (None, each.rate)]
    assert len(rows) == 1
    return rows[0].values[table.columns.index(column)]


@pytest.mark.parametrize(
    ("name", "row", "rate", "column", "mean", "sd"),
    [  # copied by hand from the paper
        ("oct", "tent", "fixed", "Average", 81.50, 0.15),
        ("oct", "atta", "dynamic", "RPE", 85.56, 0.03),
        ("oct", "source", "none", "RNFL", 64.61, 0.08),
        ("oct", "uda-st", "none", "OPL", 64.40, 0.06),
        ("oct", "cyclegan", "none", "GCIP", 86.49, 0.10),
        ("oct", "udas", "none", "RPE", 83.89, 0.24),
        ("histology", "tent", "fixed", "B Specificity", 88.86, 0.76),
        ("histology", "source", "none", "A Accuracy", 63.15, 2.21),
        ("histology", "uda-swav", "none", "B AUC", 95.24, 2.31),
        ("histology", "atta", "dynamic", "B F1", 89.73, 1.34),
        ("prostate", "atta", "fixed", "E", 68.06, 2.28),
        ("prostate", "udas", "none", "F", 86.58, 1.94),
        ("prostate", "ttt", "dynamic", "Average", 76.44, 2.44),
        ("initial-rates", "tent", "dynamic", "4e-3", 82.46, None),
        ("orders", "ttt", "fixed", "Order B", 79.56, None),
        ("image-specific", "tent", "fixed", "Image-specific", 81.23, None),
        ("image-specific", "atta", "dynamic", "Image-continual", 83.41, None),
        ("steps", "atta", "dynamic", "8", 83.23, None),
        ("retrieval-size", "tent", "dynamic", "D = 8", 82.63, 0.06),
        ("similarity", "ttt", "dynamic", "L2", 80.54, 0.11),
    ],
)
def test_published_numbers_are_those_of_the_paper(name, row, rate, column, mean, sd):
    found = printed(name, row, column, rate)
    assert found.mean == mean
    assert (found.sd == sd) if sd is not None else np.isnan(found.sd)


SUMS = {  # of the printed tables, in hundredths: means of each row, means of each column, sds of each row
    "oct": (
        [66614, 70523, 73340, 73037, 73943, 71771, 72488, 73347, 74378, 74270, 75073],
        [80854, 91388, 82983, 71693, 96515, 96558, 97502, 92540, 88751],
        [35, 103, 46, 47, 113, 107, 100, 113, 56, 41, 47],
    ),
    "histology": (
        [70428, 86600, 91428, 88368, 89427, 90889, 91534, 89963, 91378],
        [78014, 78651, 77365, 83745, 77593, 78517, 78545, 77311, 82939, 77335],
        [2112, 722, 1696, 484, 515, 655, 133, 1554, 1432],
    ),
    "prostate": (
        [43712, 44498, 46269, 44863, 45858, 45107, 46380, 46172, 46850],
        [73409, 67216, 67706, 57912, 75183, 68283],
        [1713, 1599, 1078, 1603, 1464, 1502, 1774, 1693, 1512],
    ),
    "initial-rates": ([39973, 40418, 40694, 41220, 41311, 41710], [49033, 49140, 49222, 48975, 48956], [0] * 6),
    "orders": ([39848, 40264, 40754, 41294, 41222, 41683], [49033, 49005, 49001, 49012, 49014], [0] * 6),
    "steps": ([24190, 24739, 25009], [24658, 24655, 24625], [0] * 3),
    "image-specific": ([15615, 15737, 16273, 16442, 16435, 16597], [48066, 49033], [0] * 6),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_slip_in_any_published_number_shows_in_the_sums_of_the_printed_table(name):
    cells = [row.values for row in Published.load(name).rows]
    means = np.array([[round(100 * number.mean) for number in row] for row in cells])
    sds = np.array([[0 if np.isnan(number.sd) else round(100 * number.sd) for number in row] for row in cells])
    assert (means.sum(1).tolist(), means.sum(0).tolist(), sds.sum(1).tolist()) == SUMS[name]


@pytest.mark.parametrize("name", ["retrieval-size", "similarity"])
def test_numbers_that_another_table_prints_are_the_same_there(name):
    """The figure and the section print none: those that stand beside ours are the averages of the first table."""
    average = Published.load("oct").columns.index("Average")
    table = {(row.method, row.rate): row.values[average] for row in Published.load("oct").rows}
    shown = Published.load(name)
    for row in shown.rows:
        for column, number in zip(shown.columns, row.values, strict=True):
            rate = {"fixed rate": "fixed", "D = 8": "dynamic", "L2": "dynamic"}.get(column)
            assert number == (None if rate is None else table[row.method, rate])


def test_published_tables_are_whole_and_marked_as_published():
    sizes = {"oct": (11, 9), "histology": (9, 10), "prostate": (9, 6), "initial-rates": (6, 5), "orders": (6, 5)}
    sizes |= {"image-specific": (6, 2), "steps": (3, 3), "retrieval-size": (3, 6), "similarity": (3, 2)}
    for name, (rows, columns) in sizes.items():
        table = Published.load(name)
        assert (len(table.rows), len(table.columns)) == (rows, columns)
        assert all(len(row.values) == columns for row in table.rows)
        assert "DLTTA" in table.paper
        assert "tab:" in table.where
    folder = Path(dltta.evaluation.paper.reproduce.__file__).parent / "tables"
    assert all(json.loads(file.read_text())["published"] is True for file in folder.iterdir())


def test_the_papers_averages_agree_with_its_own_columns():
    """A slip in one number of a row would show here; the paper rounds, and two averages are off by up to 0.35."""
    for name, last in (("oct", 8), ("prostate", 5)):
        for row in Published.load(name).rows:
            mean = sum(value.mean for value in row.values[:last]) / last
            assert row.values[last].mean == pytest.approx(mean, abs=0.35), (name, row.name)


# ---- tables

PAPER = Published(
    "A paper", "tab:small", "Dice", ("One", "Both"), ("It says so.",),
    (
        PublishedRow("W/o", "source", "none", (Number(50.0, 0.5), Number(51.25))),
        PublishedRow("GAN", "cyclegan", "none", (Number(70.0), None)),
        PublishedRow("DLTTA", "tent", "dynamic", (Number(60.0, 1.0), Number(61.0, 0.25))),
    ),
)  # fmt: skip
PLACES = {"One": Place("run", "dice", ("B",)), "Both": Place("run", "dice", ("B", "C"))}


def small():
    """Source 0.5 at B and 0.7 at C; Tent 0.6 and 0.64 at B with two seeds, 0.8 at C with the first seed only."""
    return results(
        stream("source", "none", [0.9], target="A"),
        stream("source", "none", [0.4, 0.6]),
        stream("source", "none", [0.7], target="C"),
        stream("tent", "dynamic", [0.6]),
        stream("tent", "dynamic", [0.64], seed=1),
        stream("tent", "dynamic", [0.8], target="C"),
    )


def comparison():
    return compare(PAPER, PLACES, {"run": small()}, "About.")


def test_markdown_has_ours_beside_the_published_number():
    assert comparison_markdown(comparison()) == (
        "**Dice**\n\nAbout.\n\n"
        "| Method | One, ours | One, published | Both, ours | Both, published |\n|:--|--:|--:|--:|--:|\n"
        "| Source (W/o) | 50.00 | 50.00 ± 0.50 | 60.00 | 51.25 |\n"
        "| CycleGAN (GAN) | not run | 70.00 | not run | – |\n"
        "| Tent + dynamic (DLTTA) | 62.00 ± 2.83 | 60.00 ± 1.00 | 70.00 | 61.00 ± 0.25 |\n\n"
        "Published: tab:small in A paper.  \nIt says so.  \nOurs: mean ± sd over 2 source trainings; points.  \n"
        "Ours, images of each target: B 2, C 1.  \n"
    )


def test_latex_and_csv_have_the_same_numbers():
    assert comparison_latex(comparison()) == (
        "% Dice\n% About.\n\\begin{tabular}{lrrrr}\n\\toprule\n"
        "Method & \\multicolumn{2}{c}{One} & \\multicolumn{2}{c}{Both} \\\\\n"
        " & ours & published & ours & published \\\\\n\\midrule\n"
        "Source (W/o) & 50.00 & 50.00 $\\pm$ 0.50 & 60.00 & 51.25 \\\\\n"
        "CycleGAN (GAN) & not run & 70.00 & not run & -- \\\\\n"
        "Tent + dynamic (DLTTA) & 62.00 $\\pm$ 2.83 & 60.00 $\\pm$ 1.00 & 70.00 & 61.00 $\\pm$ 0.25 \\\\\n"
        "\\bottomrule\n\\end{tabular}\n% Published: tab:small in A paper.\n% It says so.\n"
        "% Ours: mean ± sd over 2 source trainings; points.\n% Ours, images of each target: B 2, C 1.\n"
    )
    assert comparison_csv(comparison()) == (
        "row,method,rate,column,ours mean,ours sd,published mean,published sd,quoted from,about\n"
        "Source (W/o),source,none,One,50,,50,0.5,,About.\nSource (W/o),source,none,Both,60,,51.25,,,About.\n"
        "CycleGAN (GAN),cyclegan,none,One,,,70,,,About.\nCycleGAN (GAN),cyclegan,none,Both,,,,,,About.\n"
        "Tent + dynamic (DLTTA),tent,dynamic,One,62,2.82843,60,1,,About.\n"
        "Tent + dynamic (DLTTA),tent,dynamic,Both,70,,61,0.25,,About.\n"
    )


def test_runs_of_fewer_trainings_than_others_are_not_passed_over():
    places = {"One": PLACES["One"], "Both": replace(PLACES["Both"], run="other")}
    single = results(stream("tent", "dynamic", [0.6]))
    notes = compare(PAPER, places, {"run": small(), "other": single}, "").notes
    assert "Ours: mean ± sd over 1 or 2 source trainings; points." in notes
    assert "Ours: one source training, so no sd; points." in compare(PAPER, PLACES, {"run": single}, "").notes


def test_the_papers_tables_say_how_their_networks_were_trained():
    known = {"trained_with": {"source": ["task"], "ttt": ["task", "rotation"]}}
    source = "Source: trained with the task loss alone."
    joint = "TTT starts from another network, trained with the task and rotation losses."
    ttt = replace(PAPER, rows=(*PAPER.rows, replace(PAPER.rows[2], method="ttt")))
    shown = replace(results(*small().streams, stream("ttt", "dynamic", [0.6])), config=known)
    notes = compare(ttt, PLACES, {"run": shown, "again": shown}, "").notes
    assert (notes.count(source), notes.count(joint)) == (1, 1)
    assert joint not in compare(ttt, PLACES, {"run": replace(small(), config=known)}, "").notes  # TTT was not run


def test_an_order_and_another_rate_can_be_asked_for():
    first = stream("tent", "dynamic", [0.5])
    both = {"run": results(first, replace(first, order=1, metrics={"dice": 0.7}), stream("tent", "fixed", [0.2]))}
    places = {"One": replace(PLACES["One"], order=1), "Both": replace(PLACES["One"], rate="fixed")}
    row = compare(PAPER, places, both, "").rows[2]
    assert [cell.ours.mean for cell in row.cells] == pytest.approx([70, 20])


def test_numbers_that_the_paper_quotes_are_marked_with_their_origin():
    quoted = replace(
        PAPER, rows=(replace(PAPER.rows[1], values=(Number(70.0, quoted="X & Y 2021"), None)), *PAPER.rows[2:])
    )
    table = compare(quoted, PLACES, {"run": small()}, "About.")
    assert "| CycleGAN (GAN) | not run | 70.00 § | not run | – |" in comparison_markdown(table)
    assert "§ quoted by the paper from X & Y 2021; not run by its authors." in comparison_markdown(table)
    assert r"CycleGAN (GAN) & not run & 70.00 \S & not run & --" in comparison_latex(table)
    assert "CycleGAN (GAN),cyclegan,none,One,,,70,,X & Y 2021,About." in comparison_csv(table)
    assert "§" not in comparison_markdown(comparison())


@pytest.mark.parametrize(
    ("name", "method", "rate", "columns", "origin"),
    [  # the paper: "The results of ATTA, UDA-ST on OCT images and … of UDA-SwAV on … dataset A are directly referenced"
        ("oct", "atta", "fixed", set(Published.load("oct").columns), "He et al."),
        ("oct", "uda-st", "none", set(Published.load("oct").columns), "He et al."),
        (
            "histology",
            "uda-swav",
            "none",
            {f"A {m}" for m in ("Accuracy", "Sensitivity", "Specificity", "AUC", "F1")},
            "Sagawa",
        ),
        # the same 82.50 again: the other rates and orders, and image-specific ATTA, the paper ran itself
        ("initial-rates", "atta", "fixed", {"1e-3"}, "He et al."),
        ("orders", "atta", "fixed", {"Order A"}, "He et al."),
        ("image-specific", "atta", "fixed", {"Image-continual"}, "He et al."),
        ("retrieval-size", "atta", "dynamic", {"fixed rate"}, "He et al."),
    ],
)
def test_what_the_paper_quotes(name, method, rate, columns, origin):
    table = Published.load(name)
    marked = {
        (row.method, row.rate): {c for c, v in zip(table.columns, row.values, strict=True) if v and v.quoted}
        for row in table.rows
    }
    assert marked[method, rate] == columns
    others = {("atta", "fixed"), ("uda-st", "none")} if name == "oct" else {(method, rate)}
    assert {found for found in marked if marked[found]} <= others
    numbers = [value for row in table.rows if row.method == method for value in row.values if value]
    assert all(value.quoted is None or origin in value.quoted for value in numbers)
    average = printed("oct", "atta", "Average", "fixed").mean
    assert name in ("oct", "histology") or [v.mean for v in numbers if v.quoted] == [average]


def test_columns_of_our_own_and_derived_ones_stand_behind_the_papers():
    places = {**PLACES, "Rate": replace(PLACES["One"], metric=RATE)}
    gap = Derived("Gap", ("One", "Both"), lambda means: abs(means[0] - means[1]))
    table = compare(PAPER, places, {"run": small()}, "", derived=[gap])
    assert table.columns == ("One", "Both", "Rate", "Gap")
    lines = comparison_markdown(table).splitlines()
    assert lines[4] == (
        "| Method | One, ours | One, published | Both, ours | Both, published "
        "| Rate, ours | Gap, ours | Gap, published |"
    )
    assert lines[6].endswith("| 1.00 | 10.00 | 1.25 |")  # every case of `stream` has rate 1e-3; |50 − 60|, |50 − 51.25|
    assert lines[7].endswith("| not run | not run | – |")
    heads = comparison_latex(table).splitlines()[4:6]
    assert heads[0].count("multicolumn{2}") == 3
    assert heads[1].count("ours") == 4


def test_the_mean_rate_is_that_of_images_with_a_discrepancy():
    """A fixed rate has none, so all its images count; while the memory fills, the rate says nothing of Eq. (6)."""
    first = stream("tent", "dynamic", [0.5, 0.5, 0.5])
    filling, *others = first.cases
    rates = (replace(filling, discrepancy=None, rate=9e-3), *(replace(case, rate=2e-3) for case in others))
    place = {"One": replace(PLACES["One"], metric=RATE)}
    row = compare(PAPER, place, {"run": results(replace(first, cases=rates))}, "").rows[2]
    assert row.cells[0].ours.mean == pytest.approx(2.0)
    fixed = tuple(replace(case, discrepancy=None) for case in rates)
    row = compare(PAPER, place, {"run": results(replace(first, cases=fixed))}, "").rows[2]
    assert row.cells[0].ours.mean == pytest.approx((9 + 2 + 2) / 3)


def test_a_run_that_diverged_is_said_to_have():
    place = Place("sum", "dice", ("B",), by_method=True)
    found = compare(PAPER, {"One": place}, {}, "", diverged={"sum-tent"})
    assert [row.cells[0].instead for row in found.rows] == ["–", "–", "diverged"]  # a fixed rate has no discrepancy
    assert compare(PAPER, {"One": place}, {}, "").rows[2].cells[0].instead == "not run"
    assert found.rows[2].cells[0].published == Number(60.0, 1.0)
    there = compare(PAPER, {"One": place}, {"sum-tent": small()}, "")
    assert there.rows[2].cells[0].ours.mean == pytest.approx(62)


# ---- names


@pytest.mark.parametrize("data", [None, Path("data")])
@pytest.mark.parametrize("name", NAMES)
def test_every_name_knows_its_experiments_and_a_place_for_each_published_column(name, data, tmp_path):
    setup = Setup(tmp_path, data, seeds=3)
    runs = runs_of(name, setup)
    assert all(place.run in runs.experiments for place in runs.places.values() if not place.by_method)
    assert len({experiment.output for experiment in runs.experiments.values()}) == len(runs.experiments)
    assert len({experiment.work for experiment in runs.experiments.values()}) == 1
    for experiment in runs.experiments.values():
        assert experiment.seeds == 3
        assert all(spec.startswith("phantom:") == (data is None) for spec in (*experiment.source, *experiment.targets))
    published = Published.load(REPRODUCTIONS[name].numbers or name)
    assert set(published.columns) <= set(runs.places)
    for row in published.rows:
        for place in runs.places.values():
            if place.by_method and row.rate != "dynamic":
                continue
            experiment = runs.experiments[place.run_of(row.method)]
            wanted = {(row.method, place.rate or row.rate)}
            assert wanted <= {(job.method, job.rate) for job in experiment.jobs()}


def test_the_papers_settings_on_the_papers_data(tmp_path):
    setup = Setup(tmp_path, Path("data"), seeds=3)
    for bed, (batch, kept, neighbors, alpha) in {
        "oct": (1, 20, 8, 1e-3), "histology": (200, 4, 12, 3e-4), "prostate": (1, 20, 8, 1e-3),
    }.items():  # fmt: skip
        base = base_experiment(bed, setup)
        found = base.adaptation
        assert (found.batch_size, found.batches_kept, found.neighbors, found.alpha) == (batch, kept, neighbors, alpha)
        assert (found.steps, found.mode, found.optimizer, found.distance) == (1, "continual", "sgd", "l2")
        assert (base.training.epochs, base.training.with_, base.uda) == (100, ("ttt", "atta"), {})
        assert (base.training.learning_rate, base.training.loss) == (None, "ce")  # the paper's for the task
        assert (base.training.autoencoder_epochs, base.training.autoencoder_width) == (20, 64)  # ATTA's
        assert (base.network, base.network_options, base.size) == (None, {}, None)  # the paper's for the task
        assert (base.rates, found.predict, found.ready, found.positions) == (
            ("fixed", "dynamic"),
            "after",
            "full",
            "mean",
        )
        assert (found.statistics, found.guard, found.prefill) == ("batch", False, False)
        assert base.methods == (*PAPER_METHODS, *WITH_TARGET[bed])
    assert base_experiment("oct", replace(setup, test_time_only=True)).methods == PAPER_METHODS
    assert base_experiment("oct", setup).source == ("oct:spectralis:train+val@data",)
    assert base_experiment("oct", setup).training.validation == ("hc09", "ms13", "ms14")
    assert base_experiment("oct", setup).in_domain == "oct:spectralis:test@data"  # 980 slices that nobody trains on
    assert base_experiment("oct", setup).targets == ("oct:cirrus@data",)
    assert base_experiment("prostate", setup).training.patch == (80, 80, 80)
    assert base_experiment("prostate", setup).source == ("prostate:A@data",)
    assert base_experiment("histology", setup).training.validation == 0.0  # all 302,436 patches are trained on


def test_what_reproduce_md_says_of_source_training(tmp_path):
    """Ours, where the paper says nothing: batches, augmentation, a constant rate."""
    setup = Setup(tmp_path, Path("data"))
    for bed, batch in {"oct": 8, "histology": 32, "prostate": 4}.items():
        found = base_experiment(bed, setup).training
        assert (found.batch_size, found.augmentation, found.schedule) == (batch, "light", "constant")
        assert found.autoencoder_batch == 2
    assert base_experiment("prostate", setup).training.validation == 0.2


def test_imagenet_weights_reach_the_network(tmp_path):
    file = tmp_path / "densenet121.pth"
    plain, given = (base_experiment("histology", Setup(tmp_path, Path("data"), weights=w)) for w in (None, file))
    assert (plain.network_options, given.network_options) == ({}, {"weights": str(file)})
    assert plain.work != given.work


@pytest.mark.parametrize(("where", "seeds"), [(("--phantom",), 1), (("--data", "folder"), 3)])
def test_what_is_typed_is_what_is_run(monkeypatch, capsys, tmp_path, where, seeds):
    asked = []

    def stop(name, setup):
        asked.append((name, setup))
        raise SettingError("enough")

    monkeypatch.setattr(dltta.evaluation.paper.reproduce, "check", stop)
    options = ("--weights", "w.pth", "--vgg", "v.pth", "--epochs", "7", "--seed", "5", "--test-time-only")
    code, _, err = typed(monkeypatch, capsys, "reproduce", "oct", *where, *options, "-o", tmp_path)
    assert (code, "enough" in err) == (2, True)
    data = None if seeds == 1 else Path("folder")
    expected = Setup(tmp_path, data, seeds, 5, epochs=7, weights=Path("w.pth"), vgg=Path("v.pth"), test_time_only=True)
    assert asked == [("oct", expected)]


def test_which_hospitals_are_seen_and_which_are_a_and_b(tmp_path):
    """34,904 patches are those of center 1 (A), 85,054 those of center 2 (B); the network knows centers 0, 3 and 4."""
    setup = Setup(tmp_path, Path("data"))
    base = base_experiment("histology", setup)
    assert base.source == ("camelyon17:train@data",)
    assert base.targets == ("camelyon17:center_1@data", "camelyon17:center_2@data")
    assert base.in_domain == "camelyon17:id_val@data"  # the source hospitals' patches that nobody trains on
    assert (PUBLISHED_SIZES["val"], PUBLISHED_SIZES["test"]) == (34_904, 85_054)
    for each, (a, b) in ((setup, ("center_1", "center_2")), (Setup(tmp_path), ("hospital_1", "hospital_2"))):
        places = runs_of("histology", each).places
        assert {place.targets for column, place in places.items() if column.startswith("A ")} == {(a,)}
        assert {place.targets for column, place in places.items() if column.startswith("B ")} == {(b,)}


def test_synthetic_histology_learns_from_three_hospitals_and_is_scored_on_others_of_their_patches(tmp_path):
    base = base_experiment("histology", Setup(tmp_path))
    assert [spec.split(":")[2] for spec in base.source] == ["hospital_0", "hospital_3", "hospital_4"]
    in_domain = open_dataset(base.in_domain)
    assert in_domain.site == "hospital_0+hospital_3+hospital_4"
    assert not {spec.split(":")[-1] for spec in base.source} & {
        spec.split(":")[-1] for spec in base.in_domain.split(",")
    }
    assert not {spec.split(":")[-1] for spec in base.source} & {spec.split(":")[-1] for spec in base.targets}


def test_vgg_weights_reach_uda_st_and_keep_its_models_apart(tmp_path):
    file = tmp_path / "vgg19.pth"
    file.touch()
    for data in (None, Path("data")):
        plain, given = (base_experiment("oct", Setup(tmp_path, data, vgg=vgg)) for vgg in (None, file))
        assert "vgg" not in plain.uda.get("uda-st", {})
        assert given.uda["uda-st"]["vgg"] == str(file)
        assert plain.work != given.work
        assert given.work.endswith("vgg19" if data else "vgg19-phantom")
    assert base_experiment("prostate", Setup(tmp_path, vgg=file)).uda.keys() == {"udas"}


def test_the_first_line_on_phantoms_says_what_is_smaller(tmp_path):
    setup = Setup(tmp_path)
    for bed, parts in {
        "oct": ("source images 40 (588 + 147)", "128 x 256 (128 x 1024)", "epochs 8 (100)",
                "training rate 3e-3 (1e-3)"),
        "histology": ("source images 480 (302,436)", "test batch 16 (200)", "network densenet_small (DenseNet-121",
                      "pairs in memory 64 (800)", "auto-encoder width 16 (64), auto-encoder epochs 3 (20)"),
        "prostate": ("source images 28 (30)", "images of each target 24 (30, 19, 13, 12 and 12)",
                     "pixels whole volumes of 48 x 48 x 32 (windows of 80 x 80 x 80)"),
    }.items():  # fmt: skip
        said = about(bed, setup)
        assert said.startswith(ON_PHANTOMS)
        assert "\n" not in said
        for part in parts:
            assert part in said, (part, said)
    assert "test batch" not in about("oct", setup)  # one image, as in the paper
    assert "memory" not in about("oct", setup)  # 20 pairs, as in the paper
    assert "hospitals" not in about("histology", setup)  # three, as in the paper
    assert about("oct", Setup(tmp_path, Path("data"))) == ON_PUBLISHED_DATA


def test_small_images_are_said_and_keep_their_models_apart(tmp_path):
    usual, small = Setup(tmp_path), Setup(tmp_path, small=True)
    assert "pixels 128 x 48 (128 x 1024), epochs 16 (100)" in about("oct", small)
    assert "whole volumes of 32 x 32 x 16 (windows of 80 x 80 x 80)" in about("prostate", small)
    for bed in ("oct", "prostate"):
        base = base_experiment(bed, small)
        assert base.work != base_experiment(bed, usual).work
        shapes = {open_dataset(spec)[0].image.shape for spec in (*base.source, *base.targets, base.in_domain)}
        assert len(shapes) == 1
    assert about("histology", small) == about("histology", usual)


def test_the_retinal_slices_are_split_as_in_the_paper(tmp_path):
    subjects = [subject for part in ("train", "val") for subject in SPECTRALIS_SPLIT[part]]
    image = torch.zeros(1, 1, 1)
    cases = [Case(f"{subject}_{n}", "spectralis", subject, image) for subject in subjects for n in range(49)]
    held = base_experiment("oct", Setup(tmp_path, Path("data"))).training.validation
    training, validation = split_by_group(cases, held, seed=3)
    assert (len(training), len(validation)) == (588, 147)
    assert {cases[i].group for i in validation} == set(SPECTRALIS_SPLIT["val"])


def test_what_each_ablation_changes(tmp_path):
    setup = Setup(tmp_path)

    def settings(name, what):
        return [getattr(each.adaptation, what) for each in runs_of(name, setup).experiments.values()]

    assert settings("initial-rates", "alpha") == [1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 1e-3, 1e-3, 1e-3]
    assert settings("initial-rates", "positions") == ["mean"] * 5 + ["sum"] * 3
    assert settings("retrieval-size", "neighbors") == [6, 8, 10, 12, 14, 20]
    assert settings("steps", "steps") == [1, 4, 8]
    assert settings("similarity", "distance") == ["l2", "cosine"]
    assert settings("image-specific", "mode") == ["image-specific", "continual"]
    assert settings("image-specific", "steps") == [10, 1]
    assert [each.orders for each in runs_of("orders", setup).experiments.values()] == [5]
    dashed = runs_of("retrieval-size", setup).places["fixed rate"]
    assert (dashed.run, dashed.rate) == ("neighbors-8", "fixed")
    letters = runs_of("prostate", setup).places
    assert {letter: place.targets for letter, place in letters.items()} == {
        "B": ("BMC",), "C": ("I2CVB",), "D": ("UCL",), "E": ("BIDMC",), "F": ("HK",),
        "Average": ("BMC", "I2CVB", "UCL", "BIDMC", "HK"),
    }  # fmt: skip


def test_the_papers_spread_over_orders_is_computed_from_its_numbers(tmp_path):
    runs = runs_of("orders", Setup(tmp_path))
    table = compare(Published.load("orders"), runs.places, {"orders": small()}, "", derived=runs.derived)
    spread = {(row.method, row.rate): row.cells[-1].published.mean for row in table.rows}
    assert max(value for (_, rate), value in spread.items() if rate == "dynamic") == pytest.approx(0.19)  # as it says
    assert spread["atta", "fixed"] == pytest.approx(0.18)


def test_the_difference_between_similarities_is_computed(tmp_path):
    runs = runs_of("similarity", Setup(tmp_path))
    found = {
        run: results(stream("tent", "dynamic", [score], target="cirrus"))
        for run, score in (("l2", 0.6), ("cosine", 0.64))
    }
    table = compare(Published.load("similarity"), runs.places, found, "", derived=runs.derived)
    row = next(row for row in table.rows if (row.method, row.rate) == ("tent", "dynamic"))
    assert table.columns[-1] == "Difference"
    assert row.cells[-1].ours.mean == pytest.approx(4.0)


def test_what_several_updates_cost():
    assert [step_cost(updates) for updates in (1, 4, 8, 10)] == [1.0, 3.25, 6.25, 7.75]


def test_names_and_aliases():
    assert chosen("camelyon17") == ["histology"]
    assert chosen("all") == NAMES
    with pytest.raises(SettingError, match="no table or figure 'ordres'; did you mean 'orders'"):
        chosen("ordres")


# ---- runs


def tiny(bed, setup):
    """Four images, one method, one epoch: every stage runs in a second."""
    return Experiment(
        source=("phantom:oct:spectralis:4",),
        targets=("phantom:oct:cirrus:4:1",),
        in_domain="phantom:oct:spectralis:1:2",
        output=str(setup.root),
        work=str(setup.folder("work/oct")),
        network_options={"width": 2},
        examples=4,
        methods=("source", "tent", "udas"),
        seeds=setup.seeds,
        uda={"udas": {"epochs": 1, "width": 2}},
        training=TrainingSettings(epochs=1, batch_size=2, validation=0.25),
        adaptation=Recipe(batches_kept=2, neighbors=2).resolved("segmentation", calibrated=False),
    )


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """One folder for all tests, so that the tiny model is trained once."""
    return tmp_path_factory.mktemp("reproduce")


@pytest.fixture
def small_base(monkeypatch, plain_report):
    monkeypatch.setattr(dltta.evaluation.paper.tasks, "base_experiment", tiny)


@pytest.fixture
def plain_report(monkeypatch):
    """Reports are tested elsewhere and take seconds to draw; here they are their notes."""
    monkeypatch.setattr(
        dltta.evaluation.outputs, "write_report", lambda path, *_, notes, **__: path.write_text("".join(notes))
    )


@pytest.mark.long
def test_a_table_is_made_from_results(work, small_base):
    files = reproduce("oct", Setup(work))
    assert [file.name for file in files] == ["table.md", "table.tex", "table.csv"]
    folder = work / "oct-phantom"
    text = files[0].read_text()
    assert text.count(ON_PHANTOMS) == 1
    assert "source images 4 (588 + 147)" in text
    found = Results.load(folder / "paper" / "results.json")
    tent = next(s for s in found.streams if (s.method, s.rate, s.target) == ("tent", "dynamic", "cirrus"))
    row = next(line for line in text.splitlines() if line.startswith("| Tent + dynamic"))
    cells = [cell.strip() for cell in row.split("|")][2:-1]
    for place, layer in enumerate(LAYERS):
        assert cells[2 * place] == f"{100 * tent.metrics[f'dice_{layer}']:.2f}"
    assert cells[-2:] == [f"{100 * tent.metrics['dice']:.2f}", "82.63 ± 0.06"]
    assert "| UDA-ST | not run | 77.30 ± 0.09 § |" in text
    udas = next(s for s in found.streams if s.method == "udas")
    assert f"| UDAS | {100 * udas.metrics['dice_RNFL']:.2f} | 78.62 ± 0.14 |" in text
    assert "UDAS was trained with labeled source images and all images of the target at once" in text
    assert "UDAS: epochs 1 (usually 50), width 2 (usually 64)." in text
    assert ON_PHANTOMS in (folder / "paper" / "report.html").read_text()


def test_names_share_models_and_streams(work, small_base, monkeypatch):
    reproduce("oct", Setup(work))
    ran, real = [], dltta.evaluation.stream_jobs.run_job
    monkeypatch.setattr(dltta.evaluation.stream_jobs, "run_job", lambda *job: (ran.append(job[1]), real(*job)))
    reproduce("similarity", Setup(work))
    assert [(job.method, job.rate) for job in ran] == [("tent", "dynamic")]
    assert len(list((work / "work").iterdir())) == 1


def test_the_loss_figure_plots_the_loss_of_the_stream_and_its_sd(work, small_base):
    files = {file.name: file for file in reproduce("figure-loss", Setup(work))}
    curves = json.loads(files["curves.json"].read_text())
    found = Results.load(work / "figure-loss-phantom" / "tent" / "results.json")
    for rate, label in (("fixed", "Tent"), ("dynamic", "Tent + dynamic")):
        rows = next(s for s in found.streams if (s.method, s.rate) == ("tent", rate)).cases
        assert curves[label]["means"] == pytest.approx([row.loss for row in rows], rel=1e-6)
        assert all(0 < sd < 2 for sd in curves[label]["sds"])
    assert is_drawn(files["figure.png"])
    assert f"| Tent | {np.mean(curves['Tent']['means']):.4f} |" in files["table.md"].read_text()


def test_the_band_of_the_loss_figure_is_the_sd_over_positions_by_hand():
    """One position is undecided, entropy ln 2, one certain, entropy 0: mean and sd are half of ln 2."""
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(2))
    watched = Spread(Tent())
    watched.prepare(model)
    logits = torch.tensor([[0.0, 90.0], [0.0, 0.0]]).view(1, 2, 1, 2)
    assert watched(model, logits, logits).item() == pytest.approx(np.log(2) / 2, abs=1e-6)
    assert (watched.means, watched.sds) == ([pytest.approx(np.log(2) / 2, abs=1e-6)],) * 2


def test_figure_one_follows_the_stream(work, small_base):
    files = {file.name: file for file in reproduce("figure-rates", Setup(work))}
    curves = json.loads(files["curves.json"].read_text())
    found = Results.load(work / "figure-rates-phantom" / "tent" / "results.json")
    for rate, label in (("fixed", "Tent"), ("dynamic", "Tent + dynamic")):
        rows = next(s for s in found.streams if (s.method, s.rate) == ("tent", rate)).cases
        assert curves[label]["rates"] == [row.rate for row in rows]
        assert curves[label]["discrepancies"] == [row.discrepancy for row in rows]
        assert curves[label]["dice"] == pytest.approx([100 * row.metrics["dice"] for row in rows])
    assert is_drawn(files["figure.png"])
    rates = [1000 * row.rate for row in rows if row.discrepancy is not None]
    line = next(line for line in files["table.md"].read_text().splitlines() if line.startswith("| Tent + dynamic"))
    assert [cell.strip() for cell in line.split("|")][3:6] == [
        f"{value:.3f}" for value in (np.mean(rates), min(rates), max(rates))
    ]
    fixed = next(line for line in files["table.md"].read_text().splitlines() if line.startswith("| Tent |"))
    assert fixed.endswith("| – |")  # a fixed rate asks no memory


@pytest.mark.long
def test_the_cost_of_several_updates_is_a_row(work, small_base):
    text = reproduce("steps", Setup(work))[0].read_text()
    assert "| Cost, x one update | 1.00 | – | 3.25 | – | 6.25 | – |" in text
    assert "n updates take n + 1 forward and n backward passes" in text


@pytest.mark.long
def test_a_diverged_sum_over_positions_does_not_stop_the_table(work, small_base, monkeypatch):
    real = dltta.evaluation.paper.reproduce.run_experiment

    def diverges(experiment, **options):
        if experiment.adaptation.positions == "sum":
            raise NonFiniteError("the loss is nan")
        return real(experiment, **options)

    monkeypatch.setattr(dltta.evaluation.paper.reproduce, "run_experiment", diverges)
    monkeypatch.setattr(dltta.evaluation.paper.needs, "RATES", (1e-3,))
    text = reproduce("initial-rates", Setup(work))[0].read_text()
    line = next(line for line in text.splitlines() if line.startswith("| Tent + dynamic"))
    assert line.count("diverged") == 2
    monkeypatch.setattr(dltta.evaluation.paper.reproduce, "run_experiment", lambda *_, **__: diverging())
    with pytest.raises(NonFiniteError):
        reproduce("oct", Setup(work))


def diverging():
    raise NonFiniteError("the loss is nan")


@pytest.mark.long
def test_the_segmentation_figure_shows_the_rate_that_was_chosen(work, small_base, monkeypatch):
    monkeypatch.setattr(dltta.evaluation.paper.needs, "RATES", (1e-3, 4e-3))
    files = {file.name: file for file in reproduce("figure-segmentation", Setup(work))}
    assert is_drawn(files["figure.png"])
    lines = [line for line in files["table.md"].read_text().splitlines() if line.startswith("| Tent, ")]
    assert [line.split("|")[1].strip() for line in lines] == ["Tent, 1e-3", "Tent, 4e-3", "Tent, dynamic"]
    assert lines[1].split("|")[3].strip() == "4.00"
    found = Results.load(work / "figure-segmentation-phantom" / "dynamic" / "results.json")
    rows = next(s for s in found.streams if s.method == "tent").cases
    adapted = {f"{1000 * row.rate:.2f}" for row in rows if row.discrepancy is not None}
    assert {lines[2].split("|")[3].strip(), lines[2].split("|")[5].strip()} <= adapted


@pytest.mark.long
def test_the_retrieval_figure_is_drawn_from_the_table(work, monkeypatch, plain_report):
    def more(bed, setup):
        base = tiny(bed, setup)
        return replace(base, adaptation=replace(base.adaptation, batches_kept=20))

    monkeypatch.setattr(dltta.evaluation.paper.tasks, "base_experiment", more)
    files = {file.name: file for file in reproduce("figure-retrieval", Setup(work))}
    assert is_drawn(files["figure.png"])
    row = next(line for line in files["table.md"].read_text().splitlines() if line.startswith("| Tent + dynamic"))
    assert len(row.split("|")) == 1 + 1 + (2 * 2 + 5) + 1  # the paper prints the fixed rate and D = 8
    assert "82.63 ± 0.06" in row
    assert "not run" not in row


def is_drawn(path):
    """An image that is not of one color."""
    with Pillow.open(path) as image:
        return image.format == "PNG" and len(np.unique(np.asarray(image.convert("L")))) > 20


# ---- published data on disk


def write_oct(folder):
    """Prepared slices of two subjects for training, one for testing, and Cirrus: layers of twelve rows, no noise."""
    for site, subjects in {"spectralis": ("hc10", "hc11", "hc09", "hc01"), "cirrus": ("subject1",)}.items():
        for subject in subjects:
            for number in (1, 2):
                name = f"{subject}_{number}"
                boundaries = np.full((9, 1024), 10.0) + 12 * np.arange(9)[:, None] + number
                image = np.zeros((128, 1024), np.uint8)
                for layer in range(8):
                    image[int(boundaries[layer, 0]) : int(boundaries[layer + 1, 0])] = 25 * (layer + 1)
                for part in ("image", "label"):
                    (folder / site / part).mkdir(parents=True, exist_ok=True)
                Pillow.fromarray(image).save(folder / site / "image" / f"{name}.png")
                (folder / site / "label" / f"{name}.txt").write_text(json.dumps({"bds": boundaries.tolist()}))
    return folder


@pytest.mark.long
def test_published_data_are_read_from_disk(tmp_path, monkeypatch, plain_report):
    assert {"hc10", "hc11"} <= set(SPECTRALIS_SPLIT["train"])
    real = dltta.evaluation.paper.tasks.base_experiment

    def smaller(bed, setup):
        base = real(bed, setup)
        training = replace(base.training, epochs=1, batch_size=2, with_=())
        return replace(base, network_options={"width": 2}, training=training, methods=("source", "tent"))

    monkeypatch.setattr(dltta.evaluation.paper.tasks, "base_experiment", smaller)
    setup = Setup(tmp_path / "out", write_oct(tmp_path / "data" / "oct").parent)
    text = reproduce("oct", setup)[0].read_text()
    found = Results.load(tmp_path / "out" / "oct" / "paper" / "results.json")
    assert [(s.source, s.target, len(s.cases)) for s in found.streams[:2]] == [
        ("spectralis", "spectralis", 2), ("spectralis", "cirrus", 2),
    ]  # fmt: skip
    assert found.config["source"] == [f"oct:spectralis:train+val@{tmp_path / 'data' / 'oct'}"]
    assert "images of each target: cirrus 2." in text
    assert "ynthetic" not in text
    assert "| ATTA | not run | 73.20 ± 0.13 § |" in text


def test_parts_of_published_data_are_sites(tmp_path):
    folder = write_oct(tmp_path / "a@b")  # the folder begins after the first @
    found = {part: open_dataset(f"oct:{part}@{folder}") for part in ("spectralis", "spectralis:train+val", "cirrus")}
    assert [(each.site, len(each)) for each in found.values()] == [("spectralis", 8), ("spectralis", 6), ("cirrus", 2)]
    assert default_preprocessing(found["cirrus"]) == Preprocessing()
    assert open_dataset(f"oct:cirrus:acquired@{folder}").spacing == CIRRUS_SPACING
    for spec, words in {
        f"oct:spectralis:trian@{folder}": "no split 'trian' of spectralis",
        f"camelyon17:center_9@{folder}": "no part 'center_9' in Camelyon17",
        f"prostate:B@{folder}": "no folder BMC",
    }.items():
        with pytest.raises(DataError, match=words):
            open_dataset(spec)
    with pytest.raises(SettingError, match="'prostate:B' does not say .* write prostate:PART@DIR"):
        open_dataset("prostate:B")


def test_wrong_data_are_one_line_that_lists_what_is_missing(tmp_path):
    with pytest.raises(DataError, match="there is no folder .*nowhere; `dltta data card oct` says how"):
        reproduce("oct", Setup(tmp_path / "out", tmp_path / "nowhere"))
    (tmp_path / "cirrus").mkdir()
    with pytest.raises(DataError, match="is not the oct data set: .*no folder spectralis.*neither vol/ nor image/"):
        reproduce("steps", Setup(tmp_path / "out", tmp_path))
    with pytest.raises(DataError, match=r"no folder RUNMC.*\| and 3 more \(`dltta data check"):
        reproduce("prostate", Setup(tmp_path / "out", tmp_path))
    assert not (tmp_path / "out").exists()


def write_prostate(folder, sites):
    """Single sites in nnU-Net's layout: bright boxes in small volumes."""
    for site, cases in sites.items():
        for name in ("imagesTr", "labelsTr"):
            (folder / site / name).mkdir(parents=True)
        for case in range(cases):
            label = np.zeros((24, 24, 8), np.uint8)
            label[6:16, 8 + case : 18, 2:6] = 1
            image = 100 * label + np.random.default_rng(case).normal(300, 20, label.shape)
            for values, file in ((image, f"imagesTr/{site}{case}_0000"), (label, f"labelsTr/{site}{case}")):
                saved = nib.Nifti1Image(values.astype(np.float32), np.eye(4))
                nib.save(saved, folder / site / f"{file}.nii.gz")
    return folder


@pytest.mark.long
def test_single_sites_fill_the_columns_that_they_can(tmp_path, monkeypatch, plain_report):
    data = write_prostate(tmp_path / "data", {"radboud": 2, "ucl": 2, "bidmc": 1})
    real = base_experiment

    def small(bed, setup):
        base = real(bed, setup)
        training = TrainingSettings(epochs=1, batch_size=2, validation=0.5, patch=(32, 16, 16))
        recipe = replace(base.adaptation, batches_kept=2, neighbors=1)
        methods = ("source", "tent")
        return replace(
            base, methods=methods, rates=("fixed",), uda={}, network_options={"width": 2}, training=training,
            adaptation=recipe, examples=1,
        )  # fmt: skip

    monkeypatch.setattr(dltta.data.datasets.prostate, "PLANE", (24, 24))
    monkeypatch.setattr(dltta.evaluation.paper.tasks, "base_experiment", small)
    text = reproduce("prostate", Setup(tmp_path / "out", data))[0].read_text()
    assert "Columns filled: D UCL, E BIDMC; not at hand: B BMC, C I2CVB, F HK, so there is no average." in text
    assert "Volumes, ours (the paper's): A RUNMC 2 (30), D UCL 2 (13), E BIDMC 1 (12)." in text
    assert "Ours, images of each target: UCL 2, BIDMC 1." in text
    found = Results.load(tmp_path / "out" / "prostate" / "paper" / "results.json")
    dice = {s.target: s.metrics["dice"] for s in found.streams if (s.method, s.rate) == ("tent", "fixed")}
    row = next(line for line in text.splitlines() if line.startswith("| Tent |"))
    ours = [cell.strip() for cell in row.split("|")][2:-1:2]
    filled = [f"{100 * dice['UCL']:.2f}", f"{100 * dice['BIDMC']:.2f}"]
    assert ours == ["not run", "not run", *filled, "not run", "not run"]


def test_single_sites_need_the_papers_source_and_a_target(tmp_path):
    write_prostate(tmp_path / "source", {"radboud": 1})
    with pytest.raises(DataError, match="only the source, A RUNMC; add a target: BMC, I2CVB, UCL, BIDMC, HK$"):
        reproduce("prostate", Setup(tmp_path / "out", tmp_path / "source"))
    write_prostate(tmp_path / "target", {"ucl": 1})
    missing = "has D UCL, but not the source A; add it as one of the folders RUNMC, ISBI, RADBOUD$"
    with pytest.raises(DataError, match=missing):
        reproduce("prostate", Setup(tmp_path / "out", tmp_path / "target"))
    assert not (tmp_path / "out").exists()


def test_all_sites_are_the_published_data(tmp_path):
    sites = ("radboud", "bmc", "i2cvb", "ucl", "bidmc", "hk")
    folder = write_prostate(tmp_path, dict.fromkeys(sites, 1))
    assert about("prostate", Setup(tmp_path / "out", folder)) == ON_PUBLISHED_DATA


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["oct"], "give --data FOLDER with the published data, or --phantom"),
        (["oct", "--phantom", "--data", "x"], "--data and --phantom exclude each other"),
        (["otc", "--phantom"], "no table or figure 'otc'; did you mean 'oct'?"),
        (["oct", "--data", "nowhere"], "there is no folder nowhere"),
        (["all", "--data", "nowhere"], "there is no folder nowhere"),
        (["oct", "--phantom", "--seeds", "0"], "seeds and orders must be at least 1, got 0"),
        (["oct", "--data", "x", "--small"], "--small is for synthetic images"),
        (["oct", "--phantom", "--pages-only"], "give --pages FOLDER too"),
        (["oct", "--phantom", "-j", "0"], "-j must be at least 1"),
        (["oct", "--phantom", "--epochs", "0"], "epochs must be at least 1"),
        (["oct", "--phantom", "--device", "gpu"], "device 'gpu' cannot be used"),
        (["histology", "--phantom", "--weights", "none.pth"], "there is no file none.pth"),
        (
            ["oct", "--phantom", "--vgg", "none.pth"],
            "there is no file none.pth; give torchvision's state dict of vgg19",
        ),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(monkeypatch, capsys, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = typed(monkeypatch, capsys, "reproduce", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err
    assert not list(tmp_path.iterdir())


def test_help_shows_an_example_and_every_name(monkeypatch, capsys):
    code, out, _ = typed(monkeypatch, capsys, "reproduce", "--help")
    assert code == 0
    assert "dltta reproduce oct --phantom" in out.split("Examples")[1]
    assert all(name in out for name in NAMES)


def test_the_command_says_what_it_wrote(work, small_base, monkeypatch, capsys):
    code, out, _ = typed(monkeypatch, capsys, "reproduce", "oct", "--phantom", "-o", work, "-j", "1")
    assert code == 0
    said, *files = out.splitlines()
    assert said.startswith(ON_PHANTOMS)
    assert files == [*(str(work / "oct-phantom" / f"table.{e}") for e in ("md", "tex", "csv"))]
    options = ("--phantom", "-o", work, "-j", "1", "--json", "--pages", work / "pages")
    code, out, _ = typed(monkeypatch, capsys, "reproduce", "oct", *options)
    assert json.loads(out)["oct"][0].endswith("table.md")
    assert json.loads(out)["pages"][0] == str(work / "pages" / "index.md")


def test_pages_are_made_from_results_with_the_published_numbers_beside(work, small_base, tmp_path):
    setup = Setup(work)
    names = ["similarity", "figure-rates"]
    for name in names:
        reproduce(name, setup)
    files = write_pages(names, setup, tmp_path)
    assert [file.name for file in files] == [
        "index.md", "similarity.md", "similarity.csv", "figure-rates.md", "figure-rates.csv", "figure-rates.png",
        "provenance.json",
    ]  # fmt: skip
    for page in ("index.md", "similarity.md", "figure-rates.md"):
        assert (tmp_path / page).read_text().split("\n\n")[1].startswith("The published data were not at hand: ")
    page = (tmp_path / "similarity.md").read_text()
    assert "\ndltta reproduce similarity --phantom --seeds 1\n" in page
    assert (work / "similarity-phantom" / "table.md").read_text() in page
    assert "82.63 ± 0.06" in page
    assert "![Discrepancy, learning rate and Dice" in (tmp_path / "figure-rates.md").read_text()
    assert is_drawn(tmp_path / "figure-rates.png")
    drawn = work / "figure-rates-phantom" / "figure.png"
    assert (tmp_path / "figure-rates.png").stat().st_size < 0.7 * drawn.stat().st_size
    assert "- [similarity](similarity.md): Average Dice" in (tmp_path / "index.md").read_text()
    kept = json.loads((tmp_path / "provenance.json").read_text())
    assert set(kept["similarity"]) == {"l2", "cosine"}
    assert "Ours: the first source training, the first order of images." in (tmp_path / "figure-rates.md").read_text()
    assert {"config", "provenance", "summary"} == set(kept["similarity"]["l2"])


def test_a_wide_figure_is_made_as_wide_as_a_page():
    buffer = io.BytesIO()
    Pillow.effect_noise((3000, 300), 50).save(buffer, "PNG")
    with Pillow.open(io.BytesIO(for_page(buffer.getvalue()))) as shown:
        assert (shown.size, shown.mode) == ((1400, 140), "P")


def test_pages_tell_the_command_of_their_runs_not_of_the_call(work, small_base, tmp_path):
    reproduce("similarity", Setup(work))
    write_pages(["similarity"], Setup(work, seeds=3, small=True), tmp_path)
    assert "\ndltta reproduce similarity --phantom --small --seeds 1\n" in (tmp_path / "similarity.md").read_text()


def test_pages_need_finished_runs(tmp_path, work, small_base):
    with pytest.raises(DataError, match=r"no .*steps-1.results.json; run `dltta reproduce steps` first"):
        write_pages(["steps"], Setup(tmp_path), tmp_path / "pages")
    assert not (tmp_path / "pages").exists()


def test_pages_of_what_is_finished_say_what_is_not(work, small_base, tmp_path, monkeypatch, capsys):
    reproduce("similarity", Setup(work))
    (work / "figure-rates-phantom" / "figure.png").unlink(missing_ok=True)
    before = sorted(work.rglob("*"))
    options = ("--phantom", "-o", work, "--seeds", "2", "--pages", tmp_path, "--pages-only")
    code, _, err = typed(monkeypatch, capsys, "reproduce", "all", *options)
    assert code == 0, err
    assert sorted(work.rglob("*")) == before  # nothing was run
    index = (tmp_path / "index.md").read_text()
    assert "cosine similarity, points (1 source training)" in index
    assert index.count("(not run yet)") == len(NAMES) - sum("source training" in line for line in index.splitlines())
    absent = (tmp_path / "figure-rates.md").read_text()
    assert absent.endswith("dltta reproduce figure-rates --phantom --seeds 2\n```\n\nNot run yet.\n")
    assert "82.63 ± 0.06" in (tmp_path / "similarity.md").read_text()


@pytest.mark.slow
def test_the_retinal_table_on_phantoms(tmp_path, monkeypatch, capsys):
    code, _, _ = typed(monkeypatch, capsys, "reproduce", "oct", "--phantom", "-o", tmp_path)
    assert code == 0
    found = Results.load(tmp_path / "oct-phantom" / "paper" / "results.json")
    dice = {(s.method, s.rate): s.metrics["dice"] for s in found.streams if s.target == "cirrus"}
    assert dice["tent", "dynamic"] > dice["source", "none"] + 0.2
