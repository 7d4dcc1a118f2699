"""DICOM files as a scanner would write them, made with pydicom alone."""

import shutil
from pathlib import Path

import numpy as np
from pydicom import dcmread
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, generate_uid

CT, CR, US = "1.2.840.10008.5.1.4.1.1.2", "1.2.840.10008.5.1.4.1.1.1", "1.2.840.10008.5.1.4.1.1.6.1"
ENHANCED_CT = "1.2.840.10008.5.1.4.1.1.2.1"
AXIAL = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
PATIENT = {"PatientName": "Secret^Person", "PatientID": "secret-4711", "PatientBirthDate": "19700102"}


def tilted(degrees: float = 20.0) -> tuple[float, ...]:
    """Row and column directions of an axial slice turned about two axes."""
    a, b = np.radians([degrees, degrees / 2])
    about_x = np.array([[1, 0, 0], [0, np.cos(a), -np.sin(a)], [0, np.sin(a), np.cos(a)]])
    about_z = np.array([[np.cos(b), -np.sin(b), 0], [np.sin(b), np.cos(b), 0], [0, 0, 1]])
    turn = about_z @ about_x
    return (*turn[:, 0], *turn[:, 1])


def write_dicom(path: Path, pixels: np.ndarray, **elements) -> Path:
    """One file; pixels are (rows, columns) or (rows, columns, 3), stored as they are."""
    dataset = Dataset()
    dataset.SOPClassUID, dataset.Modality = CR, "CR"
    for name in ("SOPInstanceUID", "SeriesInstanceUID", "StudyInstanceUID"):
        setattr(dataset, name, generate_uid())
    for name, value in PATIENT.items():
        setattr(dataset, name, value)
    dataset.Rows, dataset.Columns = pixels.shape[:2]
    dataset.SamplesPerPixel = 3 if pixels.ndim == 3 else 1
    dataset.PhotometricInterpretation = "RGB" if pixels.ndim == 3 else "MONOCHROME2"
    if pixels.ndim == 3:
        dataset.PlanarConfiguration = 0
    bits = pixels.dtype.itemsize * 8
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit = bits, bits, bits - 1
    dataset.PixelRepresentation = int(pixels.dtype.kind == "i")
    dataset.PixelData = pixels.tobytes()
    for name, value in elements.items():
        setattr(dataset, name, value)
        if value is None:
            delattr(dataset, name)
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    path.parent.mkdir(parents=True, exist_ok=True)
    dataset.save_as(path, enforce_file_format=True)
    return path


def write_series(
    folder: Path,
    volume: np.ndarray,
    *,
    directions=AXIAL,
    origin=(-100.0, -80.0, 30.0),
    between=(0.8, 0.6),
    step=2.5,
    shift=(0.0, 0.0, 0.0),
    names=None,
    each=lambda number: {},
    **elements,
) -> list[Path]:
    """A CT series of (slices, rows, columns); `between` rows and columns, `step` between slices, in mm.

    Each slice is moved by `shift` against the one before, beside `step` along the normal.
    """
    normal = np.cross(directions[:3], directions[3:])
    ids = {
        "SeriesInstanceUID": generate_uid(),
        "StudyInstanceUID": generate_uid(),
        "FrameOfReferenceUID": generate_uid(),
    }
    files = []
    for number, pixels in enumerate(volume):
        place = np.array(origin) + number * (step * normal + np.array(shift))
        files.append(
            write_dicom(
                folder / (names[number] if names else f"slice{number:03d}.dcm"),
                np.ascontiguousarray(pixels),
                **{
                    "SOPClassUID": CT,
                    "Modality": "CT",
                    **ids,
                    "InstanceNumber": number + 1,
                    "ImageOrientationPatient": [f"{v:.10g}"[:16] for v in directions],
                    "ImagePositionPatient": [f"{v:.10g}"[:16] for v in place],
                    "PixelSpacing": list(between),
                    "SliceThickness": step,
                    **elements,
                    **each(number),
                },
            )
        )
    return files


def write_enhanced(path: Path, volume: np.ndarray, *, directions=AXIAL, order=None, **options) -> Path:
    """The same volume in one Enhanced CT file, its frames in `order`; `options` are those of `write_series`."""
    slices = [dcmread(file) for file in write_series(path.parent / "slices", volume, directions=directions, **options)]
    shutil.rmtree(path.parent / "slices")
    order = range(len(slices)) if order is None else order
    first = slices[0]

    def groups(**sequences):
        found = Dataset()
        for name, elements in sequences.items():
            item = Dataset()
            for keyword, value in elements.items():
                setattr(item, keyword, value)
            setattr(found, name, [item])
        return found

    shared = groups(
        PixelMeasuresSequence={"PixelSpacing": first.PixelSpacing, "SliceThickness": first.SliceThickness},
        PlaneOrientationSequence={"ImageOrientationPatient": first.ImageOrientationPatient},
    )
    frames = [
        groups(
            PlanePositionSequence={"ImagePositionPatient": slices[n].ImagePositionPatient},
            FrameContentSequence={"FrameAcquisitionDateTime": "20260101120000"},
            PixelValueTransformationSequence={
                "RescaleSlope": slices[n].get("RescaleSlope", 1),
                "RescaleIntercept": slices[n].get("RescaleIntercept", 0),
                "RescaleType": "HU",
            },
        )
        for n in order
    ]  # fmt: skip
    for name in ("ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing", "SliceThickness", "InstanceNumber"):
        delattr(first, name)
    for name in ("RescaleSlope", "RescaleIntercept"):
        first.pop(name, None)
    first.SOPClassUID = ENHANCED_CT
    first.file_meta.MediaStorageSOPClassUID = ENHANCED_CT
    first.NumberOfFrames = len(frames)
    first.SharedFunctionalGroupsSequence, first.PerFrameFunctionalGroupsSequence = [shared], frames
    first.PixelData = b"".join(slices[n].PixelData if n else volume[0].tobytes() for n in order)
    first.save_as(path, enforce_file_format=True)
    return path
