"""GPUs that are not there for this server: errors of the driver, memory of others, a fabric that is not up."""

from __future__ import annotations

import re

from fleetdump.agent.evidence_host import GpuFacts, GpuProcess
from fleetdump.diagnosis.movement import FULL_USE
from fleetdump.diagnosis.registry import Step, signature
from fleetdump.diagnosis.types import DIRECT, LOG_ONLY, MEASURED, PATTERN, Verdict
from fleetdump.diagnosis.view import View
from fleetdump.diagnosis.words import is_are, listed

FOREIGN_MIB = 1024
WEDGED_MIB = 2048
"""Memory that a GPU without any process shows at most when only its own bookkeeping is left."""
_XID = re.compile(r"Xid.*?: (?P<number>\d+)")
_LOST = re.compile(
    r"fallen off the bus|GPU is lost|[Uu]nable to determine the device handle|ERR!|No devices were found"
)
SOFTWARE_XIDS = frozenset({"13", "31", "43"})
_FATAL_XIDS = frozenset({"48", "63", "64", "74", "79", "94", "95", "119", "120", "140"})


MEANINGS = {
    "48": "memory error that could not be corrected", "63": "a memory row was remapped", "64": "remapping a row failed",
    "74": "NVLink error", "79": "the GPU has fallen off the bus", "94": "contained memory error",
    "95": "uncontained memory error", "119": "the GPU's own processor does not answer",
    "120": "error of the GPU's own processor", "140": "unrecovered memory error",
}  # fmt: skip
"""What NVIDIA's catalogue says, in a few words."""


@signature(Step.HARDWARE)
def xid(view: View) -> Verdict | None:
    """The driver reported a GPU error or lost a GPU, and the server is not healthy."""
    lines = [line for line in view.evidence.kernel_log if "Xid" in line]
    numbers = sorted({match["number"] for line in lines if (match := _XID.search(line))}, key=int)
    if not _FATAL_XIDS & set(numbers):
        lines = [line for line in view.kernel_since_start if "Xid" in line]
    if numbers and set(numbers) <= SOFTWARE_XIDS:
        return None
    smi = view.probe("nvidia-smi")
    lost = smi.detail if smi and not smi.ok and _LOST.search(smi.detail) else ""
    if not (lines or lost) or view.healthy:
        return None
    meanings = [f"{n}, {MEANINGS[n]}" if n in MEANINGS else n for n in numbers]
    named = f"the GPU driver reported Xid {'; '.join(meanings) or '(unreadable)'}" if lines else "a GPU is lost"
    return Verdict(
        "XID",
        named,
        DIRECT,
        phase=view.phase,
        evidence=[*lines[-5:], *([f"nvidia-smi: {lost}"] if lost else [])],
        next_steps=["drain the host; look the number up in NVIDIA's Xid catalogue (79: fallen off the bus, reboot)"],
    )


@signature(Step.PROCESSES)
def fault_of_a_kernel(view: View) -> Verdict | None:
    """An Xid that a program causes: a kernel read or wrote where it may not, or was reset after that."""
    lines = [line for line in view.kernel_since_start if "Xid" in line]
    numbers = sorted({match["number"] for line in lines if (match := _XID.search(line))}, key=int)
    if not numbers or not set(numbers) <= SOFTWARE_XIDS or view.healthy:
        return None
    return Verdict(
        "XID",
        f"the GPU driver reported Xid {listed(numbers)}: a kernel of a program did what it may not, no broken GPU",
        MEASURED,
        phase=view.phase,
        evidence=lines[-5:],
        next_steps=["look at the first exception of the process that the line names; try CUDA_LAUNCH_BLOCKING=1"],
    )


@signature(Step.HARDWARE)
def fabric_manager(view: View) -> Verdict | None:
    """The NVSwitch fabric is not up: CUDA cannot start although nvidia-smi lists every GPU."""
    evidence = view.evidence
    waiting = [g for g in evidence.gpus if g.fabric and g.fabric.lower() not in ("completed", "n/a", "[n/a]")]
    unit = evidence.host.fabric_manager
    line = view.trouble("cuda_802")
    signs = [bool(waiting), unit in ("inactive", "failed", "deactivating"), bool(line)]
    if view.healthy or not view.failing or not (waiting or line) or (line and not any(signs[:2]) and evidence.gpus):
        return None
    facts = [f"GPU {g.index}: fabric state {g.fabric}" for g in waiting]
    facts += [f"the fabric manager's unit is {unit}"] if unit else []
    facts += [f"log: {line}"] if line else []
    return Verdict(
        "FABRIC_MANAGER",
        "the NVSwitch fabric is not initialised, so no process can use the GPUs",
        DIRECT if waiting or sum(signs) > 1 else LOG_ONLY,
        phase=view.phase,
        evidence=facts,
        next_steps=[
            "start nvidia-fabricmanager of exactly the driver's version (systemctl status nvidia-fabricmanager)",
            "if it was restarted under a running driver, reset the GPUs or reboot",
        ],
    )


@signature(Step.HARDWARE)
def orphan_memory(view: View) -> Verdict | None:
    """Memory of the GPUs belongs to a process that is not this server's, and this server failed for lack of it."""
    short = view.trouble("memory_unbalanced") or view.trouble("out_of_memory")
    foreign = [(gpu, p) for gpu in view.evidence.gpus for p in gpu.processes if _is_foreign(view, p)]
    orphans = [(gpu, p) for gpu, p in foreign if p.orphan]
    if view.healthy or not view.failing or not (foreign if short else orphans):
        return None
    pids = sorted({p.pid for _, p in foreign})
    facts = [
        f"GPU {gpu.index}: process {p.pid} ({p.name or 'unknown'}) holds {p.memory} MiB"
        + (", its parent is gone" if p.orphan else "")
        for gpu, p in foreign
    ]
    return Verdict(
        "ORPHAN_GPU",
        f"GPU memory is held by process {listed(map(str, pids))}, which {is_are(pids)} not of this server",
        DIRECT if short or orphans else MEASURED,
        phase=view.phase,
        evidence=[*facts, *([f"log: {short}"] if short else [])],
        next_steps=[f"find out whose it is (ps -fp {' '.join(map(str, pids))}) and end it, then deploy again"],
    )


def _is_foreign(view: View, process: GpuProcess) -> bool:
    """In a container nvidia-smi shows pids of the host: then none is known to be ours, and nobody is accused."""
    listed = [p for gpu in view.evidence.gpus for p in gpu.processes]
    comparable = not view.schedulers or any(p.ours for p in listed)
    return comparable and not process.ours and process.memory >= FOREIGN_MIB


@signature(Step.HARDWARE)
def mixed(view: View) -> Verdict | None:
    """GPUs of different size or kind in one server, which refused them."""
    gpus = view.evidence.gpus
    kinds = sorted({f"{g.name or 'GPU'} with {g.memory_total} MiB" for g in gpus})
    line = view.trouble("memory_unbalanced")
    different = len({g.name for g in gpus if g.name}) > 1 or _spread({g.memory_total for g in gpus if g.memory_total})
    if not line or not different:
        return None
    return Verdict(
        "MIXED_GPU",
        "the server's GPUs are of different kinds",
        DIRECT,
        phase=view.phase,
        evidence=[f"GPUs: {', '.join(kinds)}", f"log: {line}"],
        next_steps=["choose equal GPUs with CUDA_VISIBLE_DEVICES, or servers of their own for each kind"],
    )


def _spread(sizes: set[int]) -> bool:
    return len(sizes) > 1 and max(sizes) > 1.1 * min(sizes)


@signature(Step.HARDWARE)
def wedged(view: View) -> Verdict | None:
    """A GPU is fully busy for nobody."""
    busy = [g for g in view.evidence.gpus if _is_wedged(g)]
    # In a container nvidia-smi may list no process at all: while ours run, only a list that has them says anything.
    listing = any(p.ours for g in view.evidence.gpus for p in g.processes)
    # Before the weights nobody's kernel runs while its rank sleeps.
    asleep = view.phase in ("imports", "init") and len(view.blocked) == len(view.schedulers) and not view.progress
    sure = listing or not view.schedulers
    if not busy or not (sure or (asleep and not view.within_patience)):
        return None
    numbers = [str(g.index) for g in busy]
    names = f"GPU{'s' if len(busy) > 1 else ''} {listed(numbers)}"
    facts = [f"GPU {g.index}: {g.utilization} %, {g.power:.0f} W, {g.memory_used} MiB, and no process" for g in busy]
    facts.append("no Xid in the kernel log" if not view.evidence.kernel_log else "the kernel log has driver lines")
    return Verdict(
        "GPU_WEDGED",
        f"{names} {is_are(busy)} busy without any process: a kernel of a killed server still runs",
        DIRECT if sure else PATTERN,
        phase=view.phase,
        evidence=facts,
        next_steps=[
            *([] if sure else ["compare nvidia-smi on the host, outside any container: there it names all processes"]),
            f"nvidia-smi --gpu-reset -i {','.join(numbers)}, with nobody on it; if that fails, reboot the host",
        ],
    )


def _is_wedged(gpu: GpuFacts) -> bool:
    return gpu.processes_known and not gpu.processes and gpu.utilization >= FULL_USE and gpu.memory_used < WEDGED_MIB
