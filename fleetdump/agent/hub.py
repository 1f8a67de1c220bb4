"""Models of the Hugging Face hub by name: in this host's cache, or on the hub as this host reaches it."""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPException
from typing import IO, Any, Dict, List, Mapping, Optional

from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.scrub import proxy_address

MAIN = "main"
ENDPOINT = "https://huggingface.co"
SECONDS = 6.0
"""For each step of the one request."""
LONGEST_CONFIG = 4 << 20
TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?\Z")
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def is_hub_name(model: str) -> bool:
    """Whether SGLang would take ``model`` for a name of the hub: no directory here, and no path."""
    return not os.path.isdir(model) and bool(_HUB_NAME.match(model))


def is_switched_on(env: Mapping[str, str], name: str) -> bool:
    """As huggingface_hub reads a switch."""
    return env.get(name, "").upper() in ("1", "ON", "YES", "TRUE")


def endpoint(env: Mapping[str, str]) -> str:
    """Where the hub is."""
    return (env.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")


def cached(name: str, revision: str, env: Mapping[str, str]) -> str:
    """The folder of ``name`` at ``revision`` in the cache of whoever has the environment ``env``, "" without one."""
    home = env.get("HF_HOME") or os.path.join(env.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    folder = os.path.join(os.path.expanduser(cache), "models--" + name.replace("/", "--"))
    try:
        with open(os.path.join(folder, "refs", revision)) as file:
            revision = file.read().strip()
    except OSError:
        pass  # a commit has no reference
    snapshot = os.path.join(folder, "snapshots", revision)
    return snapshot if os.path.exists(os.path.join(snapshot, "config.json")) else ""


def fetch_config(name: str, revision: str, env: Mapping[str, str]) -> Dict[str, Any]:
    """The model's config.json from the hub, asked for as the server would: with its proxies and its token. Raises
    ``AgentFailure``: conflict where the hub is switched off, permission for a gated model, not_found, failed."""
    offline = next((switch for switch in _OFFLINE if is_switched_on(env, switch)), "")
    if offline:
        raise AgentFailure(
            "conflict",
            f"model {name} is not in this host's hub cache",
            why=f"{offline} is set, so the server may not download it",
            next_step=f"download it first (hf download {name}), or give a local directory as `model_path`",
        )
    url = f"{endpoint(env)}/{name}/resolve/{urllib.parse.quote(revision, safe='')}/config.json"
    if not url.startswith(("https://", "http://")):
        raise AgentFailure("usage", "HF_ENDPOINT is no address", why=endpoint(env), next_step="begin it with https://")
    try:
        with _opener(env).open(_request(url, env), timeout=SECONDS) as answer:
            config = json.loads(answer.read(LONGEST_CONFIG).decode())
    except urllib.error.HTTPError as error:
        raise _refused(name, url, error) from error
    except (OSError, HTTPException, ValueError) as error:
        raise _unreachable(name, url, env, error) from error
    if not isinstance(config, dict):
        raise AgentFailure("failed", f"the hub's config.json of {name} is no object", where=url)
    return config


def _request(url: str, env: Mapping[str, str]) -> urllib.request.Request:
    request = urllib.request.Request(url, headers={"User-Agent": "fleetdump"})  # noqa: S310 (http and https alone)
    token = next((env[variable] for variable in TOKEN_VARIABLES if env.get(variable)), "")
    if token and url.startswith("https://"):
        request.add_header("Authorization", f"Bearer {token}")
    return request


class _KeepToken(urllib.request.HTTPRedirectHandler):
    """Follows redirects; the token goes to no other server than the hub."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> Optional[urllib.request.Request]:
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new is not None and (new.type, new.host) != (req.type, req.host):
            new.headers.pop("Authorization", None)
        return new


def _opener(env: Mapping[str, str]) -> urllib.request.OpenerDirector:
    proxies = _proxies(env)
    host = urllib.parse.urlsplit(endpoint(env)).netloc
    exempt: Dict[str, str] = {"no": _either(env, "no_proxy")}
    if urllib.request.proxy_bypass_environment(host, exempt):  # type: ignore[attr-defined]
        proxies = {}
    return urllib.request.build_opener(urllib.request.ProxyHandler(proxies), _KeepToken)


def _proxies(env: Mapping[str, str]) -> Dict[str, str]:
    found = {scheme: _either(env, f"{scheme}_proxy") or _either(env, "all_proxy") for scheme in ("http", "https")}
    return {scheme: proxy for scheme, proxy in found.items() if proxy}


def _either(env: Mapping[str, str], name: str) -> str:
    return env.get(name) or env.get(name.upper()) or ""


def _refused(name: str, url: str, error: urllib.error.HTTPError) -> AgentFailure:
    if error.code in (401, 403):
        # The hub answers so for names that do not exist, too.
        return AgentFailure(
            "permission",
            f"the hub does not give model {name} to this server",
            where=url,
            why=f"HTTP {error.code}: it is gated or private, or there is none of that name",
            next_step="put HF_TOKEN: env:HF_TOKEN into the server's `env`, ask for access on its page, check the name",
        )
    if error.code == 404:
        step = "check `model_path`; a local directory begins with /"
        return AgentFailure("not_found", f"the hub has no model {name}", where=url, why="HTTP 404", next_step=step)
    return AgentFailure("failed", "the hub does not answer as it should", where=url, why=f"HTTP {error.code}")


def _unreachable(name: str, url: str, env: Mapping[str, str], error: Exception) -> AgentFailure:
    reason = getattr(error, "reason", None) or error
    proxies: List[str] = [proxy_address(proxy) for proxy in dict.fromkeys(_proxies(env).values())]
    through = f" (through the proxy {', '.join(proxies)})" if proxies else ""
    return AgentFailure(
        "failed",
        f"model {name} is not here, and the hub cannot be reached",
        where=url,
        why=f"{reason}{through}",
        next_step="give a local directory as `model_path`, or set HTTPS_PROXY or HF_ENDPOINT in the server's `env`",
    )
