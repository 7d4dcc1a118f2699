import pytest
import torch

torch.set_num_threads(1)  # before any fixture: workers do not fight for cores, and sums come out alike


@pytest.fixture(autouse=True)
def repeatable():
    """No test depends on another's random numbers."""
    torch.manual_seed(0)
