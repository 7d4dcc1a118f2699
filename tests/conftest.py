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
