"""The page on the recommended recipe: what its tables say, against numbers worked out by hand."""

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "figures" / "recommended.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("recommended_page", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stream(method, seed, dice, order=0, rate="none"):
    """Five cases with this mean; what is expected of them is in the order of the truth for even seeds only."""
    cases = []
    for i in range(5):
        value = dice + 0.01 * (i - 2)
        quality = value if seed % 2 == 0 else 1 - value
        expected = {"quality": quality, "quality_low": quality - 0.3, "quality_high": quality + 0.3, "review": i < seed}
        cases.append({"case": f"c{i}", "metrics": {"dice": value}, **(expected if method == "recommended" else {})})
    described = {"target": "b", "method": method, "rate": rate, "seed": seed, "order": order}
    return {**described, "metrics": {"dice": dice}, "cases": cases}


def results(folder, *, seeds, first=0):
    """Of `dltta bench`: the source model scores 0.5, 0.6, …, PTBN 0.6 always, recommended 0.7, 0.9, …."""
    made = []
    for seed in range(first, first + seeds):
        scores = {"source": 0.5 + 0.1 * seed, "ptbn": 0.6, "recommended": 0.7 + 0.2 * seed}
        made += [stream(method, seed, score) for method, score in scores.items()]
        made += [stream("tent", seed, 0.1, rate="fixed"), stream("tent", seed, 0.62, rate="dynamic")]
        model = folder / "models" / f"seed_{seed}"
        model.mkdir(parents=True)
        rows = [
            {"site": "source", "source": 0.9, "chosen": 0.9 + 0.02 * seed},
            {"site": "site 1", "source": 0.1, "chosen": 0.2},
        ]
        (model / "rehearsal.json").write_text(json.dumps({"batch_sizes": {"1": {"default": {"scores": rows}}}}))
    (folder / "look").mkdir(parents=True)
    path = folder / "look" / "results.json"
    path.write_text(json.dumps({"streams": made}))
    return path


def test_one_seed_by_hand(script, tmp_path):
    page = script.page(script.collect({"cells": results(tmp_path, seeds=1)}))
    assert "**one seed, one order**" in page
    assert "| cells | b | 5 | 50.0 | 60.0 | 62.0 | 70.0 | +10.0 |" in page  # Tent with the dynamic rate
    assert "±" not in page
    assert "| cells | 90.0 | 90.0 | +0.0 |" in page
    assert "| cells | b | 1.00 | 100 % | 0 % |" in page
    assert "## Does rehearsal rank" not in page


def test_several_seeds_are_averaged_and_their_spread_is_shown(script, tmp_path):
    page = script.page(script.collect({"cells": results(tmp_path, seeds=2)}))
    assert "**2 seeds, one order**" in page
    # source 50 and 60, PTBN 60 twice, recommended 70 and 90: 10 and 30 over PTBN, the better one on average
    assert "| cells | b | 5 | 55.0 ± 7.1 | 60.0 ± 0.0 | 62.0 ± 0.0 | 80.0 ± 14.1 | +20.0 ± 14.1 |" in page
    assert "Mean ± standard deviation over seeds" in page
    assert "| cells | 90.0 | 91.0 | +1.0 |" in page
    assert "| cells | b | 0.00 | 50 % | 10 % |" in page  # seed 1 expects 1 − 0.9 and the reverse order, and flags one


def test_seeds_that_come_later_join_those_that_are_there(script, tmp_path):
    page = script.page(script.collect({"cells": results(tmp_path / "all", seeds=3)}))
    first = script.collect({"cells": results(tmp_path / "first", seeds=1)})
    del first[0]["which"]  # as it was before seeds could be counted from a later one
    later = script.collect({"cells": results(tmp_path / "later", seeds=2, first=1)})
    assert script.page(script.with_earlier(later, first)) == page
    again = script.collect({"cells": results(tmp_path / "again", seeds=1)})
    assert script.page(script.with_earlier(again, later)) == page  # in whatever order they come


def test_seeds_that_are_run_again_or_on_other_cases_replace_what_was_there(script, tmp_path):
    both = script.collect({"cells": results(tmp_path / "both", seeds=2)})
    again = script.collect({"cells": results(tmp_path / "again", seeds=1, first=1)})
    assert script.with_earlier(again, both) == again
    fewer = [{**row, "cases": 4} for row in script.collect({"cells": results(tmp_path / "fewer", seeds=1)})]
    assert script.with_earlier(again, fewer) == again


def test_orders_of_a_seed_are_one_of_its_scores(script):
    found = [stream("tent", 0, 0.4), stream("tent", 0, 0.6, order=1), stream("tent", 1, 0.8)]
    assert script.by_seed(found, "dice") == pytest.approx([0.5, 0.8])
    counted = [{"seeds": 3, "orders": 2}, {"seeds": 1, "orders": 2}]
    assert script.runs(counted) == "1 to 3 seeds, 2 orders"


def test_how_candidates_rank_by_hand(script):
    simulated = {"source": 0.5, "batch": 0.7, "mean of source+batch": 0.8, "running": 0.6}
    here = {"source": 0.9, "batch": 0.6, "mean of source+batch": 0.8, "running": 0.8}
    found = script.compared(simulated, here, "batch")
    assert (found["first"], found["place"], found["candidates"]) == ("mean of source+batch", 2, 4)
    assert [found[key] for key in ("below", "given", "random")] == pytest.approx([10, 30, 12.5])
    # ranks 1 3 4 2 and 4 1 2.5 2.5: sums of products of deviations −3, 5 and 4.5
    assert found["spearman"] == pytest.approx(-3 / (5 * 4.5) ** 0.5)
    assert script.compared(simulated, dict.fromkeys(here, 0.5), None)["spearman"] is None
    assert script.compared(simulated, here, None)["given"] is None


@pytest.fixture
def ranking():
    simulated = {"source": 0.5, "batch": 0.7, "running": 0.6}
    first = {"simulated": simulated, "here": {"source": 0.5, "batch": 0.75, "running": 0.7}, "given": "running"}
    second = {"simulated": simulated, "here": {"source": 0.9, "batch": 0.6, "running": 0.8}, "given": None}
    shared = {"target": "b", "metric": "dice", "batch_size": 1, "cases": 13}
    flags = {"source": 0.04, "noise": 1.0, "negative": 0.8}
    one = {"seed": 0, **first, "flagged": flags}
    two = {"seed": 1, **second, "flagged": {"source": 0.08, "noise": 0.9, "negative": 0.9}}
    return [
        {"task": "cells", "sliced": False, **shared, "seeds": [one, two]},
        {"task": "prostate", "sliced": True, **shared, "seeds": [one]},
    ]


def test_both_sections_follow_from_the_ranking(script, ranking, tmp_path):
    page = script.page(script.collect({"cells": results(tmp_path, seeds=1)}), ranking)
    assert "1 to 2 seeds. Mean scores of candidates" in page
    # seed 0: order as rehearsed, batch first; seed 1: reversed in part, batch last and 30 below
    assert "| cells | b | 13 | 0.00 | `batch` | 1, 3 of 3 | 15.0 | 5.0 | 11.7 |" in page
    assert "| prostate | b | 13 | 1.00 | `batch` | 1 of 3 | 0.0 | 5.0 | 10.0 |" in page
    assert "at most a point below the best at 1 of 2 targets" in page
    assert "Slices (prostate) are scored one by one" in page
    assert "| cells | b | 6 % | 95 % | 85 % |" in page
    assert "| prostate | b | 4 % | 100 % | 80 % |" in page
    assert "Goals met: source images in 1 of 2 tasks, noise at 2 and negatives at 0 of 2 targets." in page


def test_tasks_that_are_not_run_again_keep_their_rows_and_places(script):
    same = {"target": "1", "metric": "dice", "cases": 5, "orders": 1}
    earlier = [{"task": task, "seeds": 1, **same} for task in ("a", "b", "c")]
    again = [{"task": task, "seeds": 3, "which": [0, 1, 2], **same} for task in ("d", "b")]
    found = script.with_earlier(again, earlier)
    assert [(row["task"], row["seeds"]) for row in found] == [("a", 1), ("b", 3), ("c", 1), ("d", 3)]
