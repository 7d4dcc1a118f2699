"""InTEnt: scores and weights by hand, one prediction against a slow reference with torch's own layers, refusals."""

import copy
import math

import numpy as np
import pytest
import torch

import networks
from dltta import Adapter, Fixed
from dltta.core.objectives.intent import InTEnt, as_logits, balanced_entropy, mixture_weights
from dltta.errors import InputError, NothingToAdaptError, SettingError
from dltta.objectives import PTBN, Source
from dltta.testing import check_objective
from networks import stream, trained

NETWORKS = {
    "2-D": (lambda: networks.Segmenter(2), (1, 1, 8, 12)),
    "2-D batch": (lambda: networks.Segmenter(2), (3, 1, 8, 8)),
    "binary": (lambda: networks.Segmenter(2, classes=2), (1, 1, 8, 8)),
    "sigmoid": (lambda: networks.Segmenter(2, classes=1), (2, 1, 8, 8)),
    "3-D": (lambda: networks.Segmenter(3), (2, 1, 8, 8, 4)),
    "classification": (networks.Classifier, (3, 1, 8, 8)),
}
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def bits(p):
    return 0.0 if p in (0.0, 1.0) else -(p * math.log2(p) + (1 - p) * math.log2(1 - p))


def test_balanced_entropy_of_two_classes_by_hand():
    foreground = torch.tensor([[0.5, 0.25, 0.1, 0.0]])
    p = torch.stack([1 - foreground, foreground], dim=1)
    background = (bits(0.25) + bits(0.1) + 0) / 3
    assert balanced_entropy(p).item() == pytest.approx((background + 1.0) / 2, abs=1e-6)  # 0.5 is foreground
    none = torch.tensor([[0.25, 0.1]])
    p = torch.stack([1 - none, none], dim=1)
    assert balanced_entropy(p).item() == pytest.approx((bits(0.25) + bits(0.1)) / 2, abs=1e-6)
    p = torch.stack([none, 1 - none], dim=1)  # no background
    assert balanced_entropy(p).item() == pytest.approx((bits(0.25) + bits(0.1)) / 2, abs=1e-6)


def test_balanced_entropy_of_three_classes_by_hand():
    p = torch.tensor([[[0.5, 1.0, 0.25], [0.5, 0.0, 0.25], [0.0, 0.0, 0.5]]])  # classes 0, 0, 2
    expected = ((math.log(2) / math.log(3) + 0) / 2 + 1.5 * math.log(2) / math.log(3)) / 2
    assert balanced_entropy(p).item() == pytest.approx(expected, abs=1e-6)


def test_the_most_certain_mixture_weighs_e_times_the_least():
    weights = mixture_weights(torch.tensor([[-0.9], [-0.1], [-0.5]]), 1.0)[:, 0]
    e = math.e
    expected = torch.tensor([1, e, math.sqrt(e)]) / (1 + e + math.sqrt(e))
    torch.testing.assert_close(weights, expected)
    assert mixture_weights(torch.tensor([[-0.9], [-0.1]]), 0.5)[1, 0].item() == pytest.approx(e**2 / (1 + e**2))


def test_equal_scores_weigh_the_same():
    assert mixture_weights(torch.full((4, 2), -0.3), 1.0).tolist() == [[0.25, 0.25]] * 4


def test_logits_give_back_their_probabilities():
    p = torch.tensor([[[0.9], [0.1]]])
    torch.testing.assert_close(as_logits(p, torch.zeros(1, 1, 1)).sigmoid(), p[:, 1:])
    torch.testing.assert_close(as_logits(p, torch.zeros(1, 2, 1)).softmax(1), p)
    assert as_logits(torch.tensor([[1.0, 0.0]]), torch.zeros(1, 2)).isfinite().all()


def norms(model):
    return [layer for layer in model.modules() if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm)]


def softmax(logits):
    if logits.shape[1] == 1:
        logits = np.concatenate([np.zeros_like(logits), logits], axis=1)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def slow_intent(model, x):
    """Mixed probabilities (B, C, …): torch's own layers in training and evaluation mode, then numpy loops."""
    test = copy.deepcopy(model).double().train()
    for layer in norms(test):
        layer.momentum = 1.0
    test.apply(lambda layer: layer.eval() if isinstance(layer, torch.nn.Dropout) else None)
    with torch.no_grad():
        test(x.double())
        predictions = []
        for share in SHARES:
            mixed = copy.deepcopy(model).double().eval()
            for ours, theirs in zip(norms(mixed), norms(test), strict=True):
                ours.running_mean.mul_(1 - share).add_(share * theirs.running_mean)
                ours.running_var.mul_(1 - share).add_(share * theirs.running_var)
            predictions.append(softmax(mixed(x.double()).numpy()))
    result = np.zeros_like(predictions[0])
    for image in range(len(x)):
        scores = []
        for p in predictions:
            of_class = {}
            for column in p[image].reshape(p.shape[1], -1).T:
                h = -sum(v * math.log(v) for v in column if v > 0) / math.log(len(column))
                of_class.setdefault(int(column.argmax()), []).append(h)
            scores.append(-np.mean([np.mean(values) for values in of_class.values()]))
        scores = (np.array(scores) - min(scores)) / (max(scores) - min(scores))
        weights = np.exp(scores) / np.exp(scores).sum()
        result[image] = sum(w * p[image] for w, p in zip(weights, predictions, strict=True))
    return torch.from_numpy(result).float()


@pytest.mark.parametrize("name", NETWORKS)
def test_prediction_agrees_with_the_slow_reference(name):
    build, shape = NETWORKS[name]
    model = trained(build())
    adapter = Adapter(model, InTEnt())
    for x in stream(shape, 3):
        logits = adapter(x)
        p = logits.softmax(1) if logits.shape[1] > 1 else torch.cat([1 - logits.sigmoid(), logits.sigmoid()], 1)
        torch.testing.assert_close(p, slow_intent(model, x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_intent_keeps_the_contract(name):
    build, shape = NETWORKS[name]
    check_objective(InTEnt(), trained(build()), stream(shape, 1)[0])


def test_without_a_mixture_it_is_the_source_model():
    model = trained(networks.Segmenter())
    x = stream((2, 1, 8, 8), 1)[0]
    source = Adapter(model, Source())(x)
    torch.testing.assert_close(Adapter(model, InTEnt(shares=(0.0,)))(x).softmax(1), source.softmax(1))
    test = Adapter(model, PTBN())(x).softmax(1)
    whole = Adapter(model, InTEnt(shares=(1.0,)))(x).softmax(1)
    torch.testing.assert_close(whole, test, atol=0.02, rtol=0)  # but for the unbiased variance
    assert not torch.allclose(whole, test, atol=1e-6)
    assert not torch.allclose(whole, source.softmax(1), atol=0.05)


def test_images_before_leave_no_trace():
    images = stream((1, 1, 8, 8), 3)
    adapter = Adapter(trained(networks.Segmenter()), InTEnt())
    last = [adapter(x) for x in images][-1]
    assert torch.equal(Adapter(trained(networks.Segmenter()), InTEnt())(images[-1]), last)


@pytest.mark.parametrize("kind", ["instance", "group"])
def test_a_network_without_stored_statistics_is_refused(kind):
    with pytest.raises(NothingToAdaptError, match="InTEnt finds no statistics to mix in Segmenter"):
        Adapter(networks.Segmenter(kind=kind), InTEnt())


def test_a_rate_has_nothing_to_decide():
    with pytest.raises(SettingError, match="takes no gradient step"):
        Adapter(networks.Segmenter(), InTEnt(), Fixed(0.1))


def test_wrong_settings_are_refused():
    for settings in ({"shares": ()}, {"shares": (0.5, 1.5)}, {"temperature": 0.0}):
        with pytest.raises(SettingError):
            InTEnt(**settings)


def test_one_value_per_channel_has_no_statistics_and_nothing_stays_behind():
    model = trained(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)))
    adapter = Adapter(model, InTEnt())
    with pytest.raises(InputError, match="layer '1' gets a single value"):
        adapter.step(torch.ones(1, 2))
    with torch.no_grad():
        assert torch.equal(adapter.model(torch.ones(1, 2)), model(torch.ones(1, 2)))
