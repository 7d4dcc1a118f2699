"""Algorithm 1: every step against the slow reference, counted passes, modes, precision and isolation."""

import copy

import pytest
import torch
from torch import nn

import networks
from dltta import Adapter, Exponential, Fixed, MemoryBank, Proportional
from dltta.errors import LayerNotFoundError, NothingToAdaptError, SettingError
from dltta.objectives import PTBN, Source, Tent
from networks import Classifier, Segmenter, stream, trained
from reference import Reference

STREAMS = {
    "2-D batch 1": (lambda: Segmenter(2), "bottleneck", (1, 1, 8, 8), None),
    "2-D batch 3, last smaller": (lambda: Segmenter(2, channels=2), "bottleneck", (3, 2, 8, 6), 2),
    "2-D binary sigmoid": (lambda: Segmenter(2, classes=1), "bottleneck", (1, 1, 8, 8), None),
    "2-D instance norm": (lambda: Segmenter(2, kind="instance"), "bottleneck", (2, 1, 8, 8), 1),
    "3-D batch 1": (lambda: Segmenter(3), "bottleneck", (1, 1, 4, 4, 4), None),
    "3-D group norm batch 2": (lambda: Segmenter(3, kind="group"), "bottleneck", (2, 1, 4, 4, 6), 1),
    "classification batch 5, last smaller": (lambda: Classifier(classes=4), "encoder", (5, 1, 6, 6), 3),
    "classification batch 1": (lambda: Classifier(classes=2), "encoder", (1, 1, 6, 6), None),
}


def memory(layer=None, **options):
    return MemoryBank(layer, **{"capacity": 4, "neighbors": 2, **options})


def tensors(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("rate", [Fixed(0.05), Proportional(0.5, initial=0.02), Exponential(0.02, initial=0.01)])
def test_every_step_agrees_with_the_reference(name, rate, seed):
    make, layer, shape, last = STREAMS[name]
    model = trained(make(), seed)
    bank = memory(layer, capacity=2 * shape[0] + 1, neighbors=2)
    adapter = Adapter(model, Tent(), rate, memory=bank)
    slow = Reference(model, layer, rate, capacity=bank.capacity, neighbors=2)
    ready = 0
    for x in stream(shape, 7, seed, last):
        step = adapter.step(x)
        logits, [(loss, discrepancy, learning_rate)] = slow.step(x)
        ready += discrepancy is not None
        assert step.loss == pytest.approx(loss, abs=1e-5)
        assert step.discrepancy == (None if discrepancy is None else pytest.approx(discrepancy, abs=1e-5))
        assert step.rate == pytest.approx(learning_rate, abs=1e-5)
        torch.testing.assert_close(step.logits, logits, atol=1e-5, rtol=1e-5)
        for ours, theirs in zip(adapter.adapted_parameters().values(), slow.parameters(), strict=True):
            torch.testing.assert_close(ours.detach(), theirs.detach(), atol=1e-5, rtol=1e-5)
    assert ready >= 3  # the discrepancy was compared, not only its absence


@pytest.mark.parametrize(
    "options", [{"distance": "cosine"}, {"ready": "neighbors"}, {"distance": "cosine", "ready": "neighbors"}]
)
def test_options_of_the_memory_agree_with_the_reference(options):
    model = trained(Segmenter(2))
    rate = Proportional(0.5, initial=0.02)
    adapter = Adapter(model, Tent(), rate, memory=memory("bottleneck", **options))
    slow = Reference(model, "bottleneck", rate, capacity=4, neighbors=2, **options)
    for x in stream((1, 1, 8, 8), 8):
        step, (logits, [(_, discrepancy, _)]) = adapter.step(x), slow.step(x)
        assert step.discrepancy == (None if discrepancy is None else pytest.approx(discrepancy, abs=1e-5))
        torch.testing.assert_close(step.logits, logits, atol=1e-5, rtol=1e-5)


def test_several_steps_per_image_agree_with_the_reference():
    model = trained(Segmenter(2))
    rate = Proportional(0.5, initial=0.02)
    adapter = Adapter(model, Tent(), rate, memory=memory("bottleneck"), steps=3)
    slow = Reference(model, "bottleneck", rate, capacity=4, neighbors=2, steps=3)
    for x in stream((1, 1, 8, 8), 7):
        step, (logits, records) = adapter.step(x), slow.step(x)
        torch.testing.assert_close(step.logits, logits, atol=1e-5, rtol=1e-5)
        for update, (loss, discrepancy, learning_rate) in zip(step.updates, records, strict=True):
            assert update.loss == pytest.approx(loss, abs=1e-5)
            assert update.discrepancy == (None if discrepancy is None else pytest.approx(discrepancy, abs=1e-5))
            assert update.rate == pytest.approx(learning_rate, abs=1e-5)


class Line(nn.Module):
    """Logits (0, scale · x + shift): small enough to adapt by hand."""

    def __init__(self):
        super().__init__()
        self.features = nn.Identity()
        self.norm = nn.LayerNorm(1)
        with torch.no_grad():
            self.norm.weight.fill_(1.0)

    def forward(self, x):
        x = self.features(x)
        value = x * self.norm.weight + self.norm.bias
        return torch.cat([torch.zeros_like(value), value], dim=1)


def test_one_step_by_hand():
    # z = 2: p = 1/(1 + e⁻²) = 0.880797; H = 0.365334; dH/dz = −z p (1 − p) = −0.209987; moves weight (·x = 2) and bias
    step = (adapter := Adapter(Line(), Tent(), Fixed(0.1))).step(torch.tensor([[2.0]]))
    assert step.loss == pytest.approx(0.365334, abs=1e-6)
    assert adapter.model.norm.weight.item() == pytest.approx(1 + 0.1 * 0.209987 * 2, abs=1e-6)
    assert adapter.model.norm.bias.item() == pytest.approx(0.1 * 0.209987, abs=1e-6)
    assert step.logits.tolist() == [pytest.approx([0, 2 * 1.0419975 + 0.0209987], abs=1e-5)]  # after the update


def test_discrepancy_and_rate_by_hand():
    # The memory holds v = (1/2, 1/2) from x = 0. For x = 2: v = (0.119203, 0.880797),
    # L_DIV = ½ Σ (v − ½)(ln v − ln ½) = ½ · 0.380797 · ln(0.880797/0.119203) = ½ · 0.380797 · 2 = 0.380797
    bank = MemoryBank("features", capacity=1, neighbors=1)
    adapter = Adapter(Line(), Tent(), Proportional(0.1, initial=0.0), memory=bank)
    first, second = adapter.step(torch.tensor([[0.0]])), adapter.step(torch.tensor([[2.0]]))
    assert (first.discrepancy, first.rate) == (None, 0.0)
    assert second.discrepancy == pytest.approx(0.380797, abs=1e-6)
    assert second.rate == pytest.approx(0.0380797, abs=1e-7)
    assert adapter.model.norm.bias.item() == pytest.approx(0.0380797 * 0.209987, abs=1e-6)  # in this very step


def test_a_sum_over_positions_makes_discrepancy_and_rate_so_many_times_larger():
    found = {}
    for positions in ("mean", "sum"):
        bank = memory("bottleneck", ready="neighbors", positions=positions)
        adapter = Adapter(trained(Segmenter(2)), Tent(), Proportional(1e-9, initial=0.0), memory=bank)
        found[positions] = [adapter.step(x) for x in stream((1, 1, 8, 8), 4)][-1]
    assert found["mean"].discrepancy > 0
    assert found["sum"].discrepancy == pytest.approx(64 * found["mean"].discrepancy, rel=1e-5)
    assert found["sum"].rate == pytest.approx(64 * found["mean"].rate, rel=1e-5)


def test_memory_is_filled_with_the_answer_after_the_update():
    adapter = Adapter(trained(Segmenter()), Tent(), Fixed(0.5), memory=memory("bottleneck"))
    x = stream((1, 1, 8, 8), 1)[0]
    step = adapter.step(x)
    torch.testing.assert_close(adapter.memory._values[0], step.logits[0].softmax(0))
    assert not torch.allclose(adapter.memory._values[0], Adapter(trained(Segmenter()), PTBN())(x)[0].softmax(0))


class Counting(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.inner, self.passes, self.backwards = model, [], []

    def forward(self, x):
        logits = self.inner(x)
        self.passes.append(logits.requires_grad)
        if logits.requires_grad:
            logits.register_hook(lambda gradient: self.backwards.append(1))
        return logits


@pytest.mark.parametrize(("steps", "forward"), [(1, [True, False]), (3, [True, True, True, False])])
@pytest.mark.parametrize("layer", ["inner.bottleneck", None])
def test_a_step_is_two_forward_passes_and_one_backward(steps, forward, layer):
    adapter = Adapter(Counting(trained(Segmenter())), Tent(), Proportional(0.1), memory=memory(layer), steps=steps)
    for x in stream((1, 1, 8, 8), 6):
        adapter.model.passes.clear(), adapter.model.backwards.clear()
        adapter.step(x)
        assert adapter.model.passes == forward  # whether each recorded a graph
        assert len(adapter.model.backwards) == steps


def test_answering_before_the_update_takes_one_pass_and_is_the_unadapted_answer():
    model, x = trained(Segmenter()), stream((1, 1, 8, 8), 1)[0]
    adapter = Adapter(Counting(model), Tent(), Fixed(0.5), predict="before")
    assert torch.equal(adapter.step(x).logits, Adapter(model, PTBN())(x))
    assert adapter.model.passes == [True]
    assert not torch.equal(adapter.step(x).logits, Adapter(model, PTBN())(x))  # the update did happen


@pytest.mark.parametrize("objective", [Source(), PTBN()])
def test_methods_without_a_loss_take_one_pass_without_a_graph(objective):
    adapter = Adapter(Counting(trained(Segmenter())), objective)
    step = adapter.step(stream((1, 1, 8, 8), 1)[0])
    assert adapter.model.passes == [False]
    assert (step.loss, step.discrepancy, step.rate, step.updates) == (None, None, None, ())


def test_frozen_weights_get_no_gradient_and_do_not_move():
    adapter = Adapter(trained(Segmenter()), Tent(), Fixed(0.5))
    before = tensors(adapter.model)
    adapter.step(stream((1, 1, 8, 8), 1)[0])
    after = tensors(adapter.model)
    assert {name for name in before if not torch.equal(before[name], after[name])} == set(adapter.adapted_parameters())
    assert all(parameter.grad is None for parameter in adapter.model.parameters())
    frozen = [p for name, p in adapter.model.named_parameters() if name not in adapter.adapted_parameters()]
    assert frozen
    assert not any(parameter.requires_grad for parameter in frozen)


def test_the_callers_model_memory_and_rate_are_left_alone():
    model, bank = trained(Segmenter()).train(), memory("bottleneck")
    before, flags = tensors(model), [(m.training, type(m)) for m in model.modules()]
    grads = [p.requires_grad for p in model.parameters()]
    adapter = Adapter(model, Tent(), Proportional(0.5), memory=bank)
    for x in stream((1, 1, 8, 8), 6):
        adapter.step(x)
    assert same(tensors(model), before)
    assert flags == [(m.training, type(m)) for m in model.modules()]
    assert grads == [p.requires_grad for p in model.parameters()]
    assert len(bank) == 0
    assert len(adapter.memory) == 4


def test_calling_the_adapter_is_the_step():
    one, other = (Adapter(trained(Segmenter()), Tent(), Fixed(0.1)) for _ in range(2))
    for x in stream((1, 1, 8, 8), 3):
        assert torch.equal(one(x), other.step(x).logits)


@pytest.mark.parametrize("objective", ["Tent", "EveryWeight"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_gradient_contexts_of_the_caller_change_nothing(context, objective):
    def make():
        method = {"Tent": Tent, "EveryWeight": EveryWeight}[objective]()
        return Adapter(trained(Segmenter()), method, Proportional(0.5), memory=memory())

    plain = make()
    expected = [plain.step(x).logits for x in stream((1, 1, 8, 8), 6)]
    with context():
        adapter = make()
        answers = [adapter.step(x.clone()).logits for x in stream((1, 1, 8, 8), 6)]
    assert all(map(torch.equal, answers, expected))
    assert not any(answer.requires_grad for answer in answers)


class EveryWeight:
    """Tent's loss over all parameters: convolutions are what autocast casts, and caches."""

    def prepare(self, model):
        return list(model.parameters())

    def __call__(self, model, x, logits):
        return Tent()(model, x, logits)


def test_autocast_adapts_nearly_like_full_precision_and_sees_the_updated_weights():
    x = stream((1, 1, 8, 8), 1)[0]
    full = Adapter(trained(Segmenter()), EveryWeight(), Fixed(0.5)).step(x)
    adapter = Adapter(trained(Segmenter()), EveryWeight(), Fixed(0.5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = adapter.model(x)
        narrow = adapter.step(x)
    assert narrow.logits.dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 for p in adapter.model.parameters())
    moved = (full.logits - before.float()).abs().mean()
    assert (narrow.logits.float() - full.logits).abs().mean() < 0.2 * moved
    assert narrow.loss == pytest.approx(full.loss, abs=0.02)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_type_of_the_model_is_kept_and_images_follow_it(dtype):
    adapter = Adapter(trained(Segmenter()).to(dtype), Tent(), Proportional(0.1), memory=memory())
    steps = [adapter.step(x) for x in stream((1, 1, 8, 8), 6)]
    assert all(step.logits.dtype == dtype for step in steps)
    assert all(parameter.dtype == dtype for parameter in adapter.model.parameters())
    assert steps[-1].discrepancy is not None


def test_device_of_the_model_is_kept():
    model = trained(Segmenter()).to("meta")
    assert {p.device.type for p in Adapter(model, Tent(), Fixed(0.1)).model.parameters()} == {"meta"}


def test_train_and_eval_of_the_caller_do_not_reach_the_network():
    x = stream((2, 1, 6, 6), 1)[0]
    expected = Adapter(trained(Classifier()), Tent(), Fixed(0.1)).step(x).logits
    assert torch.equal(Adapter(trained(Classifier()), Tent(), Fixed(0.1)).eval().step(x).logits, expected)
    assert torch.equal(Adapter(trained(Classifier()), Tent(), Fixed(0.1)).train().step(x).logits, expected)


def test_image_specific_mode_returns_to_the_source_for_every_image():
    model, images = trained(Segmenter()), stream((1, 1, 8, 8), 4)
    adapter = Adapter(model, Tent(), Fixed(0.3), mode="image-specific", steps=4, optimizer=torch.optim.Adam)
    for x in images:
        alone = Adapter(model, Tent(), Fixed(0.3), steps=4, optimizer=torch.optim.Adam).step(x)
        assert torch.equal(adapter.step(x).logits, alone.logits)


def test_image_specific_mode_keeps_the_memory():
    adapter = Adapter(trained(Segmenter()), Tent(), Proportional(0.3), memory=memory(), mode="image-specific")
    steps = [adapter.step(x) for x in stream((1, 1, 8, 8), 6)]
    assert [step.discrepancy is None for step in steps] == [True] * 4 + [False] * 2


def test_other_optimizers_use_the_rate_of_each_step():
    x = stream((1, 1, 8, 8), 1)[0]
    adapter = Adapter(trained(Segmenter()), Tent(), Fixed(0.125), optimizer=torch.optim.Adam)
    before = {name: p.detach().clone() for name, p in adapter.adapted_parameters().items()}
    adapter.step(x)
    moves = torch.cat([(p.detach() - before[name]).abs() for name, p in adapter.adapted_parameters().items()])
    torch.testing.assert_close(moves, torch.full_like(moves, 0.125), rtol=1e-3, atol=1e-3)  # Adam's first step is ± lr


def test_sgd_is_the_default():
    adapter = Adapter(trained(Segmenter()), Tent(), Fixed(0.1))
    assert type(adapter._optimizer) is torch.optim.SGD
    assert adapter._optimizer.param_groups[0]["momentum"] == 0


def test_tent_moves_scale_and_shift_only():
    names = Adapter(trained(Segmenter()), Tent(), Fixed(0.1)).adapted_parameters()
    assert set(names) == {f"{part}.1.{p}" for part in ("encoder", "bottleneck") for p in ("weight", "bias")}


def test_a_wrong_layer_name_answers_with_the_nearest_right_ones():
    with pytest.raises(LayerNotFoundError, match=r"Segmenter has no layer 'botleneck'; did you mean 'bottleneck'"):
        Adapter(trained(Segmenter()), Tent(), Fixed(0.1), memory=memory("botleneck"))


def test_an_objective_that_names_nothing_fails_at_construction():
    class Idle(EveryWeight):
        def prepare(self, model):
            return []

    with pytest.raises(NothingToAdaptError, match="Idle finds nothing to adapt in Segmenter"):
        Adapter(trained(Segmenter()), Idle(), Fixed(0.1))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((Tent(),), "Tent needs a learning rate"),
        ((Tent, Fixed(0.1)), "Tent is a class; pass an instance"),
        ((object(), Fixed(0.1)), "not an objective"),
        ((PTBN(), Fixed(0.1)), "PTBN takes no gradient step"),
        ((Tent(), Proportional(0.1)), "Proportional follows the discrepancy, which needs memory"),
        ((Tent(), Exponential(0.1)), "needs memory"),
    ],
)
def test_settings_that_make_no_sense_are_refused(arguments, words):
    with pytest.raises(SettingError, match=words):
        Adapter(trained(Segmenter()), *arguments)


@pytest.mark.parametrize("options", [{"steps": 0}, {"mode": "episodic"}, {"predict": "during"}])
def test_unknown_options_are_refused(options):
    with pytest.raises(SettingError, match=next(iter(options))):
        Adapter(trained(Segmenter()), Tent(), Fixed(0.1), **options)


def test_a_plain_function_is_a_rate():
    adapter = Adapter(trained(Segmenter()), Tent(), lambda discrepancy: 0.25)
    assert adapter.step(stream((1, 1, 8, 8), 1)[0]).rate == 0.25


def test_the_network_can_be_a_module_shared_under_two_names():
    model = networks.Segmenter()
    model.alias = model.encoder[1]
    adapter = Adapter(trained(model), Tent(), Fixed(0.1))
    adapter.step(stream((1, 1, 8, 8), 1)[0])
    assert adapter.model.alias is adapter.model.encoder[1]


def test_copies_of_an_adapter_are_independent():
    adapter = Adapter(trained(Segmenter()), Tent(), Proportional(0.5), memory=memory())
    images = stream((1, 1, 8, 8), 7)
    for x in images[:5]:
        adapter.step(x)
    twin = copy.deepcopy(adapter)
    expected = [adapter.step(x).logits for x in images[5:]]
    assert all(map(torch.equal, expected, [twin.step(x).logits for x in images[5:]]))
