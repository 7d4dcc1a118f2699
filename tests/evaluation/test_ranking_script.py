"""How candidates rank at a target, and what is flagged there: the script behind a part of docs/recommended.md."""

import importlib.util
import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

from dltta.config import open_dataset
from dltta.data.sites import evenly
from dltta.errors import StateError
from dltta.evaluation.bench import run_experiment
from dltta.evaluation.experiment import Experiment
from dltta.evaluation.home import at_home
from dltta.evaluation.recorded import scores_of, sizes_of
from dltta.evaluation.rehearsal import SMOOTHING
from dltta.models.io.checkpoint import load_checkpoint
from dltta.models.predictions import probabilities
from dltta.quality.candidates import Plan
from dltta.recipes import Recipe
from dltta.training import TrainingSettings

SCRIPT = Path(__file__).parents[2] / "docs" / "figures" / "ranking.py"
ARMS = ["source", "batch", "blended", "shrinkage", "running", "pooled", "tent:0.03", "tent:0.1"]
SOURCE, TARGET = "phantom:oct:spectralis:12:0:96x32", "phantom:oct:cirrus:6:1:96x32"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("ranking_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bench(work, source, target, **options):
    """As `dltta bench --work WORK -o WORK/look` leaves it; the results."""
    settings = {
        "source": (source,), "targets": (target,), "output": str(work / "look"), "work": str(work),
        "network_options": {"width": 4}, "methods": ("source", "recommended"), "examples": 1, **options,
    }  # fmt: skip
    run_experiment(Experiment(**settings))
    return work / "look" / "results.json"


def source_model_by_hand(model, sites, settings, images, labels):
    """Its scores of images, and the sizes of classes that rehearsal knows: of four cases, evenly spread."""
    checkpoint = load_checkpoint(model)
    pairs = at_home(sites, settings, checkpoint).pairs
    known = [pairs[i][1] for i in evenly(len(pairs), 4)]
    sizes = sizes_of(known, len(sites[0].classes))
    with torch.no_grad():
        predicted = [probabilities(checkpoint.model.eval()(image[None]))[:, None] for image in images]
    each = zip(predicted, labels, strict=True)
    return np.array([scores_of(p, [label], SMOOTHING * sizes)[0, 0] for p, label in each]), sizes


@pytest.mark.long
@pytest.mark.usefixtures("short_rehearsal")
def test_candidates_of_two_seeds_at_a_target_and_pieces_that_are_kept(script, tmp_path, monkeypatch):
    settings = TrainingSettings(epochs=2, batch_size=2, validation=0.34)
    results = bench(tmp_path, SOURCE, TARGET, seeds=2, training=settings)
    for seed, threshold in enumerate((-1.0, 2.0)):  # flags nothing, flags everything
        path = tmp_path / "models" / f"seed_{seed}" / "rehearsal.json"
        saved = json.loads(path.read_text())
        saved["batch_sizes"]["1"]["default"]["review_below"] = threshold
        path.write_text(json.dumps(saved))
    (row,) = script.of_task("oct", results, None, 40)
    assert {key: row[key] for key in ("task", "target", "metric", "sliced", "batch_size", "cases")} == {
        "task": "oct", "target": "cirrus", "metric": "dice", "sliced": False, "batch_size": 1, "cases": 6,
    }  # fmt: skip
    assert [seed["seed"] for seed in row["seeds"]] == [0, 1]
    kinds = ("source", "noise", "negative")
    assert [seed["flagged"] for seed in row["seeds"]] == [dict.fromkeys(kinds, 0.0), dict.fromkeys(kinds, 1.0)]
    target = [open_dataset(TARGET)[i] for i in range(6)]
    for seed in row["seeds"]:
        found = json.loads((tmp_path / "models" / f"seed_{seed['seed']}" / "rehearsal.json").read_text())
        plan = found["batch_sizes"]["1"]["default"]["plan"]
        names = dict.fromkeys([*ARMS, *Plan(tuple(plan["arms"]), plan["flip"]).full_names])
        assert list(seed["here"]) == list(seed["simulated"]) == list(names)
        assert seed["simulated"] == {name: found["candidates"]["1"][name] for name in names}
    by_hand, _ = source_model_by_hand(
        tmp_path / "models" / "seed_0", [open_dataset(SOURCE)], settings,
        [case.image for case in target], [case.label for case in target],
    )  # fmt: skip
    assert row["seeds"][0]["here"]["source"] == pytest.approx(by_hand.mean(), abs=1e-5)
    pieces = sorted((tmp_path / "ranking").iterdir())
    assert len(pieces) == 4  # held-out source images and the target, of two seeds

    monkeypatch.setattr(script.Model, "measured", lambda *_: pytest.fail("a finished piece was measured again"))
    assert script.of_task("oct", results, None, 40) == [row]
    with pytest.raises(pytest.fail.Exception):
        script.of_task("oct", results, None, 3)


def slices_site(folder, bright):
    """Two volumes of four slices; only the second and the third show something, the third less."""
    for name in ("imagesTr", "labelsTr"):
        (folder / name).mkdir(parents=True)
    description = {"channel_names": {"0": "T2"}, "labels": {"background": 0, "box": 1}, "file_ending": ".nii.gz"}
    (folder / "dataset.json").write_text(json.dumps(description))
    affine = np.diag([1.0, 1.0, 5.0, 1.0])
    for number in range(2):
        labels = np.zeros((32, 32, 4), np.uint8)
        labels[8:20, 10 + number : 24, 1] = 1
        labels[8:14, 10 : 16 + number, 2] = 1
        image = labels * bright + np.random.default_rng(number).normal(0, 0.1, labels.shape)
        nib.save(nib.Nifti1Image(image.astype(np.float32), affine), folder / "imagesTr" / f"v{number}_0000.nii.gz")
        nib.save(nib.Nifti1Image(labels, affine), folder / "labelsTr" / f"v{number}.nii.gz")


@pytest.mark.long
@pytest.mark.usefixtures("short_rehearsal")
def test_slices_count_as_in_rehearsal_and_an_older_rehearsal_knows_its_plan_only(script, tmp_path):
    slices_site(tmp_path / "a", 2.0)
    slices_site(tmp_path / "b", 1.0)
    settings = TrainingSettings(epochs=2, batch_size=2, validation=0.5)
    results = bench(
        tmp_path / "work", "slices:a", "slices:b", root=str(tmp_path), training=settings, in_domain="none",
        adaptation=Recipe(),
    )  # fmt: skip
    path = tmp_path / "work" / "models" / "seed_0" / "rehearsal.json"
    saved = json.loads(path.read_text())
    kept = saved.pop("candidates")["1"]
    path.write_text(json.dumps(saved))
    (row,) = script.of_task("boxes", results, str(tmp_path), 1)
    assert (row["sliced"], row["cases"]) == (True, 1)
    found = saved["batch_sizes"]["1"]["default"]
    plan = Plan(tuple(found["plan"]["arms"]), found["plan"]["flip"])
    (seed,) = row["seeds"]
    assert set(seed["here"]) == set(plan.full_names)
    assert seed["simulated"] == pytest.approx({name: kept[name] for name in plan.full_names})

    path.write_text(json.dumps({**saved, "candidates": {"1": kept}}))
    (row,) = script.of_task("boxes", results, str(tmp_path), 1)
    site = open_dataset(f"slices:{tmp_path / 'b'}")
    preprocessing = load_checkpoint(path.parent).preprocessing
    cases = [preprocessing.case(site[i]) for i in range(4)]  # the first volume
    scores, sizes = source_model_by_hand(
        path.parent, [open_dataset(f"slices:{tmp_path / 'a'}")], settings,
        [case.image for case in cases], [case.label for case in cases],
    )  # fmt: skip
    weights = [0.15 + min(float(case.label.sum()) / sizes[0], 2.0) for case in cases]
    assert len(set(weights)) == 3
    assert row["seeds"][0]["here"]["source"] == pytest.approx(np.average(scores, weights=weights), abs=1e-5)


@pytest.mark.long
@pytest.mark.usefixtures("short_rehearsal")
def test_a_classification_is_ranked_in_whole_batches_and_negatives_are_the_targets(script, tmp_path, monkeypatch):
    results = bench(
        tmp_path, "phantom:histology:hospital_0:12", "phantom:histology:hospital_2:10:5", network="densenet_small",
        network_options={}, training=TrainingSettings(epochs=1, batch_size=4, validation=0.34),
        adaptation=Recipe(batch_size=4),
    )  # fmt: skip
    looked_at = {}

    def flagged(self, dataset, order):
        looked_at[dataset.site] = [dataset[i].image for i in order]
        return 0.5

    monkeypatch.setattr(script.Model, "flagged", flagged)
    (row,) = script.of_task("types", results, None, 5)
    assert {site: len(images) for site, images in looked_at.items()} == {"hospital_0": 8, "noise": 8, "negative": 8}
    target = open_dataset("phantom:histology:hospital_2:10:5")
    images = [target[i].image for i in range(10)]
    turned = [image.amax((1, 2), keepdim=True) + image.amin((1, 2), keepdim=True) - image for image in images]
    for image in looked_at["negative"]:
        assert min(float((image - other).abs().max()) for other in turned) < 1e-5
    assert (row["metric"], row["batch_size"], row["cases"]) == ("accuracy", 4, 8)
    saved = json.loads((tmp_path / "models" / "seed_0" / "rehearsal.json").read_text())
    (seed,) = row["seeds"]
    assert seed["simulated"]["batch"] == saved["candidates"]["1"]["batch"]  # the nearest of 1 and 32
    assert all(round(8 * score) == pytest.approx(8 * score) for score in seed["here"].values())


def test_a_model_that_has_not_rehearsed_says_what_to_do(script, tmp_path):
    experiment = Experiment((SOURCE,), (TARGET,), str(tmp_path / "look"), work=str(tmp_path))
    with pytest.raises(StateError, match="has not rehearsed; run dltta bench with the method recommended"):
        script.piece_file(experiment, 0, TARGET, 40, {})
