"""What a stream is run with: the paper's values and the recommended ones, by hand."""

import ast
import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

import dltta
from dltta.config import build
from dltta.errors import SettingError
from dltta.methods import PAPER_METHODS
from dltta.models.io.factories import arguments, import_object, required_arguments
from dltta.recipes import Method, Recipe, Rule, paper, recipe_for, recommended, split_rate

SOURCE = Path(dltta.__file__).parent


def test_the_papers_values_for_segmentation_by_hand():
    assert paper().resolved("segmentation", calibrated=True).as_json() == {
        "method": "tent", "rate": "dynamic", "alpha": 1e-3, "statistics": "batch", "optimizer": "sgd", "steps": 1,
        "momentum": 0.0, "betas": [0.9, 0.999], "predict": "after", "settings": {},
        "mode": "continual", "batch_size": 1, "batches_kept": 20, "neighbors": 8, "ready": "full",
        "distance": "l2", "positions": "mean",
        "pool": None, "prefill": False, "guard": False, "effort": "default", "name": "paper",
    }  # fmt: skip


def test_the_papers_values_for_classification_by_hand():
    found = paper("ttt", "fixed").resolved("classification", calibrated=False)
    assert (found.method, found.rate, found.alpha) == ("ttt", "fixed", 3e-4)
    assert (found.batch_size, found.batches_kept, found.neighbors) == (200, 4, 12)


def test_the_recommended_recipe_by_hand():
    found = recommended().resolved("segmentation", calibrated=True)
    assert (found.method, found.rate, found.batch_size, found.effort, found.guard) == (
        "recommended", "none", 1, "default", False,
    )  # fmt: skip
    assert recommended().resolved("classification", calibrated=False).batch_size == 200
    assert recommended().deciding() == {
        "method": "recommended", "batch_size": None, "mode": None, "effort": "default",
    }  # fmt: skip


def test_effort_is_for_recommended():
    assert recipe_for("recommended", effort="low") == replace(recommended(), effort="low")
    with pytest.raises(SettingError, match="effort is for recommended"):
        recipe_for("tent", effort="low")


def test_statistics_that_were_chosen_do_not_depend_on_the_calibration():
    for calibrated in (True, False):
        assert Recipe(statistics="blended").resolved("segmentation", calibrated=calibrated).statistics == "blended"


def test_resolving_keeps_what_was_chosen_and_is_done_once():
    chosen = Recipe(alpha=0.5, batch_size=3, batches_kept=7, neighbors=5, name="own")
    found = chosen.resolved("classification", calibrated=True)
    assert (found.alpha, found.batch_size, found.batches_kept, found.neighbors) == (0.5, 3, 7, 5)
    assert found.resolved("segmentation", calibrated=False) == found


@pytest.mark.parametrize(("batch_size", "kept"), [(200, 4), (16, 4), (3, 4), (2, 6), (1, 12)])
def test_the_memory_holds_the_neighbors_however_small_the_batches(batch_size, kept):
    found = Recipe(batch_size=batch_size).resolved("classification", calibrated=False)
    assert found.batches_kept == kept
    assert found.batches_kept * batch_size >= found.neighbors == 12
    assert Recipe(batch_size=1, batches_kept=2).resolved("classification", calibrated=False).batches_kept == 2


def test_methods_without_a_loss_have_no_rate():
    for method in ("source", "ptbn", "t3a", "recommended", "uda-st", "cyclegan", "udas", "uda-swav"):
        assert Recipe(method, "dynamic").rate == "none"
    assert Recipe("tent").rate == "dynamic"


def test_what_is_changed_is_nobodys_recipe_but_ones_own():
    assert recommended().changed(alpha=None, steps=None) == recommended()
    changed = paper().changed(alpha=0.1, steps=None)
    assert (changed.alpha, changed.steps, changed.name) == (0.1, None, "own")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"statistics": "shrunken"}, "statistics must be one of batch, shrinkage, blended, running, got 'shrunken'"),
        ({"optimizer": "lars"}, "optimizer must be one of sgd, adam, got 'lars'"),
        ({"mode": "shadow"}, "mode must be one of continual, image-specific, got 'shadow'"),
        ({"ready": "now"}, "ready must be one of full, neighbors"),
        ({"distance": "l1"}, "distance must be one of l2, cosine"),
        ({"positions": "max"}, "positions must be one of mean, sum"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"neighbors": -1}, "neighbors must be at least 1"),
        ({"pool": 0}, "pool must be at least 1"),
    ],
)
def test_values_that_cannot_be_are_refused(values, words):
    with pytest.raises(SettingError, match=words):
        Recipe(**values)


# methods newer than the paper


def test_the_papers_methods_are_the_five_that_it_compares():
    assert PAPER_METHODS == ("source", "ptbn", "ttt", "tent", "atta")
    for method in PAPER_METHODS:
        found = recipe_for(method, "fixed").resolved("segmentation", calibrated=False)
        assert (found.alpha, found.optimizer, found.momentum, found.batch_size) == (1e-3, "sgd", 0.0, 1)
        found = recipe_for(method, "fixed").resolved("classification", calibrated=False)
        assert (found.alpha, found.optimizer, found.batch_size, found.predict) == (3e-4, "sgd", 200, "after")


def test_a_newer_method_runs_as_its_authors_run_it():
    found = recipe_for("rotta").resolved("classification", calibrated=False)
    assert (found.rate, found.alpha, found.optimizer, found.betas) == ("fixed", 1e-3, "adam", (0.9, 0.999))
    assert (found.batch_size, found.predict) == (64, "before")
    found = recipe_for("note").resolved("segmentation", calibrated=False)
    assert (found.rate, found.alpha, found.optimizer, found.batch_size) == ("fixed", 1e-4, "adam", 1)


def test_what_is_chosen_wins_over_the_authors():
    found = recipe_for("rotta", "dynamic", optimizer="sgd", batch_size=8).resolved("classification", calibrated=False)
    assert (found.rate, found.alpha, found.optimizer, found.momentum) == ("dynamic", 1e-3, "sgd", 0.0)
    assert found.batch_size == 8
    assert recipe_for("eata", alpha=0.5).resolved("segmentation", calibrated=False).alpha == 0.5
    kept = recipe_for("eata").resolved("segmentation", calibrated=False)
    assert (kept.optimizer, kept.momentum) == ("sgd", 0.9)
    assert recipe_for("eata", optimizer="adam").resolved("segmentation", calibrated=False).momentum == 0.0
    assert recipe_for("eata", momentum=0.5).resolved("segmentation", calibrated=False).momentum == 0.5


def test_every_row_of_the_table_names_a_class_that_can_be_made():
    for method in Method:
        made = import_object(method.facts.path)
        assert not required_arguments(made) or method.facts.part is not None, method
        assert ("__call__" in vars(made)) == method.facts.loss, method
        assert "statistics" in arguments(made) or not method.facts.statistics, method


# by name


def test_a_method_by_name_is_the_papers_with_what_is_changed():
    assert recipe_for("tent") == paper("tent")
    assert recipe_for("atta", "fixed") == paper("atta", "fixed")
    assert recipe_for("tent", "fixed:1e-2", steps=3, pool=None) == Recipe(
        "tent", "fixed", alpha=1e-2, steps=3, name="own"
    )
    assert recipe_for("ptbn", "dynamic").rate == "none"
    assert recipe_for("package.module:Class", "package.module:Rate").rate == "package.module:Rate"


def test_recommended_by_name_takes_a_batch_size_and_nothing_else():
    assert recipe_for("recommended") == recommended()
    assert recipe_for("recommended", batch_size=4, pool=None) == replace(recommended(), batch_size=4)
    with pytest.raises(SettingError, match="recommended chooses its own rate; name a method to set it"):
        recipe_for("recommended", "fixed")
    with pytest.raises(SettingError, match="recommended chooses its own batches-kept"):
        recipe_for("recommended", batches_kept=3)


def test_a_name_that_does_not_exist_is_answered_with_the_nearest():
    with pytest.raises(SettingError, match="no method 'tnet'; did you mean 'tent'"):
        recipe_for("tnet")
    with pytest.raises(SettingError, match="no rate 'dynamc'; did you mean 'dynamic'"):
        recipe_for("tent", "dynamc")
    with pytest.raises(SettingError, match="did you mean 'recommended'"):
        recipe_for("recomended")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("fixed", ("fixed", None)),
        ("fixed:1e-2", ("fixed", 0.01)),
        ("matched", ("matched", None)),
        ("package.module:Class", ("package.module:Class", None)),
        ("module:Class", ("module:Class", None)),
        ("folder/file.py:Class", ("folder/file.py:Class", None)),
    ],
)
def test_a_rate_may_carry_its_alpha(text, found):
    assert split_rate(text) == found


def test_an_alpha_that_is_no_number_is_refused():
    with pytest.raises(SettingError, match="'fixed:fast' is not a rate; write a rule and its α, such as fixed:1e-2"):
        split_rate("fixed:fast")
    with pytest.raises(SettingError, match="no rate 'fixd'; did you mean 'fixed'"):
        split_rate("fixd:1e-2")


def test_a_recipe_from_a_file_has_enums_and_says_what_else_there_is():
    found = build(Recipe, {"method": "tent", "statistics": "blended", "alpha": 1}, "[adaptation]")
    assert found == Recipe("tent", statistics="blended", alpha=1)
    assert found.as_json()["statistics"] == "blended"
    for key, kinds in {"statistics": "batch, shrinkage, blended, running", "optimizer": "sgd, adam"}.items():
        with pytest.raises(SettingError, match=rf"{key} in \[adaptation\] must be one of {kinds}, got 'best'"):
            build(Recipe, {key: "best"}, "[adaptation]")
    with pytest.raises(SettingError, match=r"no key in \[adaptation\] 'neighbours'; did you mean 'neighbors'"):
        build(Recipe, {"neighbours": 3}, "[adaptation]")


# what decides a stream


def test_only_what_decides_the_outcome_is_compared():
    assert Recipe("source", alpha=1, steps=3).deciding() == {"method": "source", "batch_size": None}
    assert Recipe("udas", statistics="blended").deciding() == {"method": "udas", "batch_size": None}
    assert Recipe("ptbn", alpha=1, neighbors=3).deciding() == Recipe("ptbn").deciding()
    for other in (Recipe("ptbn", statistics="running"), Recipe("ptbn", mode="image-specific"), Recipe("source")):
        assert other.deciding() != Recipe("ptbn").deciding()


def test_the_memory_decides_nothing_with_a_fixed_rate():
    memory = {
        "batches_kept": 3,
        "neighbors": 2,
        "ready": "neighbors",
        "distance": "cosine",
        "pool": 4,
        "prefill": True,
        "positions": "sum",
    }
    for key, value in memory.items():
        assert Recipe("tent", "fixed", **{key: value}).deciding() == Recipe("tent", "fixed").deciding()
        assert Recipe("tent", "dynamic", **{key: value}).deciding() != Recipe("tent", "dynamic").deciding()


def test_everything_but_the_name_decides_a_dynamic_stream():
    values = set(Recipe("tent", "dynamic").deciding())
    assert values == {entry.name for entry in fields(Recipe)} - {"name"}
    assert paper().deciding() == replace(paper(), name="own").deciding()


def test_the_calibration_matters_where_something_is_measured_with_it():
    assert recommended().calibration_matters
    for recipe in (Recipe(rate="relative"), Recipe(guard=True), Recipe(statistics="shrinkage")):
        assert recipe.calibration_matters
        assert not replace(recipe, method="source").calibration_matters
    assert not paper().calibration_matters


# written once


def test_nothing_heavy_is_imported_for_a_recipe():
    code = "import sys, dltta.recipes; print([name for name in ('torch', 'monai', 'numpy') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


DEFAULTS = {
    "alpha": (1e-3, 3e-4), "batch_size": (200,), "batches_kept": (20, 4), "neighbors": (8, 12),
    "statistics": ("batch", "BATCH"),
}  # fmt: skip
MAKERS = ("Recipe", "replace", "changed", "recipe_for", "paper", "dict")


def repeated_defaults(code):
    """Where a recipe is made or changed with one of the values that `recipes.py` gives."""
    for node in ast.walk(ast.parse(code)):
        named = []
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", None)) in MAKERS:
            named = [(key.arg, key.value) for key in node.keywords]
        if isinstance(node, ast.Dict):
            named = [(getattr(key, "value", None), value) for key, value in zip(node.keys, node.values, strict=True)]
        for name, value in named:
            found = getattr(value, "value", None) if isinstance(value, ast.Constant) else getattr(value, "attr", None)
            if found in DEFAULTS.get(str(name), ()):
                yield f"{name}={found}"


def test_paper_and_recommended_are_written_once():
    assert list(repeated_defaults("replace(recipe, neighbors=8)")) == ["neighbors=8"]
    assert list(repeated_defaults("Recipe(statistics=Statistics.BATCH)")) == ["statistics=BATCH"]
    assert list(repeated_defaults("{'alpha': 1e-3, 'steps': 1}")) == ["alpha=0.001"]
    assert set(repeated_defaults((SOURCE / "recipes.py").read_text())) >= {"neighbors=8"}
    others = [path for path in sorted(SOURCE.rglob("*.py")) if path.name not in ("recipes.py", "methods.py")]
    found = {str(path.relative_to(SOURCE)): list(repeated_defaults(path.read_text())) for path in others}
    assert {path: repeated for path, repeated in found.items() if repeated} == {}


def test_a_recipe_survives_json():
    for recipe in (paper(Method.ATTA, Rule.FIXED), recommended()):
        assert Recipe(**json.loads(json.dumps(recipe.as_json()))) == recipe
