# ruff: noqa: UP006, UP035
"""Verbs that exist only in tests: they travel to a host inside a test bundle, as ``fleetdump.agent.testverbs``.

They run under the host's Python, from 3.8 on.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List

from fleetdump.agent.context import AgentContext
from fleetdump.agent.detach import spawn_detached
from fleetdump.agent.protocol import AgentFailure


@dataclass
class NapArgs:
    seconds: float
    child: str = ""
    """A word for the arguments of a child process that sleeps as well."""
    tick: bool = False


@dataclass
class Done:
    pid: int
    numbers: List[int] = field(default_factory=list)


def nap(args: NapArgs, ctx: AgentContext) -> Done:
    if args.child:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", args.child])
    ctx.emit("started", pid=os.getpid())
    end = time.monotonic() + args.seconds
    while time.monotonic() < end:
        time.sleep(0.05)
        if args.tick:
            ctx.emit("tick")
    return Done(os.getpid())


def busy(args: NapArgs, ctx: AgentContext) -> Done:
    """``nap`` under the host's lock."""
    return nap(args, ctx)


@dataclass
class TalkArgs:
    bytes: int
    """On each stream."""


def talk(args: TalkArgs, ctx: AgentContext) -> Done:
    line = "x" * 1023
    writer = threading.Thread(target=lambda: [print(line, file=sys.stderr) for _ in range(args.bytes >> 10)])
    writer.start()
    for _ in range(args.bytes >> 10):
        ctx.emit("talk", line=line)
    writer.join()
    print("a verb may print")
    return Done(os.getpid())


@dataclass
class CountArgs:
    fail: str = ""
    env: Dict[str, str] = field(default_factory=dict)
    argv: List[str] = field(default_factory=list)


def count(args: CountArgs, ctx: AgentContext) -> Done:
    numbers = [int(row["n"]) for row in ctx.body()]
    if args.fail == "bug":
        raise RuntimeError("a defect")
    if args.fail == "disk_full":
        raise OSError(28, "No space left on device", "/somewhere")
    if args.fail:
        raise AgentFailure(args.fail, "it failed", where="/a/file", why="because", next_step="do that")
    return Done(os.getpid(), numbers)


@dataclass
class BlobArgs:
    size: int
    short_by: int = 0


def blob(args: BlobArgs, ctx: AgentContext) -> Done:
    ctx.blob(io.BytesIO(bytes(range(256)) * (args.size // 256)), args.size + args.short_by, name="b")
    return Done(os.getpid())


@dataclass
class DetachArgs:
    mark: str
    log: str


def detach(args: DetachArgs, ctx: AgentContext) -> Done:
    argv = [sys.executable, "-c", "import time; print('alive', flush=True); time.sleep(600)", args.mark]
    pid, started = spawn_detached(argv, log_path=Path(args.log))
    return Done(pid, [started])


def crash(args: NapArgs, ctx: AgentContext) -> Done:
    print("last words", file=sys.stderr, flush=True)
    os._exit(3)


def register(table: Dict[str, Any], verb: Any) -> None:
    """Put the verbs into ``main.VERB_TABLE``."""
    for function, args, mutates in (
        (nap, NapArgs, False),
        (busy, NapArgs, True),
        (talk, TalkArgs, False),
        (count, CountArgs, True),
        (blob, BlobArgs, False),
        (detach, DetachArgs, True),
        (crash, NapArgs, False),
    ):
        table[function.__name__] = verb(args, f"testverbs:{function.__name__}", mutates)
