"""Draws docs/images/shifts.png: synthetic images of three kinds as simulated sites would show them.

python docs/figures/shifts.py
"""

from pathlib import Path
from textwrap import fill

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch

from dltta.data.phantom import phantom
from dltta.data.shifts import HARMFUL, SOURCE_SITE, SimulatedSite, draw_sites

IMAGES = Path(__file__).parent.parent / "images"
COLUMNS = 6


def drawn(spatial_dims: int, channels: int) -> list[SimulatedSite]:
    """The source and five sites, from mild to strong."""
    sites = sorted(draw_sites(5, seed=2, spatial_dims=spatial_dims, channels=channels), key=lambda site: site.severity)
    return [SOURCE_SITE, *sites]


def show(axis: plt.Axes, image: torch.Tensor, label: torch.Tensor | None, title: str, window: torch.Tensor) -> None:
    if len(image) == 3:
        axis.imshow(image.permute(1, 2, 0).clamp(0, 1))
    else:
        darkest, brightest = np.quantile(window, (0.002, 0.998))
        axis.imshow(image[0], cmap="gray", vmin=darkest, vmax=brightest, aspect="auto")
    if label is not None and label.any():
        axis.contour(label.numpy(), levels=[0.5], colors="tab:orange", linewidths=0.8)
    axis.set_title(fill(title, 26), fontsize=7)
    axis.set_xticks([])
    axis.set_yticks([])


def title(site: SimulatedSite) -> str:
    return f"severity {site.severity:.2f}: {site.describe()}" if site.changes else "source"


def main() -> None:
    figure, axes = plt.subplots(4, COLUMNS, figsize=(12, 9))
    histology, oct_case = phantom("histology", "hospital_0", 1)[0], phantom("oct", "spectralis", 1)[0]
    prostate = phantom("prostate", "RUNMC", 1)[0]
    for axis, site in zip(axes[0], drawn(2, 3), strict=True):
        show(axis, site.image(histology.image, case=0), None, title(site), histology.image)
    for axis, site in zip(axes[1], drawn(2, 1), strict=True):
        image, label = site.pair(oct_case.image, (oct_case.label > 0).long(), case=0)
        show(axis, image, label, title(site), oct_case.image)
    for axis, site in zip(axes[2], drawn(3, 1), strict=True):
        image, label = site.pair(prostate.image, prostate.label, case=0)
        middle = int(prostate.label.sum(dim=(0, 1)).argmax())
        show(axis, image[..., middle].mT, label[..., middle].T, title(site), prostate.image[..., middle])
    for axis, site in zip(axes[3], [SOURCE_SITE, *HARMFUL], strict=True):
        show(axis, site.image(oct_case.image, case=0), None, site.name, oct_case.image)
    figure.tight_layout()
    figure.savefig(IMAGES / "shifts.png", dpi=90, bbox_inches="tight", pil_kwargs={"optimize": True})


if __name__ == "__main__":
    main()
