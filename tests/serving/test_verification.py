"""What `dltta state verify` finds: everything in the folder that is not as `dltta adapt` wrote it."""

import json
import shutil

import pytest

from dltta.data.inbox import find_incoming
from dltta.errors import SettingError, StateError
from dltta.serving.journal import Head, chain, render, write_head
from dltta.serving.maintenance import roll_back
from dltta.serving.state import StateFolder
from dltta.serving.verification import verify
from streams import left, lines, run, segmenter, typed, write_images

pytestmark = pytest.mark.usefixtures("no_power_cut")


@pytest.fixture
def key(tmp_path):
    (tmp_path / "key").write_bytes(b"k" * 32)
    return tmp_path / "key"


def forge(output, **fields):
    """Append a line that is chained as it should be."""
    last = lines(output)[-1]["hash"]
    forged = chain({"case": "forged", "state": 5, **fields, "of": 1}, last)
    with (output / "stream.jsonl").open("ab") as file:
        file.write(render(forged))
    return forged["hash"]


def test_nothing_is_wrong(output, table):
    assert verify(output) == verify(table) == []


@pytest.mark.parametrize("kind", ["output", "table"])
def test_every_altered_or_removed_file_is_found(request, kind):
    """Everything but the lock, which holds nothing."""
    folder = request.getfixturevalue(kind)
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "lock"):
        intact = path.read_bytes()
        for change in (b"", intact[:-1] + bytes([intact[-1] ^ 1]), bytes([intact[0] ^ 1]) + intact[1:]):
            path.write_bytes(change)
            behind = path.name == "predictions.csv" and intact.startswith(change)  # a crash may leave it so
            assert bool(verify(folder)) != behind, (path, change[:20])
        path.unlink()
        if path.name == "stream.jsonl":
            with pytest.raises(StateError, match="there is no stream.jsonl"):
                verify(folder)
        else:
            assert verify(folder), path
        path.write_bytes(intact)
    assert verify(folder) == []


def test_sentences_say_what_and_where(output):
    (output / "case_1.png").write_bytes(b"other")
    (output / "case_2_probabilities.npz").unlink()
    assert verify(output) == [
        f"{output / 'case_1.png'} was altered",
        f"{output / 'case_2_probabilities.npz'} is missing",
    ]
    text = (output / "stream.jsonl").read_bytes().splitlines(keepends=True)
    (output / "stream.jsonl").write_bytes(b"".join(text[:-1]))
    assert f"{output / 'stream.jsonl'}: lines at its end are missing" in verify(output)
    (output / "stream.jsonl").write_bytes(b"".join(text[:2] + text[3:]))
    assert verify(output) == [f"{output / 'stream.jsonl'}: before line 3 lines are missing or were moved"]


def test_other_settings_are_found(output):
    path = output / "state" / "stream.json"
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, "recipe": {**found["recipe"], "method": "ptbn"}}))
    assert verify(output) == [f"{path} was altered"]
    path.write_text(json.dumps({key: value for key, value in found.items() if key != "recipe"}))
    assert verify(output) == [f"{path} was altered"]
    path.write_text("[]")
    assert verify(output) == [f"{path} was altered: it holds no settings"]


def test_a_forged_line_that_is_chained_as_it_should_be_is_found(output, images):
    forge(output, error="DataError", detail="cannot be read")
    sentence = f"{output / 'stream.jsonl'}: lines were added at its end"
    assert verify(output) == [sentence]
    with pytest.raises(StateError, match="lines were added at its end; look with `dltta state verify`"):
        run(segmenter(), images, output, resume=True)


@pytest.mark.parametrize("tail", [b'{"case": "x", "rate"', b"\0\0\0", b" "])
def test_an_unfinished_line_at_the_end_is_found_and_goes_with_the_next_run(output, images, tail):
    whole = (output / "stream.jsonl").read_bytes()
    (output / "stream.jsonl").write_bytes(whole + tail)
    assert verify(output) == [
        f"{output / 'stream.jsonl'} ends in an unfinished line: a killed stream leaves one, --resume removes it"
    ]
    run(segmenter(), images, output, resume=True, save_probabilities=True)
    assert (output / "stream.jsonl").read_bytes() == whole
    assert verify(output) == []


@pytest.mark.parametrize(
    "name",
    ["foreign.png", "notes.txt", ".hidden", "state/versions/000009.safetensors", "state/memory/000099.safetensors"],
)
def test_a_foreign_file_is_found(output, name):
    shutil.copy(output / "case_0.png", output / name)
    assert verify(output) == [f"{output / name} is not in the log: it is foreign, or a killed stream left it"]


def test_a_foreign_folder_is_found(table):
    (table / "more").mkdir()
    (table / "more" / "x.png").write_bytes(b"x")
    assert [problem.split(" is not")[0] for problem in verify(table)] == [
        f"{table / 'more'}",
        f"{table / 'more/x.png'}",
    ]


@pytest.mark.parametrize("number", range(6))
def test_every_removed_version_is_found_the_oldest_too(output, number):
    path = output / "state" / "versions" / f"{number:06d}.safetensors"
    path.unlink()
    assert any(problem.startswith(f"{path} is missing") for problem in verify(output))


def test_versions_that_were_forgotten_are_not_missed(tmp_path):
    run(segmenter(), write_images(tmp_path / "many", 25), tmp_path / "out")
    assert verify(tmp_path / "out") == []
    found = lines(tmp_path / "out")
    assert [line["oldest_state"] for line in found] == [max(0, number - 19) for number in range(26)]
    oldest = tmp_path / "out" / "state" / "versions" / "000006.safetensors"
    oldest.unlink()
    assert verify(tmp_path / "out")[0].startswith(f"{oldest} is missing")


def test_a_version_that_a_kill_left_to_forget_goes_with_the_next_run(tmp_path):
    """Killed after the line was written and before the oldest version was removed."""
    images, output = write_images(tmp_path / "many", 21), tmp_path / "out"
    cases = find_incoming(images)
    run(segmenter(), cases[:20], output)
    versions = output / "state" / "versions"
    oldest = sorted(versions.iterdir())[0]
    kept = oldest.read_bytes()
    pairs = {path: path.read_bytes() for path in (output / "state" / "memory").iterdir()}
    run(segmenter(), cases, output, resume=True)
    oldest.write_bytes(kept)
    for path, content in pairs.items():
        path.write_bytes(content)
    assert verify(output) == []
    run(segmenter(), cases, output, resume=True)
    assert not oldest.exists()
    assert verify(output) == []


@pytest.mark.parametrize(
    "name", ["case_1.png", "state/versions/000002.safetensors", "state/head", "stream.jsonl", "state/memory", "state"]
)
def test_a_link_with_the_right_content_is_found(output, tmp_path, name):
    (output / name).rename(tmp_path / "elsewhere")
    (output / name).symlink_to(tmp_path / "elsewhere")
    assert verify(output) == [f"{output / name} is a symbolic link"]


def test_a_file_outside_that_the_log_names_is_not_read(output, tmp_path):
    (tmp_path / "secret").write_bytes(b"secret")
    last = forge(output, prediction="../secret", sha256="0" * 64)
    write_head(output / "state" / "head", Head(last, last))
    assert verify(output)[0].endswith(f"names the file '../secret', which does not lie in {output}")


def test_a_running_stream_can_be_verified(tmp_path):
    """While lines are added and old versions forgotten."""
    found = []
    more = write_images(tmp_path / "more", 25)
    run(segmenter(), more, tmp_path / "running", tick=lambda line: found.extend(verify(tmp_path / "running")))
    assert found == []


def test_what_a_running_stream_is_about_to_log_is_not_foreign(tmp_path, images, monkeypatch):
    """The prediction is on the disk, its line is not yet."""
    output, put, found = tmp_path / "running", StateFolder.put, []

    def looking(folder, packed):
        if packed.number > 0:
            found.append((len(list(output.glob("*.png"))), len(lines(output)) - 1, verify(output)))
        put(folder, packed)

    monkeypatch.setattr(StateFolder, "put", looking)
    run(segmenter(), images, output)
    assert found == [(number + 1, number, []) for number in range(5)]


def test_verifying_changes_nothing(output):
    before, times = left(output), {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    verify(output)
    assert left(output) == before
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == times


class TestSigned:
    @pytest.fixture
    def signed(self, tmp_path, images, key):
        run(segmenter(), images, tmp_path / "signed", sign=key)
        return tmp_path / "signed"

    def test_it_is_verified_with_the_key(self, signed, output, key, tmp_path):
        assert verify(signed, key) == verify(signed) == []
        (tmp_path / "other").write_bytes(b"o" * 32)
        assert verify(signed, tmp_path / "other") == [f"{signed / 'state' / 'head'} is not signed with this key"]
        assert verify(output, key) == [f"{output / 'state' / 'head'} is not signed with this key"]

    def test_a_forged_line_with_a_forged_head_is_found_with_the_key_only(self, signed, key):
        last = forge(signed, error="DataError", detail="cannot be read")
        write_head(signed / "state" / "head", Head(last, last))
        assert verify(signed) == []
        assert verify(signed, key) == [f"{signed / 'state' / 'head'} is not signed with this key"]

    def test_a_signed_stream_goes_on_with_its_key_only(self, signed, images, key, tmp_path):
        with pytest.raises(StateError, match="begun with signed True, not False"):
            run(segmenter(), images, signed, resume=True)
        (tmp_path / "other").write_bytes(b"o" * 32)
        with pytest.raises(StateError, match="is not signed with this key"):
            run(segmenter(), images, signed, resume=True, sign=tmp_path / "other")
        more = write_images(tmp_path / "more", 7)
        assert run(segmenter(), more, signed, resume=True, sign=key).predicted == 2
        assert verify(signed, key) == []

    def test_a_rollback_is_signed_too(self, signed, output, key):
        with pytest.raises(SettingError, match="is signed; give the file with its key: --sign KEYFILE"):
            roll_back(signed, 2)
        with pytest.raises(SettingError, match="is not signed; leave --sign out"):
            roll_back(output, 2, key)
        assert roll_back(signed, 2, key) == 6
        assert verify(signed, key) == []

    def test_the_key_is_not_kept_in_the_folder(self, signed, key, images):
        assert not any(b"k" * 32 in path.read_bytes() for path in signed.rglob("*") if path.is_file())
        inside = signed / "key"
        inside.write_bytes(b"k" * 32)
        with pytest.raises(SettingError, match="keep the key elsewhere"):
            run(segmenter(), images, signed, resume=True, sign=inside)

    def test_from_the_command_line(self, signed, key, monkeypatch, capsys):
        assert typed(monkeypatch, capsys, "state", "verify", signed, "--sign", key)[0] == 0
        forge(signed)
        code, out, _ = typed(monkeypatch, capsys, "state", "verify", signed, "--sign", key)
        assert code == 1
        assert "is not signed with this key" in out
