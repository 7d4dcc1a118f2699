"""How does this process get memory from the system? glibc hands large blocks back after every use.

The activations of a network are such blocks: they are asked for again in the next pass, and the system fills each page
with zeros before giving it out. Keeping them makes a pass a good deal faster (docs/speed.md). Programs only: a library
must not decide this for its caller.
"""

import ctypes
import os
import platform

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of glibc's malloc.h
PADDING = 64 << 20  # bytes asked for beyond what is needed, so that asking is rare


def keep_freed_memory() -> bool:
    """Ask glibc to keep what is freed for the next pass; whether it will.

    Elsewhere, and when the environment sets glibc's allocator up itself (`MALLOC_…_`), nothing is changed.
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1, M_TOP_PAD: PADDING}  # -1: never
    return all(mallopt(name, value) == 1 for name, value in settings.items())
