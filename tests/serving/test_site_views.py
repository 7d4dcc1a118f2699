"""What somebody who watches sees of a site's log: all of it counted, the latest kept."""

import json
import threading
from contextlib import suppress

import pytest

from dltta.serving import views as module
from dltta.serving.keys import Key, KeyFolders
from dltta.serving.views import RECENT, Views

KEY = Key("a", "s")


@pytest.fixture
def folders(tmp_path):
    folders = KeyFolders(tmp_path)
    folders.begin(KEY)
    folders.stream(KEY).mkdir()
    return folders


def write(folders, *lines, mode="a"):
    with (folders.stream(KEY) / "stream.jsonl").open(mode) as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def case(number, **fields):
    return {"case": f"c{number}", "prediction": "x", "state": number, "oldest_state": max(0, number - 20), **fields}


def test_a_long_log_is_counted_but_only_its_end_is_kept(folders):
    write(folders, {"event": "start", "deployment": "live", "state": 0})
    write(folders, *(case(number, decision="accepted") for number in range(1, 301)))
    views = Views(folders)
    view = views.site(KEY)
    assert (view.answered, view.version, view.oldest_version, view.decisions["accepted"]) == (300, 300, 280, 300)
    assert [line["case"] for line in view.recent] == [f"c{number}" for number in range(301 - RECENT, 301)]
    assert len(views._views[KEY].recent) == RECENT
    assert [line["case"] for line in views.cases(KEY, 2)] == ["c299", "c300"]


def test_only_whole_lines_are_taken_and_each_once(folders):
    write(folders, case(1))
    views = Views(folders)
    path = folders.stream(KEY) / "stream.jsonl"
    with path.open("a") as file:
        file.write('{"case": "c2", ')
    assert (views.site(KEY).answered, views.site(KEY).answered) == (1, 1)
    with path.open("a") as file:
        file.write('"prediction": "x"}\n')
    assert views.site(KEY).answered == 2


def test_two_who_look_at_once_count_every_line_once(folders, monkeypatch):
    write(folders, case(1))
    views, meeting, read = Views(folders), threading.Barrier(2), module._lines
    views.site(KEY)
    write(folders, case(2))

    def together(path, begin):
        with suppress(threading.BrokenBarrierError):  # where one has to wait for the other, they never meet
            meeting.wait(0.2)
        return read(path, begin)

    monkeypatch.setattr(module, "_lines", together)
    watchers = [threading.Thread(target=views.site, args=[KEY]) for _ in range(2)]
    for watcher in watchers:
        watcher.start()
    for watcher in watchers:
        watcher.join()
    assert views.site(KEY).answered == 2


def test_what_was_seen_stays_as_it_was_while_lines_are_added(folders):
    write(folders, case(1))
    views = Views(folders)
    before = views.site(KEY)
    write(folders, case(2), {"event": "pause", "by": "night shift", "state": 2})
    assert [line["event"] for line in views.site(KEY).changes] == ["pause"]
    assert (before.answered, len(before.recent), len(before.changes)) == (1, 1, 0)


def test_another_stream_in_its_place_is_read_from_its_beginning(folders):
    write(folders, *(case(number) for number in range(9)))
    views = Views(folders)
    views.site(KEY)
    write(folders, case(1), mode="w")
    assert views.site(KEY).answered == 1


def test_a_site_without_a_log_is_none(folders):
    assert Views(folders).site(KEY) is None
    assert Views(folders).cases(KEY, 5) is None
