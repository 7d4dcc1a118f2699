"""Sites from DICOM headers: one rule for the service and the node."""

import io
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("pydicom", reason="DICOM is not installed: pip install 'dltta[dicom]'")

from dicoms import write_series
from dltta.errors import DataError, SettingError
from dltta.serving.site_rule import USUAL, SiteRule


@pytest.fixture
def slices(tmp_path):
    volume = np.zeros((2, 8, 8), np.uint16)
    files = write_series(tmp_path, volume, Manufacturer="Acme", StationName="CT1", ProtocolName="head")
    return [file.read_bytes() for file in files]


def test_a_slice_and_a_zip_of_slices_name_their_scanner(slices):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for number, content in enumerate(slices):
            archive.writestr(f"anything{number}", content)
    for content in (slices[0], buffer.getvalue()):
        assert SiteRule().site_of_upload(content) == "Acme/CT1/head"
        assert SiteRule("{StationName} at {InstitutionName}").site_of_upload(content) == "CT1 at unknown"


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n" + b"0" * 200, b"PK\x03\x04 broken"])
def test_what_has_no_header_is_one_sentence(content):
    with pytest.raises(DataError, match="no site was given|cannot be read"):
        SiteRule().site_of_upload(content)


def test_values_of_a_header_cannot_make_a_site_that_is_no_name():
    header = SimpleNamespace(Manufacturer=" \x00\n", StationName="a\nb" * 200, ProtocolName="")
    site = SiteRule(USUAL).site(header)
    assert site.startswith("unknown/a b")
    assert (len(site) <= 200, site.isprintable(), site) == (True, True, site.strip())


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("{StatonName}", "did you mean 'StationName'"),
        ("CT1", "names no header element"),
        ("{StationName", "names no header element"),
        ("{PatientID}/{StationName}", "not a patient"),
    ],
)
def test_a_rule_that_cannot_work_is_refused_when_it_is_given(rule, said):
    with pytest.raises(SettingError, match=said):
        SiteRule(rule)
