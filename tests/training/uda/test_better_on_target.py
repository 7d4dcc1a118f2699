"""Methods that learn with the target are better there than no adaptation, when only the look of the images changes."""

from dataclasses import dataclass, replace
from statistics import fmean

import pytest
import torch

from dltta.data.phantom import phantom
from dltta.data.preprocessing import Preprocessing
from dltta.models.nets.architecture import Architecture
from dltta.training import SourceTraining, TrainingSettings
from dltta.training.task import validation_score
from dltta.training.uda import UDATraining, style
from dltta.training.uda.cyclegan import CycleGAN
from dltta.training.uda.style import StyleTransfer
from dltta.training.uda.udas import UDAS
from sites import Locked

SIZE = (96, 64)
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class OtherDisplay:
    """The same scanner and anatomy shown otherwise: dark layers lifted, contrast lowered, noise added."""

    dataset: object
    site: str = "there"

    @property
    def task(self):
        return self.dataset.task

    @property
    def classes(self):
        return self.dataset.classes

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        case = self.dataset[index]
        noise = torch.randn(case.image.shape, generator=torch.Generator().manual_seed(index))
        return replace(case, site=self.site, image=(0.1 + 0.8 * case.image**0.7 + 0.04 * noise).clip(0, 1))


def settings(seed):
    return TrainingSettings(epochs=30, batch_size=4, learning_rate=3e-3, validation=0.125, seed=seed)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """For each seed the sites and the network trained at the source."""
    found = {}
    for seed in SEEDS:
        source_site = phantom("oct", "spectralis", 24, seed=seed, size=SIZE)
        target_site = OtherDisplay(phantom("oct", "spectralis", 24, seed=1000 + seed, size=SIZE))
        architecture = Architecture("unet", 2, 1, 9, {"width": 8})
        training = SourceTraining(
            [source_site],
            architecture,
            Preprocessing(),
            settings(seed),
            tmp_path_factory.mktemp("source"),
            torch.device("cpu"),
        )
        found[seed] = source_site, target_site, training.run()
    return found


def dice(model, dataset):
    pairs = [(dataset[i].image, dataset[i].label) for i in range(len(dataset))]
    return validation_score(model, pairs, "segmentation", len(dataset.classes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        UDAS(epochs=6, discriminator_rate=1e-3, width=8),
        CycleGAN(epochs=14, learning_rate=1e-3, width=8, blocks=3, discriminator_width=16),
        StyleTransfer(**style.PHANTOM),
        StyleTransfer(direction="to-source", iterations=15),
    ],
    ids=["udas", "cyclegan", "uda-st", "uda-st-to-source"],
)
def test_it_is_better_than_no_adaptation(method, sources, tmp_path):
    gains = []
    for seed, (source_site, target_site, source) in sources.items():
        training = UDATraining(
            method, [source_site], [Locked(target_site)], source.architecture, source.preprocessing, settings(seed),
            tmp_path / str(seed), torch.device("cpu"), source_model=source,
        )  # fmt: skip
        before, after = dice(source.model, target_site), dice(training.run().model, target_site)
        print(f"{method.name} seed {seed}: {before:.3f} -> {after:.3f}")
        gains.append(after - before)
    assert min(gains) > 0.1
    assert fmean(gains) > 0.2
