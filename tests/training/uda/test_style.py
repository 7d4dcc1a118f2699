"""UDA-ST: what style and content are, restyling moves the one and keeps the other, and what is trained on it."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

from dltta import Adapter
from dltta.config import make_uda
from dltta.data.preprocessing import IMAGENET_MEAN, IMAGENET_SD, Preprocessing
from dltta.errors import InputError, SettingError, StateError
from dltta.models.nets.architecture import Architecture
from dltta.models.nets.style import (
    VGG_LAYERS,
    Perception,
    PerceptualLayers,
    Restyling,
    Style,
    content_loss,
    gram,
    style_loss,
    style_of,
    through_encoder,
    through_vgg,
)
from dltta.models.nets.vgg import load_vgg19, vgg19
from dltta.objectives import Source
from dltta.training.uda import UDATraining
from dltta.training.uda.style import Rounds, StyleTransfer, couples
from frames import Stop, frame, same, stop_at, untrained
from sites import Blobs, Locked

LAYERS = PerceptualLayers(("0", "2"), "2")


def small_network():
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1))


def small_perception():
    return Perception(through_encoder(small_network(), LAYERS), LAYERS, {"0": 0.5, "2": 2.0})


def test_gram_matrix_by_hand():
    features = torch.tensor([[[[1.0, 2.0]], [[3.0, -1.0]]]])  # two channels at two positions
    assert gram(features).tolist() == [[[2.5, 0.5], [0.5, 5.0]]]  # (1 + 4)/2, (3 - 2)/2, (9 + 1)/2


@pytest.mark.parametrize("positions", [(5,), (3, 4), (2, 3, 4)])
def test_gram_matrix_agrees_with_loops(positions):
    features = torch.randn(2, 3, *positions)
    flat = features.reshape(2, 3, -1).numpy()
    expected = np.zeros((2, 3, 3))
    for b in range(2):
        for i in range(3):
            for j in range(3):
                expected[b, i, j] = np.mean([flat[b, i, k] * flat[b, j, k] for k in range(flat.shape[2])])
    np.testing.assert_allclose(gram(features).numpy(), expected, rtol=1e-5, atol=1e-6)


def test_style_loss_by_hand():
    one = torch.tensor([[[[1.0, 1.0]], [[0.0, 2.0]]]])  # Gram [[1, 1], [1, 2]]
    two = torch.full((1, 1, 1, 3), 2.0)  # Gram [[4]]
    wanted = Style({"one": torch.zeros(2, 2), "two": torch.ones(1, 1)}, 0, 1)
    # (1 + 1 + 1 + 4) / (4 · 2²) = 0.4375 and (4 - 1)² / (4 · 1²) = 2.25
    assert style_loss({"one": one, "two": two}, wanted).item() == pytest.approx((0.4375 + 2.25) / 2)


def test_style_loss_is_the_papers_where_image_and_style_have_one_size():
    """Eq. 4: G is a sum over M positions, the loss has 1 / (4 N² M²)."""
    features, other = torch.randn(1, 3, 4, 5), torch.randn(1, 3, 4, 5)
    loss = 0.0
    for i in range(3):
        for j in range(3):
            g, a = ((x[0, i].flatten() @ x[0, j].flatten()).item() for x in (features, other))
            loss += (g - a) ** 2 / (4 * 3**2 * 20**2)
    wanted = Style({"layer": gram(other)[0]}, 0, 1)
    assert style_loss({"layer": features}, wanted).item() == pytest.approx(loss, rel=1e-4)


def test_content_loss_by_hand():
    assert content_loss(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([1.0, 0.0, 2.0])).item() == 6.5  # (0 + 4 + 9) / 2


def test_mean_style_is_the_mean_of_gram_matrices_and_the_widest_range():
    first, second = Style({"0": torch.tensor([[1.0]])}, -1.0, 2.0), Style({"0": torch.tensor([[3.0]])}, 0.0, 5.0)
    mean = Style.mean([first, second])
    assert (mean.grams["0"].item(), mean.low, mean.high) == (2.0, -1.0, 5.0)
    with pytest.raises(InputError, match="no image"):
        Style.mean([])


def test_features_are_scaled_by_their_mean_activation():
    network = small_network()
    look = through_encoder(network, LAYERS)
    images = [torch.randn(1, 6, 6) * (1 + index) for index in range(3)]
    seen = Perception.measured(look, LAYERS, images)(torch.stack(images))
    assert {layer: found.abs().mean().item() for layer, found in seen.items()} == pytest.approx({"0": 1.0, "2": 1.0})


@pytest.mark.parametrize("optimizer", ["lbfgs", "adam"])
def test_restyling_lowers_the_style_loss_and_keeps_the_content(optimizer):
    perception = small_perception()
    image, other = torch.rand(1, 12, 12), torch.rand(1, 10, 14) * 0.5 + 0.5
    wanted = style_of(perception, other)
    restyled = Restyling(style_weight=1e2, iterations=30, optimizer=optimizer)(perception, image, wanted)

    def losses(x):
        features = perception(x[None])
        return style_loss(features, wanted).item(), content_loss(features["2"], perception(image[None])["2"]).item()

    assert restyled.shape == image.shape
    assert losses(restyled)[0] < 0.3 * losses(image)[0]
    assert losses(restyled)[1] < 0.3 * losses(torch.rand(1, 12, 12))[1]  # what another image would have
    held = Restyling(style_weight=1e-3, iterations=30, optimizer=optimizer, rate=1e-3)(perception, image, wanted)
    assert losses(held)[1] < losses(restyled)[1]  # a smaller weight changes the content less


def test_restyled_intensities_stay_in_the_range_of_image_and_style():
    perception = small_perception()
    image, other = torch.rand(1, 8, 8), torch.rand(1, 8, 8) * 3 - 1
    restyled = Restyling(style_weight=1e4, iterations=40, optimizer="adam", rate=0.5)(
        perception, image, style_of(perception, other)
    )
    assert other.min() <= restyled.min() < image.min()
    assert image.max() < restyled.max() <= other.max()


def test_restyling_works_where_gradients_are_off_and_leaves_none_in_the_network():
    network = small_network()
    perception = Perception(through_encoder(network, LAYERS), LAYERS, {"0": 1.0, "2": 1.0})
    image, restyling = torch.rand(1, 8, 8), Restyling(iterations=3)
    style = style_of(perception, torch.rand(1, 8, 8))
    usual = restyling(perception, image, style)
    with torch.no_grad():
        assert torch.equal(restyling(perception, image, style), usual)
    with torch.inference_mode():
        assert torch.equal(restyling(perception, image.clone(), style), usual)
    assert not usual.requires_grad
    assert not torch.equal(usual, image)
    assert all(parameter.grad is None for parameter in network.parameters())


def test_the_encoder_is_run_no_further_than_its_last_layer():
    def fail(*_):
        raise AssertionError("the layer behind was run")

    network = small_network()
    network[3].register_forward_pre_hook(fail)
    assert set(through_encoder(network, LAYERS)(torch.rand(1, 1, 6, 6))) == {"0", "2"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optimizer": "sgd"}, "'lbfgs' or 'adam'"),
        ({"iterations": 0}, "at least 1"),
        ({"style_weight": 0.0}, "must be positive"),
        ({"direction": "sideways"}, "'to-target' or 'to-source'"),
        ({"start": "target"}, "'new' or 'source'"),
    ],
)
def test_impossible_settings(settings, words):
    with pytest.raises(SettingError, match=words):
        StyleTransfer(**settings)


# ---- VGG-19


@pytest.fixture(scope="module")
def vgg_file(tmp_path_factory):
    """A state dict as torchvision lays it out, with random weights and a classifier that is of no use here."""
    torch.manual_seed(5)
    tensors = {f"features.{name}": value for name, value in vgg19().state_dict().items()}
    path = tmp_path_factory.mktemp("vgg") / "vgg19.pth"
    torch.save({**tensors, "classifier.0.weight": torch.zeros(2, 2)}, path)
    return path


def test_vgg_has_torchvisions_layout(vgg_file):
    shapes = {name: tuple(value.shape) for name, value in vgg19().state_dict().items() if name.endswith("weight")}
    blocks = {0: (3, 64), 2: (64, 64), 5: (64, 128), 7: (128, 128), 10: (128, 256), 12: (256, 256), 14: (256, 256)}
    blocks |= {16: (256, 256), 19: (256, 512), 21: (512, 512), 23: (512, 512), 25: (512, 512), 28: (512, 512)}
    assert shapes == {f"{number}.weight": (after, before, 3, 3) for number, (before, after) in blocks.items()}
    loaded, saved = load_vgg19(vgg_file), torch.load(vgg_file, weights_only=True)
    assert torch.equal(loaded[28].weight, saved["features.28.weight"])
    assert [type(loaded[int(layer)]) for layer in VGG_LAYERS.all] == [nn.ReLU] * 6


def test_vgg_also_comes_as_safetensors_and_wrong_files_are_named(vgg_file, tmp_path):
    from safetensors.torch import save_file

    saved = torch.load(vgg_file, weights_only=True)
    save_file(saved, tmp_path / "vgg.safetensors")
    assert torch.equal(load_vgg19(tmp_path / "vgg.safetensors")[0].bias, saved["features.0.bias"])
    del saved["features.10.bias"]
    torch.save(saved, tmp_path / "part.pth")
    with pytest.raises(StateError, match="1 tensors are missing or of another shape, the first 'features.10.bias'"):
        load_vgg19(tmp_path / "part.pth")
    (tmp_path / "text.pth").write_text("weights")
    with pytest.raises(StateError, match="is damaged or holds more than tensors"):
        load_vgg19(tmp_path / "text.pth")
    with pytest.raises(StateError, match="cannot be read"):
        load_vgg19(tmp_path / "absent.pth")


def test_vgg_sees_grey_images_in_three_channels_as_imagenet_did(vgg_file):
    network, image = load_vgg19(vgg_file), torch.rand(2, 1, 16, 16) * 4 - 1
    seen = through_vgg(network, VGG_LAYERS, -1.0, 3.0)(image)["1"]
    grey = (image + 1) / 4
    channels = [(grey - mean) / sd for mean, sd in zip(IMAGENET_MEAN, IMAGENET_SD, strict=True)]
    assert torch.allclose(seen, network[0](torch.cat(channels, 1)).relu(), atol=1e-5)
    with pytest.raises(InputError, match="1 or 3 channels, these have 2"):
        through_vgg(network, VGG_LAYERS, 0, 1)(torch.rand(1, 2, 16, 16))


def test_vgg_looks_at_volumes_slice_by_slice(vgg_file):
    look, volume = through_vgg(load_vgg19(vgg_file), VGG_LAYERS, 0, 1), torch.rand(2, 1, 16, 16, 3)
    seen = look(volume)["6"]
    assert seen.shape == (2, 128, 8, 8, 3)
    assert torch.allclose(seen[1, ..., 2], look(volume[1:, ..., 2])["6"][0], atol=1e-5)


# ---- the method


@dataclass(frozen=True)
class Inverted:
    """The same anatomy in another light: dark on bright, with less contrast."""

    dataset: Blobs
    site: str = "there"

    task = property(lambda self: self.dataset.task)
    classes = property(lambda self: self.dataset.classes)

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        case = self.dataset[index]
        return replace(case, site=self.site, image=2.5 - 0.7 * case.image)


def training(folder, method, *, axes=2, **options):
    """Four source images, three dark on bright whose labels must not be read; the source model knows nothing."""
    targets = [Locked(Inverted(Blobs(count=3, axes=axes)))]
    return frame(folder, method, axes=axes, **{"targets": targets, "source": untrained(axes), **options})


def test_every_target_image_lends_its_style_equally_often():
    drawn = couples(11, 4, seed=0)
    assert sorted(drawn.count(target) for target in range(4)) == [2, 3, 3, 3]
    assert drawn == couples(11, 4, seed=0)
    assert drawn != couples(11, 4, seed=1)


@pytest.mark.parametrize(("count", "parts"), [(7, 3), (3, 3), (10, 10), (23, 10)])
def test_rounds_see_every_image_once(count, parts):
    rounds, seen = Rounds(count, parts), []
    for rounds.epoch in range(1, parts + 1):
        seen += [int(rounds[index]) for index in range(len(rounds))]
    assert sorted(seen) == list(range(count))


def test_a_network_is_trained_on_restyled_source_images(tmp_path):
    checkpoint = training(tmp_path, StyleTransfer(iterations=5), epochs=2).run()
    rows = [row for row in checkpoint.record["history"] if row["stage"] == "style"]
    assert len(rows) == 4  # images, one each round
    assert all(row["style"] < 0.5 * row["before"] for row in rows)
    assert [row["epoch"] for row in checkpoint.record["history"] if row["stage"] == "task"] == [1, 2]
    assert checkpoint.record["perception"] == "the source model's encoder"
    assert checkpoint.record["uda"]["method"] == "uda-st"


def test_restyled_images_keep_their_labels_and_are_not_preprocessed_twice(tmp_path, monkeypatch):
    seen = []
    train_source = UDATraining.train_source

    def watch(self, sites, name, start=None):
        seen.append((name, [sites[0][i] for i in range(len(sites[0]))], self.preprocessing, start))
        return train_source(self, sites, name, start)

    monkeypatch.setattr(UDATraining, "train_source", watch)
    half = Preprocessing("scale", 2.0)
    method = StyleTransfer(iterations=1, style_weight=1e-9)  # next to no weight on style
    given = replace(training(tmp_path, method, source=None), preprocessing=half)
    checkpoint = given.run()
    (source, _, first, _), (name, cases, second, start) = seen
    assert (source, name, first, second, start) == ("source", "restyled", half, Preprocessing(), None)
    assert checkpoint.preprocessing == half
    for index, case in enumerate(cases):
        assert torch.equal(case.label, Blobs()[index].label)
        assert torch.allclose(case.image, Blobs()[index].image / 2, atol=1e-4)


def test_training_can_begin_with_the_source_network_and_have_its_own_length(tmp_path):
    source = untrained()
    torch.nn.init.constant_(source.model.final_conv.bias, 3.0)
    method = StyleTransfer(iterations=1, start="source", epochs=1)
    checkpoint = training(tmp_path, method, source=source, epochs=3, learning_rate=1e-12).run()
    assert torch.allclose(checkpoint.model.final_conv.bias, torch.tensor(3.0))
    assert [row["epoch"] for row in checkpoint.record["history"] if row["stage"] == "task"] == [1]


@pytest.mark.parametrize("moment", [("style", 2, 1), ("style", 4, 1), ("task", 2, 1)])
def test_a_killed_training_resumes_to_the_same_bits(tmp_path, moment):
    method = StyleTransfer(iterations=2)
    whole = training(tmp_path / "whole", method, epochs=2).run()
    with pytest.raises(Stop):
        training(tmp_path / "killed", method, epochs=2, report=stop_at(*moment)).run()
    restyled_again = []
    resumed = training(
        tmp_path / "killed", method, epochs=2, resume=True, report=lambda plan, *at: restyled_again.append(plan.stage)
    ).run()
    assert same(whole.model, resumed.model)
    assert restyled_again.count("style") == {("style", 2, 1): 3, ("style", 4, 1): 1, ("task", 2, 1): 0}[moment]
    for one, other in zip(whole.record["history"], resumed.record["history"], strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}


def test_the_other_direction_leaves_a_network_that_restyles_what_it_is_shown(tmp_path):
    given = training(tmp_path, StyleTransfer(direction="to-source", iterations=5))
    model = given.run().model
    x = torch.stack([Inverted(Blobs())[index].image for index in range(2)])
    with torch.no_grad():
        logits, restyled = model(x), model.restyle(x)
        assert torch.equal(logits, untrained().model(restyled))
    for before, after in zip(x, restyled, strict=True):
        far, near = (style_loss(model.perception(image[None]), model.style) for image in (before, after))
        assert near < 0.5 * far
    assert torch.equal(Adapter(model, Source(), layout="given").step(x).logits, logits)
    expected = Style.mean([style_of(model.perception, image) for image, _ in given.domains.source.pairs])
    assert torch.allclose(model.style.grams["down_4"], expected.grams["down_4"], rtol=1e-4)
    assert (model.style.low, model.style.high) == (expected.low, expected.high)


def test_restyling_networks_can_carry_vgg_with_them(tmp_path, vgg_file):
    checkpoint = training(tmp_path, StyleTransfer(direction="to-source", vgg=str(vgg_file), iterations=1)).run()
    assert checkpoint.record["perception"] == "VGG-19 from vgg19.pth"
    assert torch.equal(checkpoint.model.vgg[0].weight, load_vgg19(vgg_file)[0].weight)
    assert checkpoint.model.restyling.style_weight == 1e4


@pytest.mark.parametrize("direction", ["to-target", "to-source"])
def test_volumes(tmp_path, direction):
    site = Blobs(axes=3, size=16, count=3)
    given = training(tmp_path, StyleTransfer(direction, iterations=1), axes=3, size=16, targets=[Inverted(site)])
    assert given.run().model(site[0].image[None]).shape == (1, 2, 16, 16, 16)


def test_classifiers(tmp_path):
    site = Blobs("classification", count=4)
    architecture = Architecture("densenet_small", 2, 1, 2, {"width": 8, "growth": 4})
    given = training(tmp_path, StyleTransfer(iterations=1), targets=[Inverted(site)], source=None)
    checkpoint = replace(given, sites=[site], architecture=architecture).run()
    assert checkpoint.model(site[0].image[None]).shape == (1, 2)


def test_settings_take_a_file_of_vgg_weights_and_a_wrong_name_fails_before_any_training(vgg_file):
    method = make_uda("uda-st", {"vgg": str(vgg_file)})
    assert (method.vgg, method.restyling.style_weight) == (str(vgg_file), 1e4)
    with pytest.raises(SettingError, match=r"vgg of uda-st: no file .*absent.pth; give the state dict"):
        make_uda("uda-st", {"vgg": str(vgg_file.with_name("absent.pth"))})


def test_networks_whose_encoder_is_unknown_need_vgg():
    with pytest.raises(SettingError, match="does not know the encoder of 'resnet'"):
        StyleTransfer().layers(Architecture("resnet", 2, 1, 2))
