"""Model folders and records of streams with anything in them: used, or refused in one line; nothing else happens."""

import hashlib
import json
import resource
import shutil
import struct
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dltta.data.inbox import find_incoming
from dltta.errors import DlttaError
from dltta.models.calibration import Calibration
from dltta.models.io.checkpoint import load_checkpoint, save_checkpoint
from dltta.models.io.opening import open_model
from dltta.models.io.weights import read_weights
from dltta.serving.maintenance import list_versions, show_version
from dltta.serving.verification import verify
from streams import run, save_model, segmenter, write_images

QUICK, LONG = 60, 2000  # examples
MEMORY = 1 << 30  # bytes that a small file may make us take

extremes = st.sampled_from(
    [None, True, -1, 0, 1, 7, 2**31, 2**63, 10**30, 1e308, -0.5, float("nan"), "", "x", "../../x", "/etc/passwd", "[b]",
     "segmentation", [], [1], [[]], {}, {"x": 1}, ["a", "a"], [2**40] * 3, "a\nb", "=1+1", [0] * 100]
)  # fmt: skip
paths = st.lists(st.integers(0, 50), min_size=1, max_size=6)
bytes_edits = st.lists(
    st.tuples(st.integers(0, 1 << 16), st.sampled_from([b"\0", b"\xff" * 8, b"9" * 30, b"}", b"[" * 40, b'"', b"\n"])),
    max_size=3,
)
cuts = st.one_of(st.none(), st.none(), st.integers(0, 1 << 16))
quick = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}


def replaced(tree, path, value):
    """The same JSON with one of its values, found by numbers, exchanged or, for the string "gone", removed."""
    tree = json.loads(json.dumps(tree))
    node, (first, *rest) = tree, path
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = keys[first % len(keys)]
        if not rest or not isinstance(node[key], dict | list) or not node[key]:
            node[key] = value
            return tree
        node, (first, *rest) = node[key], rest


def edited(content, edits, cut):
    found = bytearray(content)
    for place, new in edits:
        place %= max(len(found), 1)
        found[place : place + len(new)] = new
    return bytes(found) if cut is None else bytes(found[: cut % max(len(found), 1)])


def everything(folder: Path) -> dict:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Watched:
    """Nothing outside a folder changes, and memory stays within bounds."""

    def __init__(self, root, inside):
        self.root, self.inside = root, inside

    def outside(self):
        return {path: text for path, text in everything(self.root).items() if not path.is_relative_to(self.inside)}

    def __enter__(self):
        self.before, self.peak = self.outside(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def __exit__(self, kind, error, trace):
        if kind is None:
            assert self.outside() == self.before
            assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self.peak) << 10 < MEMORY


@pytest.fixture
def model(tmp_path):
    """A model folder with a calibration."""
    folder = save_model(tmp_path / "place" / "model")
    checkpoint = load_checkpoint(folder)
    import dataclasses

    layers = {"x": (torch.zeros(2, 3), torch.ones(2, 3))}
    save_checkpoint(
        folder, dataclasses.replace(checkpoint, calibration=Calibration(layers, {"x": 1e-5}, {"images": 2}))
    )
    return folder


def attempt(work):
    """What a command does: an error of ours is one line, any other would be a traceback."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with suppress(DlttaError):
            work()


def fuzz_description(model, examples):
    plain = json.loads((model / "model.json").read_text())

    @settings(max_examples=examples, **quick)
    @given(path=paths, value=extremes)
    def values(path, value):
        (model / "model.json").write_text(json.dumps(replaced(plain, path, value)))
        attempt(lambda: open_model(str(model)))

    @settings(max_examples=examples, **quick)
    @given(edits=bytes_edits, cut=cuts)
    def text(edits, cut):
        (model / "model.json").write_bytes(edited(json.dumps(plain).encode(), edits, cut))
        attempt(lambda: open_model(str(model)))

    with Watched(model.parent.parent, model):
        values()
        text()


def fuzz_tensors(model, examples):
    plain = json.loads((model / "model.json").read_text())
    contents = {name: (model / f"{name}.safetensors").read_bytes() for name in ("model", "calibration")}

    def headed(content, path, value):
        (length,) = struct.unpack("<Q", content[:8])
        header = json.dumps(replaced(json.loads(content[8 : 8 + length]), path, value)).encode()
        return struct.pack("<Q", len(header)) + header + content[8 + length :]

    @settings(max_examples=examples, **quick)
    @given(
        name=st.sampled_from(sorted(contents)),
        path=paths,
        value=extremes,
        edits=bytes_edits,
        cut=cuts,
        raw=st.booleans(),
    )
    def tensors(name, path, value, edits, cut, raw):
        content = edited(contents[name], edits, cut) if raw else headed(contents[name], path, value)
        (model / f"{name}.safetensors").write_bytes(content)
        sums = {**plain["sha256"], name: hashlib.sha256(content).hexdigest()}
        (model / "model.json").write_text(json.dumps({**plain, "sha256": sums}))
        attempt(lambda: open_model(str(model)))
        attempt(lambda: read_weights(model / f"{name}.safetensors"))
        (model / f"{name}.safetensors").write_bytes(contents[name])

    with Watched(model.parent.parent, model):
        tensors()


def fuzz_record(folder, examples):
    """Each file of a stream's folder; then what looks at it, and a run that would continue it."""
    images = write_images(folder / "in", 3)
    run(segmenter(), find_incoming(images)[:2], folder / "whole")
    there = [path.relative_to(folder / "whole") for path in (folder / "whole").rglob("*") if path.is_file()]
    names = sorted(str(path) for path in there if path.name != "lock")

    @settings(max_examples=examples, **quick)
    @given(name=st.sampled_from(names), edits=bytes_edits, cut=cuts)
    def record(name, edits, cut):
        output = folder / "out"
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(folder / "whole", output)
        before = (output / name).read_bytes()
        after = edited(before, edits, cut)
        (output / name).write_bytes(after)
        try:
            noticed = verify(output) != []
        except DlttaError:
            noticed = True
        attempt(lambda: list_versions(output))
        attempt(lambda: show_version(output))
        attempt(lambda: run(segmenter(), images, output, resume=True))
        assert noticed == (after != before), f"{name} was altered and nobody noticed, or the other way round"

    with Watched(folder, folder / "out"):
        record()


def test_any_model_json_is_a_model_or_one_line(model):
    fuzz_description(model, QUICK)


def test_any_safetensors_is_a_model_or_one_line(model):
    fuzz_tensors(model, QUICK)


@pytest.mark.long
def test_any_record_is_continued_or_refused_and_every_change_is_found(tmp_path):
    fuzz_record(tmp_path, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("fuzz", [fuzz_description, fuzz_tensors])
def test_any_model_for_long(model, fuzz):
    fuzz(model, LONG)


@pytest.mark.slow
def test_any_record_for_long(tmp_path):
    fuzz_record(tmp_path, LONG)


def test_a_model_that_says_it_is_huge_is_not_built(model):
    """A few bytes must not make us allocate, or count, without end."""
    plain = json.loads((model / "model.json").read_text())
    for options in ({"width": 10**7}, {"width": 4000}):
        described = {**plain, "architecture": {**plain["architecture"], "options": options}}
        (model / "model.json").write_text(json.dumps(described))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(DlttaError, match=r"model\.json"):
            load_checkpoint(model)
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < MEMORY
    endless = {"name": "densenet_small", "options": {"blocks": [10**9] * 4}}
    (model / "model.json").write_text(json.dumps({**plain, "architecture": {**plain["architecture"], **endless}}))
    with pytest.raises(DlttaError, match=r"model\.json"):
        load_checkpoint(model)
