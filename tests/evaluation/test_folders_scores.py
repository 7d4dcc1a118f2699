import numpy as np
import pytest
from PIL import Image

from dltta.errors import DataError
from dltta.evaluation.folders import record_csv, score_folders


def masks(folder, **images):
    folder.mkdir(parents=True)
    for name, rows in images.items():
        Image.fromarray(np.array(rows, dtype=np.uint8)).save(folder / f"{name}.png")
    return folder


LABEL = [[0, 1, 1, 0]] * 4


def test_masks_of_the_same_name_by_hand(tmp_path):
    labels = masks(tmp_path / "labels", a=LABEL, b=LABEL)
    predictions = masks(tmp_path / "predictions", a=LABEL, b=[[0, 1, 0, 0]] * 4)
    record = score_folders(predictions, labels)
    assert [row.metrics["dice"] for row in record.cases] == [1.0, pytest.approx(2 / 3)]
    assert record.metrics["dice"] == pytest.approx(5 / 6)
    lines = record_csv(record).splitlines()
    assert lines[0].startswith("case,dice,dice_class_1,hd95")
    assert lines[2].startswith(f"b,{2 / 3!r}")


def test_missing_and_misshapen_predictions_are_named(tmp_path):
    labels = masks(tmp_path / "labels", a=LABEL, b=LABEL)
    with pytest.raises(DataError, match=r"has no prediction b\.png"):
        score_folders(masks(tmp_path / "few", a=LABEL), labels)
    with pytest.raises(DataError, match=r"b\.png"):
        score_folders(masks(tmp_path / "wide", a=LABEL, b=[[0, 1, 1, 0, 0]] * 4), labels)
    with pytest.raises(DataError, match="there is no"):
        score_folders(labels, tmp_path / "none")


@pytest.mark.parametrize("name", ["labelsTr", "labelsTs", "labels.csv"])
def test_a_site_instead_of_its_labels_says_which_to_give(tmp_path, name):
    predictions = masks(tmp_path / "predictions", a=LABEL)
    if name == "labels.csv":
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / name).write_text("image,label\na.png,cat\n")
    else:
        masks(tmp_path / "site" / name, a=LABEL)
    with pytest.raises(DataError, match=rf"site holds no masks; give .*site/{name}$"):
        score_folders(predictions, tmp_path / "site")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty holds no masks; give a folder of masks or a labels\.csv$"):
        score_folders(predictions, tmp_path / "empty")


def test_predictions_that_are_not_there_are_told_so(tmp_path):
    labels = masks(tmp_path / "labels", a=LABEL)
    with pytest.raises(DataError, match=r"there is no folder .*nowhere; give the output folder of dltta adapt$"):
        score_folders(tmp_path / "nowhere", labels)


def test_labels_that_are_no_class_numbers_are_refused(tmp_path):
    """Masks of 0 and 255, or images instead of labels, would otherwise score 0 without a word."""
    predictions = masks(tmp_path / "predictions", a=LABEL)
    (predictions / "stream.jsonl").write_text('{"event": "start", "classes": ["background", "cell"]}\n')
    white = masks(tmp_path / "white", a=(255 * np.array(LABEL)).tolist())
    with pytest.raises(DataError, match=r"a\.png: label value 255, but the classes are 0 to 1 \(background, cell\)"):
        score_folders(predictions, white)
    assert score_folders(predictions, masks(tmp_path / "labels", a=LABEL)).metrics["dice_cell"] == 1.0
    (tmp_path / "dataset.json").write_text(
        '{"channel_names": {"0": "grey"}, "labels": {"background": 0, "nucleus": 1}, "file_ending": ".png"}'
    )
    with pytest.raises(DataError, match=r"label value 255, but the classes are 0 to 1 \(background, nucleus\)"):
        score_folders(predictions, white)


@pytest.mark.parametrize("log", ["", "no json\n", "[1]\n", '{"event": "start"}\n'])
def test_a_log_without_classes_names_none(tmp_path, log):
    predictions = masks(tmp_path / "predictions", a=LABEL)
    (predictions / "stream.jsonl").write_text(log)
    record = score_folders(predictions, masks(tmp_path / "labels", a=LABEL))
    assert record.metrics["dice_class_1"] == 1.0


def test_tables_of_probabilities(tmp_path):
    labels, predictions = tmp_path / "labels.csv", tmp_path / "predictions.csv"
    labels.write_text("image,label\na.png,cat\nb.png,dog\n")
    predictions.write_text("image,cat,dog\nb.png,0.6,0.4\na.png,0.9,0.1\n")
    record = score_folders(predictions, labels)
    assert record.metrics["accuracy"] == 0.5
    assert [row.metrics["accuracy"] for row in record.cases] == [1.0, 0.0]
    predictions.write_text(
        "image,prediction,cat,dog,quality,quality_low,quality_high,review\n"
        "a.png,cat,0.6,0.4,0.9,0.8,1.0,False\nb.png,cat,0.7,0.3,,,,\n"
    )
    assert score_folders(predictions, labels).metrics["accuracy"] == 0.5  # what is expected of a case is no class
    predictions.write_text("image,cat\na.png,1\n")
    with pytest.raises(DataError, match="no column for class 'dog'"):
        score_folders(predictions, labels)
    predictions.write_text("image,cat,dog\na.png,1,0\n")
    with pytest.raises(DataError, match=r"no line for 'b\.png'"):
        score_folders(predictions, labels)
    predictions.write_text("image,cat,dog\na.png,1,0\nb.png,x,0\n")
    with pytest.raises(DataError, match="'x' where a probability"):
        score_folders(predictions, labels)
