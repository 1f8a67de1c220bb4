"""From an inventory file to an ``Inventory``: read, resolve groups, merge (defaults < group < host), check."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from yaml.nodes import MappingNode, Node

from fleetdump.agent.specs import Patience, ServerSpec
from fleetdump.errors import UsageError
from fleetdump.hostpatterns import MAX_HOSTS, PatternError, expand, has_glob, is_address, matches, split_selection
from fleetdump.inventory.config import CaptureConfig, HostConfig
from fleetdump.inventory.schema import HOST, LINE, SETTINGS
from fleetdump.inventory.selection import Inventory
from fleetdump.suggest import did_you_mean
from fleetdump.yamlmarks import Mistake, Reader, Schema, Wrong, YamlError, line_of

_GROUP_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
_MERGED = ("capture", "patience")
"""Settings that are merged key by key; every other one replaces what is below it."""


class InventoryError(YamlError):
    """An inventory with mistakes; ``mistakes`` has all of them, each with its line. Nothing was done on any host."""

    def __init__(self, path: Path, mistakes: list[Mistake]):
        super().__init__(path, "inventory", mistakes, "correct the file; inventory/example.yaml shows every setting")


def load(path: Path) -> Inventory:
    """Read an inventory. Raises ``InventoryError`` with every mistake at once, ``UsageError`` when there is no file."""
    if not path.exists():
        raise UsageError(
            "there is no inventory",
            str(path),
            "no such file",
            "write one with fleetdump init HOST..., or name it with -i FILE or FLEETDUMP_INVENTORY",
        )
    reader = Reader(path)
    inventory = None
    root = reader.document()
    if root is not None:
        with contextlib.suppress(Wrong):
            inventory = _Draft.read(reader, root).build(path)
    if inventory is None or reader.mistakes:
        raise InventoryError(path, reader.mistakes)
    return inventory


@dataclass
class _Host:
    line: int
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Group:
    node: Node
    patterns: list[tuple[Node, str]]
    """Expanded patterns, each with its node."""
    settings: dict[str, Any]


@dataclass
class _Draft:
    """What the file says, before it is put together."""

    reader: Reader
    defaults: dict[str, Any]
    groups: dict[str, _Group]
    hosts: dict[str, _Host]
    members: dict[str, set[str]] = field(default_factory=dict)
    """Names of each group's hosts, as far as they are known yet."""

    @classmethod
    def read(cls, reader: Reader, root: Node) -> _Draft:
        values = reader.fields(root, "", _FILE)
        draft = cls(reader, values.get("defaults", {}), values.get("groups", {}), values.get("hosts", {}))
        draft._add_hosts_of_groups()
        if not draft.hosts and not reader.mistakes:
            reader.fail(root, "the inventory has no hosts; add for instance hosts: {gpu01: {address: 10.0.0.1}}")
        return draft

    def build(self, path: Path) -> Inventory:
        for group in self.groups:
            self._find_members(group)
        hosts = tuple(self._host(name, host) for name, host in self.hosts.items())
        self._check_same_machine(hosts)
        defaults = _host_config("", "", (), self.defaults)
        groups = {group: tuple(n for n in self.hosts if n in self.members[group]) for group in self.groups}
        return Inventory(path, hosts, groups, defaults)

    # ------------------------------------------------------------------ groups
    def _add_hosts_of_groups(self) -> None:
        """A plain name in a group that ``hosts`` lacks (as name or address) is a host without settings of its own."""
        known = {host.settings.get("address", name) for name, host in self.hosts.items()} | set(self.hosts)
        for group in self.groups.values():
            for node, pattern in group.patterns:
                if pattern.startswith("@") or has_glob(pattern) or pattern in known:
                    continue
                if is_address(pattern):
                    self.hosts.setdefault(pattern, _Host(line_of(node)))
                else:
                    self.reader.note(node, f"{pattern!r} is not a host name, pattern or @group")
            if len(self.hosts) > MAX_HOSTS:
                self.reader.fail(group.node, f"the inventory has more than {MAX_HOSTS} hosts")

    def _find_members(self, name: str, inside: tuple[str, ...] = ()) -> set[str]:
        if name in self.members:
            return self.members[name]
        members: set[str] = set()
        for node, pattern in self.groups[name].patterns:
            if pattern.startswith("@"):
                members |= self._subgroup(node, pattern[1:], (*inside, name))
                continue
            found = self._matching(pattern)
            if not found and has_glob(pattern):
                self.reader.note(node, f"groups.{name}: no host matches {pattern!r}{did_you_mean(pattern, self.hosts)}")
            members |= found
        self.members[name] = members
        return members

    def _matching(self, pattern: str) -> set[str]:
        if pattern in self.hosts and not has_glob(pattern):  # quick for ranges of thousands
            return {pattern}
        return {n for n, h in self.hosts.items() if matches(pattern, (n, h.settings.get("address", n)))}

    def _subgroup(self, node: Node, name: str, inside: tuple[str, ...]) -> set[str]:
        if name in inside:
            self.reader.note(node, f"groups.{inside[0]}: contains itself by way of @{name}")
        elif name not in self.groups:
            self.reader.note(node, f"groups.{inside[-1]}: unknown group '@{name}'{did_you_mean(name, self.groups)}")
        else:
            return self._find_members(name, inside)
        return set()

    # ------------------------------------------------------------------ hosts
    def _host(self, name: str, host: _Host) -> HostConfig:
        groups = tuple(group for group in self.groups if name in self.members[group])
        layers = [self.defaults, *(self.groups[group].settings for group in groups), host.settings]
        settings = _merge(layers)
        self._check_capture(settings.get("capture", {}))
        self._check_python(settings)
        return _host_config(name, settings.pop("address", name), groups, settings)

    def _check_python(self, settings: Mapping[str, Any]) -> None:
        if "python" in settings or self.reader.wrong_keys & {"python", "defaults", "vars"}:
            return
        for template in settings.get("servers", ()):
            if not template.python:
                self.reader.note(
                    template.line,
                    f"server {template.name!r} has no python; set it in the server, its host or group, or in defaults",
                )

    def _check_capture(self, capture: Mapping[str, Any]) -> None:
        for key, other in (("layers", "dir"), ("dir", "layers")):
            if key in capture and other not in capture and other not in self.reader.wrong_keys:
                self.reader.note(capture[LINE], f"capture has {key!r} but no {other!r}")

    def _check_same_machine(self, hosts: tuple[HostConfig, ...]) -> None:
        seen: dict[tuple[Any, ...], str] = {}
        for host in hosts:
            place = (host.address, host.port, host.connection, host.exec_prefix, host.state_dir)
            first = seen.setdefault(place, host.name)
            if first != host.name:
                self.reader.note(self.hosts[host.name].line, f"hosts {first!r} and {host.name!r} are the same machine")


def _merge(layers: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            merged[key] = {**merged.get(key, {}), **value} if key in _MERGED else value
    return merged


def _host_config(name: str, address: str, groups: tuple[str, ...], settings: Mapping[str, Any]) -> HostConfig:
    values = dict(settings)
    capture = {key: value for key, value in values.pop("capture", {}).items() if key != LINE}
    servers: Iterator[ServerSpec] = (
        spec for template in values.pop("servers", ()) for spec in template.specs(values.get("python", ""))
    )
    return HostConfig(
        name=name,
        address=address,
        groups=groups,
        servers=tuple(servers),
        capture=CaptureConfig(**capture),
        patience=Patience(**values.pop("patience", {})),
        **values,
    )


# --------------------------------------------------------------------------- parsers of the file's three parts
def _settings(reader: Reader, node: Node, what: str) -> dict[str, Any]:
    return reader.fields(node, what, SETTINGS)


def _groups(reader: Reader, node: Node, what: str) -> dict[str, _Group]:
    groups: dict[str, _Group] = {}
    for name, (key, value) in reader.mapping(node, what).items():
        if not _GROUP_NAME.match(name):
            reader.note(key, f"{what}: {name!r} is not a group name (letters, digits, '.', '_', '-')")
            continue
        with contextlib.suppress(Wrong):
            values = reader.fields(value, f"{what}.{name}", _GROUP, required=("hosts",))
            groups[name] = _Group(key, values.get("hosts", []), values.get("vars", {}))
    return groups


def _group_hosts(reader: Reader, node: Node, what: str) -> list[tuple[Node, str]]:
    patterns: list[tuple[Node, str]] = []
    for n, item in enumerate(reader.items(node, what)):
        with contextlib.suppress(Wrong):
            text = reader.text(item, f"{what}[{n}]")
            try:
                for piece in split_selection(text):
                    patterns += [(item, name) for name in ([piece] if piece.startswith("@") else expand(piece))]
            except PatternError as error:
                reader.fail(item, f"{what}[{n}]: {error}")
        if len(patterns) > MAX_HOSTS:
            reader.fail(item, f"{what}: stands for more than {MAX_HOSTS} hosts")
    if not reader.items(node, what):
        reader.fail(node, f"{what}: has no host")
    return patterns


def _hosts(reader: Reader, node: Node, what: str) -> dict[str, _Host]:
    hosts: dict[str, _Host] = {}
    for key, pattern, value in _host_entries(reader, node, what):
        with contextlib.suppress(Wrong):
            settings = {} if value is None else reader.fields(value, f"{what}.{pattern}", HOST)
            for name, own in _expand_host(reader, key, what, pattern, settings):
                if name in hosts:
                    reader.note(key, f"{what}: host {name!r} stands twice, first on line {hosts[name].line}")
                else:
                    hosts[name] = _Host(line_of(key), own)
        if len(hosts) > MAX_HOSTS:
            reader.fail(key, f"the inventory has more than {MAX_HOSTS} hosts")
    return hosts


def _host_entries(reader: Reader, node: Node, what: str) -> Iterator[tuple[Node, str, Node | None]]:
    """Key node, pattern and settings (None: no settings) of a mapping or a list of names."""
    if isinstance(node, MappingNode):
        for name, (key, value) in reader.mapping(node, what).items():
            yield key, name, None if value.tag.endswith(":null") else value
        return
    for n, item in enumerate(reader.items(node, what)):
        if isinstance(item, MappingNode):
            reader.note(item, f"{what}[{n}]: a list holds names only; to give settings write hosts as a mapping")
            continue
        with contextlib.suppress(Wrong):
            yield item, reader.text(item, f"{what}[{n}]"), None


def _expand_host(
    reader: Reader, key: Node, what: str, pattern: str, settings: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each name with its settings; an address with a range is dealt out name by name."""
    try:
        names = expand(pattern)
        addresses = expand(settings["address"]) if "address" in settings else []
    except PatternError as error:
        reader.fail(key, f"{what}: {error}")
    wrong = next((name for name in names if not is_address(name)), None)
    if wrong is not None:
        reader.fail(key, f"{what}: {wrong!r} is not a host name or address (user and port are settings of their own)")
    if addresses and len(addresses) != len(names):
        reader.fail(key, f"{what}.{pattern}: {len(names)} hosts but {len(addresses)} addresses")
    for n, name in enumerate(names):
        yield name, {**settings, "address": addresses[n]} if addresses else settings


_GROUP: Schema = {"hosts": _group_hosts, "vars": _settings}
_FILE: Schema = {"defaults": _settings, "groups": _groups, "hosts": _hosts}
