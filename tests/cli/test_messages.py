"""Messages in a file that does not grow without end."""

import time

from dltta.cli.messages import KEPT, Messages
from streams import typed


def at(text="2026-01-02 03:04:05"):
    return lambda: time.strptime(text, "%Y-%m-%d %H:%M:%S")


def test_a_message_is_one_line_with_its_time(tmp_path):
    say = Messages(tmp_path / "log", clock=at())
    say("warning: a\nb")
    assert say.skipped({"case": "x", "error": "DataError", "detail": "no image"}) == "skipped: x: no image"
    assert say.skipped({"case": "y", "prediction": "y.png"}) is None
    stamp = "2026-01-02 03:04:05"
    assert (tmp_path / "log").read_text() == f"{stamp} warning: a b\n{stamp} skipped: x: no image\n"
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0


def test_old_files_are_kept_up_to_a_number(tmp_path):
    say = Messages(tmp_path / "log", largest=60, clock=at())
    for number in range(20):
        say(f"message {number:02d}")  # 31 bytes: one fits, two do not
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["log", *(f"log.{n}" for n in range(1, KEPT + 1))]
    kept = [(tmp_path / name).read_text()[-3:-1] for name in names]
    assert kept == ["19", "18", "17", "16", "15", "14"]


def test_another_program_may_rotate_it(tmp_path):
    say = Messages(tmp_path / "log", clock=at())
    say("first")
    (tmp_path / "log").rename(tmp_path / "moved")
    say("second")
    assert "second" in (tmp_path / "log").read_text()


def test_a_link_is_not_followed_and_the_stream_goes_on(tmp_path, capsys):
    (tmp_path / "target").write_text("theirs")
    (tmp_path / "log").symlink_to(tmp_path / "target")
    Messages(tmp_path / "log")("ours")
    assert (tmp_path / "target").read_text() == "theirs"
    assert "messages cannot be written" in capsys.readouterr().err


def test_messages_do_not_go_where_everything_is_accounted_for(tmp_path, monkeypatch, capsys):
    arguments = ("adapt", "-m", "x", "-i", tmp_path, "-o", tmp_path / "out", "--messages", tmp_path / "out" / "log")
    code, _, err = typed(monkeypatch, capsys, *arguments)
    assert code == 2
    assert "put it elsewhere" in err
