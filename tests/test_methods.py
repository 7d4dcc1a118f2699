"""The one table of methods: what it says is true, and the page that is made from it is current."""

import sys
from pathlib import Path

import pytest
import torch

import networks
from dltta.config import make_adapter
from dltta.errors import DlttaError, NothingToAdaptError
from dltta.methods import METHODS, Method, Normalization
from dltta.recipes import Rule, recipe_for
from networks import stream, trained
from streams import segmenter

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import methods_page  # noqa: E402

ALONE = [method for method in Method if method.facts.part is None]  # nothing must be trained for them
OFTEN = {"rotta": {"every": 1}, "note": {"every": 1}, "cotta": {"confidence": 0.0}}  # updates at once, no other views


def adapter(method, kind="batch", rate=None, **model):
    opened = segmenter(model=trained(networks.Segmenter(kind=kind, **model), seed=1))
    return make_adapter(opened, recipe_for(method, rate, settings=OFTEN.get(method)))


@pytest.mark.parametrize("method", ALONE)
@pytest.mark.parametrize("kind", ["batch", "instance", "group"])
def test_a_method_works_with_the_normalization_that_the_table_names_and_refuses_others(method, kind):
    named = method.facts.normalizations
    if not named or Normalization(kind) in named:
        adapter(method, kind).step(stream((1, 1, 8, 8), 1)[0])
    else:
        with pytest.raises(NothingToAdaptError):
            adapter(method, kind)


@pytest.mark.parametrize("method", ALONE)
def test_as_many_passes_are_made_as_the_table_says(method):
    """The first number; where predictions are filtered, of a network whose predictions all count."""
    made = adapter(method)
    passes = []
    networks_of_it = [made.model, *made._own_networks()]
    for network in networks_of_it:
        network.register_forward_hook(lambda *_: passes.append(1))
    with torch.no_grad():  # certain everywhere, and by shape
        for network in networks_of_it:
            network.head.weight.mul_(20)
    made.step(stream((1, 1, 8, 8), 1)[0])
    said = int(method.facts.passes.split(" + ")[0])
    later = {"rotta": 2, "note": 1}.get(method, 0)  # with an update, which the table says after a semicolon
    assert len(passes) == said + later


@pytest.mark.parametrize("rate", [rule for rule in Rule if rule != Rule.FIXED])
@pytest.mark.parametrize("method", [method for method in ALONE if method.facts.loss])
def test_every_method_runs_under_every_rate(method, rate):
    made = adapter(method, rate=rate)
    steps = [made.step(x) for x in stream((1, 1, 8, 8), 3)]
    assert all(step.rate is not None and step.rate >= 0 for step in steps)


@pytest.mark.parametrize("method", [method for method in ALONE if method != "source"])
def test_under_the_guard_a_saved_state_goes_on_as_the_adapter_did(method):
    recipe = recipe_for(method, guard=True, settings=OFTEN.get(method))
    one, other = (make_adapter(segmenter(), recipe) for _ in range(2))
    images = stream((1, 1, 8, 8), 4)
    for x in images[:2]:
        one.step(x)
    other.load_state_dict(one.state_dict())
    for x in images[2:]:
        first, second = one.step(x), other.step(x)
        assert torch.equal(first.logits, second.logits)
        assert first.decision.outcome == second.decision.outcome


@pytest.mark.parametrize("method", ALONE)
def test_a_setting_that_a_method_does_not_have_is_refused_with_those_it_has(method):
    with pytest.raises(DlttaError, match=f"there is no setting of {method} 'capacitty'"):
        make_adapter(segmenter(), recipe_for(method, settings={"capacitty": 3}))


def test_statistics_of_ones_own_choice_are_refused_where_a_method_has_its_own():
    with pytest.raises(DlttaError, match="rotta has normalization statistics of its own; leave --statistics out"):
        make_adapter(segmenter(), recipe_for("rotta", statistics="blended"))


def test_the_page_is_current():
    text = (ROOT / "docs" / "methods.md").read_text()
    assert methods_page.page(text) == text, "run python benchmarks/methods_page.py"
    assert "| [`rotta`](#rotta) | yes | – | yes | yes | batch | before the update |" in text
    assert all(f"### {method.facts.title}\n" in text for method in METHODS.values())


def test_every_newer_method_has_a_page_of_its_own():
    for method in Method:
        assert method.facts.of_paper or (ROOT / "docs" / "methods" / f"{method}.md").is_file(), method


def test_when_a_method_helped_follows_from_the_results():
    def row(method, rate, **gains):
        return {"method": method, "rate": rate, "cells": {target: {"gain": gain} for target, gain in gains.items()}}

    real = {
        "cells": {"rows": [row("tent", "fixed", b=0.4, c=6.0), row("tent", "dynamic", b=9.0, c=9.0)]},
        "nuclei": {"rows": [row("source", "none", d=None), row("tent", "fixed", d=-3.4)]},
    }
    said = "at 1 of 3 targets by 0.5 points or more, +1.0 in the mean; most +6.0 (cells, c), least −3.4 (nuclei, d)"
    assert methods_page.helped("tent", real) == said
    real["cells"]["rows"].append(row("ptbn", "none", b=0.2, c=4.0))
    assert methods_page.helped("tent", real) == said  # not where PTBN was not run everywhere
    real["nuclei"]["rows"].append(row("ptbn", "none", d=-1.2))
    assert methods_page.helped("tent", real) == said.replace("mean;", "mean (PTBN there +1.0);")
    assert methods_page.helped("ptbn", real).startswith("at 1 of 3 targets by 0.5 points or more, +1.0 in the mean;")
    assert methods_page.helped("source", real) is None
    assert methods_page.helped("sar", real) is None
