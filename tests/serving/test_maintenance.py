"""Maintenance of a stream: versions, rollback, finding alterations, export."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from dltta import Adapter
from dltta.data.formats.images import read_image
from dltta.data.inbox import find_incoming
from dltta.data.preprocessing import Preprocessing
from dltta.errors import SettingError, StateError
from dltta.models.io.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from dltta.models.io.opening import open_model
from dltta.models.nets.architecture import Architecture
from dltta.objectives import PTBN
from dltta.serving.maintenance import (
    difference,
    export,
    list_versions,
    live_adapter,
    predicted_names,
    roll_back,
    show_version,
)
from dltta.serving.verification import verify
from networks import Segmenter, trained
from streams import SEGMENTS, left, lines, run, segmenter, write_images

pytestmark = pytest.mark.usefixtures("no_power_cut")


class TestLooking:
    def test_versions_and_what_they_came_of(self, output, table):
        found = list_versions(output)
        assert [(each.version, each.cases) for each in found] == [(0, ()), *((i + 1, (f"case_{i}",)) for i in range(5))]
        assert [each.event for each in found] == ["start", *[None] * 5]
        assert [each.current for each in found] == [False] * 5 + [True]
        assert found[0].bytes == (output / "state" / "versions" / "000000.safetensors").stat().st_size
        batches = [(), ("case_0", "case_1"), ("case_2", "case_3"), ("case_4",)]
        assert [each.cases for each in list_versions(table)] == batches

    def test_a_version_that_no_line_names_is_not_there(self, output):
        versions = output / "state" / "versions"
        shutil.copy(versions / "000005.safetensors", versions / "000006.safetensors")
        assert list_versions(output)[-1].version == 5
        with pytest.raises(StateError, match="there is no version 6; there are 0-5"):
            show_version(output, 6)

    def test_what_a_version_holds(self, output):
        found = show_version(output)
        assert (found["version"], found["batches"], found["memory"]) == (5, 5, 3)
        sizes = {"encoder.1.weight": [4], "encoder.1.bias": [4], "bottleneck.1.weight": [6], "bottleneck.1.bias": [6]}
        assert found["adapted"] == sizes
        assert found["settings"]["recipe"]["method"] == "tent"
        assert (show_version(output, 2)["batches"], show_version(output, 2)["memory"]) == (2, 2)

    def test_names_that_have_a_prediction(self, output, tmp_path):
        assert predicted_names(output) == {f"case_{i}" for i in range(5)}
        assert predicted_names(tmp_path / "nowhere") == set()

    @pytest.mark.parametrize(
        "look",
        [
            list_versions,
            show_version,
            verify,
            lambda folder: roll_back(folder, 0),
            lambda folder: export(folder, segmenter(), folder / "new"),
        ],
    )
    def test_a_folder_that_is_no_stream(self, images, look):
        before = sorted(images.rglob("*"))
        with pytest.raises(StateError, match="is not the output of dltta adapt: there is no stream.jsonl"):
            look(images)
        assert sorted(images.rglob("*")) == before


class TestRollback:
    def test_it_goes_on_from_there(self, output, images, tmp_path):
        """As if the cases since had never been adapted to, but their predictions and lines stay."""
        write_images(tmp_path / "more", 2, seed=9)
        for path in (tmp_path / "more").iterdir():
            path.rename(images / f"later_{path.name}")
        assert roll_back(output, 2) == 6
        assert lines(output)[-1]["event"] == "rollback"
        assert (lines(output)[-1]["to"], lines(output)[-1]["state"]) == (2, 6)
        assert [(each.version, each.event) for each in list_versions(output)][-1] == (6, "rollback to 2")
        summary = run(segmenter(), images, output, resume=True, save_probabilities=True)
        assert (summary.predicted, summary.already_predicted) == (2, 5)
        other = tmp_path / "other"
        cases = find_incoming(images)
        run(segmenter(), [*cases[:2], *cases[5:]], other, save_probabilities=True)
        for name in ("later_case_0", "later_case_1"):
            same = f"{name}_probabilities.npz"
            assert (output / same).read_bytes() == (other / same).read_bytes()
        assert verify(output) == []

    def test_it_can_be_taken_back(self, output, images):
        before = (output / "state" / "versions" / "000005.safetensors").read_bytes()
        roll_back(output, 1)
        assert roll_back(output, 5) == 7
        assert (output / "state" / "versions" / "000007.safetensors").read_bytes() == before
        assert run(segmenter(), images, output, resume=True).already_predicted == 5
        assert verify(output) == []

    def test_many_rollbacks_do_not_fill_the_disk(self, output):
        for _ in range(30):
            roll_back(output, list_versions(output)[-1].version)
        assert len(list_versions(output)) == 20
        assert verify(output) == []

    def test_a_version_that_is_gone(self, output):
        before = left(output)
        with pytest.raises(StateError, match="there is no version 9; there are 0-5"):
            roll_back(output, 9)
        (output / "state" / "versions" / "000002.safetensors").unlink()
        with pytest.raises(StateError, match="there is no version 2; there are 0-1, 3-5"):
            roll_back(output, 2)
        assert left(output)["log"] == before["log"]

    def test_a_damaged_current_version_is_left_behind(self, output, images):
        (output / "state" / "versions" / "000005.safetensors").write_bytes(b"damage")
        with pytest.raises(StateError, match="000005.safetensors was altered; roll back to another version"):
            run(segmenter(), images, output, resume=True)
        roll_back(output, 4)
        assert run(segmenter(), images, output, resume=True).already_predicted == 5


def checkpoint(folder, **parts):
    architecture = Architecture("unet", 2, 1, 3, {"width": 4})
    model, scaled = trained(architecture.build(seed=3)), Preprocessing("scale", 255.0, (32, 32))
    saved = Checkpoint(model, architecture, "segmentation", SEGMENTS, scaled, {"epoch": 3}, **parts)
    save_checkpoint(folder, saved)
    return open_model(str(folder))


class TestExport:
    def adapted(self, opened, images, output, **changes):
        """A stream, and the parameters that it left, by name."""
        run(opened, images, output, guard=False, **changes)
        number = max(each.version for each in list_versions(output))
        from dltta.serving.state import StateFolder

        sha256 = next(line["state_sha256"] for line in lines(output) if line["state"] == number)
        state = StateFolder(output / "state").read(number, sha256).state
        return {name: state["moving"][name] for name in state["extra"]["adapted"]}

    def test_a_checkpoint_goes_as_a_checkpoint(self, tmp_path, images):
        opened = checkpoint(tmp_path / "model")
        moved = self.adapted(opened, images, tmp_path / "out")
        export(tmp_path / "out", opened, tmp_path / "new")
        found = load_checkpoint(tmp_path / "new")
        before = load_checkpoint(tmp_path / "model")
        assert found.record["adapted"]["version"] == 5
        assert (found.preprocessing, found.classes) == (before.preprocessing, before.classes)
        own = found.model.state_dict()
        for name, tensor in before.model.state_dict().items():
            assert torch.equal(own[name], moved.get(name, tensor))
            assert (name in moved) != torch.equal(own[name], tensor) or "num_batches" in name
        frozen = run(open_model(str(tmp_path / "new")), images, tmp_path / "frozen", mode="frozen")
        assert frozen.predicted == 5

    def test_an_older_version_can_be_taken_out(self, tmp_path, images):
        opened = checkpoint(tmp_path / "model")
        self.adapted(opened, images, tmp_path / "out")
        export(tmp_path / "out", opened, tmp_path / "first", number=0)
        first = load_checkpoint(tmp_path / "first").model.state_dict()
        assert all(torch.equal(first[name], tensor) for name, tensor in opened.model.state_dict().items())

    def test_running_statistics_are_stored_in_the_network(self, tmp_path, images):
        opened = segmenter()
        first, output = read_image(sorted(images.iterdir())[0]), tmp_path / "out"
        (tmp_path / "one").mkdir()
        shutil.copy(sorted(images.iterdir())[0], tmp_path / "one")
        self.adapted(opened, tmp_path / "one", output, method="ptbn", statistics="running")
        export(output, opened, tmp_path / "new")
        found = load_file(tmp_path / "new" / "model.safetensors")
        name, layer = next((n, m) for n, m in opened.model.named_modules() if isinstance(m, torch.nn.BatchNorm2d))
        seen = []
        layer.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        opened.model(opened.prepare(first).image[None])
        mean = 0.9 * layer.running_mean + 0.1 * seen[0].mean((0, 2, 3))
        variance = 0.9 * layer.running_var + 0.1 * seen[0].var((0, 2, 3), correction=0)
        assert torch.allclose(found[f"{name}.running_mean"], mean, atol=1e-5)
        assert torch.allclose(found[f"{name}.running_var"], variance, atol=1e-5)

    def test_the_distance_to_the_adapting_model_is_measured(self, tmp_path, images):
        """By statistics of the image alone: the exported network has the stored ones again."""
        opened, output = segmenter(), tmp_path / "out"
        self.adapted(opened, images, output, method="ptbn")
        adapted = export(output, opened, tmp_path / "new").opened
        read = [read_image(path) for path in sorted(images.iterdir())[:2]]
        shares = []
        for image in read:
            x = opened.prepare(image).image[None]
            stored = opened.model(x).argmax(1)
            instance = Adapter(opened.model, PTBN()).step(x).logits.argmax(1)
            shares.append((stored != instance).float().mean().item())
        assert sum(shares) > 0
        live = live_adapter(output, opened)
        assert difference(live, adapted, read) == pytest.approx(sum(shares) / 2, abs=1e-6)
        assert difference(live, adapted) >= 0  # on noise

    def test_a_checkpoint_goes_as_a_bundle(self, tmp_path, images):
        opened = checkpoint(tmp_path / "model")
        moved = self.adapted(opened, images, tmp_path / "out")
        export(tmp_path / "out", opened, tmp_path / "bundle", bundle=True)
        found = open_model(str(tmp_path / "bundle"))
        assert found.kind == "bundle"
        own = found.model.state_dict()
        assert all(torch.equal(own[name], tensor) for name, tensor in moved.items())
        assert run(found, images, tmp_path / "frozen", mode="frozen").predicted == 5

    def test_ones_own_network_goes_as_weights(self, tmp_path, images):
        moved = self.adapted(segmenter(), images, tmp_path / "out")
        export(tmp_path / "out", segmenter(), tmp_path / "new")
        found = load_file(tmp_path / "new" / "model.safetensors")
        model = Segmenter()
        model.load_state_dict(found)
        for name, tensor in trained(Segmenter()).state_dict().items():
            assert torch.equal(found[name], moved.get(name, tensor))

    @pytest.mark.parametrize(
        ("opened", "bundle", "words"),
        [
            (segmenter(), True, "was built by code, which a MONAI bundle cannot hold"),
            (segmenter(model=trained(Segmenter(), seed=1)), False, "adapted another network than this one"),
        ],
    )
    def test_what_cannot_be_is_one_line(self, output, tmp_path, opened, bundle, words):
        with pytest.raises((SettingError, StateError), match=words):
            export(output, opened, tmp_path / "new", bundle=bundle)
        assert not (tmp_path / "new").exists()

    def test_a_folder_that_holds_something_is_not_touched(self, output, tmp_path):
        for target in (tmp_path / "in", tmp_path / "in" / "case_0.png"):
            with pytest.raises(SettingError, match="is there already and not empty; choose another folder"):
                export(output, segmenter(), target)

    def test_a_place_where_nothing_can_be_written(self, output):
        from pathlib import Path

        with pytest.raises(StateError, match="cannot be written"):
            export(output, segmenter(), Path("/sys/adapted"))

    def test_adaptors_cannot_be_taken_out(self, tmp_path, images):
        from dltta.models.io.checkpoint import Reconstructions
        from dltta.models.parts.autoencoders import UNET_LEVELS, AutoEncoders

        shapes = {"image": (1, 32, 32), "output": (3, 32, 32)}
        autoencoders = AutoEncoders(shapes, width=8)
        opened = checkpoint(tmp_path / "model", reconstructions=Reconstructions(autoencoders, UNET_LEVELS, (4, 8, 16)))
        run(opened, images, tmp_path / "out", method="atta", rate="fixed", alpha=1e-4, guard=False)
        with pytest.raises(SettingError, match="which a plain network cannot hold"):
            export(tmp_path / "out", opened, tmp_path / "new")
