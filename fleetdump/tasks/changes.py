"""What a deploy would change on a host: the plan that it shows, and then carries out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fleetdump.agent.patchmessages import PatchArgs, PatchResult
from fleetdump.agent.servermessages import ForecastArgs, ForecastResult, LaunchArgs, LaunchForecast, ServerState
from fleetdump.agent.specs import Interpreter, ServerSpec, interpreters, models_of
from fleetdump.fleet import Host
from fleetdump.inventory import resolve_secrets
from fleetdump.tasks.deployplan import DeployPlan

FORECAST_DEADLINE = 120.0
ALIVE = ("starting", "ready")


@dataclass
class HostChanges:
    """Everything that differs between a host and the plan, in the order in which a deploy changes it."""

    patch: str
    stops: list[str] = field(default_factory=list)
    """Servers of ours that run and are in the way."""
    reverts: list[Interpreter] = field(default_factory=list)
    """Engines that have a patch and are to have none in their files."""
    patches: list[tuple[PatchArgs, PatchResult]] = field(default_factory=list)
    """For each engine that the patch is for, how it stands to it; no diff where nothing changes."""
    launches: list[LaunchForecast] = field(default_factory=list)

    @property
    def to_patch(self) -> list[PatchArgs]:
        """Engines whose files change."""
        return [args for args, result in self.patches if result.diff and args.delivery == "in-place"]

    @property
    def unchanged(self) -> bool:
        """Whether the host is as wanted."""
        started = any(launch.change != "none" for launch in self.launches)
        return not (self.stops or self.reverts or self.to_patch or started)

    @property
    def conflicts(self) -> list[LaunchForecast]:
        """Running servers that differ, and that nobody allowed to be stopped."""
        return [launch for launch in self.launches if launch.change == "replace" and launch.server not in self.stops]

    @property
    def diff(self) -> str:
        """What changes in the engines' files; empty where nothing does."""
        return "\n".join(dict.fromkeys(result.diff for _, result in self.patches if result.diff))

    def lines(self) -> list[str]:
        """The changes in words, one a line; empty when there is none."""
        found = [f"stop {name}" for name in self.stops]
        found += [f"revert the patch of {engine.python}" for engine in self.reverts]
        found += [f"patch {args.python} with {self.patch}" for args in self.to_patch]
        for launch in self.launches:
            if launch.change == "none":
                continue
            differs = f": {'; '.join(launch.differs)}" if launch.differs else ""
            added = f", with {' '.join(launch.added_args)} for the patch" if launch.added_args else ""
            hook = ", patched by the import hook" if self._by_hook else ""
            needs = " (needs --replace: it runs)" if launch in self.conflicts else ""
            found.append(f"start {launch.server}{needs}{differs or added}{hook}")
        return found

    def summary(self) -> dict[str, Any]:
        """For ``--json``."""
        servers = [
            {"server": one.server, "change": one.change, "differs": one.differs, "argv": one.argv}
            for one in self.launches
        ]
        return {
            "patch": self.patch,
            "unchanged": self.unchanged,
            "changes": self.lines(),
            "needs_replace": [launch.server for launch in self.conflicts],
            "servers": servers,
            "diff": self.diff,
        }

    @property
    def _by_hook(self) -> bool:
        return any(args.delivery == "import-hook" for args, _ in self.patches)


def look(host: Host, plan: DeployPlan, servers: list[ServerState]) -> HostChanges:
    """Compare the host, whose servers are ``servers``, with the plan. Raises what ``Host.call`` raises: for a patch
    that does not fit, a port that is taken, arguments that cannot be."""
    engines = interpreters(host.config.servers)
    in_files = plan.patch is not None and plan.delivery == "in-place"
    patches = [patch_args(host, plan, engine, dry_run=True) for engine in engines if plan.patch is not None]
    launches = [launch_args(host, plan, server) for server in host.config.servers]
    args = ForecastArgs(patches, [] if in_files else engines, launches)
    forecast = host.call(args, ForecastResult, verb="forecast", deadline=FORECAST_DEADLINE)
    changes = HostChanges(f"{plan.patch.name}@{plan.patch.version}" if plan.patch else "")
    changes.reverts = [one for one, state in zip(args.reverts, forecast.reverts, strict=True) if state.patch]
    changes.patches = list(zip(patches, forecast.patches, strict=True))
    changes.launches = forecast.launches
    if plan.replace:
        changes.stops = _in_the_way(changes, host.config.servers, servers)
    return changes


def _in_the_way(changes: HostChanges, wanted: tuple[ServerSpec, ...], servers: list[ServerState]) -> list[str]:
    """Running servers that --replace ends: those that differ, those that never became ready, and those that the
    inventory has no more. What they were to be is started anew."""
    names = {server.name for server in wanted}
    kept = {launch.server for launch in changes.launches if launch.change == "none"}
    stops = [one.name for one in servers if one.state in ALIVE and (one.name not in kept or one.state != "ready")]
    for launch in changes.launches:
        if launch.server in stops and launch.change == "none":
            launch.change, launch.differs = "replace", ["it is not ready"]
    return [name for name in stops if name in names] + [name for name in stops if name not in names]


def patch_args(host: Host, plan: DeployPlan, engine: Interpreter, dry_run: bool) -> PatchArgs:
    """The patch verb's arguments for one engine of the host; the plan has a patch."""
    assert plan.patch is not None
    models = models_of(host.config.servers, engine)
    return PatchArgs(engine.python, plan.patch, dry_run, engine.env, plan.force, plan.delivery, models)


def launch_args(host: Host, plan: DeployPlan, server: ServerSpec) -> LaunchArgs:
    """The launch verb's arguments for one server of the host, secrets resolved."""
    captures = plan.patch is not None and plan.patch.captures
    return LaunchArgs(
        server=resolve_secrets(server),
        patch=plan.patch,
        capture=host.config.capture.spec() if captures else None,
        replace=plan.replace,
        delivery=plan.delivery if plan.patch else "in-place",
        force=plan.force,
    )
