"""RoTTA: scores, quotas and replacement by hand; a stream against plain loops."""

import math

import pytest
import torch

import behaviors
import networks
import slow
from dltta import Adapter, Fixed, MemoryBank, Proportional
from dltta.core.augmentation import random_view
from dltta.core.objectives.rotta import Remembered, TimelyMemory, timeliness
from dltta.errors import NothingToAdaptError, SettingError
from dltta.objectives import RoTTA
from dltta.testing import check_objective
from networks import stream, trained

IMAGE = torch.zeros(1, 1)


def kept(memory):
    return [(entry.label, round(entry.uncertainty, 3), entry.age) for entry in memory.entries]


def test_scores_by_hand():
    assert Remembered(IMAGE, 0, 0.25).score(64) == 0.75  # 1 / (1 + e^0) + H / ln C
    assert Remembered(IMAGE, 0, 0.25, age=64).score(64) == pytest.approx(1 / (1 + math.exp(-1)) + 0.25, abs=1e-12)
    assert timeliness(torch.tensor([0.0, 1.0])).tolist() == pytest.approx([0.5, 0.26894142], abs=1e-7)


def test_a_class_keeps_to_its_share_and_the_worst_of_it_gives_way():
    memory = TimelyMemory(4, 2)
    for uncertainty in (0.5, 0.9, 0.1):
        memory.add(IMAGE, 0, uncertainty)
    assert kept(memory) == [(0, 0.5, 3), (0, 0.1, 1)]  # the third found the share of 2 taken: 0.9 was the worst
    memory.add(IMAGE, 0, 0.95)  # worse than both: stays out, the others grow older all the same
    assert kept(memory) == [(0, 0.5, 4), (0, 0.1, 2)]


def test_age_alone_can_cost_a_place():
    memory = TimelyMemory(2, 2)
    memory.add(IMAGE, 0, 0.3)
    memory.add(IMAGE, 0, 0.3)  # 0.3 + σ(1/2) > 0.3 + σ(0)
    assert kept(memory) == [(0, 0.3, 1)]


def test_a_full_memory_takes_from_its_largest_classes():
    memory = TimelyMemory(4, 3)  # a share of 4/3: two of a class
    for label, uncertainty in ((0, 0.2), (0, 0.4), (1, 0.8), (2, 0.9)):
        memory.add(IMAGE, label, uncertainty)
    memory.add(IMAGE, 1, 0.1)  # class 1 has one, but the memory is full: class 0 is the largest
    assert [(label, u) for label, u, _ in kept(memory)] == [(0, 0.2), (1, 0.8), (2, 0.9), (1, 0.1)]


def softmax_rows(logits):
    return torch.stack([slow.shares(row) for row in slow.rows(logits)])


class Slow:
    """The method in double precision, written from the paper: a network as weights and running statistics."""

    def __init__(self, model, forward, capacity, every, momentum=0.05, follow=0.001):
        self.source = slow.weights_of(model)
        self.names = [name for name in slow.NORMS if name in self.source]
        stats = {n: b.double().clone() for n, b in model.named_buffers() if "running" in n}
        self.student, self.teacher = dict(self.source), dict(self.source)
        self.student_stats, self.teacher_stats = dict(stats), dict(stats)
        self.forward, self.capacity, self.every = forward, capacity, every
        self.momentum, self.follow, self.arrived, self.updates, self.held = momentum, follow, 0, 0, []

    def norm(self, stats, moved, momentum):
        def normalize(name, x, weight, bias):
            mean, variance = stats[f"{name}.running_mean"], stats[f"{name}.running_var"]
            if momentum:
                axes = [0, *range(2, x.ndim)]
                count = x.numel() / x.shape[1]
                batch = x.sum(axes) / count
                shape = (1, -1, *[1] * (x.ndim - 2))
                spread = ((x - batch.view(shape)) ** 2).sum(axes) / count
                mean, variance = (1 - momentum) * mean + momentum * batch, (1 - momentum) * variance + momentum * spread
                moved[f"{name}.running_mean"], moved[f"{name}.running_var"] = mean.detach(), variance.detach()
            shape = (1, -1, *[1] * (x.ndim - 2))
            return (x - mean.view(shape)) / (variance.view(shape) + 1e-5) ** 0.5 * weight.view(shape) + bias.view(shape)

        return normalize

    def step(self, x, rate):
        x = x.double()
        with torch.no_grad():
            answer = self.forward(self.teacher, x, self.norm(self.teacher_stats, {}, 0))
        dense = answer.ndim > 2
        for image, logits in zip(x, answer, strict=True):
            rows = slow.rows(logits[None])
            h = sum(slow.uncertainty(row).item() for row in rows) / len(rows) / math.log(answer.shape[1])
            label = 0 if dense else int(logits.argmax())
            self.remember(image, label, h, 1 if dense else answer.shape[1])
        before, self.arrived = self.arrived, self.arrived + len(x)
        if self.arrived // self.every > before // self.every:
            self.update(rate, dense)
        return answer

    def remember(self, image, label, h, classes):
        def score(entry):
            return 1 / (1 + math.exp(-entry["age"] / self.capacity)) + entry["h"]

        new = {"image": image, "label": label, "h": h, "age": 0}
        counts = {}
        for entry in self.held:
            counts[entry["label"]] = counts.get(entry["label"], 0) + 1
        of_class = counts.get(label, 0)
        if of_class < self.capacity / classes and len(self.held) < self.capacity:
            self.held.append(new)
        else:
            among = {label} if of_class >= self.capacity / classes else None
            if among is None:
                among = {k for k, v in counts.items() if v == max(counts.values())}
            worst = max((e for e in self.held if e["label"] in among), key=score)
            if score(worst) > score(new):
                self.held = [entry for entry in self.held if entry is not worst] + [new]
        for entry in self.held:
            entry["age"] += 1

    def update(self, rate, dense):
        images = torch.stack([entry["image"] for entry in self.held])
        generator = torch.Generator().manual_seed(1_000_003 * self.updates)
        views = random_view(images.float(), generator, in_place=dense).double()
        moved_teacher, moved_student = {}, {}
        with torch.no_grad():
            logits = self.forward(self.teacher, images, self.norm(self.teacher_stats, moved_teacher, self.momentum))
        wanted = softmax_rows(logits)
        moving = {name: self.student[name].clone().requires_grad_(True) for name in self.names}
        logits = self.forward({**self.student, **moving}, views, self.norm(self.student_stats, moved_student, 0.05))
        errors = -(wanted * softmax_rows(logits).log()).sum(1).view(len(images), -1).mean(1)
        ages = [entry["age"] / self.capacity for entry in self.held]
        loss = sum(math.exp(-a) / (1 + math.exp(-a)) * e for a, e in zip(ages, errors, strict=True)) / len(images)
        for name, part in zip(moving, torch.autograd.grad(loss, list(moving.values())), strict=True):
            self.student[name] = self.student[name] - rate * part
            self.teacher[name] = (1 - self.follow) * self.teacher[name] + self.follow * self.student[name]
        self.student_stats.update(moved_student)
        self.teacher_stats.update(moved_teacher)
        self.updates += 1


def segment(weights, x, norm):
    conv, pool = (torch.conv3d, torch.nn.functional.avg_pool3d) if x.ndim == 5 else (
        torch.conv2d, torch.nn.functional.avg_pool2d
    )  # fmt: skip
    x = conv(x, weights["encoder.0.weight"], weights["encoder.0.bias"], padding=1)
    x = pool(torch.tanh(norm("encoder.1", x, weights["encoder.1.weight"], weights["encoder.1.bias"])), 2)
    x = conv(x, weights["bottleneck.0.weight"], weights["bottleneck.0.bias"], padding=1)
    x = torch.tanh(norm("bottleneck.1", x, weights["bottleneck.1.weight"], weights["bottleneck.1.bias"]))
    for axis in range(2, x.ndim):
        x = x.repeat_interleave(2, dim=axis)
    return conv(x, weights["head.weight"], weights["head.bias"])


def classify(weights, x, norm):
    x = torch.conv2d(x, weights["encoder.0.weight"], weights["encoder.0.bias"], padding=1)
    x = torch.tanh(norm("encoder.1", x, weights["encoder.1.weight"], weights["encoder.1.bias"]))
    x = torch.nn.functional.max_pool2d(x, 2)
    return x.mean((2, 3)) @ weights["head.weight"].T + weights["head.bias"]


@pytest.mark.parametrize(
    ("model", "forward", "shape", "capacity", "every"),
    [
        (networks.Segmenter(), segment, (1, 1, 8, 8), 3, 2),
        (networks.Segmenter(axes=3), segment, (2, 1, 4, 4, 4), 4, 2),
        (networks.Classifier(), classify, (4, 1, 8, 8), 6, 4),
    ],
)
def test_a_stream_is_that_of_a_slow_loop(model, forward, shape, capacity, every):
    model = trained(model, seed=2)
    reference = Slow(model, forward, capacity, every, follow=0.2)
    adapter = Adapter(model, RoTTA(capacity=capacity, every=every, follow=0.2), Fixed(0.5), predict="before")
    for x in stream(shape, 5):
        assert torch.allclose(adapter.step(x).logits.double(), reference.step(x, 0.5), atol=1e-5)
    assert reference.updates >= 2
    for name, parameter in adapter.adapted_parameters().items():
        assert torch.allclose(parameter.double(), reference.student[name], atol=1e-5)
        assert not torch.equal(parameter, dict(model.named_parameters())[name])
    for name, value in adapter.objective.teacher.state_dict().items():
        if name in reference.names:
            assert torch.allclose(value.double(), reference.teacher[name], atol=1e-5)
    found = [part.double() for layer in adapter.objective._student for part in layer.moments()]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, reference.student_stats.values(), strict=True))


def test_between_updates_nothing_moves_and_no_optimizer_counts_a_step():
    adapter = Adapter(
        trained(networks.Segmenter()), RoTTA(capacity=4, every=3), Fixed(0.5), optimizer=torch.optim.Adam,
        predict="before",
    )  # fmt: skip
    rates = [adapter.step(x).rate for x in stream((1, 1, 8, 8), 7)]
    assert rates == [0, 0, 0.5, 0, 0, 0.5, 0]


def test_the_prediction_is_the_teachers_from_before_the_update():
    model = trained(networks.Segmenter())
    x = stream((1, 1, 8, 8), 1)[0]
    adapter = Adapter(model, RoTTA(every=1, follow=1.0), Fixed(5.0), layout="given", predict="before")
    with torch.no_grad():
        assert torch.allclose(adapter.step(x).logits, model(x), atol=1e-6)  # the source, with its stored statistics
    assert not torch.allclose(adapter.predict(x), model(x), atol=1e-3)


def test_the_contract_is_kept_with_a_memory_and_a_dynamic_rate_too():
    for model, shape in (
        (networks.Segmenter(), (3, 1, 8, 8)),
        (networks.Segmenter(axes=3, classes=1), (2, 1, 4, 4, 4)),
        (networks.Classifier(), (3, 1, 8, 8)),
        (networks.Classifier(classes=1), (1, 1, 8, 8)),
    ):
        check_objective(RoTTA(capacity=4, every=1), trained(model), stream(shape, 1)[0])
    memory = MemoryBank(capacity=2, neighbors=1)
    adapter = Adapter(trained(networks.Segmenter()), RoTTA(every=2), Proportional(0.1), memory=memory)
    assert [step.rate > 0 for step in map(adapter.step, stream((1, 1, 8, 8), 6))] == [False, True] * 3


def test_images_of_several_sizes_share_a_memory():
    adapter = Adapter(trained(networks.Segmenter()), RoTTA(every=3), Fixed(0.1))
    sizes = [(1, 1, 8, 8), (1, 1, 4, 8), (1, 1, 8, 8)]
    steps = [adapter.step(stream(size, 1, seed=i)[0]) for i, size in enumerate(sizes)]
    assert [step.logits.shape[2:] for step in steps] == [(8, 8), (4, 8), (8, 8)]
    assert steps[-1].rate == 0.1


def test_the_statistics_follow_images_of_every_size_by_hand():
    """Two images of one size and one of another: a third of what is followed is the latter's."""
    model = trained(networks.Segmenter())
    images = [stream(size, 1, seed=i)[0] for i, size in enumerate([(1, 1, 8, 8), (1, 1, 4, 8), (1, 1, 8, 8)])]
    adapter = Adapter(model, RoTTA(every=3, momentum=0.1), Fixed(0.1), layout="given")
    for x in images:
        adapter.step(x)
    with torch.no_grad():
        pair, single = (model.encoder[0](x) for x in (torch.cat([images[0], images[2]]), images[1]))
    for of, stored, found in (
        (lambda x: x.mean((0, 2, 3)), model.encoder[1].running_mean, 0),
        (lambda x: x.var((0, 2, 3), correction=0), model.encoder[1].running_var, 1),
    ):
        expected = 0.9 * stored + 0.1 * (2 / 3 * of(pair) + 1 / 3 * of(single))
        teacher = adapter.objective.teacher.encoder[1].moments()[found]  # plain images; the student sees views
        torch.testing.assert_close(teacher, expected)


@pytest.mark.parametrize("name", ["2-D batch", "classes batch"])
def test_resumes_bit_for_bit_and_is_rolled_back_and_guarded(name):
    for every in (3, 5):  # also between two updates
        behaviors.check_resumes(RoTTA(capacity=4, every=every, follow=0.3), name, optimizer=torch.optim.Adam)
    behaviors.check_rolled_back(RoTTA(capacity=4, every=1), name)
    behaviors.check_guarded(RoTTA(capacity=4, every=1), name)


def test_refusals():
    with pytest.raises(NothingToAdaptError, match="RoTTA finds nothing to adapt in Segmenter"):
        Adapter(networks.Segmenter(kind="group"), RoTTA(), Fixed(0.1))
    with pytest.raises(SettingError, match="capacity must be at least 1, got 0"):
        RoTTA(capacity=0)
    with pytest.raises(SettingError, match="follow and momentum lie above 0"):
        RoTTA(follow=0)
