"""Running fleetdump's commands for the demo: each is printed, shown live, kept in a log, and must end as expected."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from demo.layout import Layout

FLEETDUMP = (sys.executable, "-m", "fleetdump")


class StoryError(Exception):
    """A step went another way than the story has it."""


@dataclass
class Story:
    """The demo's steps so far, with the seconds that each took."""

    layout: Layout
    steps: list[tuple[str, float]] = field(default_factory=list)

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Time one step under a heading."""
        say(f"\n=== {len(self.steps) + 1}. {title}")
        began = time.monotonic()
        yield
        self.steps.append((title, time.monotonic() - began))

    def fleetdump(self, *arguments: str, expect: int = 0) -> dict[str, Any]:
        """Run one fleetdump command on the demo's host; its ``--json`` record. Raises StoryError on another status."""
        with self.start(*arguments) as command:
            status = command.wait()
        if status != expect:
            raise StoryError(f"`fleetdump {arguments[0]}` ended with {status}, expected {expect}\n{command.output()}")
        say(f"  (exit code {status})")
        return command.record()

    @contextlib.contextmanager
    def start(self, *arguments: str) -> Iterator[Command]:
        """Start one fleetdump command without waiting for it; killed if it still runs at the end of the block."""
        shown = [arguments[0], "-i", str(self.layout.inventory), *arguments[1:]]
        say(f"$ fleetdump {shlex.join(shown)}")
        stem = f"{len(self.steps) + 1}-{arguments[0]}"
        self.layout.logs.mkdir(parents=True, exist_ok=True)
        out, err = self.layout.logs / f"{stem}.json", self.layout.logs / f"{stem}.log"
        with out.open("wb") as stdout:
            process = subprocess.Popen(
                [*FLEETDUMP, *shown, "--json"],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.PIPE,
                cwd=self.layout.root,
                text=True,
                errors="replace",
            )
        command = Command(process, out, err)
        try:
            yield command
        finally:
            if process.poll() is None:
                process.kill()
            command.wait()


class Command:
    """A fleetdump command that runs; its stderr is shown live and kept."""

    def __init__(self, process: subprocess.Popen[str], out: Path, err: Path):
        self.process = process
        self._out, self._err = out, err
        assert process.stderr is not None
        self._reader = threading.Thread(target=self._show, args=(process.stderr,), daemon=True)
        self._reader.start()

    def wait(self) -> int:
        """Exit status, once all output has been shown."""
        status = self.process.wait()
        self._reader.join(timeout=5)
        return status

    def output(self) -> str:
        """The end of both streams, for an error message."""
        return f"{self._out.read_text(errors='replace')[-3000:]}\nlog: {self._err}"

    def record(self) -> dict[str, Any]:
        """The one host's JSON record: no event, and not what ``collect`` says of the whole run."""
        lines = [json.loads(line) for line in self._out.read_text().splitlines() if line.strip()]
        records: list[dict[str, Any]] = [line for line in lines if "host" in line and "event" not in line]
        if len(records) != 1:
            raise StoryError(f"expected one host's JSON record, got {len(records)}\n{self.output()}")
        return records[0]

    def _show(self, stream: IO[str]) -> None:
        with self._err.open("w") as log, stream:
            for line in stream:
                log.write(f"{time.time():.2f} {line}")
                log.flush()
                say(f"  {line.rstrip()}")


def say(text: str) -> None:
    print(text, flush=True)


def say_lines(lines: Sequence[str]) -> None:
    for line in lines:
        say(f"  {line}")
