"""What ``plan`` and ``extract`` ask the fleet before a run: what each host is, and how its tokeniser takes the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from fleetdump.agent.hostmessages import ProbeResult
from fleetdump.agent.runmessages import PreviewResult
from fleetdump.cli._fleet import FleetOptions
from fleetdump.dataset.intake import DataSet
from fleetdump.errors import FleetdumpError
from fleetdump.fleet import Host, fan_out
from fleetdump.inventory import HostConfig
from fleetdump.tasks.assignment import Target
from fleetdump.tasks.plan import PREVIEW_DEADLINE, Limits, corrections, look, preview, require_usable
from fleetdump.views.console import count, err
from fleetdump.views.plan import show_preview

LOOK_DEADLINE = 120.0

R = TypeVar("R")


@dataclass
class Looked:
    """The hosts that answered, with what they are, and the errors of the others."""

    hosts: dict[str, tuple[HostConfig, ProbeResult]] = field(default_factory=dict)
    errors: dict[str, FleetdumpError] = field(default_factory=dict)

    @property
    def configs(self) -> list[HostConfig]:
        return [config for config, _ in self.hosts.values()]

    @property
    def targets(self) -> list[Target]:
        """The servers of these hosts."""
        return [(config.name, server.name) for config in self.configs for server in config.servers]


@dataclass(frozen=True)
class Previewed:
    """A sample of the data, tokenised on ``host``; ``factors``: ``tasks.plan.corrections``."""

    host: str
    result: PreviewResult
    factors: Mapping[str, float]


def look_at(options: FleetOptions, configs: Sequence[HostConfig]) -> Looked:
    """Ask every host; raises the first one's error when none can be planned with."""
    err.print(f"looking at {count(len(configs), 'host')}", markup=False)
    looked = Looked()
    by_name = {config.name: config for config in configs}
    for name, (value, error) in ask(options, configs, look, LOOK_DEADLINE).items():
        if value is not None:
            looked.hosts[name] = (by_name[name], value)
        elif error is not None:
            looked.errors[name] = error
    if not looked.hosts and looked.errors:
        raise next(iter(looked.errors.values()))
    return looked


def preview_on(
    options: FleetOptions, config: HostConfig, data: DataSet, ids: Sequence[str], limits: Limits
) -> Previewed:
    """Have the host tokenise these rows, and show what it made of them; raises its error."""
    err.print(f"tokenising {count(len(ids), 'row')} on {config.name}", markup=False)
    answers = ask(options, [config], lambda host: preview(host, data, ids, limits.truncate), PREVIEW_DEADLINE)
    value, error = answers[config.name]
    if error is not None:
        raise error
    assert value is not None
    show_preview(config.name, value)
    require_usable(value)
    return Previewed(config.name, value, corrections(data, ids, value))


def ask(
    options: FleetOptions, configs: Sequence[HostConfig], function: Callable[[Host], R], deadline: float
) -> dict[str, tuple[R | None, FleetdumpError | None]]:
    """``function`` on every host: its value or its error, by host."""
    outcomes = fan_out(
        configs, function, limit=options.jobs, deadline=deadline + 30.0, options=options.connect_options()
    )
    return {name: (outcome.value, outcome.error) for name, outcome in outcomes.items()}
