"""Messages between controller and agent, shared by both sides.

Wire format. The controller runs one constant command on the host; on its stdin stand, in order, one line with the
bootstrap, one line with the bundle header, the bundle's bytes where the host lacked it, one JSON line (``Request``),
and, for verbs that take rows, ``Request.body_lines`` lines of JSON. On stdout come JSON lines: any number of
``{"type": "event", "event": <name>, ...}``, then exactly one ``{"type": "result", ...}``. An event named ``blob`` is
followed by exactly ``size`` raw bytes. Logs go to stderr.

The agent half must run on Python 3.8 with the standard library alone: typing generics, no ``X | Y``.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from dataclasses import dataclass
from typing import Any, Dict, Tuple, Type, TypeVar, Union

PROTOCOL_VERSION = 1

T = TypeVar("T")


class ProtocolError(ValueError):
    """A message that does not fit its class: unknown key, missing key or wrong type (the path is in the text)."""


_SCALARS = (str, int, float, bool)


def to_json(value: Any) -> Any:
    """Plain JSON data (dict, list, str, int, float, bool, None) of a message dataclass or a container of them."""
    if value is None or type(value) in _SCALARS:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    return value


def from_json(cls: Type[T], data: Any, where: str = "") -> T:
    """Build dataclass ``cls`` from JSON data; raises ``ProtocolError`` naming the path of what does not fit."""
    result: T = _convert(cls, data, where or cls.__name__)
    return result


def _convert(kind: Any, data: Any, where: str) -> Any:
    if type(data) is kind and kind in _SCALARS:
        return data
    origin = typing.get_origin(kind)
    if kind is Any:
        return data
    if origin is Union:
        if data is None and type(None) in typing.get_args(kind):
            return None
        members = [a for a in typing.get_args(kind) if a is not type(None)]
        return _convert(members[0], data, where)
    if origin is list:
        if not isinstance(data, list):
            raise ProtocolError(f"{where}: expected a list, got {type(data).__name__}")
        inner = typing.get_args(kind)[0]
        return [_convert(inner, item, f"{where}[{n}]") for n, item in enumerate(data)]
    if origin is dict:
        if not isinstance(data, dict):
            raise ProtocolError(f"{where}: expected an object, got {type(data).__name__}")
        inner = typing.get_args(kind)[1]
        return {str(k): _convert(inner, v, f"{where}.{k}") for k, v in data.items()}
    if dataclasses.is_dataclass(kind):
        return _convert_dataclass(kind, data, where)
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        try:
            return float(data)
        except OverflowError as error:
            raise ProtocolError(f"{where}: a number too large") from error
    if not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
        raise ProtocolError(f"{where}: expected {kind.__name__}, got {type(data).__name__}")
    return data


def _convert_dataclass(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise ProtocolError(f"{where}: expected an object, got {type(data).__name__}")
    fields = _fields(kind)
    if not data.keys() <= fields.keys():
        raise ProtocolError(f"{where}: unknown key {min(data.keys() - fields.keys())!r}")
    values = {}
    for name, (hint, required) in fields.items():
        if name in data:
            values[name] = _convert(hint, data[name], f"{where}.{name}")
        elif required:
            raise ProtocolError(f"{where}: missing key {name!r}")
    return kind(**values)


@functools.lru_cache(maxsize=None)
def _fields(kind: Any) -> Dict[str, Tuple[Any, bool]]:
    """Type of each field, and whether it must be there. Remembered: a run has millions of journal lines."""
    hints = typing.get_type_hints(kind)
    missing = dataclasses.MISSING
    return {
        f.name: (hints[f.name], f.default is missing and f.default_factory is missing) for f in dataclasses.fields(kind)
    }


@dataclass
class Request:
    """One call of the agent. ``deadline`` is seconds from the start of the agent, enforced by the agent itself."""

    verb: str
    args: Dict[str, Any]
    state_dir: str = "~/.fleetdump"
    deadline: float = 60.0
    operator: str = ""
    """user@controller, for the lock and the audit log; never a secret."""
    body_lines: int = 0
    protocol: int = PROTOCOL_VERSION
    lock_wait: float = 0.0
    """Seconds that a verb which changes the host waits for another's change to end."""
    lease: str = ""
    """The lease of the deploy that this call belongs to (``HoldArgs``)."""
    controller: str = ""
    """Which controller of a run calls (``SteerArgs``)."""


@dataclass
class AgentError:
    """Why a verb failed. Codes: usage, not_found, conflict, locked, timeout, disk_full, permission, failed, bug."""

    code: str
    what: str
    where: str = ""
    why: str = ""
    next_step: str = ""


class AgentFailure(Exception):
    """Raised inside the agent by a verb; becomes the result's ``error``."""

    def __init__(self, code: str, what: str, where: str = "", why: str = "", next_step: str = ""):
        super().__init__(what)
        self.error = AgentError(code, what, where, why, next_step)


@dataclass
class Finding:
    """One checked fact. ``level``: ok, warning or blocker; ``fix`` is the next step for the latter two."""

    key: str
    level: str
    text: str
    fix: str = ""


VERBS = (
    "probe",
    "hold",
    "release",
    "forecast",
    "patch",
    "revert",
    "launch",
    "watch",
    "monitor",
    "restart",
    "unlock",
    "settings",
    "evidence",
    "tool",
    "stop",
    "logs",
    "status",
    "audit",
    "selfcheck",
    "preview",
    "burst",
    "steer",
    "submit",
    "order",
    "withdraw",
    "held",
    "done",
    "follow",
    "manifest",
    "verify",
    "shards",
    "fetch",
    "controller",
    "clean",
)
