"""2 networks. A network that nnU-Net trained, with its own plans, preprocessing, windows and export."""

from pathlib import Path

from torch import nn

from dltta.errors import SettingError
from dltta.models.folds import Folds
from dltta.models.io.fingerprint import fingerprint
from dltta.models.io.nnunet.folder import choose_folds, read_checkpoint
from dltta.models.io.nnunet.images import NNUNetImages, require_reader
from dltta.models.io.nnunet.plan import Plan, read_plan
from dltta.models.io.nnunet.windows import NNUNetWindow
from dltta.models.io.opened import OpenedModel
from dltta.models.io.weights import require_fit

STEP = 0.5  # of windows, as a share of the patch: what nnUNetv2_predict uses


def open_nnunet(path: Path, *, fold: str | None = None) -> OpenedModel:
    """The network of a fold, or the networks of several, of `Dataset…/TRAINER__PLANS__CONFIGURATION`."""
    folder = choose_folds(path, fold)
    plan: Plan | None = None
    networks: list[nn.Module] = []
    for name in folder.folds:
        checkpoint = read_checkpoint(folder.checkpoint(name))
        found = read_plan(folder, checkpoint)
        if plan is not None and (found.trainer, found.patch) != (plan.trainer, plan.patch):
            raise SettingError(f"{path}: fold {name} is of another training than the first; give folds of one training")
        plan = plan or found
        networks.append(_weighted(plan, checkpoint["network_weights"], str(folder.checkpoint(name))))
    if plan is None:
        raise SettingError(f"{path} has no folds")
    require_reader(plan)
    model = networks[0] if len(networks) == 1 else Folds(networks).eval()
    description = {
        "plans": plan.plans.plans,
        "dataset": dict(plan.dataset),
        "configuration": plan.configuration.configuration,
        "mirroring": plan.mirroring,
        "folds": len(networks),
    }
    return OpenedModel(
        model=model,
        task="segmentation",
        classes=plan.classes,
        spatial_dims=len(plan.patch),
        in_channels=plan.in_channels,
        kind="nnunet",
        name=path.resolve().name,
        fingerprint=fingerprint(model, description=description),
        prepare=NNUNetImages(plan),
        window=NNUNetWindow(plan.patch, plan.mirroring, STEP, plan, model),
        size=plan.patch,
        nnunet=folder,
        takes_volumes=True,
    )


def _weighted(plan: Plan, weights: dict[str, object], path: str) -> nn.Module:
    network = plan.network()
    named = {name.removeprefix("module."): tensor for name, tensor in weights.items()}
    require_fit(path, named, network.state_dict())  # type: ignore[arg-type]
    network.load_state_dict(named)
    return network.eval()
