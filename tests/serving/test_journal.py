"""The log: what it finds, what it survives."""

import hashlib
import hmac
import json
import os
import resource
import stat
from pathlib import Path

import pytest

from dltta.errors import SettingError, StateError
from dltta.serving.journal import START, Head, Journal, chain, render, walk, write_head
from dltta.serving.signing import Signer
from streams import child


def write(folder, *groups):
    book = Journal(folder / "log", folder / "head")
    for group in groups:
        book.append(group)
    return folder / "log"


def entries(path):
    return [line.entry for group in walk(path) for line in group]


@pytest.fixture
def log(tmp_path):
    """Three groups of 1, 2 and 1 lines."""
    return write(tmp_path, [{"case": "a"}], [{"case": "b", "rate": 1e-3}, {"case": "ç"}], [{"case": "d"}])


def test_a_line_is_chained_by_the_hash_of_the_line_before(log):
    texts = log.read_bytes().splitlines(keepends=True)
    previous = START
    for text in texts:
        body, _, claimed = text.rpartition(b', "hash": "')
        assert json.loads(text)["previous"] == previous
        previous = hashlib.sha256(body + b"}\n").hexdigest()
        assert claimed == previous.encode() + b'"}\n'
    assert [entry["of"] for entry in entries(log)] == [1, 2, 2, 1]


def test_lines_can_be_read_again_where_they_begin(log):
    book = Journal(log, log.parent / "head")
    found = list(book)
    assert [line.entry["case"] for line in found] == ["a", "b", "ç", "d"]
    assert [book.at(line.begin) for line in found] == [line.entry for line in found]
    assert book.size == log.stat().st_size


def test_what_is_added_later_goes_on(log):
    Journal(log, log.parent / "head").append([{"case": "e"}])
    assert [entry["case"] for entry in entries(log)] == ["a", "b", "ç", "d", "e"]


def broken(log):
    """What opening says is wrong."""
    try:
        Journal(log, log.parent / "head")
    except StateError as error:
        return str(error)
    return None


def test_every_altered_byte_is_found(log):
    intact = log.read_bytes()
    for place in range(len(intact)):
        value = next(v for v in (b" \n01"[place % 4], intact[place] ^ 1) if v != intact[place])
        log.write_bytes(intact[:place] + bytes([value]) + intact[place + 1 :])
        assert broken(log), (place, value)
    log.write_bytes(intact)
    assert broken(log) is None


def test_every_removed_or_added_byte_is_found(log):
    intact = log.read_bytes()
    for place in range(0, len(intact), 3):
        log.write_bytes(intact[:place] + intact[place + 1 :])
        assert broken(log), place
        log.write_bytes(intact[:place] + b" " + intact[place:])
        assert broken(log), place


def test_every_cut_is_found(log):
    intact = log.read_bytes()
    for place in (*range(0, len(intact), 7), len(intact) - 1):
        log.write_bytes(intact[:place])
        assert "lines at its end are missing" in broken(log)


def test_every_removed_repeated_and_exchanged_line_is_found(log):
    texts = log.read_bytes().splitlines(keepends=True)
    for index in range(len(texts)):
        for other in range(len(texts)):
            exchanged = list(texts)
            exchanged[index], exchanged[other] = exchanged[other], exchanged[index]
            log.write_bytes(b"".join(exchanged))
            assert bool(broken(log)) == (index != other)
        log.write_bytes(b"".join(texts[:index] + texts[index + 1 :]))
        assert broken(log)
        log.write_bytes(b"".join(texts[: index + 1] + texts[index:]))
        assert broken(log)


def test_the_same_content_written_in_another_way_is_altered(log):
    texts = log.read_bytes().splitlines(keepends=True)
    entry = json.loads(texts[1])
    for other in (
        json.dumps(entry, separators=(",", ":")),
        json.dumps(dict(reversed(entry.items()))),
        json.dumps({"previous": entry["previous"], **entry}),
        json.dumps(entry).replace("0.001", "1e-3"),
        json.dumps(entry).replace('"case": "b"', '"case": "c", "case": "b"'),
    ):
        log.write_bytes(b"".join([texts[0], other.encode() + b"\n", *texts[2:]]))
        assert "line 2 was altered" in broken(log)


def test_foreign_lines_are_one_clear_error(log):
    for text in (b"{}\n", b"[1]\n", b"\xff\xfe\n", b"[" * 100000 + b"\n", b"null\n", b'{"of": 1}\n'):
        log.write_bytes(text)
        assert "line 1 was altered" in broken(log)


def test_a_line_chained_anew_does_not_follow(log):
    texts = log.read_bytes().splitlines(keepends=True)
    forged = chain({"case": "forged", "of": 1}, START)
    log.write_bytes(b"".join([render(forged), *texts[1:]]))
    assert "before line 2 lines are missing or were moved" in broken(log)


def test_an_empty_log_whose_head_knows_lines_is_found(log):
    log.unlink()
    assert "lines at its end are missing" in broken(log)


def test_a_missing_head_is_found(log):
    (log.parent / "head").unlink()
    assert "the head that says where it ends is gone or was altered" in broken(log)


def test_lines_that_somebody_else_wrote_are_not_overwritten(tmp_path):
    mine, other = (Journal(tmp_path / "log", tmp_path / "head") for _ in range(2))
    other.append([{"case": "theirs"}])
    before = (tmp_path / "log").read_bytes(), (tmp_path / "head").read_bytes()
    for write_behind in (lambda: mine.append([{"case": "mine"}]), mine.mark):
        with pytest.raises(StateError, match="another process wrote"):
            write_behind()
    assert ((tmp_path / "log").read_bytes(), (tmp_path / "head").read_bytes()) == before


@pytest.mark.parametrize("cut", range(1, 700, 31))
def test_what_a_crash_left_of_a_group_is_written_over(tmp_path, cut):
    """Lines count when their whole group is there; until then the head names both ends."""
    log = write(tmp_path, [{"case": "a"}])
    kept = log.read_bytes()
    book = Journal(log, tmp_path / "head")
    book.append([{"case": name} for name in "bcd"])
    whole = log.read_bytes()
    log.write_bytes(whole[: min(len(kept) + cut, len(whole) - 1)])
    write_head(tmp_path / "head", Head(entries(log)[0]["hash"], book.last))
    again = Journal(log, tmp_path / "head")
    assert (again.size, [line.entry["case"] for line in again]) == (len(kept), ["a"])
    again.append([{"case": name} for name in "bcd"])
    assert log.read_bytes() == whole


def test_a_group_that_was_announced_and_written_counts(log, tmp_path):
    """Killed between the log and the head."""
    write_head(tmp_path / "head", Head(entries(log)[2]["hash"], entries(log)[3]["hash"]))
    assert broken(log) is None


def test_a_line_that_nobody_announced_is_found(log):
    """Chained as it should be, but the head does not know it."""
    forged = chain({"case": "forged", "of": 1}, entries(log)[-1]["hash"])
    log.write_bytes(log.read_bytes() + render(forged))
    assert "lines were added at its end" in broken(log)


def test_the_head_is_on_the_disk_before_the_line_that_it_announces(log, monkeypatch):
    """Else a power cut could leave a line that the head does not know."""
    order = []
    real, sync = os.pwrite, os.fsync

    def name(handle):
        return Path(f"/proc/self/fd/{handle}").readlink().name

    monkeypatch.setattr(os, "pwrite", lambda handle, *args: (order.append(name(handle)), real(handle, *args))[1])
    monkeypatch.setattr(os, "fsync", lambda handle: (order.append(f"{name(handle)} synced"), sync(handle))[1])
    Journal(log, log.parent / "head").append([{"case": "e"}])
    assert order == ["head", "head synced", "log", "log synced", "head"]


def test_what_a_crash_left_behind_the_last_group_goes_when_the_stream_goes_on(log):
    whole = log.read_bytes()
    log.write_bytes(whole + b'{"case": "e", "ra')
    Journal(log, log.parent / "head").mark()
    assert log.read_bytes() == whole


@pytest.mark.parametrize("name", ["log", "head"])
def test_a_link_in_the_place_of_the_log_or_the_head_is_not_followed(log, tmp_path, name):
    place, elsewhere = tmp_path / name, tmp_path / "elsewhere"
    place.rename(elsewhere)
    before = elsewhere.read_bytes()
    place.symlink_to(elsewhere)
    assert "it is a symbolic link, which is never followed" in broken(log)
    with pytest.raises(OSError, match="never followed"):
        write_head(place, Head(START, START))
    assert elsewhere.read_bytes() == before


def test_log_and_head_are_for_the_owner_alone(log):
    assert [stat.S_IMODE(path.stat().st_mode) for path in (log, log.parent / "head")] == [0o600, 0o600]


class TestSigned:
    KEY = Signer(b"k" * 32)

    @pytest.fixture
    def signed(self, tmp_path):
        book = Journal(tmp_path / "log", tmp_path / "head", self.KEY)
        book.append([{"case": "a"}])
        book.append([{"case": "b"}, {"case": "c"}])
        return tmp_path / "log"

    def wrong(self, log, key=KEY):
        with pytest.raises(StateError) as found:
            Journal(log, log.parent / "head", key)
        return str(found.value)

    def test_it_opens_with_its_key_and_can_be_read_without(self, signed):
        assert Journal(signed, signed.parent / "head", self.KEY).size == Journal(signed, signed.parent / "head").size
        assert all(len(entry["signature"]) == 64 for entry in entries(signed))

    def test_a_signature_is_over_the_line_with_the_hash_of_the_one_before(self, signed):
        text = signed.read_bytes().splitlines(keepends=True)[1]
        body, _, rest = text.rpartition(b', "signature": "')
        assert b'"previous"' in body
        assert hmac.new(b"k" * 32, body + b"}\n", hashlib.sha256).hexdigest().encode() == rest[:64]

    def test_another_key_does_not_do(self, signed):
        assert "head is not signed with this key" in self.wrong(signed, Signer(b"x" * 32))

    def test_a_record_made_again_without_the_key_is_found(self, signed):
        """Chained and with a head, but not signed, or signed with another key."""
        for other in (None, Signer(b"x" * 32)):
            last, texts = START, []
            for entry in ({"case": "forged", "of": 1}, {"case": "b", "of": 1}):
                chained = chain(entry, last, other)
                texts, last = [*texts, render(chained)], chained["hash"]
            signed.write_bytes(b"".join(texts))
            write_head(signed.parent / "head", Head(last, last), self.KEY)
            assert "line 1 is not signed with this key" in self.wrong(signed)
            write_head(signed.parent / "head", Head(last, last), other)
            assert "head is not signed with this key" in self.wrong(signed)

    def test_lines_cut_off_with_the_head_made_again_are_found(self, signed):
        first = signed.read_bytes().splitlines(keepends=True)[0]
        signed.write_bytes(first)
        last = json.loads(first)["hash"]
        write_head(signed.parent / "head", Head(last, last))
        assert "head is not signed with this key" in self.wrong(signed)

    def test_a_key_is_long_enough_readable_and_kept_elsewhere(self, tmp_path):
        path, output = tmp_path / "key", tmp_path / "out"
        with pytest.raises(SettingError, match=r"the key cannot be read \(No such file"):
            Signer.from_file(path, output)
        path.write_bytes(b"short")
        with pytest.raises(SettingError, match="holds a key of 5 bytes; make one of 32"):
            Signer.from_file(path, output)
        path.write_bytes(b"0123456789abcdef")
        assert Signer.from_file(path, output) == Signer(b"0123456789abcdef")
        assert "0123456789abcdef" not in repr(Signer.from_file(path, output))
        with pytest.raises(SettingError, match="which it should protect; keep the key elsewhere"):
            Signer.from_file(path, tmp_path)


def test_a_full_disk_leaves_the_log_as_it_was(log):
    before = log.read_bytes()

    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, len(before) + 100))
        try:
            Journal(log, log.parent / "head").append([{"case": "e" * 500}])
        except StateError as error:
            os._exit(7 if "cannot be written (File too large)" in str(error) else 8)

    assert child(fill) == 7
    assert log.read_bytes() == before


def test_numbers_that_json_does_not_know_are_refused(log):
    before = log.read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        Journal(log, log.parent / "head").append([{"case": "e", "rate": float("nan")}])
    assert log.read_bytes() == before
