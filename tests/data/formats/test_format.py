"""A format from outside, one class, through everything that reads and writes images."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import toys
from dltta.data.check import check_site
from dltta.data.formats import format as registry
from dltta.data.formats.format import Geometry, endings, formats, register
from dltta.data.formats.images import read_geometry, read_image, read_mask, write_mask
from dltta.data.inbox import find_incoming, read_incoming
from dltta.data.outputs import write_prediction
from dltta.data.sites import open_site
from dltta.errors import DataError, SettingError
from dltta.testing import check_format
from toys import Toy

TOY = Path(toys.__file__).read_text()
VALUES = np.arange(12, dtype=np.uint8).reshape(3, 4)


def toy(path: Path, values: np.ndarray = VALUES) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"TOY" + bytes([*values.shape, values.itemsize]) + values.tobytes())
    return path


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setattr(registry, "_registered", [])
    register(Toy())


def test_ours_are_found_by_their_modules():
    assert sorted(format.name for format in formats()) == ["NIfTI", "PNG", "TIFF"]
    assert endings() == (".nii", ".nii.gz", ".png", ".tif", ".tiff")


@pytest.mark.usefixtures("known")
def test_a_registered_format_is_read_and_written_by_the_usual_functions(tmp_path):
    path = toy(tmp_path / "a.toy")
    assert read_geometry(path) == Geometry("toy", (3, 4), 1, 255)
    assert np.array_equal(read_image(path).array[0], VALUES)
    write_mask(tmp_path / "m.toy", VALUES % 3, read_geometry(path))
    assert np.array_equal(read_mask(tmp_path / "m.toy"), VALUES % 3)
    (tmp_path / "bad.toy").write_bytes(b"TOY")
    with pytest.raises(DataError, match="bad.toy: cannot be read as Toy"):
        read_image(tmp_path / "bad.toy")


@pytest.mark.usefixtures("known")
def test_a_site_may_be_of_a_registered_format(tmp_path):
    content = {"channel_names": {"0": "grey"}, "labels": {"background": 0, "cell": 1}, "file_ending": ".toy"}
    toy(tmp_path / "imagesTr" / "a_0000.toy")
    toy(tmp_path / "labelsTr" / "a.toy", VALUES % 2)
    (tmp_path / "dataset.json").write_text(json.dumps(content))
    assert check_site(tmp_path) == []
    [case] = open_site(tmp_path)
    assert np.array_equal(case.image[0], VALUES)
    assert np.array_equal(case.label, VALUES % 2)


@pytest.mark.usefixtures("known")
def test_a_registered_format_arrives_and_is_predicted_in_its_own_format(tmp_path):
    for channel in (0, 1):
        toy(tmp_path / "in" / f"a_{channel:04d}.toy", VALUES + channel)
    [case] = find_incoming(tmp_path / "in")
    assert (case.name, case.kind, case.problem) == ("a", "toy", None)
    image = read_incoming(case)
    assert image.array.shape == (2, 3, 4)
    path = write_prediction(tmp_path / "out", case, VALUES % 2, image.geometry, ("background", "cell"))
    assert path == tmp_path / "out" / "a.toy"
    assert np.array_equal(read_mask(path), VALUES % 2)


def test_an_installed_package_brings_its_format_by_an_entry_point(tmp_path):
    (tmp_path / "toys.py").write_text(TOY)
    info = tmp_path / "toys-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dltta.formats]\ntoy = toys:Toy\n")
    path = toy(tmp_path / "a.toy")
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from dltta.data.formats.images import read_image\n"
        f"print(int(read_image({str(path)!r}).array.sum()))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout == "66\n"
    (info / "entry_points.txt").write_text("[dltta.formats]\ntoy = toys:Missing\n")
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "SettingError: image format toys:Missing cannot be imported" in found.stderr


@pytest.mark.usefixtures("known")
def test_two_formats_of_one_name_or_ending_and_what_is_no_format_are_refused():
    with pytest.raises(SettingError, match="name or the endings of Toy"):
        register(Toy())

    class Other(Toy):
        name, endings = "Other", (".png",)

    with pytest.raises(SettingError, match="name or the endings of PNG"):
        register(Other())
    with pytest.raises(SettingError, match="is no image format"):
        register(object())


def test_the_longest_ending_names_the_format(monkeypatch):
    class Pyramid(Toy):
        name, endings = "Pyramid", (".ome.tif",)

    monkeypatch.setattr(registry, "_registered", [])
    register(Pyramid())
    assert registry.format_of(Path("a.ome.tif")).name == "Pyramid"
    assert registry.format_of(Path("a.tif")).name == "TIFF"


# the contract


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.nii", "a.nii.gz"])
def test_ours_keep_the_contract(tmp_path, name):
    import nibabel as nib
    import tifffile
    from PIL import Image as Pillow

    values = np.random.default_rng(0).integers(0, 255, (300, 300), dtype=np.uint8)
    if ".nii" in name:
        nib.save(nib.Nifti1Image(values[..., None], np.eye(4)), tmp_path / name)
    elif name == "a.tif":
        tifffile.imwrite(tmp_path / name, values)
    else:
        Pillow.fromarray(values).save(tmp_path / name)
    [format] = [format for format in formats() if any(name.endswith(ending) for ending in format.endings)]
    check_format(format, tmp_path / name)


def test_a_toy_keeps_the_contract(tmp_path):
    check_format(Toy(), toy(tmp_path / "a.toy"))


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ({"begins": None}, "must have all that Format names"),
        ({"endings": (".TOY",)}, "endings must hold the example's"),
        ({"begins": lambda self, start: False}, "must know its own file"),
        ({"begins": lambda self, start: True}, "must not take b''"),
        ({"read_geometry": lambda self, path: Geometry("png", (3, 4))}, "must call its geometries 'toy'"),
        ({"read_pixels": lambda self, path: VALUES}, r"must give \(1, 3, 4\) as its geometry"),
        ({"read_pixels": lambda self, path: np.random.default_rng().random((1, 3, 4))}, "the same values again"),
        ({"read_classes": lambda self, path: VALUES * 0}, "must read the class values"),
        ({"complete": lambda self, path: False}, "complete must know a whole file"),
        ({"complete": lambda self, path: True}, "must not take half a file for a whole one"),
        (
            {
                "read_pixels": lambda self, path: VALUES[None] * bool(path.stat().st_size > 9),
                "_open": lambda self, path: VALUES,
                "read_classes": lambda self, path: np.frombuffer(
                    path.read_bytes()[6:], f"u{path.read_bytes()[5]}"
                ).reshape(3, 4),
            },
            "must refuse a file that is cut after 0",
        ),
    ],
)
def test_a_broken_contract_is_named(tmp_path, broken, says):
    if broken.get("begins", True) is None:
        wrong = type("Wrong", (), {"name": "Toy", "endings": (".toy",)})()
    else:
        wrong = type("Wrong", (Toy,), broken)()
    with pytest.raises(AssertionError, match=says):
        check_format(wrong, toy(tmp_path / "a.toy"))
