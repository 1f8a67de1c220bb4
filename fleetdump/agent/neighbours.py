"""Other processes of this host that matter to a server: who listens on its port, who runs the same installation."""

from __future__ import annotations

import glob
import os
import pwd
import shutil
import time
from dataclasses import dataclass
from typing import Dict, List, Mapping, Optional, Set

from fleetdump.agent import engine, procfs
from fleetdump.agent.engine import EngineFacts
from fleetdump.agent.procfs import PROC, TICKS_PER_SECOND, ProcSample
from fleetdump.agent.scrub import scrub_argv

NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "ceph", "lustre", "gluster", "fuse.sshfs", "gpfs", "beegfs", "9p")


# --------------------------------------------------------------------------- ports
def describe_port_owner(owner: procfs.PortOwner) -> str:
    """Pid, user and (scrubbed) command of the process that listens on a port."""
    if not owner.pid:
        return "another user's process, or one outside this container, listens there"
    command = " ".join(scrub_argv(owner.cmdline))[:200] or "(command not readable)"
    return f"pid {owner.pid} of user {user_of(owner.pid)} listens there: {command}"


def user_of(pid: int) -> str:
    """Name, or else number, of the user whose process it is."""
    try:
        uid = os.stat(f"{PROC}/{pid}").st_uid
    except OSError:
        return "(gone)"
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


# --------------------------------------------------------------------------- the installation
@dataclass
class EngineUser:
    """The launcher of a server that has imported an installation: a later change of the files does not reach it.
    ``started_at`` is in seconds since 1970."""

    pid: int
    start_time: int
    user: str
    started_at: float

    def __str__(self) -> str:
        return f"pid {self.pid} of user {self.user}"

    def in_words(self, ours: Mapping[int, str]) -> str:
        """Whose it seems to be. ``ours``: names of the servers of this state directory, by pid."""
        if self.pid in ours:
            return f"our server {ours[self.pid]} (pid {self.pid})"
        log = procfs.read_link(f"{PROC}/{self.pid}/fd/1") or ""
        folder, name = os.path.split(os.path.dirname(log))
        if os.path.basename(log) != "server.log" or os.path.basename(folder) != "servers":
            return str(self)
        return f"{self}, server {name} of the state directory {os.path.dirname(os.path.dirname(folder))}"


def engine_users(facts: EngineFacts) -> List[EngineUser]:
    """Who runs a server of this installation, by pid. Nothing of theirs is run to find out: a process counts when the
    first engine on its PYTHONPATH, or that of its interpreter's folder, is this one. One of another mount namespace (a
    container) is left out, since its paths are not ours."""
    users = []
    for process in _launchers():
        if _same_mounts(process.pid) and _imports(process, facts):
            started = time.time() - _uptime() + process.start_time / TICKS_PER_SECOND
            users.append(EngineUser(process.pid, process.start_time, user_of(process.pid), started))
    return users


def file_system_of(path: str) -> str:
    """Type of the file system that holds ``path``, from /proc/self/mounts."""
    best, kind = "", ""
    for line in (procfs.read_text(f"{PROC}/self/mounts") or "").splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].encode().decode("unicode_escape")
        if (path + "/").startswith(point.rstrip("/") + "/") and len(point) >= len(best):
            best, kind = point, fields[2]
    return kind


def is_network(file_system: str) -> bool:
    """Whether other hosts may have the same files."""
    return file_system.startswith(NETWORK_FILE_SYSTEMS)


def _launchers() -> List[ProcSample]:
    """The first process of each server. Spawned ones show SGLang's titles, so theirs do not tell the interpreter."""
    samples = [sample for sample in map(procfs.read_process, procfs.pids()) if sample is not None]
    by_pid = {sample.pid: sample for sample in samples}
    found: Dict[int, ProcSample] = {}
    for sample in samples:
        first = _first(sample, by_pid) if sample.role in ("launcher", "scheduler") else None
        if first is not None:
            found[first.pid] = first
    return [found[pid] for pid in sorted(found)]


def _first(sample: ProcSample, by_pid: Dict[int, ProcSample]) -> Optional[ProcSample]:
    """The nearest ancestor (or the process itself) whose command line is an interpreter's."""
    seen: Set[int] = set()
    current: Optional[ProcSample] = sample
    while current is not None and current.pid not in seen:
        seen.add(current.pid)
        if current.cmdline and not current.cmdline[0].startswith("sglang::"):
            return current
        current = by_pid.get(current.ppid)
    return None


def _imports(process: ProcSample, facts: EngineFacts) -> bool:
    env = _environment(process.pid)
    for entry in filter(None, env.get("PYTHONPATH", "").split(os.pathsep)):
        if os.path.isdir(os.path.join(entry, engine.ENGINE)):
            return os.path.realpath(os.path.join(entry, engine.ENGINE)) == facts.package
    folder = _folder_of_python(process, env)
    if folder == os.path.dirname(facts.python) and not (facts.env or {}).get("PYTHONPATH"):
        return True
    site = glob.glob(os.path.join(glob.escape(os.path.dirname(folder)), "lib/python3*/site-packages", engine.ENGINE))
    return facts.package in map(os.path.realpath, site)


def _folder_of_python(process: ProcSample, env: Dict[str, str]) -> str:
    """Where the interpreter's own name lies: of a virtual environment's, which is a link, that environment."""
    python = process.cmdline[0]
    if "/" not in python:
        python = shutil.which(python, path=env.get("PATH")) or python
    working = procfs.read_link(f"{PROC}/{process.pid}/cwd") or "/"
    return os.path.dirname(os.path.normpath(os.path.join(working, python)))


def _environment(pid: int) -> Dict[str, str]:
    """Empty where it may not be read."""
    pairs = (entry.partition("=") for entry in (procfs.read_text(f"{PROC}/{pid}/environ") or "").split("\0"))
    return {name: value for name, equals, value in pairs if equals}


def _same_mounts(pid: int) -> bool:
    theirs = procfs.read_link(f"{PROC}/{pid}/ns/mnt")
    return theirs is None or theirs == procfs.read_link(f"{PROC}/self/ns/mnt")


def _uptime() -> float:
    return float((procfs.read_text(f"{PROC}/uptime") or "0").split()[0])
