"""Follow the servers of a host live, in one call for as long as somebody looks (verb ``monitor``).

``watch`` follows one start to its outcome and takes evidence; this looks on, at all servers and through restarts, tells
what has changed, and names what goes wrong. It changes nothing on the host.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import Any, Deque, Dict, List, Optional, Tuple

from fleetdump.agent import healthy, procfs, vitals
from fleetdump.agent.context import AgentContext
from fleetdump.agent.evidence_types import Target
from fleetdump.agent.family import Family, RollCall
from fleetdump.agent.hostwatch import DiskWatch, GpuWatch, HealthWatch
from fleetdump.agent.loading import LoadMeter, model_bytes
from fleetdump.agent.logfollow import LogFollower
from fleetdump.agent.probes import cgroup
from fleetdump.agent.procfs import ProcSample
from fleetdump.agent.progress import ProgressTracker, Sample
from fleetdump.agent.protocol import to_json
from fleetdump.agent.records import in_words
from fleetdump.agent.runmessages import RunProgress, TapStatus
from fleetdump.agent.scrub import scrub
from fleetdump.agent.server import ServerRecord, boot_id, readable_records
from fleetdump.agent.servermessages import Fault, HealthyProfile, MonitorArgs, MonitorResult, Vitals
from fleetdump.agent.share import Share, runs_of, shares_of
from fleetdump.agent.specs import Patience
from fleetdump.agent.status import tail
from fleetdump.agent.tapstatus import taps_of
from fleetdump.agent.vitals import RunFacts

SHARE_OF_A_CORE = 0.02
"""What looking may cost: the interval grows until it costs no more."""
LONGEST_INTERVAL = 10.0
QUIET_SECONDS = 10.0
"""A server of which nothing has changed is told again after so long."""
CLOSING_SECONDS = 2.0
DOUBT_SECONDS = 5.0
"""Requests run and no forward for so long: ask for the server's health at once."""
SLOW_BATCHES = 20
LAST_WORD = 200
MIB = 1 << 20
LAUNCH_SECONDS = 30.0
"""A launch is on record before its process is: it has no process for a moment."""
TOLD_ALWAYS = ("uptime", "idle_seconds", "patience", "moves")
"""Fields whose change alone is no news."""


def monitor(args: MonitorArgs, ctx: AgentContext) -> MonitorResult:
    """Look until ``args.until`` or the deadline; with ``args.ready`` until every server is ready or has a fault."""
    watch = HostMonitor(args, ctx)
    end = time.monotonic() + args.until
    result = MonitorResult()
    began = time.process_time()
    while True:
        before, started = time.process_time(), time.monotonic()
        result.servers = watch.look()
        watch.tell(result.servers)
        result.wall_seconds += time.monotonic() - started
        result.samples += 1
        pause = interval(args.interval, time.process_time() - before)
        left = min(end - time.monotonic(), ctx.remaining() - CLOSING_SECONDS)
        if pause > left or (args.ready and settled(result.servers)):
            break
        time.sleep(pause)
    result.cpu_seconds = round(time.process_time() - began, 4)
    return result


def interval(wanted: float, cost: float) -> float:
    """Seconds until the next look, when the last one took ``cost`` seconds of CPU."""
    return min(max(wanted, cost / SHARE_OF_A_CORE), max(wanted, LONGEST_INTERVAL))


def settled(servers: List[Vitals]) -> bool:
    """Whether each server is ready, or will not be without help; not before there is one."""
    return bool(servers) and all(
        one.state in ("ready", "stopped", "absent") or any(not fault.note for fault in one.faults) for one in servers
    )


class HostMonitor:
    """All servers of the host; what they share (GPUs, disks) is asked once."""

    def __init__(self, args: MonitorArgs, ctx: AgentContext) -> None:
        self._args, self._ctx = args, ctx
        self._servers: Dict[str, ServerMonitor] = {}
        self._disks: Dict[str, DiskWatch] = {}
        self._gpus = GpuWatch()
        self._told: Dict[str, Tuple[float, Dict[str, Any]]] = {}
        self._told_empty = False

    def look(self) -> List[Vitals]:
        """Every server as it is now, by name."""
        self._gpus.look()
        records, unreadable = readable_records(self._ctx.state)
        wanted = set(self._args.servers)
        found = {record.name: self._look_at(record) for record in records if not wanted or record.name in wanted}
        for name, failure in unreadable.items():
            if not wanted or name in wanted:
                found[name] = Vitals(name, "broken", faults=[Fault("broken", in_words(failure))])
        for name in wanted - set(found):
            found[name] = Vitals(name, "absent")
        return [found[name] for name in sorted(found)]

    def _look_at(self, record: ServerRecord) -> Vitals:
        known = self._servers.get(record.name)
        if known is None or known.launch != (record.launch_id, record.pid):
            known = ServerMonitor(record, self._args, self._ctx)
            self._servers[record.name] = known
        disk = None
        if record.capture_dir:
            disk = self._disks.setdefault(record.capture_dir, DiskWatch(record.capture_dir)).look()
        return known.look(record, disk, self._gpus)

    def tell(self, servers: List[Vitals]) -> None:
        """An event for each server of which something has changed, with the fields that have; ``empty`` once there is
        none."""
        if not servers and not self._told_empty:
            self._ctx.emit("empty")
        self._told_empty = not servers
        now = time.monotonic()
        for one in servers:
            fields = to_json(one)
            at, told = self._told.get(one.server, (0.0, {}))
            changed = {name: value for name, value in fields.items() if told.get(name) != value or name not in told}
            if now - at < QUIET_SECONDS and not set(changed) - set(TOLD_ALWAYS):
                continue
            self._told[one.server] = (now, fields)
            self._ctx.emit("vitals", server=one.server, changed=changed)


class ServerMonitor:
    """One launch of one server."""

    def __init__(self, record: ServerRecord, args: MonitorArgs, ctx: AgentContext) -> None:
        self.launch = (record.launch_id, record.pid)
        self._ctx = ctx
        self._log = LogFollower(record.log, record.mark, record.ranks)
        self._family = Family(record.pid, record.start_time)
        self._meter = LoadMeter(model_bytes(record.model_path))
        self._kind = ""
        self._healthy: Optional[HealthyProfile] = None
        self._others = args.healthy
        self._tracker = ProgressTracker(args.patience or Patience(), gap_limit=max(5.0, 3 * args.interval))
        target = Target(record.pid, record.start_time, port=record.port, host=record.host)
        self._health = HealthWatch(target)
        self._roll = RollCall()
        self._lost: List[str] = []
        self._group = cgroup.cgroup_path(record.pid, "memory")[1]
        self._oom_before = _oom_kills(self._group)
        self._driver_seen = False
        self._forwards = 0
        self._forward_at = 0.0
        self._slow: Deque[float] = deque(maxlen=SLOW_BATCHES)
        self._rows: Tuple[float, int] = (0.0, 0)

    def look(self, record: ServerRecord, disk: Optional[vitals.Disk], gpus: GpuWatch) -> Vitals:
        """The server now; ``record`` is its record as it stands now."""
        # Processes first: whoever dies after this look has already written what the log shows below.
        now = time.monotonic()
        alive = procfs.is_alive(record.pid, record.start_time) and record.boot == boot_id()
        processes = self._family.sample() if alive else []
        marks = self._log.read()
        if alive and not record.stopped_at:
            self._lost = self._roll.call(processes, marks, record.ranks if record.ready else 0)
        taps, share = taps_of(self._ctx.state, record.name, record.launch_id), self._share(record.name)
        port_open = record.port in procfs.listeners(record.pid) if alive else None
        state = _state(record, alive, bool(marks.ready and port_open))
        forwards = marks.forwards + sum(tap.rows for tap in taps)
        busy = share is not None and share.in_flight > 0
        self._count(now, forwards, busy)
        health = vitals.Health()
        if state == "ready":
            health = self._health.look(now, forwards, busy and now - self._forward_at > DOUBT_SECONDS)
        self._compare(record.kind)
        sample = Sample(
            at=now,
            phase=_phase(state, marks.phase),
            news=marks.news,
            forwards=forwards,
            processes=processes,
            gpu_bytes=gpus.used,
            busy=busy or health.failing_seconds > 0,
            slowest_batch=max(self._slow, default=0.0),
        )
        facts = RunFacts(
            state=state,
            pid=record.pid,
            port=record.port,
            marks=marks,
            assessment=self._tracker.observe(sample),
            forwards=forwards,
            lost=self._lost,
            oom_kills=_oom_kills(self._group) - self._oom_before,
            port_open=port_open if state == "ready" else None,
            health=health,
            share=share,
            driver_seen=self._driver_seen,
            driver_said=self._last_word(share),
            taps=taps,
            disk=disk,
            gpu_trouble=gpus.trouble,
            healthy=self._healthy,
        )
        return self._vitals(record, facts, now, processes)

    # ------------------------------------------------------------------ counting
    def _compare(self, kind: str) -> None:
        """Learn what healthy starts of this kind took, once the watch of the start has said which kind it is."""
        if kind != self._kind:
            self._kind = kind
            self._healthy = healthy.on_all_hosts(self._ctx.state, kind, self._others)
            self._tracker.healthy = self._healthy.longest if self._healthy else None

    def _count(self, now: float, forwards: int, busy: bool) -> None:
        """Keep the time of the last forward and how long the slowest of the recent ones took."""
        if forwards != self._forwards or not busy:
            if busy and self._forward_at:
                self._slow.append(now - self._forward_at)
            self._forwards, self._forward_at = forwards, now

    def _share(self, server: str) -> Optional[RunProgress]:
        """The share of this server that was worked on last and is not finished."""
        state = self._ctx.state
        shares = [share for run in runs_of(state) for share in shares_of(state, run) if share.server == server]
        open_shares = [one for one in (share.progress() for share in shares) if one.state not in ("done", "failed")]
        newest = max(open_shares, key=lambda one: one.updated_at, default=None)
        self._driver_seen = self._driver_seen or bool(newest and newest.driver_alive)
        return newest

    def _last_word(self, share: Optional[RunProgress]) -> str:
        """The last line of the log of a driver that is gone."""
        if share is None or share.state != "stopped":
            return ""
        with contextlib.suppress(OSError), open(Share.of(self._ctx.state, share.run, share.server).log, "rb") as log:
            return "".join(tail(log, 1))[:LAST_WORD]
        return ""

    # ------------------------------------------------------------------ telling
    def _vitals(self, record: ServerRecord, facts: RunFacts, now: float, processes: List[ProcSample]) -> Vitals:
        marks, taps, share = facts.marks, facts.taps, facts.share
        loading = self._meter.observe(now, marks.phase, processes, marks.bar) if facts.state == "starting" else None
        rows = sum(tap.rows for tap in taps)
        at, before = self._rows
        self._rows = (now, rows)
        found = vitals.faults(facts)
        one = Vitals(
            server=record.name,
            state=facts.state,
            phase=marks.phase,
            uptime=round(time.time() - record.started_at, 1) if processes else 0.0,
            lines=marks.lines,
            idle_seconds=round(facts.assessment.idle_seconds, 1),
            patience=round(facts.assessment.patience, 1),
            moves=facts.assessment.reasons[:4],
            behind=marks.slowest() if facts.state == "starting" else [],
            forwards=marks.forwards,
            in_flight=share.in_flight if share else 0,
            rows=rows,
            rows_per_second=round((rows - before) / (now - at), 1) if at and now > at else 0.0,
            bytes_per_second=sum(_fresh(tap).bytes_per_second for tap in taps) if processes else 0.0,
            queue_bytes=sum(tap.queue_bytes for tap in taps),
            ring_bytes=sum(tap.ring_bytes for tap in taps),
            errors=sum(tap.errors + sum(tap.skips.values()) for tap in taps),
            last_error=next((tap.last_error for tap in taps if tap.last_error), ""),
            healthy=self._healthy if facts.state == "starting" else None,
            run=_in_words(share) if share else "",
            faults=[Fault(fault.code, scrub(fault.text), fault.note) for fault in found],
        )
        if facts.disk is not None:
            one.disk_free, one.disk_eta = facts.disk.free & -MIB, round(facts.disk.eta)
        if loading is not None:
            one.load_bytes, one.load_total = loading.done, loading.total
            one.load_rate, one.load_eta = round(loading.rate), round(loading.eta)
        return one


def _state(record: ServerRecord, alive: bool, serves: bool) -> str:
    if record.stopped_at:
        return "stopped"
    if not record.pid and time.time() - record.started_at < LAUNCH_SECONDS:
        return "starting"
    if not alive:
        return "died"
    return "ready" if record.ready or serves else "starting"


def _phase(state: str, logged: str) -> str:
    """A server that says it is ready but does not answer must not count as an idle one."""
    if state == "ready":
        return "serving"
    return "warmup" if logged == "serving" else logged


def _oom_kills(group: str) -> int:
    """Kills for want of memory in the control group in folder ``group`` so far."""
    events = (procfs.read_text(f"{group}/memory.events") or "") if group else ""
    return int(dict(line.split(" ", 1) for line in events.splitlines()).get("oom_kill", 0))


def _fresh(tap: TapStatus) -> TapStatus:
    """A tap that has said nothing for a while writes nothing now."""
    if time.time() - tap.t > QUIET_SECONDS:
        tap.bytes_per_second = 0.0
    return tap


def _in_words(share: RunProgress) -> str:
    text = f"{share.run} {share.state} {share.done}/{share.samples}"
    return f"{text}, {share.tokens_per_second:.0f} tok/s" if share.tokens_per_second else text
