"""A stream with somebody's own method and rate, by name: what they remember is saved with it."""

import os
from functools import partial

import pytest

import methods
from dltta.serving.verification import verify
from streams import child, classifier, left, lines, run, segmenter, write_images

pytestmark = pytest.mark.usefixtures("no_power_cut")

DEAD = 77
TEACHER = {"method": "methods:MeanTeacher", "rate": "methods:GradientNorm"}


def dying(work, monkeypatch, owner, name, at):
    """The work in a process that ends before the call number `at` of a method, in the middle of a step."""
    real, calls = getattr(owner, name), iter(range(10**9))

    def mortal(*args):
        if next(calls) == at:
            os._exit(DEAD)
        return real(*args)

    def begin():
        monkeypatch.setattr(owner, name, mortal)
        work()

    return begin


@pytest.mark.parametrize("guard", [False, True])
def test_a_killed_stream_with_a_teacher_goes_on_bit_for_bit(tmp_path, monkeypatch, guard):
    images, opened = write_images(tmp_path / "in", 4), segmenter()
    settings = {**TEACHER, "guard": guard}
    run(opened, images, tmp_path / "whole", **settings)
    expected = left(tmp_path / "whole")
    for name in ("after_update", "state_dict"):
        for at in (1, 3):
            output = tmp_path / f"{name}_{at}"
            work = partial(run, opened, images, output, **settings)
            assert child(dying(work, monkeypatch, methods.MeanTeacher, name, at)) == DEAD
            run(opened, images, output, resume=True, **settings)
            assert left(output) == expected, f"killed in {name}, call {at}"
            assert verify(output) == []


def test_prototypes_are_saved_with_the_stream(tmp_path):
    images, opened = write_images(tmp_path / "in", 6), classifier()
    settings = {"method": "methods:Prototypes", "batch_size": 2, "guard": False}
    run(opened, images, tmp_path / "whole", **settings)

    def ending(line):
        if line.get("case") == "case_3":
            os._exit(DEAD)

    assert child(lambda: run(opened, images, tmp_path / "out", tick=ending, **settings)) == DEAD
    run(opened, images, tmp_path / "out", resume=True, **settings)
    assert left(tmp_path / "out") == left(tmp_path / "whole")


def test_the_log_records_the_classes_that_ran(tmp_path):
    run(segmenter(), write_images(tmp_path / "in", 2), tmp_path / "out", **TEACHER)
    recipe = lines(tmp_path / "out")[0]["recipe"]
    assert (recipe["method"], recipe["rate"], recipe["name"]) == (*TEACHER.values(), "own")


def test_a_method_of_ones_own_without_a_loss_is_recorded_without_a_rate(tmp_path):
    settings = {"method": "methods:Prototypes", "batch_size": 2, "guard": False}
    run(classifier(), write_images(tmp_path / "in", 2), tmp_path / "out", **settings)
    assert lines(tmp_path / "out")[0]["recipe"]["rate"] == "none"
