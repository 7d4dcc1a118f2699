"""How much memory does this machine have for us? Containers and batch systems allow less than is built in."""

import re
from pathlib import Path

from dltta.errors import SettingError

SHARE = 0.5  # of the machine's memory that a stream takes unless it is told
MEMINFO = Path("/proc/meminfo")
CGROUP, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def total_memory() -> int | None:
    """Bytes that this process may use at most, whatever others use; None where the system does not say."""
    limits = [limit for limit, _ in _cgroups()]
    found = [*limits, _meminfo("MemTotal")]
    return min((bytes_ for bytes_ in found if bytes_ is not None), default=None)


def available_memory() -> int | None:
    """Bytes that are free for this process at this moment; None where the system does not say."""
    left = [max(limit - used, 0) for limit, used in _cgroups()]
    found = [*left, _meminfo("MemAvailable")]
    return min((bytes_ for bytes_ in found if bytes_ is not None), default=None)


def parse_bytes(text: str) -> int:
    """`8GB`, `500 MB`, `1.5GiB` or a plain number as bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    bytes_ = 0 if found is None or found[2] not in UNITS else int(float(found[1]) * UNITS[found[2]])
    if bytes_ < 1:
        raise SettingError(f"{text!r} is not an amount of memory; write 8GB or 500MB")
    return bytes_


def show_bytes(bytes_: float) -> str:
    """`1.2 GB`, `350 MB`."""
    return f"{bytes_ / 1e9:.1f} GB" if bytes_ >= 1e9 else f"{max(bytes_ / 1e6, 1):.0f} MB"


def _meminfo(name: str) -> int | None:
    found = re.search(rf"^{name}:\s+(\d+) kB$", _text(MEMINFO), re.MULTILINE)
    return None if found is None else int(found[1]) * 1024


def _cgroups() -> list[tuple[int, int]]:
    """Limit and use of every group that this process is in, of both versions; files that can be dropped are no use."""
    found = []
    for line in _text(OWN_CGROUPS).splitlines():
        _, _, rest = line.partition(":")
        kinds, _, inner = rest.partition(":")
        if kinds == "":
            names, place = ("memory.max", "memory.current", "inactive_file"), CGROUP
        elif "memory" in kinds.split(","):
            names, place = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"), CGROUP / "memory"
        else:
            continue
        folder = place / inner.lstrip("/")
        for group in (folder, *folder.parents):
            if not group.is_relative_to(place):
                break
            limit, used = _number(group / names[0]), _number(group / names[1]) or 0
            cache = re.search(rf"^{names[2]} (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
            if limit is not None:
                found.append((limit, used - (int(cache[1]) if cache else 0)))
    return found


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None  # "max" is no limit


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # another system, or hidden from us
        return ""
