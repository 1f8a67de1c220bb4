"""A stand-in for a server that starts: real SGLang's log, line by line, each written by the process that wrote it, with
SGLang's process titles, pipes and port. ``python3 replay.py sglang.launch_server --port N LOG FOLDER [FAULT AT]``.

Standard library alone. ``FAULT`` is what rank 1 (or the launcher) does when a line with ``AT`` is due, before it or in
its place; ``<folder>/fault`` is touched then. Faults that end go on with the log.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.server
import mmap
import os
import re
import signal
import socketserver
import subprocess
import sys
import threading
import time
from pathlib import Path

RANK = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?P<rank> TP\d+)?\] ?")
SECONDS = float(os.environ.get("REPLAY_SECONDS", "6"))
"""How long a fault that ends lasts."""
PAUSE = 0.003
TRICKLE = 1 << 20
"""Bytes a second."""


def say(line: str) -> None:
    """One line into the log, by one write; a disk that is full takes none."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


# --------------------------------------------------------------------------- what a rank can do
def trickle() -> None:
    """A slow file system: little by little, but never nothing."""
    end, piece = time.monotonic() + SECONDS, TRICKLE // 20
    while time.monotonic() < end:
        with open("/dev/zero", "rb", buffering=0) as file:
            file.read(piece)
        time.sleep(0.05)


def map_pages() -> None:
    """A loader that maps its files: no read() at all, pages come in from the disk."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(os.environ["REPLAY_FILE"], "rb") as file:
        size = os.fstat(file.fileno()).st_size
        pages = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
        pages.madvise(mmap.MADV_RANDOM)
        end, page = time.monotonic() + SECONDS, 0
        while time.monotonic() < end:
            page = (page + 7919) % (size >> 12)
            pages[page << 12]
            pages.madvise(mmap.MADV_DONTNEED, page << 12, 4096)
            libc.posix_fadvise(file.fileno(), ctypes.c_long(page << 12), ctypes.c_long(4096), 4)
            time.sleep(0.004)


def compile_kernel() -> None:
    """A compiler, which is a child, and works."""
    source = Path(sys.argv[-1]) / "kernel.c"
    lines = "".join(f"  x = x * a[{n}] + b[x & {n}]; y ^= x >> {n % 13};\n" for n in range(60_000))
    source.write_text(f"long f(long *a, long *b) {{\n  long x = 1, y = 2;\n{lines}  return x + y;\n}}\n")
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(subprocess.TimeoutExpired):
            command = ["gcc", "-O2", "-c", str(source), "-o", "/dev/null"]
            subprocess.run(command, check=False, timeout=max(0.1, end - time.monotonic()))


def spin() -> None:
    """In user code, without a system call."""
    turns = 0
    while True:
        turns += 1


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


FAULTS = {"trickle": trickle, "map": map_pages, "compile": compile_kernel, "spin": spin, "die": die, "stop": stop}


def rank() -> None:
    """Write each line that comes; do each fault that comes; say when it is done."""
    for line in sys.stdin:
        text = line.rstrip("\n")
        if text.startswith("!"):
            (Path(sys.argv[-1]) / "fault").touch()
            FAULTS[text[1:]]()
        else:
            say(text)
        os.write(1, b"k")


# --------------------------------------------------------------------------- the launcher
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    allow_reuse_address = False


def serve(port: int) -> None:
    """Open the port, or end as uvicorn does."""
    try:
        server = Server(("127.0.0.1", port), Answer)
    except OSError:
        address = f"('127.0.0.1', {port})"
        say(f"ERROR:    [Errno 98] error while attempting to bind on address {address}: address already in use")
        sys.exit(1)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def wait(process: subprocess.Popen[bytes]) -> None:
    """Until a rank has done what it was told: a read of its pipe, as SGLang's launcher waits for its ranks."""
    assert process.stdout is not None
    if not process.stdout.read(1):
        time.sleep(1e6)


def main() -> None:
    port, log, folder, fault, at = int(sys.argv[3]), *sys.argv[4:8]
    lines = Path(log).read_text(errors="replace").splitlines()
    ranks = {}
    for line in lines:
        match = RANK.match(line)
        who = match["rank"].strip() if match and match["rank"] else ""
        if who not in ranks and who:
            ranks[who] = subprocess.Popen(
                [f"sglang::scheduler_{who}", "-S", __file__, "rank", folder],
                executable=sys.executable,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env={**os.environ, "PYTHONHOME": sys.base_prefix},  # a title for a name leads to no library
            )
        stamp = time.strftime("[%Y-%m-%d %H:%M:%S") + (f" {who}] " if who else "] ")
        text = stamp + line[match.end() :] if match else line
        if fault and at in line and who in ("", "TP1"):
            if fault == "block":
                (Path(folder) / "fault").touch()
                time.sleep(1e6)
            tell(ranks[who], f"!{fault}")
            fault = ""
        if "Uvicorn running on" in line:
            serve(port)
        if who:
            tell(ranks[who], text)
        else:
            say(text)
        time.sleep(PAUSE)
        if "fired up and ready" in line:
            break
    time.sleep(1e6)


def tell(process: subprocess.Popen[bytes], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{text}\n".encode())
    wait(process)


if __name__ == "__main__":
    rank() if "rank" in sys.argv else main()
