"""What a source model does on source images, against loops."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

import networks
from dltta import Adapter, Fixed
from dltta.core.objectives.eata import EATA
from dltta.data.preprocessing import Preprocessing
from dltta.errors import SettingError
from dltta.models.calibration import Calibration, LayerSamples, OODScore
from dltta.models.io.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from dltta.models.nets.architecture import Architecture
from dltta.models.normalization import use_test_statistics
from dltta.training.calibration import (
    calibrate,
    entropy_levels,
    negative,
    noise,
    ood_levels,
    prediction_ranges,
    shuffled,
)
from networks import stream, trained

IMAGES = [x[0] for x in stream((1, 1, 8, 8), 12)]


def test_layers_see_each_image_by_hand():
    model = trained(networks.Segmenter())
    norms = [(name, m) for name, m in model.named_modules() if isinstance(m, torch.nn.BatchNorm2d)]
    first, layer = norms[0]
    inputs = []
    handle = layer.register_forward_pre_hook(lambda m, args: inputs.append(args[0].detach().numpy()))
    with torch.no_grad():
        for image in IMAGES:
            model(image[None])
    handle.remove()
    found = calibrate(model, IMAGES)
    assert list(found.layers) == [name for name, _ in norms]
    means, variances = found.layers[first]
    for i, x in enumerate(inputs):
        for c in range(x.shape[1]):
            assert means[i, c].item() == pytest.approx(x[0, c].mean(), rel=1e-4, abs=1e-6)
            assert variances[i, c].item() == pytest.approx(x[0, c].var(), rel=1e-4)
    assert found.eps[first] == layer.eps


def test_moments_of_single_images_by_hand():
    means, variances = torch.tensor([[1.0], [3.0]]), torch.tensor([[1.0], [np.e - 0.5]])
    found = Calibration({"n": (means, variances)}, {"n": 0.5}).moments()["n"]
    logs = [np.log(1.5), np.log(np.e)]
    assert found.mean.item() == 2.0
    assert found.mean_spread.item() == pytest.approx(np.sqrt(2))
    assert found.log_variance.item() == pytest.approx(np.mean(logs))
    assert found.log_variance_spread.item() == pytest.approx(np.std(logs, ddof=1))


def test_moments_of_batches_are_those_of_images_put_together():
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(40, 500, generator=generator) * 2 + torch.randn(40, 1, generator=generator) * 3
    parts = images.mean(1)[:, None], images.var(1, correction=0)[:, None]
    found = Calibration({"n": parts}, {"n": 1e-5}).moments(batch_size=10)["n"]
    draws = np.random.default_rng(0).integers(40, size=(2000, 10))
    batches = images.numpy()[draws].reshape(2000, -1)
    assert found.mean.item() == pytest.approx(batches.mean(1).mean(), abs=0.15)
    assert found.mean_spread.item() == pytest.approx(batches.mean(1).std(), rel=0.15)
    assert found.log_variance.item() == pytest.approx(np.log(batches.var(1)).mean(), abs=0.1)
    assert found.log_variance_spread.item() == pytest.approx(np.log(batches.var(1)).std(), rel=0.15)


def test_prediction_ranges_by_hand():
    first = torch.tensor([[[0.9, 0.7], [0.1, 0.3]]])
    second = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]])
    found = prediction_ranges([first, second])
    assert found["images"] == 2
    assert np.allclose(found["shares"], [[0.5, 0.8], [0.2, 0.5]])
    assert found["marginal_entropy"] == pytest.approx(-(0.8 * np.log(0.8) + 0.2 * np.log(0.2)))


def parts(model, image):
    samples = LayerSamples()
    with torch.no_grad(), samples.watching(model):
        model(image[None])
    return samples.stacked()


def score(image_parts, others, eps):
    """Per layer, the slow way: mean over channels and over mean and log variance of squared standard deviations."""
    rows = []
    for name, (mean, variance) in image_parts.items():
        found = []
        for c in range(mean.shape[1]):
            means = np.array([part[name][0][0, c].item() for part in others])
            logs = np.log(np.array([part[name][1][0, c].item() for part in others]) + eps[name])
            found.append(((mean[0, c].item() - means.mean()) / means.std(ddof=1)) ** 2)
            found.append(((np.log(variance[0, c].item() + eps[name]) - logs.mean()) / logs.std(ddof=1)) ** 2)
        rows.append(np.mean(found))
    return np.array(rows)


def test_ood_score_is_the_mean_square_of_deviations_from_source_images():
    model = trained(networks.Segmenter())
    found = calibrate(model, IMAGES)
    source = [parts(model, image) for image in IMAGES]
    other = stream((2, 1, 8, 8), 1, seed=9)[0] * 3
    samples = LayerSamples()
    with torch.no_grad(), samples.watching(model):
        model(other)
    measured = OODScore(found)(samples.stacked())
    assert measured.shape == (2, 2)  # layers, images
    for i, image in enumerate(other):
        np.testing.assert_allclose(measured[:, i], score(parts(model, image), source, found.eps), rtol=1e-3)


def test_every_source_image_is_measured_against_the_others():
    model = trained(networks.Segmenter())
    found = calibrate(model, IMAGES)
    source = [parts(model, image) for image in IMAGES]
    slow = np.array(
        [score(one, source[:i] + source[i + 1 :], found.eps) for i, one in enumerate(source)]
    )  # (N, layers)
    assert found.predictions["ood_score"]["first"] == pytest.approx(np.quantile(slow[:, 0], 0.95), rel=1e-3)
    middle = np.sort(slow, axis=1)[:, 0]  # of two layers torch's median is the lower
    assert found.predictions["ood_score"]["usual"] == pytest.approx(np.quantile(middle, 0.95), rel=1e-3)


def test_negatives_and_noise_have_the_scores_of_loops():
    model = trained(networks.Segmenter())
    found = calibrate(model, IMAGES)
    source = [parts(model, image) for image in IMAGES]
    each = [min(score(parts(model, negative(image)), source, found.eps)) for image in IMAGES]
    assert ood_levels(model, IMAGES, found)["negative"] == pytest.approx(np.sort(each)[5], rel=1e-3)
    each = [min(score(parts(model, noise(image)), source, found.eps)) for image in IMAGES]
    assert ood_levels(model, IMAGES, found)["noise"] == pytest.approx(np.sort(each)[5], rel=1e-3)


def test_noise_has_the_range_of_each_channel():
    image = torch.stack([torch.linspace(0, 1, 64).view(8, 8), torch.linspace(5, 9, 64).view(8, 8)])
    drawn = noise(image)
    assert drawn.shape == image.shape
    assert 0 <= drawn[0].min() < 0.1
    assert 0.9 < drawn[0].max() <= 1
    assert 5 <= drawn[1].min() < 5.4
    assert 8.6 < drawn[1].max() <= 9
    assert torch.equal(drawn, noise(image))


def test_entropy_is_that_under_instance_statistics():
    model = trained(networks.Segmenter())
    batch = trained(networks.Segmenter())
    for layer in batch.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None

    def entropies(images):
        with torch.no_grad():
            p = [batch(image[None]).softmax(1).numpy() for image in images]
        return [-(x * np.log(x)).sum(1).mean() for x in p]

    found = entropy_levels(model, IMAGES)
    source = entropies(IMAGES)
    assert found["median"] == pytest.approx(np.sort(source)[5], rel=1e-4)
    assert found["usual"] == pytest.approx(np.quantile(source, 0.95), rel=1e-4)
    assert found["shuffled"] == pytest.approx(np.sort(entropies(map(shuffled, IMAGES)))[5], rel=1e-4)


def test_negative_and_shuffled_by_hand():
    image = torch.tensor([[[0.0, 1.0], [3.0, 3.0]], [[5.0, 5.0], [5.0, 7.0]]])
    assert negative(image).tolist() == [[[3.0, 2.0], [0.0, 0.0]], [[7.0, 7.0], [7.0, 5.0]]]
    mixed = shuffled(torch.arange(32.0).view(2, 4, 4))
    assert sorted(mixed[0].flatten().tolist()) == list(range(16))
    assert torch.equal(mixed[1], mixed[0] + 16)  # channels stay together
    assert not torch.equal(mixed[0].flatten(), torch.arange(16.0))


def test_a_calibration_of_another_network_is_refused():
    found = calibrate(trained(networks.Segmenter()), IMAGES)
    with pytest.raises(SettingError, match="knows nothing of layer 'head'"):
        OODScore(found)({"head": (torch.zeros(1, 4), torch.ones(1, 4))})


def test_too_few_images_and_whole_images_have_less_to_say():
    few = calibrate(trained(networks.Segmenter()), IMAGES[:7]).predictions
    assert (few["ood_score"], few["entropy"]) == (None, None)
    whole = calibrate(trained(networks.Classifier()), IMAGES).predictions
    assert whole["entropy"] is None
    assert whole["ood_score"]["usual"] > 0


def test_calibration_looks_and_leaves_the_network_alone():
    model = trained(networks.Segmenter())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = calibrate(model, IMAGES)
    assert found.predictions["images"] == 12
    assert found.predictions["discrepancy"] > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(layer._forward_pre_hooks for layer in model.modules())


def test_a_network_without_batch_normalization_has_no_layers_to_look_at():
    found = calibrate(trained(networks.Segmenter(kind="instance")), IMAGES[:3])
    assert found.layers == {}
    assert found.predictions["ood_score"] is None
    assert found.predictions["discrepancy"] is None


# Fisher information


def squared_gradients(model, x):
    """Of the cross-entropy to the network's own classes, by parameter name, with batch statistics."""
    network = copy.deepcopy(model)
    use_test_statistics(network)
    named = {name: p for name, p in network.named_parameters() if name.split(".")[1] == "1"}
    logits = network(x)
    loss = torch.nn.functional.cross_entropy(logits, logits.argmax(1))
    return {n: g.square() for n, g in zip(named, torch.autograd.grad(loss, list(named.values())), strict=True)}


def test_fisher_information_of_dense_predictions_is_of_single_images():
    model = trained(networks.Segmenter())
    found = calibrate(model, IMAGES[:3]).fisher
    parts = [squared_gradients(model, image[None]) for image in IMAGES[:3]]
    assert set(found) == {"encoder.1.weight", "encoder.1.bias", "bottleneck.1.weight", "bottleneck.1.bias"}
    for name, value in found.items():
        torch.testing.assert_close(value, sum(part[name] for part in parts) / 3)


def test_fisher_information_of_whole_images_is_of_batches_and_one_left_over_is_left_out():
    model = trained(networks.Classifier())
    images = [x[0] for x in stream((1, 1, 8, 8), 33)]
    found = calibrate(model, images).fisher
    parts = [squared_gradients(model, torch.stack(images[i : i + 16])) for i in (0, 16)]
    for name, value in found.items():
        torch.testing.assert_close(value, (parts[0][name] + parts[1][name]) / 2)
    assert calibrate(model, images[:1]).fisher.keys() == found.keys()


def test_fisher_information_where_the_deepest_layer_has_one_position():
    model = trained(networks.Segmenter())
    small = [x[0] for x in stream((1, 1, 2, 2), 3)]
    assert all(value.isfinite().all() for value in calibrate(model, small).fisher.values())


def test_a_network_without_scale_and_shift_has_no_fisher_information():
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3, padding=1), torch.nn.InstanceNorm2d(2), torch.nn.Conv2d(2, 2, 1)
    )
    assert calibrate(model, IMAGES[:2]).fisher == {}


def test_a_model_folder_keeps_the_fisher_information_and_older_folders_lack_it(tmp_path):
    architecture = Architecture("unet", 2, 1, 2, {"width": 2})
    model = architecture.build(seed=0)
    images = [x[0] for x in stream((1, 1, 32, 32), 2)]
    calibration = calibrate(model.eval(), images)
    assert calibration.fisher
    checkpoint = Checkpoint(model, architecture, "segmentation", ("a", "b"), Preprocessing(), calibration=calibration)
    save_checkpoint(tmp_path / "new", checkpoint)
    loaded = load_checkpoint(tmp_path / "new").calibration
    assert loaded.checksum() == calibration.checksum()
    assert all(torch.equal(loaded.fisher[name], value) for name, value in calibration.fisher.items())
    older = replace(calibration, fisher={})
    assert older.checksum() != calibration.checksum()
    save_checkpoint(tmp_path / "old", replace(checkpoint, calibration=older))
    assert load_checkpoint(tmp_path / "old").calibration.fisher == {}
    Adapter(model, EATA(fisher=loaded.fisher), Fixed(1e-3)).step(images[0][None])
