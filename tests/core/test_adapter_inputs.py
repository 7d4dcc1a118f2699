"""Bad input gives a clear error that names the case, and leaves the adapter exactly as it was."""

import math

import pytest
import torch
from torch import nn

from dltta import Adapter, Fixed, MemoryBank, Proportional
from dltta.errors import DlttaError, InputError, NonFiniteError, SettingError
from dltta.objectives import Tent
from networks import Classifier, Segmenter, stream, trained

GOOD = torch.ones(1, 1, 8, 8)


def holed(value):
    x = GOOD.clone()
    x[0, 0, 3, 3] = value
    return x


def warm(**options):
    """An adapter in the middle of a stream, with momentum and a full memory."""
    settings = {"memory": MemoryBank(capacity=3, neighbors=2), "optimizer": torch.optim.Adam, **options}
    adapter = Adapter(
        trained(Segmenter()), settings.pop("objective", Tent()), settings.pop("rate", Proportional(0.1)), **settings
    )
    for x in stream((1, 1, 8, 8), 5):
        adapter.step(x)
    return adapter


def assert_unchanged_by(adapter, x, error, words):
    future = stream((1, 1, 8, 8), 2, seed=9)
    saved = adapter.state_dict()
    with pytest.raises(error, match=words) as caught:
        adapter.step(x, case="patient_7")
    assert isinstance(caught.value, DlttaError)
    assert str(caught.value).startswith("patient_7: ")
    after = [adapter.step(x).logits for x in future]
    adapter.load_state_dict(saved)
    assert all(map(torch.equal, after, [adapter.step(x).logits for x in future]))


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (holed(math.nan), "1 of 64 input values are NaN or infinite"),
        (holed(math.inf), "1 of 64 input values are NaN or infinite"),
        (torch.ones(1, 1, 8, 8, dtype=torch.int64), r"floating-point tensor, got torch\.int64"),
        (torch.ones(0, 1, 8, 8), r"non-empty batch .* got shape \(0, 1, 8, 8\)"),
        (torch.ones(1, 3, 8, 8), r"cannot take images of shape \(3, 8, 8\)"),
        (torch.ones(1, 1, 8), r"cannot take images of shape \(1, 8\)"),
        (torch.ones(5), "non-empty batch"),
        ([[1.0]], "floating-point tensor, got list"),
        (torch.ones(1, 1, 16, 16), r"features have 384 elements but those in memory have 96; .*pool="),
    ],
)
def test_bad_images_are_refused_and_change_nothing(x, words):
    assert_unchanged_by(warm(), x, InputError, words)


class Diverging:
    """Tent until the image is bright, then a loss that is not a number."""

    def __init__(self, value=math.nan):
        self.value = value

    def prepare(self, model):
        return Tent().prepare(model)

    def __call__(self, model, x, logits):
        loss = Tent()(model, x, logits)
        return loss * self.value if x.mean() > 50 else loss


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_changes_nothing(value):
    assert_unchanged_by(warm(objective=Diverging(value)), GOOD * 100, NonFiniteError, "the loss is")


class Growing:
    """A rate that remembers how often it was asked."""

    def __init__(self):
        self.asked = 0

    def __call__(self, discrepancy):
        self.asked += 1
        return 0.01 * self.asked

    def state_dict(self):
        return {"asked": self.asked}

    def load_state_dict(self, state):
        self.asked = state["asked"]


def test_a_failed_step_leaves_the_state_of_the_rate_alone():
    adapter = warm(objective=Diverging(), rate=Growing())
    assert_unchanged_by(adapter, GOOD * 100, NonFiniteError, "the loss is")
    adapter = warm(objective=Diverging(), rate=Growing())
    with pytest.raises(NonFiniteError):
        adapter.step(GOOD * 100)
    assert adapter.rate.asked == 5


class Kinked(Diverging):
    """A finite loss whose gradient is infinite: the root of zero."""

    def __call__(self, model, x, logits):
        loss = Tent()(model, x, logits)
        return loss if x.mean() < 50 else (loss * 0).sqrt()


def test_a_gradient_that_is_not_finite_changes_nothing():
    assert_unchanged_by(warm(objective=Kinked()), GOOD * 100, NonFiniteError, "gradient")


def test_an_update_after_which_the_prediction_is_not_finite_is_undone():
    adapter = warm(objective=Diverging(1e6), rate=Fixed(0.1), optimizer=torch.optim.SGD)
    adapter.rate = Fixed(1e38)  # 1e38 times a gradient times 1e6 is beyond float32
    saved = adapter.state_dict()
    with pytest.raises(NonFiniteError, match=r"batch 6 of the stream: the prediction has NaN"):
        adapter.step(stream((1, 1, 8, 8), 1)[0] + 100)
    after = adapter.state_dict()
    assert all(torch.equal(saved[k], after[k]) for k in saved if isinstance(saved[k], torch.Tensor))
    assert after["_extra_state"]["batches_seen"] == saved["_extra_state"]["batches_seen"] == 5
    assert all(map(torch.equal, saved["_extra_state"]["memory"]["values"], after["_extra_state"]["memory"]["values"]))


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1.0])
def test_a_rate_that_is_not_finite_or_negative_is_refused(rate):
    adapter = Adapter(trained(Segmenter()), Tent(), lambda discrepancy: rate)
    with pytest.raises(NonFiniteError, match="learning rate is"):
        adapter.step(GOOD * torch.rand(1, 1, 8, 8))


def test_one_value_per_channel_has_no_batch_statistics():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    adapter = Adapter(model, Tent(), Fixed(0.1))
    adapter.step(torch.randn(3, 4))
    with pytest.raises(InputError, match=r"case_1: layer '1' gets a single value per channel.*larger batch"):
        adapter.step(torch.randn(1, 4), case="case_1")


def test_a_network_that_returns_several_things_says_what_to_do():
    class Pair(Segmenter):
        def forward(self, x):
            return super().forward(x), x

    with pytest.raises(SettingError, match="returns a tuple.*wrap it"):
        Adapter(Pair(), Tent(), Fixed(0.1)).step(GOOD)


def test_a_layer_that_is_not_run_or_gives_no_tensor_says_so():
    class Odd(Classifier):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(1, 1)

    adapter = Adapter(Odd(), Tent(), Fixed(0.1), memory=MemoryBank("unused", capacity=2, neighbors=1))
    with pytest.raises(SettingError, match="'unused' was not run"):
        adapter.step(GOOD)


def test_interruption_in_the_middle_of_a_step_undoes_it():
    class Interrupted(Diverging):
        def __call__(self, model, x, logits):
            if x.mean() > 50:
                raise KeyboardInterrupt
            return Tent()(model, x, logits)

    adapter = warm(objective=Interrupted(), steps=2)
    saved = adapter.state_dict()
    with pytest.raises(KeyboardInterrupt):
        adapter.step(GOOD * 100)
    after = adapter.state_dict()
    assert all(torch.equal(saved[k], after[k]) for k in saved if isinstance(saved[k], torch.Tensor))


def test_images_of_different_size_share_a_pooled_memory():
    adapter = Adapter(
        trained(Segmenter()),
        Tent(),
        Proportional(0.1),
        memory=MemoryBank(capacity=4, neighbors=2, ready="neighbors", pool=2),
    )
    sizes = [8, 8, 12, 12, 8, 12]
    steps = [adapter.step(torch.randn(1, 1, size, size)) for size in sizes]
    assert [step.discrepancy is None for step in steps] == [True, True, True, True, False, False]
    assert [step.logits.shape[-1] for step in steps] == sizes
