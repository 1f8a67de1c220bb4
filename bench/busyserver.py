"""A real SGLang server kept busy by clients in a process of their own, which count the tokens that come.

Standard library alone, so that it runs wherever the server does.
"""

from __future__ import annotations

import http.client
import json
import mmap
import re
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

SLOT = struct.Struct("=Q")
TOKENS = 512
"""Tokens of one answer: long enough that clients seldom wait for a prefill at the same time."""
RETRY_SECONDS = 0.5
_COUNT = re.compile(rb'"completion_tokens": ?(\d+)')


class Load:
    """``clients`` requests at a time against the server on ``port`` of this machine, from ``with`` on."""

    def __init__(self, port: int, clients: int, scratch: Path) -> None:
        self._path = scratch / "tokens"
        self._path.write_bytes(bytes(SLOT.size * clients))
        self._command = [sys.executable, "-m", "bench.busyserver", str(port), str(self._path), str(clients)]
        self._clients = clients

    def __enter__(self) -> Load:
        self._process = subprocess.Popen(self._command, cwd=Path(__file__).parents[1])
        with self._path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), SLOT.size * self._clients)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def tokens(self) -> int:
        """How many have come so far, over all clients."""
        return sum(count for (count,) in SLOT.iter_unpack(self._shared[:]))

    def warm_up(self, tokens: int, seconds: float = 120.0) -> None:
        """Wait until that many have come. Raises ``TimeoutError`` when they do not."""
        end = time.monotonic() + seconds
        while self.tokens < tokens:
            if time.monotonic() > end or self._process.poll() is not None:
                raise TimeoutError(f"the server gave {self.tokens} of {tokens} tokens in {seconds:.0f} s")
            time.sleep(0.1)


def main() -> None:
    port, path, clients = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    with path.open("r+b") as file:
        shared = mmap.mmap(file.fileno(), SLOT.size * clients)
    threads = [threading.Thread(target=_ask_for_ever, args=(port, shared, slot)) for slot in range(clients)]
    for thread in threads:
        thread.start()


def _ask_for_ever(port: int, shared: mmap.mmap, slot: int) -> None:
    """One client; nobody else writes its slot."""
    counted = 0
    while True:
        counted = _ask(port, shared, slot, counted)


def _ask(port: int, shared: mmap.mmap, slot: int, counted: int) -> int:
    """One streamed answer; returns the client's count with its tokens. One that fails is followed by a pause."""
    sampling = {"max_new_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    body = json.dumps({"input_ids": [20 + slot, *range(20, 60)], "sampling_params": sampling, "stream": True})
    connection, latest = http.client.HTTPConnection("127.0.0.1", port, timeout=120), 0
    try:
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        for line in connection.getresponse():
            match = _COUNT.search(line)
            if match:
                latest = int(match[1])
                SLOT.pack_into(shared, slot * SLOT.size, counted + latest)
    except (OSError, http.client.HTTPException):
        time.sleep(RETRY_SECONDS)
    finally:
        connection.close()
    return counted + latest


if __name__ == "__main__":
    main()
