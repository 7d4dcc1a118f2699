import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from small_results import one_target, results, stream

from dltta.errors import SettingError
from dltta.evaluation.formats import csv_text, latex, markdown, rich_table
from dltta.evaluation.results import Results, StreamResult
from dltta.evaluation.run import CaseRecord, StreamRecord
from dltta.evaluation.tables import (
    DecisionRow,
    by_metric,
    by_target,
    count_decisions,
    method_label,
    metric_title,
    metric_word,
)

MARKDOWN = """\
| Method | Dice ↑ | HD95 (px) ↓ | Made worse |
|:--|--:|--:|--:|
| Source | 60.0 ± 6.0 | 4.00 ± 0.00 |  |
| Tent | 65.0 ± 6.0 (+5.0) | **3.00 ± 0.00** (+1.00) | 0% |
| Tent + dynamic | **75.0 ± 5.2**† (+15.0) | 3.50 ± 0.00‡ (+0.50) | 12% |

Points, mean ± sd over the cases of one stream.\x20\x20
With a sign: gain over Source; plus is better.\x20\x20
Made worse: share of cases that score worse than without adaptation (Dice).\x20\x20
† significantly better, ‡ significantly worse than with the fixed rate (paired Wilcoxon test over cases, p \\< 0.05, \
not corrected for the number of tests).\x20\x20
"""

LATEX = r"""\begin{tabular}{lrrr}
\toprule
Method & A (source) & B & Made worse \\
\midrule
Source & 91.0 $\pm$ 1.4 & 60.0 $\pm$ 6.0 &  \\
Tent & -- & 65.0 $\pm$ 6.0 (+5.0) & 0\% \\
Tent + dynamic & -- & \textbf{75.0 $\pm$ 5.2}$^{\dagger}$ (+15.0) & 12\% \\
\bottomrule
\end{tabular}
% Points, mean ± sd over the cases of one stream.
"""

CSV = """\
method,rate,Dice mean,Dice sd,Dice gain,Dice gain low,Dice gain high,Dice p,\
HD95 (px) mean,HD95 (px) sd,HD95 (px) gain,HD95 (px) gain low,HD95 (px) gain high,HD95 (px) p,made worse
source,none,60.0000,5.9761,,,,,4.0000,0.0000,,,,,
tent,fixed,65.0000,5.9761,5.0000,5.0000,5.0000,,3.0000,0.0000,1.0000,1.0000,1.0000,,0.0000
tent,dynamic,75.0000,5.2372,15.0000,9.1250,19.7500,0.0234,3.5000,0.0000,0.5000,0.5000,0.5000,0.00781,0.1250
"""


def test_markdown_to_the_byte():
    assert markdown(by_metric(one_target())) == MARKDOWN


def test_latex_to_the_byte():
    assert latex(by_target(one_target())).startswith(LATEX)


def test_csv_to_the_byte():
    assert csv_text(by_metric(one_target())) == CSV


def test_tables_from_the_file_are_the_tables_from_memory(tmp_path: Path):
    one_target().write(tmp_path / "results.json")
    loaded = Results.load(tmp_path / "results.json")
    for write in (markdown, latex, csv_text):
        assert write(by_target(loaded)) == write(by_target(one_target()))


def test_terminal_shows_the_same_values():
    console = Console(width=140, file=io.StringIO())
    with console.capture() as capture:
        console.print(rich_table(by_metric(one_target())))
    for text in ("75.0 ± 5.2† (+15.0)", "12%", "HD95 (px) ↓"):
        assert text in capture.get()


def several_targets() -> Results:
    return results(
        stream("source", "none", [0.4], target="A"),  # worse than any target, yet none of them
        stream("source", "none", [0.6, 0.6]),
        stream("source", "none", [0.5, 0.5], target="C"),
        stream("tent", "fixed", [0.7, 0.5]),
        stream("tent", "fixed", [0.7, 0.7], target="C"),
        stream("ptbn", "none", [0.7, 0.7]),
    )


def test_mean_over_targets_leaves_out_home_and_methods_that_miss_a_target():
    table = by_target(several_targets())
    assert [column.title for column in table.columns] == ["A (source)", "B", "C", "Mean"]
    means = {row.label: row.cells[-1] and row.cells[-1].mean for row in table.rows}
    assert means == {"Source": pytest.approx(0.55), "Tent": pytest.approx(0.65), "PTBN": None}


def test_worst_site_and_made_worse_stand_behind_the_targets():
    rows = markdown(by_target(several_targets())).splitlines()
    assert rows[0].endswith("| Mean | Worst site | Made worse |")
    assert rows[2].endswith("| 55.0 | 50.0 (C) |  |")
    assert rows[3].endswith("| **65.0** (+10.0) | 60.0 (B) | 25% |")
    assert rows[4].endswith("| – | – | – | 0% |")


def test_ties_are_all_best_and_a_single_value_is_not():
    table = by_target(results(stream("source", "none", [0.60001]), stream("ptbn", "none", [0.60002])))
    assert [row.cells[0].best for row in table.rows if row.cells[0]] == [True, True]
    alone = by_target(results(stream("source", "none", [0.6])))
    assert alone.rows[0].cells[0] is not None
    assert not alone.rows[0].cells[0].best


def test_spread_is_over_streams_when_there_are_several():
    table = by_target(
        results(stream("source", "none", [0.5, 0.7], seed=0), stream("source", "none", [0.7, 0.9], seed=1))
    )
    assert "| Source | 70.0 ± 14.1 |" in markdown(table)
    assert table.notes[0] == "Points, mean ± sd over 2 streams (seeds x orders)."


def test_missed_structures_are_told_with_distances_and_invented_ones_always():
    base = one_target()
    rows = tuple(replace(case, missed=2, invented=1) for case in base.streams[2].cases)
    both = results(base.streams[1], replace(base.streams[2], cases=rows))
    missed = "Missed structures, whose distance counts as the diagonal of the image: Tent 16."
    invented = "Invented structures, which the label does not have and no mean shows: Tent 8."
    assert by_metric(both).notes[-2:] == (missed, invented)
    assert by_target(both).notes[-1] == invented
    assert missed not in by_target(both).notes


def test_means_over_different_cases_are_told():
    some = stream("tent", "fixed", [0.5, math.nan, 0.7])
    table = by_target(results(stream("source", "none", [0.5, 0.6, 0.7]), some))
    assert table.notes[-1] == "B: means over different numbers of cases, which do not compare: Source 3, Tent 2."
    assert "different" not in " ".join(by_target(one_target()).notes)


def grouped(found: StreamResult, size: int) -> StreamResult:
    """The same stream with `size` consecutive cases of each patient."""
    rows = tuple(replace(case, group=f"p{index // size}") for index, case in enumerate(found.cases))
    return replace(found, cases=rows)


def test_patients_are_the_unit_of_tests():
    fixed = [0.5 + i / 100 for i in range(12)]
    dynamic = [value + 0.01 + i / 1000 for i, value in enumerate(fixed)]
    streams = stream("tent", "fixed", fixed), stream("tent", "dynamic", dynamic)
    for size, p in ((1, 2 / 2**12), (3, 2 / 2**4)):  # all differences positive: 12 cases, or 4 patients
        table = by_target(results(*(grouped(each, size) for each in streams)))
        assert table.rows[1].cells[0].p == pytest.approx(p)
    assert "test over patients" in " ".join(table.notes)
    assert "test over cases" in " ".join(by_target(results(*streams)).notes)


def test_shares_of_right_predictions_per_patient_are_ranked():
    fixed, dynamic = classified("tent", "fixed", [0, 1] * 6), classified("tent", "dynamic", [1, 1] * 6)
    table = by_metric(results(grouped(fixed, 2), grouped(dynamic, 2)), None, ["accuracy"])
    assert "paired Wilcoxon test over patients" in " ".join(table.notes)
    assert table.rows[1].cells[0].p == pytest.approx(2 / 2**6)  # six patients, all better


def test_volumes_are_compared_not_their_slices():
    def of_slices(method, rate, dice, **options):
        base = stream(method, rate, dice, **options)
        slices = tuple(CaseRecord(f"v{v}_{s}", "B", {}, None, volume=f"v{v}") for v in range(len(dice)) for s in "ab")
        return replace(base, cases=slices, volumes=base.cases)

    source, tent = [0.5, 0.6, 0.7], [0.6, 0.5, 0.9]
    whole = results(stream("source", "none", source, hd95=3.0), stream("tent", "fixed", tent))
    sliced = results(of_slices("source", "none", source, hd95=3.0), of_slices("tent", "fixed", tent))
    assert by_target(sliced) == by_target(whole)
    assert by_target(sliced).rows[1].worse == pytest.approx(1 / 3)
    assert by_target(sliced, "hd95") == by_target(whole, "hd95")
    assert by_target(sliced, "hd95").rows[1].worse == 1


def guarded() -> StreamResult:
    """Tent's eight cases with decisions of the guard."""
    base = one_target().streams[2]
    decided = [("source", "constant-image"), ("kept", "drift"), *[("kept", "ood-score")] * 2, *[("accepted", None)] * 4]
    cases = [replace(case, decision=d, reason=r) for case, (d, r) in zip(base.cases, decided, strict=True)]
    return replace(base, cases=tuple(cases))


def test_decisions_of_the_guard_are_counted_from_harmless_to_severe():
    told = "Decisions: Tent 50% accepted, 38% kept, 12% source."
    assert told in by_target(results(one_target().streams[1], guarded())).notes
    assert "Decisions" not in " ".join(by_target(one_target()).notes)


def test_decisions_are_counted_by_reason_the_most_frequent_first():
    assert count_decisions(results(guarded()), [("A", "B")]) == (
        DecisionRow("Tent", "accepted", None, 4),
        DecisionRow("Tent", "kept", "ood-score", 2),
        DecisionRow("Tent", "kept", "drift", 1),
        DecisionRow("Tent", "source", "constant-image", 1),
    )
    assert count_decisions(results(guarded()), []) == ()


def classified(method: str, rate: str, right: list[int], seed: int = 0) -> StreamResult:
    rows = tuple(
        CaseRecord(f"p{i}", "B", {"accuracy": float(v)}, 0.1, label=1, prediction=v, probabilities=(1.0 - v, float(v)))
        for i, v in enumerate(right)
    )
    metrics = {"accuracy": sum(right) / len(right), "auc": math.nan}
    return StreamResult.of(
        StreamRecord("B", "classification", metrics, rows), source="A", method=method, rate=rate, seed=seed
    )


def test_classification_uses_mcnemar_and_shows_what_is_undefined():
    streams = (
        classified("source", "none", [0] * 8 + [1] * 2),
        classified("tent", "fixed", [0] * 7 + [1] * 3),
        classified("tent", "dynamic", [1] * 9 + [0]),
    )
    text = markdown(by_metric(results(*streams)))
    assert "| Tent + dynamic | **90.0** (+70.0) | undefined | 10% |" in text
    assert "(paired McNemar test" in text
    tested = by_metric(results(*streams)).rows[2].cells[0]
    assert tested is not None
    assert tested.p == pytest.approx(18 / 256)  # seven better, one worse


def test_cases_made_worse_are_counted_by_accuracy_when_the_metric_has_no_case():
    table = by_metric(results(classified("source", "none", [1, 1]), classified("tent", "fixed", [1, 0])), None, ["auc"])
    assert table.rows[1].worse == 0.5


def test_results_without_labels_have_no_table_of_metrics():
    unlabeled = StreamRecord("B", "segmentation", {}, (CaseRecord("a", "B", {}, 0.1),))
    with pytest.raises(SettingError, match="no case of A → B was scored"):
        by_metric(results(StreamResult.of(unlabeled, source="A", method="source", rate="none", seed=0)))


def test_rate_that_harms_significantly_is_marked():
    good, bad = [0.7 + i / 100 for i in range(8)], [0.6 + i / 90 for i in range(8)]
    table = by_target(results(stream("tent", "fixed", good), stream("tent", "exponential", bad)))
    assert [row.label for row in table.rows] == ["Tent", "Tent + exponential"]
    cell = table.rows[1].cells[0]
    assert cell is not None
    assert cell.significance == "worse"


def test_names_cannot_leave_their_cell():
    table = by_target(results(stream("a|b_c", "fixed", [0.5], target="x&y")))
    assert r"| a\|b\_c |" in markdown(table)
    assert r"a|b\_c &" in latex(table)
    assert r"Method & x\&y &" in latex(table)


def test_source_leads_and_rates_of_a_method_stay_together():
    order = [("tent", "dynamic"), ("ptbn", "none"), ("tent", "fixed"), ("source", "none")]
    table = by_target(results(*(stream(method, rate, [0.5]) for method, rate in order)))
    assert [row.label for row in table.rows] == ["Source", "Tent", "Tent + dynamic", "PTBN"]


def test_unknown_target_says_what_there_is():
    with pytest.raises(SettingError, match=r"no stream of \('A', 'Z'\); found \[\('A', 'A'\), \('A', 'B'\)\]"):
        by_metric(one_target(), ("A", "Z"))


def test_labels_and_titles():
    assert method_label("source", "none") == "Source"
    assert method_label("mine", "dynamic") == "mine + dynamic"
    assert metric_title("dice_RNFL") == "Dice RNFL"
    assert metric_title("asd", unit="mm") == "ASD (mm)"
    assert (metric_word("accuracy"), metric_word("dice")) == ("accuracy", "Dice")


def test_a_method_of_fewer_trainings_is_compared_with_the_source_models_of_those():
    """One training of Tent gains 10 points over its own source model; the mean over both source models is 20 lower."""
    found = results(
        stream("source", "none", [0.6] * 4),
        stream("source", "none", [0.2] * 4, seed=1),
        stream("tent", "fixed", [0.7] * 4),
        stream("ptbn", "none", [0.5] * 4),
        stream("ptbn", "none", [0.3] * 4, seed=1),
    )
    tent, ptbn = (next(row for row in by_target(found).rows if row.method == name) for name in ("tent", "ptbn"))
    assert tent.cells[0].gain == pytest.approx(0.1)
    assert tent.cells[0].interval == pytest.approx((0.1, 0.1))
    assert tent.worse == 0.0
    assert ptbn.cells[0].gain == pytest.approx(0.0)
    assert ptbn.worse == 0.0  # every case: 10 points lost with one training, 10 gained with the other


def test_a_rate_of_fewer_trainings_is_tested_against_the_fixed_rate_of_those():
    """It is worse on every case of its training; against the mean of both trainings it would seem better."""
    found = results(
        stream("tent", "fixed", [0.71, 0.72, 0.73, 0.74, 0.75, 0.76]),
        stream("tent", "fixed", [0.1] * 6, seed=1),
        stream("tent", "dynamic", [0.70, 0.70, 0.70, 0.70, 0.70, 0.70]),
    )
    (row,) = [row for row in by_target(found).rows if row.rate == "dynamic"]
    assert row.cells[0].significance == "worse"


def test_a_stream_that_ends_before_the_memory_is_ready_is_said_to():
    silent = stream("tent", "dynamic", [0.7, 0.8])
    silent = replace(silent, cases=tuple(replace(case, discrepancy=None) for case in silent.cases))
    found = results(stream("source", "none", [0.6, 0.6]), stream("ttt", "dynamic", [0.7, 0.8]), silent)
    said = [note for note in by_target(found).notes if "memory" in note]
    assert said == [
        "At B the stream ended before the memory was ready, so the dynamic rate and its controls stayed the initial "
        "one: Tent + dynamic."
    ]
    assert not [note for note in by_target(one_target()).notes if "memory" in note]
