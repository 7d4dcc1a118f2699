"""A stream of files: every case predicted once, from the right state, whatever happens in between."""

import concurrent.futures
import errno
import hashlib
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

import streams
from dltta.data.inbox import find_incoming, read_incoming
from dltta.errors import DataError, InputError, NonFiniteError, SettingError, StateError
from dltta.models.io.opened import Window
from dltta.models.predictions import probabilities
from dltta.objectives import Source
from dltta.predictor import Predictor
from dltta.recipes import Recipe, paper
from dltta.serving.folder import Stream
from dltta.serving.settings import Deployment, OnError, StreamSettings
from dltta.serving.state import StateFolder
from networks import Segmenter, trained
from streams import child, classifier, left, lines, run, segmenter, told, write_images


def mask(path):
    with Pillow.open(path) as image:
        return np.asarray(image)


def grey_image(path, values):
    Pillow.fromarray(np.asarray(values, dtype=np.uint8)).save(path)


pytestmark = pytest.mark.usefixtures("no_power_cut")


@pytest.fixture
def images(tmp_path):
    return write_images(tmp_path / "in", 6)


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out"


class TestPredictions:
    def test_a_stream_is_the_adapter_step_by_step(self, images, output):
        """The same numbers as the adapter alone, image after image."""
        opened = segmenter()
        assert run(opened, images, output).predicted == 6
        with Stream(opened, output.with_name("other"), streams.settings()) as stream:
            adapter = stream.adapter
        for line in lines(output)[1:]:
            x = torch.from_numpy(mask(images / f"{line['case']}.png").astype(np.float32))[None, None] / 255
            step = adapter.step(x)
            assert (line["loss"], line["discrepancy"], line["rate"]) == (step.loss, step.discrepancy, step.rate)
            assert line["decision"] == step.decision.outcome
            assert np.array_equal(mask(output / line["prediction"]), step.logits[0].argmax(0).numpy())
        assert [line["state"] for line in lines(output)] == list(range(7))
        assert line["discrepancy"] > 0

    def test_lines_tell_what_happened(self, images, output):
        run(segmenter(), images, output)
        begun, first = lines(output)[:2]
        assert (begun["event"], begun["schema"]) == ("start", 2)
        assert (begun["recipe"]["method"], begun["recipe"]["alpha"]) == ("tent", 0.05)
        assert first["case"] == "case_0"
        assert first["input"] == hashlib.sha256((images / "case_0.png").read_bytes()).hexdigest()
        assert first["sha256"] == hashlib.sha256((output / "case_0.png").read_bytes()).hexdigest()
        version = output / "state" / "versions" / "000001.safetensors"
        assert first["state_sha256"] == hashlib.sha256(version.read_bytes()).hexdigest()
        assert 0 < first["seconds"] < 60

    def test_frozen_predictions_are_the_source_models(self, images, output):
        opened = segmenter()
        run(opened, images, output, mode="frozen", save_probabilities=True)
        for case in find_incoming(images):
            x = torch.from_numpy(mask(case.files[0]).astype(np.float32))[None, None] / 255
            expected = probabilities(opened.model(x))[0].detach().numpy()
            found = np.load(output / f"{case.name}_probabilities.npz")["probabilities"]
            assert found.dtype == np.float32
            assert np.array_equal(found, expected)
            assert np.array_equal(mask(output / f"{case.name}.png"), expected.argmax(0))

    @pytest.mark.parametrize("opened", [segmenter(), segmenter(window=Window((4, 4), 0.5))], ids=["whole", "windows"])
    def test_in_the_shadow_the_source_model_predicts(self, images, output, opened):
        """Bit for bit as a frozen one, while the log shows what adaptation would have changed."""
        frozen = output.with_name("frozen")
        run(opened, images, output, mode="shadow", save_probabilities=True)
        run(opened, images, frozen, mode="frozen", save_probabilities=True)
        continual = output.with_name("continual")
        run(opened, images, continual)
        for case in find_incoming(images):
            for name in (f"{case.name}.png", f"{case.name}_probabilities.npz"):
                assert (output / name).read_bytes() == (frozen / name).read_bytes()
        for line, adapted in zip(lines(output)[1:], lines(continual)[1:], strict=True):
            assert (line["rate"], line["discrepancy"]) == (adapted["rate"], adapted["discrepancy"])
            changed = np.mean(mask(frozen / line["prediction"]) != mask(continual / line["prediction"]))
            assert line["change"] == pytest.approx(changed)
        assert any(line["change"] > 0 for line in lines(output)[1:])

    def test_image_specific_predictions_do_not_depend_on_what_came_before(self, images, output):
        run(segmenter(), images, output, mode="image-specific", rate="fixed", save_probabilities=True)
        for case in find_incoming(images):
            alone = output.with_name(f"alone_{case.name}")
            run(segmenter(), [case], alone, mode="image-specific", rate="fixed", save_probabilities=True)
            name = f"{case.name}_probabilities.npz"
            assert (alone / name).read_bytes() == (output / name).read_bytes()

    def test_windows_are_blended_as_each_step_gave_them(self, images, output):
        """By hand: two steps, each window as its own step predicts it."""
        opened = segmenter(window=Window((8, 6), 0.0))
        run(opened, find_incoming(images)[:1], output, save_probabilities=True)
        with Stream(opened, output.with_name("other"), streams.settings()) as stream:
            adapter = stream.adapter
        x = torch.from_numpy(mask(images / "case_0.png").astype(np.float32))[None, None] / 255
        expected = torch.cat([adapter.step(x[..., :6]).logits, adapter.step(x[..., 6:]).logits], dim=-1)
        found = np.load(output / "case_0_probabilities.npz")["probabilities"]
        np.testing.assert_allclose(found, probabilities(expected)[0], atol=1e-6)

    def test_windows_of_an_image_specific_stream_are_independent(self, images, output):
        opened = segmenter(window=Window((8, 6), 0.0))
        case = find_incoming(images)[:1]
        run(opened, case, output, mode="image-specific", rate="fixed", guard=False, save_probabilities=True)
        halves = []
        for part in (slice(0, 6), slice(6, 12)):
            folder = output.with_name(f"in_{part.start}")
            folder.mkdir()
            grey_image(folder / "half.png", mask(images / "case_0.png")[:, part])
            there = output.with_name(f"out_{part.start}")
            run(segmenter(), folder, there, mode="image-specific", rate="fixed", guard=False, save_probabilities=True)
            halves.append(np.load(there / "half_probabilities.npz")["probabilities"])
        found = np.load(output / "case_0_probabilities.npz")["probabilities"]
        np.testing.assert_allclose(found, np.concatenate(halves, axis=-1), atol=1e-6)

    def test_images_of_different_sizes_share_a_recommended_stream(self, images, output):
        grey_image(images / "case_9.png", np.arange(160).reshape(10, 16))
        with Stream(segmenter(), output) as stream:
            assert stream.run(find_incoming(images)).predicted == 7
        assert mask(output / "case_9.png").shape == (10, 16)

    def test_a_second_size_needs_a_pooled_memory_and_the_error_says_so(self, images, output):
        grey_image(images / "case_9.png", np.arange(160).reshape(10, 16))
        with (
            Stream(segmenter(), output, StreamSettings(paper())) as stream,
            pytest.raises(InputError, match=r"case_9: .* different size need .*--pool 8"),
        ):
            stream.run(find_incoming(images))
        assert run(segmenter(), images, output.with_name("pooled"), pool=8).predicted == 7

    def test_a_threshold_of_the_network_holds_for_its_predictions(self, images, output):
        model = trained(Segmenter(classes=1))
        parts = {"model": model, "classes": ("no", "yes"), "activation": "sigmoid"}
        for threshold in (0.3, 0.9):
            there = output.with_name(f"out_{threshold}")
            opened = segmenter(**parts, threshold=threshold, fingerprint="x")
            run(opened, images, there, mode="frozen", save_probabilities=True)
            found = np.load(there / "case_0_probabilities.npz")["probabilities"]
            assert np.array_equal(mask(there / "case_0.png"), found[1] >= threshold)


class TestClassification:
    def table(self, output):
        return [row.split(",") for row in (output / "predictions.csv").read_text().splitlines()]

    def test_a_row_per_image_with_every_digit_that_counts(self, images, output):
        opened = classifier()
        run(opened, images, output, mode="frozen", batch_size=4)
        header, *rows = self.table(output)
        assert header == ["image", "prediction", "x", "y", "z"]
        for row, case in zip(rows, find_incoming(images), strict=True):
            x = torch.from_numpy(mask(case.files[0]).astype(np.float32))[None, None] / 255
            expected = probabilities(opened.model(x))[0].detach()
            found = torch.tensor([float(p) for p in row[2:]], dtype=torch.float32)
            torch.testing.assert_close(found, expected, atol=2e-7, rtol=0)  # a batch of 4 is summed in another order
            assert row[:2] == [case.files[0].name, "xyz"[expected.argmax()]]

    def test_numbers_are_exact_and_short(self, images, output, monkeypatch):
        monkeypatch.setattr("dltta.predictor.probabilities", lambda logits: torch.tensor([[0.1, 0.9, 1e-20]]))
        run(classifier(), find_incoming(images)[:1], output, batch_size=1)
        assert self.table(output)[1] == ["case_0.png", "y", "0.1", "0.9", "1e-20"]
        assert lines(output)[1]["probabilities"] == [0.1, 0.9, 1e-20]

    def test_batches_are_steps(self, images, output):
        run(classifier(), images, output, batch_size=4)
        found = lines(output)[1:]
        assert [(line["state"], line["of"]) for line in found] == [(1, 4)] * 4 + [(2, 2)] * 2
        assert len({line["loss"] for line in found[:4]}) == 1

    def test_the_memory_holds_the_batches_that_the_recipe_says(self, output):
        """Four batches, as in the paper, and never fewer pairs than its twelve neighbors."""
        for size, pairs in ((1, 12), (4, 16), (200, 800), (300, 1200)):
            stream = Stream(classifier(), output, StreamSettings(Recipe(batch_size=size)))
            assert stream.adapter.memory.capacity == pairs

    def test_the_same_image_twice_in_a_batch_is_learned_from_once(self, images, output, tmp_path):
        alone = tmp_path / "alone"
        run(classifier(), images, alone, batch_size=6)
        shutil.copy(images / "case_1.png", images / "case_1b.png")
        shutil.copy(images / "case_1.png", images / "copy.png")
        summary = run(classifier(), images, output, batch_size=6)
        assert (summary.predicted, summary.repeated) == (6, 2)
        assert told(output)[:7] == told(alone)
        assert [line["repeats"] for line in lines(output)[7:]] == ["case_1", "case_1"]
        rows = {row[0]: row[1:] for row in self.table(output)}
        assert rows["case_1.png"] == rows["case_1b.png"] == rows["copy.png"]

    def test_a_batch_is_images_of_one_shape(self, images, output):
        grey_image(images / "case_2.png", np.arange(100).reshape(10, 10))
        assert run(classifier(), images, output, batch_size=4).predicted == 6
        assert [line["of"] for line in lines(output)] == [1, 2, 2, 1, 3, 3, 3]

    def test_a_case_that_fails_in_a_batch_fails_alone(self, images, output, tmp_path):
        """The others are predicted as if it had never been there."""
        opened = classifier(prepare=spoiled(torch.nan))
        grey_image(images / "case_3b.png", np.full((8, 12), 7))
        summary = run(opened, images, output, batch_size=4, on_error="skip")
        assert summary.predicted == 6
        assert len(summary.failed) == 1
        assert summary.failed[0].startswith("case_3b: ")
        (images / "case_3b.png").unlink()
        without = tmp_path / "without"
        run(opened, images, without, batch_size=4, on_error="skip")
        kept = [line for line in told(output) if "error" not in line]
        assert [line["case"] for line in kept[1:]] == [f"case_{i}" for i in range(6)]
        batches = [(line["case"], line["of"]) for line in kept[1:]]
        assert batches == [*((f"case_{i}", 4) for i in range(4)), ("case_4", 2), ("case_5", 2)]
        assert left(without)["predictions.csv"] == left(output)["predictions.csv"]

    def test_a_batch_in_which_nobody_is_to_blame_fails_as_one(self, images, output, monkeypatch):
        def fail(self, x, *, case=None):
            raise NonFiniteError(f"{case}: the loss is nan")

        monkeypatch.setattr(Predictor, "step", fail)
        summary = run(classifier(), images, output, batch_size=6, on_error="skip")
        assert (summary.predicted, len(summary.failed)) == (0, 6)

    def test_the_table_is_made_anew_from_the_log(self, images, output):
        cases = find_incoming(images)
        run(classifier(), cases[:4], output, batch_size=2)
        whole = (output / "predictions.csv").read_bytes()
        for damage in (b"", whole[:-9], whole + b"x"):
            (output / "predictions.csv").write_bytes(damage)
            run(classifier(), cases[:4], output, batch_size=2, resume=True)
            assert (output / "predictions.csv").read_bytes() == whole


def spoiled(by):
    """Preparation that puts this number into every image that is 7 all over."""

    def prepare(image):
        prepared = streams.prepare(image)
        if (image.array == 7).all():
            prepared.image[..., 6:] = by
        return prepared

    return prepare


class Fragile(Segmenter):
    """Gives what is no number for images with large values."""

    def forward(self, x):
        return super().forward(x) / (x < 1e6).all()


class TestOnce:
    def test_a_second_run_predicts_nothing_again(self, images, output):
        run(segmenter(), images, output)
        before = left(output)
        summary = run(segmenter(), images, output, resume=True)
        assert (summary.predicted, summary.already_predicted) == (0, 6)
        assert left(output) == before

    def test_what_was_predicted_is_not_even_read(self, images, output, monkeypatch):
        run(segmenter(), images, output)
        monkeypatch.setattr("dltta.serving.reading.read_incoming", lambda case: pytest.fail("read again"))
        assert run(segmenter(), images, output, resume=True).already_predicted == 6

    def test_new_images_go_on_where_the_others_ended(self, images, output, tmp_path):
        cases = find_incoming(images)
        run(segmenter(), cases, tmp_path / "whole")
        for count in (2, 3, 6):
            run(segmenter(), cases[:count], output, resume=True)
        assert left(output) == left(tmp_path / "whole")

    def test_the_same_content_under_another_name_is_predicted_from_the_log(self, images, output):
        run(segmenter(), images, output, save_probabilities=True)
        state = (output / "state" / "versions" / "000006.safetensors").read_bytes()
        shutil.copy(images / "case_2.png", images / "other.png")
        ticked = []
        summary = run(segmenter(), images, output, resume=True, save_probabilities=True, tick=ticked.append)
        assert (summary.predicted, summary.repeated, summary.already_predicted) == (0, 1, 6)
        line = lines(output)[-1]
        assert (line["case"], line["repeats"], line["state"]) == ("other", "case_2", 6)
        assert (output / "other.png").read_bytes() == (output / "case_2.png").read_bytes()
        assert (output / line["probabilities_file"]).read_bytes() == (output / "case_2_probabilities.npz").read_bytes()
        assert (output / "state" / "versions" / "000006.safetensors").read_bytes() == state
        assert len(ticked) == 7

    def test_a_repeat_keeps_the_ending_of_its_file(self, tmp_path, output):
        folder = tmp_path / "in"
        folder.mkdir()
        Pillow.fromarray(np.arange(96, dtype=np.uint8).reshape(8, 12)).save(folder / "a.tif")
        shutil.copy(folder / "a.tif", folder / "b.tiff")
        assert run(segmenter(), folder, output).repeated == 1
        assert (output / "a.tif").read_bytes() == (output / "b.tiff").read_bytes()

    def test_a_repeat_of_a_prediction_that_is_gone_fails(self, images, output):
        run(segmenter(), images, output)
        (output / "case_2.png").unlink()
        shutil.copy(images / "case_2.png", images / "other.png")
        with pytest.raises(DataError, match=r"other: repeats case_2, whose prediction case_2.png is gone; put it back"):
            run(segmenter(), images, output, resume=True)

    @pytest.mark.parametrize("name", ["case_2.png", "CASE_2.png"])
    def test_other_content_under_a_known_name_is_refused(self, images, output, name):
        """Upper and lower case are one: on some disks the prediction would replace the first one's."""
        run(segmenter(), images, output)
        (images / "case_2.png").unlink()
        grey_image(images / name, np.arange(96).reshape(8, 12))
        with pytest.raises(DataError, match=r"(?i)case_2: was predicted before with other content"):
            run(segmenter(), images, output, resume=True)

    def test_a_stream_is_not_begun_over_another(self, images, output):
        run(segmenter(), images, output)
        before = left(output)
        with pytest.raises(SettingError, match="already holds a stream; add --resume"):
            run(segmenter(), images, output)
        assert left(output) == before

    @pytest.mark.parametrize(
        "name", ["case_0.png", "mine.nii.gz", "x.dcm", "predictions.csv", "case_0_probabilities.npz"]
    )
    def test_files_of_others_are_not_written_over(self, images, output, name):
        output.mkdir()
        (output / name).write_bytes(b"mine")
        with pytest.raises(SettingError, match=f"holds {name}, which is not ours; choose an empty folder"):
            run(segmenter(), images, output)
        assert (output / name).read_bytes() == b"mine"

    def test_predictions_are_not_put_among_the_images(self, images):
        (images / "state").mkdir()
        with pytest.raises(SettingError):
            run(segmenter(), images, images)
        assert not (images / "stream.jsonl").exists()
        nnunet = images / "n"
        write_images(nnunet, 1).joinpath("case_0.png").rename(nnunet / "case_0000.png")
        with pytest.raises(SettingError):
            run(segmenter(), nnunet, nnunet)

    def test_only_one_process_runs_a_stream(self, images, output):
        def second():
            try:
                run(segmenter(), images, output, resume=True)
            except StateError as error:
                os._exit(7 if "another process works on this stream" in str(error) else 8)

        with Stream(segmenter(), output, streams.settings()) as stream:
            assert child(second) == 7
            assert stream.run(find_incoming(images)).predicted == 6
        assert child(second) == 0


class TestSettings:
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"alpha": 0.1}, "begun with alpha 0.05, not 0.1"),
            ({"method": "ptbn"}, "begun with method tent, not ptbn"),
            ({"rate": "fixed"}, "begun with rate relative, not fixed"),
            ({"mode": "shadow"}, "begun with deployment live, not shadow"),
            ({"guard": False}, "begun with guard True, not False"),
            ({"anonymize": True}, "begun with anonymize False, not True"),
        ],
    )
    def test_a_stream_goes_on_as_it_was_begun(self, images, output, change, words):
        run(segmenter(), images, output)
        before = left(output)
        with pytest.raises(StateError, match=words):
            run(segmenter(), images, output, resume=True, **change)
        assert left(output) == before

    @pytest.mark.parametrize(
        ("opened", "words"),
        [
            (segmenter(model=trained(Segmenter(), seed=1)), "begun with another network, not this one"),
            (segmenter(window=Window((4, 4))), "begun with window None, not"),
            (segmenter(classes=("background", "a", "c")), "begun with classes"),
        ],
    )
    def test_and_with_its_network(self, images, output, opened, words):
        run(segmenter(), images, output)
        with pytest.raises(StateError, match=words):
            run(opened, images, output, resume=True)

    def test_a_value_that_is_the_default_may_be_left_out_or_given(self, images, output):
        run(segmenter(), images, output, alpha=None)
        assert run(segmenter(), images, output, alpha=1e-3, resume=True).already_predicted == 6
        assert lines(output)[0]["recipe"]["alpha"] == 1e-3

    def test_without_calibration_the_log_records_batch_statistics(self, images, output):
        with Stream(segmenter(), output) as stream:
            stream.run(find_incoming(images))
        recipe = lines(output)[0]["recipe"]
        assert (recipe["name"], recipe["statistics"]) == ("recommended", "batch")

    @pytest.mark.parametrize("change", [{"deployment": "other"}, {"on_error": "go"}])
    def test_unknown_words_are_refused(self, change):
        with pytest.raises(SettingError, match="must be one of"):
            StreamSettings(**change)

    def test_words_become_choices(self):
        assert StreamSettings(on_error="skip").on_error is OnError.SKIP
        assert StreamSettings(deployment="shadow").deployment is Deployment.SHADOW

    def test_segmentations_come_one_by_one(self, output):
        with pytest.raises(SettingError, match="adapted to one by one, got a batch size of 2"):
            Stream(segmenter(), output, streams.settings(batch_size=2))

    def test_the_stream_of_an_older_release_is_refused_in_one_line(self, images, output):
        run(segmenter(), images, output)
        path = output / "state" / "stream.json"
        path.write_text(path.read_text().replace('"schema": 2', '"schema": 1'))
        with pytest.raises(StateError, match="has a log of schema 1, this version writes 2; begin a new stream"):
            run(segmenter(), images, output, resume=True)


class TestFailures:
    """One case goes wrong: the others are predicted as if it had never been there."""

    def same_without(self, opened, images, output, bad, **changes):
        """Run with a bad case among the others, and without it; what the first said of it."""
        summary = run(opened, images, output, on_error="skip", **changes)
        bad.unlink()
        without = output.with_name("without")
        run(opened, images, without, on_error="skip", **changes)
        found, expected = left(output), left(without)
        error = [line for line in found["log"] if "error" in line]
        found["log"] = [line for line in found["log"] if "error" not in line]
        assert found == expected
        assert len(error) == len(summary.failed) == 1
        return summary.failed[0], error[0]

    def test_a_file_that_cannot_be_read(self, images, output):
        bad = images / "case_3b.png"
        bad.write_bytes((images / "case_3.png").read_bytes()[:60])
        sentence, line = self.same_without(segmenter(), images, output, bad)
        assert sentence.startswith(f"{bad}: cannot be read as PNG")
        assert (line["case"], line["error"], line["state"]) == ("case_3b", "DataError", 4)
        assert line["detail"].startswith("cannot be read as PNG")
        assert str(images) not in line["detail"]

    @pytest.mark.parametrize("guard", [True, False])
    def test_an_image_that_the_network_cannot_take(self, images, output, guard):
        bad = images / "case_3b.png"
        grey_image(bad, np.zeros((7, 9)) + np.arange(9))

        def picky(image):
            prepared = streams.prepare(image)
            return replace(prepared, image=prepared.image[:, :, :1]) if image.array.shape[2] == 9 else prepared

        sentence, line = self.same_without(segmenter(prepare=picky), images, output, bad, guard=guard)
        assert sentence.startswith("case_3b: the network cannot take images of shape (1, 7, 1): ")
        assert line["error"] == "InputError"

    @pytest.mark.parametrize("guard", [True, False])
    def test_an_image_that_leads_to_no_number(self, images, output, guard):
        bad = images / "case_3b.png"
        grey_image(bad, np.full((8, 12), 7))
        opened = segmenter(model=trained(Fragile()), prepare=spoiled(1e7))
        sentence, line = self.same_without(opened, images, output, bad, guard=guard)
        assert sentence == "case_3b: the prediction has NaN or infinite values"
        assert line["error"] == "NonFiniteError"

    def test_an_error_in_the_middle_of_the_windows_undoes_those_before(self, images, output):
        """The adapter is all or nothing for a window; the stream is for a case."""
        bad = images / "case_3b.png"
        grey_image(bad, np.full((8, 12), 7))
        opened = segmenter(prepare=spoiled(torch.nan), window=Window((4, 4), 0.0))
        sentence, _ = self.same_without(opened, images, output, bad, guard=False)
        assert sentence == "case_3b, window 2: 8 of 16 input values are NaN or infinite"

    def test_an_error_in_the_middle_of_the_slices_undoes_those_before(self, tmp_path, output):
        import nibabel as nib

        folder = tmp_path / "in"
        folder.mkdir()
        for number in range(4):
            values = np.random.default_rng(number).integers(0, 255, (8, 12, 5)).astype(np.float32)
            if number == 2:
                values[..., 3] = 7
            nib.save(nib.Nifti1Image(values, np.diag([1, 1, 3, 1])), folder / f"v{number}.nii.gz")
        bad = folder / "v2.nii.gz"
        sentence, _ = self.same_without(segmenter(prepare=spoiled(torch.nan)), folder, output, bad)
        assert sentence == "v2: 48 of 96 input values are NaN or infinite"

    def test_a_name_too_long_for_its_prediction(self, images, output):
        bad = images / f"case_3b{'x' * 240}.png"
        grey_image(bad, np.arange(96).reshape(8, 12))
        sentence, _ = self.same_without(segmenter(), images, output, bad)
        assert "File name too long" in sentence

    def test_probabilities_whose_name_is_too_long_leave_no_prediction(self, images, output):
        bad = images / f"case_3b{'x' * 230}.png"
        grey_image(bad, np.arange(96).reshape(8, 12))
        self.same_without(segmenter(), images, output, bad, save_probabilities=True)

    def test_a_file_that_changes_while_it_is_read(self, images, output, monkeypatch):
        def late(case):
            found = read_incoming(case)
            if case.name == "case_3b":
                case.files[0].write_bytes((images / "case_0.png").read_bytes() + b"more")
            return found

        monkeypatch.setattr("dltta.serving.reading.read_incoming", late)
        bad = images / "case_3b.png"
        grey_image(bad, np.arange(96).reshape(8, 12))
        sentence, _ = self.same_without(segmenter(), images, output, bad)
        assert sentence == "case_3b: it changed while it was read; give it once it is complete"

    def test_stopping_leaves_what_was_predicted(self, images, output):
        (images / "case_3.png").write_bytes(b"not an image")
        with pytest.raises(DataError, match=r"case_3.png: cannot be read as PNG"):
            run(segmenter(), images, output)
        assert [line.get("case") for line in lines(output)] == [None, "case_0", "case_1", "case_2"]
        write_images(images, 6)
        run(segmenter(), images, output, resume=True)
        run(segmenter(), images, output.with_name("whole"))
        assert left(output) == left(output.with_name("whole"))

    def test_a_failure_is_written_down_once(self, images, output):
        (images / "case_3.png").write_bytes(b"not an image")
        for resume in (False, True, True):
            summary = run(segmenter(), images, output, resume=resume, on_error="skip")
            assert len(summary.failed) == 1
        assert sum("error" in line for line in lines(output)) == 1
        write_images(images, 6)
        assert run(segmenter(), images, output, resume=True).predicted == 1

    def test_copies_of_a_case_that_fails_in_its_batch_fail_with_it(self, images, output):
        for name in ("case_3b", "case_3c"):
            grey_image(images / f"{name}.png", np.full((8, 12), 7))
        summary = run(classifier(prepare=spoiled(torch.nan)), images, output, batch_size=8, on_error="skip")
        assert [sentence.split(":")[0] for sentence in summary.failed] == ["case_3b", "case_3c"]
        assert summary.predicted == 6

    def test_a_problem_of_the_listing_is_the_cases(self, images, output):
        """Two files of one name: neither is taken, the others are."""
        Pillow.fromarray(np.zeros((8, 12), dtype=np.uint8)).save(images / "case_1.tif")
        summary = run(segmenter(), images, output, on_error="skip")
        assert summary.predicted == 5
        assert "is another case of the same name" in summary.failed[0]
        assert "is another case of the same name" in next(line for line in lines(output) if "error" in line)["detail"]

    def test_what_concerns_all_cases_stops_also_when_skipping(self, images, output, monkeypatch):
        def fail(self, x, *, case=None):
            raise SettingError("layer 'x' was not run")

        monkeypatch.setattr(Predictor, "step", fail)
        with pytest.raises(SettingError, match="was not run"):
            run(segmenter(), images, output, on_error="skip")


class TestPrivacy:
    NAME = "Mueller_Anna_19700102"

    def everything(self, output):
        """Names and contents of all that a stream left."""
        paths = sorted(output.rglob("*"))
        return b"\n".join(str(path).encode() + (path.read_bytes() if path.is_file() else b"") for path in paths)

    @pytest.fixture
    def named(self, tmp_path):
        folder = tmp_path / f"ward {self.NAME}"
        write_images(folder, 2)
        for index in range(2):
            (folder / f"case_{index}.png").rename(folder / f"{self.NAME}_{'ab'[index]}.png")
        (folder / f"{self.NAME}_broken.png").write_bytes(b"\x89PNG nothing")
        (folder / f"{self.NAME}_text.nii.gz").write_bytes(b"text")
        (folder / f"{self.NAME}_wide.tif").write_bytes((folder / f"{self.NAME}_a.png").read_bytes())
        (folder / f"{self.NAME}_c.tif").write_bytes(b"II")
        (folder / f"{self.NAME}_c.png").write_bytes(b"x")  # two of one name
        (folder / f"{self.NAME}_out.png").symlink_to("/etc/hostname")
        (folder / f"{self.NAME}_..dots.png").write_bytes(b"x")
        return folder

    def test_an_anonymous_stream_never_says_a_name(self, named, output):
        summary = run(segmenter(), named, output, anonymize=True, on_error="skip", save_probabilities=True)
        assert (summary.predicted, len(summary.failed)) == (2, 5)
        assert self.NAME.encode() not in self.everything(output)
        assert b"Mueller" not in self.everything(output)
        assert "Mueller" not in "\n".join(summary.failed)
        for line in (line for line in lines(output) if "prediction" in line):
            assert line["prediction"] == f"{line['input'][:16]}.png"
        with pytest.raises(DataError) as stopped:
            run(segmenter(), named, output.with_name("other"), anonymize=True)
        assert "Mueller" not in str(stopped.value)

    def test_copies_of_an_anonymous_case_are_one(self, named, output):
        cases = [case for case in find_incoming(named) if case.name.endswith(("_a", "_b"))]
        shutil.copy(cases[0].files[0], named / "copy.png")
        both = [*cases, replace(cases[0], name="copy", files=(named / "copy.png",))]
        summary = run(segmenter(), both, output, anonymize=True)
        assert (summary.predicted, summary.already_predicted) == (2, 1)

    def test_what_cannot_be_read_keeps_its_name_through_a_resume(self, named, output):
        for resume in (False, True):
            run(segmenter(), named, output, resume=resume, anonymize=True, on_error="skip")
        failed = [line["case"] for line in lines(output) if "error" in line]
        assert len(set(failed)) == len(failed) == 5

    def test_nobody_who_has_the_log_alone_can_try_names(self, named, output):
        run(segmenter(), named, output, anonymize=True, on_error="skip")
        digests = {hashlib.sha256(f"{self.NAME}{end}".encode()).hexdigest()[:16] for end in ("_c", "_out", "")}
        assert not any(digest in (output / "stream.jsonl").read_text() for digest in digests)
        assert "key" not in lines(output)[0]

    def test_folders_are_never_written_down(self, named, output):
        run(segmenter(), named, output, on_error="skip")
        assert b"ward" not in self.everything(output).replace(str(output).encode(), b"")


class TestDisk:
    def operations(self, monkeypatch, fail):
        """Let `fail(number)` say whether the disk is full at its n-th write or rename."""
        count = iter(range(10**9))

        def wrap(real):
            def operation(*args, **kwargs):
                if fail(next(count)):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return real(*args, **kwargs)

            return operation

        for name in ("fsync", "pwrite", "replace"):
            monkeypatch.setattr(os, name, wrap(getattr(os, name)))
        return count

    @pytest.mark.long
    @pytest.mark.parametrize("make", [segmenter, classifier])
    def test_a_full_disk_at_any_moment_stops_in_one_line_and_loses_nothing(self, images, tmp_path, monkeypatch, make):
        cases = find_incoming(images)[:3]
        given = {"batch_size": 2} if make is classifier else {}
        run(make(), cases, tmp_path / "whole", on_error="skip", **given)
        with monkeypatch.context() as patch:
            count = self.operations(patch, lambda number: False)
            run(make(), cases, tmp_path / "counted", on_error="skip", **given)
            total = next(count)
        assert total > 20
        for full in range(total):
            output = tmp_path / f"out_{full}"
            with monkeypatch.context() as patch:
                self.operations(patch, lambda number, full=full: number >= full)
                with pytest.raises(StateError, match=r"cannot be written \(No space left on device\); free space"):
                    run(make(), cases, output, on_error="skip", **given)
            run(make(), cases, output, resume=True, on_error="skip", **given)
            assert left(output) == left(tmp_path / "whole"), full

    def test_a_table_on_a_full_disk(self, images, output, monkeypatch):
        run(classifier(), find_incoming(images)[:2], output, batch_size=2)

        def full(path, flags):
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("dltta.serving.index.open_in_place", full)
            with pytest.raises(StateError, match="predictions.csv: cannot be written"):
                run(classifier(), images, output, batch_size=2, resume=True)
        run(classifier(), images, output, batch_size=2, resume=True)
        run(classifier(), images, output.with_name("whole"), batch_size=2)
        assert left(output) == left(output.with_name("whole"))

    @pytest.mark.parametrize("place", ["/sys/predictions", "/dev/null/predictions"])
    def test_a_place_where_nothing_can_be_written(self, images, place):
        with pytest.raises(StateError, match="cannot be written"):
            run(segmenter(), images, Path(place))


def test_an_interrupted_run_of_the_same_object_goes_on(images, output):
    """Whatever the adapter had seen of the case that was interrupted is undone before the next."""
    cases = find_incoming(images)

    def interrupt(line):
        if line["case"] == "case_2":
            raise KeyboardInterrupt

    with Stream(segmenter(), output, streams.settings()) as stream:
        with pytest.raises(KeyboardInterrupt):
            stream.run(cases, interrupt)
        real = stream.folder.put
        stream.folder.put = lambda packed: (_ for _ in ()).throw(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            stream.run(cases)
        stream.folder.put = real
        stream.run(cases)
    run(segmenter(), cases, output.with_name("whole"))
    assert left(output) == left(output.with_name("whole"))


def test_little_is_kept_in_memory_per_case(tmp_path):
    """What the record of each case takes; images and lines stay on the disk."""
    import tracemalloc

    from dltta.serving.index import StreamIndex
    from dltta.serving.journal import Journal

    journal = Journal(tmp_path / "log", tmp_path / "head")
    count = 4000
    rows = [
        {
            "case": f"hospital_b_{i:06d}",
            "input": hashlib.sha256(str(i).encode()).hexdigest(),
            "prediction": "x",
            "rate": 0.1,
        }
        for i in range(count)
    ]
    journal.append(rows)
    del rows
    tracemalloc.start()
    record = StreamIndex(Journal(tmp_path / "log", tmp_path / "head"))
    taken = tracemalloc.get_traced_memory()[0] / count
    tracemalloc.stop()
    assert record.digest("hospital_b_000042") == hashlib.sha256(b"42").hexdigest()
    assert record.first(hashlib.sha256(b"42").hexdigest())["case"] == "hospital_b_000042"
    assert taken < 500  # bytes


def test_the_state_does_not_grow_with_the_stream(tmp_path, output):
    images = write_images(tmp_path / "in", 40)
    sizes = {}

    def look(line):
        files = list((output / "state").rglob("*.safetensors"))
        sizes[line["case"]] = (len(files), sum(path.stat().st_size for path in files))

    run(segmenter(), images, output, tick=look)
    assert sizes["case_30"][0] == sizes["case_39"][0] == 20 + 20 + 2  # versions, pairs of each, pairs before the oldest
    assert sizes["case_39"][1] < 1.05 * sizes["case_30"][1]


def test_source_and_frozen_streams_predict_alike(images, output):
    run(segmenter(), images, output, method="source", save_probabilities=True)
    run(segmenter(), images, output.with_name("frozen"), mode="frozen", save_probabilities=True)
    for case in find_incoming(images):
        name = f"{case.name}_probabilities.npz"
        assert (output / name).read_bytes() == (output.with_name("frozen") / name).read_bytes()


def test_networks_without_buffers_can_be_frozen(images, output):
    opened = segmenter(model=trained(Segmenter(kind="instance")))
    assert run(opened, images, output, mode="frozen").predicted == 6
    assert isinstance(Stream(opened, output, streams.settings(mode="frozen")).adapter.objective, Source)


def test_inputs_that_do_not_fit_name_the_case(images, output):
    def refuse(image):
        raise InputError("the network takes images of 3 channels, this one has 1")

    with pytest.raises(InputError, match="case_0: the network takes images of 3 channels, this one has 1"):
        run(segmenter(prepare=refuse), images, output)


@pytest.fixture
def slow_disk(monkeypatch):
    """A version reaches the disk only once the stream waits for it."""
    awaited = threading.Semaphore(0)
    put, settle, wait = StateFolder.put, Stream._settle, concurrent.futures.wait

    def late(folder, packed):
        if packed.number > 0:
            assert awaited.acquire(timeout=20), "nobody waited for the disk"
        put(folder, packed)

    def settling(stream):
        if stream._keeping is not None:
            awaited.release()
        settle(stream)

    def waiting(futures):
        awaited.release()
        return wait(futures)

    monkeypatch.setattr(StateFolder, "put", late)
    monkeypatch.setattr(Stream, "_settle", settling)
    monkeypatch.setattr("dltta.serving.folder.wait", waiting)


def refuse(monkeypatch, name):
    """Let the network give no number for the case of this name."""
    step = Predictor.step

    def refusing(predictor, x, *, case):
        if case == name:
            raise NonFiniteError("no number")
        return step(predictor, x, case=case)

    monkeypatch.setattr(Predictor, "step", refusing)


class TestWhileTheDiskWorks:
    def test_the_network_is_at_the_next_image(self, images, output, monkeypatch):
        """The state of one image reaches the disk only after the network was shown the next one."""
        shown, waited = [threading.Event() for _ in range(7)], []
        step, put = Predictor.step, StateFolder.put

        def showing(predictor, x, *, case):
            shown[predictor.adapter.batches_seen].set()
            return step(predictor, x, case=case)

        def late(folder, packed):
            if 0 < packed.number < 6:  # the last has nobody after it
                waited.append(shown[packed.number].wait(20))
            put(folder, packed)

        monkeypatch.setattr(Predictor, "step", showing)
        monkeypatch.setattr(StateFolder, "put", late)
        assert run(segmenter(), images, output).predicted == 6
        assert waited == [True] * 5
        monkeypatch.undo()
        run(segmenter(), images, output.with_name("alone"))
        assert left(output) == left(output.with_name("alone"))

    @pytest.mark.parametrize("broken", [1, 3, 6])
    def test_a_disk_that_is_full_ends_the_stream_where_the_log_ends(self, images, output, monkeypatch, broken):
        opened = segmenter()
        with Stream(opened, output, streams.settings()) as stream:
            put = stream.folder.put

            def full(packed):
                if packed.number == broken:
                    raise StateError("no space left")
                put(packed)

            stream.folder.put = full
            with pytest.raises(StateError, match="no space left"):
                stream.run(find_incoming(images))
            assert len(lines(output)) == broken
            stream.folder.put = put
            assert stream.run(find_incoming(images)).predicted == 7 - broken  # there is room again
        run(opened, images, output.with_name("whole"))
        assert left(output) == left(output.with_name("whole"))

    def test_what_is_underway_counts_as_predicted(self, images, output, slow_disk):
        """Twice the same content, and twice the same name, one right after the other."""
        (images / "case_0b.png").write_bytes((images / "case_0.png").read_bytes())
        cases = [
            case
            for name in ("case_0", "case_0b", "case_1", "case_1")
            for case in find_incoming(images)
            if case.name == name
        ]
        done = run(segmenter(), cases, output)
        assert (done.predicted, done.repeated, done.already_predicted) == (2, 1, 1)
        assert [line.get("repeats") for line in lines(output)[1:]] == [None, "case_0", None]

    def test_a_case_that_fails_finds_the_one_before_it_in_the_log(self, images, output, slow_disk):
        (images / "case_1.png").write_bytes(b"no image")
        done = run(segmenter(), images, output, on_error="skip")
        assert (done.predicted, len(done.failed)) == (5, 1)
        assert [(line["case"], line["state"]) for line in lines(output)[1:4]] == [
            ("case_0", 1),
            ("case_1", 1),
            ("case_2", 2),
        ]

    def test_an_image_that_the_network_refuses_comes_after_the_one_before_it(
        self, images, output, monkeypatch, slow_disk
    ):
        refuse(monkeypatch, "case_1")
        run(segmenter(), images, output, on_error="skip")
        told = [(line["case"], line["state"], line.get("error")) for line in lines(output)[1:4]]
        assert told == [("case_0", 1, None), ("case_1", 1, "NonFiniteError"), ("case_2", 2, None)]

    def test_a_run_that_ends_in_the_middle_waits_for_the_disk(self, images, output, monkeypatch, slow_disk):
        refuse(monkeypatch, "case_1")
        with Stream(segmenter(), output, streams.settings()) as stream:
            with pytest.raises(NonFiniteError, match="case_1"):
                stream.run(find_incoming(images))
            assert [line["state"] for line in lines(output)] == [0, 1]
