"""A disk that has room for a shard and none for its journal line: the line comes when there is room again."""

from __future__ import annotations

import dataclasses
import errno
import sys
from typing import Any

import pytest
from test_tap import WRITER, a_piece, config, directory, journal, tapfiles, wait_for

from fleetdump.agent.formats import ShardRecord
from fleetdump.dataset.shards import verify_directory

__all__ = ["config"]  # the fixture

tapjournal = sys.modules["fleetdump_tapjournal"]


def test_a_shard_whose_journal_line_did_not_fit_gets_it_later(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (files,) = [kind for kind in vars(tapjournal).values() if isinstance(kind, type) and hasattr(kind, "new_shard")]
    append, failed = files.append, []

    def full(self: Any, records: Any) -> Any:
        if records[0]["kind"] == "shard" and not failed:
            failed.append(records[0]["shard"])
            return tapjournal.Appended(0, OSError(errno.ENOSPC, "No space left on device"))
        return append(self, records)

    monkeypatch.setattr(files, "append", full)
    writer = tapfiles.TapWriter(dataclasses.replace(config, idle_close_seconds=0.2), 0, None)
    writer.put([a_piece(1)])
    wait_for(lambda: [r.shard for r in journal(config) if isinstance(r, ShardRecord)] == [WRITER.shard(0)], 60)
    assert failed == [WRITER.shard(0)]
    writer.stop()
    assert verify_directory(directory(config)).faults == []
