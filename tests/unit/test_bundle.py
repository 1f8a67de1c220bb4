"""The bundle: the same bytes everywhere, only what a host needs, and runnable from nothing."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from pathlib import Path

from fleetdump.fleet.bundle import build, bundle


def test_same_files_give_the_same_bytes(verbs_package: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "fleetdump"
    shutil.copytree(verbs_package, copy)
    for path in copy.rglob("*.py"):
        os.utime(path, (1, 1))
        path.chmod(0o755)
    (copy / "agent" / "__pycache__").mkdir(exist_ok=True)
    (copy / "agent" / "__pycache__" / "x.pyc").write_bytes(b"x")
    assert build(copy) == build(verbs_package)


def test_any_change_gives_another_name(verbs_package: Path, tmp_path: Path) -> None:
    copy = tmp_path / "fleetdump"
    shutil.copytree(verbs_package, copy)
    (copy / "agent" / "main.py").write_text((copy / "agent" / "main.py").read_text() + "\n")
    assert build(copy).sha256 != build(verbs_package).sha256


def test_holds_agent_and_worker_and_nothing_of_the_controller() -> None:
    with tarfile.open(fileobj=io.BytesIO(bundle().data)) as archive:
        names = archive.getnames()
    assert "fleetdump/agent/main.py" in names
    assert "fleetdump/worker/__init__.py" in names
    tops = {name.split("/")[1] for name in names}
    assert tops == {"__init__.py", "agent", "worker"}
    assert len(bundle().data) < 1 << 20
