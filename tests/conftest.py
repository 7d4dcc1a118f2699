import os

import pytest
import torch

torch.set_num_threads(1)  # before any fixture: workers do not fight for cores, and sums come out alike


@pytest.fixture(autouse=True)
def repeatable():
    """No test depends on random numbers or threads of another: a forked child waits for a team it does not have."""
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture
def no_power_cut(monkeypatch):
    """Nobody cuts the power during tests: do not wait for the disk."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def short_rehearsal(monkeypatch):
    """Two simulated sites and four cases: enough to see that all of it runs."""
    from dltta.evaluation import rehearsal
    from dying import SHORT

    for name, value in SHORT.items():
        monkeypatch.setattr(rehearsal, name, value)
