"""What lies beside a patched package: ``<site-packages>/fleetdump-patch/`` with record, originals and lock.

The record is durable before the first file of the package changes, and goes last when all is restored; so whatever
instant a process dies at, the next one knows every file's original and can finish or undo.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterator, List, Optional

from fleetdump.agent.jsonl import fsync_directory, replacing, write_json
from fleetdump.agent.protocol import AgentFailure, ProtocolError, from_json

FOLDER = "fleetdump-patch"
LOCK_WAIT = 10.0


@dataclass
class KeptFile:
    """A file as it was: its path relative to site-packages, the copy's name in our folder, and what a copy of bytes
    does not carry. ``link`` is the target where the file is a symbolic link."""

    path: str
    copy: str
    sha256: str
    mode: int
    mtime_ns: int
    uid: int
    gid: int
    link: str = ""


@dataclass
class PatchedModule:
    """One module, or another file of the package (``module`` is then its path, ``sglang/srt/x.json``): its original,
    what we wrote (hash, and a copy to compare with; both empty where the patch deletes it), and its bytecode, taken
    away."""

    module: str
    original: KeptFile
    patched_sha256: str
    patched_copy: str
    bytecode: List[KeptFile] = field(default_factory=list)


@dataclass
class AddedFile:
    """A file that the patch made, in site-packages or inside the package, and its SHA-256."""

    path: str
    sha256: str


@dataclass
class PatchRecord:
    """``record.json``: everything needed to recognise and undo one applied patch."""

    patch: str
    version: str
    sha256: str
    release: str
    modules: List[PatchedModule]
    files: List[AddedFile]
    applied_at: float
    folders: List[str] = field(default_factory=list)
    """Folders that the patch made for its files, each before those inside it."""
    untested: List[str] = field(default_factory=list)
    """Of ``modules``, those that no test has run on this release."""
    v: int = 1


def load(site: Path) -> Optional[PatchRecord]:
    """The record in ``site``, None when there is none; raises ``AgentFailure`` when it cannot be read."""
    path = site / FOLDER / "record.json"
    try:
        return from_json(PatchRecord, json.loads(path.read_bytes()), str(path))
    except FileNotFoundError:
        return None
    except (ValueError, ProtocolError) as error:
        raise AgentFailure(
            "failed",
            "the record of the applied patch is damaged",
            where=str(path),
            why=str(error),
            next_step=f"reinstall sglang there (pip install --force-reinstall --no-deps), then remove {path.parent}",
        ) from error


def save(site: Path, record: PatchRecord) -> None:
    """Make the record durable; it must name copies that already are."""
    fsync_directory(site / FOLDER)
    write_json(site / FOLDER / "record.json", record)
    fsync_directory(site)


def forget(site: Path) -> None:
    """Remove the record, then the copies that it named. Call with the lock held; its release removes the folder."""
    folder = site / FOLDER
    remove(folder / "record.json")
    fsync_directory(folder)
    for path in folder.iterdir():
        if path.name != "lock":
            path.unlink()


@contextlib.contextmanager
def locked(site: Path) -> Iterator[None]:
    """Hold the lock of the patched package: other hosts may share it, each with a host lock of its own. Leaves no
    folder behind when there is nothing in it. The lock ends with its process, however that dies."""
    folder = site / FOLDER
    descriptor = _acquire(folder, time.monotonic() + LOCK_WAIT)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if not (folder / "record.json").exists():
                shutil.rmtree(str(folder))
        os.close(descriptor)


def _acquire(folder: Path, deadline: float) -> int:
    while True:
        folder.mkdir(mode=0o755, exist_ok=True)
        try:
            descriptor = os.open(str(folder / "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The holder before us may have removed the folder: then we hold a file that nobody else will find.
            if os.path.samestat(os.fstat(descriptor), os.stat(str(folder / "lock"))):
                return descriptor
        except FileNotFoundError:
            pass
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise AgentFailure(
                    "locked",
                    "another process is changing this installation of sglang",
                    where=str(folder),
                    next_step="wait until it ends, then try again",
                ) from None
            time.sleep(0.1)
        os.close(descriptor)


# --------------------------------------------------------------------------- files
def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read_bytes(path: Path) -> Optional[bytes]:
    """A file's bytes, None when it is missing."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def keep(site: Path, path: Path, copy: str) -> KeptFile:
    """Copy a file into our folder, durably, and say how it was."""
    status = os.lstat(str(path))
    link = os.readlink(str(path)) if path.is_symlink() else ""
    data = path.read_bytes()
    write_durable(site / FOLDER / copy, data)
    return KeptFile(
        path=os.path.relpath(str(path), str(site)),
        copy=copy,
        sha256=sha256(data),
        mode=status.st_mode & 0o7777,
        mtime_ns=status.st_mtime_ns,
        uid=status.st_uid,
        gid=status.st_gid,
        link=link,
    )


def restore(site: Path, kept: KeptFile) -> None:
    """Put a kept file back in one step: bytes, mode, owner and modification time."""
    target = site / kept.path
    if kept.link:
        temporary = _temporary(target)
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        os.symlink(kept.link, str(temporary))
        os.replace(str(temporary), str(target))
        return
    replace(target, (site / FOLDER / kept.copy).read_bytes(), kept)


def replace(target: Path, data: bytes, like: Optional[KeptFile] = None) -> None:
    """Put ``data`` at ``target`` in one step and durably; mode, owner and, when the bytes are the kept file's own,
    modification time are those of ``like``."""
    with replacing(target, mode=0o644, temporary=_temporary(target)) as file:
        file.write(data)
        file.flush()
        os.chmod(file.fileno(), like.mode if like is not None and not like.link else 0o644)
        if like is None:
            return
        with contextlib.suppress(PermissionError):
            os.chown(file.fileno(), like.uid, like.gid)
        if sha256(data) == like.sha256:
            os.utime(file.fileno(), ns=(like.mtime_ns, like.mtime_ns))


def write_durable(path: Path, data: bytes) -> None:
    """Write and fsync a file of ours, 0644."""
    with open(str(path), "wb", opener=lambda p, flags: os.open(p, flags | os.O_CLOEXEC, 0o644)) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def bytecode_of(path: Path) -> List[Path]:
    """The cached bytecode of one source file, of every interpreter."""
    return sorted((path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"))


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.fleetdump")


def remove(path: Path) -> None:
    """Unlink a file that may be gone already."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(str(path))


def remove_temporary(target: Path) -> None:
    """Remove what a process that died while replacing ``target`` may have left."""
    remove(_temporary(target))
