"""Headers that say anything: an image or one `DataError`, in little time and memory, whatever the bytes."""

import gzip
import resource
import warnings
import zlib
from contextlib import suppress

import nibabel as nib
import numpy as np
import pytest
import tifffile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow
from PIL.PngImagePlugin import PngInfo
from pydicom import Sequence as DicomSequence
from pydicom import dcmread
from pydicom.dataset import Dataset
from pydicom.uid import DeflatedExplicitVRLittleEndian, ImplicitVRLittleEndian, RLELossless

from dicoms import CT, write_dicom
from dltta.data.formats.images import read_geometry, read_mask
from dltta.data.inbox import find_incoming, read_incoming
from dltta.data.outputs import identifying
from dltta.data.watch import watch_incoming
from dltta.errors import DataError

MEMORY = 300 << 20  # bytes that no file of this test may take
NOISE = np.random.default_rng(0).integers(0, 255, (9, 11), dtype=np.uint8)
QUICK, LONG = 60, 1500  # examples of every kind of file
EXTREMES = [b"\0", b"\xff", b"\x80", b"\x7f", bytes(4), b"\xff" * 4, b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f"]


def save_png(path, **options):
    info = PngInfo()
    info.add_text("Patient", "somebody", zip=True)
    Pillow.fromarray(np.stack([NOISE] * 3, -1) if options.get("color") else NOISE).save(path, pnginfo=info)


def save_palette(path):
    image = Pillow.fromarray(NOISE).convert("P")
    image.save(path)


def save_sixteen(path):
    Pillow.fromarray(NOISE.astype(np.uint16) * 257).save(path)


def save_volume(path, kind=nib.Nifti1Image):
    image = kind(np.stack([NOISE] * 3, -1).astype(np.int16), np.diag([1.0, 2.0, 3.0, 1.0]))
    image.header.set_slope_inter(2, -5)
    image.header["descrip"] = b"somebody"
    image.header.extensions.append(nib.nifti1.Nifti1Extension("comment", b"somebody"))
    nib.save(image, path)


def save_dicom(path, syntax=None):
    item = Dataset()
    item.PatientName = "Some^Body"
    write_dicom(path, NOISE.astype(np.uint16), SOPClassUID=CT, RequestAttributesSequence=DicomSequence([item]),
                RescaleSlope=2, RescaleIntercept=-5, PixelSpacing=[1, 2], ImagePositionPatient=[1, 2, 3])  # fmt: skip
    if syntax is not None:
        dataset = dcmread(path)
        if syntax == RLELossless:
            dataset.compress(syntax)
        dataset.file_meta.TransferSyntaxUID = syntax
        dataset.save_as(path, implicit_vr=syntax == ImplicitVRLittleEndian, little_endian=True)


FILES = {
    "grey.png": save_png,
    "color.png": lambda path: save_png(path, color=True),
    "palette.png": save_palette,
    "sixteen.png": save_sixteen,
    "plain.tif": lambda path: tifffile.imwrite(path, NOISE, description="somebody"),
    "strips.tif": lambda path: tifffile.imwrite(path, NOISE, compression="zlib", rowsperstrip=3),
    "tiles.tif": lambda path: tifffile.imwrite(path, np.stack([NOISE] * 3, -1), tile=(16, 16), photometric="rgb"),
    "big.tif": lambda path: tifffile.imwrite(path, NOISE.astype(np.float32), bigtiff=True),
    "lzw.tif": lambda path: Pillow.fromarray(NOISE).save(path, compression="tiff_lzw"),
    "one.nii": save_volume,
    "two.nii": lambda path: save_volume(path, nib.Nifti2Image),
    "zipped.nii.gz": save_volume,
    "explicit.dcm": save_dicom,
    "implicit.dcm": lambda path: save_dicom(path, ImplicitVRLittleEndian),
    "deflated.dcm": lambda path: save_dicom(path, DeflatedExplicitVRLittleEndian),
    "rle.dcm": lambda path: save_dicom(path, RLELossless),
}
HEADER = 700  # bytes in which something is changed; then anywhere

places = st.one_of(st.integers(0, HEADER), st.integers(0, 1 << 16))
edits = st.lists(st.tuples(places, st.one_of(st.sampled_from(EXTREMES), st.binary(min_size=1, max_size=8))), max_size=4)
cuts = st.one_of(st.none(), st.none(), st.integers(0, 1 << 16))


def changed(content, edits, cut):
    found = bytearray(content)
    for place, new in edits:
        place %= len(found)
        found[place : place + len(new)] = new[: len(found) - place]
    return bytes(found) if cut is None else bytes(found[: cut % len(found)])


def repaired(content):
    """A PNG whose checksums are right again, so that readers go on."""
    found, place = bytearray(content), 8
    while place + 12 <= len(found):
        length = int.from_bytes(found[place : place + 4], "big")
        end = place + 8 + length
        if end + 4 > len(found):
            break
        found[end : end + 4] = zlib.crc32(found[place + 4 : end]).to_bytes(4, "big")
        place = end + 4
    return bytes(found)


def use(path):
    """Everything that opens a file that arrives."""
    try:
        [case] = find_incoming(path.parent)
    except DataError:  # a DICOM file that says that it is no image
        return
    for call in (read_incoming, identifying):
        with suppress(DataError):
            call(case)
    if path.suffix != ".dcm":
        for call in (read_geometry, read_mask):
            with suppress(DataError):
                call(path)
    now = [0.0]
    watch = watch_incoming(path.parent, poll=400, clock=lambda: now[0], sleep=lambda s: now.append(now.pop() + s))
    assert next(watch).name == case.name


def fuzz(path, name, examples):
    FILES[name](path / name)
    content = (path / name).read_bytes()
    zipped = name.endswith(".gz")
    inside = gzip.decompress(content) if zipped else content

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(edits=edits, cut=cuts, outside=st.booleans())
    def run(edits, cut, outside):
        new = changed(content if outside or not zipped else inside, edits, cut)
        new = repaired(new) if name.endswith(".png") else gzip.compress(new) if zipped and not outside else new
        (path / name).write_bytes(new)
        use(path / name)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < MEMORY


@pytest.mark.parametrize("name", FILES)
def test_any_header_is_an_image_or_one_line(tmp_path, name):
    fuzz(tmp_path, name, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_any_header_is_an_image_or_one_line_for_long(tmp_path, name):
    fuzz(tmp_path, name, LONG)
