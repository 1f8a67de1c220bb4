"""Stall signatures, one subject a file; importing this package fills the registry."""

from fleetdump.diagnosis.signatures import compiling, deaths, host, notes, progress, running, starting, stopped

__all__ = ["compiling", "deaths", "host", "notes", "progress", "running", "starting", "stopped"]
