"""2 networks. Our images as nnU-Net's readers give them, its preprocessing, and its way back to the file's grid."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from nibabel.orientations import apply_orientation, axcodes2ornt, io_orientation, ornt_transform
from numpy.typing import NDArray
from torch import Tensor

from dltta.data.formats.images import Geometry, Image
from dltta.errors import InputError, SettingError
from dltta.models.io.nnunet.plan import Plan
from dltta.models.io.opened import Prepared, Segmented, require_classes

FLAT = 999.0  # spacing that nnU-Net gives the axis that a 2-D image does not have
VOLUMES = ("SimpleITKIO", "NibabelIO")  # give axes in the file's order, turned round
REORIENTED = "NibabelIOWithReorient"  # the same, after turning the image to right, anterior, superior
PICTURES = "NaturalImage2DIO"
FAILURES = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)


def require_reader(plan: Plan) -> None:
    """Raise for readers whose axes we cannot know."""
    if plan.reader not in (*VOLUMES, REORIENTED, PICTURES):
        raise SettingError(
            f"images of this model are read by {plan.reader}; supported: {', '.join((*VOLUMES, REORIENTED))}"
        )


@dataclass(frozen=True)
class NNUNetImages:
    """`OpenedModel.prepare` of an nnU-Net."""

    plan: Plan

    def __call__(self, image: Image) -> Prepared:
        channels = len(image.array)
        if channels != self.plan.in_channels:
            raise InputError(f"the network takes images of {self.plan.in_channels} channels, this one has {channels}")
        data, spacing, back = as_read(image, self.plan.reader)
        prepared, _, properties = self._preprocessed(data, None, spacing)
        x = torch.from_numpy(prepared).to(dtype=torch.float32, memory_format=torch.contiguous_format)

        def segment(logits: Tensor) -> Segmented:
            require_classes(logits, self.plan.classes)
            return _segmented(self.plan, logits, properties, back)

        def restore(probability: Tensor) -> Tensor:
            return segment(probability.clamp_min(torch.finfo(torch.float32).tiny).log()).probabilities

        def label(found: Tensor) -> Tensor:
            mask, *_ = as_read(replace(image, array=found[None].float().numpy()), self.plan.reader)
            _, moved, _ = self._preprocessed(data, mask, spacing)
            return torch.from_numpy(moved[0]).long().clamp_min(0)  # nnU-Net marks what is outside of the body by -1

        return Prepared(x, restore, segment, label)

    def _preprocessed(
        self, data: NDArray[np.float32], mask: NDArray[np.float32] | None, spacing: list[float]
    ) -> tuple[NDArray[np.float32], NDArray[Any], dict[str, Any]]:
        """By nnU-Net: the image, the mask on its grid, and what is needed to go back."""
        plan, properties = self.plan, {"spacing": spacing}
        try:
            found: tuple[Any, Any, dict[str, Any]] = plan.configuration.preprocessor_class(verbose=False).run_case_npy(
                data, mask, properties, plan.plans, plan.configuration, dict(plan.dataset)
            )
        except FAILURES as error:
            reason = " ".join(str(error).split())[:160] or type(error).__name__
            raise InputError(f"nnU-Net cannot preprocess an image of {tuple(data.shape[1:])}: {reason}") from error
        return found


Back = Callable[[NDArray[Any]], NDArray[Any]]  # (…, z, y, x) as nnU-Net has it, to (…, *spatial) of the file


def as_read(image: Image, reader: str) -> tuple[NDArray[np.float32], list[float], Back]:
    """Data (C, z, y, x) and spacing as that reader of nnU-Net gives them, and the way back.

    A 2-D image is a volume of one slice.
    """
    array, geometry = image.array, image.geometry
    if reader == PICTURES or geometry.affine is None:
        if array.ndim != 3:
            raise InputError(f"{reader} takes 2-D images, this one is {array.ndim - 1}-D")
        return array[:, None], [FLAT, 1.0, 1.0], lambda found: found[..., 0, :, :]
    spacing = _zooms(geometry)
    if array.ndim == 3:
        widest = max(spacing) * FLAT
        return (
            array.swapaxes(1, 2)[:, None],
            [widest, *spacing[::-1]],
            lambda found: found[..., 0, :, :].swapaxes(-1, -2),
        )
    if reader == REORIENTED:
        return _reoriented(image, spacing)
    return array.transpose(0, 3, 2, 1), spacing[::-1], _turned


def _reoriented(image: Image, spacing: list[float]) -> tuple[NDArray[np.float32], list[float], Back]:
    own = io_orientation(image.geometry.affine)
    array = np.stack([apply_orientation(channel, own) for channel in image.array])
    turned = [0.0] * 3
    for axis, (place, _) in enumerate(own):
        turned[int(place)] = spacing[axis]
    home = ornt_transform(axcodes2ornt("RAS"), own)

    def back(found: NDArray[Any]) -> NDArray[Any]:
        volume = _turned(found)
        flat = volume.reshape(-1, *volume.shape[-3:])
        turned_back = np.stack([apply_orientation(each, home) for each in flat])
        return turned_back.reshape(*volume.shape[:-3], *turned_back.shape[-3:])

    return array.transpose(0, 3, 2, 1), turned[::-1], back


def _turned(found: NDArray[Any]) -> NDArray[Any]:
    return found.swapaxes(-1, -3)


def _zooms(geometry: Geometry) -> list[float]:
    """Voxel sizes as the header has them, which readers take; of DICOM, which has none, those of the affine."""
    if geometry.kind == "nifti":
        return [float(size) for size in geometry.header.get_zooms()[: len(geometry.shape)]]
    return list(geometry.spacing or (1.0,) * len(geometry.shape))


class _Keeping:
    """nnU-Net's label manager, which also keeps the resampled logits that it is asked to make a mask of."""

    def __init__(self, labels: Any) -> None:
        self._labels = labels
        self.logits: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._labels, name)

    def convert_logits_to_segmentation(self, logits: Any) -> Any:
        self.logits = logits
        return self._labels.convert_logits_to_segmentation(logits)


def _segmented(plan: Plan, logits: Tensor, properties: dict[str, Any], back: Back) -> Segmented:
    """nnU-Net's own export: resample the logits, take the class, put the crop back, undo the transposition."""
    from nnunetv2.inference.export_prediction import convert_predicted_logits_to_segmentation_with_correct_shape

    labels = _Keeping(plan.labels)
    mask = convert_predicted_logits_to_segmentation_with_correct_shape(
        logits.detach().cpu().numpy(),
        plan.plans,
        plan.configuration,
        labels,
        properties,
        num_threads_torch=torch.get_num_threads(),
    )
    chances = plan.labels.revert_cropping_on_probabilities(
        plan.labels.apply_inference_nonlin(labels.logits),
        properties["bbox_used_for_cropping"],
        properties["shape_before_cropping"],
    )
    order = [0, *(axis + 1 for axis in plan.plans.transpose_backward)]
    whole = torch.as_tensor(chances).float().numpy().transpose(order)
    return Segmented(
        torch.from_numpy(np.ascontiguousarray(back(mask)).astype(np.int64)),
        torch.from_numpy(np.ascontiguousarray(back(whole))),
    )
