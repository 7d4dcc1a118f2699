"""Methods and rates from outside: with state, networks of their own, their own prediction; gradient-aware rates."""

import copy
import math

import pytest
import torch

import networks
from dltta import Adapter, Fixed, MemoryBank, Proportional
from dltta.core.gradients import differentiated, displaced
from dltta.errors import NonFiniteError, SettingError
from dltta.models.statistics import Running
from dltta.objectives import PTBN, Tent
from dltta.testing import check_objective, check_rate
from methods import Annotated, GradientNorm, LayerWise, Lookahead, MeanTeacher, Prototypes
from networks import stream, trained

IMAGES = stream((1, 1, 8, 8), 6)
NORMS = ("encoder.1.weight", "encoder.1.bias", "bottleneck.1.weight", "bottleneck.1.bias")


def teaching(rate=0.5, **options):
    return Adapter(trained(networks.Segmenter()), MeanTeacher(), Fixed(rate), **options)


def tensors(adapter):
    """All that a mean-teacher adapter may change, copied."""
    teacher, generator = adapter.objective.teacher.state_dict(), adapter.objective.generator.get_state()
    return [value.clone() for value in (*adapter.model.state_dict().values(), *teacher.values(), generator)]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


# a method with a teacher


def test_a_mean_teacher_and_prototypes_keep_the_contract():
    check_objective(MeanTeacher(), trained(networks.Segmenter()), torch.cat(IMAGES[:3]))
    check_objective(MeanTeacher(), trained(networks.Classifier()), torch.cat(IMAGES[:3]))
    check_objective(Prototypes(), trained(networks.Classifier()), torch.cat(IMAGES[:3]))


def batch_normalized(x, weight, bias, eps=1e-5):
    """By the statistics of the batch, channel by channel."""
    out = torch.empty_like(x)
    for c in range(x.shape[1]):
        values = x[:, c]
        mean = values.sum() / values.numel()
        variance = ((values - mean) ** 2).sum() / values.numel()
        out[:, c] = (values - mean) / (variance + eps) ** 0.5 * weight[c] + bias[c]
    return out


def slow_forward(weights, x):
    """`networks.Segmenter` written out."""
    x = torch.nn.functional.conv2d(x, weights["encoder.0.weight"], weights["encoder.0.bias"], padding=1)
    x = torch.tanh(batch_normalized(x, weights["encoder.1.weight"], weights["encoder.1.bias"]))
    x = torch.nn.functional.avg_pool2d(x, 2)
    x = torch.nn.functional.conv2d(x, weights["bottleneck.0.weight"], weights["bottleneck.0.bias"], padding=1)
    x = torch.tanh(batch_normalized(x, weights["bottleneck.1.weight"], weights["bottleneck.1.bias"]))
    x = x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    return torch.nn.functional.conv2d(x, weights["head.weight"], weights["head.bias"])


def slow_mean_teacher(images, rate, momentum=0.9, restored=0.2):
    """The same method in plain loops, in double precision; the teacher's logits of every step."""
    source = {name: p.detach().double() for name, p in trained(networks.Segmenter()).named_parameters()}
    student, teacher = dict(source), dict(source)
    generator = torch.Generator().manual_seed(0)
    given = []
    for x in images:
        x = x.double()
        moving = {name: student[name].clone().requires_grad_(True) for name in NORMS}
        columns = torch.arange(7, -1, -1)
        mirrored = slow_forward(teacher, x[..., columns]).softmax(1)[..., columns]
        wanted = (slow_forward(teacher, x).softmax(1) + mirrored) / 2
        log_p = slow_forward({**student, **moving}, x).log_softmax(1)
        loss = -(wanted * log_p).sum(1).mean()
        loss.backward()
        for name in NORMS:
            student[name] = student[name] - rate * moving[name].grad
        for name in teacher:
            teacher[name] = momentum * teacher[name] + (1 - momentum) * student[name]
        for name in NORMS:
            drawn = torch.rand(student[name].shape, generator=generator)
            values = [s if d < restored else v for s, v, d in zip(source[name], student[name], drawn, strict=True)]
            student[name] = torch.stack(values)
        given.append(slow_forward(teacher, x).detach())
    return given


def test_a_mean_teacher_equals_its_slow_reference():
    model = trained(networks.Segmenter()).double()
    adapter = Adapter(model, MeanTeacher(), Fixed(0.5))
    expected = slow_mean_teacher(IMAGES, 0.5)
    for x, logits in zip(IMAGES, expected, strict=True):
        torch.testing.assert_close(adapter(x), logits, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(adapter.predict(IMAGES[0]), adapter.model(IMAGES[0].double()), atol=1e-3)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_mean_teacher_resumes_bit_for_bit_at_every_point(optimizer):
    def make():
        return teaching(optimizer=optimizer, steps=2)

    whole = make()
    expected = [whole(x) for x in IMAGES]
    for stop in range(len(IMAGES)):
        first, second = make(), make()
        for x in IMAGES[:stop]:
            first.step(x)
        second.step(IMAGES[-1])  # something to overwrite
        second.load_state_dict(first.state_dict())
        assert same([second(x) for x in IMAGES[stop:]], expected[stop:])


def test_a_saved_state_does_not_change_with_later_steps():
    adapter = teaching()
    adapter.step(IMAGES[0])
    saved = adapter.state_dict()
    kept = copy.deepcopy(saved["_extra_state"]["objective"]["teacher"])
    adapter.step(IMAGES[1])
    now = saved["_extra_state"]["objective"]["teacher"]
    assert all(torch.equal(kept[name], now[name]) for name in kept)


def test_reset_brings_the_teacher_and_its_generator_back():
    adapter = teaching()
    start = tensors(adapter)
    first = [adapter(x) for x in IMAGES]
    assert not same(tensors(adapter), start)
    adapter.reset()
    assert same(tensors(adapter), start)
    assert same([adapter(x) for x in IMAGES], first)


def test_image_specific_steps_begin_with_the_teacher_of_the_source():
    adapter = teaching(mode="image-specific")
    for x in IMAGES[:3]:
        fresh = teaching()
        assert torch.equal(adapter(x), fresh(x))


class Failing(MeanTeacher):
    """Draws and averages, and then predicts what is no number."""

    broken = False

    def predict(self, model, x, logits):
        return super().predict(model, x, logits) * (math.nan if self.broken else 1)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_step_that_raises_leaves_teacher_and_generator_as_they_were(steps):
    adapter = Adapter(trained(networks.Segmenter()), Failing(), Fixed(0.5), steps=steps)
    adapter.step(IMAGES[0])
    before = tensors(adapter)
    adapter.objective.broken = True
    with pytest.raises(NonFiniteError, match="scan: the prediction has NaN"):
        adapter.step(IMAGES[1], case="scan")
    assert same(tensors(adapter), before)
    assert adapter.batches_seen == 1


def test_a_prediction_of_another_shape_is_refused():
    class Cut(MeanTeacher):
        def predict(self, model, x, logits):
            return logits[:, :2]

    with pytest.raises(SettingError, match=r"Cut.predict gives \(1, 2, 8, 8\), logits have \(1, 3, 8, 8\)"):
        Adapter(trained(networks.Segmenter()), Cut(), Fixed(0.5)).step(IMAGES[0])


@pytest.mark.parametrize("statistics", [None, Running(0.5)])
def test_converting_the_adapter_takes_the_teacher_along(statistics):
    def make(model):
        objective = MeanTeacher() if statistics is None else MeanTeacher(statistics)
        return Adapter(model, objective, Fixed(0.5))

    adapter = make(trained(networks.Segmenter()))
    adapter.step(IMAGES[0])
    adapter.to(torch.float64)
    assert {p.dtype for p in adapter.objective.teacher.parameters()} == {torch.float64}
    assert adapter(IMAGES[1]).dtype == torch.float64
    adapter.reset()
    fresh = make(trained(networks.Segmenter()).double())
    for x in IMAGES[:3]:
        torch.testing.assert_close(adapter(x), fresh(x))


def test_reading_a_prediction_changes_neither_teacher_nor_generator():
    adapter = teaching()
    adapter.step(IMAGES[0])
    before = tensors(adapter)
    assert torch.equal(adapter.predict(IMAGES[1]), adapter.predict(IMAGES[1]))
    assert same(tensors(adapter), before)


def test_the_memory_compares_the_networks_own_predictions_also_with_a_teacher():
    memory = MemoryBank(capacity=2, neighbors=1, ready="neighbors")
    adapter = Adapter(trained(networks.Segmenter()), MeanTeacher(), Proportional(0.5), memory=memory)
    adapter.step(IMAGES[0])
    with torch.no_grad():
        own = adapter.model(IMAGES[0]).softmax(1)
    assert not torch.allclose(adapter.predict(IMAGES[0]).softmax(1), own)
    torch.testing.assert_close(adapter.memory.state_dict()["values"][0], own[0])


# a method that looks at the images first


class Brightness(Tent):
    """Starts every batch with a shift that fits it, and counts them."""

    def __init__(self):
        super().__init__()
        object.__setattr__(self, "met", [])

    def before_batch(self, model, x):
        model.encoder[1].bias.fill_(x.mean().item())
        self.met.append(x.mean().item())

    def state_dict(self):
        return {"met": self.met}

    def load_state_dict(self, state):
        self.met[:] = state["met"]


def test_a_method_meets_each_batch_once_before_the_first_pass():
    adapter = Adapter(trained(networks.Segmenter()), Brightness(), Fixed(0.0), steps=2)
    for x in IMAGES[:2]:
        adapter.step(x)
        assert torch.equal(adapter.model.encoder[1].bias, torch.full((4,), x.mean().item()))
    assert adapter.objective.met == [x.mean().item() for x in IMAGES[:2]]


def test_what_a_method_did_before_a_batch_that_fails_is_undone():
    adapter = Adapter(trained(networks.Segmenter()), Brightness(), Fixed(0.0))
    adapter.step(IMAGES[0])
    adapter.rate = lambda signals: math.nan
    with pytest.raises(NonFiniteError):
        adapter.step(IMAGES[1])
    assert torch.equal(adapter.model.encoder[1].bias, torch.full((4,), IMAGES[0].mean().item()))
    assert len(adapter.objective.met) == 1


# a method with a gradient of its own


class Quadratic(torch.nn.Module):
    """Logits w for any image."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([2.0, -1.0, 0.5]))

    def forward(self, x):
        return self.w.expand(len(x), 3)


class CubeAhead:
    """The loss Σ w³; its gradient 3 w² is taken at w + 1."""

    fails = False

    def prepare(self, model):
        return [model.w]

    def __call__(self, model, x, logits):
        return logits[0].pow(3).sum()

    def gradient(self, model, x, logits, parameters):
        with displaced(parameters, [torch.ones(3)]):
            loss, gradient = differentiated(self(model, x, model(x)), parameters)
            if self.fails:
                raise RuntimeError("out of paper")
        return loss, gradient


def test_a_gradient_from_elsewhere_is_applied_here_by_hand():
    adapter = Adapter(Quadratic(), CubeAhead(), Fixed(0.01))
    step = adapter.step(torch.zeros(1, 1))
    assert step.loss == pytest.approx(27 + 0 + 1.5**3)  # at (3, 0, 1.5)
    torch.testing.assert_close(adapter.model.w.detach(), torch.tensor([2 - 0.27, -1.0, 0.5 - 0.0675]))


def test_a_gradient_of_its_own_keeps_the_contract():
    for network in (networks.Segmenter, networks.Classifier):
        check_objective(Lookahead(), trained(network()), torch.cat(IMAGES[:3]))


def test_a_gradient_that_fails_leaves_the_parameters_as_they_were():
    adapter = Adapter(Quadratic(), CubeAhead(), Fixed(0.01))
    adapter.objective.fails = True
    with pytest.raises(RuntimeError, match="out of paper"):
        adapter.step(torch.zeros(1, 1))
    assert torch.equal(adapter.model.w, Quadratic().w)


def test_displaced_parameters_return_bit_for_bit_and_none_stays():
    parameters = [torch.nn.Parameter(torch.tensor([0.1, 1e8])), torch.nn.Parameter(torch.tensor([3.0]))]
    with displaced(parameters, [torch.tensor([1e8, 0.1]), None]):
        assert parameters[0].tolist() == [1e8, 1e8]
        assert parameters[1].tolist() == [3.0]
    assert torch.equal(parameters[0], torch.tensor([0.1, 1e8]))


class Short(Lookahead):
    def gradient(self, model, x, logits, parameters):
        loss, gradient = super().gradient(model, x, logits, parameters)
        return loss, gradient[:-1]


class Staying(Lookahead):
    def gradient(self, model, x, logits, parameters):
        found = super().gradient(model, x, logits, parameters)
        with torch.no_grad():
            parameters[0].add_(1)
        return found


class Random(Lookahead):
    def gradient(self, model, x, logits, parameters):
        loss, gradient = super().gradient(model, x, logits, parameters)
        return loss, [part * torch.rand(()) for part in gradient]


@pytest.mark.parametrize(
    ("objective", "words"), [(Short, "one for each of 4"), (Staying, "leave the network"), (Random, "give the same")]
)
def test_gradients_that_break_the_contract_are_caught(objective, words):
    with pytest.raises(AssertionError, match=words):
        check_objective(objective(), trained(networks.Segmenter()), IMAGES[0])


def test_too_few_gradients_are_refused():
    with pytest.raises(SettingError, match="Short gives 3 gradients for 4 parameters"):
        Adapter(trained(networks.Segmenter()), Short(), Fixed(0.1)).step(IMAGES[0])


class Elsewhere(Tent):
    """Also looks at other images on its way."""

    def __call__(self, model, x, logits):
        model(x + 3)
        return super().__call__(model, x, logits)


def test_passes_of_a_loss_do_not_count_for_the_statistics_of_the_stream():
    ours, plain = (
        Adapter(trained(networks.Segmenter()), objective(Running(0.5)), Fixed(0.1), predict="before")
        for objective in (Elsewhere, Tent)
    )
    for x in IMAGES:
        assert torch.equal(ours(x), plain(x))


# a method without a loss


def test_prototypes_by_hand():
    class Logits(torch.nn.Module):
        def forward(self, x):
            return x

    adapter = Adapter(Logits(), Prototypes())
    certain, uncertain = torch.tensor([[4.0, 0.0]]), torch.tensor([[0.1, 0.0]])
    first = adapter(certain)  # class 0 is now the mean of (1, 0) and (4, 0), in the direction (1, 0)
    torch.testing.assert_close(first, torch.tensor([[1.0, 0.0]]))
    adapter(torch.tensor([[3.0, 4.0]]))  # class 1: (0, 1) + (3, 4) = (3, 5)
    length = math.sqrt(34)
    torch.testing.assert_close(adapter(uncertain), torch.tensor([[1.0, 3 / length]]))
    assert adapter.objective.counts.tolist() == [2.0, 2.0]  # the uncertain one was not learned from
    assert torch.equal(adapter.predict(certain), adapter.predict(certain))
    assert adapter.objective.counts.tolist() == [2.0, 2.0]  # nor is what is only predicted


def test_prototypes_resume_reset_and_can_be_read_without_a_trace():
    def make():
        return Adapter(trained(networks.Classifier()), Prototypes())

    images = stream((3, 1, 8, 8), 5)
    whole = make()
    expected = [whole(x) for x in images]
    plain = Adapter(trained(networks.Classifier()), PTBN())
    assert not torch.allclose(expected[-1], plain(images[-1]))
    for stop in range(len(images)):
        first, second = make(), make()
        for x in images[:stop]:
            first.step(x)
            first.predict(images[-1])
        second.load_state_dict(first.state_dict())
        assert same([second(x) for x in images[stop:]], expected[stop:])
    whole.reset()
    assert same([whole(x) for x in images], expected)


class Averaging(Tent):
    """Predicts the mean over an image and its mirror image: one more pass through the adapted network."""

    def predict(self, model, x, logits):
        return (logits + model(x.flip(-1) + 3).flip(-1)) / 2


def test_passes_of_a_prediction_do_not_count_for_the_statistics_of_the_stream():
    ours, plain = (
        Adapter(trained(networks.Segmenter()), objective(Running(0.5)), Fixed(0.1)) for objective in (Averaging, Tent)
    )
    for x in IMAGES:
        assert not torch.equal(ours(x), plain(x))
        assert all(map(torch.equal, ours.model.state_dict().values(), plain.model.state_dict().values()))


# rates


def tent(rate, **options):
    return Adapter(trained(networks.Segmenter()), Tent(), rate, **options)


def first_gradient(x):
    """Of Tent's loss at the source, by name."""
    adapter = tent(Fixed(0.0))
    loss = Tent()(adapter.model, x, adapter.model(x))
    named = adapter.adapted_parameters()
    return loss.item(), dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


@pytest.mark.parametrize("rate", [GradientNorm(), Annotated(), LayerWise(), lambda d: 0.1 if d is None else d])
def test_rates_from_outside_keep_the_contract(rate):
    check_rate(rate)


def test_a_rate_is_asked_with_the_gradient_of_this_image():
    loss, gradient = first_gradient(IMAGES[0])
    length = math.sqrt(sum(part.square().sum().item() for part in gradient.values()))
    step = tent(GradientNorm(0.1)).step(IMAGES[0])
    assert step.rate == pytest.approx(0.1 / (1 + length), rel=1e-6)
    assert tent(Annotated()).step(IMAGES[0]).rate == pytest.approx(0.1 * loss, rel=1e-6)


def test_signals_are_those_of_the_moment_before_the_update():
    asked = []

    def rate(signals):
        asked.append({name: value.clone() for name, value in signals.parameters.items()})
        assert set(signals.gradient) == set(signals.parameters) == set(NORMS)
        assert signals.images.shape == (1, 1, 8, 8)
        assert not signals.logits.requires_grad
        with torch.no_grad():
            torch.testing.assert_close(signals.model(signals.images), signals.logits)
        return 0.5

    adapter = tent(rate, steps=2)
    before = {name: p.detach().clone() for name, p in adapter.adapted_parameters().items()}
    adapter.step(IMAGES[0])
    assert len(asked) == 2
    assert all(torch.equal(asked[0][name], before[name]) for name in before)
    assert not any(torch.equal(asked[1][name], before[name]) for name in before)


def test_a_rate_is_not_asked_about_a_gradient_that_is_no_number():
    asked = []

    class Broken(Tent):
        def __call__(self, model, x, logits):
            return super().__call__(model, x, logits) * math.nan

    adapter = Adapter(trained(networks.Segmenter()), Broken(), lambda d: asked.append(d) or 0.1)
    with pytest.raises(NonFiniteError, match="the loss is nan"):
        adapter.step(IMAGES[0])
    assert asked == []


def test_a_plain_function_of_the_discrepancy_still_works():
    memory = MemoryBank(capacity=2, neighbors=1, ready="neighbors")
    adapter = tent(lambda d: 0.25 if d is None else 0.1 * d, memory=memory)
    first, second = adapter.step(IMAGES[0]), adapter.step(IMAGES[1])
    assert (first.discrepancy, first.rate) == (None, 0.25)
    assert second.rate == pytest.approx(0.1 * second.discrepancy)


def test_signals_are_recognized_by_name_and_by_type_however_it_is_written():
    from dltta.core.rates import takes_signals

    def quoted(known: "Signals"): ...  # noqa: F821

    def dotted(known: "dltta.core.rates.Signals"): ...  # noqa: F821

    def other(known: "MySignals"): ...  # noqa: F821

    def nothing(): ...

    assert [takes_signals(rate) for rate in (quoted, dotted, Annotated(), GradientNorm())] == [True] * 4
    assert [takes_signals(rate) for rate in (other, nothing, lambda d: d, Fixed(0.1), max)] == [False] * 5


def test_a_rate_for_each_parameter_with_plain_gradient_descent_by_hand():
    _, gradient = first_gradient(IMAGES[0])
    adapter = tent(LayerWise())
    before = {name: p.detach().clone() for name, p in adapter.adapted_parameters().items()}
    step = adapter.step(IMAGES[0])
    rates = {name: 0.5 * gradient[name].norm().item() for name in NORMS}
    assert len({round(rate, 6) for rate in rates.values()}) == 4
    for name, parameter in adapter.adapted_parameters().items():
        torch.testing.assert_close(parameter.detach(), before[name] - rates[name] * gradient[name])
    assert step.rate == pytest.approx(sum(rates.values()) / 4)


def test_a_rate_for_each_parameter_with_adam_by_hand():
    """The first step of Adam is the rate times the sign of the gradient, but for its epsilon."""
    _, gradient = first_gradient(IMAGES[0])
    adapter = tent(LayerWise(), optimizer=torch.optim.Adam)
    before = {name: p.detach().clone() for name, p in adapter.adapted_parameters().items()}
    adapter.step(IMAGES[0])
    for name, parameter in adapter.adapted_parameters().items():
        moved = 0.5 * gradient[name].norm().item() * gradient[name] / (gradient[name].abs() + 1e-8)
        torch.testing.assert_close(parameter.detach(), before[name] - moved)


def test_rates_belong_to_parameters_however_the_optimizer_orders_its_groups():
    straight, turned = tent(LayerWise()), tent(LayerWise(), optimizer=lambda groups: torch.optim.SGD(groups[::-1]))
    for x in IMAGES[:3]:
        assert torch.equal(straight(x), turned(x))


def test_a_stream_with_a_rate_for_each_parameter_resumes():
    def make():
        return tent(LayerWise(), optimizer=torch.optim.Adam)

    whole, first, second = make(), make(), make()
    expected = [whole(x) for x in IMAGES]
    for x in IMAGES[:3]:
        first.step(x)
    second.load_state_dict(first.state_dict())
    assert same([second(x) for x in IMAGES[3:]], expected[3:])


def test_too_few_rates_are_refused():
    class Short(LayerWise):
        def __call__(self, signals):
            return [0.1]

    with pytest.raises(SettingError, match="Short gives 1 rates for 4 adapted parameters"):
        tent(Short()).step(IMAGES[0])


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, lambda p: torch.optim.SGD([{"params": p[:1]}, {"params": p[1:]}])]
)
def test_a_single_rate_reaches_every_group(optimizer):
    assert torch.equal(tent(Fixed(0.3), optimizer=optimizer)(IMAGES[0]), tent(Fixed(0.3))(IMAGES[0]))


# nothing to learn, and collapse


class Choosy(MeanTeacher):
    """Learns from bright images only."""

    def __call__(self, model, x, logits):
        return super().__call__(model, x, logits) if x.mean() > 0 else logits.new_zeros(())


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("predict", ["after", "before"])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, weight_decay=0.1),
    ],
)
def test_a_loss_without_a_graph_moves_nothing_and_asks_no_rate(optimizer, predict, steps):
    asked = []
    adapter = Adapter(
        trained(networks.Segmenter()),
        Choosy(),
        lambda d: asked.append(d) or 0.1,
        optimizer=optimizer,
        predict=predict,
        steps=steps,
    )
    learned = adapter.step(IMAGES[1] + 5)
    assert learned.rate == 0.1
    before, momenta = tensors(adapter), copy.deepcopy(adapter.get_extra_state()["optimizer"])
    step = adapter.step(IMAGES[1] - 5)
    assert len(asked) == steps
    assert [(update.loss, update.rate) for update in step.updates] == [(0.0, 0.0)] * steps
    assert same(tensors(adapter), before)  # the teacher and its generator too
    after = adapter.get_extra_state()["optimizer"]
    for mine, theirs in zip(after["state"].values(), momenta["state"].values(), strict=True):
        assert all(torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(theirs[key])) for key in theirs)
    assert torch.equal(step.logits, adapter.predict(IMAGES[1] - 5))


class Collapsing(Tent):
    """Counts its losses and gives up at the third."""

    count = 0

    def __call__(self, model, x, logits):
        object.__setattr__(self, "count", self.count + 1)
        return super().__call__(model, x, logits)

    def collapsed(self):
        return self.count == 3

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        object.__setattr__(self, "count", state["count"])


def test_a_collapsed_network_returns_to_the_source_with_optimizer_and_objective():
    def make():
        return Adapter(
            trained(networks.Segmenter()),
            Collapsing(),
            Fixed(0.1),
            optimizer=lambda p: torch.optim.SGD(p, momentum=0.9),
            predict="before",
        )

    adapter = make()
    source = [p.detach().clone() for p in adapter.adapted_parameters().values()]
    for x in IMAGES[:3]:
        adapter.step(x)
    assert same([p.detach() for p in adapter.adapted_parameters().values()], source)
    assert adapter.objective.count == 0
    fresh = make()
    for x in IMAGES[3:]:
        assert torch.equal(adapter(x), fresh(x))
