"""Which Unix socket is connected to which: /proc does not tell, the kernel's socket diagnosis (sock_diag) does."""

from __future__ import annotations

import socket
import struct
from typing import Dict, Iterator, Tuple

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
REQUEST_DUMP = 0x301
DONE, ERROR = 3, 2
ALL_STATES = 0xFFFFFFFF
SHOW_PEER = 4
ATTRIBUTE_PEER = 2
LIMIT = 1.0
ANSWER_BYTES = 16 << 20
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBHIII8x")
_SOCKET = struct.Struct("=BBBxI8x")
_ATTRIBUTE = struct.Struct("=HH")


def unix_peers() -> Dict[int, int]:
    """Inode of each connected Unix socket of this thread's network namespace to that of its other end; empty where the
    kernel does not say. Raises ``OSError`` when it does not answer in time."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as diag:
        diag.settimeout(LIMIT)
        request = _REQUEST.pack(socket.AF_UNIX, 0, 0, ALL_STATES, 0, SHOW_PEER)
        diag.send(_HEADER.pack(_HEADER.size + len(request), SOCK_DIAG_BY_FAMILY, REQUEST_DUMP, 1, 0) + request)
        found: Dict[int, int] = {}
        taken = 0
        while taken < ANSWER_BYTES:
            data = diag.recv(1 << 16)
            taken += len(data)
            for kind, body in _messages(data):
                if kind in (DONE, ERROR):
                    return found
                inode, peer = _inodes(body)
                if peer:
                    found[inode] = peer
        return found


def _messages(data: bytes) -> Iterator[Tuple[int, bytes]]:
    """Kind and body of each netlink message."""
    while len(data) >= _HEADER.size:
        length, kind, *_ = _HEADER.unpack_from(data)
        if length < _HEADER.size:
            return
        yield kind, data[_HEADER.size : length]
        data = data[(length + 3) & ~3 :]


def _inodes(body: bytes) -> Tuple[int, int]:
    """The socket's inode and its peer's (0: not connected)."""
    _, _, _, inode = _SOCKET.unpack_from(body)
    place = _SOCKET.size
    while place + _ATTRIBUTE.size <= len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, place)
        if kind == ATTRIBUTE_PEER and length >= 8:
            return inode, struct.unpack_from("=I", body, place + _ATTRIBUTE.size)[0]
        place += max((length + 3) & ~3, _ATTRIBUTE.size)
    return inode, 0
