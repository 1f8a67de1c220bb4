"""Verdicts on evidence of real servers, healthy and hung: SGLang 0.5.14 on two H200s, 0.5.20 on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cases.convert import Sample, convert
from fleetdump.agent.evidence_engine import HttpProbe
from fleetdump.agent.evidence_types import Evidence
from fleetdump.agent.protocol import from_json
from fleetdump.diagnosis import MEASURED, OK, STALL, WAIT, diagnose

CASES = Path(__file__).parent / "recorded"

EXPECTED = {
    # file: (codes that may come first, severity, phase, rank)
    "h200_loading": ({"LOADING_SLOW"}, WAIT, "weights", None),
    "h200_idle": ({"IDLE_OK"}, OK, "serving", None),
    "h200_idle_graphs": ({"IDLE_OK"}, OK, "serving", None),
    "h200_load": ({"HEALTHY"}, OK, "serving", None),
    "h200_resumed": ({"IDLE_OK", "HEALTHY"}, OK, "serving", None),
    "h200_spin_warmup": ({"WARMUP_STALL"}, STALL, "warmup", 1),
    "h200_extra_allreduce": ({"COLLECTIVE_DIVERGED"}, STALL, "warmup", 0),
    "h200_gpu_spin": ({"KERNEL_SPIN"}, STALL, "warmup", None),
    "h200_sigkill": ({"LAUNCHER_DIED"}, STALL, "serving", 1),
    "h200_sigkill_after5": ({"LAUNCHER_DIED"}, STALL, "serving", 1),
    "h200_sigstop": ({"STOPPED_PROCESS"}, STALL, "serving", 1),
    "h200_raise": ({"RANK_CRASHED"}, STALL, "serving", 1),
    "h200_import_error": ({"BUSY_NOT_HUNG", "JIT_COMPILING"}, WAIT, "warmup", None),
    "h200_import_error_raised": ({"RANK_CRASHED"}, STALL, "warmup", 0),
    "h200_bad_port": ({"LAUNCHER_DIED"}, STALL, "imports", None),
    "h200_jit_sources_missing": ({"LAUNCHER_DIED"}, STALL, "warmup", 0),
    "h200_patch_raised": ({"LAUNCHER_DIED"}, STALL, "capture", 0),
    "h200_spin_capture": ({"PARENT_WAITS_READY"}, STALL, "capture", 1),
    "h200_tp2_no_p2p": ({"IDLE_OK"}, OK, "serving", None),
    "h200_tp2_spin": ({"RANK_SPIN"}, STALL, "serving", 1),
    "h200_tp2_killed": ({"LAUNCHER_DIED"}, STALL, "serving", 1),
    "h200_tp2_extra_collective": ({"COLLECTIVE_DIVERGED"}, STALL, "serving", 0),
    "cpu_forward_spin_tp1": ({"WARMUP_STALL"}, STALL, "warmup", 0),
    "cpu_barrier_tp2": ({"COLLECTIVE_DIVERGED"}, STALL, "warmup", None),
    "cpu_kv_pool_spin_tp1": ({"PARENT_WAITS_READY"}, STALL, "kv_pool", 0),
    "cpu_kv_pool_spin_tp2": ({"PARENT_WAITS_READY"}, STALL, "kv_pool", 1),
    "cpu_served_spin_tp2": ({"RANK_SPIN"}, STALL, "serving", 1),
    "cpu_served_spin_loaded_tp2": ({"RANK_SPIN"}, STALL, "serving", 1),
    "cpu_served_absent_tp2": ({"MISSING_RANK"}, STALL, "serving", 1),
    "cpu_starting_tp2": ({"BUSY_NOT_HUNG"}, WAIT, "imports", None),
    "cpu_idle_tp2": ({"IDLE_OK"}, OK, "serving", None),
    "cpu_killed_tp2": ({"LAUNCHER_DIED"}, STALL, "serving", 1),
    "cpu_stopped_tp2": ({"STOPPED_PROCESS"}, STALL, "serving", 1),
}
"""Converted by ``cases.convert`` from text files, where it lists them; the others the agent wrote itself. Of the faults
with custom all-reduce, with a scalar all-reduce, and of a rank that raised during the warm-up, a report exists and no
files: the tests below change a recorded bundle into what it says."""


def load(name: str) -> Evidence:
    return from_json(Evidence, json.loads((CASES / f"{name}.json").read_text()))


@pytest.mark.parametrize("name", EXPECTED)
def test_verdict(name: str) -> None:
    codes, severity, phase, rank = EXPECTED[name]
    best = diagnose(load(name))[0]
    assert best.code in codes
    assert (best.severity, best.phase, best.rank) == (severity, phase, rank)
    assert best.evidence


@pytest.mark.parametrize("name", [name for name, (_, severity, _, _) in EXPECTED.items() if severity != STALL])
def test_what_works_is_never_called_a_stall(name: str) -> None:
    assert {v.severity for v in diagnose(load(name))} <= {OK, WAIT}


@pytest.mark.parametrize(
    "name", ["cpu_kv_pool_spin_tp1", "cpu_kv_pool_spin_tp2", "cpu_served_spin_tp2", "h200_spin_capture"]
)
def test_without_ptrace_the_verdict_stands_at_lower_confidence(name: str) -> None:
    evidence = load(name)
    evidence.stacks, evidence.stack_groups, evidence.traces = [], [], []
    best = diagnose(evidence)[0]
    codes, _, phase, rank = EXPECTED[name]
    assert best.code in codes
    assert (best.phase, best.rank, best.confidence) == (phase, rank, MEASURED)


def test_text_files_of_a_sample_become_a_bundle() -> None:
    """The converter, on a cut-down copy of one sample."""
    evidence = convert(CASES / "raw", Sample("stopped"))
    assert [(p.role, p.label, p.state) for p in evidence.processes] == [
        ("launcher", "", "S"), ("scheduler", "TP0", "S"), ("scheduler", "TP1", "T"), ("detokenizer", "", "S"),
    ]  # fmt: skip
    rank0, launcher = evidence.processes[1], evidence.processes[0]
    assert rank0.main
    assert (rank0.main.wchan, rank0.main.voluntary) == ("futex_do_wait", 0.0)
    assert any(end.peers == [rank0.pid] for end in launcher.pipes if end.mode == "r")
    assert [(g.utilization, [p.ours for p in g.processes]) for g in evidence.gpus] == [(100, [True]), (0, [True])]
    assert evidence.ras.status == "INCOMPLETE"
    assert [(trace.label, len(trace.calls)) for trace in evidence.traces] == [("launcher", 1), ("TP0", 0)]
    assert "broadcast_pyobj (utils/common.py:1440)" in evidence.stacks[1].frames
    best = diagnose(evidence)[0]
    assert (best.code, best.rank, best.phase) == ("STOPPED_PROCESS", 1, "serving")


def test_a_model_that_fell_back_is_said_beside_the_verdict() -> None:
    for name in ("h200_import_error", "h200_import_error_raised"):
        assert "MODEL_FALLBACK" in {v.code for v in diagnose(load(name))}


def test_first_exception_is_in_the_sentence() -> None:
    assert "cannot open the output file (rank 1)" in diagnose(load("h200_raise"))[0].title
    assert "SGLANG_GRPC_PORT" in diagnose(load("h200_bad_port"))[0].title


def test_rank_that_raised_in_the_warmup_while_its_peer_waits_in_a_kernel() -> None:
    """Rank 0 never learns of it: it spins in a launch, and everything accepts and times out for a minute."""
    evidence = load("h200_spin_warmup")
    evidence.log.crash, evidence.log.crash_label = "RuntimeError: dump hook: cannot open the output file", "TP1"
    evidence.http = [HttpProbe("/health", 0, 3.0, "timeout"), HttpProbe("/model_info", 0, 3.0, "timeout")]
    verdicts = diagnose(evidence)
    assert [(v.code, v.rank, v.phase) for v in verdicts] == [("RANK_CRASHED", 1, "warmup")]


def test_every_case_is_expected() -> None:
    assert {path.stem for path in CASES.glob("*.json")} == set(EXPECTED)


def test_custom_all_reduce_hides_the_late_rank_from_nccl() -> None:
    """As with SGLang's own all-reduce: the same spin, and RAS has nothing to say."""
    evidence = load("h200_spin_warmup")
    evidence.ras.status, evidence.ras.mismatches = "OK", []
    best = diagnose(evidence)[0]
    assert (best.code, best.rank) == ("WARMUP_STALL", 1)


def test_counts_tell_parted_ranks_from_a_kernel_without_end() -> None:
    """Both GPUs at 100 %, both hosts in a launch: only NCCL's counts differ between the two causes."""
    evidence = load("h200_gpu_spin")
    assert diagnose(evidence)[0].code == "KERNEL_SPIN"
    evidence.ras = load("h200_extra_allreduce").ras
    evidence.ras.mismatches = [m for m in evidence.ras.mismatches if m.operation == "AllReduce"]
    best = diagnose(evidence)[0]
    assert best.code == "COLLECTIVE_DIVERGED"
    assert "KERNEL_SPIN" not in {v.code for v in diagnose(evidence)}


def test_of_two_ranks_at_the_same_place_the_one_that_ran_more_is_named() -> None:
    """Both hosts wait for their GPUs at one line, so neither stack nor GPU tells them apart; only the counts do."""
    evidence = load("h200_tp2_extra_collective")
    for one in evidence.ras.mismatches[0].ranks:
        one.count = 3675 - one.count
    assert diagnose(evidence)[0].rank == 1
    next(stack for stack in evidence.stacks if stack.label == "TP1").frames = ["forward (model.py:7)"]
    best = diagnose(evidence)[0]
    assert (best.code, best.rank) == ("COLLECTIVE_DIVERGED", None)


def test_counts_that_differ_in_passing_are_no_hang() -> None:
    """A loaded healthy server showed 15716 against 15714."""
    evidence = load("h200_resumed")
    assert evidence.ras.status == "MISMATCH"
    assert {v.severity for v in diagnose(evidence)} <= {OK, WAIT}
