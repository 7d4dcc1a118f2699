"""Sessions: one site's requests, answered once and in order, from the same states as `dltta adapt`."""

import io
import json
import shutil
import zipfile
from contextlib import nullcontext
from dataclasses import replace

import pytest
from PIL import Image as Pillow

import streams
from dltta.errors import DataError, SettingError, StateError
from dltta.serving.keys import Key, KeyFolders
from dltta.serving.lease import Lease, LeaseLostError
from dltta.serving.session import Request, Session
from dltta.serving.settings import Deployment
from dltta.serving.state import StateFolder
from dltta.serving.upload import first_bytes, unpack_upload
from dltta.serving.verification import verify
from streams import classifier, lines, segmenter, write_images


def requests(folder, count):
    write_images(folder, count)
    return [Request(f"case_{i}", "upload.png", (folder / f"case_{i}.png").read_bytes()) for i in range(count)]


def opened(tmp_path, name="site", **changes):
    return Session(segmenter(), tmp_path / name, streams.settings(**changes), spool=tmp_path / "spool")


def states(folder):
    return [line["state_sha256"] for line in lines(folder) if "state_sha256" in line]


def test_a_session_learns_what_a_folder_stream_learns(tmp_path):
    asked = requests(tmp_path / "images", 5)
    with opened(tmp_path) as session:
        for request in asked:
            session.answer(request)
    streams.run(segmenter(), tmp_path / "images", tmp_path / "folder")
    assert states(tmp_path / "site") == states(tmp_path / "folder")
    assert verify(tmp_path / "site") == []


def test_the_line_has_the_request_and_its_number(tmp_path):
    first, second = requests(tmp_path / "images", 2)
    with opened(tmp_path) as session:
        assert session.answer(first)["sequence"] == 1
        line = session.answer(second)
    assert (line["request"], line["sequence"]) == ("case_1", 2)


def test_a_repeated_request_is_answered_from_the_log_also_after_a_restart(tmp_path):
    first, second = requests(tmp_path / "images", 2)
    with opened(tmp_path) as session:
        line = session.answer(first)
        session.answer(second)
        assert session.answer(first) == line
    with opened(tmp_path) as session:
        assert session.answer(first) == line
        assert session.known("case_1")["sequence"] == 2
    assert len(lines(tmp_path / "site")) == 3  # start and two cases


def test_an_id_that_came_with_another_image_is_refused_and_learned_nothing(tmp_path):
    first, second = requests(tmp_path / "images", 2)
    with opened(tmp_path) as session:
        session.answer(first)
        with pytest.raises(DataError, match="other content"):
            session.answer(replace(second, id=first.id))
        assert session.answer(second)["sequence"] == 2


def test_a_bad_image_leaves_nothing_behind(tmp_path):
    (good,) = requests(tmp_path / "images", 1)
    with opened(tmp_path) as session:
        before = lines(tmp_path / "site")
        with pytest.raises(DataError, match="truncated|cannot be read"):
            session.answer(replace(good, id="bad", content=good.content[:60]))
        assert lines(tmp_path / "site") == before
        assert list((tmp_path / "spool").iterdir()) == []
        assert session.answer(good)["sequence"] == 1


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a" * 200, "stream", "state.json", "a\nb"])
def test_request_ids_are_safe_as_file_names(name):
    with pytest.raises(SettingError, match="no request id"):
        Request(name, "a.png", b"x")


def test_shadow_is_switched_on_and_off_in_the_log_and_survives_a_restart(tmp_path):
    first, second, third = requests(tmp_path / "images", 3)
    with opened(tmp_path) as session:
        session.answer(first)
        session.stream.deploy(Deployment.SHADOW)
        assert "change" in session.answer(second)
    with opened(tmp_path) as session:
        assert "change" in session.answer(third)
        session.stream.deploy(Deployment.LIVE)
    events = [line for line in lines(tmp_path / "site") if line.get("event") == "mode"]
    assert [event["deployment"] for event in events] == ["shadow", "live"]
    assert verify(tmp_path / "site") == []


def test_a_classification_is_answered_image_by_image(tmp_path):
    asked = requests(tmp_path / "images", 2)
    recipe = streams.settings(method="source", rate="fixed", guard=False)
    with Session(classifier(), tmp_path / "site", recipe, spool=tmp_path / "spool") as session:
        line = session.answer(asked[0])
    assert line["prediction"] in streams.CLASSES
    assert len(line["probabilities"]) == 3


# leases


def test_a_successor_stops_its_predecessor_before_it_writes(tmp_path):
    first, second = requests(tmp_path / "images", 2)
    lease = Lease(tmp_path / "key", "old")
    session = Session(segmenter(), tmp_path / "site", streams.settings(), spool=tmp_path / "spool", lease=lease)
    with session:
        assert session.answer(first)["fence"] == lease.token
        before = lines(tmp_path / "site")
        successor = Lease(tmp_path / "key", "new")
        assert successor.token == lease.token + 1
        with pytest.raises(LeaseLostError):
            session.answer(second)
        assert lines(tmp_path / "site") == before


def test_a_lease_that_is_lost_while_the_network_works_keeps_the_log_as_it_was(tmp_path, monkeypatch):
    first, second = requests(tmp_path / "images", 2)
    lease = Lease(tmp_path / "key", "old")
    session = Session(segmenter(), tmp_path / "site", streams.settings(), spool=tmp_path / "spool", lease=lease)
    with session:
        session.answer(first)
        before = lines(tmp_path / "site")
        step = session.stream.adapter.step

        def and_meanwhile(x, **named):
            Lease(tmp_path / "key", "new")
            return step(x, **named)

        monkeypatch.setattr(session.stream.adapter, "step", and_meanwhile)
        with pytest.raises(StateError):
            session.answer(second)
    assert lines(tmp_path / "site") == before


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("moment", range(5))
def test_a_partitioned_writer_cannot_write_after_its_successor_whenever_that_comes(
    tmp_path, monkeypatch, moment, before
):
    """The successor takes over and writes just before or after one of the five looks of a request at the lease."""
    monkeypatch.setattr(StateFolder, "locked", lambda self: nullcontext(self._make_folders()))  # not seen from afar
    first, second, third = requests(tmp_path / "images", 3)
    looks = []

    def begin(owner):
        lease = Lease(tmp_path / "key", owner)
        return Session(segmenter(), tmp_path / "site", streams.settings(), spool=tmp_path / owner, lease=lease)

    def successor():
        with begin("new") as new:
            new.answer(second)
            new.answer(third)

    with begin("old") as old:
        old.answer(first)
        look = old.lease.require

        def watched():
            looks.append(None)
            comes = len(looks) == moment + 1
            if comes and before:
                successor()
            look()
            if comes and not before:
                successor()

        monkeypatch.setattr(old.lease, "require", watched)
        if (moment, before) == (4, False):  # all of it was on the disk: the successor found it there
            answered = old.answer(second)
            assert len(looks) == 5
            assert answered == lines(tmp_path / "site")[2]
        else:
            with pytest.raises(StateError, match="took this site over|another process wrote"):
                old.answer(second)
    logged = [line for line in lines(tmp_path / "site") if "request" in line]
    assert [line["request"] for line in logged] == ["case_0", "case_1", "case_2"]
    assert [line["fence"] for line in logged] == ([1, 1, 2] if moment == 4 else [1, 2, 2])
    assert verify(tmp_path / "site") == []


def test_who_lost_the_race_for_a_site_does_not_touch_its_log_when_it_opens_it(tmp_path):
    (first,) = requests(tmp_path / "images", 1)
    late = Lease(tmp_path / "key", "late")
    with Session(
        segmenter(), tmp_path / "site", streams.settings(), spool=tmp_path / "s", lease=Lease(tmp_path / "key", "early")
    ) as session:
        session.answer(first)
    half = tmp_path / "site" / "stream.jsonl"
    half.write_bytes(half.read_bytes() + b'{"case": "being wri')
    before = half.read_bytes()
    being_written = tmp_path / "site" / ".mask.png.17.part"
    being_written.touch()
    with (
        pytest.raises(LeaseLostError),
        Session(segmenter(), tmp_path / "site", streams.settings(), spool=tmp_path / "s", lease=late),
    ):
        pass
    assert half.read_bytes() == before
    assert being_written.exists()


def test_a_lease_whose_folder_is_gone_is_one_sentence(tmp_path):
    lease = Lease(tmp_path / "key", "x")
    shutil.rmtree(tmp_path / "key")
    with pytest.raises(StateError, match="cannot be read"):
        lease.require()


# keys


def test_only_one_service_works_on_a_state_folder(tmp_path):
    folders = KeyFolders(tmp_path / "state")
    with folders.locked(), pytest.raises(StateError, match="another service works here"), folders.locked():
        pass
    with folders.locked():  # and the next one may
        pass


def test_keys_are_folders_that_no_site_can_choose(tmp_path):
    folders = KeyFolders(tmp_path)
    for site in ("../../etc", "a/b", "A", "a", "ü"):
        folder = folders.begin(Key("m", site))
        assert folder.parent == tmp_path / "keys"
        assert json.loads((folder / "key.json").read_text())["site"] == site
    assert {key.site for key in folders} == {"../../etc", "a/b", "A", "a", "ü"}


@pytest.mark.parametrize("site", ["", " a", "a\n", "x" * 201, "a\0b"])
def test_names_of_sites_are_printable(site):
    with pytest.raises(SettingError, match="site's name"):
        Key("m", site)


def test_keys_spread_over_shards():
    found = {Key("m", f"site {i}").shard(4) for i in range(64)}
    assert found == {0, 1, 2, 3}


# uploads


def zipped(**members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def test_members_of_a_zip_stay_inside_whatever_they_are_called(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    unpack_upload(inside, "series.zip", zipped(**{"../../outside.dcm": b"x" * 200, "/etc/passwd": b"y" * 200}))
    assert sorted(path.name for path in (inside / "series").iterdir()) == ["00000.dcm", "00001.dcm"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inside"]


def test_an_archive_that_unpacks_to_far_more_is_refused_before_it_is_unpacked(tmp_path):
    with pytest.raises(DataError, match="times its size"):
        unpack_upload(tmp_path, "series.zip", zipped(a=b"\0" * 10_000_000))
    assert list(tmp_path.iterdir()) == []


def test_an_archive_of_more_bytes_than_any_series_has_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("dltta.serving.upload.MOST_BYTES", 100)
    with pytest.raises(DataError, match="more than 100; send fewer slices"):
        unpack_upload(tmp_path, "series.zip", zipped(a=bytes(range(60)), b=bytes(range(60))))
    assert list(tmp_path.iterdir()) == []


def test_for_the_header_only_the_beginning_of_a_file_is_unpacked(monkeypatch):
    monkeypatch.setattr("dltta.serving.upload.HEADER", 10)
    assert first_bytes(zipped(a=bytes(range(100)))) == first_bytes(bytes(range(100))) == bytes(range(10))


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 broken"])
def test_what_is_no_image_is_refused_in_one_line(tmp_path, content):
    with pytest.raises(DataError) as caught:
        unpack_upload(tmp_path, "x", content)
    assert "\n" not in str(caught.value)


def test_the_first_bytes_tell_the_format_where_the_name_does_not(tmp_path):
    buffer = io.BytesIO()
    Pillow.new("L", (4, 4)).save(buffer, "PNG")
    unpack_upload(tmp_path, "blob", buffer.getvalue())
    assert [path.name for path in tmp_path.iterdir()] == ["image.png"]
