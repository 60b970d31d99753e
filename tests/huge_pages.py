"""Memory in pages of 2 MB: a fork of a process with torch, which copies the table of pages, takes a third."""

import ctypes
from contextlib import suppress

HUGE, COLLAPSE = 2 << 20, 25  # bytes of a page, MADV_COLLAPSE


def use_huge_pages() -> None:
    """Move the memory of this process to huge pages. Linux before 6.1 refuses, which is no harm."""
    advise = ctypes.CDLL(None).madvise
    with suppress(OSError), open("/proc/self/maps") as maps:
        for place, access, _, _, inode, *_ in map(str.split, maps.readlines()):
            first, last = (int(address, 16) for address in place.split("-"))
            first, last = -(-first // HUGE) * HUGE, last // HUGE * HUGE
            if first < last and (access, inode) == ("rw-p", "0"):
                advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), COLLAPSE)
