"""From a source model to predictions for another scanner's images: python examples/adapt_folder.py [FOLDER]

Trains a small network on synthetic images of one scanner, writes images of another one as PNG files, and adapts to
them as they come: first in shadow mode with the default recipe, then live with Tent, with a stop in between. Seconds on
two cores, and a network too small to be of use. The same from the command line: docs/adapt.md.
"""

import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image

from dltta.config import open_dataset
from dltta.data.inbox import find_incoming
from dltta.data.preprocessing import Preprocessing
from dltta.models.io.checkpoint import Checkpoint, save_checkpoint
from dltta.models.io.opening import open_model
from dltta.models.nets.architecture import Architecture
from dltta.recipes import recipe_for
from dltta.serving.folder import Stream
from dltta.serving.maintenance import export, list_versions, roll_back
from dltta.serving.settings import Deployment, StreamSettings
from dltta.serving.verification import verify
from dltta.training import SourceTraining, TrainingSettings

CASES = 9
TENT = recipe_for("tent", "relative", guard=True, statistics="shrinkage", pool=8, ready="neighbors")  # from 8 images on


def main(folder: Path) -> None:
    train(folder / "model")
    write_images(folder / "incoming")
    opened = open_model(str(folder / "model"))

    print("shadow: the source model predicts, the log tells what adaptation would change")
    run(opened, folder / "incoming", folder / "shadow", StreamSettings(deployment=Deployment.SHADOW), CASES)

    print("\nlive, with Tent and the guard, stopped after three images and resumed")
    output = folder / "predictions"
    for count in (3, CASES):
        run(opened, folder / "incoming", output, StreamSettings(TENT), count)

    print(f"\nwrong with the record: {verify(output) or 'nothing'}")
    print(f"versions: {[version.version for version in list_versions(output)]}")
    print(f"back to version 4, which is now version {roll_back(output, 4)}")
    export(output, opened, folder / "adapted")
    print(f"the adapted network: {', '.join(sorted(path.name for path in (folder / 'adapted').iterdir()))}")


def train(folder: Path) -> None:
    """A U-Net for images as our files hold them, 0 to 255."""
    site = open_dataset("phantom:oct:spectralis:8")
    architecture = Architecture("unet", 2, 1, len(site.classes), {"width": 4})
    settings = TrainingSettings(epochs=12, batch_size=4, learning_rate=5e-3, loss="ce+dice")
    trained = SourceTraining(
        [site], architecture, Preprocessing(), settings, folder.with_name("training"), torch.device("cpu")
    ).run()
    in_files = Preprocessing("scale", 255.0)  # training saw images from 0 to 1
    save_checkpoint(folder, Checkpoint(**{**vars(trained), "preprocessing": in_files}))


def write_images(folder: Path) -> None:
    folder.mkdir()
    site = open_dataset(f"phantom:oct:cirrus:{CASES}")
    for index in range(CASES):
        grey = (site[index].image[0] * 255).round().clamp(0, 255).to(torch.uint8).numpy()
        Image.fromarray(grey).save(folder / f"scan_{index}.png")


def run(opened, images: Path, output: Path, settings: StreamSettings, count: int) -> None:
    def tell(line) -> None:
        if "decision" in line:
            parts = [f"{key} {line[key]:.2g}" for key in ("rate", "discrepancy", "change") if line.get(key) is not None]
            parts += [f"{line['reason']} ({line['detail']})"] if line["reason"] else []
            print(f"  {line['case']}: {line['decision']}{', ' if parts else ''}{', '.join(parts)}")

    with Stream(opened, output, settings, resume=True) as stream:
        summary = stream.run(find_incoming(images)[:count], tell)
    print(f"  {summary.predicted} predicted, {summary.already_predicted} had a prediction")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).mkdir(parents=True)
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
