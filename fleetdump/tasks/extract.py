"""``fleetdump extract``: share a data set out over the servers of the fleet, and watch it being worked on.

Three steps, so that the command line stays thin: ``open_run`` decides who gets what (or finds what was decided),
``submit`` hands a host its shares, ``follow`` watches a host until its shares are done. The hosts work on without us.
"""

from __future__ import annotations

import functools
import heapq
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fleetdump.agent.formats import SELFCHECK_PREFIX, is_run_name, is_share, server_of
from fleetdump.agent.hostmessages import ProbeArgs, ProbeResult, StatusArgs, StatusResult
from fleetdump.agent.protocol import from_json
from fleetdump.agent.runmessages import TOO_LONG, FollowArgs, FollowResult, RunProgress, SubmitArgs
from fleetdump.dataset.intake import DataSet, Lines, mark_of
from fleetdump.dataset.rows import BrokenRow
from fleetdump.errors import HostError, UsageError
from fleetdump.fleet import Host
from fleetdump.hostpatterns import compress
from fleetdump.inventory import HostConfig
from fleetdump.ledger import Ledger, Planned
from fleetdump.tasks._task import task

SUBMIT_DEADLINE = 600.0
PROBE_DEADLINE = 90.0
FOLLOW_SECONDS = 7 * 86400.0

Target = tuple[str, str]
"""A server of the fleet: (host name, server name)."""


@dataclass
class Share:
    """One server's share: the rows as lines (``formats.row_line``), and their SHA-256."""

    lines: Lines

    @functools.cached_property
    def sha256(self) -> str:
        return self.lines.sha256


@dataclass
class RunPlan:
    """Who works on what. ``resumed``: the shares are those of an earlier call, ``broken``: rows that no host gets."""

    run: str
    shares: dict[Target, Share]
    samples: int
    broken: list[BrokenRow]
    resumed: bool

    def of_host(self, host: str) -> dict[str, Share]:
        """The shares of one host, by server."""
        return {server: share for (name, server), share in self.shares.items() if name == host}


@dataclass(frozen=True)
class ExtractSettings:
    """How the samples are worked on. ``max_tokens`` and ``too_long`` as in ``SubmitArgs``; ``token_budget``: tokens in
    flight at one server."""

    max_tokens: int | None = None
    too_long: str = ""
    token_budget: int = 32768
    max_attempts: int = 3
    allow_failed_selfcheck: bool = False

    def note(self, ledger: Ledger) -> None:
        """Have a run that begins keep them (but the consent, which is given anew each time)."""
        kept = {name: value for name, value in vars(self).items() if name in FIXED and value not in (None, "")}
        ledger.note("settings", json.dumps(kept))


FIXED = ("max_tokens", "too_long", "token_budget", "max_attempts")
"""Settings that a run keeps from its beginning to its end."""


def settle(ledger_file: Path, run: str, told: Mapping[str, int | str]) -> ExtractSettings:
    """The settings of a run: what it was begun with, or else what the command line has ``told``. Raises ``UsageError``
    when it tells something else to a run that has begun: that would be ignored by the shares that are handed out."""
    begun = _begun_with(ledger_file)
    for name, value in told.items():
        if begun and begun.get(name, _DEFAULTS[name]) != value:
            flag, before = f"--{name.replace('_', '-')}", begun.get(name, _DEFAULTS[name])
            was = f"{flag} {before}" if before else f"no {flag}"
            raise UsageError(
                f"run {run} was begun with {was}, not {value}",
                why="its samples are handed out already",
                next_step=f"leave {flag} away to go on with it; for other samples use another --run name",
            )
    return replace(ExtractSettings(), **{**told, **begun})  # type: ignore[arg-type]


_DEFAULTS: Mapping[str, int | str] = {
    "max_tokens": 0,
    "too_long": TOO_LONG[0],
    "token_budget": ExtractSettings.token_budget,
    "max_attempts": ExtractSettings.max_attempts,
}


def _begun_with(ledger_file: Path) -> dict[str, int | str]:
    """Empty when it has not begun, and when the ledger was rebuilt: then the hosts compare."""
    if not is_begun(ledger_file):
        return {}
    with Ledger(ledger_file) as ledger:
        return dict(json.loads(ledger.noted("settings") or "{}"))


def require_run_name(run: str) -> None:
    """Raise ``UsageError`` for what no run may be called."""
    if not is_run_name(run):
        fix = f"use letters, digits, '.', '_' and '-', and another beginning than {SELFCHECK_PREFIX!r}"
        raise UsageError(f"not a name for a run: {run!r}", next_step=fix)


def open_run(
    ledger: Ledger, run: str, data: DataSet, targets: Sequence[Target], found: Mapping[Target, str] | None = None
) -> RunPlan:
    """Decide who gets what, and record it; for a run that the ledger has, find the shares of before. Where the run was
    begun from another folder, or the ledger was lost, the same data and servers give the same shares, which the hosts
    know: ``found`` are the shares that they have (``share_id``), beside those that ``collect`` has read. Where the
    servers that have a share were all that the run was begun with, further ``targets`` get none.

    Raises ``UsageError`` for a run that was begun with other data or servers (the difference is named); nothing is
    recorded then. New ``targets`` are ignored by a run that has begun: its shares are fixed.
    """
    if ledger.is_planned:
        return _resume(ledger, run, data)
    foreign = sorted(ledger.ids() - set(data.rows))
    if foreign:
        raise _other_data(ledger, run, data, [("missing", foreign)])
    there = _first_shares(ledger, found or {})
    assigned, plan = _share_out(run, data, targets)
    if not _makes(plan, there):
        refusal = _other_shares(plan, there)
        begun_with = [target for target in targets if target in there]
        if not begun_with:
            raise refusal
        assigned, plan = _share_out(run, data, begun_with)
        if not _makes(plan, there):
            raise refusal
    planned = (
        Planned(row_id, row.digest, *assigned[row_id], tokens=row.tokens, line=row.line)
        for row_id, row in data.rows.items()
    )
    shares = [(*target, share.sha256) for target, share in plan.shares.items()]
    ledger.plan(planned, shares, [(row.line, f"{row.reason}: {row.detail}") for row in data.broken])
    ledger.note("data", data.name)
    return plan


def require_begun_with(ledger_file: Path, run: str, data: DataSet) -> None:
    """Raise ``UsageError`` when the run of this ledger was begun with other data (the difference is named)."""
    if is_begun(ledger_file):
        with Ledger(ledger_file) as ledger:
            _resume(ledger, run, data)


def _share_out(run: str, data: DataSet, targets: Sequence[Target]) -> tuple[dict[str, Target], RunPlan]:
    """Each sample's server, and the plan that this makes."""
    assigned = balance({row_id: row.tokens for row_id, row in data.rows.items()}, targets)
    ids: dict[Target, list[str]] = {}
    for row_id in data.rows:
        ids.setdefault(assigned[row_id], []).append(row_id)
    return assigned, _plan(run, data, ids, resumed=False)


def _first_shares(ledger: Ledger, found: Mapping[Target, str]) -> dict[Target, str]:
    """The shares that servers were given when the run began (their ``share_id``): not what was taken over from others
    later, nor one of which nothing is known."""
    known = {(share.host, share.server): share.share_id for share in ledger.shares()}
    known.update(found)
    return {target: name for target, name in known.items() if name and server_of(target[1]) == target[1]}


def _makes(plan: RunPlan, there: Mapping[Target, str]) -> bool:
    """Whether the shares that servers have are all of this plan, row for row."""
    return all(target in plan.shares and is_share(name, plan.shares[target].sha256) for target, name in there.items())


def _other_shares(plan: RunPlan, there: Mapping[Target, str]) -> UsageError:
    """Rows of other texts under the same ids, or other servers, or those in another order."""
    begun_with, now = sorted(there), sorted(plan.shares)
    differs = [one for one in begun_with if one not in plan.shares or not is_share(there[one], plan.shares[one].sha256)]
    if begun_with == now:
        why = "it has other rows there: the data, or the order of the hosts in the inventory, is another one"
    else:
        why = f"{_named(begun_with)} {'has' if len(begun_with) == 1 else 'have'} a share of it that was not made of "
        why += f"this data for {_named(now)}"
    hosts = ",".join(compress(sorted({host for host, _ in begun_with})))
    return UsageError(
        f"the data or the servers are not what run {plan.run} was begun with",
        _named(differs),
        why,
        f"give the same file and the hosts it was begun with, in their order (--host {hosts}, when these are all), or "
        f"the command in the folder it was begun in; fleetdump collect --run {plan.run} brings what the hosts have of "
        "it, and fleetdump attach watches; for other data use another --run name",
    )


def _named(targets: Sequence[Target]) -> str:
    names = [f"{host}/{server}" for host, server in targets]
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


NAMED = 5


def balance(tokens: Mapping[str, int], targets: Sequence[Target]) -> dict[str, Target]:
    """Give each sample to a server so that the sums of tokens are about equal: the longest first, each to the server
    with the least so far. The same input gives the same answer."""
    loads = [(0, n) for n in range(len(targets))]
    assigned = {}
    for sample in sorted(tokens, key=lambda sample: -tokens[sample]):
        load, n = heapq.heappop(loads)
        assigned[sample] = targets[n]
        heapq.heappush(loads, (load + tokens[sample], n))
    return assigned


def targets_of(configs: Iterable[HostConfig]) -> list[Target]:
    """All servers of these hosts; raises ``UsageError`` when there is none, or a host does not say what to capture."""
    targets = []
    for config in configs:
        config.capture.spec()
        targets += [(config.name, server.name) for server in config.servers]
    if not targets:
        raise UsageError("no server to work on the data", next_step="give the hosts servers in the inventory")
    return targets


def is_begun(ledger_file: Path) -> bool:
    """Whether the run of this ledger has shares: then nothing of it is decided any more. Raises ``OSError`` for a place
    where no run can be."""
    try:
        ledger_file.parent.stat()
    except FileNotFoundError:
        return False
    if not ledger_file.exists():
        return False
    with Ledger(ledger_file) as ledger:
        return ledger.is_planned


@task
def submit(host: Host, plan: RunPlan, settings: ExtractSettings, ledger: Ledger) -> list[RunProgress]:
    """Hand the host its shares and have its drivers started; submitting again changes nothing but revives drivers.
    A share that the host once took in and no longer has (``clean --data``) is not sent again: it is done when all of
    it lies here. Raises what ``Host.call`` raises, ``UsageError`` for such a share that is not all here, and
    ``HostError`` when the host cannot say what its engine or model is."""
    shares = plan.of_host(host.config.name)
    states = _take_out_forgotten(host, plan.run, shares, ledger) if plan.resumed else []
    if not shares:
        return states
    facts = _facts(host)
    for server, share in shares.items():
        # A share is fixed once it is submitted, whatever it has given away since: there is nothing to be sent.
        is_there = plan.resumed and ledger.was_submitted(host.config.name, server)
        args = SubmitArgs(
            run=plan.run,
            server=server,
            share_sha256=ledger.share_sha256(host.config.name, server) if is_there else share.sha256,
            capture=host.config.capture.spec(),
            max_tokens=settings.max_tokens,
            too_long=settings.too_long,
            token_budget=settings.token_budget,
            max_attempts=settings.max_attempts,
            allow_failed_selfcheck=settings.allow_failed_selfcheck,
            engine=facts.engine,
            patch_sha256=_patch_of(facts, server_of(server)),
            model_sha256=facts.model.sha256 if facts.model else "",
            run_samples=ledger.samples,
        )
        states.append(
            host.call(args, RunProgress, verb="submit", body=[] if is_there else share.lines, deadline=SUBMIT_DEADLINE)
        )
        ledger.submitted(host.config.name, server)
    return states


def _take_out_forgotten(host: Host, run: str, shares: dict[str, Share], ledger: Ledger) -> list[RunProgress]:
    """Remove from ``shares`` what the host has had and no longer knows; returns their states. Sending them again
    would compute everything anew."""
    name = host.config.name
    submitted = [server for server in shares if ledger.was_submitted(name, server)]
    if not submitted:
        return []
    status = host.call(StatusArgs(), StatusResult, verb="status")
    known = {progress.server for progress in status.shares if progress.run == run}
    states = []
    for server in submitted:
        if server in known:
            continue
        totals = ledger.share_totals(name, server)
        missing = totals.samples - totals.here - totals.rejected
        if missing:
            raise UsageError(
                f"the host no longer has its share of run {run}",
                f"{name}/{server}",
                f"it was cleaned away, and {missing} of {totals.samples} samples had not been collected with --data",
                f"use another --run name to compute the data again, or delete the folder of run {run} "
                "(with all that was collected of it) to begin it anew",
            )
        state = RunProgress(run, server, "done", totals.samples, totals.here, totals.rejected)
        state.detail = "already collected, nothing is sent"
        states.append(state)
        del shares[server]
    return states


def _patch_of(facts: ProbeResult, server: str) -> str:
    """The patch that the server was launched with; with the import hook the engine's files know nothing of it."""
    launched = next((state.patch for state in facts.servers if state.name == server), "")
    return launched or (facts.patch.sha256 if facts.patch else "")


@task
def follow(
    host: Host,
    run: str,
    on_progress: Callable[[str, RunProgress], None],
    *,
    revive: bool = True,
    ahead: float = 0.0,
) -> list[RunProgress]:
    """Watch the host's shares of the run until all are done or failed; ``on_progress`` gets the host's name and each
    share's state every second. Drivers that died are started again, unless told not to. With ``ahead`` it ends so many
    seconds before the host will have nothing to do."""

    def on_event(event: dict[str, object]) -> None:
        if event.get("event") == "progress":
            on_progress(host.config.name, from_json(RunProgress, event["progress"]))

    args = FollowArgs(run, revive=revive, ahead=ahead)
    return host.call(args, FollowResult, verb="follow", on_event=on_event, deadline=FOLLOW_SECONDS).shares


def runs_file(runs_dir: Path, run: str) -> Path:
    """Where the ledger of ``run`` lies."""
    return runs_dir / run / "ledger.sqlite"


def _plan(run: str, data: DataSet, ids: Mapping[Target, Sequence[str]], resumed: bool) -> RunPlan:
    shares = {target: Share(data.lines(rows)) for target, rows in ids.items()}
    return RunPlan(run, shares, len(data.rows), data.broken, resumed)


def _resume(ledger: Ledger, run: str, data: DataSet) -> RunPlan:
    """The ledger has the samples in the data set's order: one pass over both, nothing of a million is kept twice."""
    ids: dict[Target, list[str]] = {}
    planned = ledger.assignments()
    for row_id, row in data.rows.items():
        sample = next(planned, None)
        if sample is None or (sample.id, sample.digest) != (row_id, row.digest):
            raise _difference(ledger, run, data)
        ids.setdefault((sample.host, sample.server), []).append(row_id)
    if next(planned, None) is not None:
        raise _difference(ledger, run, data)
    return _plan(run, data, ids, resumed=True)


def _difference(ledger: Ledger, run: str, data: DataSet) -> UsageError:
    before = {sample.id: sample.digest for sample in ledger.assignments()}
    changed = [row_id for row_id, row in data.rows.items() if row.digest != before.get(row_id, row.digest)]
    added = [row_id for row_id in data.rows if row_id not in before]
    gone = [row_id for row_id in before if row_id not in data.rows]
    return _other_data(ledger, run, data, [("changed", changed), ("new", added), ("missing", gone)])


def _other_data(ledger: Ledger, run: str, data: DataSet, kinds: Sequence[tuple[str, list[str]]]) -> UsageError:
    named = [f"{len(ids)} {kind} (first: {ids[0]!r})" for kind, ids in kinds if ids] or ["in another order"]
    why = f"rows: {', '.join(named)}"
    if ledger.is_planned:  # else it knows what the hosts have, and not what there was
        before = mark_of(ledger.noted("data") or "other data", ((one.id, one.digest) for one in ledger.assignments()))
        why += f"; begun with {before.in_words}, given {data.mark.in_words}"
    return UsageError(
        f"the data is not what run {run} was begun with",
        why=why,
        next_step="give the same file, or another --run name for other data",
    )


def _facts(host: Host) -> ProbeResult:
    probe = host.call(ProbeArgs(servers=list(host.config.servers)), ProbeResult, verb="probe", deadline=PROBE_DEADLINE)
    require_engine(probe, host.config.name)
    return probe


def require_engine(probe: ProbeResult, host: str) -> None:
    """Raise ``HostError`` with the cause and the next step when the host cannot say what its engine or its model is:
    samples must say what they were computed with."""
    missing = "" if probe.engine else "engine"
    if not missing and probe.model is None:
        missing = "model"
    if not missing:
        return
    found = [one for one in probe.findings if one.key == missing and one.level != "ok"]
    fix = "; ".join(dict.fromkeys(one.fix for one in found if one.fix))
    then = (
        f"fleetdump check --host {host} shows whether all is well, and fleetdump deploy --host {host} launches servers"
    )
    raise HostError(
        f"this host has no {missing} to compute with",
        host,
        "; ".join(one.text for one in found) or f"it did not say what its {missing} is",
        f"{fix}; then {then}" if fix else then,
        code="not_found",
    )
