"""The checks behind ``probe`` of the capture directory: room for what will come, kind of disk, and how fast it is."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import time
from typing import Iterator, Optional, Tuple

from fleetdump.agent import hub
from fleetdump.agent.arguments import option_value
from fleetdump.agent.findings import GIB, KIB, MIB, Checked
from fleetdump.agent.hostmessages import ProbeArgs
from fleetdump.agent.launchplan import environment_of
from fleetdump.agent.model import read_model
from fleetdump.agent.neighbours import is_network
from fleetdump.agent.probes import host
from fleetdump.agent.protocol import AgentFailure, Finding
from fleetdump.agent.specs import ServerSpec

LEAST_DISK = 64 * MIB
"""Free bytes below which no capture can begin: a few pieces of one long prompt."""
LOW_INODES = 10_000
FILES_A_SHARD = 3
"""Shards of states, of tokens, and those that close early because nothing came for a while."""
TOKEN_BYTES = 5
"""Of a token's id and its place in the loss mask."""
NEARLY_ALL = 0.9
IN_MEMORY = ("tmpfs", "ramfs")
ITEM_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}

PROBE_BYTES = 256 * MIB
PROBE_SECONDS = 1.5
FIRST_PIECE = 256 * KIB
LAST_PIECE = 8 * MIB
"""What the tap writes at a time, with one fsync for it."""
SLOW_BYTES_A_SECOND = 200e6
"""Below it the disk, and not the GPU, decides how long a big model's extraction takes."""


def check_disk(args: ProbeArgs) -> Checked:
    """Space and inodes where shards will lie, against the data set where its size is known, and the kind of disk."""
    place, writable = _nearest(args.capture_dir)
    facts = host.disk("capture", place)
    findings = []
    if not writable:
        findings.append(Finding("disk", "blocker", f"{place} may not be written", "choose another capture.dir"))
    a_token = bytes_a_token(args)
    data = args.tokens * a_token
    need = max(data, LEAST_DISK)
    wanted = f"about {_size(data)} are needed" if data else f"{_size(LEAST_DISK)} are needed at least"
    if args.tokens:
        wanted += f" for roughly {_tokens(args.tokens)} of {a_token} bytes" if a_token else " (no model to go by)"
    if 0 < data < LEAST_DISK:
        wanted += f", {_size(LEAST_DISK)} at least"
    free = f"{_size(facts.free_bytes)} free at {place} ({facts.fstype})"
    if facts.free_bytes < need:
        findings.append(Finding("disk", "blocker", f"{free}, {wanted}", "free space, or choose another capture.dir"))
    elif args.tokens and facts.free_bytes * NEARLY_ALL < need:
        findings.append(Finding("disk", "warning", f"{free}, {wanted}", "free some: a sample that finds none is lost"))
    files = FILES_A_SHARD * math.ceil(need / args.shard_bytes) if args.shard_bytes else 0
    if 0 <= facts.free_inodes < max(files, LOW_INODES):
        level = "blocker" if facts.free_inodes < files else "warning"
        text = f"only {facts.free_inodes} inodes free at {place}, up to {files} files will come"
        findings.append(Finding("disk", level, text, "remove files there, or choose another capture.dir"))
    if not findings:
        room = f", room for {facts.free_bytes / a_token / 1e6:.1f} M tokens of {a_token} bytes" if a_token else ""
        findings.append(Finding("disk", "ok", f"{free}, {wanted}" if args.tokens else f"{free}{room}"))
    return Checked([*findings, *_kind(facts.fstype, place)], {"disk_free_bytes": facts.free_bytes})


def _kind(fstype: str, place: str) -> Iterator[Finding]:
    if is_network(fstype):
        text = f"capture.dir lies on {fstype} ({place}): each fsync goes over the network, and others may write there"
        yield Finding("disk", "warning", text, "choose a local disk; collect brings the shards away")
    elif fstype in IN_MEMORY:
        text = f"capture.dir lies in memory ({fstype} at {place}): it takes RAM, and is gone after a reboot"
        yield Finding("disk", "warning", text, "choose a disk")


def bytes_a_token(args: ProbeArgs) -> int:
    """Bytes that one token takes on disk: every slot's state, id and mask. Of several models the most; 0 where none
    can be read here."""
    sizes = [_state_bytes(server) for server in args.servers]
    most = max(sizes, default=0)
    return (len(args.layers) + 1) * most + TOKEN_BYTES if most else 0


def _state_bytes(server: ServerSpec) -> int:
    folder = server.model_path
    if hub.is_hub_name(folder):
        folder = hub.cached(folder, option_value(server.args, ("--revision",), hub.MAIN), environment_of(server))
    try:
        model = read_model(folder, needs_weights=False)
    except AgentFailure:
        return 0
    said = option_value(server.args, ("--dtype",), "auto")
    return model.hidden_size * ITEM_BYTES.get(model.dtype if said == "auto" else said, 2)


# --------------------------------------------------------------------------- speed
def check_writes(args: ProbeArgs) -> Checked:
    """How fast the capture directory's disk takes data that must survive, by writing a little of it to a file without
    a name. Nothing is written where there is hardly room, or no right to."""
    place, writable = _nearest(args.capture_dir)
    if not writable or host.disk("capture", place).free_bytes < max(LEAST_DISK, 2 * PROBE_BYTES):
        return Checked([])
    written, seconds = measure_writes(place)
    rate = written / seconds
    text = f"{place} takes {rate / 1e6:.0f} MB/s with fsync"
    need = args.tokens * bytes_a_token(args)
    if need:
        text += f": {_size(need)} take {_time(need / rate)}"
    if rate >= SLOW_BYTES_A_SECOND:
        return Checked([Finding("writes", "ok", text)])
    return Checked([Finding("writes", "warning", text, "a local NVMe disk as capture.dir takes 1000 MB/s and more")])


def measure_writes(folder: str) -> Tuple[int, float]:
    """Bytes written and the seconds that they took to be durable, in pieces that grow to what the tap writes at a time.
    The file is gone whatever becomes of this process."""
    block = os.urandom(LAST_PIECE)  # what cannot be compressed
    written, piece = 0, FIRST_PIECE
    with _nameless(folder) as descriptor:
        began = time.monotonic()
        while written < PROBE_BYTES and time.monotonic() - began < PROBE_SECONDS:
            done = 0
            while done < piece:
                done += os.write(descriptor, block[done:piece])
            os.fdatasync(descriptor)
            written += piece
            piece = min(2 * piece, LAST_PIECE)
        return written, max(time.monotonic() - began, 1e-6)


@contextlib.contextmanager
def _nameless(folder: str) -> Iterator[int]:
    descriptor: Optional[int] = None
    try:
        try:
            descriptor = os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600)
        except OSError:  # a file system that has none of these
            descriptor, name = tempfile.mkstemp(prefix=".fleetdump-check-", dir=folder)
            os.unlink(name)
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _nearest(path: str) -> Tuple[str, bool]:
    """The folder itself or its nearest parent that exists, and whether this user may write there."""
    place = os.path.abspath(os.path.expanduser(path))
    while not os.path.exists(place):
        place = os.path.dirname(place)
    return place, os.access(place, os.W_OK | os.X_OK)


def _size(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


def _tokens(count: int) -> str:
    return f"{count / 1e6:.2f} M tokens" if count >= 1e6 else f"{count:,} tokens"


def _time(seconds: float) -> str:
    """The least that writing takes, in words."""
    if seconds < 1:
        return "less than a second"
    if seconds < 90:
        return f"{round(seconds)} s at least"
    return f"{seconds / 3600:.1f} h at least" if seconds >= 3600 else f"{round(seconds / 60)} min at least"
