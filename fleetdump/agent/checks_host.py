"""The checks of a host itself behind ``probe``: memory, limits, and the means of a diagnosis."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from typing import Sequence, Tuple

from fleetdump.agent import procfs
from fleetdump.agent.checks_gpu import is_on_cpu
from fleetdump.agent.findings import GIB, KIB, Checked
from fleetdump.agent.hostmessages import ProbeArgs
from fleetdump.agent.probes import host
from fleetdump.agent.protocol import Finding
from fleetdump.agent.specs import ServerSpec

LOW_MEMORY = 4 * GIB
LOW_SHM = GIB
NOFILE = 65_535
"""SGLang raises its own soft limit to this."""
CAP_SYS_PTRACE = 19
BROUGHT_FOR = ("x86_64", "aarch64")
"""Kinds of machine for which the controller brings a py-spy along when a diagnosis wants one."""
INFINIBAND = "/sys/class/infiniband"


# --------------------------------------------------------------------------- memory
def check_capture_memory(args: ProbeArgs) -> Checked:
    """What the taps of all servers take: for each replica of a server, or group of its attention, one in each pipeline
    stage writes."""
    writers = sum(server.dp * server.pp for server in args.servers)
    if not writers:
        return Checked([])
    on_cpu = all(is_on_cpu(server) for server in args.servers)
    memory = args.ring_bytes + (args.device_bytes if on_cpu else 0)
    kind = "" if on_cpu else "pinned "
    whose = f"each of {writers} writing processes" if writers > 1 else "its one writing process"
    text = f"capture takes at most {memory / GIB:.1f} GiB of {kind}memory for {whose}"
    if not on_cpu:
        text += f", and {args.device_bytes / GIB:.1f} GiB of its GPU beside SGLang's pool"
    free = _memory()[1]
    if free < writers * memory + LOW_MEMORY:
        text += f"; {free / GIB:.1f} GiB of memory are available"
        return Checked([Finding("capture", "warning", text, "set a smaller capture.ring_bytes")])
    return Checked([Finding("capture", "ok", text)])


def _memory() -> Tuple[int, int]:
    """Bytes of main memory, and how many of them are available, from /proc/meminfo."""
    lines = procfs.parse_fields(procfs.read_text("/proc/meminfo") or "")
    total, free = (int(lines.get(name, "0 kB").split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    return total, free


def check_memory() -> Checked:
    """Main memory."""
    total, free = _memory()
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB memory available"
    low = free < LOW_MEMORY
    finding = Finding("memory", "warning" if low else "ok", text, "end what uses it" if low else "")
    return Checked([finding], {"memory_bytes": total})


def check_shm(servers: Sequence[ServerSpec]) -> Checked:
    """Shared memory (/dev/shm), which tensor parallelism uses; a container often gets 64 MiB of it."""
    facts = host.disk("shm", "/dev/shm")  # noqa: S108 (asks for its size, writes nothing)
    text = f"shared memory has {facts.free_bytes / GIB:.1f} GiB free"
    if facts.free_bytes < LOW_SHM and any(server.ranks > 1 for server in servers):
        return Checked([Finding("shm", "warning", text, "start the container with --ipc=host or a larger --shm-size")])
    return Checked([Finding("shm", "ok", text)])


# --------------------------------------------------------------------------- means of diagnosis
def check_tools() -> Checked:
    """Tools that make a verdict on a hang surer; without them the evidence is from /proc alone. py-spy is brought
    along by the controller, where there is one for this kind of machine."""
    findings = []
    if shutil.which("strace") is None:
        findings.append(Finding("tools", "warning", "strace is missing: no system calls in evidence", "install strace"))
    if platform.machine() not in BROUGHT_FOR and shutil.which("py-spy") is None:
        text = f"py-spy is missing, and none can be brought to {platform.machine()}: no Python stacks in evidence"
        findings.append(Finding("tools", "warning", text, "install py-spy beside sglang"))
    return Checked(findings or [Finding("tools", "ok", "strace is there; py-spy is brought along when it is needed")])


def check_ptrace() -> Checked:
    """May this user look into its own processes? Yama's scope and the ptrace capability decide."""
    scope = (procfs.read_text("/proc/sys/kernel/yama/ptrace_scope") or "0").strip()
    status = procfs.parse_fields(procfs.read_text("/proc/self/status") or "")
    capable = bool(int(status.get("CapEff", "0"), 16) >> CAP_SYS_PTRACE & 1)
    if scope == "0" or (capable and scope != "3"):
        return Checked([Finding("ptrace", "ok", "processes may be traced")])
    fix = "run as root, or sysctl kernel.yama.ptrace_scope=0, or give the container CAP_SYS_PTRACE"
    return Checked([Finding("ptrace", "warning", f"tracing is not allowed (ptrace_scope {scope})", fix)])


# --------------------------------------------------------------------------- limits
def check_limits() -> Checked:
    """What the launched servers inherit: open files, locked memory (RDMA registers what it sends), core dumps."""
    findings = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < NOFILE:
        fix = "raise nofile in limits.conf, or --ulimit nofile of the container"
        findings.append(Finding("limits", "warning", f"at most {hard} open files; SGLang wants {NOFILE}", fix))
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if locked != resource.RLIM_INFINITY and locked < GIB and _has_infiniband():
        text = (
            f"at most {locked // KIB} KiB of locked memory, and this host has InfiniBand: NCCL cannot register buffers"
        )
        findings.append(Finding("limits", "warning", text, "raise memlock, or --ulimit memlock=-1 of the container"))
    core = resource.getrlimit(resource.RLIMIT_CORE)[0]
    if core == resource.RLIM_INFINITY and _dumps_to_file():
        text = "core dumps are unlimited and go to files: each rank that dies writes all its memory"
        findings.append(Finding("limits", "warning", text, "ulimit -c 0 in the profile of this user"))
    ok = f"{soft} open files, up to {hard if hard != resource.RLIM_INFINITY else 'any number'}"
    return Checked(findings or [Finding("limits", "ok", ok)])


def _has_infiniband() -> bool:
    try:
        return bool(os.listdir(INFINIBAND))
    except OSError:
        return False


def _dumps_to_file() -> bool:
    """Whether the kernel writes a core into a file itself, instead of handing it to a program that keeps house."""
    pattern = (procfs.read_text("/proc/sys/kernel/core_pattern") or "").strip()
    return bool(pattern) and not pattern.startswith("|")
