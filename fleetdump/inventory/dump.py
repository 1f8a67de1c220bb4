"""Host configs as an inventory file again, each host with all that it needs; references to secrets stay references."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import yaml

from fleetdump.agent.specs import ServerSpec
from fleetdump.inventory.config import HostConfig

_OWN = ("name", "servers", "capture", "patience", "groups")
"""Fields that are not written as they are."""


def dump(hosts: Sequence[HostConfig]) -> str:
    """The YAML of an inventory without defaults and groups, which ``load`` reads as these hosts."""
    return yaml.safe_dump({"hosts": {host.name: _host(host) for host in hosts}}, sort_keys=False)


def _host(host: HostConfig) -> dict[str, Any]:
    settings = {name: value for name, value in asdict(host).items() if name not in _OWN and value not in (None, "", ())}
    settings["servers"] = [_server(server) for server in host.servers]
    settings["capture"] = _plain(asdict(host.capture))
    settings["patience"] = asdict(host.patience)
    return {name: value for name, value in _plain(settings).items() if value != []}


def _server(server: ServerSpec) -> dict[str, Any]:
    return {name: value for name, value in asdict(server).items() if value not in ([], {}, "")}


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """With lists for tuples, which YAML has not, and without what says nothing."""
    lists = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    return {name: value for name, value in lists.items() if value not in ([], "")}
