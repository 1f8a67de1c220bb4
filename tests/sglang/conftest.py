"""Fixtures of the real SGLang on the CPU; what they give and how to start servers of it is in ``cpuserver``."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.sglang_cpu import recipe
from tests.sglang.cpuserver import SglangEnv, copy_of


@pytest.fixture(scope="session")
def sglang_installed() -> SglangEnv:
    """The installed SGLang itself, shared by everybody: never patch it, copy it (``copy_of``, ``sglang_env``)."""
    python = Path(os.environ.get("FLEETDUMP_SGLANG_PYTHON") or recipe.PYTHON)
    model = Path(os.environ.get("FLEETDUMP_SGLANG_MODEL") or recipe.MODEL)
    if not python.exists():
        pytest.skip(f"no SGLang at {python}: run `make setup`, or set FLEETDUMP_SGLANG_PYTHON")
    if not (model / "config.json").exists():
        pytest.skip(f"no model at {model}: run `make setup`, or set FLEETDUMP_SGLANG_MODEL")
    command = "import importlib.metadata as m; print(m.version('sglang'))"
    version = subprocess.run([python, "-c", command], capture_output=True, text=True, check=True).stdout.strip()
    return SglangEnv(python, model, version)


@pytest.fixture(scope="session")
def sglang_env(sglang_installed: SglangEnv, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEnv]:
    """A copy of the installed SGLang for this session; tests that patch it must revert it."""
    with copy_of(sglang_installed, tmp_path_factory) as env:
        yield env
