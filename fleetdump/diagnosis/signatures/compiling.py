"""Compilers at work, in children of the server or inside its own processes."""

from __future__ import annotations

import re

from fleetdump.agent.evidence_process import Stack
from fleetdump.diagnosis.movement import COMPILER_CPU
from fleetdump.diagnosis.registry import Step, signature
from fleetdump.diagnosis.signatures.locks import waits_for_lock
from fleetdump.diagnosis.types import DIRECT, PATTERN, WAIT, Verdict
from fleetdump.diagnosis.view import View

BUSY = 0.5
_COMPILING = re.compile(
    r"make_(?:ir|ttir|ttgir|llir|ptx|cubin)|triton/compiler|ASTSource|_do_compile|ninja|nvcc|nvrtc|_build_extension|"
    r"build_and_load|jit_compile|_run_ninja_build|libtriton|libLLVM|libnvptx|deep_?gemm.*(?:compile|build|warmup)|"
    r"torch/_inductor/(?:compile_fx|graph|scheduler|codegen|ir|lowering|select_algorithm|async_compile|autotune)|"
    r"torch/_dynamo/(?:convert_frame|output_graph|symbolic_convert)|tilelang.*(?:compile|lower)|cute/.*compile|"
    r"ptxjitcompiler|"
    r"^(?:\w+\.)*compile \((?!re[./])",
    re.IGNORECASE,
)
"""Frames that make code; those that run what was made (torch/_inductor/output_code, triton/runtime) are not here."""
_BRINGS_CODE = re.compile(r"_init_handles|load_binary|cu(?:Module|Library)Load|cuda(?:Module|Library)Load")
"""Frames that hand finished code to the driver, in files of a compiler: that waits for the GPU, it makes nothing."""
_TIMING = re.compile(r"auto_?tun(?:e|er|ing)\b|\bdo_bench|_profile_single_kernel", re.IGNORECASE)
"""Frames that time kernels to choose one of them; a kernel that never ends is met there too."""
_EXPECTED = re.compile(r"DeepGEMM", re.IGNORECASE)


@signature(Step.PROGRESS)
def compiling(view: View) -> Verdict | None:
    """Living compiler children use CPU, a rank's stack is inside a compiler, or the phase of compilation moves."""
    inside = compiling_stacks(view)
    moves = _works(view) and ((view.phase == "jit" and view.starting and not view.port_open) or _prebuilds(view))
    done = view.healthy and not view.evidence.log.running_requests
    gone = view.gone or not view.evidence.launcher_alive
    if (not view.compilers and not inside and not moves) or done or view.forwards or gone or view.grammar_stacks:
        return None
    names = sorted({p.name if p.role == "compiler" else "torch inductor's workers" for p in view.compilers})
    facts = [f"{len(view.compilers)} compiler processes use CPU: {', '.join(names)}"] if names else []
    facts += [f"{s.label or s.role} is in {_frame(s, view)}" for s in inside]
    facts += [f"progress bar: {view.bar}"] if view.bar and moves else []
    facts += view.progress if moves else []
    rank = _owner_rank(view) if view.compilers else None
    if rank is None and len(inside) == 1:
        rank = next((p.rank for p in view.schedulers if p.pid == inside[0].pid), None)
    who = f"rank {rank} is" if rank is not None else "the server is"
    how = f" with {', '.join(names)}" if names else " in its own process"
    if rank is not None and len(view.schedulers) > 1:
        facts.append(f"the other ranks wait for rank {rank}: it is late, they have not parted")
    where = " during graph capture" if view.phase == "capture" else " for a request" if view.was_ready else ""
    return Verdict(
        "JIT_COMPILING",
        f"{who} compiling kernels{how}{where}: that ends by itself",
        DIRECT if view.compilers or inside else PATTERN,
        WAIT,
        view.phase,
        rank,
        evidence=facts,
        next_steps=_next_steps(view),
    )


def compiles(view: View) -> bool:
    """Compilers run, or a rank is inside one: whoever waits, waits for that."""
    return bool(view.compilers or compiling_stacks(view))


def compiling_stacks(view: View) -> list[Stack]:
    """Stacks of ranks that are inside a compiler."""
    return [stack for stack in view.evidence.stacks if _compiles(stack, view)]


def _next_steps(view: View) -> list[str]:
    deep = any(_EXPECTED.search(line) for line in view.evidence.log.tail)
    return [
        "wait (a cold DeepGEMM cache takes 10 to 20 min)" if deep or not view.was_ready else "wait: it ends by itself",
        "keep the compile cache on a disk that survives, or ship a prebuilt one",
    ]


def _prebuilds(view: View) -> bool:
    """DeepGEMM's bar is the last that the log says, and it advances: it compiles before a shape's first use, also in a
    server that has served for long."""
    log = view.evidence.log
    return bool(log.news and log.tail) and bool(_EXPECTED.search(log.tail[-1])) and bool(view.bar)


def _works(view: View) -> bool:
    busy = any(t.cpu >= BUSY for p in view.schedulers for t in p.threads)
    return busy or (bool(view.progress) and not view.takes_memory)


def _compiles(stack: Stack, view: View) -> bool:
    if waits_for_lock(stack) or not _frame(stack, view):
        return False
    process = next((p for p in view.evidence.processes if p.pid == stack.pid), None)
    works = process is None or process.main is None or process.cpu > COMPILER_CPU or stack.state.startswith("active")
    return works or any(p.role == "compile_worker" and p.cpu > COMPILER_CPU for p in view.evidence.processes)


def _frame(stack: Stack, view: View) -> str:
    """The frame that makes code, or times it on GPUs that do not wait."""
    frames = [*stack.frames, *stack.native]
    timing = "" if view.gpus_wait else next((f for f in frames if _TIMING.search(f)), "")
    return next((f for f in frames if _COMPILING.search(f) and not _BRINGS_CODE.search(f)), timing)


def _owner_rank(view: View) -> int | None:
    """The rank whose descendants the compilers are, if it is one."""
    parents = {p.pid: p.ppid for p in view.evidence.processes}
    ranks = {p.pid: p.rank for p in view.schedulers}
    owners = set()
    for compiler in view.compilers:
        pid = compiler.ppid
        while pid in parents and pid not in ranks:
            pid = parents[pid]
        owners.add(ranks.get(pid))
    return owners.pop() if len(owners) == 1 else None
