"""Small streams of image files, what they leave behind, and processes that end in the middle of them."""

import json
import os
import sys
import traceback
from pathlib import Path

import numpy as np
import torch
from PIL import Image as Pillow

from dltta.data.formats.images import Image
from dltta.data.inbox import find_incoming
from dltta.data.preprocessing import Preprocessing
from dltta.models.io.checkpoint import Checkpoint, save_checkpoint
from dltta.models.io.fingerprint import fingerprint
from dltta.models.io.opened import OpenedModel, Prepared
from dltta.models.nets.architecture import Architecture
from dltta.recipes import Recipe
from dltta.serving.folder import Stream
from dltta.serving.settings import Deployment, StreamSettings
from networks import Classifier, Segmenter, trained

SEGMENTS, CLASSES = ("background", "a", "b"), ("x", "y", "z")


def segmenter(**changes) -> OpenedModel:
    """A network that takes one channel divided by 255."""
    return _opened({"model": trained(Segmenter()), "task": "segmentation", "classes": SEGMENTS, **changes})


def classifier(**changes) -> OpenedModel:
    return _opened({"model": trained(Classifier()), "task": "classification", "classes": CLASSES, **changes})


def save_model(folder: Path) -> Path:
    """A checkpoint folder with a small U-Net for images of any size."""
    architecture = Architecture("unet", 2, 1, 3, {"width": 4})
    scaled = Preprocessing("scale", 255.0, (32, 32))
    model = trained(architecture.build(seed=3))
    save_checkpoint(folder, Checkpoint(model, architecture, "segmentation", SEGMENTS, scaled, {"epoch": 1}))
    return folder


def _opened(given) -> OpenedModel:
    usual = {"prepare": prepare, "spatial_dims": 2, "in_channels": 1, "kind": "factory", "name": "small"}
    return OpenedModel(**{"fingerprint": fingerprint(given["model"]), **usual, **given})


def prepare(image: Image) -> Prepared:
    return Prepared(torch.from_numpy(image.array) / 255, lambda probability: probability)


def write_images(folder: Path, count: int, size=(8, 12), seed=0) -> Path:
    """Grey PNG files case_0.png, case_1.png …, brighter and brighter."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        values = random.integers(0, 200, size) + 5 * index
        Pillow.fromarray(values.astype(np.uint8)).save(folder / f"case_{index}.png")
    return folder


def write_site(folder, *, labeled=True, count=6):
    """Grey images with two bright boxes, in nnU-Net's layout."""
    rng = np.random.default_rng(0)
    places = ("imagesTr", "labelsTr") if labeled else ("imagesTs",)
    for place in places:
        (folder / place).mkdir(parents=True)
    for index in range(count):
        image, label = rng.integers(20, 90, (32, 32)), np.zeros((32, 32), dtype=np.uint8)
        row, column = rng.integers(2, 12, 2)
        for value, shift in ((1, 0), (2, 14)):
            label[row + shift : row + shift + 6, column : column + 9] = value
        image = (image + 50 * label).clip(0, 255).astype(np.uint8)
        Pillow.fromarray(image).save(folder / places[0] / f"case_{index}_0000.png")
        if labeled:
            Pillow.fromarray(label).save(folder / "labelsTr" / f"case_{index}.png")
    described = {"channel_names": {"0": "grey"}, "labels": {name: i for i, name in enumerate(SEGMENTS)}}
    (folder / "dataset.json").write_text(json.dumps({**described, "file_ending": ".png"}))
    return folder


def settings(**changes) -> StreamSettings:
    """Everything on that has a state of its own: memory, relative rate, guard, momentum of the optimizer."""
    known = {"method": "tent", "rate": "relative", "alpha": 0.05, "batches_kept": 3, "neighbors": 2}
    known |= {"ready": "neighbors", "optimizer": "adam", "guard": True}
    mode = changes.pop("mode", "continual")
    if mode in ("shadow", "frozen"):
        changes["deployment"], mode = Deployment(mode), "continual"
    inner = {key: changes.pop(key) for key in list(changes) if key in Recipe.__dataclass_fields__}
    return StreamSettings(Recipe(**{**known, "mode": mode, **inner}), **changes)


def run(opened, images, output, *, resume=False, tick=lambda line: None, **changes):
    """One run over a folder or a list of cases; what it did."""
    cases = find_incoming(images) if isinstance(images, Path) else images
    with Stream(opened, output, settings(**changes), resume=resume) as stream:
        return stream.run(cases, tick)


def lines(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "stream.jsonl").read_bytes().splitlines()]


def told(output: Path) -> list[dict]:
    """The log without what differs from run to run."""
    return [{key: v for key, v in line.items() if key not in ("seconds", "previous", "hash")} for line in lines(output)]


def left(output: Path) -> dict:
    """All that a stream leaves: the log as `told`, the bytes of every other file but the head, which is hashes."""
    files = (path for path in sorted(output.rglob("*")) if path.is_file() and path.name not in ("stream.jsonl", "head"))
    return {"log": told(output), **{str(path.relative_to(output)): path.read_bytes() for path in files}}


def child(work) -> int:
    """The exit code of a process that does the work and ends at once, negative for a signal."""
    process = start(work)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def start(work) -> int:
    """The id of a process that does the work."""
    process = os.fork()
    if process:
        return process
    try:
        work()
        os._exit(0)
    except SystemExit as end:
        sys.stderr.flush()
        os._exit(end.code or 0)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
        os._exit(99)


def typed(monkeypatch, capsys, *arguments):
    """Exit code, standard output and standard error of `dltta …`."""
    from dltta import cli

    monkeypatch.setattr(sys, "argv", ["dltta", *map(str, arguments)])
    code = 0
    try:
        cli.main()
    except SystemExit as end:
        code = end.code or 0
    printed = capsys.readouterr()
    return code, printed.out, printed.err
