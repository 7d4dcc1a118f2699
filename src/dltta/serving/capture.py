"""A picture for any viewer, as a DICOM secondary capture: the slice with most foreground, and its quality in words."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dltta.data.formats import dicom

COLORS = np.array([[255, 127, 14], [31, 119, 180], [44, 160, 44], [214, 39, 40], [148, 103, 189]], np.float32)
SECONDARY_CAPTURE = "1.2.840.10008.5.1.4.1.1.7"
MARGIN = 44  # pixels below the picture, for words


def secondary_capture(series: Sequence[Path], segmentation: bytes, line: Mapping[str, Any]) -> tuple[str, bytes]:
    """Its SOP instance UID, which follows from the segmentation's, and its bytes."""
    from pydicom import Dataset, dcmread
    from pydicom.dataset import FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, generate_uid

    source = dcmread(io.BytesIO(segmentation))
    picture = _picture(series, source, words(line))
    uid = generate_uid(entropy_srcs=[str(source.SOPInstanceUID), "capture"])
    made = Dataset()
    for name in (
        "PatientID", "PatientName", "PatientBirthDate", "PatientSex", "StudyInstanceUID", "StudyDate", "StudyTime",
        "StudyID", "AccessionNumber", "ReferringPhysicianName",
    ):  # fmt: skip
        setattr(made, name, getattr(source, name, ""))
    made.SOPClassUID, made.SOPInstanceUID = SECONDARY_CAPTURE, uid
    made.SeriesInstanceUID = generate_uid(entropy_srcs=[str(source.SeriesInstanceUID), "capture"])
    made.Modality, made.ConversionType = "OT", "WSD"
    made.SeriesNumber, made.InstanceNumber = 901, 1
    made.SeriesDescription = "dltta: segmentation and its expected quality"
    made.PatientOrientation, made.Laterality = "", ""
    made.ContentDate, made.ContentTime = source.ContentDate, source.ContentTime
    made.Rows, made.Columns, made.SamplesPerPixel = picture.shape[0], picture.shape[1], 3
    made.PhotometricInterpretation, made.PlanarConfiguration = "RGB", 0
    made.BitsAllocated, made.BitsStored, made.HighBit, made.PixelRepresentation = 8, 8, 7, 0
    content = picture.tobytes()
    made.PixelData = content + b"\0" * (len(content) % 2)
    made.BurnedInAnnotation = "NO"  # words on quality, nothing on the patient
    made.file_meta = FileMetaDataset()
    made.file_meta.MediaStorageSOPClassUID, made.file_meta.MediaStorageSOPInstanceUID = SECONDARY_CAPTURE, uid
    made.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    buffer = io.BytesIO()
    made.save_as(buffer, enforce_file_format=True)
    return str(uid), buffer.getvalue()


def words(line: Mapping[str, Any]) -> str:
    """What was decided and how good it is expected to be, for somebody who looks at the picture."""
    quality, low, high = (line.get(name) for name in ("quality", "quality_low", "quality_high"))
    said = "expected quality not known"
    if quality is not None:
        bounds = "" if low is None or high is None else f" (90 %: {float(low):.2f} to {float(high):.2f})"
        said = f"expected quality {float(quality):.2f}{bounds}"
    review = "  REVIEW" if line.get("review") else ""
    return f"{said}{review}\n{line.get('decision') or 'predicted'} {line.get('detail') or ''}".strip()


def _picture(files: Sequence[Path], segmentation: Any, text: str) -> NDArray[np.uint8]:
    """(rows, columns, 3): the slice with most foreground."""
    from PIL import Image, ImageDraw

    image = dicom.read_series(files)
    labels = _labels(segmentation, image.array.shape[1:], image.geometry.affine)
    values = image.array[0]
    if values.ndim == 3:  # columns, rows, slices
        best = int((labels > 0).sum((0, 1)).argmax())
        values, labels = values[..., best].T, labels[..., best].T
    low, high = np.percentile(values, [1, 99])
    plain = np.clip((values - low) / max(high - low, 1e-6), 0, 1)[..., None].repeat(3, -1) * 255
    inside = (labels > 0)[..., None]
    colored = np.where(inside, 0.6 * plain + 0.4 * COLORS[(labels - 1) % len(COLORS)], plain)
    canvas = Image.new("RGB", (max(plain.shape[1], 320), plain.shape[0] + MARGIN))
    canvas.paste(Image.fromarray(colored.astype(np.uint8)), (0, 0))
    ImageDraw.Draw(canvas).multiline_text((4, plain.shape[0] + 4), text[:160], fill=(255, 255, 255))
    return np.asarray(canvas)


def _labels(segmentation: Any, shape: tuple[int, ...], affine: NDArray[np.float64] | None) -> NDArray[np.int64]:
    """Class numbers on the grid of the series as `dicom.read_series` gives it."""
    planes = segmentation.pixel_array.reshape(-1, segmentation.Rows, segmentation.Columns)
    labels = np.zeros(shape, np.int64)
    for frame, plane in zip(segmentation.PerFrameFunctionalGroupsSequence, planes, strict=True):
        number = int(frame.SegmentIdentificationSequence[0].ReferencedSegmentNumber)
        if affine is None:
            labels[plane > 0] = number
            continue
        place = np.array(frame.PlanePositionSequence[0].ImagePositionPatient, float) * (-1, -1, 1)  # LPS to RAS
        index = round(float((np.linalg.inv(affine) @ np.append(place, 1))[2]))
        labels[..., index][plane.T > 0] = number
    return labels
