"""Series that arrive: on the disk from their first slice on, complete once, and never half of one."""

import numpy as np
import pytest

pytest.importorskip("pydicom", reason="DICOM is not installed: pip install 'dltta[dicom]'")

from pydicom import dcmread

from dicoms import write_series
from dltta.errors import DataError, StateError
from dltta.serving.inbound import Inbound, OtherPatientError, packed
from dltta.serving.site_rule import SiteRule

SLICES = 4


@pytest.fixture
def series(tmp_path):
    volume = np.random.default_rng(0).integers(0, 255, (SLICES, 8, 8)).astype(np.int16)
    return write_series(tmp_path / "series", volume, StationName="CT1", ProtocolName="head", Manufacturer="Acme")


def taken(inbound, files, association=1):
    for file in files:
        inbound.take(dcmread(file), file.read_bytes(), association)


def test_sites_follow_a_rule_on_the_header(series):
    header = dcmread(series[0])
    assert SiteRule("{Manufacturer}/{StationName}/{ProtocolName}").site(header) == "Acme/CT1/head"
    assert SiteRule("{InstitutionName}-{StationName}").site(header) == "unknown-CT1"


def test_expected_counts_complete_a_series_at_once(tmp_path, series):
    inbound = Inbound(tmp_path / "state", quiet=3600.0)
    for number, file in enumerate(series):
        dataset = dcmread(file)
        dataset.NumberOfSeriesRelatedInstances = SLICES
        assert list(inbound.complete()) == []
        inbound.take(dataset, file.read_bytes(), 1)
        assert len(list(inbound.complete())) == (number == SLICES - 1)


def test_a_series_is_complete_when_its_association_is_closed_and_it_was_quiet(tmp_path, series, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("dltta.serving.inbound.time.monotonic", lambda: now[0])
    inbound = Inbound(tmp_path / "state", quiet=10.0)
    taken(inbound, series)
    now[0] = 200.0
    assert list(inbound.complete()) == []  # the association is open
    inbound.ended(1)
    (arrived,) = inbound.complete()
    assert (arrived.uid, arrived.site, len(arrived.slices)) == (
        dcmread(series[0]).SeriesInstanceUID,
        "Acme/CT1/head",
        4,
    )
    now[0] = 205.0
    again = Inbound(tmp_path / "state", quiet=10.0)  # after a restart quiet time begins anew
    assert list(again.complete()) == []
    now[0] = 215.0
    assert list(again.complete()) == [arrived]


def test_a_slice_that_comes_twice_with_other_pixels_is_refused(tmp_path, series):
    inbound = Inbound(tmp_path / "state")
    inbound.take(dcmread(series[0]), b"one", 1)
    inbound.take(dcmread(series[0]), b"one", 1)
    with pytest.raises(DataError, match="other content"):
        inbound.take(dcmread(series[0]), b"two", 1)


@pytest.mark.parametrize("name", ["PatientID", "PatientName", "PatientBirthDate", "StudyInstanceUID"])
def test_another_patient_or_study_is_not_mixed_in(tmp_path, series, name):
    inbound = Inbound(tmp_path / "state")
    taken(inbound, series[:1])
    stranger = dcmread(series[1])
    setattr(stranger, name, "19990101")
    with pytest.raises(OtherPatientError):
        inbound.take(stranger, b"slice", 1)


@pytest.mark.parametrize("name", ["SeriesInstanceUID", "SOPInstanceUID"])
@pytest.mark.parametrize("value", ["", "../../etc", "1.2." + "3" * 70])
def test_identifiers_that_are_none_are_refused(tmp_path, series, name, value):
    dataset = dcmread(series[0])
    setattr(dataset, name, value)
    with pytest.raises(DataError, match=name):
        Inbound(tmp_path / "state").take(dataset, b"slice", 1)


def test_a_series_that_was_dealt_with_is_gone_and_one_that_grew_meanwhile_stays(tmp_path, series):
    inbound = Inbound(tmp_path / "state", quiet=0.0)
    taken(inbound, series[:2])
    inbound.ended(1)
    (half,) = inbound.complete()
    taken(inbound, series[2:], association=2)  # while the first half is predicted
    inbound.forget(half)
    inbound.ended(2)
    (whole,) = inbound.complete()
    assert (len(half.slices), len(whole.slices)) == (2, SLICES)
    assert half.request != whole.request
    inbound.forget(whole)
    assert list(inbound.complete()) == []
    assert list((tmp_path / "state" / "arriving").iterdir()) == []


def test_what_a_kill_left_of_a_series_that_was_dealt_with_is_no_series(tmp_path, series, monkeypatch):
    inbound = Inbound(tmp_path / "state", quiet=0.0)
    taken(inbound, series)
    inbound.ended(1)
    (arrived,) = inbound.complete()

    def killed(folder):
        arrived.files[0].unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr("dltta.serving.inbound.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        inbound.forget(arrived)
    monkeypatch.undo()
    again = Inbound(tmp_path / "state", quiet=0.0)
    assert list(again.complete()) == []
    assert list((tmp_path / "state" / "arriving").iterdir()) == []


def test_the_same_slices_are_the_same_request_and_the_same_bytes(tmp_path, series):
    first, second = Inbound(tmp_path / "a", quiet=0.0), Inbound(tmp_path / "b", quiet=0.0)
    taken(first, series)
    taken(second, series[::-1])
    found = []
    for inbound in (first, second):
        inbound.ended(1)
        (arrived,) = inbound.complete()
        found.append((arrived.request, packed(arrived.files)))
    assert found[0] == found[1]


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "state").write_text("a file")
    with pytest.raises(StateError, match="cannot be written"):
        Inbound(tmp_path / "state")
