"""Evidence from a host, and what the host lacks to take it."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator

from fleetdump.agent.hostmessages import ToolArgs, ToolResult
from fleetdump.agent.servermessages import EvidenceArgs, EvidenceResult
from fleetdump.errors import FleetdumpError
from fleetdump.fleet import Host
from fleetdump.fleet.pyspy import Program, PySpyMissing, py_spy

DEADLINE = 120.0
"""Seconds for the agent's probes, beside the time between the samples."""
_PIECE = 48 << 10


def take_evidence(host: Host, args: EvidenceArgs) -> EvidenceResult:
    """Call the agent; where stage 2 found no py-spy, bring ours and take the evidence again.

    When it cannot be brought, the failed probe in the evidence says why.
    """
    result = _call(host, args)
    if result.wants != "py-spy":
        return result
    try:
        _bring(host, py_spy(str(result.evidence["host"]["machine"])))
    except (PySpyMissing, FleetdumpError) as error:
        for probe in result.evidence["probes"]:
            if probe["name"] == result.wants:
                probe["detail"] += f"; it could not be brought along: {error}"
        return result
    return _call(host, args)


def _call(host: Host, args: EvidenceArgs) -> EvidenceResult:
    return host.call(args, EvidenceResult, verb="evidence", deadline=DEADLINE + args.seconds)


def _bring(host: Host, program: Program) -> None:
    args = ToolArgs(program.name, program.sha256)
    host.call(args, ToolResult, verb="tool", body=list(_lines(program.data)), deadline=DEADLINE)


def _lines(data: bytes) -> Iterator[str]:
    """The body of a ``tool`` call."""
    packed = zlib.compress(data)
    for start in range(0, len(packed), _PIECE):
        text = base64.b64encode(packed[start : start + _PIECE]).decode()
        yield f'{{"data":"{text}"}}'
