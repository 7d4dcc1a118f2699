"""Who may do what? Tokens from a file, which holds only their hashes.

[[token]]
name = "scanner 3"                 # for the log
sha256 = "9f86d0…"                 # of the token: `dltta token` makes one
role = "submit"                    # read, submit (and read), admin (everything)
sites = ["hospital-a/*"]           # patterns of site names; "*" for all
"""

import hashlib
import hmac
import secrets
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from fnmatch import fnmatchcase
from pathlib import Path

from dltta.errors import SettingError

LOOPBACK = ("127.0.0.1", "localhost", "::1")  # names of this machine, as only itself sees it


class Role(IntEnum):
    """Each may do what those before it may."""

    READ = 1
    SUBMIT = 2
    ADMIN = 3


@dataclass(frozen=True)
class Grant:
    """What the bearer of one token may do."""

    name: str
    sha256: str
    role: Role
    sites: tuple[str, ...]

    def allows(self, role: Role, site: str | None = None) -> bool:
        """Whether it reaches this role, at this site or at any."""
        return self.role >= role and (site is None or any(fnmatchcase(site, pattern) for pattern in self.sites))


EVERYTHING = Grant("insecure", "", Role.ADMIN, ("*",))


@dataclass(frozen=True)
class Access:
    """Finds the grant of a token. Without grants everybody may do everything: only for `--insecure` on loopback."""

    grants: tuple[Grant, ...] | None

    def grant(self, token: str | None) -> Grant | None:
        """None for a token that nobody has; every hash is compared, in constant time."""
        if self.grants is None:
            return EVERYTHING
        given = hashlib.sha256((token or "").encode()).hexdigest()
        found = None
        for grant in self.grants:
            if hmac.compare_digest(grant.sha256, given):
                found = grant
        return found

    @classmethod
    def from_file(cls, path: Path) -> "Access":
        """The grants of a TOML file; one line about whatever is wrong with it."""
        try:
            content = tomllib.loads(path.read_text("utf-8"))
        except OSError as error:
            raise SettingError(f"{path} cannot be read: {error.strerror or error}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SettingError(f"{path} is not TOML: {error}") from error
        rows = content.get("token")
        if not isinstance(rows, list) or not rows:
            raise SettingError(f"{path} has no [[token]]; `dltta token` makes one")
        return cls(tuple(_grant(path, number, row) for number, row in enumerate(rows, 1)))


def _grant(path: Path, number: int, row: object) -> Grant:
    place = f"{path}: token {number}"
    if not isinstance(row, dict):
        raise SettingError(f"{place} is not a table; write [[token]]")
    unknown = sorted(set(row) - {"name", "sha256", "role", "sites"})
    if unknown:
        raise SettingError(f"{place} has {unknown[0]!r}; there are name, sha256, role and sites")
    digest, role, sites = row.get("sha256"), row.get("role"), row.get("sites")
    if not isinstance(digest, str) or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise SettingError(f"{place}: sha256 must be 64 hexadecimal digits in lower case")
    if role not in ("read", "submit", "admin"):
        raise SettingError(f"{place}: role must be read, submit or admin, got {role!r}")
    if not isinstance(sites, list) or not sites or not all(isinstance(site, str) for site in sites):
        raise SettingError(f'{place}: sites must be a list of patterns, such as ["*"]')
    return Grant(str(row.get("name", f"token {number}")), digest, Role[role.upper()], tuple(sites))


def new_token(name: str, role: str, sites: Sequence[str]) -> tuple[str, str]:
    """A fresh token, and the table that grants it."""
    import json

    token = secrets.token_urlsafe(32)
    digest = hashlib.sha256(token.encode()).hexdigest()
    patterns = json.dumps(list(sites))
    table = f'[[token]]\nname = {json.dumps(name)}\nsha256 = "{digest}"\nrole = "{role}"\nsites = {patterns}\n'
    return token, table
