"""The agent's answers as a stream: JSON frames, each on a line, raw bytes after a blob, and stray text before them."""

from __future__ import annotations

import collections
import json
from collections.abc import Callable, Iterator
from typing import Any

LONGEST_FRAME = 64 << 20
_NOISE_LINES = 20
_CHUNK = 1 << 16


class TornStream(Exception):
    """The stream ended in the middle of a frame or a blob."""


class FrameReader:
    """Reads frames with ``read(limit)``, which returns at most ``limit`` bytes and b"" at the end of the stream.

    A line that is no frame is not an error: a shell's start-up file, a banner or a wrapper may print before the agent
    does. The last such lines are kept in ``noise``.
    """

    def __init__(self, read: Callable[[int], bytes]):
        self._read = read
        self._buffer = bytearray()
        self.noise: collections.deque[str] = collections.deque(maxlen=_NOISE_LINES)

    def next_frame(self) -> dict[str, Any] | None:
        """The next frame; None at the end of the stream. Raises ``TornStream`` when a frame breaks off."""
        while True:
            line = self._line()
            if line is None:
                return None
            frame = _as_frame(line)
            if frame is not None:
                return frame
            if line.strip():
                self.noise.append(line.decode(errors="replace").rstrip()[:500])

    def blob(self, size: int) -> Iterator[bytes]:
        """The ``size`` raw bytes that follow a blob frame, in pieces; must be read before the next frame."""
        left = size
        while left:
            if not self._buffer and not self._fill():
                raise TornStream(f"a blob broke off {left} bytes before its end")
            piece = bytes(self._buffer[:left])
            del self._buffer[:left]
            left -= len(piece)
            yield piece

    def _line(self) -> bytes | None:
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if searched > LONGEST_FRAME:
                raise TornStream(f"a line is longer than {LONGEST_FRAME >> 20} MiB")
            if not self._fill():
                if self._buffer.startswith(b'{"type":'):
                    raise TornStream("the last frame broke off")
                rest, self._buffer = bytes(self._buffer), bytearray()
                return rest or None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def _fill(self) -> bool:
        data = self._read(_CHUNK)
        self._buffer += data
        return bool(data)


def _as_frame(line: bytes) -> dict[str, Any] | None:
    if not line.startswith(b"{"):
        return None
    try:
        frame = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return frame if isinstance(frame, dict) and isinstance(frame.get("type"), str) else None
