"""What a real MLflow has of a stream: each once, with its settings, scores and curves."""

from dataclasses import replace

import pytest

from dltta.evaluation.results import StreamResult
from dltta.evaluation.run import CaseRecord
from dltta.evaluation.tracking import TAG, MLflow
from dltta.recipes import Recipe

CASES = (CaseRecord("x", "b", {"dice": 0.5}, 0.1, loss=2.0, rate=1e-3), CaseRecord("y", "b", {"dice": 0.75}, 0.1))
STREAM = StreamResult("b", "segmentation", {"dice": 0.625}, CASES, "a", "tent", "fixed", 0, 1)


@pytest.fixture
def mlflow(monkeypatch):
    found = pytest.importorskip("mlflow", reason="MLflow is not installed: pip install 'dltta[mlflow]'")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    yield found
    found.set_tracking_uri(None)


@pytest.mark.long
def test_mlflow_has_every_stream_once_in_a_file_beside_the_results(tmp_path, mlflow):
    for _ in range(2):  # the command, and the same command again
        tracker = MLflow(tmp_path / "tracking", "ab")
        tracker.stream("b_tent_1", Recipe("tent", "fixed", alpha=1e-3), STREAM)
        tracker.stream("b_tent_2", Recipe("tent", "fixed", alpha=1e-3), replace(STREAM, order=2))
    assert (tmp_path / "tracking" / "mlflow.db").is_file()
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'tracking' / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("ab").experiment_id], order_by=["tags.mlflow.runName"])
    assert [(run.data.tags[TAG], run.data.params["order"], run.info.status) for run in runs] == [
        ("b_tent_1", "1", "FINISHED"),
        ("b_tent_2", "2", "FINISHED"),
    ]
    first = runs[0]
    assert {"target": "b", "method": "tent", "rate": "fixed", "alpha": "0.001"}.items() <= first.data.params.items()
    assert first.data.metrics["dice"] == 0.625
    curve = client.get_metric_history(first.info.run_id, "case_dice")
    assert [(point.step, point.value) for point in curve] == [(0, 0.5), (1, 0.75)]


@pytest.mark.long
def test_mlflow_writes_where_its_own_variable_says(tmp_path, mlflow, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'elsewhere.db'}")
    MLflow(tmp_path / "tracking", "ab").stream("key", Recipe("tent", "fixed"), STREAM)
    assert not (tmp_path / "tracking").exists()
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'elsewhere.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("ab").experiment_id])
    assert run.data.tags[TAG] == "key"
