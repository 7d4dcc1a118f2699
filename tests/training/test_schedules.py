import math

import pytest
import torch
from torch import nn

from dltta.training.fit import Plan, Ranks, supervised
from dltta.training.schedules import share_of_rate


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        ("constant", (1.0, 1.0, 1.0)),
        ("polynomial", (1.0, 0.5358867, 0.1258925)),  # 0.5^0.9, 0.1^0.9
        ("cosine", (1.0, 0.5, (1 - math.cos(math.pi / 10)) / 2)),
    ],
)
def test_shares_by_hand(schedule, shares):
    assert [share_of_rate(schedule, progress) for progress in (0.0, 0.5, 0.9)] == pytest.approx(shares, abs=1e-6)


def test_the_step_takes_the_rate_of_its_progress():
    class Line(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(1.0))

        def forward(self, images, labels, generator):
            return {"task": self.weight * images.sum()}

    line = Line()
    learner = supervised(line, Plan("task", 1, 1, 0.1, 0, schedule="cosine"), Ranks())
    batch, generator = [torch.ones(1), torch.zeros(1)], torch.Generator()
    learner.step(batch, generator, 0.0)  # Adam's step on a constant gradient is the rate
    assert line.weight.item() == pytest.approx(0.9, abs=1e-6)
    learner.step(batch, generator, 0.5)
    assert line.weight.item() == pytest.approx(0.85, abs=1e-6)
