"""Streams of images that are too large, or that nobody can read at first."""

import json
import os
import threading

import numpy as np
import pytest
from PIL import Image as Pillow

import streams
from dicoms import write_series
from dltta.data.inbox import find_incoming
from dltta.data.watch import watch_incoming
from dltta.errors import InputError, SettingError, StateError
from dltta.fitting import Cost, Fitting
from dltta.serving.folder import Stream
from dltta.serving.verification import verify
from dltta.serving.written import anonymity
from streams import classifier, left, lines, run, segmenter, write_images

LIMIT = 30_000_000  # bytes; windows of 128 x 128 below


@pytest.fixture(autouse=True)
def known_cost(monkeypatch):
    """A step costs 1000 bytes per position, so that the limit above is met by images of a few hundred pixels."""
    monkeypatch.setattr(Fitting, "cost", Cost(0.0, 1000.0))


@pytest.fixture
def large(tmp_path):
    write_images(tmp_path / "in", 2, size=(160, 170))
    return write_images(tmp_path / "in", 2, size=(160, 170))


def test_images_beyond_the_limit_go_in_windows_and_the_log_says_so(large, tmp_path):
    summary = run(segmenter(), large, tmp_path / "out", max_memory=LIMIT)
    assert [line["windows"] for line in lines(tmp_path / "out")[1:]] == [[128, 128]] * 2
    assert summary.windowed == 2
    assert "2 of 2 images were too large" in summary.warnings[0]
    assert verify(tmp_path / "out") == []


def test_images_within_it_go_whole(large, tmp_path):
    summary = run(segmenter(), large, tmp_path / "out", max_memory=LIMIT * 10)
    assert summary.windowed == 0
    assert "windows" not in lines(tmp_path / "out")[1]


def test_a_resumed_stream_cuts_the_same_windows_on_a_larger_machine(large, tmp_path, monkeypatch):
    cases = find_incoming(large)
    monkeypatch.setattr("dltta.serving.folder.default_limit", lambda device: LIMIT)
    run(segmenter(), cases, tmp_path / "whole")
    run(segmenter(), cases[:1], tmp_path / "out")
    monkeypatch.setattr("dltta.serving.folder.default_limit", lambda device: 100 * LIMIT)
    run(segmenter(), cases, tmp_path / "out", resume=True)
    assert left(tmp_path / "out") == left(tmp_path / "whole")
    with pytest.raises(StateError, match=f"begun with max_memory {LIMIT}, not 5"):
        run(segmenter(), cases, tmp_path / "out", resume=True, max_memory=5)


def test_what_does_not_fit_at_all_is_skipped_and_the_others_go_on(large, tmp_path):
    Pillow.fromarray(np.zeros((900, 900), dtype=np.uint8)).save(large / "case_1_huge.png")
    summary = run(segmenter(), large, tmp_path / "out", max_memory=LIMIT, on_error="skip")
    assert summary.predicted == 2
    assert "case_1_huge: 900 x 900 needs about" in summary.failed[0]
    with pytest.raises(InputError, match="--max-memory"):
        run(segmenter(), large, tmp_path / "other", max_memory=LIMIT)


NO_MEMORY = [
    RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"),
    MemoryError(),
]


@pytest.mark.parametrize("error", NO_MEMORY, ids=["torch", "numpy"])
def test_an_allocator_that_gives_nothing_is_one_line_for_the_case(large, tmp_path, monkeypatch, error):
    def fail(x, *, case=None):
        raise error

    with Stream(segmenter(), tmp_path / "out", streams.settings(on_error="skip")) as stream:
        monkeypatch.setattr(stream.predictor, "step", fail)
        summary = stream.run(find_incoming(large))
    assert summary.predicted == 0
    assert ["not enough memory" in sentence for sentence in summary.failed] == [True, True]


def test_a_reader_without_memory_is_one_line_for_the_case(large, tmp_path, monkeypatch):
    def fail(case):
        raise MemoryError

    monkeypatch.setattr("dltta.serving.reading.read_incoming", fail)
    summary = run(segmenter(), large, tmp_path / "out", on_error="skip")
    assert summary.predicted == 0
    assert all("not enough memory" in sentence for sentence in summary.failed)


def test_a_batch_that_does_not_fit_is_one_line(tmp_path):
    images = write_images(tmp_path / "in", 3, size=(64, 64))
    summary = run(classifier(), images, tmp_path / "out", batch_size=3, max_memory=12_000_000, on_error="skip")
    assert len(summary.failed) == 3
    assert "3 images of 64 x 64" in summary.failed[0]
    assert "smaller --batch-size" in summary.failed[0]


def test_slices_and_windows_are_told(tmp_path, large):
    write_series(tmp_path / "scans" / "a", np.random.default_rng(0).integers(0, 200, (3, 16, 16)).astype(np.int16))
    for images, expected, given in (
        (tmp_path / "scans", [(0, 3), (1, 3), (2, 3), (3, 3)], {}),
        (large, [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)], {"max_memory": LIMIT}),
    ):
        told = []
        with Stream(segmenter(), tmp_path / f"out_{images.name}", streams.settings(**given)) as stream:
            stream.run(find_incoming(images)[:1], part=lambda done, total, told=told: told.append((done, total)))
        assert [at for at in told if at[1] > 1] == expected


def test_a_watch_takes_a_skipped_case_again_when_it_changes(tmp_path):
    """The file is complete and no image for this network: three channels. Then somebody exports it again."""
    folder = tmp_path / "in"
    folder.mkdir()
    file = folder / "a.png"
    Pillow.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(file)
    now, skipped = [0.0], threading.Event()

    def sleep(seconds):
        now[0] += seconds
        if now[0] == 3:
            Pillow.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(file)
            os.utime(file, (9, 9))
            assert skipped.wait(60)  # the stream is slower than the one who exports

    def tick(line):
        if "error" in line:
            skipped.set()

    watch = watch_incoming(folder, idle=20, clock=lambda: now[0], sleep=sleep)
    summary = run(segmenter(), watch, tmp_path / "out", on_error="skip", tick=tick)
    assert (summary.predicted, len(summary.failed)) == (1, 1)
    assert [("error" in line, line["case"]) for line in lines(tmp_path / "out")[1:]] == [(True, "a"), (False, "a")]


def test_a_file_that_is_renamed_on_its_way_is_predicted_once(tmp_path):
    """Network drives show a file under its old name for a while; a copy of the same content is not learned from."""
    folder = tmp_path / "in"
    write_images(folder, 1)
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds
        if now[0] == 5:
            (folder / "case_0.png").rename(folder / "renamed.png")

    watch = watch_incoming(folder, idle=20, clock=lambda: now[0], sleep=sleep)
    summary = run(segmenter(), watch, tmp_path / "out", on_error="skip")
    assert (summary.predicted, summary.repeated, summary.failed) == (1, 1, [])


class TestExpect:
    def cut_back(self, output, earlier):
        """Everything as it was after two cases: log, head, state."""
        for file in earlier.rglob("*"):
            if file.is_file():
                (output / file.relative_to(earlier)).write_bytes(file.read_bytes())
        known = {path.relative_to(earlier) for path in earlier.rglob("*")}
        for path in sorted(output.rglob("*"), reverse=True):
            if path.relative_to(output) not in known:
                path.unlink()

    def test_a_log_cut_back_with_its_head_is_found_by_the_hash_that_was_kept(self, tmp_path, images):
        cases = find_incoming(images)
        run(segmenter(), cases[:2], tmp_path / "earlier")
        early = run(segmenter(), [], tmp_path / "earlier", resume=True).head
        run(segmenter(), cases[:2], tmp_path / "out")
        summary = run(segmenter(), cases, tmp_path / "out", resume=True)
        assert summary.head == lines(tmp_path / "out")[-1]["hash"]
        assert verify(tmp_path / "out", expected=summary.head[:32]) == []
        self.cut_back(tmp_path / "out", tmp_path / "earlier")
        assert verify(tmp_path / "out") == []  # nothing in the folder tells
        assert verify(tmp_path / "out", expected=early) == []
        assert [f"{summary.head[:32]} is gone" in said for said in verify(tmp_path / "out", expected=summary.head[:32])]
        assert len(verify(tmp_path / "out", expected=summary.head)) == 1

    @pytest.mark.parametrize("text", ["", "abc", "x" * 32, "a" * 65])
    def test_other_words_are_one_line(self, output, text):
        with pytest.raises(SettingError, match="is not the hash of a line"):
            verify(output, expected=text)


class TestAnonymity:
    def test_it_says_what_was_found_and_what_stays(self, tmp_path):
        write_series(tmp_path / "in" / "a", np.ones((2, 8, 8), dtype=np.int16))
        kept = anonymity("keep", find_incoming(tmp_path / "in"))
        assert "PatientName" in kept.partition("what still identifies")[0]
        assert "SeriesInstanceUID" in kept.partition("what still identifies")[2]
        assert "Mustermann" not in kept
        assert "what still identifies" not in anonymity("new", find_incoming(tmp_path / "in"))

    def test_new_uids_lead_back_to_nothing(self, tmp_path):
        from pydicom import dcmread

        files = write_series(
            tmp_path / "in" / "a", np.random.default_rng(0).integers(0, 99, (2, 8, 8)).astype(np.int16)
        )
        theirs = {found.value for found in dcmread(files[0]) if found.keyword.endswith("InstanceUID")}
        said = {}
        for uids in ("keep", "new"):
            run(segmenter(), tmp_path / "in", tmp_path / uids, anonymize=True, uids=uids)
            (mask,) = (tmp_path / uids).glob("*.dcm")
            said[uids] = {element.value for element in dcmread(mask).iterall() if element.VR == "UI"}
        assert said["keep"] & theirs
        assert not said["new"] & theirs

    def test_new_uids_without_anonymity_mean_nothing(self):
        with pytest.raises(SettingError, match="add --anonymize"):
            streams.settings(uids="new")


def test_the_limit_is_in_the_record(output):
    begun = json.loads((output / "stream.jsonl").read_text().splitlines()[0])
    assert begun["max_memory"] > 10**6
