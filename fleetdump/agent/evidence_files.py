"""The files of an evidence bundle: ``evidence.json``, and the same facts as text files for a person to read. Shared by
both sides: the host keeps a bundle, ``diagnose --save`` writes one on the controller."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Dict, Iterable, List

from fleetdump.agent.evidence_process import ProcessFacts
from fleetdump.agent.evidence_types import Evidence
from fleetdump.agent.protocol import from_json, to_json
from fleetdump.agent.scrub import printable


def write_files(found: Evidence, folder: Path) -> None:
    """Write the bundle's files (0600) into ``folder``, which is there. Raises ``OSError``."""
    data = harmless(to_json(found))
    texts = {"evidence.json": json.dumps(data, indent=1), **_texts(from_json(Evidence, data))}
    for file_name, text in texts.items():
        descriptor = os.open(folder / file_name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text if text.endswith("\n") else text + "\n")


def harmless(data: Any) -> Any:
    """The same JSON with every text printable: logs, titles and paths of a host may hold anything."""
    if isinstance(data, str):
        return printable(data)
    if isinstance(data, list):
        return [harmless(item) for item in data]
    if isinstance(data, dict):
        return {printable(name): harmless(value) for name, value in data.items()}
    return data


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
    group, cpus = found.cgroup, found.cpus
    yield f"cgroup {group.path}: {group.memory_bytes >> 20} of {group.memory_limit >> 20} MiB, {group.memory_events}"
    yield (
        f"cpus {cpus.cores}, load {cpus.load}, {cpus.running} want one; the group may use {group.cpu_limit or 'all'} "
        f"and waited in {group.throttled} of {group.periods} periods ({group.throttled_seconds} s)"
    )
    for one in found.pressure:
        yield f"pressure {one.resource} ({one.scope}): some {one.some} %, full {one.full} % of 10 s"
    for disk in found.disks:
        free = f"{disk.free_bytes >> 20} MiB and {disk.free_inodes} inodes free"
        yield f"disk {disk.use} {disk.path} ({disk.fstype}): {free}"
    for gpu in found.gpus:
        yield f"gpu {gpu.index}: {gpu.utilization} %, {gpu.memory_used} MiB, {gpu.power:.0f} of {gpu.power_limit:.0f} W"
    for lock in found.locks:
        yield f"lock {lock.kind} {lock.path or lock.inode}: {lock.waiter} waits for {lock.holder}"
    for file in found.lock_files:
        kind = "locked" if file.locked else "only exists"
        yield f"lock file {file.path}: {kind}, {file.age_seconds:.0f} s old, opened by {file.holder or 'nobody'}"
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
        yield from (f"    {frame}" for frame in stack.native or stack.frames)


def _syscall_lines(found: Evidence) -> Iterable[str]:
    for trace in found.traces:
        yield f"{trace.label} pid {trace.pid}, {trace.seconds:.0f} s"
        for call in trace.calls:
            thread = "main thread" if call.main else call.thread
            yield f"    {call.count:7d} {call.name:16s} {thread} {call.target}".rstrip()
