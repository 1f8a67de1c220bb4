"""Requests to an SGLang server on this machine's loopback, by ``http.client``: never through a proxy."""

from __future__ import annotations

import http.client
import json
import queue
import select
import threading
import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping, Optional

REQUEST_SECONDS = 3600.0
"""A server that answers nothing for so long is not waited for; a hang is seen and ended by ``watch``, not here."""

PROBE_SECONDS = 30.0
KEPT_SECONDS = 1.0
"""A connection that was idle for longer is not used again."""

Headers = Mapping[str, str]


@dataclass
class Reply:
    """How a request ended. ``status`` is the HTTP status, 0 when the connection failed or broke; ``refused``: nobody
    listens on the port, so the request reached no server."""

    status: int
    detail: str = ""
    data: Any = None
    refused: bool = False


def post(
    port: int, path: str, body: Dict[str, Any], headers: Optional[Headers] = None, timeout: float = REQUEST_SECONDS
) -> Reply:
    """POST ``body`` as JSON to 127.0.0.1; never raises for what a server or network can do. ``headers``: those of
    ``access.authorization``."""
    return _request("POST", port, path, json.dumps(body).encode(), headers, timeout)


def get(port: int, path: str, headers: Optional[Headers] = None, timeout: float = PROBE_SECONDS) -> Reply:
    """GET from 127.0.0.1, likewise."""
    return _request("GET", port, path, None, headers, timeout)


def _request(
    method: str, port: int, path: str, body: Optional[bytes], headers: Optional[Headers], timeout: float
) -> Reply:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        return _exchange(connection, method, path, body, headers)
    finally:
        connection.close()


def _exchange(
    connection: http.client.HTTPConnection, method: str, path: str, body: Optional[bytes], headers: Optional[Headers]
) -> Reply:
    try:
        connection.request(method, path, body, {"Content-Type": "application/json", **(headers or {})})
        response = connection.getresponse()
        text = response.read()
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        return Reply(0, f"{type(error).__name__}: {error}", refused=isinstance(error, ConnectionRefusedError))
    try:
        data = json.loads(text) if text else None
    except ValueError:
        data = None
    return Reply(response.status, text[:300].decode("utf-8", "replace") if response.status != 200 else "", data)


class KeptConnection(threading.local):
    """Each thread's connection to the server, used again while it is surely open: a request that meets a closing one
    would look as if the server had died of it."""

    def __init__(self) -> None:
        self._connection: Optional[http.client.HTTPConnection] = None
        self._used = 0.0

    def to(self, port: int) -> http.client.HTTPConnection:
        """A connection to this port of the loopback, open or to be opened."""
        kept = self._connection
        if kept is None or kept.port != port or not self._is_open(kept):
            if kept is not None:
                kept.close()
            kept = self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_SECONDS)
        return kept

    def used(self) -> None:
        """An exchange has ended now."""
        self._used = time.monotonic()

    def _is_open(self, connection: http.client.HTTPConnection) -> bool:
        """Servers close what is idle (uvicorn after 5 s): then the socket has something to read, its end."""
        if connection.sock is None or time.monotonic() - self._used > KEPT_SECONDS:
            return False
        return not select.select([connection.sock], [], [], 0)[0]


_kept = KeptConnection()


def prefill(port: int, rid: str, ids: List[int], headers: Optional[Headers] = None) -> Reply:
    """Have the server prefill ``ids`` as request ``rid``: one token is generated, greedily, and thrown away. A prefix
    cache, where the server keeps one, finds nothing for it: the extra key is part of what prefixes are found by, and
    no other request has this one (SGLang before 0.5.11 takes it and ignores it)."""
    sampling = {"max_new_tokens": 1, "temperature": 0}
    body = {"input_ids": ids, "rid": rid, "extra_key": rid, "sampling_params": sampling}
    reply = _exchange(_kept.to(port), "POST", "/generate", json.dumps(body).encode(), headers)
    _kept.used()
    return reply


def is_ready(port: int) -> bool:
    """Whether the server serves: /health of SGLang runs a generation once the warm-up is done, and is 503 before."""
    return get(port, "/health").status == 200


def server_info(port: int, headers: Optional[Headers] = None) -> Dict[str, Any]:
    """What the server says of itself, its arguments among it; empty when it does not."""
    for path in ("/server_info", "/get_server_info"):
        reply = get(port, path, headers)
        if reply.status == 200 and isinstance(reply.data, dict):
            return reply.data
    return {}


def context_length(port: int, headers: Optional[Headers] = None) -> int:
    """The longest prompt (plus one) that the server takes, 0 when it does not say."""
    info = server_info(port, headers)
    known = [info.get(key) for key in ("context_length", "max_req_input_len", "max_total_num_tokens")]
    return min((number for number in known if isinstance(number, int) and number > 0), default=0)


class Threads:
    """Runs blocking calls in threads, as many as are busy at once, and hands their results to one queue."""

    def __init__(self) -> None:
        self.results: queue.Queue[Any] = queue.Queue()
        self._jobs: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._threads = 0
        self._busy = 0

    def run(self, call: Callable[[], Any]) -> None:
        """Start ``call`` now; what it returns comes out of ``next``."""
        self._busy += 1
        if self._busy > self._threads:
            self._threads += 1
            threading.Thread(target=self._work, daemon=True).start()
        self._jobs.put(call)

    def next(self, timeout: float) -> Optional[Any]:
        """A result, or None after ``timeout`` seconds without one. Re-raises what a call raised."""
        try:
            result = self.results.get(timeout=timeout) if timeout > 0 else self.results.get_nowait()
        except queue.Empty:
            return None
        self._busy -= 1
        if isinstance(result, BaseException):
            raise result
        return result

    def _work(self) -> None:
        while True:
            call = self._jobs.get()
            try:
                self.results.put(call())
            except BaseException as error:  # handed to the caller of next()
                self.results.put(error)
