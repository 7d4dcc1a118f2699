"""The page on real images: what its tables say, against numbers worked out by hand."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
from small_results import one_target, results, stream

SCRIPT = Path(__file__).parents[2] / "docs" / "figures" / "real.py"
CONFIG = {"source": ["x/A"], "targets": ["x/B"], "seeds": 1, "orders": 1, "cases": 8, "training": {"epochs": 3}}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("real_page", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def configured(found, **changes):
    return replace(found, config={**CONFIG, **changes})


@pytest.fixture
def kept(script):
    recommended = results(stream("source", "none", [0.6] * 8), stream("recommended", "none", [0.5] * 4 + [0.9] * 4))
    found = script.merged([configured(one_target()), configured(recommended)])
    return script.strict({"nuclei_fluo": {**script.entry(found), "changing": []}})


def test_the_overview_by_hand(script, kept):
    lines = script.overview(kept).splitlines()[2:]
    assert lines[0].startswith("| Tent | 1 | +5.0 | +5.0 (nuclei_fluo, B) | 16 % | 0 % |")  # 5 of the gap of 91 − 60
    assert lines[1].startswith("| recommended | 1 | +10.0 | +10.0 (nuclei_fluo, B) | 32 % |")
    assert "| Tent | the method's own fixed rate | 1 | +10.00 | +10.00 (nuclei_fluo, B) | 1 of 1 |" in script.dynamic(
        kept
    )
    assert "| nuclei_fluo | A | 3 | 2 | Dice 91.0 | B 60.0 |" in script.homes(kept)


def test_a_tasks_table_has_gains_with_intervals_and_says_how_it_was_run(script, kept):
    page = script.page(kept)
    assert "| Source | 60.0 |  |  |" in page
    assert "| Tent | 65.0 | +5.0 (+5.0 to +5.0) | 0 % |" in page  # every case gains 5
    assert "| Tent + dynamic | 75.0† | +15.0 (" in page
    assert "1 seed, 1 order, one by one; at most 8 cases of a target, evenly spread. Scored cases, the same for" in page
    assert "every method: B: 8." in page
    assert page.index("## All together") < page.index("## The protocol") < page.index("## Nuclei in fluorescence")
    assert "- Retinal layers, Optovue → Cirrus (`configs/real/oct_layers.toml`)" in page


def test_comparisons_that_differ_do_not_share_a_table(script):
    with pytest.raises(SystemExit, match="differ in cases"):
        script.merged([configured(one_target()), configured(one_target(), cases=4)])


def test_a_long_stream_is_shown_pass_by_pass(script):
    long = stream("tent", "fixed", [0.4, 0.6, 0.7, 0.9])
    cases = [replace(case, case=f"{1 + i // 2}_{case.case}") for i, case in enumerate(long.cases)]
    found = configured(results(replace(long, cases=tuple(cases))), targets=["sequence:x/B,x/B"])
    (row,) = script.changing(found)
    assert [(site, round(score, 6)) for site, score in row["parts"]] == [("B", 50.0), ("B", 80.0)]
    assert script.changing(configured(one_target())) == []


def test_a_task_that_is_not_run_again_keeps_its_numbers(script, kept, tmp_path, monkeypatch):
    docs = tmp_path / "docs"
    (docs / "results").mkdir(parents=True)
    (docs / "figures").mkdir()
    (docs / "figures" / "real_head.md").write_text("# Real\n\n<!-- overview -->\n\n## The protocol\n")
    (docs / "results" / "real.json").write_text(json.dumps(kept))
    monkeypatch.setattr(script, "DOCS", docs)
    script.main(tmp_path / "nothing")
    assert json.loads((docs / "results" / "real.json").read_text()) == kept
    assert "| recommended | 1 | +10.0 | +10.0 (nuclei_fluo, B) | 32 % |" in (docs / "real.md").read_text()
