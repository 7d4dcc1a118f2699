from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from dltta.data.check import check_published
from dltta.data.datasets.camelyon17 import Camelyon17
from dltta.errors import DataError

#       patient, node, x, y, tumor, slide, center, split
ROWS = [
    ("004", 4, 3328, 21792, 1, 0, 0, 0),
    ("004", 4, 3200, 22272, 0, 0, 0, 1),
    ("060", 3, 96, 192, 0, 30, 3, 0),
    ("020", 2, 10, 20, 1, 10, 1, 0),
    ("042", 3, 11, 21, 0, 23, 2, 1),
    ("042", 3, 12, 22, 1, 23, 2, 0),
]


def write(folder: Path, rows: list[tuple] = ROWS) -> Path:
    where = folder / "camelyon17_v1.0"
    where.mkdir(parents=True)
    lines = [",patient,node,x_coord,y_coord,tumor,slide,center,split"]
    for index, row in enumerate(rows):
        patient, node, x, y = row[:4]
        lines.append(f"{index}," + ",".join(map(str, row)))
        path = where / f"patches/patient_{patient}_node_{node}/patch_patient_{patient}_node_{node}_x_{x}_y_{y}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        patch = np.full((96, 96, 4), 255, np.uint8)  # the published patches have an alpha channel
        patch[..., :3] = (index, 100, 200)
        Pillow.fromarray(patch).save(path)
    (where / "metadata.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize(
    ("site", "patients"),
    [
        ("train", ["004", "060"]),
        ("id_val", ["004"]),
        ("val", ["020"]),
        ("test", ["042", "042"]),
        ("center_0", ["004", "004"]),
        ("center_3", ["060"]),
        ("center_2", ["042", "042"]),
    ],
)
def test_centers_and_official_splits(tmp_path, site, patients):
    opened = Camelyon17(write(tmp_path), site)
    assert list(opened.groups) == patients
    assert [case.group for case in opened] == patients
    assert (opened.site, opened.task, opened.classes) == (site, "classification", ("normal", "tumor"))


def test_a_patch_is_normalized_with_imagenets_statistics(tmp_path):
    case = Camelyon17(write(tmp_path) / "camelyon17_v1.0", "test")[1]
    assert case.name == "patch_patient_042_node_3_x_12_y_22"
    assert (case.site, case.label) == ("center_2", torch.tensor(1))
    assert case.image.shape == (3, 96, 96)
    expected = [(5 / 255 - 0.485) / 0.229, (100 / 255 - 0.456) / 0.224, (200 / 255 - 0.406) / 0.225]
    assert case.image[:, 40, 50].tolist() == pytest.approx(expected, abs=1e-6)


def test_wrong_parts_and_folders_are_refused(tmp_path):
    with pytest.raises(DataError, match="no part 'hospital_1' in Camelyon17; use one of center_0"):
        Camelyon17(write(tmp_path), "hospital_1")
    with pytest.raises(DataError, match="no camelyon17_v1.0/metadata.csv"):
        Camelyon17(tmp_path / "nowhere", "val")
    with pytest.raises(DataError, match="no patches of center_4"):
        Camelyon17(tmp_path, "center_4")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("tumor", "cancer", "columns tumor missing"),
        ("020,2,10,20,1", "020,2,10,20,x", "line 5 is malformed"),
        ("020,2,10,20,1,10,1", "020,2,10,20,1,10,7", "line 5 has center 7"),
        ("020,2,10,20,1", "../x,2,10,20,1", "line 5 is malformed"),
    ],
)
def test_malformed_metadata_is_one_line(tmp_path, old, new, says):
    path = write(tmp_path) / "camelyon17_v1.0" / "metadata.csv"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(DataError, match=says):
        Camelyon17(tmp_path, "val")


def test_a_patch_of_another_size_is_refused(tmp_path):
    opened = Camelyon17(write(tmp_path), "val")
    path = next((tmp_path / "camelyon17_v1.0" / "patches" / "patient_020_node_2").iterdir())
    Pillow.fromarray(np.zeros((95, 96, 3), np.uint8)).save(path)
    with pytest.raises(DataError, match=r"RGB of 96 x 96, found \(3, 95, 96\)"):
        opened[0]


def test_check_counts_and_looks_at_every_patch(tmp_path):
    write(tmp_path)
    patches = tmp_path / "camelyon17_v1.0" / "patches"
    next((patches / "patient_060_node_3").iterdir()).unlink()
    next((patches / "patient_020_node_2").iterdir()).write_bytes(b"broken")
    found = [str(problem) for problem in check_published("camelyon17", tmp_path)]
    assert any("2 patches of train, published are 302436" in line for line in found)
    assert any("1 patches missing" in line for line in found)
    assert any("cannot be read as PNG" in line for line in found)
    assert len(found) == 6
    assert len(check_published("camelyon17", tmp_path / "nowhere")) == 1
