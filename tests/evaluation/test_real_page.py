"""The page on real images: what its tables say, against numbers worked out by hand."""

import json
from dataclasses import replace

import pytest
from small_results import one_target, results, stream

import real
import real_page

CONFIG = {"source": ["x/A"], "targets": ["x/B"], "seeds": 1, "orders": 1, "cases": 8, "training": {"epochs": 3}}


def configured(found, **changes):
    return replace(found, config={**CONFIG, **changes})


@pytest.fixture
def kept():
    recommended = results(stream("source", "none", [0.6] * 8), stream("recommended", "none", [0.5] * 4 + [0.9] * 4))
    found = real.merged([configured(one_target()), configured(recommended)])
    return real.strict({"nuclei_fluo": {**real.entry(found), "changing": [], "there": {}, "longer": {}, "initial": []}})


def test_the_overview_by_hand(kept):
    lines = real_page.overview(kept).splitlines()[2:]
    assert lines[0].startswith("| Tent | 1 | +5.0 | +5.0 (nuclei_fluo, B) | 16 % | 0 % |")  # 5 of the gap of 91 − 60
    assert lines[1].startswith("| recommended | 1 | +10.0 | +10.0 (nuclei_fluo, B) | 32 % |")
    assert (
        "| Tent | the method's own fixed rate | 1 | +10.00 | +10.00 (nuclei_fluo, B) | 1 of 1 |"
        in real_page.dynamic(kept)
    )
    assert "| nuclei_fluo | A | 3 | 2 | Dice 91.0 (cases 90.0 to 92.0) | B 60.0 | – |" in real_page.homes(kept)


def test_an_interval_over_tasks_draws_a_task_with_its_targets():
    """Of two tasks: the mean is that of the first, of the second, or of both."""
    found = {("a", "x"): 1.0, ("a", "y"): 3.0, ("b", "x"): 10.0}
    assert real_page.over_tasks(found) == " (+2.0 to +10.0)"
    assert real_page.over_tasks({("a", "x"): 1.0, ("a", "y"): 3.0}) == ""


def test_a_tasks_table_has_gains_with_intervals_and_says_how_it_was_run(kept):
    page = real_page.page(kept, real.DOCS)
    assert "| Source | 60.0 |  |  |" in page
    assert "| Tent | 65.0 | +5.0 (+5.0 to +5.0) | 0 % |" in page  # every case gains 5
    assert "| Tent + dynamic | 75.0† | +15.0 (" in page
    assert "1 seed, 1 order, one by one; at most 8 cases of a target, evenly spread. Scored cases, the same for" in page
    assert "every method: B: 8." in page
    assert page.index("## All together") < page.index("## The protocol") < page.index("## Nuclei in fluorescence")
    assert "- Retinal layers, Optovue → Cirrus (`configs/real/oct_layers.toml`)" in page


def test_comparisons_that_differ_do_not_share_a_table():
    with pytest.raises(SystemExit, match="differ in cases"):
        real.merged([configured(one_target()), configured(one_target(), cases=4)])


def test_a_table_does_not_depend_on_what_was_run_first():
    """Neither do its intervals, which draw trainings by their place."""
    scores = {seed: [0.1 * seed + 0.05 * case for case in range(8)] for seed in (0, 1)}
    parts = [
        configured(results(
            stream("source", "none", [0.3 + 0.2 * seed] * 8, seed=seed),
            *(stream("tent", rate, scores[seed], seed=seed) for rate in rates),
        ))
        for seed, rates in ((0, ("shuffled", "adam:1e-3")), (1, ("dynamic", "fixed", "shuffled")))
    ]  # fmt: skip
    one, other = (real.strict(real.entry(real.merged(each))) for each in (parts, parts[::-1]))
    assert one["rows"] == other["rows"]
    rates = [row["rate"] for row in one["rows"] if row["method"] == "tent"]
    assert rates == ["fixed", "dynamic", "shuffled", "adam:1e-3"]


def folder_of(tmp_path, found, name="nuclei_fluo", out="methods"):
    found.write(tmp_path / "runs" / name / out / "results.json")
    return tmp_path / "runs"


@pytest.fixture
def docs(tmp_path, monkeypatch):
    docs = tmp_path / "docs"
    (docs / "results").mkdir(parents=True)
    (docs / "figures").mkdir()
    (docs / "figures" / "real_head.md").write_text("# Real\n\n<!-- overview -->\n\n## The protocol\n")
    monkeypatch.setattr(real, "DOCS", docs)
    return docs


def later(*streams):
    """Another time: the source models again, and something else."""
    first, second, *_ = one_target().streams
    return configured(results(first, second, *streams))


def test_a_method_that_is_run_later_joins_what_was_run_on_the_same_models(docs, tmp_path):
    real.main(folder_of(tmp_path, configured(one_target())))
    real.main(folder_of(tmp_path, later(stream("ptbn", "none", [0.7] * 8))))
    page = (docs / "real.md").read_text()
    assert "| PTBN | 70.0 | +10.0 (" in page
    assert "| Tent + dynamic | 75.0† | +15.0 (" in page


def test_seeds_that_are_run_later_join_and_rows_say_over_how_many_they_are(docs, tmp_path):
    real.main(folder_of(tmp_path, configured(one_target())))
    second = [stream("source", "none", [0.2] * 8, seed=1), stream("tent", "fixed", [0.4] * 8, seed=1)]
    real.main(folder_of(tmp_path, later(*second)))
    page = (docs / "real.md").read_text()
    assert "up to 2 seeds, 1 order" in page
    assert "| Source | 40.0 |  |  | 2 × 1 |" in page  # 60 and 20
    assert "| Tent | 52.5 | +12.5 (+5.0 to +20.0) | 0 % | 2 × 1 |" in page  # 65 and 40
    assert "| Tent + dynamic | 75.0† | +15.0 (" in page  # over the first training's 60
    assert "| Tent | the method's own fixed rate | 1 | +10.00 |" in page  # 75 − 65, not 75 − 52.5


def test_numbers_of_other_source_models_are_dropped(docs, tmp_path, capsys):
    real.main(folder_of(tmp_path, configured(one_target())))
    other = configured(results(stream("source", "none", [0.61] * 8), stream("ptbn", "none", [0.7] * 8)))
    real.main(folder_of(tmp_path, other))
    page = (docs / "real.md").read_text()
    assert "| PTBN | 70.0 | +9.0 (" in page
    assert "Tent" not in page.partition("## Nuclei")[2]
    assert "its earlier numbers are dropped" in capsys.readouterr().out


def test_rows_of_before_scores_were_kept_join_on_the_same_models_only(docs, tmp_path):
    before = real.strict({"nuclei_fluo": {**real.entry(configured(one_target())), "changing": []}})
    del before["nuclei_fluo"]["columns"]
    for row in before["nuclei_fluo"]["rows"]:
        del row["seeds"], row["orders"]
        for cell in row["cells"].values():
            del cell["by_seed"]
    (docs / "results" / "real.json").write_text(json.dumps(before))
    for method in ("ptbn", "intent"):  # the rows stay, however often others join
        real.main(folder_of(tmp_path, later(stream(method, "none", [0.7] * 8))))
        assert "| Tent + dynamic | 75.0† | +15.0 (" in (docs / "real.md").read_text()
    assert "† significantly better than with the fixed rate" in (docs / "real.md").read_text()
    (docs / "results" / "real.json").write_text(json.dumps(before))
    other = configured(results(stream("source", "none", [0.61] * 8), stream("ptbn", "none", [0.7] * 8)))
    real.main(folder_of(tmp_path, other))
    assert "Tent" not in (docs / "real.md").read_text().partition("## Nuclei")[2]


def test_notes_below_a_table_are_those_that_its_rows_need():
    """Tent ran again and differs nowhere; a row of TTT++ is left, and its mark."""
    left = [{"method": "ttt++", "cells": {"B": {"mark": "†"}}}]
    new = ["Source: trained alone.", "No difference from the fixed rate is significant (…)."]
    earlier = ["Tent diverged at B: old.", "TTT++ starts from another network.", "† significantly better (…)."]
    kept = ["Source: trained alone.", "TTT++ starts from another network.", "† significantly better (…)."]
    assert real.notes_with(new, earlier, left, {"tent"}) == kept
    both = "† significantly better, ‡ significantly worse (…)."
    assert real.notes_with(["‡ worse (…)."], [both], left, {"tent"}) == [both]
    assert real.notes_with(["‡ worse (…)."], ["† better (…)."], left, {"tent"}) == ["‡ worse (…).", "† better (…)."]
    unmarked = [{"method": "tent", "cells": {"B": {"mark": ""}}}]  # at another rate
    assert real.notes_with(new, earlier, unmarked, {"tent"}) == new


def test_expected_quality_is_a_mean_over_trainings():
    streams = []
    for seed, expected in enumerate((0.5, 0.7)):
        one = stream("recommended", "none", [0.6, 0.8], seed=seed)
        cases = [
            replace(c, quality=expected + 0.1 * i, quality_low=0.0, quality_high=1.0) for i, c in enumerate(one.cases)
        ]
        streams.append(replace(one, cases=tuple(cases)))
    (row,) = real.mean_expected(results(*streams))
    assert (row["cases"], row["target"], row["method"]) == (2, "B", "recommended")
    assert [row[key] for key in ("expected", "score", "correlation", "covered", "review")] == pytest.approx(
        [0.65, 0.7, 1.0, 1.0, 0.0]
    )


def test_means_of_a_first_seed_whose_scores_were_not_kept_join_later_seeds(docs, tmp_path):
    """Tent at the dynamic rate: 75 and +15 of the first seed, 40 and +20 of the second, 50 and +10 of the third."""
    folder = folder_of(tmp_path, configured(one_target()))
    real.main(folder)
    file = docs / "results" / "real.json"
    before = json.loads(file.read_text())
    streams = before["nuclei_fluo"]["columns"]["streams"]
    before["nuclei_fluo"]["columns"]["streams"] = [each for each in streams if each["rate"] != "dynamic"]
    file.write_text(json.dumps(before))
    for seed, source, dynamic in ((1, 0.2, 0.4), (2, 0.4, 0.5)):
        later = [stream("source", "none", [source] * 8, seed=seed), stream("tent", "dynamic", [dynamic] * 8, seed=seed)]
        folder_of(tmp_path, configured(results(*later)))
        for _ in range(2):  # read again, it stays as it is
            real.main(folder)
            page = (docs / "real.md").read_text()
    assert "| Source | 40.0 |  |  | 3 × 1 |" in page
    assert "| Tent | 65.0 | +5.0 (+5.0 to +5.0) | 0 % | 1 × 1 |" in page
    assert "| Tent + dynamic | 55.0 | +15.0 | 4 % | 3 × 1 |" in page  # an eighth of the first seed's cases, of three
    assert real.MEANS_ONLY in page


def test_a_first_seed_that_cannot_be_compared_is_asked_for(docs, tmp_path):
    folder = folder_of(tmp_path, configured(one_target()))
    real.main(folder)
    file = docs / "results" / "real.json"
    before = json.loads(file.read_text())
    del before["nuclei_fluo"]["columns"]
    file.write_text(json.dumps(before))
    folder_of(tmp_path, configured(results(stream("source", "none", [0.2] * 8, seed=1))))
    with pytest.raises(SystemExit, match="of x/A only means of the first seed were kept; run that again too"):
        real.main(folder)


def test_what_a_network_trained_at_the_target_gives_stands_beside_it(docs, tmp_path):
    folder = folder_of(tmp_path, configured(one_target()))
    there = results(
        stream("source", "none", [0.7, 0.9], source="B", target="B"),
        stream("source", "none", [0.1], source="B", target="A"),
    )
    folder_of(tmp_path, configured(there, source=["x/B"]), out="there/B")
    real.main(folder)
    assert (
        "| nuclei_fluo | A | 3 | 2 | Dice 91.0 (cases 90.0 to 92.0) | B 60.0 | B 80.0 (2 held out) |"
        in (docs / "real.md").read_text()
    )


def test_the_papers_columns_stand_beside_its_hospitals():
    """Two trainings of Tent at UCL, the paper's D: 50 and 60; one of ATTA at BIDMC, the paper's E."""
    found = results(
        *(stream("source", "none", [0.4], source="radboud", target=target) for target in ("ucl", "bidmc")),
        stream("source", "none", [0.4], source="radboud", target="ucl", seed=1),
        stream("tent", "dynamic", [0.5], source="radboud", target="ucl"),
        stream("tent", "dynamic", [0.6], source="radboud", target="ucl", seed=1),
        stream("atta", "fixed", [0.7], source="radboud", target="bidmc"),
    )
    lines = real_page.beside_the_paper(real.entry(configured(found))).splitlines()
    assert "| Method | paper, D | here, ucl | surface distance | paper, E | here, bidmc | surface distance |" in lines
    assert "| Tent + dynamic | 77.0 ± 3.0 | 55.0 ± 7.1 | – | 66.3 ± 2.9 | not run | – |" in lines
    assert "| ATTA | 74.5 ± 3.0 | not run | – | 68.1 ± 2.3 | 70.0 | – |" in lines


def test_longer_training_stands_beside_the_score_at_home(docs, tmp_path):
    """Several trainings: the mean, the worst and the best; of a longer one its mean beside that of the same seed."""
    first, *others = configured(one_target()).streams
    streams = [stream("source", "none", [0.5, 0.7], source="A", target="A", seed=1), first, *others]
    folder = folder_of(tmp_path, configured(results(*streams)))
    longer = results(stream("source", "none", [0.7, 0.9], source="A", target="A", seed=1), others[0])
    folder_of(tmp_path, configured(longer, training={"epochs": 9}), out="longer/9")
    real.main(folder)
    page = (docs / "real.md").read_text()
    assert "| A | 3 | 2 | Dice 75.5 (trainings 60.0 to 91.0, cases 50.0 to 92.0); 80.0 instead of 60.0 with 9 " in page
    assert "with 9 epochs (1 training) | B 60.0 |" in page
    real.main(tmp_path / "nothing")  # and keeps its place
    assert (docs / "real.md").read_text() == page


def test_another_direction_says_what_a_network_trained_at_the_target_gives(kept):
    one = {**kept["nuclei_fluo"], "source": ["slices:x/A"]}
    other = {**one, "source": ["slices:x/B"], "home": {"mean": 77.0, "n": 5}}
    assert "| B 60.0 | B 77.0 (5 held out) |" in real_page.homes({"prostate_t2": one, "prostate_t2_ucl": other})


def test_targets_with_networks_that_trained_longer_count_once(kept):
    """They have a table and a score at home, and no part in what is said over targets."""
    (task,) = kept.values()
    longer = {**task, "again": "prostate_t2", "epochs": 9, "rows": [{**row, "worse": 1.0} for row in task["rows"]]}
    both = {"prostate_t2": task, "prostate_t2_long": longer}
    page = real_page.page(both, real.DOCS)
    assert "1 target of 1 task" in page
    assert "| Tent | 1 | +5.0 | +5.0 (prostate_t2, B) | 16 % | 0 % |" in page
    assert "| prostate_t2_long | A | 9 | 2 | Dice 91.0" in page
    assert "networks trained three times as long\n\n`configs/real/prostate_t2.toml` with more epochs: 1 seed" in page


def test_a_long_stream_is_shown_pass_by_pass():
    long = stream("tent", "fixed", [0.4, 0.6, 0.7, 0.9])
    cases = [replace(case, case=f"{1 + i // 2}_{case.case}") for i, case in enumerate(long.cases)]
    found = configured(results(replace(long, cases=tuple(cases))), targets=["sequence:x/B,x/B"])
    (row,) = real.changing(found)
    assert [(site, round(score, 6)) for site, score in row["parts"]] == [("B", 50.0), ("B", 80.0)]
    assert real.changing(configured(one_target())) == []


def test_a_long_stream_of_several_trainings_and_orders_is_their_mean(kept):
    """Two seeds, the second with two orders; the parts are the means of 40, 20, 60 and of 80, 90, 70."""
    passes = [(0, 0, [0.4, 0.8]), (1, 0, [0.2, 0.9]), (1, 1, [0.7, 0.6])]
    streams = []
    for seed, order, scores in passes:
        long = replace(stream("tent", "dynamic", scores, seed=seed), order=order)
        numbers = (2, 1) if order else (1, 2)
        cases = [replace(case, case=f"{n}_{case.case}") for n, case in zip(numbers, long.cases, strict=True)]
        streams.append(replace(long, cases=tuple(cases)))
    (row,) = real.changing(configured(results(*streams), targets=["sequence:x/B,x/B"]))
    assert [(site, round(score, 6)) for site, score in row["parts"]] == [("B", 40.0), ("B", 80.0)]
    page = real_page.page({"nuclei_fluo": {**kept["nuclei_fluo"], "changing": [row]}}, real.DOCS)
    assert "**nuclei_fluo, B**, 2 cases, 2 seeds, 2 orders\n" in page
    assert "| Tent + dynamic | 40.0 | 80.0 |" in page
    assert "| Last pass over first, points | nuclei_fluo, B |\n|:--|--:|\n| Tent + dynamic | +40.0 |\n" in page


def test_initial_rates_stand_side_by_side_with_their_spread(docs, tmp_path):
    """Of two trainings the mean; the dynamic rule diverged at the larger rate."""
    scores = {("fixed:1e-3", 0): 0.6, ("fixed:1e-3", 1): 0.8, ("fixed:1e-1", 0): 0.5, ("fixed:1e-1", 1): 0.5}
    tent = [stream("tent", rate, [score] * 8, seed=seed) for (rate, seed), score in scores.items()]
    both = results(stream("source", "none", [0.6] * 8), *tent, stream("tent", "dynamic:1e-3", [0.75] * 8))
    folder_of(tmp_path, configured(both), out="initial/rates")
    runs = folder_of(tmp_path, configured(one_target()))
    real.main(runs)
    page = (docs / "real.md").read_text()
    assert "| | fixed 0.001 | fixed 0.1 | dynamic 0.001 | dynamic 0.1 |" in page
    assert "| nuclei_fluo, B, Tent | 70.0 | 50.0 | 75.0 | – |" in page
    assert "| Tent | +0.0 (1) | – |" in page  # the larger rate is not compared where one rule diverged
    assert "| Tent + dynamic | +5.0 (1) | – |" in page
    assert "fixed:1e-3" not in page  # these rows are no methods of the main tables
    assert (docs / "images" / "initial.png").stat().st_size > 0
    (runs / "nuclei_fluo" / "initial" / "rates" / "results.json").unlink()
    real.main(runs)
    assert (docs / "real.md").read_text() == page  # what is not run again stays


def test_initial_rates_are_compared_over_targets_where_neither_rule_diverged():
    def rows(target, fixed, dynamic):
        scores = {f"{rule}:{alpha}": score for rule, both in (("fixed", fixed), ("dynamic", dynamic))
                  for alpha, score in zip(("1e-3", "1"), both, strict=True) if score is not None}  # fmt: skip
        return [{"target": target, "method": "atta", "rate": rate, "mean": mean} for rate, mean in scores.items()]

    measured = [*rows("x", (70, 40), (71, 66)), *rows("y", (50, 60), (50, 52)), *rows("z", (50, None), (50, 90))]
    text = real_page.initial({"oct_layers": {"initial": measured}})
    assert "| | 0.001 | 1 |" in text
    assert "| ATTA | +0.0 (3) | −10.0 (2) |" in text  # −30 and +10
    assert "| ATTA + dynamic | +0.3 (3) | −1.0 (2) |" in text  # +1, 0, 0; −4 and +2
    assert "| oct_layers, z, ATTA | 50.0 | – | 50.0 | 90.0 |" in text


def test_streams_that_change_are_one_table_whichever_commands_ran_them(docs, tmp_path):
    """The source model is in both; what a third command had at another time stays, and the default recipe is last."""
    targets = ["sequence:x/B,x/B"]

    def along(*methods):
        streams = []
        for method in methods:
            one = stream(method, "none", [0.5, 0.7])
            cases = [replace(case, case=f"{i}_{case.case}") for i, case in enumerate(one.cases, 1)]
            streams.append(replace(one, cases=tuple(cases)))
        return configured(results(*streams), targets=targets)

    folder_of(tmp_path, configured(one_target()))
    folder_of(tmp_path, along("source", "recommended"), out="changing")
    folder = folder_of(tmp_path, along("source", "ptbn"), out="changing_methods")
    real.main(folder)
    (folder / "nuclei_fluo" / "changing" / "results.json").unlink()
    folder_of(tmp_path, along("source", "note"), out="changing_methods")
    real.main(folder)
    lines = (docs / "real.md").read_text().partition("## Long and changing streams")[2].splitlines()
    shown = [line.split("|")[1].strip() for line in lines if line.endswith("| 50.0 | 70.0 |")]
    assert shown == ["Source", "PTBN", "NOTE", "recommended"]


def test_a_task_that_is_not_run_again_keeps_its_numbers(kept, docs, tmp_path):
    (docs / "results" / "real.json").write_text(json.dumps(kept))
    real.main(tmp_path / "nothing")
    assert json.loads((docs / "results" / "real.json").read_text()) == kept
    assert "| recommended | 1 | +10.0 | +10.0 (nuclei_fluo, B) | 32 % |" in (docs / "real.md").read_text()
