from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

from dltta.data.check import check_published
from dltta.data.datasets.prostate import Prostate, sites_in
from dltta.errors import DataError

SPACING = (0.5, 0.75, 3.0)


def write(folder: Path, site: str, cases: int = 2, ending: str = "_segmentation.nii.gz") -> Path:
    (folder / site).mkdir(parents=True, exist_ok=True)
    affine = np.diag([*SPACING, 1.0])
    for n in range(cases):
        volume = np.random.default_rng(n).normal(300, 50, (96, 64, 5)).astype(np.float32)
        label = np.zeros((96, 64, 5), np.uint8)
        label[24:48, 16:32, 1:3] = 1
        label[48:72, 16:32, 1:3] = 2  # zones of the prostate
        nib.save(nib.Nifti1Image(volume, affine), folder / site / f"Case{n:02d}.nii.gz")
        nib.save(nib.Nifti1Image(label, affine), folder / site / f"Case{n:02d}{ending}")
    return folder


@pytest.mark.parametrize(
    ("site", "folder", "ending"),
    [
        ("RUNMC", "RUNMC", "_segmentation.nii.gz"),
        ("a", "runmc", "_Segmentation.nii.gz"),
        ("A", "ISBI", "_segmentation.nii.gz"),
    ],
)
def test_sites_go_by_name_or_letter_in_any_case(tmp_path, site, folder, ending):
    opened = Prostate(write(tmp_path, folder, ending=ending), site)
    assert (opened.site, len(opened), opened.names) == ("RUNMC", 2, ("Case00", "Case01"))
    assert opened.classes == ("background", "prostate")


def nnunet(folder: Path, site: str, cases: int = 2) -> Path:
    """The same volumes in nnU-Net's layout, under names of their own."""
    write(folder, site, cases)
    for name in ("imagesTr", "labelsTr"):
        (folder / site / name).mkdir()
    for n in range(cases):
        (folder / site / f"Case{n:02d}.nii.gz").rename(folder / site / "imagesTr" / f"Pat_{n}_0000.nii.gz")
        (folder / site / f"Case{n:02d}_segmentation.nii.gz").rename(folder / site / "labelsTr" / f"Pat_{n}.nii.gz")
    return folder


def test_a_site_may_come_in_the_layout_of_nnunet(tmp_path):
    opened = Prostate(nnunet(tmp_path / "a", "radboud"), "A")
    assert (opened.site, opened.names, opened.groups) == ("RUNMC", ("Pat_0", "Pat_1"), ("Pat_0", "Pat_1"))
    beside = Prostate(write(tmp_path / "b", "RUNMC"), "A")
    assert torch.equal(opened[1].image, beside[1].image)
    assert torch.equal(opened[1].label, beside[1].label)
    (tmp_path / "a" / "radboud" / "labelsTr" / "Pat_1.nii.gz").unlink()
    with pytest.raises(DataError, match="Pat_1_0000.nii.gz: labelsTr/Pat_1.nii.gz missing"):
        Prostate(tmp_path / "a", "A")
    problems = [str(problem) for problem in check_published("prostate", tmp_path / "a")]
    assert any("labelsTr/Pat_1.nii.gz missing" in line for line in problems)


def test_single_sites_are_found_in_the_papers_order(tmp_path):
    assert sites_in(tmp_path / "nowhere") == ()
    for site in ("ucl", "Radboud", "ISBI_1.5", "elsewhere"):
        (tmp_path / site).mkdir()
    assert sites_in(tmp_path) == ("RUNMC", "BMC", "UCL")


def test_a_volume_is_normalized_then_resized_in_the_axial_plane(tmp_path):
    case = Prostate(write(tmp_path, "BMC"), "B")[1]
    assert (case.name, case.site, case.group) == ("Case01", "BMC", "Case01")
    assert case.image.shape == (1, 384, 384, 5)
    assert case.image.dtype == torch.float32
    assert case.spacing == pytest.approx((0.5 * 96 / 384, 0.75 * 64 / 384, 3.0))

    stored = nib.load(tmp_path / "BMC" / "Case01.nii.gz").get_fdata()
    normal = (stored - stored.mean()) / stored.std()
    # 96 to 384: output 6 lies at input (6 + 0.5) / 4 - 0.5 = 1.125; 64 to 384: output 15 at (15.5) / 6 - 0.5 = 2.08333
    top = normal[1, 2] * (11 / 12) + normal[1, 3] / 12
    below = normal[2, 2] * (11 / 12) + normal[2, 3] / 12
    assert case.image[0, 6, 15].tolist() == pytest.approx(list(top * 0.875 + below * 0.125), abs=1e-5)


def test_labels_above_zero_are_prostate_and_keep_their_place(tmp_path):
    label = Prostate(write(tmp_path, "UCL"), "D")[0].label
    assert label is not None
    assert label.dtype == torch.int64
    expected = torch.zeros(384, 384, 5, dtype=torch.int64)
    expected[24 * 4 : 72 * 4, 16 * 6 : 32 * 6, 1:3] = 1
    assert torch.equal(label, expected)


def test_the_axial_axis_is_found_and_brought_last(tmp_path):
    write(tmp_path, "HK", 1)
    for path in (tmp_path / "HK").iterdir():
        image = nib.load(path)
        turned = np.moveaxis(np.asarray(image.dataobj), 2, 0)  # slices first, as their affine says
        affine = image.affine[:, [2, 0, 1, 3]]
        nib.save(nib.Nifti1Image(turned, affine), path)
    case = Prostate(tmp_path, "F")[0]
    straight = Prostate(write(tmp_path / "other", "HK", 1), "F")[0]
    assert torch.equal(case.image, straight.image)
    assert case.spacing == straight.spacing


def test_missing_and_misfitting_files_are_one_line(tmp_path):
    write(tmp_path, "I2CVB")
    with pytest.raises(DataError, match="no prostate site 'X'; use a name or letter of A RUNMC"):
        Prostate(tmp_path, "X")
    with pytest.raises(DataError, match="no folder BIDMC"):
        Prostate(tmp_path, "E")
    path = tmp_path / "I2CVB" / "Case01_segmentation.nii.gz"
    nib.save(nib.Nifti1Image(np.zeros((96, 64, 4), np.uint8), np.eye(4)), path)
    with pytest.raises(DataError, match=r"size \(96, 64, 4\), Case01.nii.gz has \(96, 64, 5\)"):
        Prostate(tmp_path, "C")[1]
    path.unlink()
    with pytest.raises(DataError, match="case01_segmentation.nii.gz missing"):
        Prostate(tmp_path, "C")
    nib.save(nib.Nifti1Image(np.zeros((9, 9, 4), np.float32), np.eye(4)), tmp_path / "I2CVB" / "Case00.nii.gz")
    nib.save(
        nib.Nifti1Image(np.zeros((9, 9, 4), np.uint8), np.eye(4)), tmp_path / "I2CVB" / "Case00_segmentation.nii.gz"
    )
    nib.save(nib.Nifti1Image(np.zeros((9, 9, 4), np.uint8), np.eye(4)), path)
    with pytest.raises(DataError, match="all values are 0"):
        Prostate(tmp_path, "C")[0]


def test_check_goes_through_all_sites(tmp_path):
    for site in ("RUNMC", "BMC", "I2CVB", "UCL", "BIDMC"):
        write(tmp_path, site, 1)
    (tmp_path / "BMC" / "Case00_segmentation.nii.gz").unlink()
    (tmp_path / "UCL" / "Case00.nii.gz").write_text("text")
    seen = []
    found = [str(p) for p in check_published("prostate", tmp_path, progress=lambda n, total: seen.append((n, total)))]
    assert len(found) == 3
    assert any("no folder HK" in line for line in found)
    assert any("case00_segmentation.nii.gz missing" in line for line in found)
    assert any("cannot be read as NIfTI" in line for line in found)
    assert seen[-1] == (4, 4)
