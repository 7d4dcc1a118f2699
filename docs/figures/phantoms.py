"""Draws docs/images/phantom_*.png, one picture per task with a row or panel for every site.

python docs/figures/phantoms.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from dltta.data.case import Case
from dltta.data.phantom import SITES, changing, phantom

IMAGES = Path(__file__).parent.parent / "images"


def save(figure: plt.Figure, name: str) -> None:
    figure.savefig(IMAGES / f"phantom_{name}.png", dpi=80, bbox_inches="tight", pil_kwargs={"optimize": True})
    plt.close(figure)


def axial(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """The slice through the middle of the gland, as radiologists see it, and its label."""
    middle = int(case.label.sum(dim=(0, 1)).argmax())
    return case.image[0, :, :, middle].numpy().T, case.label[:, :, middle].numpy().T


def draw_oct() -> None:
    figure, axes = plt.subplots(3, 2, figsize=(9, 5.6))
    for column, site in zip(axes.T, SITES["oct"], strict=True):
        cases = phantom("oct", site, 3)
        for axis, case in zip(column, [cases[0], cases[2], cases[2]], strict=True):
            axis.imshow(case.image[0], cmap="gray", vmin=0, vmax=1, aspect="auto")
            axis.axis("off")
        layers = np.ma.masked_equal(cases[2].label.numpy(), 0)
        column[2].imshow(layers, cmap="tab10", alpha=0.6, aspect="auto", interpolation="none")
        column[0].set_title(site)
    figure.tight_layout()
    save(figure, "oct")


def draw_oct_change() -> None:
    figure, axes = plt.subplots(1, 5, figsize=(10, 1.6))
    for axis, case in zip(axes, changing("oct", SITES["oct"], 5, size=(128, 128), change="gradual"), strict=True):
        axis.imshow(case.image[0], cmap="gray", vmin=0, vmax=1, aspect="auto")
        axis.axis("off")
    figure.tight_layout()
    save(figure, "oct_change")


def draw_histology() -> None:
    figure, axes = plt.subplots(4, len(SITES["histology"]), figsize=(6, 5))
    for column, site in zip(axes.T, SITES["histology"], strict=True):
        cases = list(phantom("histology", site, 64))[::5]  # from several patients
        shown = [case for label in (0, 1) for case in [c for c in cases if c.label == label][:2]]
        for axis, case in zip(column, shown, strict=True):
            axis.imshow(case.image.permute(1, 2, 0))
            axis.set_xticks([])
            axis.set_yticks([])
        column[0].set_title(site, fontsize=9)
    for axis, name in zip(axes[:, 0], ("normal", "normal", "tumor", "tumor"), strict=True):
        axis.set_ylabel(name)
    figure.tight_layout()
    save(figure, "histology")


def draw_prostate() -> None:
    figure, axes = plt.subplots(3, len(SITES["prostate"]), figsize=(10, 5.2))
    for column, site in zip(axes.T, SITES["prostate"], strict=True):
        cases = phantom("prostate", site, 2)
        for axis, case in zip(column, [cases[0], cases[1], cases[1]], strict=True):
            image, _ = axial(case)
            axis.imshow(image, cmap="gray", vmin=np.quantile(image, 0.01), vmax=np.quantile(image, 0.99))
            axis.axis("off")
        column[2].contour(axial(cases[1])[1], [0.5], colors="tab:orange", linewidths=1)
        column[0].set_title(site)
    figure.tight_layout()
    save(figure, "prostate")


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    draw_oct()
    draw_oct_change()
    draw_histology()
    draw_prostate()
