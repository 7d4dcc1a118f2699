"""What names a patient in an image, and what of it reaches a prediction that is written anonymously: nothing."""

from io import BytesIO

import highdicom
import nibabel as nib
import numpy as np
import pydicom
import pytest
import tifffile
from PIL import Image as Pillow
from PIL.PngImagePlugin import PngInfo
from pydicom.uid import generate_uid

from dicoms import write_dicom, write_series
from dltta.data.formats import format as registry
from dltta.data.formats.dicom import Anonymous
from dltta.data.formats.format import Geometry
from dltta.data.inbox import find_incoming, read_incoming
from dltta.data.outputs import identifying, still_identifying, write_prediction, write_probabilities
from dltta.errors import DataError

CLASSES = ("background", "organ")
TEXTS = {"descrip": b"SECRET-D", "aux_file": b"SECRET-A", "db_name": b"SECRET-B", "intent_name": b"SECRET-I"}
ANYONE = Anonymous("case-7f3a")
DETAILS = {
    "PatientName": "Secret^Person",
    "PatientID": "secret-4711",
    "PatientBirthDate": "19700102",
    "PatientSex": "F",
    "PatientAge": "051Y",
    "OtherPatientIDs": "secret-other",
    "PatientComments": "secret comment",
    "ReferringPhysicianName": "Secret^Doctor",
    "AccessionNumber": "secret-acc",
    "StudyID": "secret-study",
    "StudyDate": "20230405",
    "StudyTime": "101112",
    "StudyDescription": "secret description",
    "SeriesDescription": "secret series",
    "InstitutionName": "Secret Hospital",
    "StationName": "SECRETSTATION",
    "DeviceSerialNumber": "secret-serial",
    "ClinicalTrialSubjectID": "secret-trial",
}


def incoming(folder):
    [case] = find_incoming(folder)
    return case, read_incoming(case).geometry


@pytest.fixture
def volume(tmp_path):
    """A NIfTI file that tells in every field and in an extension."""
    image = nib.Nifti1Image(np.zeros((3, 4, 5), np.int16), np.diag([1.0, 2.0, 3.0, 1.0]))
    for name, text in TEXTS.items():
        image.header[name] = text
    image.header.extensions.append(nib.nifti1.Nifti1Extension("comment", b"SECRET-E"))
    (tmp_path / "in").mkdir()
    nib.save(image, tmp_path / "in" / "a.nii")
    return incoming(tmp_path / "in")


def test_a_nifti_header_says_which_fields_name_somebody(tmp_path, volume):
    case, _ = volume
    assert identifying(case) == (*TEXTS, "extensions")
    nib.save(nib.Nifti2Image(np.zeros((3, 4, 5)), np.eye(4)), tmp_path / "b.nii.gz")
    [plain] = find_incoming(tmp_path / "b.nii.gz")
    assert identifying(plain) == ()


def test_an_anonymous_nifti_prediction_holds_no_text_and_lies_where_it_lay(tmp_path, volume):
    case, geometry = volume
    labels = np.ones((3, 4, 5), int)
    told = write_prediction(tmp_path / "told", case, labels, geometry, CLASSES).read_bytes()
    assert b"SECRET-D" in told
    path = write_prediction(tmp_path / "out", case, labels, geometry, CLASSES, anonymous=ANYONE)
    assert b"SECRET" not in path.read_bytes()
    found = nib.load(path)
    assert np.array_equal(found.affine, geometry.affine)
    assert np.array_equal(np.asarray(found.dataobj), labels)
    assert not found.header.extensions
    probabilities = np.full((2, 3, 4, 5), 0.5)
    path = write_probabilities(tmp_path / "out", case, probabilities, geometry, anonymous=ANYONE)
    assert b"SECRET" not in nib.load(path).header.binaryblock
    assert not nib.load(path).header.extensions
    assert np.array_equal(np.asarray(nib.load(path).dataobj)[..., 0], probabilities[0])
    assert write_prediction(tmp_path / "told", case, labels, geometry, CLASSES).read_bytes() == told


def test_png_and_tiff_say_which_fields_name_somebody_and_predictions_have_none(tmp_path):
    info = PngInfo()
    info.add_text("Patient", "SECRET")
    info.add_itxt("Notes", "SECRET")
    (tmp_path / "in").mkdir()
    grey = np.zeros((3, 4), np.uint8)
    Pillow.fromarray(grey).save(tmp_path / "in" / "a.png", pnginfo=info)
    tifffile.imwrite(tmp_path / "in" / "b.tif", grey, description="SECRET", extratags=[(315, "s", 0, "SECRET", True)])
    a, b = find_incoming(tmp_path / "in")
    assert identifying(a) == ("tEXt Patient", "iTXt Notes")
    assert identifying(b) == ("ImageDescription", "Artist")
    for case in (a, b):
        geometry = read_incoming(case).geometry
        path = write_prediction(tmp_path / "out", case, grey, geometry, CLASSES, anonymous=ANYONE)
        assert b"SECRET" not in path.read_bytes()
        [found] = find_incoming(path)
        assert identifying(found) == ()
        assert still_identifying(case, ANYONE) == ()


def series(folder):
    write_series(folder / "in" / "p", np.ones((3, 4, 5), np.int16), **DETAILS)
    return incoming(folder / "in")


def everything(dataset):
    """Every value of a data set, sequences too, as text."""
    for element in dataset:
        if element.VR == "SQ":
            for item in element.value:
                yield from everything(item)
        else:
            yield str(element.value)


def test_a_dicom_header_says_which_elements_name_somebody_and_never_what_they_say(tmp_path):
    case, _ = series(tmp_path)
    found = identifying(case)
    assert set(DETAILS) <= set(found)
    assert {"StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID", "FrameOfReferenceUID"} <= set(found)
    assert "secret" not in " ".join(found).lower()
    dataset = pydicom.dcmread(case.files[0])
    dataset.private_block(0x0011, "ACME", create=True).add_new(1, "LO", "secret")
    dataset.save_as(case.files[0])
    assert "private elements" in identifying(find_incoming(tmp_path / "in")[0])


def test_an_anonymous_segmentation_names_nobody_and_no_date(tmp_path):
    case, geometry = series(tmp_path)
    labels = np.zeros((5, 4, 3), int)
    labels[1, 2, 0] = 1
    path = write_prediction(tmp_path / "out", case, labels, geometry, CLASSES, anonymous=ANYONE)
    content, found = path.read_bytes(), pydicom.dcmread(path)
    for value in DETAILS.values():
        if value != "F":
            assert value.encode() not in content
    assert (str(found.PatientName), found.PatientID, found.PatientSex or "") == ("case-7f3a", "case-7f3a", "")
    dates = {str(value) for element in found.iterall() if element.VR in ("DA", "DT") and (value := element.value)}
    assert dates <= {"19000101", "19000101000000"}
    assert str(pydicom.dcmread(case.files[0]).PatientName) == "Secret^Person"
    sources = {pydicom.dcmread(file).SOPInstanceUID for file in case.files}
    assert {i.ReferencedSOPInstanceUID for i in found.ReferencedSeriesSequence[0].ReferencedInstanceSequence} == sources
    assert still_identifying(case, ANYONE) == (
        "SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID", "FrameOfReferenceUID",
    )  # fmt: skip


def test_new_identifiers_lead_nowhere_and_are_alike_for_one_secret(tmp_path):
    case, geometry = series(tmp_path)
    labels = np.ones((5, 4, 3), int)

    def written(secret):
        new = Anonymous("x", uids="new", secret=secret)
        assert still_identifying(case, new) == ()
        return write_prediction(tmp_path / "out", case, labels, geometry, CLASSES, anonymous=new).read_bytes()

    content = written("key")
    for file in case.files:
        source = pydicom.dcmread(file)
        for name in ("StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID", "FrameOfReferenceUID"):
            assert str(source[name].value).encode() not in content
    assert written("key") == content
    one, other = pydicom.dcmread(BytesIO(content)), pydicom.dcmread(BytesIO(written("another")))
    assert one.StudyInstanceUID != other.StudyInstanceUID
    assert one.SOPInstanceUID != other.SOPInstanceUID
    assert highdicom.seg.segread(BytesIO(content)).number_of_segments == 1


def test_the_pixels_of_an_anonymous_segmentation_are_those_of_a_named_one(tmp_path):
    case, geometry = series(tmp_path)
    labels = np.random.default_rng(0).integers(0, 2, (5, 4, 3))
    named = pydicom.dcmread(write_prediction(tmp_path / "a", case, labels, geometry, CLASSES))
    other = pydicom.dcmread(write_prediction(tmp_path / "b", case, labels, geometry, CLASSES, anonymous=ANYONE))
    assert np.array_equal(named.pixel_array, other.pixel_array)
    for name in ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence", "FrameOfReferenceUID"):
        assert named[name] == other[name]
    assert named.SeriesInstanceUID == other.SeriesInstanceUID


def test_a_radiograph_and_colors_are_segmented_anonymously_too(tmp_path):
    write_dicom(tmp_path / "in" / "a.dcm", np.ones((4, 5), np.uint16), **DETAILS, StudyInstanceUID=generate_uid())
    write_dicom(tmp_path / "in" / "b.dcm", np.ones((4, 5, 3), np.uint8), **DETAILS)
    for case in find_incoming(tmp_path / "in"):
        geometry = read_incoming(case).geometry
        path = write_prediction(tmp_path / "out", case, np.ones((4, 5), int), geometry, CLASSES, anonymous=ANYONE)
        assert b"ecret" not in path.read_bytes()
        assert pydicom.dcmread(path).pixel_array.all()


def test_a_format_that_cannot_leave_out_its_header_refuses(tmp_path, monkeypatch):
    class Plain:
        name, endings = "Plain", (".plain",)

        def begins(self, start):
            return start[:2] == b"PL"

        def read_geometry(self, path):
            return Geometry("plain", (1, 1), header=path.read_bytes()[3:])

        def read_pixels(self, path):
            return np.zeros((1, 1, 1), np.uint8)

        read_classes = None

        def write_classes(self, file, labels, like, ending):
            file.write(b"PL " + (like.header or b""))

    monkeypatch.setattr(registry, "_registered", [Plain()])
    (tmp_path / "a.plain").write_bytes(b"PL SECRET")
    case, geometry = incoming(tmp_path / "a.plain")
    assert identifying(case) == ()
    with pytest.raises(DataError, match="Plain cannot be written without what names a patient"):
        write_prediction(tmp_path / "out", case, [[1]], geometry, CLASSES, anonymous=ANYONE)
    assert not (tmp_path / "out").exists()
