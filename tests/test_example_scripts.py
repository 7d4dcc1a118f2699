"""What the examples show runs as it stands."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_adapting_to_a_folder(tmp_path, capsys):
    load(ROOT / "examples" / "adapt_folder.py").main(tmp_path)
    out = capsys.readouterr().out
    assert "  3 predicted, 0 had a prediction" in out
    assert "  6 predicted, 3 had a prediction" in out
    assert "wrong with the record: nothing" in out
    assert "back to version 4, which is now version 10" in out
    lines = [json.loads(line) for line in (tmp_path / "predictions" / "stream.jsonl").read_text().splitlines()]
    assert lines[9]["discrepancy"] > 0
    assert lines[8]["discrepancy"] is None
    assert (tmp_path / "adapted" / "model.json").is_file()


def test_a_series_to_try_the_node_with_is_a_volume(tmp_path):
    pytest.importorskip("pydicom", reason="DICOM is not installed: pip install 'dltta[dicom]'")
    from dltta.data.formats.dicom import read_series

    load(ROOT / "examples" / "dicom_series.py").main(tmp_path / "series", 2)
    image = read_series(sorted((tmp_path / "series").iterdir()))
    assert image.array.shape == (1, 256, 128, 2)  # columns, rows, slices
    assert 1000 < image.array.max() <= 4095


def test_page_on_the_speed_of_adapt_is_the_one_that_its_result_gives():
    result = json.loads((ROOT / "docs" / "results" / "speed_adapt.json").read_text())
    page = load(ROOT / "benchmarks" / "adapt.py").page(result)
    assert page == (ROOT / "docs" / "speed-adapt.md").read_text()
