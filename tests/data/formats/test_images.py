import gzip
import struct
import zlib
from contextlib import suppress
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import tifffile
from PIL import Image as Pillow

from dltta.data.formats.images import Geometry, difference, read_geometry, read_image, read_mask, write_mask
from dltta.errors import DataError

RAMP = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
OBLIQUE = nib.affines.from_matvec(
    np.array([[0.5, -0.2, 0.4], [0.3, 0.7, -0.6], [-0.1, 0.4, 2.6]]), [-90.5, 12.25, -72.0]
)


def save_png(path: Path, array: np.ndarray, mode: str | None = None) -> Path:
    image = Pillow.fromarray(array)
    (image.convert(mode) if mode else image).save(path)
    return path


def save_nifti(path: Path, array: np.ndarray, affine: np.ndarray | None = None) -> Path:
    nib.save(nib.Nifti1Image(array, np.diag([2.0, 3.0, 4.0, 1.0]) if affine is None else affine), path)
    return path


def test_grey_png_keeps_its_units_and_has_one_channel(tmp_path):
    image = read_image(save_png(tmp_path / "a.png", RAMP))
    assert image.array.shape == (1, 3, 4)
    assert image.array.dtype == np.float32
    assert image.array[0, 2, 3] == 220
    assert image.geometry == Geometry("png", (3, 4), 1, 255)
    assert read_geometry(tmp_path / "a.png") == image.geometry


def test_rgb_png_has_channels_first(tmp_path):
    array = np.zeros((3, 4, 3), np.uint8)
    array[1, 2] = (10, 20, 30)
    image = read_image(save_png(tmp_path / "a.png", array))
    assert image.array.shape == (3, 3, 4)
    assert image.array[:, 1, 2].tolist() == [10, 20, 30]


def test_sixteen_bits_arrive_exactly_from_png_and_tiff(tmp_path):
    array = np.array([[0, 1, 255], [256, 40001, 65535]], np.uint16)
    Pillow.fromarray(array).save(tmp_path / "a.png")
    tifffile.imwrite(tmp_path / "a.tif", array)
    assert read_image(tmp_path / "a.png").array[0].tolist() == array.tolist()
    assert read_image(tmp_path / "a.tif").array[0].tolist() == array.tolist()


@pytest.mark.parametrize("planar", ["contig", "separate"])
def test_sixteen_bit_rgb_tiff_in_both_sample_orders(tmp_path, planar):
    array = np.arange(3 * 5 * 7, dtype=np.uint16).reshape(3, 5, 7) * 600  # (C, H, W)
    stored = array if planar == "separate" else np.moveaxis(array, 0, -1)
    tifffile.imwrite(tmp_path / "a.tif", stored, photometric="rgb", planarconfig=planar)
    image = read_image(tmp_path / "a.tif")
    assert np.array_equal(image.array, array)
    assert image.geometry == Geometry("tiff", (5, 7), 3, 65535)


@pytest.mark.parametrize("compression", ["tiff_lzw", "packbits", "tiff_adobe_deflate"])
def test_compressed_tiffs_are_read(tmp_path, compression):
    array = np.arange(12, dtype=np.uint16).reshape(3, 4) * 5000
    Pillow.fromarray(array).save(tmp_path / "a.tif", compression=compression)
    assert read_image(tmp_path / "a.tif").array[0].tolist() == array.tolist()


def test_alpha_is_dropped_and_colors_stay_as_stored(tmp_path):
    array = np.zeros((2, 2, 4), np.uint8)
    array[0, 0] = (100, 110, 120, 0)
    for path in (save_png(tmp_path / "a.png", array), tmp_path / "a.tif"):
        if path.suffix == ".tif":
            tifffile.imwrite(path, array, photometric="rgb", extrasamples=["unassalpha"])
        assert read_image(path).array[:, 0, 0].tolist() == [100, 110, 120]
    Pillow.fromarray(np.array([[[9, 0]]], np.uint8), "LA").save(tmp_path / "la.png")
    assert read_image(tmp_path / "la.png").array.tolist() == [[[9]]]


def test_a_palette_gives_colors_as_image_and_indices_as_mask(tmp_path):
    image = Pillow.fromarray(np.array([[0, 1], [2, 1]], np.uint8), "P")
    image.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0])
    image.save(tmp_path / "a.png")
    assert read_image(tmp_path / "a.png").array[:, 1, 0].tolist() == [0, 255, 0]
    assert read_mask(tmp_path / "a.png").tolist() == [[0, 1], [2, 1]]


def test_a_tiff_with_a_palette_is_a_mask_but_no_image(tmp_path):
    Pillow.fromarray(np.array([[0, 1], [2, 1]], np.uint8), "P").save(tmp_path / "a.tif")
    assert read_mask(tmp_path / "a.tif").tolist() == [[0, 1], [2, 1]]
    with pytest.raises(DataError, match="palette is not an intensity image"):
        read_image(tmp_path / "a.tif")


def test_nifti_slope_is_applied_and_spacing_comes_from_the_affine(tmp_path):
    volume = nib.Nifti1Image(np.arange(24, dtype=np.int16).reshape(2, 3, 4), OBLIQUE)
    volume.header.set_slope_inter(2.0, -1024.0)
    nib.save(volume, tmp_path / "a.nii.gz")
    image = read_image(tmp_path / "a.nii.gz")
    expected = np.asarray(nib.load(tmp_path / "a.nii.gz").get_fdata())
    assert np.array_equal(image.array[0], expected.astype(np.float32))
    assert image.geometry.spacing == pytest.approx(np.linalg.norm(OBLIQUE[:3, :3], axis=0))


@pytest.mark.parametrize("version", [nib.Nifti1Image, nib.Nifti2Image])
def test_a_mask_lies_on_its_oblique_anisotropic_image(tmp_path, version):
    volume = version(np.random.default_rng(0).normal(size=(4, 5, 6)).astype(np.float32), OBLIQUE)
    volume.set_qform(nib.affines.from_matvec(np.diag([1.0, 2.0, 3.0])), code=1)
    volume.set_sform(OBLIQUE, code=2)
    volume.header.set_xyzt_units("mm", "sec")
    volume.header["cal_max"] = 7
    nib.save(volume, tmp_path / "a.nii.gz")
    labels = np.random.default_rng(1).integers(0, 3, (4, 5, 6))
    write_mask(tmp_path / "out" / "m.nii.gz", labels, read_image(tmp_path / "a.nii.gz").geometry)

    image, mask = nib.load(tmp_path / "a.nii.gz"), nib.load(tmp_path / "out" / "m.nii.gz")
    assert type(mask) is version
    assert mask.get_data_dtype() == np.uint8
    assert np.array_equal(np.asarray(mask.dataobj), labels)
    assert np.array_equal(mask.affine, image.affine)
    for form in ("get_qform", "get_sform"):
        there, code = getattr(mask, form)(coded=True)
        expected, expected_code = getattr(image, form)(coded=True)
        assert np.array_equal(there, expected)
        assert code == expected_code
    assert mask.header.get_zooms() == image.header.get_zooms()
    assert mask.header.get_xyzt_units() == ("mm", "sec")
    assert mask.header["cal_max"] == 0


def test_a_scaled_image_leaves_no_slope_in_its_mask(tmp_path):
    volume = nib.Nifti1Image(np.zeros((2, 2, 2), np.int16), np.eye(4))
    volume.header.set_slope_inter(0.5, 3.0)
    nib.save(volume, tmp_path / "a.nii")
    write_mask(tmp_path / "m.nii", np.full((2, 2, 2), 2), read_geometry(tmp_path / "a.nii"))
    assert np.asarray(nib.load(tmp_path / "m.nii").dataobj).tolist() == np.full((2, 2, 2), 2).tolist()


@pytest.mark.parametrize(("name", "highest"), [("m.png", 7), ("m.png", 300), ("m.tif", 7), ("m.tif", 300)])
def test_masks_of_2d_images_come_back_as_written(tmp_path, name, highest):
    labels = np.array([[0, 1, 2], [3, 4, highest]])
    kind = "png" if name.endswith("png") else "tiff"
    write_mask(tmp_path / name, labels, Geometry(kind, (2, 3), 3))
    assert np.asarray(Pillow.open(tmp_path / name)).tolist() == labels.tolist()
    assert read_mask(tmp_path / name).tolist() == labels.tolist()
    assert read_mask(tmp_path / name).dtype == np.int64


def test_the_same_mask_gives_the_same_bytes_and_leaves_no_other_file(tmp_path):
    geometry = read_geometry(save_nifti(tmp_path / "a.nii.gz", np.zeros((2, 3, 4), np.float32)))
    for name in ("m.nii.gz", "n.nii.gz"):
        write_mask(tmp_path / name, np.ones((2, 3, 4), int), geometry)
    assert (tmp_path / "m.nii.gz").read_bytes() == (tmp_path / "n.nii.gz").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.nii.gz", "m.nii.gz", "n.nii.gz"]


def test_a_failed_write_keeps_the_old_mask_and_leaves_nothing_half_written(tmp_path, monkeypatch):
    write_mask(tmp_path / "m.png", RAMP, Geometry("png", (3, 4)))
    before = (tmp_path / "m.png").read_bytes()

    def full(self, file, **options):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Pillow.Image, "save", full)
    with pytest.raises(DataError, match="No space left on device"):
        write_mask(tmp_path / "m.png", RAMP + 1, Geometry("png", (3, 4)))
    assert (tmp_path / "m.png").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m.png"]


@pytest.mark.parametrize(
    ("labels", "name", "says"),
    [
        (np.zeros((4, 3), int), "m.png", r"size of its image \(3, 4\), found \(4, 3\)"),
        (np.zeros((3, 4)), "m.png", "float64; take the argmax"),
        (np.full((3, 4), -1), "m.png", "found -1"),
        (np.zeros((3, 4), int), "m.tif", "the image is png, its mask cannot be TIFF"),
    ],
)
def test_masks_that_do_not_fit_are_refused(tmp_path, labels, name, says):
    with pytest.raises(DataError, match=says):
        write_mask(tmp_path / name, labels, Geometry("png", (3, 4)))
    assert not list(tmp_path.iterdir())


def write_bad(folder: Path) -> dict[str, Path]:
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 255, (64, 64), dtype=np.uint8)
    bad = {}
    whole = save_png(folder / "whole.png", noise).read_bytes()
    bad["truncated PNG"] = folder / "truncated.png"
    bad["truncated PNG"].write_bytes(whole[: len(whole) // 2])
    bad["text as NIfTI"] = folder / "text.nii.gz"
    bad["text as NIfTI"].write_text("this is not a volume")
    bad["gzipped text as NIfTI"] = folder / "text2.nii.gz"
    bad["gzipped text as NIfTI"].write_bytes(gzip.compress(b"neither is this"))
    whole = save_nifti(folder / "whole.nii.gz", rng.normal(size=(9, 9, 9)).astype(np.float32)).read_bytes()
    bad["truncated NIfTI"] = folder / "truncated.nii.gz"
    bad["truncated NIfTI"].write_bytes(whole[: len(whole) // 2])
    bad["NaN"] = save_nifti(folder / "nan.nii.gz", np.array([[[1, np.nan, np.inf]]], np.float32))
    bad["4-D"] = save_nifti(folder / "four.nii.gz", np.zeros((2, 2, 2, 3), np.float32))
    bad["ending"] = folder / "a.jpg"
    bad["ending"].write_bytes(b"")
    bad["CMYK"] = folder / "cmyk.tif"
    Pillow.fromarray(np.zeros((4, 4, 3), np.uint8)).convert("CMYK").save(bad["CMYK"])
    bad["pages"] = folder / "pages.tif"
    tifffile.imwrite(bad["pages"], np.zeros((5, 8, 8), np.uint8), photometric="minisblack")
    bad["empty"] = folder / "empty.tif"
    bad["empty"].write_bytes(b"")
    bad["JPEG named PNG"] = folder / "jpeg.png"
    Pillow.fromarray(noise).save(bad["JPEG named PNG"], format="JPEG")
    bad["missing"] = folder / "missing.png"
    return bad


SAYS = {
    "truncated PNG": "cannot be read as PNG",
    "text as NIfTI": "cannot be read as NIfTI",
    "gzipped text as NIfTI": "cannot be read as NIfTI",
    "truncated NIfTI": "cannot be read as NIfTI",
    "NaN": "2 of 3 values are NaN or infinite",
    "4-D": r"4-D NIfTI \(2, 2, 2, 3\)",
    "ending": "unsupported ending; use one of .nii .nii.gz .png",
    "CMYK": "CMYK images are not supported",
    "pages": "found axes",
    "empty": "cannot be read as TIFF",
    "JPEG named PNG": "cannot be read as PNG",
    "missing": "no such file",
}


@pytest.mark.parametrize("kind", SAYS)
def test_a_bad_file_is_one_line_that_names_it(tmp_path, kind):
    path = write_bad(tmp_path)[kind]
    with pytest.raises(DataError, match=SAYS[kind]) as caught:
        read_image(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert "; " in str(caught.value)


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.nii.gz"])
def test_every_truncation_is_a_data_error_or_the_same_image(tmp_path, name):
    noise = np.random.default_rng(3).integers(0, 255, (12, 11), dtype=np.uint8)
    path = tmp_path / name
    if name == "a.nii.gz":
        save_nifti(path, noise[..., None])
    elif name == "a.tif":
        tifffile.imwrite(path, noise)
    else:
        save_png(path, noise)
    whole, right = path.read_bytes(), read_image(path).array
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with suppress(DataError):
            assert np.array_equal(read_image(path).array, right)


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.nii.gz", "a.nii"])
def test_flipped_bytes_give_an_image_or_a_data_error_and_nothing_else(tmp_path, name):
    rng = np.random.default_rng(4)
    noise = rng.integers(0, 255, (12, 11), dtype=np.uint8)
    path = tmp_path / name
    if ".nii" in name:
        save_nifti(path, noise[..., None])
    elif name == "a.tif":
        tifffile.imwrite(path, noise, compression="zlib")
    else:
        save_png(path, noise)
    whole, refused = path.read_bytes(), 0
    for _ in range(150):
        data = bytearray(whole)
        data[rng.integers(len(data) if name != "a.nii" else 348)] = rng.integers(256)
        path.write_bytes(bytes(data))
        try:
            read_image(path)
        except DataError:
            refused += 1
    assert refused > 5


@pytest.mark.parametrize("frames", [[1 << 24], [3, 10_000_000]])  # three axes and four
@pytest.mark.parametrize("read", [read_mask, read_geometry, read_image])
def test_a_volume_that_promises_more_than_its_file_holds_takes_no_memory(tmp_path, monkeypatch, read, frames):
    """nibabel would allocate it all before it reads."""
    header = nib.Nifti2Header()
    header.set_data_shape((9, 11, *frames))
    header.set_data_dtype(np.int16)
    (tmp_path / "huge.nii").write_bytes(header.binaryblock + bytes(1000))
    asked = []
    monkeypatch.setattr(nib.arrayproxy, "array_from_file", lambda *args, **kwargs: asked.append(args))
    with pytest.raises(DataError, match="more than the file can hold"):
        read(tmp_path / "huge.nii")
    assert asked == []


def test_a_header_that_promises_more_than_the_file_holds_is_refused_before_reading(tmp_path):
    save_nifti(tmp_path / "a.nii.gz", np.zeros((4, 4, 4), np.float32))
    content = bytearray(gzip.decompress((tmp_path / "a.nii.gz").read_bytes()))
    content[42:48] = np.array([30000, 30000, 30000], "<i2").tobytes()
    (tmp_path / "a.nii.gz").write_bytes(gzip.compress(bytes(content)))
    with pytest.raises(DataError, match="more than the file can hold"):
        read_geometry(tmp_path / "a.nii.gz")


def test_a_small_file_of_a_large_image_is_refused_before_its_memory_is_taken(tmp_path):
    path = save_png(tmp_path / "a.png", RAMP)
    data = bytearray(path.read_bytes())
    data[16:24] = struct.pack(">II", 9000, 9000)
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    path.write_bytes(bytes(data))
    tifffile.imwrite(tmp_path / "a.tif", RAMP, tile=(16, 16))
    with tifffile.TiffFile(tmp_path / "a.tif", mode="r+") as file:
        file.pages[0].tags["TileWidth"].overwrite(16000)
        file.pages[0].tags["TileLength"].overwrite(16000)
    for name in ("a.png", "a.tif"):
        with pytest.raises(DataError, match="more than the file can hold"):
            read_image(tmp_path / name)


@pytest.mark.parametrize("compression", ["tiff_lzw", "tiff_adobe_deflate"])
def test_a_damaged_strip_is_one_line_whoever_decodes_it(tmp_path, compression):
    """zlib, libtiff, or imagecodecs where it is installed (`make test-extras`)."""
    Pillow.fromarray(np.arange(1600, dtype=np.uint16).reshape(40, 40)).save(tmp_path / "a.tif", compression=compression)
    with tifffile.TiffFile(tmp_path / "a.tif") as file:
        begin = file.pages[0].dataoffsets[0]
    content = bytearray((tmp_path / "a.tif").read_bytes())
    content[begin : begin + 8] = b"\xff" * 8
    (tmp_path / "a.tif").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.tif: cannot be read as TIFF \(.+\); copy it again"):
        read_image(tmp_path / "a.tif")


def test_errors_of_an_optional_decoder_are_one_line(tmp_path, monkeypatch):
    class DeflateError(RuntimeError):  # as imagecodecs has one for each compression
        pass

    def decode(*_, **__):
        raise DeflateError("BAD_DATA")

    tifffile.imwrite(tmp_path / "a.tif", RAMP)
    monkeypatch.setattr(tifffile.TiffPageSeries, "asarray", decode)
    with pytest.raises(DataError, match=r"cannot be read as TIFF \(BAD_DATA\); copy it again"):
        read_image(tmp_path / "a.tif")


def test_a_tiff_of_an_unknown_type_is_refused(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", RAMP.astype(np.float32))
    with tifffile.TiffFile(tmp_path / "a.tif", mode="r+") as file:
        file.pages[0].tags["BitsPerSample"].overwrite(7)
    with pytest.raises(DataError, match="values of an unknown type"):
        read_image(tmp_path / "a.tif")


def test_an_even_image_compresses_well_and_is_read(tmp_path):
    save_png(tmp_path / "a.png", np.zeros((3000, 3000), np.uint8))
    Pillow.fromarray(np.zeros((3000, 3000), np.uint8)).save(tmp_path / "a.tif", compression="tiff_lzw")
    for name in ("a.png", "a.tif"):
        assert read_image(tmp_path / name).array.shape == (1, 3000, 3000)


def test_volumes_of_zeros_compress_well_and_are_read(tmp_path):
    save_nifti(tmp_path / "a.nii", np.zeros((200, 200, 100), np.uint8))
    (tmp_path / "a.nii.gz").write_bytes(gzip.compress((tmp_path / "a.nii").read_bytes(), 9))
    assert read_geometry(tmp_path / "a.nii.gz").shape == (200, 200, 100)


def test_sixteen_bit_color_png_is_refused_rather_than_cut_to_eight_bits(tmp_path):
    path = save_png(tmp_path / "a.png", np.zeros((2, 2, 3), np.uint8))
    data = bytearray(path.read_bytes())
    data[24] = 16
    path.write_bytes(bytes(data))
    with pytest.raises(DataError, match="save it as 16-bit TIFF"):
        read_image(path)


def test_more_pixels_than_pillows_limit_are_refused(tmp_path, monkeypatch):
    save_png(tmp_path / "a.png", RAMP)
    tifffile.imwrite(tmp_path / "a.tif", RAMP)
    monkeypatch.setattr(Pillow, "MAX_IMAGE_PIXELS", 11)
    for name in ("a.png", "a.tif"):
        with pytest.raises(DataError, match="safety limit"):
            read_image(tmp_path / name)


def test_masks_hold_whole_values_of_one_channel(tmp_path):
    with pytest.raises(DataError, match="3 colors"):
        read_mask(save_png(tmp_path / "rgb.png", np.zeros((2, 2, 3), np.uint8)))
    with pytest.raises(DataError, match="fractions"):
        read_mask(save_nifti(tmp_path / "f.nii", np.array([[[0.5]]], np.float32)))
    with pytest.raises(DataError, match="start at 0, found -1"):
        read_mask(save_nifti(tmp_path / "n.nii", np.array([[[-1]]], np.int16)))
    assert read_mask(save_nifti(tmp_path / "whole.nii", np.array([[[2.0]]], np.float32))).tolist() == [[[2]]]


def test_difference_says_in_words_how_a_mask_misses_its_image(tmp_path):
    def geometry(name: str, shape: tuple[int, ...], affine: np.ndarray) -> Geometry:
        return read_geometry(save_nifti(tmp_path / name, np.zeros(shape, np.uint8), affine))

    image = geometry("a.nii", (10, 10, 4), np.diag([1.0, 1.0, 3.0, 1.0]))
    rounded = np.diag([1.0, 1.0, 3.0, 1.0])
    rounded[0, 3] = 0.01
    assert difference(image, geometry("b.nii", (10, 10, 4), rounded)) is None
    assert difference(image, geometry("c.nii", (10, 9, 4), rounded)) == "size (10, 9, 4) instead of (10, 10, 4)"
    spaced = geometry("d.nii", (10, 10, 4), np.diag([1.0, 1.0, 4.0, 1.0]))
    assert difference(image, spaced) == "spacing 1 x 1 x 4 mm instead of 1 x 1 x 3 mm"
    flipped = np.diag([-1.0, 1.0, 3.0, 1.0])
    flipped[0, 3] = 9
    assert "orientation or origin differ by up to 9 mm" in str(
        difference(image, geometry("e.nii", (10, 10, 4), flipped))
    )
