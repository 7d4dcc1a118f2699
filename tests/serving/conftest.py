"""A finished stream to look at, as a segmentation and as a classification."""

import pytest

from streams import classifier, run, segmenter, write_images


@pytest.fixture
def images(tmp_path):
    return write_images(tmp_path / "in", 5)


@pytest.fixture
def output(tmp_path, images):
    """A finished stream of five cases."""
    run(segmenter(), images, tmp_path / "out", save_probabilities=True)
    return tmp_path / "out"


@pytest.fixture
def table(tmp_path, images):
    """The same as a classification, in batches of two."""
    run(classifier(), images, tmp_path / "table", batch_size=2)
    return tmp_path / "table"
