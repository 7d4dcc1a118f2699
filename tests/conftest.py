import pytest
import torch


@pytest.fixture(autouse=True)
def repeatable():
    """One thread and one seed: workers do not fight for cores, and no test depends on another's random numbers."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
