"""The inventory's settings: one parser a key. What they return is merged by ``loading``."""

from __future__ import annotations

import re
from typing import Any

from yaml.nodes import Node

from fleetdump.agent.specs import FSYNC, PHASES
from fleetdump.hostpatterns import Destination, PatternError, is_address, is_user_name
from fleetdump.inventory.config import MOST_STARTS
from fleetdump.inventory.servers import bounded, interpreter, parse_servers
from fleetdump.yamlmarks import Parser, Reader, Schema, line_of

MAX_LAYER = 9_999
LAYER_IDS = ("input", "output")
CONNECTIONS = ("ssh", "local")
LINE = "line"
"""Key under which a parsed ``capture`` keeps its line, for mistakes that show only once settings are merged."""

MOST_WAIT_SECONDS = 60.0
"""Of ``capture.max_wait_seconds``; SGLang's watchdog strikes after 300 s of one batch."""
_KiB, _TiB = 1 << 10, 1 << 40
_HOST_KEY = re.compile(r"SHA256:[A-Za-z0-9+/]{43}=?\Z")


def _sized(low: int) -> Parser[int]:
    return lambda reader, node, what: reader.size(node, what, low, _TiB)


def _wait_seconds(reader: Reader, node: Node, what: str) -> float:
    value = reader.seconds(node, what)
    if value > MOST_WAIT_SECONDS:
        reader.fail(
            node,
            f"{what}: {value:g} is more than {MOST_WAIT_SECONDS:g}: forwards that wait longer for the disk come near "
            "SGLang's watchdog, which ends the server (--watchdog-timeout, 300 s)",
        )
    return value


def _user(reader: Reader, node: Node, what: str) -> str:
    value = reader.text(node, what)
    if not is_user_name(value):
        reader.fail(node, f"{what}: {value!r} is not a user name")
    return value


def _proxy_jump(reader: Reader, node: Node, what: str) -> str:
    value = reader.text(node, what)
    try:
        for hop in value.split(","):
            Destination.parse(hop.strip())
    except PatternError as error:
        reader.fail(node, f"{what}: {error}; expected user@host:port, several with commas")
    return value


def _host_key(reader: Reader, node: Node, what: str) -> str:
    value = reader.text(node, what)
    if not _HOST_KEY.match(value):
        reader.fail(
            node, f"{what}: {value!r} is not a fingerprint SHA256:<43 characters>; ssh-keygen -lf KEYFILE prints it"
        )
    return value.rstrip("=")


def _absolute(reader: Reader, node: Node, what: str) -> str:
    value = reader.text(node, what)
    if not value.startswith("/") or not value.strip("/"):
        reader.fail(node, f"{what}: {value!r} is not an absolute path of a folder of its own")
    return value.rstrip("/")


def _state_dir(reader: Reader, node: Node, what: str) -> str:
    value = reader.text(node, what)
    return value if value.startswith("~/") else _absolute(reader, node, what)


def _address(reader: Reader, node: Node, what: str) -> str:
    value = reader.text(node, what)
    if not is_address(re.sub(r"\[[0-9,\s-]*\]", "0", value)):
        reader.fail(node, f"{what}: {value!r} is not a host name or address (user and port are settings of their own)")
    return value


def _connection(reader: Reader, node: Node, what: str) -> str:
    return reader.choice(node, what, CONNECTIONS)


def _command(reader: Reader, node: Node, what: str) -> tuple[str, ...]:
    return tuple(reader.list_of(Reader.text, node, what))


def _layer_ids(reader: Reader, node: Node, what: str) -> str:
    return reader.choice(node, what, LAYER_IDS)


def _fsync(reader: Reader, node: Node, what: str) -> str:
    return reader.choice(node, what, FSYNC)


def _layers(reader: Reader, node: Node, what: str) -> tuple[int, ...]:
    layers: list[int] = []
    for n, item in enumerate(reader.items(node, what)):
        layer = reader.integer(item, f"{what}[{n}]", 0, MAX_LAYER)
        if layer in layers:
            reader.fail(item, f"{what}[{n}]: layer {layer} stands twice")
        if layers and layer < layers[-1]:
            reader.fail(item, f"{what}[{n}]: layer {layer} comes after {layers[-1]}; write them in ascending order")
        layers.append(layer)
    if not layers:
        reader.fail(node, f"{what}: has no layer")
    return tuple(layers)


def _capture(reader: Reader, node: Node, what: str) -> dict[str, Any]:
    return {**reader.fields(node, what, CAPTURE), LINE: line_of(node)}


def _patience(reader: Reader, node: Node, what: str) -> dict[str, Any]:
    return reader.fields(node, what, PATIENCE)


PATIENCE: Schema = dict.fromkeys(PHASES, Reader.seconds)
CAPTURE: Schema = {
    "layers": _layers,
    "layer_ids": _layer_ids,
    "dir": _absolute,
    "shard_bytes": _sized(1024 * _KiB),
    "header_bytes": _sized(4 * _KiB),
    "idle_close_seconds": Reader.seconds,
    "ring_bytes": _sized(1024 * _KiB),
    "device_bytes": _sized(1024 * _KiB),
    "threads": bounded(1, 64),
    "fsync": _fsync,
    "max_wait_seconds": _wait_seconds,
}
SETTINGS: Schema = {
    "user": _user,
    "port": bounded(1, 65535),
    "identity_file": Reader.text,
    "proxy_jump": _proxy_jump,
    "host_key": _host_key,
    "connection": _connection,
    "exec_prefix": _command,
    "agent_python": interpreter,
    "python": interpreter,
    "state_dir": _state_dir,
    "connect_timeout": Reader.seconds,
    "parallel_starts": bounded(1, MOST_STARTS),
    "servers": parse_servers,
    "capture": _capture,
    "patience": _patience,
}
"""What ``defaults``, a group's ``vars`` and a host may set."""
HOST: Schema = {**SETTINGS, "address": _address}
