"""The evidence bundle on the host: ``evidence.json`` and the same facts as text files for a person to read."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Dict, Iterable, List

from fleetdump.agent.context import State
from fleetdump.agent.evidence_types import Evidence, ProcessFacts
from fleetdump.agent.protocol import to_json


def write_bundle(found: Evidence, state: State) -> Path:
    """Write ``diagnoses/<time>-<name>/`` (0700, files 0600) and return its path."""
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(found.taken_at))
    name = found.target.server or f"pid{found.target.pid}"
    folder = state.directory("diagnoses", f"{stamp}-{name}")
    texts = {"evidence.json": json.dumps(to_json(found), indent=1), **_texts(found)}
    for file_name, text in texts.items():
        descriptor = os.open(folder / file_name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text if text.endswith("\n") else text + "\n")
    return folder


def _texts(found: Evidence) -> Dict[str, str]:
    return {
        "processes.txt": _lines(_process_lines(found.processes)),
        "log-tail.txt": _lines(found.log.tail),
        "probes.txt": _lines(
            f"{'ok    ' if probe.ok else 'failed'} {probe.seconds:6.2f} s  {probe.name}  {probe.detail}".rstrip()
            for probe in found.probes
        ),
        "host.txt": _lines(_host_lines(found)),
        "stacks.txt": _lines(_stack_lines(found)),
        "syscalls.txt": _lines(_syscall_lines(found)),
    }


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"


def _process_lines(processes: List[ProcessFacts]) -> Iterable[str]:
    for process in processes:
        yield (
            f"{process.pid} {process.label or process.role} state {process.state_before}->{process.state} "
            f"cpu {process.cpu:.2f} rss {process.rss >> 20} MiB threads {process.thread_count} {process.cmdline[:160]}"
        )
        yield f"  read {process.rchar_delta} B (disk {process.read_bytes_delta} B), rss {process.rss_delta:+} B"
        if process.stdout or process.stderr:
            yield f"  fd 1 {process.stdout}, fd 2 {process.stderr}, {process.fd_count} of {process.fd_limit} open"
        for thread in [process.main, *process.threads]:
            if thread:
                yield (
                    f"  thread {thread.tid} [{thread.name}] {thread.state} cpu {thread.cpu:.2f} "
                    f"(user {thread.user_share:.0%}) switches {thread.voluntary:.0f}/s "
                    f"wchan {thread.wchan or '-'} syscall {thread.syscall or '?'}"
                )
        for pipe in process.pipes:
            yield f"  fd {pipe.fd} pipe {pipe.inode} ({pipe.mode}) other end: {pipe.peers or 'nobody'}"
        for socket in process.sockets:
            yield f"  fd {socket.fd} {socket.state} {socket.local} {socket.remote}"


def _host_lines(found: Evidence) -> Iterable[str]:
    port = found.port
    yield f"port {port.port}: {'open' if port.open else 'closed'} owner {port.owner_pid} {port.owner}".rstrip()
    for answer in found.http:
        yield f"GET {answer.path}: {answer.status or answer.error} in {answer.seconds:.2f} s"
    memory = found.memory
    yield f"memory available {memory.available >> 20} of {memory.total >> 20} MiB, oom kills {memory.oom_kills}"
    for disk in found.disks:
        free = f"{disk.free_bytes >> 20} MiB and {disk.free_inodes} inodes free"
        yield f"disk {disk.use} {disk.path} ({disk.fstype}): {free}"
    for gpu in found.gpus:
        yield f"gpu {gpu.index}: {gpu.utilization} %, {gpu.memory_used} MiB, {gpu.power:.0f} of {gpu.power_limit:.0f} W"
    for lock in found.locks:
        yield f"lock {lock.kind} {lock.path or lock.inode}: {lock.waiter} waits for {lock.holder}"
    for file in found.lock_files:
        yield f"lock file {file.path}: {file.age_seconds:.0f} s old, held by {file.holder or 'nobody'}"
    for name, value in found.proxy.items():
        yield f"{name} {value}"
    yield f"environment names: {' '.join(found.env_names)}"
    yield from found.kernel_log


def _stack_lines(found: Evidence) -> Iterable[str]:
    for group in found.stack_groups:
        yield f"{', '.join(group.ranks)}{'  (minority)' if group.minority else ''}"
        yield from (f"    {frame}" for frame in group.frames)
    for stack in found.stacks:
        yield f"\n{stack.label or stack.role} pid {stack.pid} ({stack.state})"
        yield from (f"    {frame}" for frame in stack.frames)


def _syscall_lines(found: Evidence) -> Iterable[str]:
    for trace in found.traces:
        yield f"{trace.label} pid {trace.pid}, {trace.seconds:.0f} s"
        for call in trace.calls:
            thread = "main thread" if call.main else call.thread
            yield f"    {call.count:7d} {call.name:16s} {thread} {call.target}".rstrip()
