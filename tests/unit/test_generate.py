"""What goes to the server, byte for byte as SGLang gets it."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from fleetdump.agent.generate import prefill, server_info

Seen = list[tuple[str, dict[str, str], Any]]


@pytest.fixture
def sglang() -> Iterator[tuple[int, Seen]]:
    """A server on a free port that knows the old endpoint alone, and what it was sent."""
    seen: Seen = []

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200 if self.path == "/get_server_info" else 404, {"tp_size": 2})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, dict(self.headers), body))
            self.answer(200, {})

        def answer(self, status: int, data: Any) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(data).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port, seen
    server.shutdown()
    thread.join()
    server.server_close()


def test_each_request_has_a_key_of_its_own_in_the_prefix_cache(sglang: tuple[int, Seen]) -> None:
    port, seen = sglang
    for attempt in (1, 2):
        rid = f"fleetdump/r/a/{attempt}"
        assert prefill(port, rid, [5, 6], {"Authorization": "Bearer k"}).status == 200
    assert [body["extra_key"] for _, _, body in seen] == ["fleetdump/r/a/1", "fleetdump/r/a/2"]
    path, headers, body = seen[0]
    assert (path, headers["Authorization"], body["input_ids"]) == ("/generate", "Bearer k", [5, 6])
    assert body["sampling_params"] == {"max_new_tokens": 1, "temperature": 0}


def test_the_old_name_of_the_endpoint_is_known(sglang: tuple[int, Seen]) -> None:
    assert server_info(sglang[0]) == {"tp_size": 2}
    assert server_info(1) == {}
