import os

import pytest
import torch

torch.set_num_threads(1)  # before any fixture: workers do not fight for cores, and sums come out alike


@pytest.fixture(autouse=True)
def repeatable():
    """No test depends on another's random numbers."""
    torch.manual_seed(0)


@pytest.fixture
def no_power_cut(monkeypatch):
    """Nobody cuts the power during tests: do not wait for the disk."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def short_rehearsal(monkeypatch):
    """Two simulated sites and four cases: enough to see that all of it runs."""
    from dltta.evaluation import rehearsal

    monkeypatch.setattr(rehearsal, "MOST_SITES", 2)
    monkeypatch.setattr(rehearsal, "FEWEST_SITES", 2)
    monkeypatch.setattr(rehearsal, "FEWEST_ONE_BY_ONE", 2)
    monkeypatch.setattr(rehearsal, "CASES", {"segmentation": {1: 4}, "classification": {1: 4, 32: 6}})
