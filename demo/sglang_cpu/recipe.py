"""How the real SGLang runs on the CPU: folders, launch flags and environment. Standard library alone.

Everything that starts such a server (the demo's inventory, the test-suite) takes it from here.
"""

from __future__ import annotations

import os
from pathlib import Path

SGLANG_VERSION = "0.5.20"
PYTHON_VERSIONS = ("3.11", "3.12")
"""Versions for which every pinned wheel exists, the preferred one first."""

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
VENV = BUILD / "sglang-venv"
PYTHON = VENV / "bin" / "python"
MODEL = BUILD / "models" / "demo-v3"
CONVERSATIONS = ROOT / "demo" / "conversations.jsonl"

SERVER_ARGS = (
    "--device", "cpu",
    "--attention-backend", "torch_native",
    "--dtype", "float32",
    "--disable-radix-cache",
    "--disable-overlap-schedule",
    "--max-total-tokens", "16384",
)  # fmt: skip
"""Launch flags beside model, host, port and tp size."""


def server_env(tp: int = 1) -> dict[str, str]:
    """Environment variables of a server with ``tp`` ranks.

    Without SGLANG_USE_CPU_ENGINE SGLang looks for a GPU. Without TORCH_COMPILE_DISABLE the first forward compiles C++
    into the user's cache. OpenMP threads that outnumber the idle cores spin: a tiny model is up to a hundred times
    slower with them. With more ranks than NUMA nodes SGLang insists on being told which cores each rank has.
    """
    env = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }
    if tp > 1:
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(_cores_of_rank(rank, tp) for rank in range(tp))
    return env


def _cores_of_rank(rank: int, tp: int) -> str:
    cores = sorted(os.sched_getaffinity(0))
    mine = cores[rank::tp] or [cores[rank % len(cores)]]
    return ",".join(str(core) for core in mine)
