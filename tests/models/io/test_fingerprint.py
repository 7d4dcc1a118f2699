"""Which network was this? One checksum."""

import copy

import pytest
import torch
from torch import nn

from dltta.models.io.fingerprint import fingerprint


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))


def test_a_copy_has_the_same_fingerprint_wherever_its_numbers_lie_in_memory():
    model = network()
    other = copy.deepcopy(model).to(memory_format=torch.channels_last)
    assert fingerprint(model) == fingerprint(other)
    assert len(fingerprint(model)) == 64


@pytest.mark.parametrize("name", ["0.bias", "1.running_mean", "1.num_batches_tracked"])
def test_every_parameter_and_buffer_counts(name):
    model, changed = network(), network()
    changed.state_dict()[name].view(-1)[-1] += 1
    assert fingerprint(model) != fingerprint(changed)


def test_types_descriptions_and_the_order_of_modules_count():
    model, head = network(), nn.Linear(2, 2)
    prints = [
        fingerprint(model),
        fingerprint(network().to(torch.float64)),
        fingerprint(model, description={"classes": ["a", "b"]}),
        fingerprint(model, head),
        fingerprint(head, model),
    ]
    assert len(set(prints)) == len(prints)
    assert fingerprint(model, description={"a": 1, "b": 2}) == fingerprint(model, description={"b": 2, "a": 1})
