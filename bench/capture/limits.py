"""What the machine does at best: a plain copy from the device, and a plain sequential write.

``python limits.py MIB``, under an interpreter with torch, prints GB/s of copies of so many MiB from the GPU into pinned
memory; without a GPU, of copies in memory.
"""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import time
from pathlib import Path

WRITE_BYTES = 4 << 20
"""Bytes a call of ``write``."""


def plain_write(folder: Path, total: int, file_bytes: int) -> float:
    """Write ``total`` bytes into files of ``file_bytes`` in ``folder``, one after the other, each fsynced at its end
    and then deleted; gives GB/s (the deletion is not counted)."""
    block = mmap.mmap(-1, WRITE_BYTES)
    block.write(os.urandom(WRITE_BYTES))
    spent, left, path = 0.0, total, folder / "plain-write"
    while left > 0:
        size = min(file_bytes, left)
        start = time.perf_counter()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        written = 0
        with memoryview(block) as view:
            while written < size:
                written += os.write(descriptor, view[: min(WRITE_BYTES, size - written)])
        os.fsync(descriptor)
        os.close(descriptor)
        spent += time.perf_counter() - start
        path.unlink()
        left -= size
    return total / spent / 1e9


def plain_copy(size: int, repetitions: int = 9) -> float:
    """GB/s of copies of ``size`` bytes from the device into pinned memory, the median."""
    import torch

    on_device = torch.cuda.is_available()
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda" if on_device else "cpu")
    target = torch.empty(size, dtype=torch.uint8, pin_memory=on_device)
    seconds = []
    for _ in range(repetitions + 1):
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if on_device:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return size / statistics.median(seconds[1:]) / 1e9


if __name__ == "__main__":
    print(plain_copy(int(sys.argv[1]) << 20))
