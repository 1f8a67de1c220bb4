"""Stall signatures, one subject a file; importing this package fills the registry."""

from fleetdump.diagnosis.signatures import (
    collectives,
    compiling,
    deaths,
    gpus,
    host,
    limits,
    loading,
    locks,
    network,
    notes,
    pipes,
    progress,
    running,
    serving,
    starting,
    stopped,
)

__all__ = [
    "collectives",
    "compiling",
    "deaths",
    "gpus",
    "host",
    "limits",
    "loading",
    "locks",
    "network",
    "notes",
    "pipes",
    "progress",
    "running",
    "serving",
    "starting",
    "stopped",
]
