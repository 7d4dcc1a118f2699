"""A DICOM series of synthetic OCT slices, to try `dltta node` with: python examples/dicom_series.py FOLDER [SLICES]

The slices are those of another scanner than the model of docs/dicom.md was trained at. A header has what a scanner's
has: who, which study and series, where the slice lies. Every call makes a new study.
"""

import sys
from pathlib import Path

from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

from dltta.config import open_dataset


def main(folder: Path, count: int = 3) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    ids = {f"{level}InstanceUID": generate_uid() for level in ("Study", "Series")}
    ids["FrameOfReferenceUID"] = generate_uid()
    slices = open_dataset(f"phantom:oct:cirrus:{count}:1")
    for number in range(count):
        pixels = (slices[number].image[0].clamp(0, 1) * 4095).short().numpy()  # (rows, columns), 12 bits
        header(number, pixels.shape, ids, pixels.tobytes()).save_as(
            folder / f"slice_{number:03d}.dcm", enforce_file_format=True
        )


def header(number: int, shape: tuple[int, ...], ids: dict[str, str], pixels: bytes) -> Dataset:
    slice_ = Dataset()
    elements = {
        **ids, "SOPClassUID": CTImageStorage, "SOPInstanceUID": generate_uid(), "Modality": "CT",
        "PatientName": "Phantom^One", "PatientID": "phantom-1", "StudyDate": "20260101", "StudyTime": "120000",
        "Manufacturer": "Synthetic", "StationName": "CIRRUS", "ProtocolName": "MACULA", "InstanceNumber": number + 1,
        "ImageOrientationPatient": [1, 0, 0, 0, 1, 0], "ImagePositionPatient": [0, 0, 0.25 * number],
        "PixelSpacing": [0.004, 0.012], "SliceThickness": 0.25, "Rows": shape[0], "Columns": shape[1],
        "SamplesPerPixel": 1, "PhotometricInterpretation": "MONOCHROME2", "BitsAllocated": 16, "BitsStored": 12,
        "HighBit": 11, "PixelRepresentation": 0, "PixelData": pixels,
    }  # fmt: skip
    for name, value in elements.items():
        setattr(slice_, name, value)
    slice_.file_meta = FileMetaDataset()
    slice_.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    return slice_


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
