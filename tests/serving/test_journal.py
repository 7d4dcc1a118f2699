"""The log: what it finds, what it survives."""

import hashlib
import json
import os
import resource

import pytest

from dltta.errors import StateError
from dltta.serving import journal
from dltta.serving.journal import START, Journal, chain, render, walk
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


def test_an_empty_log_whose_anchor_knows_lines_is_found(log):
    log.unlink()
    assert "lines at its end are missing" in broken(log)


def test_a_missing_anchor_is_found(log):
    (log.parent / "head").unlink()
    assert "the anchor that says where it ends is gone" in broken(log)


@pytest.mark.parametrize("cut", range(1, 700, 31))
def test_what_a_crash_left_of_a_group_is_written_over(tmp_path, cut):
    """Lines count when their whole group is there; until then the anchor does not know them."""
    log = write(tmp_path, [{"case": "a"}])
    kept = log.read_bytes()
    book = Journal(log, tmp_path / "head")
    book.append([{"case": name} for name in "bcd"])
    whole = log.read_bytes()
    log.write_bytes(whole[: min(len(kept) + cut, len(whole) - 1)])
    journal.write_anchor(tmp_path / "head", entries(log)[0]["hash"])
    again = Journal(log, tmp_path / "head")
    assert (again.size, [line.entry["case"] for line in again]) == (len(kept), ["a"])
    again.append([{"case": name} for name in "bcd"])
    assert log.read_bytes() == whole


def test_a_group_that_the_anchor_does_not_know_yet_counts(log, tmp_path):
    """Killed between the log and the anchor."""
    journal.write_anchor(tmp_path / "head", entries(log)[2]["hash"])
    assert broken(log) is None


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
