"""Probes fail one by one on real hosts: nothing that is well may become a hang by that, and no hang may become well."""

from __future__ import annotations

import dataclasses

import pytest

from cases import test_recorded
from cases.table import CASES, Case
from cases.test_cases import by_name
from fleetdump.agent.evidence_types import Evidence
from fleetdump.diagnosis import OK, STALL, diagnose

PROBES = (
    "gpus", "ras", "stacks", "stack_groups", "native_groups", "traces", "kernel_log", "disks", "locks", "lock_files",
    "memory", "host", "proxy", "flight", "cgroup", "cpus", "pressure", "env_names", "probes",
)  # fmt: skip
"""Fields that are empty when their probe failed; without processes, log, port and HTTP there is nothing to judge."""
DEFAULTS = {field.name: field for field in dataclasses.fields(Evidence)}


def without(evidence: Evidence, *names: str) -> Evidence:
    """The same without what these probes found."""
    empty = {name: DEFAULTS[name].default_factory() for name in names}  # type: ignore[misc]
    return dataclasses.replace(evidence, **empty)


@pytest.mark.parametrize("name", test_recorded.EXPECTED)
def test_recorded_servers(name: str) -> None:
    evidence = test_recorded.load(name)
    severity = test_recorded.EXPECTED[name][1]
    for gone in [*((probe,) for probe in PROBES), PROBES]:
        best = diagnose(without(evidence, *gone))[0]
        assert (best.severity == STALL) == (severity == STALL), (gone, best.code)


@pytest.mark.parametrize("one", CASES, ids=by_name)
def test_cases_of_the_table(one: Case) -> None:
    """A case may rest on the one probe that is lost; then it is slow or unknown, never the opposite."""
    evidence = one.build()
    severity = diagnose(evidence)[0].severity
    for gone in PROBES:
        best = diagnose(without(evidence, gone))[0]
        if severity == OK:
            assert best.severity == OK, (gone, best.code)
        elif severity == STALL:
            assert best.code not in ("HEALTHY", "IDLE_OK", "NOT_RUNNING"), (gone, best.code)


@pytest.mark.parametrize("name", test_recorded.EXPECTED)
def test_any_process_may_be_unreadable(name: str) -> None:
    """One process that cannot be read, or all: there is a verdict, whatever it is."""
    evidence = test_recorded.load(name)
    for process in evidence.processes:
        rest = [other for other in evidence.processes if other is not process]
        assert diagnose(dataclasses.replace(evidence, processes=rest))
        blind = dataclasses.replace(process, main=None, threads=[], pipes=[], sockets=[], cmdline="")
        assert diagnose(dataclasses.replace(evidence, processes=[*rest, blind]))
    assert diagnose(dataclasses.replace(evidence, processes=[]))
