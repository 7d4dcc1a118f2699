import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_results import one_target, results, stream

from dltta.data.case import Case
from dltta.errors import DataError, SettingError
from dltta.evaluation.provenance import Provenance, checksum
from dltta.evaluation.results import Results, StreamResult, case_means
from dltta.evaluation.run import CaseRecord, StreamRecord


def changed(path: Path, edit: Any) -> Path:
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))
    return path


def test_round_trip(tmp_path):
    row = CaseRecord(
        "p",
        "B",
        {"accuracy": 1.0},
        0.2,
        decision="kept",
        reason="ood-score",
        label=1,
        prediction=1,
        probabilities=(0.25, 0.75),
    )
    record = StreamRecord("B", "classification", {"accuracy": 1.0}, (row,))
    classified = StreamResult.of(record, source="A", method="tent", rate="dynamic", seed=3, order=2)
    written = results(*one_target().streams, classified)
    written.write(tmp_path / "results.json")
    assert Results.load(tmp_path / "results.json") == written


def test_volumes_and_their_slices_come_back(tmp_path):
    base = stream("tent", "fixed", [0.5, 0.7])
    slices = tuple(CaseRecord(f"v{v}_slice000", "B", {}, None, group=f"p{v}", volume=f"v{v}") for v in range(2))
    volumes = tuple(replace(case, missed=1, invented=2, group="p0") for case in base.cases)
    written = results(replace(base, cases=slices, volumes=volumes))
    written.write(tmp_path / "results.json")
    assert Results.load(tmp_path / "results.json") == written
    (found,) = json.loads((tmp_path / "results.json").read_text())["streams"]
    assert [row["case"] for row in found["volumes"]] == ["case_0", "case_1"]
    assert (found["missed"], found["invented"]) == (2, 4)
    (row,) = [row for row in written.summary if row.metric == "dice"]
    assert (row.cases, row.case_sd) == (2, pytest.approx(0.2 / math.sqrt(2)))


def test_undefined_numbers_are_null_and_come_back_as_nan(tmp_path):
    path = tmp_path / "results.json"
    results(stream("source", "none", [0.5, math.nan])).write(path)
    document = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert document["streams"][0]["cases"][1]["metrics"]["dice"] is None
    assert math.isnan(Results.load(path).streams[0].cases[1].metrics["dice"])


def test_same_results_give_the_same_bytes(tmp_path):
    one_target().write(tmp_path / "a.json")
    Results.load(tmp_path / "a.json").write(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_file_follows_the_contract(tmp_path):
    one_target().write(tmp_path / "results.json")
    document = json.loads((tmp_path / "results.json").read_text())
    assert list(document) == ["schema", "config", "provenance", "streams", "summary"]
    assert {"source", "target", "method", "rate", "seed", "order", "metrics", "cases"} <= set(document["streams"][0])
    assert document["summary"][2] == {
        "source": "A", "target": "B", "method": "source", "rate": "none", "metric": "dice",
        "mean": pytest.approx(0.6), "sd": None, "n": 1, "case_sd": pytest.approx(0.0597614), "cases": 8,
    }  # fmt: skip


def test_summary_is_over_streams_when_there_are_several():
    (row,) = [
        row
        for row in results(
            stream("tent", "fixed", [0.5, 0.7], seed=0), stream("tent", "fixed", [0.7, 0.9], seed=1)
        ).summary
        if row.metric == "dice"
    ]
    assert (row.mean, row.sd, row.n) == (pytest.approx(0.7), pytest.approx(0.2 / math.sqrt(2)), 2)
    assert math.isnan(row.case_sd)
    assert row.cases is None


def test_stream_that_does_not_define_a_metric_is_not_counted():
    undefined = replace(stream("tent", "fixed", [0.5], seed=1), metrics={"dice": math.nan})
    rows = results(stream("tent", "fixed", [0.5]), undefined).summary
    assert (rows[0].mean, rows[0].n) == (0.5, 1)


def test_right_and_wrong_predictions_have_no_spread_over_cases():
    row = CaseRecord("p", "B", {"accuracy": 1.0}, 0.2, label=1, prediction=1, probabilities=(0.25, 0.75))
    record = StreamRecord("B", "classification", {"accuracy": 1.0}, (row, replace(row, case="q")))
    (summary,) = results(StreamResult.of(record, source="A", method="source", rate="none", seed=0)).summary
    assert math.isnan(summary.case_sd)


def test_case_means_go_over_streams_and_keep_sites_apart():
    first, second = stream("tent", "fixed", [0.5, math.nan]), stream("tent", "fixed", [0.7, math.nan], seed=1)
    other = stream("tent", "fixed", [0.1], target="C")
    assert case_means([first, second, other], "dice") == {
        ("B", "case_0"): pytest.approx(0.6),
        ("C", "case_0"): pytest.approx(0.1),
    }


def test_stream_counts_once():
    with pytest.raises(DataError, match="two streams are A, B, tent, fixed, 0, 0"):
        results(stream("tent", "fixed", [0.5]), stream("tent", "fixed", [0.6]))


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "results.json"
    one_target().write(path)
    before = path.read_bytes()
    with pytest.raises(SettingError, match="cannot be written as JSON"):
        replace(one_target(), config={"model": torch.nn.Identity()}).write(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    one_target().write(path)
    before = path.read_bytes()

    def fail(self: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        results(stream("source", "none", [0.5])).write(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.pop("streams"), "the file has no 'streams'"),
        (lambda d: d.pop("summary"), "the file has no 'summary'"),
        (lambda d: d.update(schema=99), "schema 99, this version reads 2"),
        (lambda d: d.update(streams={}), "the file.streams should be list, found dict"),
        (lambda d: d["streams"].append(3), r"streams\[4\] has no 'cases'"),
        (lambda d: d["streams"][1].pop("method"), r"streams\[1\] has no 'method'"),
        (lambda d: d["streams"][1].update(seed=True), r"streams\[1\].seed should be int, found bool"),
        (lambda d: d["streams"][1].update(task="sorting"), r"streams\[1\].task is 'sorting'"),
        (lambda d: d["streams"][0]["cases"].append("x"), r"streams\[0\].cases\[2\] has no 'case'"),
        (lambda d: d["streams"][0]["cases"][1].update(unit="inch"), r"cases\[1\].unit is 'inch', not 'mm' or 'px'"),
        (lambda d: d["streams"][0]["cases"][1].update(seconds="2"), r"cases\[1\].*seconds"),
        (lambda d: d["streams"][0]["cases"][1]["metrics"].update(dice="high"), "metrics.dice should be a number"),
        (lambda d: d["streams"][0]["cases"][1].update(probabilities=["x"]), "probabilities.0 should be a number"),
        (lambda d: d["streams"][0]["metrics"].update(dice=math.nan), "NaN is not JSON"),
        (lambda d: d["provenance"].update(seeds=3), "provenance.seeds should be list, found int"),
    ],
)
def test_malformed_file_is_one_clear_line(tmp_path, edit, message):
    path = tmp_path / "results.json"
    one_target().write(path)
    with pytest.raises(DataError, match=message) as caught:
        Results.load(changed(path, edit))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_file_that_is_no_json_or_not_there(tmp_path):
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(DataError, match=r"x\.json cannot be read as results"):
        Results.load(tmp_path / "x.json")
    with pytest.raises(DataError, match=r"y\.json cannot be read as results"):
        Results.load(tmp_path / "y.json")
    (tmp_path / "z.json").write_text("[]")
    with pytest.raises(DataError, match="the file has no 'schema'"):
        Results.load(tmp_path / "z.json")


# ---- provenance


class Site(list[Case]):
    site, task, classes = "B", "segmentation", ("a", "b")


def test_provenance_names_code_machine_and_seeds():
    found = Provenance.collect(seeds=[1, 2], data={"B": "cc"})
    assert found.seeds == (1, 2)
    release = found.packages["torch"].partition("+")[0]  # a build for GPUs leaves its suffix out of the package
    assert release == torch.__version__.partition("+")[0]
    assert found.machine["torch_threads"] == torch.get_num_threads()
    assert {"cpu", "cores", "system"} <= set(found.machine)
    assert found.data == {"B": "cc"}


def test_checksum_sees_images_labels_and_names():
    case = Case("a", "B", "a", torch.zeros(1, 2, 2), torch.zeros(2, 2, dtype=torch.long))
    plain = checksum(Site([case]))
    assert plain == checksum(Site([replace(case, image=torch.zeros(1, 2, 2))]))
    others = [
        replace(case, name="b"),
        replace(case, image=torch.ones(1, 2, 2)),
        replace(case, label=torch.ones(2, 2, dtype=torch.long)),
        replace(case, label=None),
    ]
    assert len({plain, *(checksum(Site([other])) for other in others)}) == 5
