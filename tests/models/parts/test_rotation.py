import torch

import networks
from dltta.models.encoder import encode, shared_parameters
from dltta.models.parts.rotation import RotationHead, rotate, rotation_logits, rotation_loss


def test_quarter_turns_by_hand():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[None, None]
    assert rotate(x, 1)[0, 0].tolist() == [[2, 4], [1, 3]]
    assert rotate(x, 2)[0, 0].tolist() == [[4, 3], [2, 1]]
    assert torch.equal(rotate(rotate(x, 3), 1), x)


def test_volumes_turn_in_the_plane_of_the_first_two_axes():
    x = torch.randn(1, 1, 3, 4, 5)
    assert torch.equal(rotate(x, 1)[..., 2], rotate(x[..., 2], 1))


def test_every_image_is_turned_as_said_whatever_its_shape():
    model, head = networks.trained(networks.Segmenter(kind="group")), RotationHead(6)
    for shape in [(4, 1, 8, 8), (4, 1, 8, 12)]:
        x, turns = torch.randn(shape), torch.tensor([3, 0, 1, 2])
        logits, turned = rotation_logits(model, head, "bottleneck", x, turns)
        expected = {
            turn: head(encode(model, "bottleneck", rotate(x[i : i + 1], turn)))[0]
            for i, turn in enumerate(turns.tolist())
        }
        for row, turn in zip(logits, turned.tolist(), strict=True):
            torch.testing.assert_close(row, expected[turn])


def test_loss_of_an_undecided_head_is_the_logarithm_of_four():
    model, head = networks.Segmenter(), RotationHead(6)
    for parameter in head.parameters():
        torch.nn.init.zeros_(parameter)
    loss = rotation_loss(model, head, "bottleneck", torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 3]))
    assert abs(loss.item() - 1.3862944) < 1e-6


def test_shared_parameters_are_those_in_front_of_the_layer():
    model = networks.Segmenter().requires_grad_(False)
    names = shared_parameters(model, "bottleneck", torch.randn(1, 1, 8, 8))
    assert {name.split(".")[0] for name in names} == {"encoder", "bottleneck"}
    assert len(names) == 8
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_encoding_computes_nothing_behind_the_layer():
    model = networks.Segmenter()
    ran = []
    model.head.register_forward_hook(lambda *call: ran.append(1))
    encode(model, "bottleneck", torch.randn(1, 1, 8, 8))
    assert not ran
    assert not model.bottleneck._forward_hooks
