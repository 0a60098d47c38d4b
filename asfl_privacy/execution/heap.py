"""Freed memory kept by the process: the pages of one step's tensors serve the next."""

from __future__ import annotations

import ctypes
import sys

MIB = 1 << 20
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # glibc, malloc.h
KEPT = ((M_MMAP_THRESHOLD, 32 * MIB), (M_TRIM_THRESHOLD, 1024 * MIB), (M_TOP_PAD, 16 * MIB))
"""32 MiB is the most that glibc takes as the first."""


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed instead of giving it back to the kernel.

    A tensor of some 100 KiB or more is by default mapped afresh, or lies at the top of a heap that is trimmed as soon as
    it is freed; each page then faults and is zeroed again at every step, which can cost as much as the arithmetic. The
    price is resident memory: up to 1 GiB of freed memory stays with the process, where it is reused. Call it once, early,
    in the command line and in every worker process.

    Returns:
        Whether anything changed: False, silently, elsewhere than on Linux with glibc.

    Guarantee:
        No value changes, only where memory lies.

    Example:
        >>> isinstance(keep_freed_memory(), bool)
        True
    """
    if sys.platform != "linux":
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  (another C library has a mallopt that means something else, or none)
        mallopt = library.mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    taken = [mallopt(option, value) == 1 for option, value in KEPT]  # each is asked for, whatever became of the others
    return all(taken)
