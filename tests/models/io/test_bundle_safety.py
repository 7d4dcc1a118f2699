"""A bundle's configuration is a program: none of it runs unless one says so."""

import copy
import json
import os
import sys
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from bundles import CONFIG, METADATA, UNET, config, make_bundle, network, transforms
from dltta.errors import DlttaError, SettingError, StateError
from dltta.models.io.bundle import archive
from dltta.models.io.opening import open_model


@pytest.fixture
def mark(tmp_path, monkeypatch):
    """A file that every payload makes; the bundle is the current folder, as MONAI expects, and can be imported from."""
    folder = tmp_path / "bundle"
    marked = tmp_path / "mark"
    monkeypatch.setenv("MARK", str(marked))
    monkeypatch.syspath_prepend(str(folder))
    yield marked
    for name in [name for name in sys.modules if name.split(".")[0] in ("scripts", "evil_module")]:
        del sys.modules[name]


TOUCH = "__import__('pathlib').Path(__import__('os').environ['MARK']).touch()"
RUN = f"${TOUCH} or 1"
COMMAND = {"command": 'touch "$MARK"'}  # for os.system
PREPROCESSING = CONFIG["preprocessing"]["transforms"]


def with_network(**entries):
    return config(network_def={**UNET, **entries})


def with_step(**step):
    return config(preprocessing=transforms(*PREPROCESSING, step))


def with_postprocessing(**step):
    return config(postprocessing=transforms(step))


EXPRESSIONS = {
    "argument": (with_network(in_channels=RUN), "network_def::in_channels runs Python"),
    "deep inside": (with_network(channels=[4, RUN]), "network_def::channels::1 runs Python"),
    "description": (with_network(_desc_=RUN), "network_def::_desc_ runs Python|'_desc_'"),
    "behind a reference": ({**with_network(in_channels="@n"), "n": RUN}, "n runs Python"),
    "behind two references": ({**with_network(in_channels="@n"), "n": "@a::b", "a": {"b": RUN}}, "a::b runs Python"),
    "behind a macro": ({**with_network(in_channels="%n"), "n": RUN}, "network_def::in_channels runs Python"),
    "behind two macros": ({**with_network(in_channels="%n"), "n": "%m", "m": RUN}, "runs Python|macro"),
    "behind a relative reference": ({**with_network(in_channels="@##n"), "n": RUN}, "n runs Python"),
    "in another file": (with_network(in_channels="%configs/other.json::n"), "network_def::in_channels runs Python"),
    "in the metadata": (with_network(in_channels="@_meta_::n"), "_meta_::n runs Python"),
    "whether disabled": (with_step(_target_="Identityd", keys="image", _disabled_=RUN), "6::_disabled_ runs Python"),
    "preprocessing": (with_step(_target_="Flipd", keys="image", spatial_axis=RUN), "6::spatial_axis runs Python"),
    "postprocessing": (
        with_postprocessing(_target_="Activationsd", keys="pred", softmax=RUN),
        "0::softmax runs Python",
    ),
    "inferer": (config(inferer={**CONFIG["inferer"], "sw_batch_size": RUN}), "inferer::sw_batch_size runs Python"),
    "requirement": (with_network(_requires_=RUN), "has '_requires_'"),
    "whole part": (config(network_def=f"${TOUCH} or __import__('bundles').network()"), "network_def runs Python"),
    "target": (with_network(_target_=f"${TOUCH} or __import__('monai').networks.nets.UNet"), "calls"),
    "call": ({**with_network(in_channels="@n"), "n": {"_target_": "os.system", **COMMAND}}, "n calls 'os.system'"),
    "loader": (with_step(_target_="LoadImaged", keys="x", reader=RUN), "6::reader runs Python"),
    "nested": (config(preprocessing=transforms({"_target_": "Compose", "transforms": [*PREPROCESSING, RUN]})), "runs"),
}


def write(folder, inference):
    """A bundle with this configuration, and what payloads need beside it; the weights are those of the plain one."""
    metadata = {**METADATA, "n": RUN}
    make_bundle(folder, inference, model=network(), metadata=metadata)
    (folder / "configs" / "other.json").write_text(json.dumps({"n": RUN}))
    (folder / "evil_module.py").write_text(TOUCH)
    (folder / "scripts").mkdir()
    (folder / "scripts" / "__init__.py").write_text(TOUCH)
    (folder / "scripts" / "nets.py").write_text("from monai.networks.nets import UNet\n")
    (folder / "configs" / "logging.conf").write_text(
        f"[loggers]\nkeys=root\n[handlers]\nkeys=h\n[formatters]\nkeys=\n[logger_root]\nhandlers=h\n"
        f"[handler_h]\nclass=StreamHandler\nargs=({TOUCH},)\n"
    )
    return folder


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expressions_do_not_run(tmp_path, mark, name):
    inference, words = EXPRESSIONS[name]
    folder = write(tmp_path / "bundle", copy.deepcopy(inference))
    with pytest.raises(SettingError, match=words) as caught:
        open_model(str(folder))
    assert not mark.exists()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(EXPRESSIONS.keys() - {"behind two macros"}))  # MONAI leaves the second alone
def test_the_same_payloads_do_run_when_allowed(tmp_path, mark, name, monkeypatch):
    """Otherwise the test above would prove nothing."""
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path / "bundle", copy.deepcopy(EXPRESSIONS[name][0]))
    with suppress(DlttaError):  # what an expression gives need not be what is needed there
        open_model(str(folder), run_expressions=True)
    assert mark.exists()


TARGETS = {
    "system": with_network(_target_="os.system", **COMMAND),
    "eval": with_network(_target_="builtins.eval", source=TOUCH),
    "module of its own": with_network(_target_="scripts.nets.UNet"),
    "through MONAI": with_network(_target_="monai.networks.nets.hovernet.os.system", **COMMAND),
    "through MONAI's utilities": with_network(_target_="monai.transforms.utils.np.save", file="x", arr=[1]),
    "through torch": with_network(_target_="torch.nn.functional.importlib.import_module", name="evil_module"),
    "debugger": with_network(_mode_="debug"),
    "breakpoint": with_network(_debug_=True),
    "callable": with_network(_mode_="callable"),
    "no name": with_network(_target_={"a": 1}),
    "not a network": with_network(_target_="monai.bundle.ConfigParser"),
    "function": with_network(_target_="monai.networks.nets.resnet18"),
    "pickled weights": with_network(_target_="CellSamWrapper", checkpoint="models/evil.pt"),
    "lambda": with_step(_target_="Lambdad", keys="image", func={"_target_": "os.system", "_mode_": "callable"}),
    "by name": with_step(_target_="TorchVisiond", keys="image", name="evil"),
    "merger": config(inferer={"_target_": "PatchInferer", "merger_cls": "os.system"}),
    "postprocessing": with_postprocessing(_target_="os.system", **COMMAND),
}


@pytest.mark.parametrize("name", TARGETS)
def test_only_networks_and_transforms_of_monai_are_called(tmp_path, mark, name):
    folder = write(tmp_path / "bundle", copy.deepcopy(TARGETS[name]))
    with pytest.raises(SettingError, match="calls|has '_|not supported") as caught:
        open_model(str(folder))
    assert not mark.exists()
    assert not {"scripts", "evil_module"} & sys.modules.keys()
    assert "\n" not in str(caught.value)


def test_a_reader_by_name_is_not_called(tmp_path, mark):
    """MONAI's loader calls any function that `reader` names with the loader's own arguments."""
    loader = {"_target_": "LoadImaged", "keys": "image", "reader": "os.system", **COMMAND}
    folder = write(tmp_path / "bundle", config(preprocessing=transforms(loader, *PREPROCESSING[1:])))
    with pytest.raises(SettingError, match="no option 'command'"):
        open_model(str(folder))
    assert not mark.exists()


def test_what_is_not_used_is_not_touched(tmp_path, mark):
    """Imports, handlers, runs, saving and logging: opening needs none of them."""
    unused = {
        "imports": ["$import evil_module", f"${TOUCH}"],
        "handlers": [{"_target_": "os.system", **COMMAND}],
        "evaluator": {"_target_": "scripts.nets.UNet", "x": RUN},
        "initialize": [RUN],
        "run": [RUN],
        "device": RUN,
        "bundle_root": RUN,
    }
    saving = {"_target_": "SaveImaged", "_disabled_": RUN, "keys": "pred", "writer": "os.system", "output_dir": RUN}
    postprocessing = transforms(*CONFIG["postprocessing"]["transforms"][:3], saving)
    parts = config(preprocessing=transforms(*PREPROCESSING, {**saving, "keys": "image"}), postprocessing=postprocessing)
    folder = write(tmp_path / "bundle", {**parts, **unused})
    assert open_model(str(folder)).classes == ("background", "left", "right")
    assert not mark.exists()
    assert not {"scripts", "evil_module"} & sys.modules.keys()


def test_keys_that_look_like_places_do_not_hide_anything(tmp_path, mark):
    parts = {**with_network(in_channels="@n::m"), "n": {"m": 1}, "n::m": RUN, "network_def::in_channels": RUN}
    opened = open_model(str(write(tmp_path / "bundle", parts)))
    assert opened.in_channels == 1
    assert not mark.exists()


@pytest.mark.parametrize("path", ["../outside.json::n", "{absolute}::n", "configs/missing.json::n"])
def test_macros_stay_in_the_bundle(tmp_path, mark, path):
    (tmp_path / "outside.json").write_text(json.dumps({"n": 1}))
    parts = with_network(in_channels="%" + path.format(absolute=tmp_path / "outside.json"))
    with pytest.raises(SettingError, match="names no file in the bundle"):
        open_model(str(write(tmp_path / "bundle", parts)))


def test_a_macro_to_a_file_of_the_bundle_is_followed(tmp_path, mark):
    folder = write(tmp_path / "bundle", with_network(in_channels="%configs/other.json::m"))
    (folder / "configs" / "other.json").write_text(json.dumps({"m": 1}))
    assert open_model(str(folder)).in_channels == 1


class Payload:
    def __reduce__(self):
        return os.system, (COMMAND["command"],)


def test_pickled_code_in_the_weights_does_not_run(tmp_path, mark):
    folder = write(tmp_path / "bundle", config())
    torch.save({"state_dict": Payload()}, folder / "models" / "model.pt")
    for allowed in (False, True):
        with pytest.raises(StateError, match="holds more than tensors"):
            open_model(str(folder), run_expressions=allowed)
    assert not mark.exists()
    torch.load(folder / "models" / "model.pt", weights_only=False)
    assert mark.exists()  # so the payload is one


def test_starting_weights_are_not_downloaded(tmp_path, monkeypatch):
    """EfficientNet asks for ImageNet's unless told not to; all weights come from the bundle."""
    net = {"_target_": "EfficientNetBN", "model_name": "efficientnet-b0", "spatial_dims": 2, "num_classes": 2,
           "in_channels": 1}  # fmt: skip
    model = network({**net, "pretrained": False})
    flat = [step for step in PREPROCESSING if step["_target_"] in ("LoadImaged", "EnsureChannelFirstd")]
    parts = config(network_def=net, preprocessing=transforms(*flat), inferer=None, postprocessing=None)
    make_bundle(tmp_path / "bundle", parts, model=model, metadata={})

    def refuse(*args, **kwargs):
        raise AssertionError("download")

    monkeypatch.setattr("monai.networks.nets.efficientnet.model_zoo.load_url", refuse)
    assert open_model(str(tmp_path / "bundle")).task == "classification"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "configs/inference.json").write_text("{"), "cannot be read"),
        (lambda f: (f / "configs/inference.json").write_text("[1]"), "holds a list"),
        (lambda f: (f / "configs/inference.json").write_text("[" * 100_000), "cannot be read"),
        (lambda f: (f / "configs/inference.json").write_text("{}"), "network_def must describe a network"),
        (lambda f: (f / "configs/inference.json").write_bytes(b"\xff\xfe"), "cannot be read"),
        (lambda f: (f / "configs/metadata.json").write_text("no"), "metadata.json cannot be read"),
        (lambda f: (f / "models/model.pt").unlink(), "model.pt is missing"),
        (lambda f: torch.save({"a": torch.ones(1)}, f / "models/model.pt"), "does not fit the network"),
        (lambda f: _edit(f, in_channels="@nothing"), "network_def cannot be built"),
        (lambda f: _edit(f, in_channels="@network_def::out_channels", out_channels="@network_def::in_channels"),
         "circular"),
        (lambda f: _edit(f, in_channels="%a::b"), "macro cannot be resolved"),
        (lambda f: _edit(f, in_channels="many"), "network_def cannot be built"),
        (lambda f: _edit(f, nonsense=3), "network_def cannot be built"),
    ],
)  # fmt: skip
def test_damage_is_one_line(tmp_path, damage, words):
    make_bundle(tmp_path / "bundle")
    damage(tmp_path / "bundle")
    with pytest.raises((SettingError, StateError), match=words) as caught:
        open_model(str(tmp_path / "bundle"))
    assert "\n" not in str(caught.value)


def _edit(folder, **entries):
    (folder / "configs" / "inference.json").write_text(json.dumps(with_network(**entries)))


def test_yaml_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    make_bundle(tmp_path / "bundle")
    configs = tmp_path / "bundle" / "configs"
    (configs / "inference.json").rename(configs / "inference.yaml")
    monkeypatch.setattr("dltta.models.io.bundle.config.find_spec", lambda name: None)
    with pytest.raises(SettingError, match=r"inference\.yaml is YAML.*pip install pyyaml"):
        open_model(str(tmp_path / "bundle"))


class TestZip:
    def pack(self, tmp_path, top="unet/", extra=()):
        make_bundle(tmp_path / "bundle")
        with zipfile.ZipFile(tmp_path / "b.zip", "w") as file:
            for path in sorted((tmp_path / "bundle").rglob("*")):
                file.write(path, top + str(path.relative_to(tmp_path / "bundle")))
            for name, mode in extra:
                info = zipfile.ZipInfo(name)
                info.external_attr = mode << 16
                file.writestr(info, "x")
        return str(tmp_path / "b.zip")

    @pytest.mark.parametrize("top", ["", "unet/", "a/b/"])
    def test_it_is_the_same_bundle(self, tmp_path, top, monkeypatch):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
        (tmp_path / "temporary").mkdir()
        opened = open_model(self.pack(tmp_path, top))
        assert opened.fingerprint == open_model(str(tmp_path / "bundle")).fingerprint
        assert opened.name == "b"
        assert not list((tmp_path / "temporary").iterdir())

    @pytest.mark.parametrize(
        ("name", "mode"),
        [
            ("/etc/evil", 0o100644),
            ("a/../../evil", 0o100644),
            ("..\\evil", 0o100644),
            ("C:/evil", 0o100644),
            ("unet/link", 0o120777),
            ("unet/pipe", 0o010644),
        ],
    )
    def test_members_that_lead_elsewhere_are_refused(self, tmp_path, name, mode):
        with pytest.raises(StateError, match="not safe to unpack: its member"):
            open_model(self.pack(tmp_path, extra=[(name, mode)]))

    def test_size_is_limited(self, tmp_path, monkeypatch):
        monkeypatch.setattr(archive, "LARGEST", 100)
        with pytest.raises(StateError, match="would unpack to"):
            open_model(self.pack(tmp_path))

    def test_so_is_how_much_it_grows(self, tmp_path, monkeypatch):
        """Zeros shrink to a thousandth: no weights of a network do."""
        monkeypatch.setattr(archive, "FREE", 10**6)
        packed = self.pack(tmp_path)
        with zipfile.ZipFile(packed, "a", zipfile.ZIP_DEFLATED) as file:
            file.writestr("unet/models/zeros.bin", bytes(Path(packed).stat().st_size * 150 + 10**6))
        with pytest.raises(StateError, match=r"b\.zip of \d+ MB would unpack to \d+ MB.*unpack it and give the folder"):
            open_model(packed)

    def test_only_what_is_needed_is_unpacked(self, tmp_path, monkeypatch):
        """Not what lies beside the bundle, nor what a run left in it, however large it says it is."""
        packed = self.pack(tmp_path, extra=[("unet/eval/big.bin", 0o100644), ("other/models/x.pt", 0o100644)])
        unpacked = []
        extract = zipfile.ZipFile.extractall
        monkeypatch.setattr(
            zipfile.ZipFile,
            "extractall",
            lambda file, place, members: unpacked.extend(members) or extract(file, place, members),
        )
        open_model(packed)
        assert {Path(member.filename).parts[:2] for member in unpacked} == {("unet", "configs"), ("unet", "models")}

    def test_a_bundle_that_may_run_is_there_as_a_whole(self, tmp_path):
        packed = self.pack(tmp_path, extra=[("unet/scripts/own.py", 0o100644)])
        with archive.unpacked(Path(packed), None) as folder:
            assert (folder / "scripts" / "own.py").read_text() == "x"

    def test_torchscript_is_refused(self, tmp_path):
        torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), tmp_path / "b.ts")
        with pytest.raises(SettingError, match="TorchScript"):
            open_model(str(tmp_path / "b.ts"))

    def test_other_files_are_refused(self, tmp_path):
        (tmp_path / "b.zip").write_bytes(b"no zip")
        with pytest.raises(StateError, match="not a zip file"):
            open_model(str(tmp_path / "b.zip"))
        with zipfile.ZipFile(tmp_path / "b.zip", "w") as file:
            file.writestr("readme", "x")
        with pytest.raises(SettingError, match="holds no MONAI bundles"):
            open_model(str(tmp_path / "b.zip"))
