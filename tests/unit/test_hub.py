"""A model by its name on the hub: in the cache, to be downloaded, or out of reach. The hub is a server of our own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from fleetdump.agent.checks_model import check_model
from fleetdump.agent.hub import is_hub_name
from fleetdump.agent.protocol import Finding
from fleetdump.agent.specs import ServerSpec

CONFIG = {"architectures": ["TinyForCausalLM"], "num_hidden_layers": 6, "hidden_size": 8, "torch_dtype": "bfloat16"}


class Hub(BaseHTTPRequestHandler):
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        status = {"/org/gated": 403, "/org/none": 404, "/org/broken": 500}.get(self.path.partition("/resolve")[0], 200)
        body = json.dumps(CONFIG).encode() if "listed" not in self.path else b"[]"
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The environment of a server whose hub is ours, and whose cache is empty."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    Hub.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "hf")}
        server.shutdown()


def look(env: dict[str, str], name: str = "org/tiny", layers: list[int] | None = None, *args: str) -> list[Finding]:
    return check_model(ServerSpec("a", "python", name, 1, env=env, args=list(args)), layers or []).findings


def fill_cache(env: dict[str, str], revision: str = "main", weights: bool = True) -> None:
    folder = Path(env["HF_HOME"]) / "hub" / "models--org--tiny"
    (folder / "snapshots" / "c0ffee").mkdir(parents=True)
    (folder / "snapshots" / "c0ffee" / "config.json").write_text(json.dumps(CONFIG))
    if weights:
        (folder / "snapshots" / "c0ffee" / "model.safetensors").write_bytes(b"1")
    (folder / "refs").mkdir()
    (folder / "refs" / revision).write_text("c0ffee")


def test_a_model_that_will_be_downloaded_has_its_layers_checked(env: dict[str, str]) -> None:
    download, layers = look(env, layers=[1, 7])
    assert (download.level, layers.level) == ("warning", "blocker")
    assert "6 layers, hidden 8" in download.text
    assert "[7]" in layers.text
    assert Hub.asked == ["/org/tiny/resolve/main/config.json"]


def test_a_model_in_the_cache_needs_no_hub(env: dict[str, str]) -> None:
    fill_cache(env)
    (found,) = look({**env, "HF_HUB_OFFLINE": "1"}, layers=[6])
    assert found.level == "ok"
    assert Hub.asked == []
    assert look(env, "org/tiny", [], "--revision", "v2")[0].level == "warning", "another revision is not there"
    assert Hub.asked == ["/org/tiny/resolve/v2/config.json"]


def test_a_config_without_weights_is_not_enough(env: dict[str, str]) -> None:
    fill_cache(env, weights=False)
    assert look({**env, "HF_HUB_OFFLINE": "1"})[0].level == "blocker"
    assert look(env)[0].level == "warning"


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("org/tiny", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ("org/tiny", {"TRANSFORMERS_OFFLINE": "true"}, "TRANSFORMERS_OFFLINE is set"),
        ("org/tiny", {"HF_ENDPOINT": "http://127.0.0.1:1"}, "refused"),
        ("org/tiny", {"http_proxy": "http://me:secret@127.0.0.1:1"}, "through the proxy 127.0.0.1:1"),
        ("org/tiny", {"HF_ENDPOINT": "ftp://127.0.0.1"}, "HF_ENDPOINT is no address"),
        ("org/gated", {}, "HTTP 403"),
        ("org/none", {}, "HTTP 404"),
        ("org/broken", {}, "HTTP 500"),
        ("org/listed", {}, "no object"),
    ],
)
def test_a_hub_that_does_not_give_it_is_a_blocker(
    name: str, changes: dict[str, str], words: str, env: dict[str, str]
) -> None:
    (found,) = look({**env, **changes}, name)
    assert found.level == "blocker"
    assert words in found.text
    assert "secret" not in found.text


def test_no_proxy_is_respected(env: dict[str, str]) -> None:
    proxies = {"http_proxy": "http://127.0.0.1:1", "NO_PROXY": "127.0.0.1"}
    assert look({**env, **proxies})[0].level == "warning"


@pytest.mark.parametrize("name", ["/models/x", "~/x", "./x", "a/b/c", "../x", ""])
def test_paths_are_no_names(name: str) -> None:
    assert not is_hub_name(name)
