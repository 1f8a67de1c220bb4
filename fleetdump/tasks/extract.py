"""``fleetdump extract``: share a data set out over the servers of the fleet, and watch it being worked on.

Three steps, so that the command line stays thin: ``open_run`` (``assignment``) decides who gets what, or finds what was
decided, ``submit`` hands a host its shares, ``follow`` watches a host until its shares are done. The hosts work on
without us.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fleetdump.agent.formats import SELFCHECK_PREFIX, is_run_name, server_of
from fleetdump.agent.hostmessages import ProbeArgs, ProbeResult, StatusArgs, StatusResult
from fleetdump.agent.protocol import from_json
from fleetdump.agent.runmessages import TOO_LONG, FollowArgs, FollowResult, RunProgress, SubmitArgs
from fleetdump.errors import HostError, UsageError
from fleetdump.fleet import Host
from fleetdump.ledger import Ledger
from fleetdump.tasks._task import task
from fleetdump.tasks.assignment import RunPlan, Share, is_begun

SUBMIT_DEADLINE = 600.0
PROBE_DEADLINE = 90.0
FOLLOW_SECONDS = 7 * 86400.0


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
