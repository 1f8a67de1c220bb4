"""A patch that is a script: the server's interpreter runs it on a copy of the package, and what it changed is found by
comparing. The installed package is written by our own envelope alone.

The script is called with the copied package's folder as its only argument, its working directory is the folder that
holds that copy, and the same folder comes first on PYTHONPATH, so that ``import sglang`` and ``find_spec`` find the
copy. A script with the path of the real package built in would get past all that: every file of the real package is
therefore looked at before and after, put back when it was changed, and the patch refused.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

from fleetdump.agent import patchrecord, procfs
from fleetdump.agent.context import AgentContext
from fleetdump.agent.engine import EngineFacts
from fleetdump.agent.package import Package
from fleetdump.agent.protocol import AgentFailure

MARGIN_SECONDS = 10.0
"""Of the call's time, what is left for everything behind the script."""
_OUTPUT = 2000


def run(
    script: bytes, name: str, facts: EngineFacts, package: Package, ctx: AgentContext
) -> Dict[str, Optional[bytes]]:
    """What ``script`` makes of the package: new bytes of each file it changed or made, None for each it deleted. Raises
    ``AgentFailure``: conflict when it fails or does what no patch may, timeout."""
    if name != os.path.basename(name) or not name.endswith(".py"):
        raise AgentFailure("usage", f"a patch's script cannot be called {name!r}", next_step="use a plain name, x.py")
    with _workplace(ctx) as work:
        home = work / "site"
        originals = _copy(package, home)
        path = work / "script" / name
        path.parent.mkdir()
        path.write_bytes(script)
        with _untouched(package, name):
            _execute(path, home / package.name, facts, ctx)
        return _compare(originals, home, package.name, name)


@contextlib.contextmanager
def _workplace(ctx: AgentContext) -> Iterator[Path]:
    """A folder of this process; those of processes that died are removed."""
    root = ctx.state.directory("script-copies")
    for old in root.iterdir():
        if procfs.start_time(int(old.name.partition("-")[0])) is None:
            shutil.rmtree(str(old), ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=str(root)))
    try:
        yield work
    finally:
        shutil.rmtree(str(work), ignore_errors=True)
        with contextlib.suppress(OSError):
            root.rmdir()


def _copy(package: Package, home: Path) -> Dict[str, bytes]:
    """The package as it is without a patch of ours, as regular files; returns what was copied."""
    originals: Dict[str, bytes] = {}
    for path in package.files():
        data = package.read(path)
        if data is not None:
            originals[path] = data
            target = home / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
    return originals


def _execute(script: Path, folder: Path, facts: EngineFacts, ctx: AgentContext) -> None:
    env = dict(os.environ if facts.env is None else facts.env)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder.parent), env.get("PYTHONPATH", "")]))
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    with subprocess.Popen(
        [facts.python, "-B", str(script), str(folder)],
        cwd=str(folder.parent),
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=max(1.0, ctx.remaining() - MARGIN_SECONDS))
        except subprocess.TimeoutExpired as error:
            raise AgentFailure(
                "timeout",
                "the patch's script did not end in time; nothing was changed",
                where=script.name,
                next_step="run the script by hand on a copy of the package to see where it waits",
            ) from error
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it, or what it may have left running
    if process.returncode:
        raise AgentFailure(
            "conflict",
            f"the patch's script ended with status {process.returncode}; nothing was changed",
            where=script.name,
            why=output.decode("utf-8", "replace").strip()[-_OUTPUT:],
            next_step="the script says why; it may not be made for this release",
        )


def _compare(originals: Dict[str, bytes], home: Path, package: str, script: str) -> Dict[str, Optional[bytes]]:
    beside = sorted(set(os.listdir(str(home))) - {package, "__pycache__"})
    if beside:
        raise _refused(script, f"it made {beside[0]} beside the package", "name such files under `files` in patch.yaml")
    changed: Dict[str, Optional[bytes]] = {}
    there = set()
    for path in _regular_files(home, package, script):
        there.add(path)
        data = (home / path).read_bytes()
        if originals.get(path) != data:
            changed[path] = data
    changed.update({path: None for path in originals if path not in there})
    return changed


def _regular_files(home: Path, package: str, script: str) -> Iterator[str]:
    for folder, folders, names in os.walk(str(home / package)):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in folders + names:
            path = Path(folder) / name
            shown = os.path.relpath(str(path), str(home))
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise _refused(script, f"it made {shown}, which is no regular file", "write regular files")
            if not _is_utf8(shown):
                raise _refused(script, f"it made {shown!r}, whose name is not UTF-8", "use plain names")
            if name in names and not name.endswith(".pyc"):
                yield shown


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


# --------------------------------------------------------------------------- the installed package stays as it is
class _Before(NamedTuple):
    """A file of the installed package before the script ran: what changes with it, its bytes, its mode and time."""

    signature: Tuple[int, int, int]
    data: bytes
    mode: int
    mtime_ns: int


@contextlib.contextmanager
def _untouched(package: Package, script: str) -> Iterator[None]:
    """Whatever happens inside: every file of the installed package is put back as it was before, and a script that
    changed one is refused."""
    root = package.home / package.name
    before = {path: _Before(_signature(path), path.read_bytes(), *_attributes(path)) for path in _installed(root)}
    written: List[Path] = []
    try:
        yield
    finally:
        after = set(_installed(root))
        written = [path for path, was in before.items() if path not in after or _signature(path) != was.signature]
        for path in written:
            _put_back(path, before[path])
        made = sorted(after - set(before))
        for path in made:
            patchrecord.remove(path)
            with contextlib.suppress(OSError):
                path.parent.rmdir()
    if written or made:
        where = str((written + made)[0])
        raise _refused(
            script,
            f"it changed the installed package itself ({where}), which was put back",
            "change the copy: its folder is the script's first argument, and `import sglang` finds it",
        )


def _installed(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(str(root)):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            path = Path(folder) / name
            if not name.endswith(".pyc") and path.is_file():
                yield path


def _signature(path: Path) -> Tuple[int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _attributes(path: Path) -> Tuple[int, int]:
    status = path.stat()
    return status.st_mode & 0o7777, status.st_mtime_ns


def _put_back(path: Path, was: _Before) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    patchrecord.replace(path, was.data)
    os.chmod(str(path), was.mode)
    os.utime(str(path), ns=(was.mtime_ns, was.mtime_ns))


def _refused(script: str, why: str, next_step: str) -> AgentFailure:
    return AgentFailure("conflict", "the patch's script did what no patch may", script, why, next_step)
