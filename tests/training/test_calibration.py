"""What a network does on its own site, against loops."""

import numpy as np
import pytest
import torch

import networks
from dltta.models.calibration import Calibration
from dltta.training.calibration import answer_ranges, calibrate
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


def test_answer_ranges_by_hand():
    first = torch.tensor([[[0.9, 0.7], [0.1, 0.3]]])
    second = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]])
    found = answer_ranges([first, second])
    assert found["images"] == 2
    assert np.allclose(found["shares"], [[0.5, 0.8], [0.2, 0.5]])
    assert found["marginal_entropy"] == pytest.approx(-(0.8 * np.log(0.8) + 0.2 * np.log(0.2)))


def test_calibration_looks_and_leaves_the_network_alone():
    model = trained(networks.Segmenter())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = calibrate(model, IMAGES)
    assert found.answers["images"] == 12
    assert found.answers["jitter"] > 0
    assert found.answers["discrepancy"] > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(layer._forward_pre_hooks for layer in model.modules())


def test_a_network_without_batch_normalization_has_no_layers_to_look_at():
    found = calibrate(trained(networks.Segmenter(kind="instance")), IMAGES[:3])
    assert found.layers == {}
    assert found.answers["jitter"] == 0
    assert found.answers["discrepancy"] is None
