"""Servers that move, or may still: a slow load, a start in progress."""

from __future__ import annotations

import re

from fleetdump.diagnosis.movement import LOAD_RATE
from fleetdump.diagnosis.registry import Step, signature
from fleetdump.diagnosis.signatures.compiling import compiling
from fleetdump.diagnosis.types import MEASURED, PATTERN, WAIT, Verdict
from fleetdump.diagnosis.view import View
from fleetdump.diagnosis.words import size

PAGE = 4096
"""Bytes that a major page fault brings at least."""
_LOADER = re.compile(r"load_weights|load_model|weights_iterator|safetensors|default_loader")
_NETWORK = re.compile(r"nfs|lustre|fuse|ceph|gpfs|cifs|9p|virtiofs|beegfs")


@signature(Step.PROGRESS)
def loading(view: View) -> Verdict | None:
    """Bytes of the weights arrive."""
    if not _loads(view):
        return None
    rate, source = _rate(view)
    facts = [f"{p.label} read {size(max(p.rchar_delta, p.read_bytes_delta))}" for p in view.schedulers]
    faults = sum(p.majflt_delta for p in view.schedulers)
    if faults:
        facts.append(f"{faults} major page faults: the files are mapped, so random reads set the pace")
    facts += [f"the model lies on {remote}"] if (remote := _remote(view)) else []
    if view.bar:
        facts.append(f"progress bar: {view.bar}")
    full = view.bar_is_full
    bar = ", its bar is full and reading goes on" if full else f", {view.bar}" if view.bar else ""
    return Verdict(
        "LOADING_SLOW",
        f"the weights are loading at {rate} from {source}{bar}",
        MEASURED,
        WAIT,
        view.phase,
        evidence=facts,
        next_steps=[
            "wait; a local NVMe copy or a warm page cache makes it faster",
            *(["read whole files instead of mapping them (--load-format, a prefetching loader)"] if faults else []),
        ],
    )


def _rate(view: View) -> tuple[str, str]:
    """How fast, and from where. What is mapped from most network file systems is counted nowhere but in faults and in
    the memory that they fill."""
    seconds, ranks = max(view.evidence.seconds, 0.001), view.schedulers
    disk = sum(p.read_bytes_delta for p in ranks) / seconds
    remote = _remote(view)
    if view.read_rate < LOAD_RATE and any(map(view.pages_in, ranks)):
        grown = sum(max(0, p.rss_delta) for p in ranks) / seconds
        least = sum(p.majflt_delta for p in ranks) * PAGE / seconds
        told = max(grown, least, view.read_rate)
        more = " or more" if least >= grown else ""
        return f"{size(told)}/s{more}", f"mapped files{f' on {remote}' if remote else ''}"
    if disk > view.read_rate / 2:
        return f"{size(view.read_rate)}/s", "disk"
    return f"{size(view.read_rate)}/s", f"{remote} or its page cache" if remote else "the page cache"


def _remote(view: View) -> str:
    """Kinds of network file system that the model lies on."""
    return ", ".join(sorted({d.fstype for d in view.evidence.disks if d.use == "model" and _NETWORK.search(d.fstype)}))


def _loads(view: View) -> bool:
    """Weights are read. After the last mark of the weights only bytes from a disk count: what else would be read
    then is little and cached."""
    seconds = max(view.evidence.seconds, 0.001)
    disk = sum(p.read_bytes_delta for p in view.schedulers) / seconds
    mapped = any(map(view.pages_in, view.schedulers))
    if not view.starting or view.port_open:
        return False
    if view.phase == "weights" or (view.is_vllm and not view.evidence.log.ranks and _at_weights(view)):
        return view.read_rate >= LOAD_RATE or mapped
    return view.phase == "kv_pool" and disk >= LOAD_RATE


def _at_weights(view: View) -> bool:
    """A log without marks of ranks: their stacks, or the kind of file system that the pages come from, say it; or the
    engine waits for workers that it has given an order, so that their imports are over."""
    loads = any(_LOADER.search(frame) for stack in view.evidence.stacks for frame in stack.frames)
    return loads or bool(_remote(view) or view.trouble("ring_full"))


def _what_moves(view: View) -> str:
    if not view.takes_memory:
        return "moves"
    grown = max(p.rss_delta for p in view.takes_memory)
    if grown <= 0:
        return "works in the kernel, as when host memory is pinned and registered: a large pool takes minutes"
    return f"fills memory of the host, {size(grown / view.evidence.seconds)}/s each: a large pool takes minutes"


@signature(Step.PROGRESS)
def start_in_progress(view: View) -> Verdict | None:
    """The start moves by any other measure, or has not been silent for as long as it may be."""
    quiet, allowed = view.silence
    if not view.starting or _loads(view) or compiling(view):
        return None
    if view.progress:
        return Verdict(
            "BUSY_NOT_HUNG",
            f"the server is starting (phase {view.phase}) and {_what_moves(view)}",
            MEASURED,
            WAIT,
            view.phase,
            evidence=view.progress,
            next_steps=["wait"],
        )
    if not view.within_patience:
        return None
    return Verdict(
        "BUSY_NOT_HUNG",
        f"the server is starting (phase {view.phase}); too early to call it hung",
        PATTERN,
        WAIT,
        view.phase,
        evidence=[
            f"no progress in {view.evidence.seconds:.0f} s, silent for {quiet:.0f} s of the {allowed:.0f} s allowed"
        ],
        next_steps=["ask again when the patience of this phase is over"],
    )
