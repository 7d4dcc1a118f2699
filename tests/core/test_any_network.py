"""The same ten lines on the field's networks: 2-D and 3-D, four kinds of normalization, softmax and sigmoid."""

import pytest
import torch
from monai.networks import nets
from torch import nn

from dltta import Adapter, MemoryBank, Proportional
from dltta.errors import NothingToAdaptError
from dltta.objectives import PTBN, Tent
from networks import Segmenter

AFFINE = ("instance", {"affine": True})
SMALL = (4, 4, 8, 8, 16, 4)


class Logits(nn.Module):
    """MONAI's ViT answers with logits and hidden states."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)[0]


NETWORKS = {
    "BasicUNet 2-D, batch norm": (lambda: nets.BasicUNet(2, 1, 3, SMALL, norm="batch"), (1, 1, 32, 32)),
    "BasicUNet 3-D, batch norm": (lambda: nets.BasicUNet(3, 1, 3, SMALL, norm="batch"), (1, 1, 32, 32, 16)),
    "BasicUNet binary": (lambda: nets.BasicUNet(2, 1, 1, SMALL, norm="batch"), (2, 1, 32, 32)),
    "DenseNet121": (lambda: nets.DenseNet121(2, 3, 2), (2, 3, 64, 64)),
    "UNet, instance norm": (lambda: nets.UNet(2, 1, 3, (4, 8, 16), (2, 2), norm=AFFINE), (1, 1, 32, 32)),
    "DynUNet, instance norm": (
        lambda: nets.DynUNet(3, 1, 2, [3] * 3, [1, 2, 2], [2, 2], norm_name=AFFINE),
        (1, 1, 16, 16, 16),
    ),
    "SegResNet, group norm": (lambda: nets.SegResNet(2, 8, 1, 2), (1, 1, 32, 32)),
    "ViT, layer norm": (
        lambda: Logits(
            nets.ViT(1, (32, 32), (16, 16), 24, 48, 2, 3, classification=True, num_classes=3, spatial_dims=2)
        ),
        (2, 1, 32, 32),
    ),
    "SwinUNETR, layer norm": (lambda: nets.SwinUNETR(1, 2, feature_size=12, spatial_dims=2), (1, 1, 64, 64)),
    "by hand": (Segmenter, (1, 1, 16, 16)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_dynamic_tent_runs_and_moves_the_network(name):
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    memory = MemoryBank(capacity=2 * shape[0], neighbors=2)
    adapter = Adapter(make(), Tent(), Proportional(0.1), memory=memory)
    before = {name: p.detach().clone() for name, p in adapter.adapted_parameters().items()}
    steps = [adapter.step(torch.randn(shape) * (1 + index)) for index in range(4)]
    assert [step.discrepancy is None for step in steps] == [True, True, False, False]
    assert all(step.rate == pytest.approx(0.1 * step.discrepancy) for step in steps[2:])
    assert steps[2].discrepancy != steps[3].discrepancy > 0
    assert any(not torch.equal(before[name], p) for name, p in adapter.adapted_parameters().items())


def test_monai_unet_without_affine_normalization_fails_at_construction_and_says_what_to_do():
    with pytest.raises(NothingToAdaptError, match=r"UNet.*no normalization layer with scale and shift.*'affine': True"):
        Adapter(nets.UNet(2, 1, 3, (4, 8, 16), (2, 2)), Tent(), Proportional(0.1), memory=MemoryBank())


def test_ptbn_without_batch_norm_says_that_it_changes_nothing():
    with pytest.raises(NothingToAdaptError, match=r"PTBN changes nothing in SegResNet"):
        Adapter(nets.SegResNet(2, 8, 1, 2), PTBN())
