"""6 update. Several networks that each adapt on their own and predict together, such as the folds of one training."""

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

from torch import Tensor, nn

from dltta.core.adapter import Adapter
from dltta.errors import SettingError, StateError


class Ensemble(nn.Module):
    """Adapters of networks that give the same classes; the prediction is the mean of their logits.

    Each has its own memory, rate and optimizer, and goes over the windows of an image alone (`predictor.py`). Names of
    parameters begin with the number of their member.
    """

    def __init__(self, members: Sequence[Adapter]) -> None:
        super().__init__()
        if len(members) < 2:
            raise SettingError(f"an ensemble has two members or more, got {len(members)}")
        self._members = nn.ModuleList(members)

    @property
    def members(self) -> list[Adapter]:
        return [cast(Adapter, member) for member in self._members]

    @property
    def model(self) -> nn.ModuleList:
        """The adapted networks."""
        return nn.ModuleList(member.model for member in self.members)

    @property
    def steps(self) -> int:
        return self.members[0].steps

    @property
    def batches_seen(self) -> int:
        return self.members[0].batches_seen

    def predict(self, x: Tensor) -> Tensor:
        """The prediction (B, C, *positions) of the networks as they now are, learning nothing and changing nothing."""
        return sum((member.predict(x) for member in self.members[1:]), self.members[0].predict(x)) / len(self._members)

    def reset(self) -> None:
        for member in self.members:
            member.reset()

    def adapted_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that move, by their name in `model`."""
        return {
            f"{number}.{name}": parameter
            for number, member in enumerate(self.members)
            for name, parameter in member.adapted_parameters().items()
        }

    def get_extra_state(self) -> dict[str, Any]:
        return {
            "adapted": list(self.adapted_parameters()),
            "memory": None,  # each member has its own
            "batches_seen": self.batches_seen,
            "members": [member.get_extra_state() for member in self.members],
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        if len(state.get("members", ())) != len(self._members):
            raise StateError("the saved state has another number of members; load it with the folds it was saved with")
        for member, own in zip(self.members, state["members"], strict=True):
            member.set_extra_state(own)


AnyAdapter: TypeAlias = Adapter | Ensemble
