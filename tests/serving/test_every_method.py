"""Every method by its name: adapted with, killed, resumed and compared, in 2-D, 3-D and classification."""

import json
import os

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from dltta.data.inbox import find_incoming
from dltta.data.preprocessing import Preprocessing
from dltta.evaluation.results import Results
from dltta.methods import Method
from dltta.models.io.opening import ModelSource
from dltta.models.nets.architecture import Architecture
from dltta.recipes import recipe_for
from dltta.serving.folder import Stream
from dltta.serving.settings import StreamSettings
from dltta.training import SourceTraining, TrainingSettings
from sites import Blobs
from streams import child, left, lines, typed

pytestmark = pytest.mark.long
DEAD = 77
KINDS = {"2-D": Blobs(count=6), "3-D": Blobs(count=4, axes=3), "classes": Blobs("classification", count=8)}
IMAGES = {"2-D": 4, "3-D": 2, "classes": 4}
SMALL = {  # so that a stream of a few images shows all that a method does
    "rotta": {"settings": {"capacity": 2}},
    "note": {"settings": {"capacity": 2}},
    "cotta": {"settings": {"views": 2, "scales": [1.0]}},
    "dtta": {"steps": 2, "settings": {"every": 1}},
    "eata": {"settings": {"margin": 2.0, "redundancy": 2.0}},  # an untrained network is never certain
    "sar": {"settings": {"margin": 2.0}},
    "deyo": {"settings": {"certain": 2.0, "threshold": -1.0}},
    "vptta": {"settings": {"capacity": 2, "neighbors": 1}},
    "ttt++": {"settings": {"queue": 4}},
    "t3a": {"settings": {"pixels": 8, "supports": 4}},
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory):
    """A model trained with all that methods of its task need, and a folder of images."""
    folder = tmp_path_factory.mktemp(request.param)
    site = KINDS[request.param]
    name, options = ("unet", {"width": 2}) if site.task == "segmentation" else ("densenet_small", {"width": 4})
    parts = ("ttt", "ttt++", "dtta", "atta") if site.task == "segmentation" else ("ttt", "ttt++", "atta")
    settings = TrainingSettings(
        epochs=1, batch_size=2, validation=0.25, with_=parts, autoencoder_epochs=1, autoencoder_width=8,
        denoiser_epochs=1, denoiser_widths=(2, 2, 2, 2),
    )  # fmt: skip
    SourceTraining(
        [site], Architecture(name, site.axes, 1, 2, options), Preprocessing("scale", 255.0), settings,
        folder / "model", torch.device("cpu"),
    ).run()  # fmt: skip
    (folder / "in").mkdir()
    for index in range(IMAGES[request.param]):
        values = (site[index].image[0].clamp(-0.5, 3.5) + 0.5) * (40 + 10 * index)
        array = values.numpy().astype(np.uint8)
        if site.axes == 3:
            nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), folder / "in" / f"case_{index}.nii.gz")
        else:
            Pillow.fromarray(array).save(folder / "in" / f"case_{index}.png")
    return request.param, site.task, folder


@pytest.mark.parametrize("method", Method)
def test_killed_and_resumed_by_name_it_leaves_what_an_unbroken_run_leaves(kind, method, tmp_path, monkeypatch, capsys):
    name, task, folder = kind
    images = IMAGES[name]
    changes = dict(SMALL.get(method, {}), batch_size=1 if task == "segmentation" else 2)
    words = [f"--batch-size={changes['batch_size']}", *(f"--steps={n}" for k, n in changes.items() if k == "steps")]
    words += [f"--set={key}={value}" for key, value in changes.get("settings", {}).items()]

    def adapt(output, *more):
        given = ("-m", folder / "model", "-i", folder / "in", "-o", output, "--method", method, *words, *more)
        return typed(monkeypatch, capsys, "adapt", *given)

    code, _, error = adapt(tmp_path / "whole")
    if task not in method.facts.tasks:
        assert code == 2
        assert "DTTA is for segmentation" in error
        return
    assert code in (0, 3), error
    (begun, *cases) = lines(tmp_path / "whole")
    assert begun["recipe"]["method"] == method
    found = [line for line in cases if "case" in line]
    assert len(found) == images

    def die(line):
        if (tmp_path / "broken" / "stream.jsonl").read_bytes().count(b'"case"') >= images // 2:
            os._exit(DEAD)

    def begin():
        opened = ModelSource(str(folder / "model")).open()
        settings = StreamSettings(recipe_for(method, **changes))
        with Stream(opened, tmp_path / "broken", settings) as stream:
            stream.run(find_incoming(folder / "in"), die)

    assert child(begin) == DEAD
    assert adapt(tmp_path / "broken", "--resume")[0] == code
    assert left(tmp_path / "broken").keys() == left(tmp_path / "whole").keys()
    whole, broken = left(tmp_path / "whole"), left(tmp_path / "broken")
    assert [name for name in whole if name != "log" and whole[name] != broken[name]] == []
    if method.facts.loss:
        assert any(line.get("rate") for line in found), "nothing was ever updated"


@pytest.mark.long
@pytest.mark.usefixtures("short_rehearsal")
def test_all_stands_for_what_the_model_supports(tmp_path, monkeypatch, capsys):
    """On a network without batch normalization and with nothing trained beside it, the others are left out aloud."""
    code, out, error = typed(
        monkeypatch, capsys, "bench", "--source", "phantom:histology:hospital_0:12", "--target",
        "phantom:histology:hospital_2:8:5", "--methods", "all", "--rates", "fixed", "--epochs", "1", "-o",
        tmp_path / "out", _config(tmp_path),
    )  # fmt: skip
    assert code == 0, error
    results = Results.load(tmp_path / "out" / "results.json")
    ran = {stream.method for stream in results.streams}
    left_out = results.config["left_out"]
    assert ran | set(left_out) == {*map(str, Method), "recommended"}
    assert not ran & set(left_out)
    assert "ptbn" in ran
    assert set(left_out) == {"dtta", "ttt", "ttt++", "atta"}
    assert "train it with `--with ttt`" in left_out["ttt"]
    assert "TTT left out: this model has no rotation head" in " ".join(out.split())
    assert json.loads((tmp_path / "out" / "results.json").read_text())["config"]["recipes"]["rotta"]


def _config(folder):
    path = folder / "small.toml"
    path.write_text(
        'network = "densenet_small"\nnetwork_options = { width = 4, growth = 4 }\nin_domain = "none"\nexamples = 1\n'
        "[adaptation]\nbatch_size = 4\n[training]\nwith = []\nbatch_size = 4\n"
        "[recipes.rotta]\nsettings = { capacity = 4 }\n[recipes.cotta]\nsettings = { views = 2 }\n"
    )
    return path
