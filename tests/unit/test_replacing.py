"""Files that are replaced at once: on a full disk the old one is whole and nothing of the new one stays."""

from __future__ import annotations

import ast
import base64
import contextlib
import hashlib
import io
import json
import os
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from extraction import full_disk
from manifests import manifest_line, text_of

import fleetdump
from fleetdump.agent import patchrecord
from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.controlling import controller
from fleetdump.agent.drive import _receive
from fleetdump.agent.hostmessages import ControllerArgs, ToolArgs
from fleetdump.agent.jsonl import replacing, write_json
from fleetdump.agent.protocol import Request
from fleetdump.agent.runmessages import RunProgress, SubmitArgs
from fleetdump.agent.share import Share
from fleetdump.agent.specs import CaptureSpec
from fleetdump.agent.tools import tool
from fleetdump.fleet import pyspy
from fleetdump.ledger import Ledger, Planned
from fleetdump.tasks.controller import Files
from fleetdump.tasks.merge import PullOptions, merge
from fleetdump.tasks.missing import write_missing
from fleetdump.tasks.rejected import write_rejected
from fleetdump.worker.tokenise import WorkHead, _publish

LIMIT = 64 << 10
"""Bytes that a file may have while the disk is full."""
LONG = "x" * (4 * LIMIT)


def context(folder: Path, *lines: str) -> AgentContext:
    request = Request("any", {}, deadline=60.0, body_lines=len(lines))
    body = io.BytesIO("".join(f"{line.rstrip()}\n" for line in lines).encode())
    return AgentContext(request, State(folder), stdin=body, stdout=io.BytesIO())


def ledger(folder: Path) -> Ledger:
    made = Ledger(folder / "ledger.sqlite")
    made.plan([Planned(f"c{n}", "d", "h1", "main") for n in range(3000)], [], [(n + 1, LONG[:99]) for n in range(3000)])
    return made


def of_json(folder: Path) -> Callable[[], object]:
    return lambda: write_json(folder / "record.json", {"text": LONG})


def of_progress(folder: Path) -> Callable[[], object]:
    share = Share(folder)
    return lambda: share.save_progress(RunProgress("r", "main", "running", detail=LONG))


def of_rows(folder: Path) -> Callable[[], object]:
    rows = [json.dumps({"id": str(n), "text": LONG[:1000]}) for n in range(400)]
    args = SubmitArgs("r", "main", "0" * 64, CaptureSpec(layers=[1], dir="/c"))
    return lambda: _receive(Share(folder), args, context(folder, *rows))


def of_patch(folder: Path) -> Callable[[], object]:
    return lambda: patchrecord.replace(folder / "model.py", LONG.encode())


def of_tool(folder: Path) -> Callable[[], object]:
    data = LONG.encode()
    line = json.dumps({"data": base64.b64encode(zlib.compress(data)).decode()})
    return lambda: tool(ToolArgs("py-spy", hashlib.sha256(data).hexdigest()), context(folder, line))


def of_controller(folder: Path) -> Callable[[], object]:
    lines = list(Files({"code/fleetdump/__main__.py": LONG.encode()}))
    return lambda: controller(ControllerArgs("r", sys.executable, []), context(folder, *lines))


def of_tokeniser(folder: Path) -> Callable[[], object]:
    (folder / "body").write_text(LONG)
    return lambda: _publish(WorkHead("", ""), folder / "body", folder / "work.jsonl")


def of_rejected(folder: Path) -> Callable[[], object]:
    made = ledger(folder)
    return lambda: write_rejected(made, folder)


def of_missing(folder: Path) -> Callable[[], object]:
    made = ledger(folder)
    return lambda: write_missing(made, folder, with_files=False)


def of_merged(folder: Path) -> Callable[[], object]:
    made = ledger(folder)
    with made.transaction():
        for n in range(200):
            line = manifest_line(f"c{n}")
            made.deliver("h1", line, text_of(line))
    return lambda: merge(made, PullOptions(folder.name), folder.parent)


WRITERS = [of_json, of_progress, of_rows, of_patch, of_tool, of_controller, of_tokeniser, of_rejected, of_missing]


@pytest.mark.parametrize("writer", [*WRITERS, of_merged])
def test_a_full_disk_is_left_as_it_was(writer: Callable[[Path], Callable[[], object]], tmp_path: Path) -> None:
    write = writer(tmp_path)
    before = files(tmp_path)
    with full_disk(LIMIT), pytest.raises(OSError, match="File too large"):
        write()
    assert files(tmp_path) == before


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("ledger.sqlite")}


def test_the_cache_of_a_tool_is_advice(tmp_path: Path) -> None:
    with full_disk(LIMIT):
        pyspy._keep(tmp_path / "py-spy", LONG.encode())
    assert files(tmp_path) == set()


@pytest.mark.parametrize("durable", [True, False])
def test_who_fails_in_the_middle_leaves_the_old_file_and_who_ends_the_new_one(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    with contextlib.suppress(KeyboardInterrupt), replacing(path, durable=durable) as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert (path.read_text(), files(tmp_path)) == ("old", {path})
    with replacing(path, durable=durable) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert (path.read_text(), files(tmp_path)) == ("new", {path})
    assert path.stat().st_mode & 0o777 == 0o600


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _link(path: Path) -> None:
    (path.parent / "somebodys").write_text("theirs")
    path.symlink_to("somebodys")


def _left(path: Path) -> None:
    path.write_text("left by a process that died, longer than what is written now")
    path.chmod(0o444)


@pytest.mark.parametrize("place", [_pipe, _link, _left])
@pytest.mark.parametrize("name", ["a.tmp", ""], ids=["fixed name", "name with our pid"])
def test_what_has_the_temporary_name_is_neither_waited_for_nor_written_to(
    tmp_path: Path, place: Callable[[Path], None], name: str
) -> None:
    path = tmp_path / "a"
    temporary = tmp_path / (name or f"a.{os.getpid()}.tmp")
    place(temporary)
    with replacing(path, temporary=temporary if name else None) as file:
        file.write(b"new")
    assert (path.read_text(), path.is_symlink(), os.path.lexists(temporary)) == ("new", False, False)
    assert path.stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "somebodys").exists() or (tmp_path / "somebodys").read_text() == "theirs"


def test_a_folder_that_has_the_temporary_name_is_named_and_left(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    (tmp_path / "a.tmp").mkdir()
    with pytest.raises(IsADirectoryError) as refused, replacing(tmp_path / "a", temporary=tmp_path / "a.tmp"):
        raise AssertionError("there is no file")
    assert str(refused.value.filename) == str(tmp_path / "a.tmp")
    assert ((tmp_path / "a").read_text(), (tmp_path / "a.tmp").is_dir()) == ("old", True)


ELSEWHERE = {
    "agent/bootstrap.py": "a folder, which is removed where that fails; it runs before there is a package",
    "agent/controlling.py": "a folder, as well",
    "agent/jsonl.py": "the helper itself",
    "agent/launch.py": "a log is rotated",
    "agent/lock.py": "a folder that is the lock, removed where it is not put in place",
    "agent/patchrecord.py": "a symbolic link",
    "agent/shardwriter.py": "a .part is renamed when it is closed, and goes on being written where that fails",
    "agent/turn.py": "a file that has a lock, removed where it is not put in place",
    "tasks/pullshards.py": "a copy that goes on where it stopped",
}
"""Files whose renames are no ``replacing``, and why."""


def test_every_other_file_that_is_replaced_is_so_by_the_one_helper() -> None:
    root = Path(fleetdump.__file__).parent
    renames = {path.relative_to(root).as_posix() for path in root.rglob("*.py") if _renames(path)}
    assert renames == set(ELSEWHERE)


def _renames(path: Path) -> bool:
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return any(
        isinstance(call, ast.Attribute)
        and isinstance(call.value, ast.Name)
        and (call.value.id, call.attr)
        in {("os", "replace"), ("os", "rename"), ("temporary", "replace"), ("part", "replace")}
        for call in calls
    )
