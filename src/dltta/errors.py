"""Everything raised on purpose: what is wrong, what was found, what to do.

Each class is also the built-in it resembles, so that callers who do not know us still catch it. The command line prints
these as one line; anything else is a bug and keeps its traceback.
"""

import difflib
from collections.abc import Iterable


class DlttaError(Exception):
    """Anything raised on purpose by this package."""


class SettingError(DlttaError, ValueError):
    """An argument or a configuration value that cannot be used."""


class LayerNotFoundError(DlttaError, LookupError):
    """A layer name that the network does not have."""


class NothingToAdaptError(DlttaError, ValueError):
    """An objective that finds no parameter to move in this network."""


class InputError(DlttaError, ValueError):
    """An image or batch that cannot be adapted to; the adapter's state is as before."""


class NonFiniteError(DlttaError, ArithmeticError):
    """A loss, gradient, rate or prediction that is not a number; the adapter's state is as before."""


class StateError(DlttaError, ValueError):
    """A saved state or checkpoint that does not belong to what it is loaded into."""


class DataError(DlttaError, ValueError):
    """A data set on disk that is missing something or malformed."""


class WorkerLostError(DlttaError, RuntimeError):
    """A task of a grid whose workers were lost again and again."""


def require(what: str, found: str, known: Iterable[str]) -> None:
    """Raise with the nearest right spelling unless `found` is known."""
    known = [str(name) for name in known]  # members of an enum are shown as they are written
    if found in known:
        return
    close = difflib.get_close_matches(found, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
    raise SettingError(f"there is no {what} {found!r}; {hint}")
