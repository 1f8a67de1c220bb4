"""The message codec: what goes in comes out, and what does not fit is named by its path."""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetdump.agent import protocol
from fleetdump.agent.protocol import ProtocolError, Request, from_json, to_json
from fleetdump.agent.specs import ServerSpec

MESSAGES = [
    kind
    for kind in vars(protocol).values()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__module__ == protocol.__name__
]

_PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=8),
    int: st.integers(-(2**53), 2**53),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    Any: st.none() | st.integers() | st.text(max_size=4),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a field's type."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return st.lists(values(inner[0]), max_size=2)
    if origin is dict:
        return st.dictionaries(st.text(max_size=5), values(inner[1]), max_size=2)
    if origin is typing.Union:
        return st.none() | values(inner[0])
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{f.name: values(hints[f.name]) for f in dataclasses.fields(kind)})
    return _PLAIN[kind]


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_message_survives_the_wire(kind: type) -> None:
    @given(values(kind))
    def survives(message: Any) -> None:
        assert from_json(kind, json.loads(json.dumps(to_json(message)))) == message

    survives()


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ({"name": "a", "python": "p", "model_path": "m", "port": 1, "colour": 2}, "ServerSpec: unknown key 'colour'"),
        ({"name": "a", "python": "p", "model_path": "m"}, "ServerSpec: missing key 'port'"),
        ({"name": "a", "python": "p", "model_path": "m", "port": "1"}, "ServerSpec.port: expected int, got str"),
        ({"name": "a", "python": "p", "model_path": "m", "port": True}, "ServerSpec.port: expected int, got bool"),
        ({"name": "a", "python": "p", "model_path": "m", "port": 1, "gpus": 3}, "ServerSpec.gpus: expected a list"),
        (
            {"name": "a", "python": "p", "model_path": "m", "port": 1, "args": ["x", 3]},
            r"ServerSpec.args\[1\]: expected str",
        ),
        ({"name": "a", "python": "p", "model_path": "m", "port": 1, "env": []}, "ServerSpec.env: expected an object"),
        ([], "ServerSpec: expected an object, got list"),
    ],
)
def test_misfit_is_named_by_its_path(data: Any, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        from_json(ServerSpec, data)


def test_whole_numbers_are_floats_where_floats_are_due() -> None:
    request = from_json(Request, {"verb": "status", "args": {}, "deadline": 5})
    assert isinstance(request.deadline, float)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ({}, 1),
        ({"tp": 8}, 8),
        ({"tp": 4, "pp": 2}, 8),
        ({"tp": 2, "dp": 3}, 6),
        ({"tp": 4, "pp": 2, "dp": 4, "args": ["--enable-dp-attention"]}, 8),
    ],
)
def test_a_servers_schedulers_are_counted_over_stages_and_replicas(layout: dict[str, Any], ranks: int) -> None:
    assert ServerSpec("a", "p", "m", 1, **layout).ranks == ranks
