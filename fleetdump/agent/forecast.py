"""What a deploy would change on this host (verb ``forecast``): the steps' own plans, none of them carried out."""

from __future__ import annotations

from typing import List

from fleetdump.agent import launchplan, patching
from fleetdump.agent.context import AgentContext
from fleetdump.agent.launch import result_of
from fleetdump.agent.launchplan import LaunchPlan
from fleetdump.agent.procfs import is_alive
from fleetdump.agent.scrub import scrub_argv
from fleetdump.agent.server import ServerRecord, living, load_record, readable_records
from fleetdump.agent.servermessages import ForecastArgs, ForecastResult, LaunchArgs, LaunchForecast

NONE, START, REPLACE = "none", "start", "replace"


def forecast(args: ForecastArgs, ctx: AgentContext) -> ForecastResult:
    """Raises ``AgentFailure`` for what would stop ``patch``, ``revert`` or ``launch``."""
    return ForecastResult(
        [patching.patch(patch, ctx) for patch in args.patches],
        [patching.would_revert(engine, ctx) for engine in args.reverts],
        [_launch(launch, ctx) for launch in args.launches],
    )


def _launch(args: LaunchArgs, ctx: AgentContext) -> LaunchForecast:
    plan = launchplan.plan(args)
    record = load_record(ctx.state, args.server.name)
    members = living(record) if record else []
    found = LaunchForecast(args.server.name, START, scrub_argv(plan.argv), plan.added)
    if record is not None and members and is_alive(record.pid, record.start_time):
        if record.identity == plan.identity:
            found.change, found.running = NONE, result_of(args, record, plan, reused=True)
            return found
        found.change, found.differs = REPLACE, _differences(args, record, plan)
    # What --replace stops first is in nobody's way then.
    ours = [one for one in readable_records(ctx.state)[0] if args.replace or one.name == args.server.name]
    launchplan.check(args, {member.pid for one in ours for member in living(one)})
    return found


def _differences(args: LaunchArgs, record: ServerRecord, plan: LaunchPlan) -> List[str]:
    """In what the running server is another one than the wanted. Of the environment the names alone are known."""
    wanted = f"{args.patch.name}@{args.patch.version}" if args.patch else ""
    sha256 = args.patch.sha256 if args.patch else ""
    found = []
    if record.patch_sha256 != sha256:
        found.append(f"patch {record.patch or 'none'} -> {wanted or 'none'}")
    if wanted and record.delivery != args.delivery:
        found.append(f"delivery {record.delivery} -> {args.delivery}")
    old, new = _options(record.argv), _options(scrub_argv(plan.argv))
    found += [f"- {option}" for option in old if option not in new]
    found += [f"+ {option}" for option in new if option not in old]
    names = sorted(plan.env)
    if names != record.env:
        found.append(f"environment {', '.join(record.env) or 'none'} -> {', '.join(names) or 'none'}")
    layers = args.capture.layers if args.capture else []
    if layers != record.capture_layers:
        found.append(f"layers {record.capture_layers} -> {layers}")
    return found or ["a value of its environment, a secret, or a setting of the capture"]


def _options(argv: List[str]) -> List[str]:
    """A command line as its options, each with its values in one text."""
    options: List[str] = []
    for word in argv:
        if word.startswith("--") or not options:
            options.append(word)
        else:
            options[-1] += f" {word}"
    return options
