"""Forty-eight hosts at once: they start quickly in little memory, and a verb on each takes one round trip."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import testverbs
from hosts import LabHost

from fleetdump.fleet import Host, fan_out

HOSTS = 48


def available_mb() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) >> 10


def nothing(host: Host) -> int:
    return host.call(testverbs.NapArgs(0), testverbs.Done, verb="nap", deadline=120).pid


@pytest.mark.nightly
@pytest.mark.usefixtures("use_verbs")
def test_forty_eight_hosts(
    start_hosts: Callable[[int], list[LabHost]], record_testsuite_property: Callable[[str, object], None]
) -> None:
    free = available_mb()
    began = time.monotonic()
    configs = [host.config() for host in start_hosts(HOSTS)]
    figures: dict[str, float] = {"start_seconds": time.monotonic() - began, "memory_mb": free - available_mb()}
    for name in ("first_call_seconds", "call_seconds"):
        began, cpu = time.monotonic(), time.process_time()
        outcomes = fan_out(configs, nothing, deadline=120)
        figures[name] = time.monotonic() - began
        figures[name.replace("seconds", "cpu_ms_a_host")] = 1000 * (time.process_time() - cpu) / HOSTS
        assert [outcome.error for outcome in outcomes.values()] == [None] * HOSTS
    for name, value in figures.items():
        record_testsuite_property(name, round(value, 2))
    print({name: round(value, 2) for name, value in figures.items()})
    assert figures["memory_mb"] < 1500
