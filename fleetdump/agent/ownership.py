"""Whose the files in a run's capture directory are: hosts, operators and state directories may share one.

Names alone do not tell, because every host may have a server ``main``. A writer is of this state directory when its
launch is recorded here, when a manifest here names its shards, or when its journal holds nothing but attempts of ours.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional, Set, Tuple

from fleetdump.agent.context import State
from fleetdump.agent.formats import (
    SELFCHECK_PREFIX,
    FileName,
    FormatError,
    Rid,
    ShardRecord,
    Writer,
    norm_name,
)
from fleetdump.agent.journals import writer_of
from fleetdump.agent.jsonl import read_journal, read_lines
from fleetdump.agent.server import load_records
from fleetdump.agent.share import Share


@dataclass
class OwnFiles:
    """Files of this state directory in one run's capture directory: those of each writer, its journal last (what is
    left of an interrupted removal is still known as ours), and those that have no writer."""

    of_writers: Dict[Writer, List[Path]]
    others: List[Path]

    def __bool__(self) -> bool:
        return bool(self.of_writers or self.others)

    @property
    def paths(self) -> List[Path]:
        """All of them."""
        return [path for paths in (*self.of_writers.values(), self.others) for path in paths]


def knows_run(state: State, run: str) -> bool:
    """Whether the run is of this state directory: it has a share here, or is a self-check of a server of ours."""
    if (state.root / "runs" / run).is_dir():
        return True
    launches = tuple(f"{SELFCHECK_PREFIX}{record.launch_id}-" for record in load_records(state))
    return run.startswith(launches)


def holds_files(folder: Path) -> bool:
    """Whether a folder has files of fleetdump, whoever's, or cannot be looked into."""
    try:
        return bool(_named(folder))
    except OSError:
        return True


def own_files(state: State, folder: Path) -> OwnFiles:
    """What is ours in the capture directory ``folder`` of a run that ``knows_run``."""
    files = _named(folder)
    writers = {name.writer for _, name in files if name.writer is not None}
    if not folder.name.startswith(SELFCHECK_PREFIX):  # whose name has the launch: all in it is of that server
        evidence = _Evidence.of(state, folder.name)
        writers = {writer for writer in writers if evidence.covers(folder, writer)}
        norms = evidence.norms | {norm_name(writer.server, writer.instance) for writer in writers}
        files = [(path, name) for path, name in files if name.writer in writers or path.name in norms]
    return _by_writer(files)


def rank_files(folder: Path) -> OwnFiles:
    """What the ranks of a self-check wrote into ``folder``, its run's ``RANKS_FOLDER``."""
    return _by_writer(_named(folder) if folder.is_dir() and not folder.is_symlink() else [])


def _by_writer(files: List[Tuple[Path, FileName]]) -> OwnFiles:
    files = sorted(files, key=lambda item: (item[1].kind == "journal", item[0].name))
    writers = sorted({name.writer for _, name in files if name.writer is not None}, key=str)
    return OwnFiles(
        {writer: [path for path, name in files if name.writer == writer] for writer in writers},
        [path for path, name in files if name.writer is None],
    )


@dataclass
class _Evidence:
    """What the state directory says of a run's writers."""

    servers: Set[str]
    launches: Set[Tuple[str, str]]
    """(server, launch id)"""
    committed: Set[str]
    """Writers of shards that manifest lines name."""
    norms: Set[str]
    attempts: Set[Tuple[str, int]]

    @classmethod
    def of(cls, state: State, run: str) -> _Evidence:
        roots = [path for path in (state.root / "runs" / run).iterdir() if path.is_dir()]
        launches = {(record.name, record.launch_id) for record in load_records(state)}
        found = cls({root.name for root in roots}, launches, set(), {norm_name(*launch) for launch in launches}, set())
        for share in map(Share, roots):
            with contextlib.suppress(FormatError):  # what a broken file would show to be ours is kept
                found._take(share)
        return found

    def _take(self, share: Share) -> None:
        self.attempts.update((line.id, line.attempt) for line in share.read_attempts())
        for line in read_lines(share.manifest)[0]:
            self.norms.add(line.get("norm", ""))
            shards = [piece["shard"] for piece in line["pieces"]]
            self.committed.update(writer_of(shard) for shard in [*shards, line["token_shard"]["shard"]])

    def covers(self, folder: Path, writer: Writer) -> bool:
        """Whether ``writer`` is of this state directory."""
        if (writer.server, writer.instance) in self.launches or str(writer) in self.committed:
            return True
        if writer.server not in self.servers:
            return False
        journalled = _journalled(folder / writer.journal)
        return journalled is not None and journalled <= self.attempts


def _journalled(journal: Path) -> Optional[Set[Tuple[str, int]]]:
    """The attempts that a journal speaks of; None when it is missing or broken, so that nobody knows."""
    if not journal.exists():
        return None
    try:
        records, _ = read_journal(journal)
    except FormatError:
        return None
    rids = [Rid.parse(record.rid) for record in records if not isinstance(record, ShardRecord)]
    return None if None in rids else {(rid.sample, rid.attempt) for rid in rids if rid is not None}


def _named(folder: Path) -> List[Tuple[Path, FileName]]:
    """Plain files, no links, that have a name of ours."""
    with os.scandir(str(folder)) as entries:
        plain = [Path(entry.path) for entry in entries if entry.is_file(follow_symlinks=False)]
    parsed = [(path, FileName.parse(path.name)) for path in plain]
    return [(path, name) for path, name in parsed if name is not None]
