"""Bytes that tensors hold at once, counted by hand."""

import torch
from torch import nn

from dltta.models.footprint import peak_bytes

KB = torch.Size([256])  # 256 float32 are 1024 bytes


def test_what_is_freed_no_longer_counts():
    def work():
        first = torch.zeros(KB)
        second = first + 1  # two
        del first
        third = second + 1  # two
        fourth = third + 1  # three
        return fourth

    assert peak_bytes(work) == 3 * 1024


def test_views_and_what_was_there_before_do_not_count():
    given = torch.zeros(KB)

    def work():
        made = given * 2
        return made.view(16, 16).T[1:], given[:7], made.add_(1)

    assert peak_bytes(work) == 1024


def test_what_autograd_keeps_counts():
    """Sigmoid keeps its output for the backward pass: two layers hold two outputs, without gradients only one."""
    x = torch.zeros(KB, requires_grad=True)
    layers = nn.Sequential(nn.Sigmoid(), nn.Sigmoid(), nn.Sigmoid())
    with torch.no_grad():
        assert peak_bytes(lambda: layers(x)) == 2 * 1024
    assert peak_bytes(lambda: layers(x)) == 3 * 1024


def test_a_convolution_needs_room_to_lay_out_its_channels_in_blocks_of_16():
    """2 channels in, 3 out, each laid out as 16; the weights, 3 x 2 x 1 x 1, as 3 x 16."""
    layer = nn.Conv2d(2, 3, 1, bias=False)
    with torch.no_grad():
        counted = peak_bytes(lambda: layer(torch.zeros(1, 2, 8, 8)))
    held, laid_out = (2 + 3) * 64 * 4, (16 + 16) * 64 * 4 + 3 * 16 * 4
    assert counted == held + laid_out
