"""1 images. What are the paper's data sets: input, labels, sites, terms, citation, where from, and in which folders?

The text is in `cards.toml`; `docs/data.md` shows the same, and a test keeps the two together.
"""

import difflib
import tomllib
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files

from dltta.errors import DataError


@dataclass(frozen=True)
class Card:
    """What a user must know before using a data set. Nothing is downloaded by us."""

    name: str
    title: str
    input: str
    labels: str
    sites: str
    split: str
    preprocessing: str
    license: str
    citation: str
    obtain: str
    uncertain: str
    folder: str  # a tree, as text

    def markdown(self) -> str:
        """The card as a section of `docs/data.md`."""
        rows = [
            f"- **{item.name.capitalize()}**: {getattr(self, item.name)}"
            for item in fields(self)
            if item.name not in ("name", "title", "folder")
        ]
        return "\n".join(
            [f"### {self.title} (`{self.name}`)", "", *rows, "", "```text", self.folder.rstrip(), "```", ""]
        )


@cache
def cards() -> dict[str, Card]:
    """All cards by name."""
    content = tomllib.loads(files("dltta.data").joinpath("cards.toml").read_text(encoding="utf-8"))
    return {name: Card(name=name, **text) for name, text in content.items()}


def card(name: str) -> Card:
    """The card of one data set."""
    if name not in cards():
        close = difflib.get_close_matches(name, cards(), n=1)
        do = f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(cards())}"
        raise DataError(f"no data set {name!r}; {do}")
    return cards()[name]
