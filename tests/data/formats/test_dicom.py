"""DICOM in and out, checked against the standard's formula in plain numpy, pydicom and highdicom."""

import re
import tracemalloc
import warnings
from contextlib import suppress
from pathlib import Path

import highdicom
import numpy as np
import pydicom
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydicom.data import get_testdata_file
from pydicom.uid import DeflatedExplicitVRLittleEndian, JPEGLSLossless, RLELossless, generate_uid

from dicoms import AXIAL, CR, PATIENT, tilted, write_dicom, write_enhanced, write_series
from dltta.data.formats import dicom
from dltta.data.formats.dicom import read_series, write_segmentation
from dltta.data.formats.images import Geometry
from dltta.errors import DataError, SettingError

FRAMES = "PerFrameFunctionalGroupsSequence"
SHUFFLED = ["m.dcm", "a", "z.dcm", "b.IMA", "1.2.840.99"]


def noise(*shape: int, kind=np.int16) -> np.ndarray:
    return np.random.default_rng(len(shape)).integers(0, 1000, shape).astype(kind)


def patient_mm(header, column: int, row: int) -> np.ndarray:
    """Equation C.7.6.2.1-1 of the standard: from a pixel to the patient's left, posterior, superior."""
    down_mm, across_mm = (float(v) for v in header.PixelSpacing)
    orientation = np.array([float(v) for v in header.ImageOrientationPatient])
    origin = np.array([float(v) for v in header.ImagePositionPatient])
    return origin + orientation[:3] * across_mm * column + orientation[3:] * down_mm * row


@pytest.mark.parametrize("directions", [AXIAL, tilted(), (0, 1, 0, 0, 0, -1)], ids=["axial", "tilted", "sagittal"])
def test_every_voxel_of_a_shuffled_series_lies_where_its_slice_says(tmp_path, directions):
    stored = noise(5, 4, 6)
    files = write_series(
        tmp_path,
        stored,
        directions=directions,
        names=SHUFFLED,
        each=lambda number: {"RescaleSlope": 0.5 + number, "RescaleIntercept": -1024 + number},
    )
    image = read_series(sorted(files))
    assert image.array.shape == (1, 6, 4, 5)
    assert image.array.flags.c_contiguous
    assert image.geometry.spacing == pytest.approx((0.6, 0.8, 2.5))
    assert image.geometry.affine is not None

    slices = [pydicom.dcmread(file) for file in files]
    there = {}  # position in the patient: value, from each file on its own
    for header in slices:
        for row in range(4):
            for column in range(6):
                value = float(header.RescaleSlope) * header.pixel_array[row, column] + float(header.RescaleIntercept)
                there[tuple(np.round(patient_mm(header, column, row), 3))] = value
    for index in np.ndindex(6, 4, 5):
        right, anterior, superior, _ = image.geometry.affine @ [*index, 1]
        assert image.array[(0, *index)] == pytest.approx(there[tuple(np.round([-right, -anterior, superior], 3))])


def test_slices_count_along_the_normal_whatever_the_instance_numbers(tmp_path):
    stored = np.arange(3, dtype=np.int16)[:, None, None] * np.ones((3, 2, 2), np.int16)
    files = write_series(tmp_path, stored, each=lambda number: {"InstanceNumber": 9 - number})
    image = read_series(files[::-1])
    assert image.array[0, 0, 0].tolist() == [0, 1, 2]
    assert image.geometry.affine[:, 2].tolist() == pytest.approx([0, 0, 2.5, 0])
    assert image.geometry.affine[:, 3].tolist() == pytest.approx([100, 80, 30, 1])


def test_a_tilted_gantry_shears_the_volume_and_the_affine_says_so(tmp_path):
    files = write_series(tmp_path, noise(4, 3, 3), shift=(0, 0.9, 0))
    image = read_series(files)
    assert image.geometry.affine[:3, 2].tolist() == pytest.approx([0, -0.9, 2.5])
    assert image.geometry.spacing[2] == pytest.approx(np.hypot(0.9, 2.5))


def test_rounded_positions_are_still_even(tmp_path):
    places = [0.0, 0.6, 1.3, 1.9, 2.5]  # 0.625 apart, as stored with one digit
    files = write_series(tmp_path, noise(5, 3, 3), each=lambda n: {"ImagePositionPatient": [0, 0, places[n]]})
    assert read_series(files).geometry.spacing[2] == pytest.approx(0.625)


@pytest.mark.parametrize(("kind", "bits", "expected"), [(np.uint16, 12, [4095, 95]), (np.int16, 16, [-1, -4001])])
def test_monochrome1_is_turned_round_before_it_is_rescaled(tmp_path, kind, bits, expected):
    pixels = np.array([[0, 4000]], kind)
    file = write_dicom(
        tmp_path / "a.dcm", pixels, PhotometricInterpretation="MONOCHROME1", BitsStored=bits, HighBit=bits - 1
    )
    assert read_series([file]).array[0, 0].tolist() == expected
    file = write_dicom(
        tmp_path / "b.dcm",
        pixels,
        PhotometricInterpretation="MONOCHROME1",
        BitsStored=bits,
        HighBit=bits - 1,
        RescaleSlope=2,
        RescaleIntercept=10,
    )
    image = read_series([file])
    assert image.array[0, 0].tolist() == [2 * value + 10 for value in expected]
    assert image.geometry.limit is None


def test_an_x_ray_is_a_2d_image_of_rows_and_columns(tmp_path):
    pixels = noise(4, 6, kind=np.uint16)
    file = write_dicom(tmp_path / "a.dcm", pixels, ImagerPixelSpacing=[0.2, 0.1], BitsStored=12, HighBit=11)
    image = read_series([file])
    assert np.array_equal(image.array, pixels[None])
    assert image.geometry == Geometry("dicom", (4, 6), 1, 4095, (0.2, 0.1))
    both = write_dicom(tmp_path / "b.dcm", pixels, ImagerPixelSpacing=[0.2, 0.1], PixelSpacing=[0.19, 0.18])
    assert read_series([both]).geometry.spacing == (0.19, 0.18)
    neither = write_dicom(tmp_path / "c.dcm", pixels)
    assert read_series([neither]).geometry.spacing is None


def test_colors_come_as_three_channels(tmp_path):
    pixels = noise(4, 6, 3, kind=np.uint8)
    image = read_series([write_dicom(tmp_path / "a.dcm", pixels)])
    assert np.array_equal(image.array, np.moveaxis(pixels, -1, 0))
    assert image.geometry == Geometry("dicom", (4, 6), 3, 255)


def test_a_modality_table_is_applied(tmp_path):
    table = pydicom.Dataset()
    table.LUTDescriptor, table.ModalityLUTType, table.LUTData = (
        [4, 0, 16],
        "US",
        np.array([5, 7, 11, 13], "<u2").tobytes(),
    )
    file = write_dicom(tmp_path / "a.dcm", np.array([[3, 0, 2]], np.uint16), ModalityLUTSequence=[table])
    image = read_series([file])
    assert image.array[0, 0].tolist() == [13, 5, 11]
    assert image.geometry.limit is None


@pytest.mark.parametrize("syntax", [RLELossless, JPEGLSLossless])
def test_compressed_pixels_are_read_where_there_is_a_decoder(tmp_path, syntax):
    pixels = noise(16, 16, kind=np.uint16)
    dataset = pydicom.dcmread(write_dicom(tmp_path / "a.dcm", pixels))
    dataset.compress(syntax)
    dataset.save_as(tmp_path / "a.dcm")
    assert np.array_equal(read_series([tmp_path / "a.dcm"]).array[0], pixels)


def test_real_files_of_scanners_are_read():
    for name in ("CT_small.dcm", "MR_small.dcm"):
        file = get_testdata_file(name)
        header = pydicom.dcmread(file)
        slope, intercept = float(header.get("RescaleSlope", 1)), float(header.get("RescaleIntercept", 0))
        image = read_series([Path(file)])
        assert np.array_equal(image.array[0], (header.pixel_array * slope + intercept).astype(np.float32))
        assert image.geometry.spacing == pytest.approx([float(v) for v in header.PixelSpacing])


# what is refused


def changed(**elements):
    return lambda number: elements if number == 2 else {}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"each": changed(SeriesInstanceUID=generate_uid())}, "another series than"),
        ({"each": changed(ImageOrientationPatient=[0, 1, 0, 0, 0, -1])}, "another orientation than"),
        ({"each": changed(ImageOrientationPatient=[1, 0, 0, 1, 0, 0])}, "not two directions at right angles"),
        ({"each": changed(ImageOrientationPatient=[1, 0, 0])}, "ImageOrientationPatient is missing or not 6 numbers"),
        ({"each": changed(ImagePositionPatient=None)}, "ImagePositionPatient is missing or not 3 numbers"),
        ({"each": changed(PixelSpacing=[0.8, 0.7])}, "another PixelSpacing than"),
        ({"each": changed(PixelSpacing=None)}, "PixelSpacing is missing"),
        ({"PixelSpacing": [0.0, 1.0]}, r"PixelSpacing \[0.0, 1.0\] is no distance"),
        ({"each": changed(FrameOfReferenceUID=generate_uid())}, "another frame of reference"),
        ({"each": changed(ImagePositionPatient=[-100, -80, 32.5])}, "slice001.dcm and slice002.dcm at one place"),
        ({"SOPInstanceUID": generate_uid()}, "slice001.dcm: has the identifier of slice000.dcm"),
        ({"each": changed(ImagePositionPatient=[-100, -80, 36])}, r"slices 1.5 to 3.5 mm apart"),
        ({"each": changed(ImagePositionPatient=[-100, -79, 35])}, "up to 1 mm off an even grid"),
        ({"each": changed(ImagePositionPatient=[-100, -80, 99])}, "are missing between others"),
        ({"each": changed(NumberOfFrames=2)}, "multi-frame file of 2 frames"),
        ({"each": changed(PhotometricInterpretation="PALETTE COLOR")}, "neither grey nor RGB"),
        ({"each": changed(RescaleSlope=1e38, RescaleIntercept=0)}, "NaN or infinite"),
    ],
)
def test_slices_that_are_no_volume_are_refused_in_one_line_without_names(tmp_path, options, says):
    files = write_series(tmp_path, noise(5, 4, 6), **options)
    with pytest.raises(DataError, match=says) as caught:
        read_series(files)
    line = str(caught.value)
    assert line.startswith(str(tmp_path))
    assert "\n" not in line
    assert "; " in line
    assert not re.search("secret", line, re.IGNORECASE)


def test_missing_slices_are_counted(tmp_path):
    files = write_series(tmp_path, noise(9, 3, 3))
    with pytest.raises(DataError, match=r"3 slices are missing between others \(7.5 mm apart instead of 2.5\)"):
        read_series([*files[:2], *files[4:6], *files[7:]])


def test_sizes_that_differ_are_refused(tmp_path):
    files = write_series(tmp_path, noise(3, 4, 6))
    header = pydicom.dcmread(files[1])
    write_dicom(files[1], noise(6, 6), SeriesInstanceUID=header.SeriesInstanceUID)
    with pytest.raises(DataError, match="6 x 6 pixels, slice000.dcm has 6 x 4"):
        read_series(files)


# frames of one file

ORDER = [3, 0, 4, 1, 2]


@pytest.mark.parametrize("directions", [AXIAL, tilted(), (0, 1, 0, 0, 0, -1)], ids=["axial", "tilted", "sagittal"])
def test_frames_of_one_file_are_the_volume_of_as_many_files(tmp_path, directions):
    options = {
        "directions": directions,
        "each": lambda number: {"RescaleSlope": 0.5 + number, "RescaleIntercept": -1024 + number},
    }
    single = read_series(write_series(tmp_path / "single", noise(5, 4, 6), **options))
    whole = read_series([write_enhanced(tmp_path / "whole.dcm", noise(5, 4, 6), order=ORDER, **options)])
    assert np.array_equal(single.array, whole.array)
    assert np.array_equal(single.geometry.affine, whole.geometry.affine)
    assert single.geometry == whole.geometry


def test_every_frame_of_a_segmentation_lies_on_the_frame_that_it_refers_to(tmp_path):
    file = write_enhanced(tmp_path / "whole.dcm", noise(5, 4, 6), order=ORDER, StudyDate="20260101", StudyTime="120000")
    image = read_series([file])
    labels = np.zeros((6, 4, 5), int)
    for place in range(5):  # another column for every slice, from below
        labels[place, 1:3, place] = 1 + place % 2
    write_segmentation(tmp_path / "seg.dcm", labels, image.geometry, ("background", "liver", "tumor"))
    source, found = pydicom.dcmread(file), highdicom.seg.segread(tmp_path / "seg.dcm")
    heights = [float(each.PlanePositionSequence[0].ImagePositionPatient[2]) for each in source[FRAMES].value]
    ranks = np.argsort(np.argsort(heights))
    assert found.NumberOfFrames == 5
    for each, plane in zip(found[FRAMES].value, found.pixel_array, strict=True):
        (reference,) = each.DerivationImageSequence[0].SourceImageSequence
        assert reference.ReferencedSOPInstanceUID == source.SOPInstanceUID
        place = ranks[int(reference.ReferencedFrameNumber) - 1]
        assert np.array_equal(plane.T > 0, labels[..., place] > 0)
        assert float(each.PlanePositionSequence[0].ImagePositionPatient[2]) == sorted(heights)[place]


def test_a_file_of_one_frame_is_an_image(tmp_path):
    image = read_series([write_enhanced(tmp_path / "one.dcm", noise(1, 4, 6))])
    assert np.array_equal(image.array, noise(1, 4, 6).astype(np.float32))
    assert image.geometry.shape == (4, 6)
    write_segmentation(tmp_path / "seg.dcm", (image.array[0] > 300).astype(int), image.geometry, ("background", "a"))
    found = highdicom.seg.segread(tmp_path / "seg.dcm")
    assert np.array_equal(found.pixel_array.reshape(4, 6), image.array[0] > 300)


def test_frames_do_not_name_the_patient_in_an_anonymous_segmentation(tmp_path):
    file = write_enhanced(tmp_path / "whole.dcm", noise(5, 4, 6), order=ORDER)
    dataset = pydicom.dcmread(file)
    for groups in (dataset.SharedFunctionalGroupsSequence[0], *dataset[FRAMES].value):
        for element in groups:
            element.value[0].ImageComments = "Secret"
    dataset.save_as(file)
    image = read_series([file])
    hidden = dicom.Anonymous("case 1", "new", "secret")
    write_segmentation(tmp_path / "seg.dcm", (image.array[0] > 300).astype(int), image.geometry, ("bg", "a"), hidden)
    content = (tmp_path / "seg.dcm").read_bytes()
    assert b"20260101" not in content
    assert b"Secret" not in content
    assert pydicom.dcmread(tmp_path / "seg.dcm").PatientID == "case 1"


def without(group):
    def change(dataset):
        for frame in dataset[FRAMES].value[1:2]:
            delattr(frame, group)

    return change


def at_one_place(dataset):
    dataset[FRAMES].value[1].PlanePositionSequence = dataset[FRAMES].value[0].PlanePositionSequence


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without("PlanePositionSequence"), r"whole.dcm \(frame 2\): ImagePositionPatient is missing"),
        (lambda dataset: delattr(dataset, "SharedFunctionalGroupsSequence"), "ImageOrientationPatient is missing"),
        (at_one_place, "at one place"),
        (lambda dataset: setattr(dataset, "NumberOfFrames", 4), "5 places for 4 frames"),
        (lambda dataset: delattr(dataset, FRAMES), "5 frames without places"),
        (lambda dataset: dataset.update({"Rows": 60000, "Columns": 1000}), "promises"),
    ],
)
def test_frames_that_are_no_volume_are_refused_in_one_line(tmp_path, change, says):
    file = write_enhanced(tmp_path / "whole.dcm", noise(5, 4, 6))
    dataset = pydicom.dcmread(file)
    change(dataset)
    dataset.save_as(file)
    with pytest.raises(DataError, match=says) as caught:
        read_series([file])
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value).lower()


def test_a_compression_without_decoder_is_named(tmp_path):
    for syntax in ("1.2.840.10008.1.2.4.70", "1.2.840.10008.1.2.4.102"):  # JPEG Lossless, MPEG-4
        dataset = pydicom.dcmread(write_dicom(tmp_path / "a.dcm", noise(4, 6, kind=np.uint16)))
        dataset.PixelData = pydicom.encaps.encapsulate([b"\xff\xd8\xff\xc3" * 4])
        dataset["PixelData"].VR = "OB"
        dataset.file_meta.TransferSyntaxUID = syntax
        dataset.save_as(tmp_path / "a.dcm", enforce_file_format=True)
        with pytest.raises(DataError, match="no decoder is installed; pip install"):
            read_series([tmp_path / "a.dcm"])


def test_more_pixels_than_the_safety_limit_are_refused_before_reading(tmp_path):
    file = write_dicom(tmp_path / "a.dcm", noise(4, 6, kind=np.uint16), Rows=60000, Columns=60000)
    with pytest.raises(DataError, match="safety limit"):
        read_series([file])


def test_without_the_extra_the_command_to_install_it_is_named(tmp_path, monkeypatch):
    file = write_dicom(tmp_path / "a.dcm", noise(4, 6))
    dicom._library.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "pydicom", None)
    with pytest.raises(SettingError, match=re.escape("pip install 'dltta[dicom]'")):
        read_series([file])
    dicom._library.cache_clear()


def test_truncated_and_foreign_files_are_one_line(tmp_path):
    whole = write_dicom(tmp_path / "a.dcm", noise(40, 40, kind=np.uint16)).read_bytes()
    (tmp_path / "text.dcm").write_text("PatientName: Secret^Person")
    with pytest.raises(DataError, match=r"text.dcm: cannot be read as DICOM \(InvalidDicomError\)"):
        read_series([tmp_path / "text.dcm"])
    with pytest.raises(DataError, match="no such file"):
        read_series([tmp_path / "gone.dcm"])
    for length in range(0, len(whole), 97):
        (tmp_path / "a.dcm").write_bytes(whole[:length])
        with pytest.raises(DataError, match="cannot be read as DICOM"):
            read_series([tmp_path / "a.dcm"])


def test_a_deflated_file_is_refused_before_it_fills_the_memory(tmp_path):
    dataset = pydicom.dcmread(write_dicom(tmp_path / "a.dcm", noise(8, 8)))
    dataset.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian
    dataset.add_new(0x00091001, "OB", bytes(1 << 28))
    dataset.save_as(tmp_path / "a.dcm")
    tracemalloc.start()
    assert "a deflated file; export it uncompressed" in dicom.peek(tmp_path / "a.dcm").problem
    for call in (lambda file: read_series([file]), dicom.identifying):
        with pytest.raises(DataError, match="a deflated file; export it uncompressed"):
            call(tmp_path / "a.dcm")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 24


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(128, 900), value=st.integers(0, 255), length=st.integers(1, 4))
def test_flipped_bytes_give_an_image_or_a_data_error_and_nothing_else(tmp_path, place, value, length):
    file = tmp_path / "a.dcm"
    if not (tmp_path / "whole").exists():
        (tmp_path / "whole").write_bytes(
            write_dicom(file, noise(8, 8), PixelSpacing=[1, 1], RescaleSlope=2, RescaleIntercept=0).read_bytes()
        )
    content = bytearray((tmp_path / "whole").read_bytes())
    content[place % len(content) : place % len(content) + length] = bytes([value]) * length
    file.write_bytes(bytes(content))
    with suppress(DataError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = read_series([file])
        assert np.isfinite(image.array).all()


# segmentations


def segmented(folder, **options):
    """A series, its image, labels of two classes with an empty slice, and the file written for them."""
    files = write_series(folder / "in", noise(5, 4, 6), names=SHUFFLED, **options)
    image = read_series(files)
    labels = np.random.default_rng(7).integers(0, 3, image.geometry.shape)
    labels[..., 1] = 0
    labels[1, 2, 3] = 2
    write_segmentation(folder / "out" / "seg.dcm", labels, image.geometry, ("background", "liver", "tumor"))
    return files, image, labels, folder / "out" / "seg.dcm"


@pytest.mark.parametrize(
    "options", [{}, {"directions": tilted()}, {"shift": (0, 0.7, 0)}], ids=["axial", "tilted", "sheared"]
)
def test_every_labeled_voxel_lies_on_its_source_pixel(tmp_path, options):
    _, image, labels, path = segmented(tmp_path, **options)
    found = pydicom.dcmread(path)
    frames = found.pixel_array.reshape(-1, found.Rows, found.Columns)
    shared = found.SharedFunctionalGroupsSequence[0]
    marked = {1: set(), 2: set()}
    for frame, group in zip(frames, found.PerFrameFunctionalGroupsSequence, strict=True):
        header = pydicom.Dataset()
        header.PixelSpacing = shared.PixelMeasuresSequence[0].PixelSpacing
        header.ImageOrientationPatient = shared.PlaneOrientationSequence[0].ImageOrientationPatient
        header.ImagePositionPatient = group.PlanePositionSequence[0].ImagePositionPatient
        number = group.SegmentIdentificationSequence[0].ReferencedSegmentNumber
        marked[number] |= {tuple(np.round(patient_mm(header, c, r), 3)) for r, c in np.argwhere(frame)}
    affine = image.geometry.affine
    for value in (1, 2):
        expected = {
            tuple(np.round((affine @ [*index, 1])[:3] * [-1, -1, 1], 3)) for index in np.argwhere(labels == value)
        }
        assert marked[value] == expected


def test_a_segmentation_names_series_study_patient_and_classes(tmp_path):
    files, _, labels, path = segmented(tmp_path)
    sources = [pydicom.dcmread(file) for file in files]
    found = pydicom.dcmread(path)
    assert found.SOPClassUID == "1.2.840.10008.5.1.4.1.1.66.4"
    for name in ("FrameOfReferenceUID", "StudyInstanceUID", "PatientName", "PatientID", "PatientBirthDate"):
        assert found[name].value == sources[0][name].value
    assert found.SeriesInstanceUID != sources[0].SeriesInstanceUID
    series = found.ReferencedSeriesSequence[0]
    assert series.SeriesInstanceUID == sources[0].SeriesInstanceUID
    assert {item.ReferencedSOPInstanceUID for item in series.ReferencedInstanceSequence} == {
        source.SOPInstanceUID for source in sources
    }
    assert [(s.SegmentNumber, s.SegmentLabel) for s in found.SegmentSequence] == [(1, "liver"), (2, "tumor")]
    assert [s.SegmentAlgorithmType for s in found.SegmentSequence] == ["AUTOMATIC", "AUTOMATIC"]
    occupied = sum(int((labels == value).any((0, 1)).sum()) for value in (1, 2))
    assert found.NumberOfFrames == occupied < 10


def test_highdicom_reads_the_same_labels_slice_by_slice(tmp_path):
    _, image, labels, path = segmented(tmp_path, directions=tilted())
    found = highdicom.seg.segread(path)
    order = [header.SOPInstanceUID for header in image.geometry.header.headers]
    planes = found.get_pixels_by_source_instance(
        order, combine_segments=True, assert_missing_frames_are_empty=True
    )  # (slices, rows, columns)
    assert np.array_equal(planes.transpose(2, 1, 0), labels)


def test_a_prediction_of_background_only_is_written_whole(tmp_path):
    _, image, labels, _ = segmented(tmp_path)
    write_segmentation(tmp_path / "empty.dcm", labels * 0, image.geometry, ("background", "liver", "tumor"))
    found = pydicom.dcmread(tmp_path / "empty.dcm")
    assert found.NumberOfFrames == 10
    assert not found.pixel_array.any()


def test_the_same_labels_give_the_same_bytes_and_others_another_identifier(tmp_path):
    _, image, labels, path = segmented(tmp_path)
    classes = ("background", "liver", "tumor")
    write_segmentation(tmp_path / "again.dcm", labels, image.geometry, classes)
    assert (tmp_path / "again.dcm").read_bytes() == path.read_bytes()
    write_segmentation(tmp_path / "other.dcm", 2 - labels, image.geometry, classes)
    one, other = pydicom.dcmread(path), pydicom.dcmread(tmp_path / "other.dcm")
    assert one.SOPInstanceUID != other.SOPInstanceUID
    assert one.SeriesInstanceUID == other.SeriesInstanceUID


def test_images_without_a_place_in_the_patient_are_segmented_too(tmp_path):
    for name, pixels in (("x.dcm", noise(4, 6, kind=np.uint16)), ("us.dcm", noise(4, 6, 3, kind=np.uint8))):
        image = read_series([write_dicom(tmp_path / name, pixels)])
        labels = (image.array[0] > 300 if name == "x.dcm" else image.array[0] > 100).astype(int)
        write_segmentation(tmp_path / f"seg_{name}", labels, image.geometry, ("background", "thing"))
        found = pydicom.dcmread(tmp_path / f"seg_{name}")
        assert np.array_equal(found.pixel_array.reshape(4, 6), labels)
        source = pydicom.dcmread(tmp_path / name)
        assert found.SourceImageSequence[0].ReferencedSOPInstanceUID == source.SOPInstanceUID


def test_names_in_any_script_and_of_any_length_are_labels(tmp_path):
    files = write_series(
        tmp_path, noise(2, 3, 3), SpecificCharacterSet="ISO_IR 100", PatientName="Müller^Jörg", PatientID="7"
    )
    image = read_series(files)
    classes = ("hintergrund", "Drüse", "前列腺", "a\\b\n" + "c" * 100, "")
    write_segmentation(tmp_path / "seg.dcm", np.zeros((3, 3, 2), int), image.geometry, classes)
    found = pydicom.dcmread(tmp_path / "seg.dcm")
    assert [s.SegmentLabel for s in found.SegmentSequence] == ["Drüse", "前列腺", "a b " + "c" * 60, "class 4"]
    assert str(found.PatientName) == "Müller^Jörg"


def test_a_header_without_patient_or_study_details_is_enough(tmp_path):
    files = write_series(tmp_path, noise(2, 3, 3), **dict.fromkeys([*PATIENT, "SliceThickness"]))
    image = read_series(files)
    write_segmentation(tmp_path / "seg.dcm", np.ones((3, 3, 2), int), image.geometry, ("background", "thing"))
    assert pydicom.dcmread(tmp_path / "seg.dcm").PatientID in ("", None)


def test_malformed_dates_are_left_empty_rather_than_losing_the_prediction(tmp_path, monkeypatch):
    monkeypatch.setattr(pydicom.config.settings, "writing_validation_mode", pydicom.config.IGNORE)
    wrong = {"PatientBirthDate": "19700231", "PatientSex": "male", "StudyDate": "unknown", "StudyTime": "99:99"}
    files = write_series(tmp_path, noise(2, 3, 3), **wrong)
    image = read_series(files)
    write_segmentation(tmp_path / "seg.dcm", np.ones((3, 3, 2), int), image.geometry, ("background", "thing"))
    found = pydicom.dcmread(tmp_path / "seg.dcm")
    assert [found[name].value or "" for name in wrong] == ["", "", "", ""]
    assert found.PatientID == PATIENT["PatientID"]


def test_a_series_that_nothing_can_refer_to_is_one_line(tmp_path):
    files = write_series(tmp_path, noise(2, 3, 3), each=lambda number: {"StudyInstanceUID": generate_uid()})
    image = read_series(files)
    with pytest.raises(DataError, match="cannot refer to this series") as caught:
        write_segmentation(tmp_path / "seg.dcm", np.ones((3, 3, 2), int), image.geometry, ("background", "thing"))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "seg.dcm").exists()


def test_segmentations_that_do_not_fit_are_refused(tmp_path):
    _, image, labels, _ = segmented(tmp_path)
    path = tmp_path / "seg.dcm"
    for wrong, like, classes, says in (
        (labels, image.geometry, ("background", "liver"), "class value 2, but 2 classes"),
        (labels * 0, image.geometry, ("background",), "1 classes"),
        (labels[1:], image.geometry, ("a", "b", "c"), "size of its image"),
        (labels, Geometry("nifti", labels.shape), ("a", "b", "c"), "the image is nifti"),
    ):
        with pytest.raises(DataError, match=says):
            write_segmentation(path, wrong, like, classes)
    assert not path.exists()


def test_nothing_shown_of_an_image_names_the_patient(tmp_path, capfd, caplog):
    files = write_series(tmp_path, noise(2, 3, 3), PatientName="SecretPerson")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dicom._library.cache_clear()
        image = read_series(files)
        write_segmentation(tmp_path / "seg.dcm", np.ones((3, 3, 2), int), image.geometry, ("background", "thing"))
    shown = f"{image!r} {image.geometry.header!r} {capfd.readouterr()} {caplog.text} {[str(w.message) for w in caught]}"
    assert "SecretPerson" not in shown
    assert CR not in shown
