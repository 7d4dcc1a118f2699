"""What a stream says at its start and at its end about the safety of its predictions."""

import json

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from dltta import Decision, Outcome, Reason
from dltta.data.inbox import find_incoming
from dltta.models.calibration import Calibration
from dltta.predictor import Predictor
from dltta.quality.estimate import Expected
from dltta.quality.guarded import GuardedStep
from dltta.serving.folder import Stream
from dltta.serving.summary import Summary
from dltta.training.calibration import calibrate
from networks import Segmenter, trained
from streams import lines, run, save_model, segmenter, settings, typed, write_images

pytestmark = pytest.mark.usefixtures("no_power_cut")
FAR = Decision(Outcome.KEPT, Reason.OOD_SCORE, "OOD score 9, limit 3")
FINE = Decision(Outcome.ACCEPTED)


@pytest.fixture
def images(tmp_path):
    return write_images(tmp_path / "in", 5)


@pytest.fixture
def decide(monkeypatch):
    """Lets the guard decide what it is told, case after case."""

    def script(*decisions):
        left = iter(decisions)

        def step(predictor, x, *, case):
            return GuardedStep(torch.randn(1, 3, *x.shape[2:]), (), next(left))

        monkeypatch.setattr(Predictor, "step", step)

    return script


def test_every_outcome_and_reason_is_counted(images, tmp_path, decide):
    kept = Decision(Outcome.KEPT, Reason.CHANGE, "0.3 of the prediction changed")
    source = Decision(Outcome.SOURCE, Reason.COLLAPSE, "one class")
    decide(FINE, FAR, kept, source, FINE)
    found = run(segmenter(), images, tmp_path / "out")
    assert found.decisions == {"accepted": 2, "in-distribution": 0, "kept": 2, "rolled-back": 0, "source": 1}
    assert found.reasons == {"ood-score": 1, "change": 1, "collapse": 1}
    assert (found.to_review, found.exit_code, found.warnings) == (2, 0, [])


def test_a_case_with_two_reasons_to_look_at_it_is_one_case(images, tmp_path, decide):
    low = Decision(Outcome.SOURCE, Reason.CONSTANT_IMAGE, "one value", expected=Expected(0.2, 0.1, 0.4, review=True))
    decide(low, FINE, FINE, FINE, FINE)
    assert run(segmenter(), images, tmp_path / "out").to_review == 1


def test_a_reason_that_only_chooses_between_plausible_models_is_not_to_review(images, tmp_path, decide):
    quiet = (Reason.CHANGE, Reason.FLIP_CONSISTENCY, Reason.IN_DISTRIBUTION)
    decide(*(Decision(Outcome.SOURCE, reason, "…") for reason in quiet), FINE, FINE)
    assert run(segmenter(), images, tmp_path / "out").to_review == 0


@pytest.mark.parametrize(("far", "code"), [(2, 0), (3, 3)])
def test_more_than_half_far_out_of_distribution_is_a_warning_and_exit_code_3(images, tmp_path, decide, far, code):
    decide(*[FAR] * far, *[FINE] * (5 - far))
    found = run(segmenter(), images, tmp_path / "out")
    assert found.exit_code == code
    assert [warning.split(":")[0] for warning in found.warnings] == (
        ["3 of 5 images are far out of distribution (ood-score)"] if code else []
    )


def test_a_resumed_stream_counts_from_its_beginning(images, tmp_path, decide):
    cases = find_incoming(images)
    decide(*[FAR] * 4, FINE)
    assert run(segmenter(), cases[:4], tmp_path / "out").exit_code == 3
    found = run(segmenter(), cases, tmp_path / "out", resume=True)
    assert (found.predicted, found.decisions["kept"], found.exit_code) == (1, 4, 3)


def test_far_out_of_distribution_counts_more_than_a_skipped_case():
    found = Summary(failed=["a: cannot be read"])
    assert found.exit_code == 1
    found.conclude({Outcome.KEPT: 2}, {Reason.OOD_SCORE: 2})
    assert found.exit_code == 3


def test_without_a_guard_there_is_nothing_to_count(images, tmp_path):
    found = run(segmenter(), images, tmp_path / "out", guard=False)
    assert (found.decisions, found.reasons, found.to_review, found.exit_code) == ({}, {}, 0, 0)


def test_a_model_without_calibration_is_announced_before_the_first_image(tmp_path):
    (notice,) = Stream(segmenter(), tmp_path / "out", settings()).notices()
    assert notice.startswith("no calibration: ")
    assert notice.endswith("train it with `dltta train`")
    calibrated = segmenter(calibration=Calibration({}, {}, {"shares": [[0, 1]] * 3}))
    assert Stream(calibrated, tmp_path / "out", settings()).notices() == []
    (notice,) = Stream(segmenter(), tmp_path / "out").notices()
    assert notice.startswith("the model was not rehearsed with: an entropy-weighted mixture")
    assert notice.endswith("run `dltta calibrate`")


def test_the_log_of_a_calibrated_model_has_the_ood_score_of_every_case(images, tmp_path):
    pixels = [torch.from_numpy(np.asarray(Pillow.open(path), np.float32)) / 255 for path in sorted(images.iterdir())]
    network = trained(Segmenter())
    run(segmenter(calibration=calibrate(network, torch.stack(pixels)[:, None])), images, tmp_path / "out")
    scores = [line["ood_score"] for line in lines(tmp_path / "out") if "prediction" in line]
    assert len(scores) == 5
    assert all(0 < score < 10 for score in scores)  # source images have about 1


def test_the_log_says_whether_the_model_was_calibrated(images, tmp_path):
    run(segmenter(), images, tmp_path / "out")
    assert lines(tmp_path / "out")[0]["calibrated"] is False


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_tells_it(images, tmp_path, decide, monkeypatch, capsys, as_json):
    decide(*[FAR] * 5)
    save_model(tmp_path / "model")
    arguments = ["adapt", "-m", tmp_path / "model", "-i", images, "-o", tmp_path / "out", "--method", "tent"]
    arguments += ["--guard"]
    code, out, err = typed(monkeypatch, capsys, *arguments, *(["--json"] if as_json else []))
    assert code == 3
    assert err.startswith("warning: no calibration: ")
    if as_json:
        told = json.loads(out)
        assert (told["decisions"]["kept"], told["to_review"], len(told["notices"])) == (5, 5, 1)
        assert "5 of 5 images are far out of distribution" in told["warnings"][0]
    else:
        assert "warning: 5 of 5 images are far out of distribution" in err
        listed = f"(dltta state cases {tmp_path / 'out'} --review)"
        assert f"decisions since the stream began: 5 kept; 5 to review {listed}" in out
        code, out, _ = typed(monkeypatch, capsys, "state", "cases", tmp_path / "out", "--review")
        assert (code, out.count("look at it")) == (0, 5)


class TestMemoryThatWasNotReady:
    def found(self, images, tmp_path, **recipe):
        short = {"rate": "dynamic", "batches_kept": 7, "neighbors": 3, "ready": "full", "guard": False}
        return run(segmenter(), images, tmp_path / "out", **{**short, **recipe})

    def test_a_stream_shorter_than_the_memory_says_that_no_rate_was_dynamic(self, images, tmp_path):
        found = self.found(images, tmp_path)
        assert found.waiting_for == 2
        assert found.warnings[0].startswith("the memory still waits for 2 predictions, so no rate was dynamic")
        assert {line["discrepancy"] for line in lines(tmp_path / "out") if "prediction" in line} == {None}

    def test_more_images_fill_it_as_the_warning_says(self, tmp_path):
        assert self.found(write_images(tmp_path / "more", 8), tmp_path).warnings == []
        assert lines(tmp_path / "out")[-1]["discrepancy"] is not None

    def test_a_memory_that_is_ready_early_says_nothing(self, images, tmp_path):
        assert self.found(images, tmp_path, ready="neighbors").warnings == []
        assert lines(tmp_path / "out")[-1]["discrepancy"] is not None

    @pytest.mark.parametrize("without", [{"rate": "fixed"}, {"mode": "frozen"}])
    def test_where_no_rate_is_asked_nothing_is_said(self, images, tmp_path, without):
        assert self.found(images, tmp_path, **without).waiting_for is None
