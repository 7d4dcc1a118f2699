import pytest
import torch
from torch import nn

import networks
from dltta.models.normalization import affine_parameters, use_test_statistics
from networks import stream, trained


@pytest.mark.parametrize(("axes", "kind"), [(1, nn.BatchNorm1d), (2, nn.BatchNorm2d), (3, nn.BatchNorm3d)])
def test_batch_statistics_by_hand(axes, kind):
    model = nn.Sequential(kind(2, eps=0.5)).eval()
    use_test_statistics(model)
    x = torch.randn(3, 2, *[4] * axes) * 5 + 3
    rows = x.transpose(0, 1).flatten(1)
    mean, variance = rows.mean(1), rows.var(1, unbiased=False)
    expected = (x.transpose(0, 1).flatten(1) - mean[:, None]) / (variance[:, None] + 0.5).sqrt()
    torch.testing.assert_close(model(x).transpose(0, 1).flatten(1), expected)


@pytest.mark.parametrize("training", [True, False])
def test_stored_statistics_stay_unused_and_unchanged(training):
    model = trained(networks.Segmenter())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    use_test_statistics(model)
    model.train(training)
    x = stream((2, 1, 8, 8), 1)[0]
    logits = model(x)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(before[name], after[name]) for name in before)
    for buffer in model.buffers():
        buffer.zero_() if buffer.is_floating_point() else None
    assert torch.equal(model(x), logits)


def test_scale_and_shift_are_the_same_parameters():
    model = trained(networks.Segmenter())
    ours = affine_parameters(model)
    use_test_statistics(model)
    assert [id(p) for p in affine_parameters(model)] == [id(p) for p in ours]


def test_instance_norm_with_running_statistics_uses_the_image():
    model = nn.Sequential(nn.InstanceNorm2d(2, track_running_stats=True)).eval()
    x = torch.randn(1, 2, 4, 4) * 3 + 1
    use_test_statistics(model)
    torch.testing.assert_close(model(x), nn.InstanceNorm2d(2)(x))


def test_every_kind_of_affine_normalization_is_found():
    model = nn.Sequential(
        nn.BatchNorm2d(4), nn.InstanceNorm2d(4, affine=True), nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.RMSNorm(4),
        nn.InstanceNorm2d(4), nn.BatchNorm2d(4, affine=False), nn.Conv2d(4, 4, 1),
    )  # fmt: skip
    assert len(affine_parameters(model)) == 4 * 2 + 1
