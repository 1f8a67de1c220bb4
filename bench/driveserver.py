"""A server that speaks as much of SGLang as the driver needs, in one asyncio thread, and writes what a tap would.

``POST /generate`` is answered after ``--service`` seconds, at most ``--concurrency`` at a time if given, by a share of
``--rate`` tokens a second if given. With ``--capture`` the rows are written by the agent's own ``ShardWriter``, synced
in groups, as the tap does it. Run: ``python -m bench.driveserver --port-file FILE …``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from pathlib import Path

from fleetdump.agent.formats import Rid, Writer
from fleetdump.agent.shardwriter import NewPiece, ShardWriter
from fleetdump.agent.tensorfile import ids_sha256

HIDDEN = 4
SLOTS = 3
GROUP_SECONDS = 0.02
IDLE_CLOSE_SECONDS = 1.0


class Capture:
    """Writes the rows of requests, a group at a time, in a thread."""

    def __init__(self, directory: Path, server: str, launch_id: str):
        self._directory = directory
        self._writer = Writer(server, launch_id, "r0")
        self._shards: dict[str, ShardWriter] = {}
        self._waiting: list[tuple[Rid, list[int]]] = []
        self._idle = 0

    def add(self, rid: Rid, ids: list[int]) -> None:
        self._waiting.append((rid, ids))

    async def keep(self) -> None:
        """Write what was added, and close what has been idle, for ever."""
        while True:
            await asyncio.sleep(GROUP_SECONDS)
            waiting, self._waiting = self._waiting, []
            await asyncio.to_thread(self._write, waiting)

    def _write(self, waiting: list[tuple[Rid, list[int]]]) -> None:
        for rid, ids in waiting:
            if rid.run not in self._shards:
                self._shards[rid.run] = ShardWriter(self._directory / rid.run, self._writer)
            shape = [len(ids), SLOTS, HIDDEN]
            piece = NewPiece(f"{rid}:0", str(rid), 0, len(ids), ids_sha256(ids), "F32", shape, [*range(SLOTS)])
            self._shards[rid.run].add((piece, bytes(4 * len(ids) * SLOTS * HIDDEN)))
        self._idle = 0 if waiting else self._idle + 1
        for shards in self._shards.values():
            shards.sync()
            if self._idle * GROUP_SECONDS > IDLE_CLOSE_SECONDS:
                shards.close_shard()


class Server:
    """One HTTP/1.1 server; connections are kept."""

    def __init__(self, service: float, rate: float, capture: Capture | None):
        self._service = service
        self._rate = rate
        self._capture = capture
        self._free_at = 0.0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (int(line[15:]) for line in head.split(b"\r\n") if line[:15].lower() == b"content-length:"), 0
                )
                body = await reader.readexactly(length)
                answer = b"{}" if head.startswith(b"GET") else await self._generate(json.loads(body))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer))
        writer.close()

    async def _generate(self, request: dict[str, object]) -> bytes:
        rid, ids = Rid.parse(str(request["rid"])), request["input_ids"]
        assert rid is not None
        assert isinstance(ids, list)
        if self._rate:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + len(ids) / self._rate
            await asyncio.sleep(self._free_at - now)
        elif self._service:
            await asyncio.sleep(self._service)
        if self._capture is not None:
            self._capture.add(rid, ids)
        return b'{"text":"x"}'


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port-file", type=Path, required=True)
    parser.add_argument("--service", type=float, default=0.0)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--capture", type=Path)
    parser.add_argument("--server", default="main")
    parser.add_argument("--launch-id", default="00000001")
    options = parser.parse_args()
    capture = Capture(options.capture, options.server, options.launch_id) if options.capture else None
    server = await asyncio.start_server(
        Server(options.service, options.rate, capture).serve, "127.0.0.1", 0, backlog=512
    )
    temporary = options.port_file.with_suffix(".tmp")
    temporary.write_text(str(server.sockets[0].getsockname()[1]))
    temporary.replace(options.port_file)
    tasks = [server.serve_forever()] + ([capture.keep()] if capture else [])
    await asyncio.gather(*tasks)


if __name__ == "__main__":
    asyncio.run(main())
