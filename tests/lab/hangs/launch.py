"""A stand-in for a server of two ranks that really hangs: ``python3 launch.py sglang.launch_server --tp-size 2 --port N
--hang CASE``.

Standard library alone, for it runs on bare hosts. Each case is a pair: what the launcher does once its ranks are there,
and what each rank does. Whoever has come to where it hangs touches ``<folder>/hung-<name>`` first.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(os.environ.get("HANG_FOLDER", "/run/hang"))
INIT = "Init torch distributed begin."
LOAD = ("Load weight begin. avail mem=9 GB", "Load weight end. type=X, mem usage=1.00 GB.")
Act = Callable[[], None]


def hung(name: str) -> None:
    """The next line does not come back."""
    (FOLDER / f"hung-{name}").touch()


def sleep() -> None:
    """In the kernel, on nothing in particular."""
    time.sleep(1e6)


def futex() -> None:
    """On a lock that is never released."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def spin() -> None:
    """In user code, without a system call."""
    turns = 0
    while True:
        turns += 1


def zero_poll() -> None:
    """A poll that never waits, again and again."""
    poll = select.poll()
    poll.register(os.pipe()[0], select.POLLIN)
    while True:
        poll.poll(0)


def wait_for_flock() -> None:
    """For a lock that a process outside of the server holds."""
    with (FOLDER / "build.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def file_baton_wait() -> None:
    """As torch's FileBaton: the lock is a file that exists, whoever made it."""
    while (Path.home() / ".cache/torch_extensions/py311_cu128/fused/lock").exists():
        time.sleep(0.1)


def trickle() -> None:
    """Pages of a file on a disk, one at a time, in no order that read-ahead could follow."""
    path = os.environ["HANG_FILE"]
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        libc = ctypes.CDLL(None, use_errno=True)
        pages = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
        pages.madvise(mmap.MADV_RANDOM)
        page = 0
        while True:
            page = (page + 7919) % (size >> 12)
            pages[page << 12]
            pages.madvise(mmap.MADV_DONTNEED, page << 12, 4096)
            libc.posix_fadvise(file.fileno(), ctypes.c_long(page << 12), ctypes.c_long(4096), 4)
            time.sleep(0.005)


def eat_memory() -> None:
    """Until the kernel ends it."""
    kept = []
    while True:
        kept.append(b"x" * (1 << 20))


def write_log() -> None:
    """To a disk that is full: what fails is tried again."""
    while True:
        with contextlib.suppress(OSError):
            os.write(1, b"half a line ")
        time.sleep(0.05)


def fill_pipe() -> None:
    """To a standard output that nobody reads, once the other rank has logged its marks."""
    while not (FOLDER / "hung-rank1").exists():
        time.sleep(0.02)
    while True:
        os.write(1, b"x" * 4096)


def connect() -> None:
    """To an address that never answers."""
    address, _, port = os.environ["HANG_ADDRESS"].rpartition(":")
    with socket.socket() as sock:
        sock.connect((address, int(port)))


def compile_kernel() -> None:
    """In a compiler, which is a child."""
    source = FOLDER / "kernel.c"
    lines = "".join(f"  x = x * a[{n}] + b[x & {n}]; y ^= x >> {n % 13};\n" for n in range(60_000))
    source.write_text(f"long f(long *a, long *b) {{\n  long x = 1, y = 2;\n{lines}  return x + y;\n}}\n")
    while True:
        subprocess.run(["gcc", "-O2", "-c", str(source), "-o", "/dev/null"], check=False)


def die() -> None:
    """By a signal that nobody sees."""
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def read_first(readers: list[int]) -> None:
    """One ready pipe after the other, as launchers before 0.5.9 do."""
    for reader in readers:
        os.read(reader, 1)


def read_last(readers: list[int]) -> None:
    """The others have sent their message."""
    os.read(readers[-1], 1)


def read_own(readers: list[int]) -> None:
    """A pipe of which nobody else has the other end."""
    own, _ = os.pipe()
    os.read(own, 1)


def poll_all(readers: list[int]) -> None:
    """Every ready pipe and the ranks' lives, as newer launchers do."""
    poll = select.poll()
    for reader in readers:
        poll.register(reader, select.POLLIN)
    poll.poll()


def end(readers: list[int]) -> None:
    """The launcher dies, its ranks stay."""
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def write_and_sleep(readers: list[int]) -> None:
    """Its own log lines go to the full disk as well."""
    threading.Thread(target=write_log, daemon=True).start()
    time.sleep(1e6)


CASES: dict[str, tuple[Callable[[list[int]], None], tuple[Act, Act]]] = {
    "dead-writer": (read_first, (die, sleep)),
    "living-writer": (read_last, (sleep, futex)),
    "own-pipe": (read_own, (sleep, sleep)),
    "spin": (poll_all, (futex, spin)),
    "zero-poll": (poll_all, (futex, zero_poll)),
    "all-futex": (poll_all, (futex, futex)),
    "flock": (poll_all, (futex, wait_for_flock)),
    "stale-lock": (poll_all, (file_baton_wait, futex)),
    "stopped": (poll_all, (futex, sleep)),
    "trickle": (poll_all, (trickle, trickle)),
    "out-of-memory": (read_first, (futex, eat_memory)),
    "full-disk": (write_and_sleep, (futex, sleep)),
    "full-pipe": (poll_all, (fill_pipe, futex)),
    "port-taken": (poll_all, (futex, futex)),
    "compiling": (poll_all, (futex, compile_kernel)),
    "no-answer": (poll_all, (connect, connect)),
    "dead-launcher": (end, (futex, futex)),
    "traced": (poll_all, (futex, sleep)),
}
BEFORE_MARKS = {"no-answer"}
"""Cases that hang before any rank has logged a mark."""
WHILE_LOADING = {"trickle"}


def log(rank: int, text: str) -> None:
    print(f"[{time.strftime('%Y-%m-%d %H:%M:%S')} TP{rank}] {text}", flush=True)


def run_rank(case: str, rank: int, ready: int) -> None:
    """What rank ``rank`` does; ``ready`` is the descriptor on which it would announce itself."""
    launcher, acts = CASES[case]
    Path("/proc/self/comm").write_text("sglang::schedul")  # as setproctitle does
    if case not in BEFORE_MARKS:
        log(rank, INIT)
        for mark in LOAD[: 1 if case in WHILE_LOADING else 2]:
            log(rank, mark)
    if launcher is read_last and rank == 0:
        log(rank, "Memory pool end. avail mem=5 GB")
        os.write(ready, b"r")
    hung(f"rank{rank}")
    acts[rank]()


def run_launcher(case: str) -> None:
    """Start both ranks, then wait for them as the case says."""
    FOLDER.mkdir(exist_ok=True)
    print(f"server_args=ServerArgs(tp_size=2, port={sys.argv[sys.argv.index('--port') + 1]})", flush=True)
    readers, writers = [], []
    for rank in (0, 1):
        reader, writer = os.pipe()
        readers.append(reader)
        writers.append(writer)
        title = f"sglang::scheduler_TP{rank}"
        argv = [title, "-S", __file__, "rank", case, str(rank), str(writer)]
        # As with fork: a rank holds the pipes of those before it, so that the end of a dead one's is never seen.
        subprocess.Popen(argv, executable=sys.executable, pass_fds=writers)
    for writer in writers:
        os.close(writer)
    while len(list(FOLDER.glob("hung-rank*"))) < 2:
        time.sleep(0.02)
    hung("launcher")
    CASES[case][0](readers)


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        run_rank(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        run_launcher(sys.argv[sys.argv.index("--hang") + 1])
