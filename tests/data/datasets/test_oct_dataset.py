import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch
from PIL import Image as Pillow

from dltta.data.check import check_published
from dltta.data.datasets.oct import (
    CIRRUS_SPACING,
    OCT,
    SPECTRALIS_SPACING,
    SPECTRALIS_SPLIT,
    display,
    find_retina,
    flatten_and_crop,
    layer_labels,
    normalize_intensity,
    read_bscan,
    read_delineation,
    read_vol_header,
    resize,
)
from dltta.data.sites import open_site
from dltta.errors import DataError

REAL = os.environ.get("DLTTA_DATA")
THICKNESS = np.array([12, 22, 11, 9, 24, 8, 7, 9])  # rows of RNFL ... RPE, 102 in all
GREY = np.array([0.75, 0.5, 0.35, 0.45, 0.2, 0.5, 0.85, 0.9])


def curved(rows: int = 300, columns: int = 200, bend: float = 25.0) -> tuple[np.ndarray, np.ndarray]:
    """A B-scan (rows, columns) and its boundaries (9, columns), rows from 1; Bruch's membrane is a parabola."""
    x = np.linspace(-1, 1, columns)
    bruch = np.rint(rows * 0.6 + bend * x**2 + 6 * x)
    boundaries = bruch - np.concatenate([np.cumsum(THICKNESS[::-1])[::-1], [0]])[:, None]
    image = np.full((rows, columns), 0.08)
    row = np.arange(1, rows + 1)[:, None]
    image[row > boundaries[-1]] = 0.3  # choroid
    for layer, grey in enumerate(GREY):
        image[(row > boundaries[layer]) & (row <= boundaries[layer + 1])] = grey
    noise = np.random.default_rng(0).normal(0, 0.03, image.shape)
    return np.clip(image + noise, 0, 1), boundaries


def write_vol(
    path: Path, scans: np.ndarray, spacing: tuple[float, float] = SPECTRALIS_SPACING, slice_header: int = 512
) -> None:
    """The published format, field by field: file header, SLO image, then a header and float32 pixels per B-scan."""
    slices, rows, columns = scans.shape
    slo = (5, 3)
    header = b"HSF-OCT-103\0"
    header += struct.pack("<iii", columns, slices, rows)
    header += struct.pack("<ddd", spacing[1], 0.12, spacing[0])
    header += struct.pack("<ii", *slo) + struct.pack("<dd", 0.01, 0.01) + struct.pack("<i", 30)
    header += struct.pack("<d", -1.25) + b"OD\0\0" + struct.pack("<q", 0) + struct.pack("<i", 3)
    header += struct.pack("<i", slice_header)
    header += b"\0" * (2048 - len(header))
    body = bytes(range(slo[0] * slo[1]))
    for n, scan in enumerate(scans):
        start = b"HSF-BS-103\0\0" + struct.pack("<i", slice_header) + struct.pack("<dddd", 0, n, 1, n)
        body += start + b"\xff" * (slice_header - len(start)) + scan.astype("<f4").tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header + body)


def write_prepared(folder: Path, name: str, image: np.ndarray, boundaries: list | np.ndarray) -> None:
    for sub in ("image", "label"):
        (folder / sub).mkdir(parents=True, exist_ok=True)
    Pillow.fromarray(np.rint(image * 255).astype(np.uint8)).save(folder / "image" / f"{name}.png")
    rows = [[None if np.isnan(v) else float(v) for v in line] for line in np.asarray(boundaries, dtype=float)]
    (folder / "label" / f"{name}.txt").write_text(json.dumps({"bds": rows, "lesion": []}))


def test_a_vol_file_gives_header_and_pixels_with_missing_data_marked(tmp_path):
    scans = np.random.default_rng(1).random((3, 4, 5))
    scans[1, 2, 3] = np.finfo(np.float32).max
    write_vol(tmp_path / "a.vol", scans, (0.004, 0.006))
    header = read_vol_header(tmp_path / "a.vol")
    assert (header.version, header.slices, header.rows, header.columns) == ("HSF-OCT-103", 3, 4, 5)
    assert header.spacing == (0.004, 0.006)
    assert header.distance == 0.12
    for position in range(3):
        expected = scans[position].astype(np.float32)
        found = read_bscan(tmp_path / "a.vol", header, position)
        missing = expected > 3e38
        assert np.array_equal(np.isnan(found), missing)
        assert np.array_equal(found[~missing], expected[~missing])


def test_display_is_the_fourth_root_and_zero_where_data_are_missing():
    assert display(np.array([[0.0, 0.0625, 1.0, np.nan, 2.0]])).tolist() == [[0.0, 0.5, 1.0, 0.0, 1.0]]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data[:-1], "it is cut short; copy it again"),
        (lambda data: b"HSF-XYZ" + data[7:], "not a Heidelberg .vol file"),
        (lambda data: data[:100], "not a Heidelberg .vol file"),
        (lambda data: data[:16] + struct.pack("<i", -1) + data[20:], "header says -1 B-scans"),
    ],
)
def test_a_malformed_vol_file_is_one_line(tmp_path, change, says):
    write_vol(tmp_path / "a.vol", np.zeros((2, 4, 5)))
    (tmp_path / "a.vol").write_bytes(change((tmp_path / "a.vol").read_bytes()))
    with pytest.raises(DataError, match=says):
        read_vol_header(tmp_path / "a.vol")


def test_layers_lie_between_boundaries_and_a_boundary_is_the_last_row_above(tmp_path):
    boundaries = np.array([[2], [3], [3], [5], [6], [6.5], [8], [8.4], [9]], dtype=float)
    #            row from 1:                  1  2  3  4  5  6  7  8  9  10
    assert layer_labels(boundaries, 10)[:, 0].tolist() == [0, 0, 1, 3, 3, 4, 5, 6, 8, 0]
    boundaries[3] = np.nan  # layers 3 and 4 are unknown
    assert layer_labels(boundaries, 10)[:, 0].tolist() == [0, 0, 1, 0, 0, 0, 5, 6, 8, 0]


def test_dense_delineations(tmp_path):
    dense = np.arange(9.0)[None, None, :] * 10 + np.arange(6)[:, None, None] + np.array([1, 5])[None, :, None]
    dense[2, 1, 4] = 0  # missing
    scipy.io.savemat(tmp_path / "a.mat", {"bd_pts": dense})
    found = read_delineation(tmp_path / "a.mat", 6)
    assert found.shape == (2, 9, 6)
    assert found[1, 3, 2] == 30 + 2 + 5
    assert np.isnan(found[1, 4, 2])
    assert np.isnan(found).sum() == 1


def test_control_points_are_joined_by_a_natural_spline_and_level_beyond(tmp_path):
    cells = np.empty((2, 11), dtype=object)
    for bscan in range(2):
        for boundary in range(11):
            y = 10.0 * boundary
            cells[bscan, boundary] = np.array([[3, y + 1], [5, y + 1], [7, y + 3]])
    cells[0, 2] = cells[0, 10] = np.zeros((0, 0))
    cells[1, 0] = np.zeros((0, 0))
    scipy.io.savemat(tmp_path / "a.mat", {"control_pts": cells})
    found = read_delineation(tmp_path / "a.mat", 9)
    assert found.shape == (2, 9, 9)
    # By hand: second derivatives 0, m, 0 at 3, 5, 7 with 4 * 2 m = 6 (2 / 2 - 0), so m = 3 / 4; at 4: 1 - m / 4.
    assert found[0, 0].tolist() == pytest.approx([1, 1, 1, 1 - 3 / 16, 1, 2 - 3 / 16, 3, 3, 3])
    assert found[0, 2, 0] == 31  # the 3rd and the 11th of 11 boundaries are left out
    assert found[0, 8, 0] == 91
    assert np.isnan(found[1, 0]).all()
    assert not np.isnan(found[1, 1]).any()


def test_no_boundary_rises_above_the_one_before(tmp_path):
    cells = np.empty((1, 9), dtype=object)
    for boundary in range(9):
        cells[0, boundary] = np.array([[1, 10.0 - boundary], [4, 20.0 + boundary]])
    scipy.io.savemat(tmp_path / "a.mat", {"control_pts": cells})
    found = read_delineation(tmp_path / "a.mat", 4)
    assert found[0, :, 0].tolist() == [10.0] * 9
    assert found[0, :, 3].tolist() == [20.0 + n for n in range(9)]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"other": 1}, "neither bd_pts nor control_pts, found other"),
        ({"bd_pts": np.zeros((5, 2, 9))}, r"bd_pts \(5, 2, 9\) do not fit 6 columns"),
        ({"bd_pts": np.zeros((6, 2, 7))}, "7 boundaries instead of 9"),
        ({"bd_pts": np.zeros((6, 2, 9)), "clims_x": [1, 2]}, "part of the volume"),
    ],
)
def test_other_delineations_are_refused_in_words(tmp_path, content, says):
    scipy.io.savemat(tmp_path / "a.mat", content)
    with pytest.raises(DataError, match=says):
        read_delineation(tmp_path / "a.mat", 6)
    (tmp_path / "b.mat").write_text("no matlab")
    with pytest.raises(DataError, match="cannot be read as a MATLAB file"):
        read_delineation(tmp_path / "b.mat", 6)
    with pytest.raises(DataError, match="delineation missing"):
        read_delineation(tmp_path / "c.mat", 6)


def test_the_retina_is_found_from_intensities(tmp_path):
    image, boundaries = curved()
    top, bottom = find_retina(image, SPECTRALIS_SPACING)
    assert np.abs(top + 1 - boundaries[0]).mean() < 2
    assert np.abs(bottom + 1 - boundaries[-1]).max() < 3


def test_bruchs_membrane_is_level_after_flattening_and_the_image_moved_with_its_boundaries():
    image, boundaries = curved()
    assert np.ptp(boundaries[-1]) > 20
    flat, moved, _ = flatten_and_crop(image, boundaries, SPECTRALIS_SPACING)
    assert len(flat) == 128
    assert np.ptp(moved[-1]) <= 3
    assert np.allclose(np.diff(moved, axis=0), THICKNESS[:, None])
    assert abs(np.median(moved[-1]) - (128 - round(0.06 / 0.0039))) <= 2
    labels = layer_labels(moved, 128)
    for layer, grey in enumerate(GREY, start=1):
        assert flat[labels == layer].mean() == pytest.approx(grey, abs=0.01)


def test_a_retina_thicker_than_the_crop_is_kept_whole_and_shrunk():
    image, boundaries = curved(rows=600)
    spacing = (SPECTRALIS_SPACING[0] / 2, SPECTRALIS_SPACING[1])
    image, boundaries = np.repeat(image, 2, axis=0), boundaries * 2
    flat, moved, spacing = flatten_and_crop(image, boundaries, spacing)
    assert len(flat) > 200
    assert moved.min() > 1
    small, moved, resized = resize(flat, moved, spacing, (128, 200))
    assert small.shape == (128, 200)
    assert resized[0] == pytest.approx(spacing[0] * len(flat) / 128)
    labels = layer_labels(moved, 128)
    assert small[labels == 5].mean() == pytest.approx(0.2, abs=0.1)
    assert small[labels == 7].mean() == pytest.approx(0.85, abs=0.1)


def test_resize_moves_edges_and_boundaries_alike():
    image = np.zeros((8, 4))
    image[4:] = 1.0  # below boundary 4, counted from 1
    large, moved, spacing = resize(image, np.full((9, 4), 4.0), (0.1, 0.2), (16, 2))
    assert spacing == (0.05, 0.4)
    # The edge lies between rows 4 and 5 of 8, so between 8 and 9 of 16; the center of row 4 is at 7.5.
    assert (large[:7] < 0.5).all()
    assert (large[8:] > 0.5).all()
    assert moved[0].tolist() == [7.5, 7.5]


def spectralis(folder: Path, subjects: tuple[str, ...], slices: int = 2) -> Path:
    image, boundaries = curved()
    for subject in subjects:
        stem = f"{subject}_spectralis_macula_v1_s1_R"
        write_vol(folder / "spectralis" / "vol" / f"{stem}.vol", np.stack([image**4] * slices))
        (folder / "spectralis" / "delineation").mkdir(exist_ok=True)
        dense = np.repeat(boundaries.T[:, None, :], slices, axis=1)
        scipy.io.savemat(folder / "spectralis" / "delineation" / f"{stem}.mat", {"bd_pts": dense})
    return folder


def test_the_published_form_gives_slices_of_the_papers_size(tmp_path):
    site = OCT(spectralis(tmp_path, ("hc10", "hc09")), "spectralis", split="train")
    assert len(site) == 2
    assert site.classes == ("background", "RNFL", "GCIP", "INL", "OPL", "ONL", "IS", "OS", "RPE")
    case = site[1]
    assert (case.name, case.site, case.group) == ("hc10_spectralis_macula_v1_s1_R_2", "spectralis", "hc10")
    assert case.image.shape == (1, 128, 1024)
    assert case.image.dtype == torch.float32
    assert case.label is not None
    assert case.label.shape == (128, 1024)
    assert case.label.unique().tolist() == list(range(9))
    shown = curved()[0].astype(np.float32)
    brightest = max(np.median(shown[row - 7 : row + 8, column]) for row in range(7, 293) for column in range(200))
    for layer in (1, 5, 8):
        expected = GREY[layer - 1] / (brightest + 0.05)
        assert float(case.image[0][case.label == layer].mean()) == pytest.approx(expected, abs=0.02)
    assert case.spacing == pytest.approx((0.0039, 0.0058 * 200 / 1024))
    assert [c.group for c in OCT(tmp_path, "spectralis", split="val")] == ["hc09", "hc09"]


def test_a_delineation_of_another_volume_is_refused(tmp_path):
    spectralis(tmp_path, ("hc10",))
    path = tmp_path / "spectralis" / "delineation" / "hc10_spectralis_macula_v1_s1_R.mat"
    scipy.io.savemat(path, {"bd_pts": np.ones((200, 1, 9))})
    with pytest.raises(DataError, match=r"1 B-scans, hc10_spectralis_macula_v1_s1_R.vol has 2"):
        OCT(tmp_path, "spectralis")[1]


def test_the_split_has_the_papers_sizes_and_no_subject_twice():
    assert {name: 49 * len(subjects) for name, subjects in SPECTRALIS_SPLIT.items()} == {
        "train": 588,
        "val": 147,
        "test": 980,
    }
    assert [(subjects[0], subjects[-1]) for subjects in SPECTRALIS_SPLIT.values()] == [
        ("hc10", "ms21"), ("hc09", "ms14"), ("hc01", "ms12"),
    ]  # fmt: skip
    held = set(SPECTRALIS_SPLIT["val"]) | set(SPECTRALIS_SPLIT["test"])
    assert held == {f"hc{n:02d}" for n in range(1, 10)} | {f"ms{n:02d}" for n in range(1, 15)}
    everyone = [subject for subjects in SPECTRALIS_SPLIT.values() for subject in subjects]
    assert sorted(everyone) == [f"hc{n:02d}" for n in range(1, 15)] + [f"ms{n:02d}" for n in range(1, 22)]


def test_the_prepared_form_is_taken_as_it_is(tmp_path):
    boundaries = np.repeat((np.arange(9) * 10.0 + 20)[:, None], 1024, axis=1)
    boundaries[2, 100] = np.nan
    image = np.linspace(0, 1, 128)[:, None] * np.ones((1, 1024))
    for n in (10, 2):
        write_prepared(tmp_path / "spectralis", f"hc01_spectralis_macula_v1_s1_R_{n}", image, boundaries)
    site = OCT(tmp_path, "spectralis", split="test")
    assert [name[-3:] for name in site.names] == ["R_2", "_10"]
    case = site[0]
    assert np.allclose(case.image[0], np.rint(image * 255) / 255)
    assert case.label is not None
    assert case.label[19:31, 0].tolist() == [0] + [1] * 10 + [2]
    assert case.label[30:50, 100].unique().tolist() == [0]  # GCIP and INL share the missing boundary
    assert case.spacing == SPECTRALIS_SPACING


def test_cirrus_slices_as_acquired_are_brought_to_spectralis_resolution(tmp_path):
    image, boundaries = curved()
    size = (
        round(300 * SPECTRALIS_SPACING[0] / CIRRUS_SPACING[0]),
        round(200 * SPECTRALIS_SPACING[1] / CIRRUS_SPACING[1]),
    )
    native, lines, _ = resize(image, boundaries, SPECTRALIS_SPACING, size)
    write_prepared(tmp_path / "cirrus", "s1_1", native, lines)
    case = OCT(tmp_path, "cirrus", spacing=CIRRUS_SPACING)[0]
    assert (case.group, case.image.shape) == ("s1", (1, 128, 1024))
    assert case.label is not None
    assert case.spacing is not None
    assert case.spacing[0] == pytest.approx(0.0039, rel=0.01)
    thickness = [(case.label == layer).sum(0).double().mean().item() for layer in range(1, 9)]
    assert thickness == pytest.approx(THICKNESS.tolist(), abs=0.7)


def test_slices_of_a_macular_cube_are_known_by_their_size_and_prepared(tmp_path):
    image, boundaries = curved()
    native, lines, _ = resize(image / 2, boundaries, SPECTRALIS_SPACING, (1024, 512))
    write_prepared(tmp_path / "cirrus", "s1_1", native, lines)
    found, told = OCT(tmp_path, "cirrus")[0], OCT(tmp_path, "cirrus", spacing=CIRRUS_SPACING)[0]
    assert torch.equal(found.image, told.image)
    assert torch.equal(found.label, told.label)
    level = [int((found.label[:, column] == 8).nonzero().max()) for column in range(0, 1024, 64)]
    assert max(level) - min(level) <= 3  # Bruch's membrane was a parabola of a hundred rows
    assert found.image[0][found.label == 8].median() > 0.8  # 0.45 as drawn, before the contrast is stretched


def test_a_slice_that_is_neither_prepared_nor_known_is_refused(tmp_path):
    write_prepared(tmp_path / "cirrus", "s1_1", np.zeros((1024, 200)), np.ones((9, 200)))
    with pytest.raises(DataError, match=r"s1_1.png: 1024 x 200 pixels is neither a prepared strip \(128 x 1024\)"):
        OCT(tmp_path, "cirrus")[0]
    assert any("neither a prepared strip" in str(problem) for problem in check_published("oct", tmp_path))


def test_intensities_are_stretched_to_what_fifteen_rows_share():
    image = np.full((40, 3), 0.1)
    image[10:20, 1] = 0.4  # ten rows: the median over fifteen sees them
    image[30, 2] = 0.9  # one bright pixel does not
    stretched = normalize_intensity(image)
    assert stretched[12, 1] == pytest.approx(0.4 / 0.45)
    assert stretched[0, 0] == pytest.approx(0.1 / 0.45)
    assert stretched[30, 2] == 1.0
    bright = np.full((40, 2), 0.98)
    assert np.array_equal(normalize_intensity(bright), bright)


def test_a_slice_that_nobody_delineated_has_no_label(tmp_path):
    write_prepared(tmp_path / "cirrus", "s1_1", np.zeros((128, 1024)), np.full((9, 1024), np.nan))
    assert OCT(tmp_path, "cirrus")[0].label is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "no key bds"),
        ("not json", "no boundaries"),
        ('{"bds": [[1, 2]]}', r"bds \(1, 2\) instead of \(9, 4\)"),
        ('{"bds": [[1, 2], [1]]}', "no boundaries"),
    ],
)
def test_malformed_prepared_labels_are_one_line(tmp_path, text, says):
    write_prepared(tmp_path / "cirrus", "s1_1", np.zeros((1, 4)), np.ones((9, 4)))
    (tmp_path / "cirrus" / "label" / "s1_1.txt").write_text(text)
    with pytest.raises(DataError, match=says):
        OCT(tmp_path, "cirrus")[0]


def test_wrong_names_are_refused_with_the_right_ones(tmp_path):
    write_prepared(tmp_path / "cirrus", "s1_1", np.zeros((8, 4)), np.ones((9, 4)))
    with pytest.raises(DataError, match='use "spectralis" or "cirrus"'):
        OCT(tmp_path, "topcon")
    with pytest.raises(DataError, match="Cirrus only all"):
        OCT(tmp_path, "cirrus", split="train")
    with pytest.raises(DataError, match="no folder spectralis; put the spectralis data there"):
        OCT(tmp_path, "spectralis")


def test_check_says_what_is_missing_or_crossing(tmp_path):
    spectralis(tmp_path, ("hc10", "hc11"))
    (tmp_path / "spectralis" / "delineation" / "hc11_spectralis_macula_v1_s1_R.mat").unlink()
    lines = np.repeat((np.arange(9) * 10.0 + 20)[:, None], 512, axis=1)
    lines[4, :3] = 1
    write_prepared(tmp_path / "cirrus", "s1_1", np.zeros((128, 512)), lines)
    found = [str(problem) for problem in check_published("oct", tmp_path)]
    assert sum("delineation missing" in line for line in found) == 1
    assert any("boundaries cross in 3 columns" in line for line in found)
    assert any("1 slices of 1 subjects; the paper has 48 of 6" in line for line in found)
    assert any("subjects of train missing: hc12" in line for line in found)
    assert len(found) == 6


@pytest.mark.skipif(REAL is None, reason="DLTTA_DATA is not set")
def test_the_retina_is_found_in_real_scans_of_healthy_eyes():
    folder = Path(REAL or "") / "oct_layers" / "cirrus"
    if not folder.is_dir():
        pytest.skip("oct_layers/cirrus is not there")
    errors = []
    for case in open_site(folder):
        assert case.label is not None
        retina = case.label.numpy() > 0
        lowest = len(retina) - 1 - np.argmax(retina[::-1], axis=0)
        _, bottom = find_retina(case.image[0].numpy() / 255.0, (0.008, 0.012))
        errors.append(np.abs(bottom - lowest)[retina.any(axis=0)].mean())
    assert np.median(errors) < 1.5
