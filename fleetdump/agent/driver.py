"""The driver: a detached process that works on one share until every sample is in the manifest or rejected.

It may be killed at any moment. What it knows stands in files (docs/formats.md): the manifest says what exists, the
attempts say which request ids were used, the taps' journals say what was captured. A new driver goes on from there.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence, TypeVar

from fleetdump.agent.access import authorization
from fleetdump.agent.commit import Committer
from fleetdump.agent.context import State
from fleetdump.agent.formats import PART_SUFFIX, FileName, Writer
from fleetdump.agent.generate import context_length
from fleetdump.agent.journals import Journals
from fleetdump.agent.loop import Loop, Timing
from fleetdump.agent.reporter import Reporter
from fleetdump.agent.server import load_record
from fleetdump.agent.shards import ClosedShards, Closing, close_dead, needed_of
from fleetdump.agent.shardwriter import DISK_FULL
from fleetdump.agent.share import Share, ShareSpec, shares_of

log = logging.getLogger("fleetdump.driver")
T = TypeVar("T")


class DriverError(Exception):
    """The share cannot be worked on; the text says why and what to do."""


def main(argv: List[str]) -> None:
    """Entry point of the detached process: ``argv`` is state root, run, server."""
    root, run, server = argv
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    state = State(Path(root))
    share = Share.of(state, run, server)
    lock = share.claim()
    if lock is None:
        log.info("another driver works on this share")
        return
    with lock:
        work(state, share)


def work(state: State, share: Share, timing: Optional[Timing] = None) -> None:
    """Work on a claimed share to its end; the outcome stands in progress.json."""
    spec = share.spec()
    if spec is None:
        log.error("%s has no share.json", share.root)
        return
    timing = timing or Timing()
    reporter = Reporter(share, spec)
    committer: Optional[Committer] = None
    try:
        if not share.work.exists():
            tokenise(state, share, spec, reporter)
        head = share.work_head()
        reporter.progress.tokens, reporter.progress.notes = head.tokens, head.notes
        writer = Writer(spec.server, secrets.token_hex(4), "driver")
        committer = Committer(share, spec, head.template_sha256, writer)
        Loop(state, share, committer, reporter, timing).run()
        close_shards(state, share, spec, committer, reporter, timing)
        outcome, detail = "done", ""
    except DriverError as error:
        outcome, detail = "failed", str(error)
    except Exception as error:
        log.exception("the driver failed")
        outcome, detail = "failed", f"{type(error).__name__}: {error}; see {share.log}"
    log.info("%s %s", outcome, detail)
    reporter.report(outcome, detail, committer)
    if committer is not None:
        committer.close()


def tokenise(state: State, share: Share, spec: ShareSpec, reporter: Reporter) -> None:
    """Run the tokeniser with the server's own interpreter until work.jsonl is there; raises ``DriverError``."""
    record = load_record(state, spec.server)
    if record is None:
        raise DriverError(f"server {spec.server} was never launched here: fleetdump deploy, then extract again")
    for left_over in share.root.glob("work.jsonl.*.tmp"):
        left_over.unlink()
    job = {
        "model_path": record.model_path,
        "rows": str(share.rows),
        "work": str(share.work),
        "max_tokens": spec.max_tokens,
        "context_length": context_length(record.port, authorization(record.pid, record.start_time)),
        "too_long": spec.too_long,
    }
    with tempfile.TemporaryFile() as question, tempfile.TemporaryFile() as answer:
        question.write(json.dumps(job).encode())
        question.seek(0)
        child = subprocess.Popen(
            [record.python, "-m", "fleetdump.worker.tokenise"],
            stdin=question,
            stdout=answer,
            env=worker_environment(record.import_env, record.model_path),
            cwd="/",
        )
        while child.poll() is None:
            reporter.report("tokenising", _last_word(answer.fileno()))
            time.sleep(0.1)
    if child.returncode or not share.work.exists():
        raise DriverError(f"the tokeniser ended with status {child.returncode}: see {share.log}")


def worker_environment(import_env: Dict[str, str], model_path: str) -> Dict[str, str]:
    """Environment of a worker: the server's imports (``import_env``) with our bundle first on the path, and no network
    for a model that lies on this machine."""
    bundle = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, **import_env}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [bundle, env.get("PYTHONPATH", "")]))
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    if Path(model_path).is_dir():
        env.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    return env


def _last_word(descriptor: int) -> str:
    """How far the tokeniser says it is. ``pread``: the file's offset is shared with the child that writes there."""
    lines = os.pread(descriptor, 1 << 20, 0).splitlines()
    rows = [json.loads(line)["rows"] for line in lines if line.startswith(b'{"rows"') and line.endswith(b"}")]
    return f"{rows[-1]} rows tokenised" if rows else "the tokeniser starts"


def close_shards(
    state: State, share: Share, spec: ShareSpec, committer: Committer, reporter: Reporter, timing: Timing
) -> None:
    """Wait until every shard that the manifest names is closed: a living tap does it when idle, we do it for dead
    writers of this server. Raises ``DriverError`` when one has vanished, or cannot be closed without a loss."""
    directory = spec.directory
    journals = Journals(directory, spec.server, lambda _: False)
    needed = needed_of(shares_of(state, share.run))

    def wait(why: str) -> None:
        reporter.report("closing", why, committer)
        time.sleep(timing.probe / 2)

    _until_disk_lets(committer.close_tokens, wait)
    known = ClosedShards.read(directory)
    while True:
        journals.poll()
        known.records.update(journals.closed)
        closing = _until_disk_lets(lambda: close_dead(directory, needed, spec.server, known), wait)
        known.records.update(closing.closed)
        journals.closed.update(closing.closed)
        still_open = sorted(committer.shards - set(journals.closed))
        if not still_open:
            return
        _require_closable(directory, still_open, closing)
        wait(f"{len(still_open)} shards are still open, first {still_open[0]}")


def _require_closable(directory: Path, names: Sequence[str], closing: Closing) -> None:
    """Raise ``DriverError`` when one of the shards ``names`` will never close by itself."""
    for name in names:
        part = name + PART_SUFFIX
        if not (directory / name).exists() and not (directory / part).exists():
            raise DriverError(f"{directory / name} is gone, though the manifest names it")
        if part in closing.kept:
            raise DriverError(
                f"{directory / part} is not closed: its journal has lost pieces that samples need, and closing it "
                "would cut them off. Restore the journal from a copy and extract again; or collect what is whole, and "
                "run the samples that fleetdump verify names under another --run"
            )
        parsed = FileName.parse(name)
        journal = parsed.writer.journal if parsed and parsed.writer else ""
        for fault in closing.faults:
            if fault.file in (name, part, journal):
                raise DriverError(f"{directory / fault.file} cannot be closed: {fault.what}")


def _until_disk_lets(action: Callable[[], T], wait: Callable[[str], None]) -> T:
    while True:
        try:
            return action()
        except OSError as error:  # noqa: PERF203
            if error.errno not in DISK_FULL:
                raise
            wait(f"paused: {error.filename or 'disk'}: {error.strerror}")
