"""The controller's index of a run, ``runs/<run>/ledger.sqlite``: what was given to which server, what came back.

The hosts' manifests are the truth; the ledger can be rebuilt from them. SQLite in WAL mode, one writer process. A
``Ledger`` may be used by several threads. All SQL of the project stands in this file.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetdump.agent.formats import ManifestLine, RejectedLine, server_of
from fleetdump.agent.runmessages import ShardInfo
from fleetdump.errors import UsageError

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS samples(
  position INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, digest TEXT NOT NULL DEFAULT '',
  home_host TEXT NOT NULL DEFAULT '', home_server TEXT NOT NULL DEFAULT '',
  host TEXT NOT NULL DEFAULT '', server TEXT NOT NULL DEFAULT '', state TEXT NOT NULL DEFAULT 'planned',
  tokens INTEGER NOT NULL DEFAULT 0, supervised INTEGER NOT NULL DEFAULT 0, reason TEXT NOT NULL DEFAULT '', line TEXT);
CREATE INDEX IF NOT EXISTS samples_by_share ON samples(host, server, position);
CREATE TABLE IF NOT EXISTS shares(
  host TEXT NOT NULL, server TEXT NOT NULL, sha256 TEXT NOT NULL DEFAULT '', submitted_at REAL NOT NULL DEFAULT 0,
  offset INTEGER NOT NULL DEFAULT 0, rejected_offset INTEGER NOT NULL DEFAULT 0, share_id TEXT NOT NULL DEFAULT '',
  PRIMARY KEY(host, server)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS shards(
  host TEXT NOT NULL, name TEXT NOT NULL, kind TEXT NOT NULL, bytes INTEGER NOT NULL, sha256 TEXT NOT NULL,
  pulled INTEGER NOT NULL DEFAULT 0, verified INTEGER NOT NULL DEFAULT 0, PRIMARY KEY(host, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sample_shards(
  id TEXT NOT NULL, host TEXT NOT NULL, server TEXT NOT NULL, shard TEXT NOT NULL,
  PRIMARY KEY(id, host, server, shard)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS copies(
  host TEXT NOT NULL, name TEXT NOT NULL, path TEXT NOT NULL, PRIMARY KEY(host, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS broken_rows(line INTEGER PRIMARY KEY, reason TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS duplicates(
  id TEXT NOT NULL, host TEXT NOT NULL, server TEXT NOT NULL, PRIMARY KEY(id, host, server)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS overtaken(
  host TEXT NOT NULL, server TEXT NOT NULL, PRIMARY KEY(host, server)) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class Planned:
    """A sample of the data set and the server it is given to. ``digest`` is of the row's content, ``tokens`` an
    estimate, ``line`` its row's in the data set (0 for all samples: their order counts)."""

    id: str
    digest: str
    host: str
    server: str
    tokens: int = 0
    line: int = 0


@dataclass(frozen=True)
class RejectedRow:
    """A row that became no sample. ``line``: in the data set, 0 when it is not known (the ledger was rebuilt from the
    hosts alone); ``id`` is empty for a row that could not be read."""

    line: int
    id: str
    reason: str
    detail: str


@dataclass(frozen=True)
class MissingSample:
    """A sample whose data is not here. ``line``: in the data set, 0 when it is not known; ``host``: where it was
    computed (``is_done``), or else was given to."""

    line: int
    id: str
    host: str
    is_done: bool


@dataclass(frozen=True)
class ShareRow:
    """One server's share: identity, and how far its manifest and rejects have been read (bytes). ``share_id`` is the
    host's name for the submit that made it, empty before the first collect."""

    host: str
    server: str
    sha256: str
    submitted_at: float
    offset: int
    rejected_offset: int
    share_id: str


@dataclass(frozen=True)
class ShareTotals:
    """The samples given to one server: ``here`` are those whose bytes lie on this machine (``Ledger.collected``)."""

    samples: int
    here: int
    rejected: int


@dataclass(frozen=True)
class Delivered:
    """A sample that exists: where it lies and its manifest line as text."""

    id: str
    host: str
    server: str
    line: str


@dataclass(frozen=True)
class Totals:
    """Counts of samples: ``expected`` are all rows of the data set, ``rejected`` those that no host was given (broken)
    or that a host refused; ``lost`` are neither delivered nor rejected."""

    expected: int
    delivered: int
    rejected: int
    duplicated: int

    @property
    def lost(self) -> int:
        return self.expected - self.delivered - self.rejected


class Ledger:
    """One run's ledger. A context manager; closing it twice is harmless."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=30.0)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(SCHEMA)
        except sqlite3.Error as error:
            raise UsageError(
                "the run's ledger cannot be used",
                str(path),
                str(error),
                "check its permissions; a damaged one may be moved away: fleetdump collect rebuilds it from the hosts",
            ) from error

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Everything inside happens, or nothing does."""
        with self._lock:
            if self._db.in_transaction:
                yield
                return
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    # ------------------------------------------------------------------ plan
    def plan(
        self, samples: Iterable[Planned], shares: Iterable[tuple[str, str, str]], broken: Iterable[tuple[int, str]] = ()
    ) -> None:
        """Record a run: its samples in the data set's order, (host, server, sha256) of each share, and (line, reason)
        of each row that no host is given. What ``collect`` read from hosts before there was a plan is kept."""
        with self.transaction():
            self._db.execute("UPDATE samples SET position = -position")
            self._db.executemany(
                "INSERT INTO samples(position, id, digest, home_host, home_server, tokens) VALUES (?,?,?,?,?,?) "
                "ON CONFLICT(id) DO UPDATE SET position = excluded.position, digest = excluded.digest, "
                "home_host = excluded.home_host, home_server = excluded.home_server",
                ((s.line or n, s.id, s.digest, s.host, s.server, s.tokens) for n, s in enumerate(samples, 1)),
            )
            self._db.executemany(
                "INSERT INTO shares(host, server, sha256) VALUES (?,?,?) "
                "ON CONFLICT(host, server) DO UPDATE SET sha256 = excluded.sha256",
                shares,
            )
            self._db.executemany("INSERT INTO broken_rows VALUES (?,?)", broken)
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('planned', '1')")

    def forget_plan(self) -> None:
        """Undo ``plan`` for a run of which nothing was handed out from here; what came back of it is kept."""
        with self.transaction():
            self._run("DELETE FROM samples WHERE state = 'planned'")
            self._run("DELETE FROM shares WHERE share_id = ''")
            self._run("UPDATE shares SET sha256 = ''")
            self._run("DELETE FROM broken_rows")
            self._run("DELETE FROM meta WHERE key IN ('planned', 'data', 'settings')")

    def note(self, key: str, value: str) -> None:
        """Remember a fact of the run: ``data`` (the file's name, for words) or ``settings`` (as JSON)."""
        self._run("INSERT OR REPLACE INTO meta VALUES (?, ?)", key, value)

    def noted(self, key: str) -> str:
        """What was noted of the run, empty when nothing was."""
        row = self._row("SELECT value FROM meta WHERE key = ?", key)
        return str(row[0]) if row else ""

    @property
    def is_planned(self) -> bool:
        """Whether the data set is known: a ledger rebuilt from hosts alone does not know what is still to come."""
        return self._one("SELECT count(*) FROM meta WHERE key = 'planned'") > 0

    def assignments(self) -> Iterator[Planned]:
        """All samples as planned, in the data set's order; read as they are wanted, so finish before writing."""
        with self._lock:
            rows = self._db.execute("SELECT id, digest, home_host, home_server, tokens FROM samples ORDER BY position")
            for row in rows:
                yield Planned(*row)

    @property
    def samples(self) -> int:
        """How many it has heard of."""
        return self._one("SELECT count(*) FROM samples")

    def ids(self) -> set[str]:
        """Every sample that the ledger has heard of."""
        return {str(row[0]) for row in self._all("SELECT id FROM samples")}

    def homes(self) -> dict[str, tuple[str, str]]:
        """(host, server) that each sample was given to."""
        rows = self._all("SELECT id, home_host, home_server FROM samples")
        return {sample: (host, server) for sample, host, server in rows}

    def shares(self, host: str = "") -> list[ShareRow]:
        """The shares, of one host or of all."""
        sql = "SELECT host, server, sha256, submitted_at, offset, rejected_offset, share_id FROM shares"
        rows = self._all(f"{sql} WHERE ? IN ('', host) ORDER BY host, server", host)
        return [ShareRow(*row) for row in rows]

    def meet_share(self, host: str, server: str, share_id: str) -> None:
        """A share that a host has. When it is another than the one read before (the host was cleaned and the run begun
        anew), it is read from its start: samples that lie here verified are kept, the others' shards are gone, and
        they are taken anew. An empty ``share_id`` (the host cannot read its share.json) says nothing."""
        with self.transaction():
            self._run("INSERT OR IGNORE INTO shares(host, server) VALUES (?,?)", host, server)
            changed = self._db.execute(
                "UPDATE shares SET share_id = ?, offset = 0, rejected_offset = 0 "
                "WHERE host = ? AND server = ? AND share_id != ? AND ? != ''",
                (share_id, host, server, share_id, share_id),
            )
            if changed.rowcount:
                self._forget_uncollected(host, server)

    def _forget_uncollected(self, host: str, server: str) -> None:
        before = self._all("SELECT id FROM samples WHERE host = ? AND server = ? AND state = 'delivered'", host, server)
        gone = {str(row[0]) for row in before} - self.collected(host, server)
        self._db.executemany(
            "UPDATE samples SET state = 'planned', line = NULL WHERE id = ?", ((sample,) for sample in gone)
        )
        self._db.executemany(
            "DELETE FROM sample_shards WHERE id = ? AND host = ? AND server = ?",
            ((sample, host, server) for sample in gone),
        )

    def move(self, ids: Sequence[str], host: str, share: str, sha256: str) -> None:
        """These samples, which their share has given away, are now those of another share."""
        with self.transaction():
            self._run(
                "INSERT INTO shares(host, server, sha256) VALUES (?,?,?) "
                "ON CONFLICT(host, server) DO UPDATE SET sha256 = excluded.sha256",
                *(host, share, sha256),
            )
            self._db.executemany(
                "UPDATE samples SET home_host = ?, home_server = ? WHERE id = ?", ((host, share, name) for name in ids)
            )

    def unsettled(self, host: str) -> list[tuple[str, str]]:
        """(id, share) of each sample that is given to this host and not known to be done, in the data set's order."""
        sql = "SELECT id, home_server FROM samples WHERE home_host = ? AND state = 'planned' ORDER BY position"
        return [(str(sample), str(share)) for sample, share in self._all(sql, host)]

    def unsettled_by_host(self) -> dict[str, int]:
        """How many of the samples that each host is given are not known to be done; hosts without any are left out."""
        return dict(self._all("SELECT home_host, count(*) FROM samples WHERE state = 'planned' GROUP BY home_host"))

    def overtake(self, host: str) -> None:
        """Samples of the host's shares are given to others without its knowing: it works on them until it is told."""
        self._run("INSERT OR IGNORE INTO overtaken SELECT host, server FROM shares WHERE host = ?", host)

    def overtaken(self, host: str) -> list[str]:
        """The shares of the host that are to give away what they have not begun, since others were given it."""
        return [str(row[0]) for row in self._all("SELECT server FROM overtaken WHERE host = ? ORDER BY server", host)]

    def told(self, host: str, share: str) -> None:
        """The share has given away what it had not begun."""
        self._run("DELETE FROM overtaken WHERE host = ? AND server = ?", host, share)

    def still_home(self, ids: Iterable[str], host: str, share: str) -> list[str]:
        """Those of ``ids`` that no other share was given yet and that nobody has settled, in the data set's order."""
        sql = "SELECT id FROM samples WHERE home_host = ? AND home_server = ? AND state = 'planned' ORDER BY position"
        wanted = set(ids)
        return [name for (name,) in self._all(sql, host, share) if name in wanted]

    def share_sha256(self, host: str, share: str) -> str:
        """Identity of a share as it was given to its host."""
        row = self._row("SELECT sha256 FROM shares WHERE host = ? AND server = ?", host, share)
        return str(row[0]) if row else ""

    def submitted(self, host: str, server: str) -> None:
        """The host has taken in the share."""
        self._run("UPDATE shares SET submitted_at = ? WHERE host = ? AND server = ?", time.time(), host, server)

    def was_submitted(self, host: str, server: str) -> bool:
        """Whether the host is known to have taken in the share."""
        sql = "SELECT count(*) FROM shares WHERE host = ? AND server = ? AND (submitted_at > 0 OR share_id != '')"
        return self._one(sql, host, server) > 0

    # ------------------------------------------------------------------ what comes back
    def knows(self, sample_id: str) -> bool:
        """Whether the data set has that sample."""
        return self._one("SELECT count(*) FROM samples WHERE id = ?", sample_id) > 0

    def deliver(self, host: str, line: ManifestLine, text: str) -> bool:
        """Take in a manifest line. False: the sample was delivered before by another line; the first is kept and the
        duplicate is counted. The same line again changes nothing."""
        with self.transaction():
            self._db.executemany(
                "INSERT OR IGNORE INTO sample_shards VALUES (?,?,?,?)",
                [(line.id, host, line.server, shard) for shard in _shards_of(line)],
            )
            first = self._row("SELECT host, server, line FROM samples WHERE id = ? AND state = 'delivered'", line.id)
            if first is not None and first != (host, line.server, text):
                self._run("INSERT OR IGNORE INTO duplicates VALUES (?,?,?)", line.id, host, line.server)
                return False
            self._run(
                "INSERT INTO samples(id, host, server, state, tokens, supervised, line) "
                "VALUES (?,?,?,'delivered',?,?,?) "
                "ON CONFLICT(id) DO UPDATE SET host = excluded.host, server = excluded.server, state = 'delivered', "
                "tokens = excluded.tokens, supervised = excluded.supervised, line = excluded.line, reason = ''",
                *(line.id, host, line.server, line.tokens, line.supervised, text),
            )
        return True

    def reject(self, host: str, line: RejectedLine) -> None:
        """Take in a reject; a sample that was delivered stays delivered."""
        self._run(
            "INSERT INTO samples(id, host, server, state, reason) VALUES (?,?,?,'rejected',?) "
            "ON CONFLICT(id) DO UPDATE SET state = 'rejected', reason = excluded.reason WHERE state != 'delivered'",
            *(line.id, host, line.server, f"{line.reason}: {line.detail}"),
        )

    def advance(self, host: str, server: str, offset: int, rejected_offset: int) -> None:
        """Manifest and rejects of the share have been read up to these bytes."""
        self._run(
            "UPDATE shares SET offset = ?, rejected_offset = ? WHERE host = ? AND server = ?",
            *(offset, rejected_offset, host, server),
        )

    # ------------------------------------------------------------------ answers
    def totals(self) -> Totals:
        """Counts over the run."""
        states: dict[str, int] = dict(self._all("SELECT state, count(*) FROM samples GROUP BY state"))
        broken = self._one("SELECT count(*) FROM broken_rows")
        return Totals(
            expected=sum(states.values()) + broken,
            delivered=states.get("delivered", 0),
            rejected=states.get("rejected", 0) + broken,
            duplicated=self.copies(),
        )

    def copies(self) -> int:
        """Lines of samples that another line had delivered before: how often hosts' counts are one too many."""
        return self._one("SELECT count(*) FROM duplicates")

    def share_totals(self, host: str, server: str) -> ShareTotals:
        """Counts over the samples that were given to one server, whoever delivered them."""
        given = self._all(
            "SELECT id, state, host, server FROM samples WHERE home_host = ? AND home_server = ?", host, server
        )
        sources = {(by, at) for _, state, by, at in given if state == "delivered"}
        collected = {sample for source in sources for sample in self.collected(*source)}
        return ShareTotals(
            samples=len(given),
            here=sum(state == "delivered" and sample in collected for sample, state, _, _ in given),
            rejected=sum(state == "rejected" for _, state, _, _ in given),
        )

    def delivered(self, host: str = "") -> Iterator[Delivered]:
        """Delivered samples in the data set's order, of one host or of all."""
        sql = (
            "SELECT id, host, server, line FROM samples WHERE state = 'delivered' AND ? IN ('', host) ORDER BY position"
        )
        for row in self._all(sql, host):
            yield Delivered(*row)

    def lost(self, limit: int = 20) -> list[tuple[str, str, str]]:
        """(id, host, server) of samples that are neither delivered nor rejected."""
        sql = "SELECT id, home_host, home_server FROM samples WHERE state = 'planned' ORDER BY position LIMIT ?"
        return [(str(a), str(b), str(c)) for a, b, c in self._all(sql, limit)]

    def rejected(self) -> list[tuple[str, str]]:
        """(id, reason) of every rejected sample in the data set's order, broken rows first as ``line N``."""
        broken = self._all("SELECT 'line ' || line, reason FROM broken_rows ORDER BY line")
        return [*broken, *self._all("SELECT id, reason FROM samples WHERE state = 'rejected' ORDER BY position")]

    def rejected_rows(self) -> Iterator[RejectedRow]:
        """Every rejected row and sample, by line in the data set."""
        sql = (
            "SELECT line, '' AS id, reason FROM broken_rows UNION ALL "
            "SELECT CASE WHEN :planned THEN position ELSE 0 END, id, reason FROM samples WHERE state = 'rejected' "
            "ORDER BY 1, 2"
        )
        with self._lock:
            rows = self._db.execute(sql, {"planned": int(self.is_planned)}).fetchall()
        for line, sample, text in rows:
            reason, _, detail = text.partition(": ")
            yield RejectedRow(line, sample, reason, detail)

    def missing(self) -> Iterator[MissingSample]:
        """Every sample that is neither delivered nor rejected, in the data set's order."""
        sql = (
            "SELECT CASE WHEN :planned THEN position ELSE 0 END, id, home_host FROM samples WHERE state = 'planned' "
            "ORDER BY position"
        )
        for line, sample, host in self._missing(sql):
            yield MissingSample(line, sample, host, is_done=False)

    def not_here(self) -> Iterator[MissingSample]:
        """Every delivered sample of which a file does not lie here, verified and whole, in the data set's order."""
        whole = set(self._whole_copies())
        files = (
            "WITH kept AS (SELECT position, id, host, server, CASE WHEN json_valid(line) THEN "
            "json_extract(line, '$.norm') END AS norm FROM samples WHERE state = 'delivered'), "
            "files AS (SELECT position, id, host, shard AS file FROM kept JOIN sample_shards USING(id, host, server) "
            "UNION ALL SELECT position, id, host, norm FROM kept WHERE norm != '') "
            "SELECT CASE WHEN :planned THEN position ELSE 0 END, id, host, file FROM files ORDER BY position, id"
        )
        last = ""
        for line, sample, host, file in self._missing(files):
            if sample != last and (host, file) not in whole:
                last = sample
                yield MissingSample(line, sample, host, is_done=True)

    def _missing(self, sql: str) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(sql, {"planned": int(self.is_planned)}).fetchall()

    # ------------------------------------------------------------------ shards
    def needed_shards(self, host: str) -> set[str]:
        """Names of the shards on ``host`` that kept samples lie in."""
        sql = (
            "SELECT DISTINCT shard FROM sample_shards JOIN samples USING(id, host, server) "
            "WHERE host = ? AND state = 'delivered'"
        )
        return {str(row[0]) for row in self._all(sql, host)}

    def put_shard(self, host: str, shard: ShardInfo) -> None:
        """Remember a shard of a host; other bytes under a known name have not been verified."""
        self._run(
            "INSERT INTO shards(host, name, kind, bytes, sha256) VALUES (?,?,?,?,?) ON CONFLICT(host, name) DO UPDATE "
            "SET kind = excluded.kind, bytes = excluded.bytes, sha256 = excluded.sha256, "
            "verified = verified AND sha256 = excluded.sha256 AND bytes = excluded.bytes",
            *(host, shard.name, shard.kind, shard.bytes, shard.sha256),
        )

    def pulled(self, host: str, name: str, path: Path, verified: bool) -> None:
        """The shard lies here as ``path``; ``verified``: every byte that a manifest line names is right."""
        with self.transaction():
            self._run(
                "UPDATE shards SET pulled = 1, verified = ? WHERE host = ? AND name = ?", int(verified), host, name
            )
            self._run("INSERT OR REPLACE INTO copies VALUES (?,?,?)", host, name, str(path.absolute()))

    def is_verified(self, host: str, name: str) -> bool:
        """Whether the shard was pulled and found right."""
        sql = "SELECT count(*) FROM shards JOIN copies USING(host, name) WHERE host = ? AND name = ? AND verified = 1"
        return self._one(sql, host, name) > 0

    def collected(self, host: str, server: str) -> set[str]:
        """Ids of the samples of the share's server whose bytes lie here: verified, in files that still exist with the
        size they had. A sample that another share had delivered before counts by that share's copy."""
        whole = set(self._whole_copies())
        server = server_of(server)
        needed = (
            "WITH kept AS (SELECT id, host, server, json_extract(line, '$.norm') AS norm FROM samples s "
            "WHERE state = 'delivered' AND (host = :host AND server = :server OR EXISTS ("
            "SELECT 1 FROM duplicates d WHERE d.id = s.id AND d.host = :host AND d.server = :server))) "
            "SELECT id, host, shard FROM kept JOIN sample_shards USING(id, host, server) "
            "UNION ALL SELECT id, host, norm FROM kept WHERE norm != ''"
        )
        with self._lock:
            rows = self._db.execute(needed, {"host": host, "server": server}).fetchall()
        return {row[0] for row in rows} - {sample for sample, at, name in rows if (at, name) not in whole}

    def _whole_copies(self) -> Iterator[tuple[str, str]]:
        """(host, name) of each file that was verified and is still there with its size."""
        sql = "SELECT host, name, bytes, path FROM shards JOIN copies USING(host, name) WHERE verified = 1"
        for host, name, size, path in self._all(sql):
            with suppress(OSError):
                if Path(path).stat().st_size == size:
                    yield host, name

    # ------------------------------------------------------------------ plumbing
    def _run(self, sql: str, *values: object) -> None:
        with self._lock:
            self._db.execute(sql, values)

    def _all(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(sql, values).fetchall()

    def _row(self, sql: str, *values: object) -> tuple[Any, ...] | None:
        rows = self._all(sql, *values)
        return rows[0] if rows else None

    def _one(self, sql: str, *values: object) -> int:
        row = self._row(sql, *values)
        return int(str(row[0])) if row else 0


def _shards_of(line: ManifestLine) -> Sequence[str]:
    return [*dict.fromkeys(piece.shard for piece in line.pieces), line.token_shard.shard]
