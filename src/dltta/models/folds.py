"""2 networks. Networks of one architecture, trained on different parts of the data, as one network."""

from collections.abc import Sequence

from torch import Tensor, nn


class Folds(nn.Module):
    """Gives the mean of its networks' logits. An adapter of each is made by `config.make_adapter`."""

    def __init__(self, folds: Sequence[nn.Module]) -> None:
        super().__init__()
        for number, fold in enumerate(folds):
            self.add_module(str(number), fold)

    @property
    def folds(self) -> list[nn.Module]:
        return list(self.children())

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.folds
        logits: Tensor = first(x)
        for fold in others:
            logits = logits + fold(x)
        return logits / len(self.folds)


def each(model: nn.Module) -> list[nn.Module]:
    """The networks of an ensemble, or the one that there is."""
    return model.folds if isinstance(model, Folds) else [model]
