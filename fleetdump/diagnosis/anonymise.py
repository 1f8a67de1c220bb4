"""Evidence without the names of hosts and users, so that it can be shown to anybody; the verdict stays the same."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from typing import Any

from fleetdump.agent.evidence_types import Evidence
from fleetdump.agent.protocol import from_json, to_json

HOST, USER = "host-1", "user-1"
_HOME = re.compile(r"/(?:home|Users)/([\w.-]+)|\bof user ([\w-]+)")
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.])")
_IPV6 = re.compile(r"(?<![\w:.])(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{0,4}(?![\w:])")
_PROXY_HOST = re.compile(r"^(\[[^\]]*\]|[^:]+)(:\d+)?$")
SYSTEM_USERS = frozenset({"root", "ubuntu", "user", USER})


def anonymise(evidence: Evidence) -> Evidence:
    """A copy with this host's name, the users of its home folders, and all addresses but loopback replaced.

    One name is always replaced by the same word, and an address by one of those kept for documentation, so that what
    belongs together still does.
    """
    data = to_json(evidence)
    mask = _Mask(evidence.hostname, _texts(data))
    masked = from_json(Evidence, _map(data, mask))
    masked.hostname = HOST
    masked.proxy = {name: _proxy(name, value) for name, value in masked.proxy.items()}
    return masked


class _Mask:
    """Replaces in one text after another."""

    def __init__(self, hostname: str, texts: list[str]) -> None:
        found = {home or login for text in texts for home, login in _HOME.findall(text)}
        users = sorted(found - SYSTEM_USERS)
        self._words = {user: f"user-{number}" for number, user in enumerate(users, 1)}
        short, _, domain = hostname.partition(".")
        if short and short != "localhost":
            self._words[short] = HOST
        names = sorted(map(re.escape, self._words), key=len, reverse=True)
        rest = rf"(?:\.{re.escape(domain)})?" if domain else ""
        self._pattern = re.compile(rf"(?<![\w-])({'|'.join(names)}){rest}(?![\w-])") if names else None
        self._addresses: dict[str, str] = {}

    def __call__(self, text: str) -> str:
        if self._pattern:
            text = self._pattern.sub(lambda match: self._words[match[1]], text)
        return _IPV6.sub(self._address, _IPV4.sub(self._address, text))

    def _address(self, match: re.Match[str]) -> str:
        try:
            address = ipaddress.ip_address(match[0])
        except ValueError:
            return match[0]
        if address.is_loopback or address.is_unspecified:
            return match[0]
        number = len(self._addresses) + 1
        place = f"192.0.2.{number % 256}" if address.version == 4 else f"2001:db8::{number:x}"
        return self._addresses.setdefault(str(address), place)


def _proxy(name: str, value: str) -> str:
    match = _PROXY_HOST.match(value)
    return f"proxy-1{match[2] or ''}" if match and name != "no_proxy" else value


def _texts(data: Any) -> list[str]:
    found: list[str] = []
    _map(data, lambda text: found.append(text) or text)  # type: ignore[func-returns-value]
    return found


def _map(data: Any, change: Callable[[str], str]) -> Any:
    if isinstance(data, str):
        return change(data)
    if isinstance(data, list):
        return [_map(item, change) for item in data]
    if isinstance(data, dict):
        return {change(key): _map(value, change) for key, value in data.items()}
    return data
