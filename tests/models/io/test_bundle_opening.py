"""Bundles made by MONAI: images as MONAI would have read them, predictions back on the voxels of the file."""

import copy
import json

import nibabel as nib
import numpy as np
import pytest
import torch
from monai.bundle import ConfigParser
from monai.inferers import SlidingWindowInferer
from monai.networks.nets import SegResNet
from PIL import Image as Pillow

from bundles import CONFIG, METADATA, UNET, config, make_bundle, network, probabilities, transforms
from dltta.data.formats.images import Geometry, Image, read_image
from dltta.errors import InputError, SettingError
from dltta.models.io.opening import Window, open_model

LOAD = {"_target_": "LoadImaged", "keys": "image"}
FIRST = {"_target_": "EnsureChannelFirstd", "keys": "image"}
ORIENT = {"_target_": "Orientationd", "keys": "image", "axcodes": "RAS"}
SPACING = {"_target_": "Spacingd", "keys": "image", "pixdim": [2.0, 2.0, 2.0], "mode": "bilinear"}
SHAPE = (24, 31, 11)


def oblique():
    """Anisotropic, rotated about all axes, first axis to the left, axes not in the order of space."""
    turn = nib.eulerangles.euler2mat(0.3, -0.2, 0.25)
    return nib.affines.from_matvec(turn[:, [1, 0, 2]] @ np.diag([-1.0, 1.5, 4.0]), [12.0, -30.0, 55.0])


def volume(path, values, affine=None):
    nib.save(nib.Nifti1Image(values, oblique() if affine is None else affine), path)
    return read_image(path)


def world(affine, shape):
    """Millimeters (3, *shape) of every voxel, by nibabel."""
    grid = np.stack(np.meshgrid(*(np.arange(n) for n in shape), indexing="ij"), axis=-1)
    return np.moveaxis(nib.affines.apply_affine(affine, grid), -1, 0)


def noise(shape=SHAPE):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32) * 100


def blobs(shape=SHAPE, classes=3):
    """A label with large regions, none symmetric."""
    x, y, z = np.meshgrid(*(np.linspace(0, 1, n) for n in shape), indexing="ij")
    return ((x + 0.5 * y > 0.7).astype(np.uint8) + ((y > 0.4) & (z > 0.35))).astype(np.uint8)


def opened(tmp_path, *steps, **parts):
    make_bundle(tmp_path / "b", config(preprocessing=transforms(*steps), **parts))
    return open_model(str(tmp_path / "b"))


def one_hot(label, classes=3):
    return torch.nn.functional.one_hot(torch.as_tensor(np.array(label)).long(), classes).movedim(-1, 0).float()


class TestDescription:
    def test_a_bundle_says_all_that_is_needed(self, tmp_path):
        model = make_bundle(tmp_path / "spleen")
        bundle = open_model(str(tmp_path / "spleen"))
        x = torch.rand(1, 1, 16, 16, 16)
        assert torch.equal(bundle.model(x), model(x))
        assert not bundle.model.training
        assert (bundle.kind, bundle.name, bundle.task) == ("bundle", "spleen", "segmentation")
        assert bundle.classes == ("background", "left", "right")
        assert (bundle.spatial_dims, bundle.in_channels, bundle.size) == (3, 1, (16, 16, 16))
        assert bundle.window == Window((16, 16, 16), 0.5, "gaussian", batch=4)
        assert (bundle.activation, bundle.rotation, bundle.checkpoint) == ("softmax", None, None)

    def test_without_metadata_the_network_is_asked(self, tmp_path):
        make_bundle(tmp_path / "b", config(inferer={"_target_": "SimpleInferer"}), metadata={})
        bundle = open_model(str(tmp_path / "b"))
        assert bundle.classes == ("background", "class_1", "class_2")
        assert (bundle.spatial_dims, bundle.in_channels, bundle.window) == (3, 1, None)
        assert open_model(str(tmp_path / "b"), classes=("a", "b", "c")).classes == ("a", "b", "c")

    def test_the_network_may_be_any_of_monais(self, tmp_path):
        net = {"_target_": "monai.networks.nets.SegResNet", "spatial_dims": 3, "in_channels": 1, "out_channels": 3,
               "init_filters": 8, "norm": ["group", {"num_groups": 2}], "blocks_down": [1, 1],
               "blocks_up": [1]}  # fmt: skip
        model = make_bundle(tmp_path / "b", config(network_def=net))
        bundle = open_model(str(tmp_path / "b"))
        assert isinstance(bundle.model, SegResNet)
        x = torch.rand(1, 1, 16, 16, 16)
        assert torch.equal(bundle.model(x), model(x))

    @pytest.mark.parametrize(
        ("inferer", "window"),
        [
            ({"roi_size": 16}, Window((16, 16, 16))),
            ({"roi_size": [8, -1, 8], "overlap": [0.1, 0.1, 0.1]}, Window((8, 0, 8), 0.1)),
            ({"roi_size": [-1, -1, -1]}, None),
            ({"roi_size": [16, 16, 16], "padding_mode": "reflect", "cval": -1.0, "sigma_scale": 0.2},
             Window((16, 16, 16), padding_mode="reflect", cval=-1.0, sigma_scale=0.2)),
        ],
    )  # fmt: skip
    def test_windows_are_the_inferers(self, tmp_path, inferer, window):
        make_bundle(tmp_path / "b", config(inferer={"_target_": "SlidingWindowInferer", **inferer}))
        assert open_model(str(tmp_path / "b")).window == window

    def test_a_window_says_its_size_for_an_image(self):
        assert Window((8, 0, 4)).size((20, 30, 40)) == (8, 30, 4)

    def test_a_training_configuration_will_do(self, tmp_path):
        """Its validation has what inference needs, here through macros, with labels that are not there."""
        make_bundle(tmp_path / "b", config())
        configs = tmp_path / "b" / "configs"
        (configs / "inference.json").unlink()
        keys = ["image", "label"]
        steps = [{**step, "keys": keys} for step in CONFIG["preprocessing"]["transforms"][:4]]
        train = {
            "network_def": UNET,
            "train": {"deterministic": steps, "random": [{"_target_": "RandFlipd", "keys": keys, "prob": "$1/2"}]},
            "validate": {
                "preprocessing": {"_target_": "Compose", "transforms": "%train::deterministic"},
                "inferer": CONFIG["inferer"],
                "postprocessing": transforms(
                    {"_target_": "Activationsd", "keys": "pred", "softmax": True},
                    {"_target_": "AsDiscreted", "keys": keys, "argmax": [True, False], "to_onehot": 3},
                ),
            },
        }
        train["validate"]["postprocessing"]["transforms"][1]["keys"] = ["pred", "label"]
        (configs / "train.json").write_text(json.dumps(train))
        bundle = open_model(str(tmp_path / "b"))
        assert bundle.window is not None
        image = volume(tmp_path / "a.nii.gz", noise())
        prepared = bundle.prepare(image)
        assert prepared.restore(probabilities(3, prepared.image.shape[1:])).shape == (3, *SHAPE)

    def test_the_fingerprint_tells_weights_and_configuration(self, tmp_path):
        make_bundle(tmp_path / "a")
        make_bundle(tmp_path / "b")
        make_bundle(tmp_path / "c", model=network(seed=1))
        make_bundle(tmp_path / "d", config(image_key="picture"))
        first, same, weights, setup = (open_model(str(tmp_path / name)).fingerprint for name in "abcd")
        assert first == same
        assert len({first, weights, setup}) == 3


class TestImages:
    @pytest.mark.parametrize("steps", [[LOAD, FIRST], [LOAD, FIRST, ORIENT], [LOAD, FIRST, ORIENT, SPACING],
                                       [{**LOAD, "ensure_channel_first": True}, ORIENT, SPACING]])  # fmt: skip
    def test_volumes_are_prepared_as_monai_does_with_the_file(self, tmp_path, steps):
        image = volume(tmp_path / "a.nii.gz", noise())
        prepared = opened(tmp_path, *steps).prepare(image)
        reference = ConfigParser({"x": transforms(*copy.deepcopy(steps))}).get_parsed_content("x")
        expected = reference({"image": str(tmp_path / "a.nii.gz")})["image"]
        assert torch.equal(prepared.image, expected.as_tensor())

    def test_transforms_that_monai_joins_are_joined(self, tmp_path):
        """Lazy resampling: one interpolation for several transforms, and one on the way back."""
        zoom = {"_target_": "Zoomd", "keys": "image", "zoom": 1.3, "mode": "bilinear", "keep_size": False}
        lazy = {**transforms(LOAD, FIRST, ORIENT, SPACING, zoom), "lazy": True}
        image = volume(tmp_path / "a.nii.gz", noise())
        make_bundle(tmp_path / "b", config(preprocessing=lazy))
        prepared = open_model(str(tmp_path / "b")).prepare(image)
        reference = ConfigParser({"x": copy.deepcopy(lazy)}).get_parsed_content("x")
        expected = reference({"image": str(tmp_path / "a.nii.gz")})["image"]
        assert torch.equal(prepared.image, expected.as_tensor())
        back = prepared.restore(probabilities(3, prepared.image.shape[1:]))
        assert back.shape == (3, *SHAPE)
        assert back.sum(dim=0).numpy() == pytest.approx(1, abs=1e-5)

    @pytest.mark.parametrize("color", [True, False])
    @pytest.mark.parametrize("load", [LOAD, {**LOAD, "reader": {"_target_": "PILReader", "reverse_indexing": False}}])
    def test_2d_images_are_prepared_as_monai_does_with_the_file(self, tmp_path, color, load):
        pixels = np.random.default_rng(0).integers(0, 256, (20, 33, 3) if color else (20, 33), dtype=np.uint8)
        Pillow.fromarray(pixels).save(tmp_path / "a.png")
        net = {**UNET, "spatial_dims": 2, "in_channels": 3 if color else 1}
        steps = [load, FIRST, {"_target_": "ScaleIntensityd", "keys": "image"}]
        make_bundle(
            tmp_path / "b", config(network_def=net, preprocessing=transforms(*steps), inferer=None), metadata={}
        )
        prepared = open_model(str(tmp_path / "b")).prepare(read_image(tmp_path / "a.png"))
        reference = ConfigParser({"x": transforms(*copy.deepcopy(steps))}).get_parsed_content("x")
        assert torch.equal(prepared.image, reference({"image": str(tmp_path / "a.png")})["image"].as_tensor())
        label = np.random.default_rng(1).integers(0, 3, (20, 33))
        turned = label if "reader" in load else label.T  # what the network saw
        assert torch.equal(prepared.restore(one_hot(turned)), one_hot(label))

    @pytest.mark.parametrize(("kind", "turned"), [("tiff", True), ("dicom", True), ("nifti", False)])
    def test_rows_come_first_in_2d_images_only(self, tmp_path, kind, turned):
        """MONAI's readers give columns first; a plane of NIfTI has the axes that its file has."""
        plane = Image(noise((10, 14))[None], Geometry(kind, (10, 14)))
        parts = config(network_def={**UNET, "spatial_dims": 2}, preprocessing=transforms(LOAD, FIRST), inferer=None)
        make_bundle(tmp_path / "b", parts, metadata={})
        prepared = open_model(str(tmp_path / "b")).prepare(plane)
        assert np.array_equal(prepared.image[0], plane.array[0].T if turned else plane.array[0])
        assert prepared.restore(probabilities(3, prepared.image.shape[1:])).shape == (3, 10, 14)

    def test_several_files_are_channels(self, tmp_path):
        first, second = (volume(tmp_path / f"{name}.nii.gz", noise() * factor) for name, factor in (("a", 1), ("b", 2)))
        make_bundle(
            tmp_path / "bundle",
            config(network_def={**UNET, "in_channels": 2}, preprocessing=transforms(LOAD, FIRST, ORIENT)),
            metadata={},
        )
        both = type(first)(np.concatenate([first.array, second.array]), first.geometry)
        prepared = open_model(str(tmp_path / "bundle")).prepare(both)
        reference = ConfigParser({"x": transforms(LOAD, FIRST, ORIENT)}).get_parsed_content("x")
        expected = reference({"image": [str(tmp_path / "a.nii.gz"), str(tmp_path / "b.nii.gz")]})["image"]
        assert torch.equal(prepared.image, expected.as_tensor())

    def test_the_file_name_goes_nowhere(self, tmp_path):
        image = volume(tmp_path / "Doe_John.nii.gz", noise())
        pipeline = opened(tmp_path, LOAD, FIRST).prepare
        assert "Doe" not in str(pipeline.compose({"image": image})["image"].meta)

    def test_an_image_that_does_not_fit_is_refused(self, tmp_path):
        bundle = opened(tmp_path, LOAD, FIRST, ORIENT)
        flat = volume(tmp_path / "flat.nii.gz", noise((10, 12)), np.eye(4))
        with pytest.raises(InputError, match="network takes 1 channels and 3 axes|preprocessing fails"):
            bundle.prepare(flat)

    def test_a_pipeline_without_a_loader_gets_the_image(self, tmp_path):
        image = volume(tmp_path / "a.nii.gz", noise())
        (tmp_path / "1").mkdir()
        (tmp_path / "2").mkdir()
        for folder, steps in (("1", [FIRST, ORIENT]), ("2", [ORIENT])):
            assert opened(tmp_path / folder, *steps).prepare(image).image.shape[0] == 1


class TestWayBack:
    def test_a_reoriented_label_comes_back_bit_for_bit(self, tmp_path):
        """The network's view is nibabel's canonical image; the prediction lies on the file's own voxels again."""
        label = blobs()
        image = volume(tmp_path / "a.nii.gz", label)
        prepared = opened(tmp_path, LOAD, FIRST, ORIENT).prepare(image)
        canonical = nib.as_closest_canonical(nib.load(tmp_path / "a.nii.gz"))
        seen = np.asanyarray(canonical.dataobj)
        assert seen.shape != label.shape  # else nothing is tested
        assert np.array_equal(prepared.image[0], seen)
        assert torch.equal(prepared.restore(one_hot(seen)), one_hot(label))

    def test_the_grid_of_the_network_lies_where_the_header_says(self, tmp_path):
        """Intensities that are a linear function of millimeters stay that function, 2 mm apart, and come back."""
        slope = np.array([0.8, -0.5, 0.3])
        ramp = np.tensordot(slope, world(oblique(), SHAPE), axes=1).astype(np.float32)
        image = volume(tmp_path / "a.nii.gz", ramp)
        prepared = opened(tmp_path, LOAD, FIRST, ORIENT, SPACING).prepare(image)
        seen = prepared.image[0].numpy()
        canonical = nib.as_closest_canonical(nib.load(tmp_path / "a.nii.gz")).affine
        directions = canonical[:3, :3] / nib.affines.voxel_sizes(canonical)
        inside = seen[2:-2, 2:-2, 2:-2]
        for axis in range(3):
            steps = np.diff(inside, axis=axis)
            assert steps == pytest.approx(2 * slope @ directions[:, axis], abs=1e-3)
        low, high = ramp.min() - 5, ramp.max() + 5
        share = (prepared.image[0] - low) / (high - low)
        back = prepared.restore(torch.stack([1 - share, 0.25 * share, 0.75 * share])).numpy()
        expected = (ramp - low) / (high - low)
        core = (slice(2, -2),) * 3
        assert back[1][core] == pytest.approx(0.25 * expected[core], abs=1e-4)
        assert back[2][core] == pytest.approx(0.75 * expected[core], abs=1e-4)
        assert back.sum(axis=0) == pytest.approx(1, abs=1e-5)

    def test_a_resampled_label_comes_back_but_for_its_edges(self, tmp_path):
        label = blobs()
        finer = {**SPACING, "pixdim": [0.8, 0.8, 0.8], "mode": "nearest"}
        image = volume(tmp_path / "a.nii.gz", label)
        prepared = opened(tmp_path, LOAD, FIRST, ORIENT, finer).prepare(image)
        back = prepared.restore(one_hot(prepared.image[0])).argmax(dim=0).numpy()
        assert back.shape == label.shape
        assert (back == label).mean() > 0.99

    def test_nearest_or_interpolated_as_the_bundle_inverts(self, tmp_path):
        postprocessing = copy.deepcopy(CONFIG["postprocessing"])
        image = volume(tmp_path / "a.nii.gz", noise())
        found = {}
        for nearest in (True, False):
            postprocessing["transforms"][1]["nearest_interp"] = nearest
            folder = tmp_path / str(nearest)
            folder.mkdir()
            prepared = opened(folder, LOAD, FIRST, ORIENT, SPACING, postprocessing=postprocessing).prepare(image)
            label = torch.randint(0, 3, prepared.image.shape[1:], generator=torch.Generator().manual_seed(0))
            found[nearest] = prepared.restore(one_hot(label))
        assert set(found[True].unique().tolist()) == {0.0, 1.0}
        assert len(found[False].unique()) > 10

    def test_the_prediction_is_that_of_monais_postprocessing(self, tmp_path):
        """A run as `monai.bundle run` does it, without us, against ours: the same label on every voxel."""
        image = volume(tmp_path / "a.nii.gz", noise())
        make_bundle(tmp_path / "b", config())
        steps = copy.deepcopy(CONFIG)
        del steps["postprocessing"]["transforms"][3]
        parser = ConfigParser({**steps, "device": "cpu"})
        data = parser.get_parsed_content("preprocessing")({"image": str(tmp_path / "a.nii.gz")})
        net = network()
        with torch.no_grad():
            data["pred"] = parser.get_parsed_content("inferer")(data["image"][None], net)[0]
        expected = parser.get_parsed_content("postprocessing")(data)["pred"][0]
        bundle = open_model(str(tmp_path / "b"))
        prepared = bundle.prepare(image)
        w = bundle.window
        inferer = SlidingWindowInferer(w.patch, w.batch, w.overlap, w.mode, w.sigma_scale, w.padding_mode, w.cval)
        with torch.no_grad():
            ours = prepared.restore(inferer(prepared.image[None], bundle.model)[0].softmax(dim=0)).argmax(dim=0)
        assert torch.equal(ours, expected.as_tensor().long())
        assert len(ours.unique()) > 1

    def test_what_was_cut_away_comes_back_as_background(self, tmp_path):
        values = np.zeros(SHAPE, dtype=np.float32)
        values[4:20, 6:25, 2:9] = 5
        image = volume(tmp_path / "a.nii.gz", values)
        crop = {"_target_": "CropForegroundd", "keys": "image", "source_key": "image"}
        pad = {"_target_": "DivisiblePadd", "keys": "image", "k": 16}
        prepared = opened(tmp_path, LOAD, FIRST, crop, pad).prepare(image)
        assert prepared.image.shape == (1, 16, 32, 16)
        back = prepared.restore(torch.tensor([0.1, 0.2, 0.7]).view(3, 1, 1, 1).expand(3, 16, 32, 16))
        inside = torch.from_numpy(values > 0)
        assert back[:, inside].unique(dim=1).flatten().tolist() == pytest.approx([0.1, 0.2, 0.7])
        assert back[:, ~inside].unique(dim=1).flatten().tolist() == [1.0, 0.0, 0.0]

    def test_2d_images_resized_for_the_network(self, tmp_path):
        pixels = np.random.default_rng(0).integers(0, 256, (20, 33), dtype=np.uint8)
        Pillow.fromarray(pixels).save(tmp_path / "a.png")
        resize = {"_target_": "Resized", "keys": "image", "spatial_size": [64, 32], "mode": "bilinear"}
        parts = config(
            network_def={**UNET, "spatial_dims": 2}, preprocessing=transforms(LOAD, FIRST, resize), inferer=None
        )
        make_bundle(tmp_path / "b", parts, metadata={})
        prepared = open_model(str(tmp_path / "b")).prepare(read_image(tmp_path / "a.png"))
        assert prepared.image.shape == (1, 64, 32)
        rows = torch.linspace(0, 1, 32)[None, :].expand(64, 32)  # MONAI's second axis is the image's first
        back = prepared.restore(torch.stack([rows, 1 - rows, 0 * rows]))
        assert back.shape == (3, 20, 33)
        assert back[0, :, 5].diff().min() > 0.02
        assert back[0, 7].diff().abs().max() < 1e-6

    def test_a_prediction_must_have_a_channel_per_class(self, tmp_path):
        prepared = opened(tmp_path, LOAD, FIRST).prepare(volume(tmp_path / "a.nii.gz", noise()))
        with pytest.raises(InputError, match="3 class probabilities are expected, got 2"):
            prepared.restore(torch.zeros(2, *SHAPE))

    def test_a_pipeline_that_forgets_what_it_did_is_refused(self, tmp_path):
        forget = {"_target_": "EnsureTyped", "keys": "image", "track_meta": False}
        image = volume(tmp_path / "a.nii.gz", noise())
        with pytest.raises(InputError, match="forgets what it did"):
            opened(tmp_path, LOAD, FIRST, ORIENT, forget).prepare(image)
        (tmp_path / "2").mkdir()
        prepared = opened(tmp_path / "2", LOAD, FIRST, forget).prepare(image)
        label = one_hot(blobs())
        assert torch.equal(prepared.restore(label), label)


def classifier(**parts):
    net = {"_target_": "DenseNet", "spatial_dims": 2, "in_channels": 3, "out_channels": 2, "init_features": 4,
           "growth_rate": 2, "block_config": [1, 1]}  # fmt: skip
    return config(network_def=net, preprocessing=transforms(LOAD, FIRST), inferer=None, **parts)


class TestAnswers:
    def test_a_classifier(self, tmp_path):
        definition = {"inputs": {"image": {"num_channels": 3}}, "outputs": {"pred": {"format": "classes",
                      "channel_def": {"0": "normal", "1": "tumor"}}}}  # fmt: skip
        postprocessing = transforms({"_target_": "Activationsd", "keys": "pred", "softmax": True})
        make_bundle(
            tmp_path / "b", classifier(postprocessing=postprocessing), metadata={"network_data_format": definition}
        )
        bundle = open_model(str(tmp_path / "b"))
        assert (bundle.task, bundle.classes) == ("classification", ("normal", "tumor"))
        pixels = np.zeros((20, 33, 3), dtype=np.uint8)
        Pillow.fromarray(pixels).save(tmp_path / "a.png")
        probability = torch.tensor([0.3, 0.7])
        assert torch.equal(bundle.prepare(read_image(tmp_path / "a.png")).restore(probability), probability)

    def test_one_sigmoid_channel_is_two_classes(self, tmp_path):
        postprocessing = transforms(
            {"_target_": "Activationsd", "keys": "pred", "sigmoid": True},
            {"_target_": "AsDiscreted", "keys": "pred", "threshold": 0.3},
        )
        metadata = copy.deepcopy(METADATA)
        metadata["network_data_format"]["outputs"]["pred"]["channel_def"] = {"0": "lesion"}
        make_bundle(
            tmp_path / "b",
            config(network_def={**UNET, "out_channels": 1}, postprocessing=postprocessing),
            metadata=metadata,
        )
        bundle = open_model(str(tmp_path / "b"))
        assert (bundle.activation, bundle.threshold, bundle.classes) == ("sigmoid", 0.3, ("background", "lesion"))
        assert bundle.labels(torch.tensor([[0.65, 0.75], [0.35, 0.25]])).tolist() == [1, 0]

    @pytest.mark.parametrize(
        ("channels", "steps", "words"),
        [
            (3, [{"_target_": "Activationsd", "keys": "pred", "sigmoid": True}], "classes may overlap"),
            (3, [{"_target_": "AsDiscreted", "keys": "pred", "threshold": 0.5}], "classes may overlap"),
            (1, [{"_target_": "AsDiscreted", "keys": "pred", "threshold": 0.5}], "on raw output"),
            (1, [{"_target_": "AsDiscreted", "keys": "pred", "argmax": True}], "always the same"),
            (3, [{"_target_": "KeepLargestConnectedComponentd", "keys": "pred"}], "KeepLargest.* not supported"),
            (
                3,
                [{"_target_": "MeanEnsembled", "keys": ["a", "b"], "output_key": "pred"}],
                "MeanEnsembled.* not supported",
            ),
        ],
    )
    def test_what_is_not_the_likeliest_class_is_refused(self, tmp_path, channels, steps, words):
        parts = config(network_def={**UNET, "out_channels": channels}, postprocessing=transforms(*steps))
        make_bundle(tmp_path / "b", parts, metadata={})
        with pytest.raises(SettingError, match=words):
            open_model(str(tmp_path / "b"))

    @pytest.mark.parametrize(
        ("parts", "words"),
        [
            ({"inferer": {"_target_": "SlidingWindowInferer", "roi_size": [8, 8]}}, "not supported for a 3-D network"),
            ({"inferer": {"_target_": "SlidingWindowInferer", "roi_size": 8, "overlap": [0.1, 0.2, 0.3]}},
             "one overlap"),
            ({"preprocessing": transforms(LOAD, {"_target_": "RandFlipd", "keys": "image"})}, "RandFlipd is random"),
            ({"preprocessing": transforms({"_target_": "ScaleIntensity"})}, "no dictionary transform"),
            ({"preprocessing": transforms({"_target_": "LoadImaged", "keys": ["t1", "t2"]})}, "several images, t1, t2"),
            ({"preprocessing": transforms({**LOAD, "as_closest_canonical": True})}, "no option 'as_closest_canonical'"),
            ({"network_def": {"_target_": "Compose"}}, "found Compose"),
            ({"network_def": {"_target_": "VarAutoEncoder", "spatial_dims": 3, "in_shape": [1, 16, 16, 16],
                              "out_channels": 1, "latent_size": 2, "channels": [2], "strides": [2]}},
             "returns a tuple"),
        ],
    )  # fmt: skip
    def test_what_cannot_be_honored_is_refused(self, tmp_path, parts, words):
        built = config(**parts)
        model = torch.nn.Identity() if built["network_def"]["_target_"] == "Compose" else None
        make_bundle(tmp_path / "b", built, model=model)
        with pytest.raises(SettingError, match=words) as caught:
            open_model(str(tmp_path / "b"))
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("formats", "words"),
        [
            ({"inputs": {"a": {}, "b": {}}}, "2 inputs"),
            ({"outputs": {"a": {}, "b": {}}}, "2 outputs"),
            ({"outputs": {"pred": {"format": "magnitude"}}}, "gives 'magnitude', not classes"),
            ({"outputs": {"pred": {"channel_def": {"0": "a", "1": "b"}}}}, "2 channels are named, the network gives 3"),
        ],
    )
    def test_metadata_that_contradicts_is_refused(self, tmp_path, formats, words):
        make_bundle(tmp_path / "b", metadata={"network_data_format": formats})
        with pytest.raises(SettingError, match=words):
            open_model(str(tmp_path / "b"))

    def test_a_task_that_it_has_not_is_refused(self, tmp_path):
        make_bundle(tmp_path / "b")
        with pytest.raises(SettingError, match="gives a segmentation, not a classification"):
            open_model(str(tmp_path / "b"), task="classification")

    def test_a_network_that_ends_with_a_softmax_is_refused(self, tmp_path):
        (tmp_path / "own.py").write_text(
            "import torch\ndef net(): return torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), torch.nn.Softmax(dim=1))\n"
        )
        with pytest.raises(SettingError, match="gives probabilities"):
            open_model(f"{tmp_path / 'own.py'}:net")


def test_expressions_run_when_allowed(tmp_path, monkeypatch):
    """A bundle of the usual kind, with code of its own."""
    monkeypatch.delitem(__import__("sys").modules, "scripts", raising=False)
    scripts = tmp_path / "b" / "scripts"
    steps = "$[monai.transforms.Orientationd(keys=@image_key, axcodes='RAS')]"
    parts = config(
        network_def={**UNET, "_target_": "scripts.nets.Net", "out_channels": "$1 + 2"},
        preprocessing={"_target_": "Compose", "transforms": "$@loading + @orienting"},
    )
    parts["loading"], parts["orienting"] = [LOAD, FIRST], steps
    model = network()
    make_bundle(tmp_path / "b", parts, model=model)
    scripts.mkdir()
    (scripts / "__init__.py").write_text("")
    (scripts / "nets.py").write_text("from monai.networks.nets import UNet\nclass Net(UNet): pass\n")
    image = volume(tmp_path / "a.nii.gz", noise())
    with pytest.raises(SettingError, match="--run-expressions"):
        open_model(str(tmp_path / "b"))
    bundle = open_model(str(tmp_path / "b"), run_expressions=True)
    x = torch.rand(1, 1, 16, 16, 16)
    assert torch.equal(bundle.model(x), model(x))
    prepared = bundle.prepare(image)
    seen = np.asanyarray(nib.as_closest_canonical(nib.load(tmp_path / "a.nii.gz")).dataobj)
    assert np.array_equal(prepared.image[0], seen)
