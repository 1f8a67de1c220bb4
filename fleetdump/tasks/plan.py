"""``fleetdump plan``: what a data set will cost on this fleet, and whether it fits; ``extract`` asks the same first.

``look`` asks a host what it is, ``preview`` has one host tokenise a sample of the rows, ``measure`` runs a short burst
on a server; ``estimate`` puts the answers together and is pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fleetdump.agent.hostmessages import ProbeResult
from fleetdump.agent.runmessages import TOO_LONG, BurstArgs, BurstResult, PreviewArgs, PreviewResult
from fleetdump.dataset.intake import DataSet, Taken
from fleetdump.errors import UsageError
from fleetdump.fleet import Host
from fleetdump.hostpatterns import compress
from fleetdump.inventory import HostConfig, resolve_secrets
from fleetdump.tasks._task import task
from fleetdump.tasks.assignment import Target, balance
from fleetdump.tasks.check import CheckPlan, check
from fleetdump.tasks.extract import require_engine

PREVIEW_DEADLINE = 300.0
SAMPLE_ROWS = 200
SAMPLE_TOKENS = 1 << 20
"""A sample of rows ends here, so that a few huge rows do not make it slow."""
BURST_SECONDS = 20.0
BURST_PROMPTS = 256
BURST_DEADLINE = 180.0

TOKEN_BYTES = 5
"""Of a token's id and mask."""
SAMPLE_BYTES = 2048
"""Of a sample's lines in manifest and journals, and of its names in the shards' headers."""
RESERVE_BYTES = 2 << 30
RESERVE_SHARE = 0.05
"""So much must be left free when all is written: a share of that, at most ``RESERVE_BYTES``."""
DTYPE_BYTES = {"float32": 4, "float64": 8}
"""Of others 2: what weights are stored in by 8 or 4 bits is computed in bf16 or fp16."""
BUCKETS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


@dataclass(frozen=True)
class Limits:
    """Most tokens of a sample (0: none), and whether a longer one is cut; else it is dropped."""

    max_tokens: int = 0
    truncate: bool = False

    def within(self, other: int) -> Limits:
        """The tighter of this and another limit (0: none)."""
        known = [limit for limit in (self.max_tokens, other) if limit]
        return Limits(min(known, default=0), self.truncate)

    def apply(self, tokens: int) -> int:
        """Tokens that are left of a sample, 0 when it is dropped."""
        if not self.max_tokens or tokens <= self.max_tokens:
            return tokens
        return self.max_tokens if self.truncate else 0


@dataclass(frozen=True)
class Bucket:
    """A bar of the histogram: samples of at most ``up_to`` tokens (0: longer than all others) and their tokens."""

    up_to: int
    samples: int
    tokens: int


@dataclass(frozen=True)
class HostNeed:
    """What one host would get. ``free_bytes`` is of its capture.dir; ``seconds`` is 0 when no rate is known."""

    host: str
    servers: int
    samples: int
    tokens: int
    bytes: int
    free_bytes: int
    seconds: float = 0.0

    @property
    def fits(self) -> bool:
        return self.bytes + self.reserve_bytes <= self.free_bytes

    @property
    def reserve_bytes(self) -> int:
        return min(RESERVE_BYTES, int(RESERVE_SHARE * self.bytes))


@dataclass(frozen=True)
class Estimate:
    """A run before it begins. ``tokens`` are exact when every row has ids, else ``by_sample`` says how the rows of the
    sample compared; ``seconds``: of the slowest server, 0 when no rate is known."""

    samples: int
    dropped: int
    cut: int
    broken: int
    tokens: int
    bytes: int
    bytes_per_token: int
    histogram: list[Bucket]
    hosts: list[HostNeed]
    seconds: float
    exact: bool
    broken_by_reason: dict[str, int] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        return all(host.fits for host in self.hosts)


@task
def look(host: Host) -> ProbeResult:
    """What the host has and runs. Raises what ``Host.call`` raises, and ``HostError`` when its model cannot be read."""
    probe = check(host, CheckPlan())
    require_engine(probe, host.config.name)
    return probe


@task
def preview(host: Host, data: DataSet, ids: Sequence[str], truncate: bool) -> PreviewResult:
    """Have the interpreter of the host's first server tokenise these rows, without the user's limit; ``truncate`` is
    what becomes of rows longer than the server's. Raises what ``Host.call`` raises."""
    args = PreviewArgs(resolve_secrets(host.config.servers[0]), too_long=TOO_LONG[truncate])
    return host.call(args, PreviewResult, verb="preview", body=data.lines(ids), deadline=PREVIEW_DEADLINE)


@task
def measure(host: Host, lengths: Sequence[int], token_budget: int) -> dict[str, float]:
    """Tokens a second of each of the host's servers, in a burst of prompts of these lengths that is captured as a run
    would be, and removed. The servers run it at the same time. Raises what ``Host.call`` raises."""
    capture = host.config.capture.spec()
    names = [server.name for server in host.config.servers]
    args = BurstArgs(names, capture, list(lengths), token_budget, BURST_SECONDS)
    return host.call(args, BurstResult, verb="burst", deadline=BURST_DEADLINE).tokens_per_second


def sample_of(data: DataSet, count: int = SAMPLE_ROWS) -> list[str]:
    """Ids of ``count`` rows evenly over the data set (fewer when they are huge), in its order."""
    ids = list(data.rows)
    step = max(1.0, len(ids) / count)
    chosen: list[str] = []
    tokens = 0
    for n in range(min(count, len(ids))):
        row_id = ids[int(n * step)]
        tokens += data.rows[row_id].tokens
        if chosen and tokens > SAMPLE_TOKENS:
            break
        chosen.append(row_id)
    return chosen


def corrections(data: DataSet, ids: Sequence[str], result: PreviewResult) -> dict[str, float]:
    """By form of row: how many tokens the sample really has for each that was estimated."""
    real: Counter[str] = Counter()
    guessed: Counter[str] = Counter()
    for row_id, length in zip(ids, result.lengths, strict=True):
        row = data.rows[row_id]
        if length and row.form != "ids":
            real[row.form] += length
            guessed[row.form] += row.tokens
    return {form: real[form] / guessed[form] for form in real if guessed[form]}


def estimate(
    data: DataSet,
    hosts: Mapping[str, tuple[HostConfig, ProbeResult]],
    factors: Mapping[str, float],
    limits: Limits,
    rates: Mapping[Target, float],
) -> Estimate:
    """The run as it would be shared out over the servers of ``hosts``; ``rates`` are tokens a second of a server."""
    lengths = {row_id: limits.apply(_length(row, factors)) for row_id, row in data.rows.items()}
    targets = [(name, server.name) for name, (config, _) in hosts.items() for server in config.servers]
    if not targets:
        raise UsageError("no server to work on the data", next_step="give the hosts servers in the inventory")
    # Shared out by the first estimate, as extract does it.
    assigned = balance({row_id: row.tokens for row_id, row in data.rows.items()}, targets)
    tokens: Counter[Target] = Counter()
    samples: Counter[Target] = Counter()
    for row_id, length in lengths.items():
        if length:
            tokens[assigned[row_id]] += length
            samples[assigned[row_id]] += 1
    needs = [_need(name, config, probe, tokens, samples, rates) for name, (config, probe) in hosts.items()]
    kept = [length for length in lengths.values() if length]
    return Estimate(
        samples=len(kept),
        dropped=len(lengths) - len(kept),
        cut=sum(limits.truncate and 0 < limits.max_tokens < _length(row, factors) for row in data.rows.values()),
        broken=len(data.broken),
        tokens=sum(kept),
        bytes=sum(need.bytes for need in needs),
        bytes_per_token=max(bytes_per_token(config, probe) for config, probe in hosts.values()),
        histogram=list(histogram(kept)),
        hosts=needs,
        seconds=max(need.seconds for need in needs),
        exact=all(row.form == "ids" for row in data.rows.values()),
        broken_by_reason=dict(Counter(row.reason for row in data.broken).most_common()),
    )


def bytes_per_token(config: HostConfig, probe: ProbeResult) -> int:
    """Bytes on disk for each token: all captured states, its id and mask."""
    model = probe.model
    if model is None:
        return TOKEN_BYTES
    return config.capture.spec().slots * model.hidden_size * DTYPE_BYTES.get(model.dtype, 2) + TOKEN_BYTES


def histogram(lengths: Sequence[int]) -> Iterator[Bucket]:
    """Samples and tokens by length, without the empty ends."""
    found = [
        (up_to, [n for n in lengths if low < n <= up_to]) for low, up_to in zip((0, *BUCKETS), BUCKETS, strict=False)
    ]
    found.append((0, [n for n in lengths if n > BUCKETS[-1]]))
    filled = [n for n, (_, inside) in enumerate(found) if inside]
    if filled:
        for up_to, inside in found[filled[0] : filled[-1] + 1]:
            yield Bucket(up_to, len(inside), sum(inside))


def require_usable(result: PreviewResult) -> None:
    """Raise ``UsageError`` when none of the rows that were tried can be a sample."""
    if any(result.lengths):
        return
    first = result.rejected[0]
    raise UsageError(
        f"none of the {len(result.lengths)} rows that were tried can be a sample",
        first.id,
        f"{first.reason}: {first.detail}",
        "look at the data, and at the model's chat template (docs/data.md); --too-long truncate cuts what is too long",
    )


def require_fit(needs: Sequence[HostNeed]) -> None:
    """Raise ``UsageError`` for a run that does not fit on its hosts' disks; the fullest host is named."""
    short = sorted((need for need in needs if not need.fits), key=lambda need: need.free_bytes - need.bytes)
    if not short:
        return
    worst = short[0]
    raise UsageError(
        f"the run does not fit on {len(short)} of {len(needs)} hosts",
        worst.host,
        f"about {_gib(worst.bytes)} would be written to its capture.dir, where {_gib(worst.free_bytes)} are free and "
        f"{_gib(worst.reserve_bytes)} must stay so",
        "free space, choose another capture.dir, more hosts or a smaller --max-tokens; with --allow-full-disk it is "
        "begun all the same, and waits where a disk is full until there is room",
    )


def require_deployed(hosts: Mapping[str, tuple[HostConfig, ProbeResult]]) -> None:
    """Raise ``UsageError`` when one of the servers was never launched: its samples would wait for ever."""
    servers = [(name, server.name) for name, (config, _) in hosts.items() for server in config.servers]
    launched = {
        (name, state.name) for name, (_, probe) in hosts.items() for state in probe.servers if state.state != "absent"
    }
    missing = [f"{name}/{server}" for name, server in servers if (name, server) not in launched]
    hosts_of = ",".join(compress(sorted({one.partition("/")[0] for one in missing})))
    if missing:
        raise UsageError(
            f"{len(missing)} of {len(servers)} servers {'was' if len(missing) == 1 else 'were'} never launched",
            ", ".join(missing[:NAMED]) + (" …" if len(missing) > NAMED else ""),
            "samples are computed by servers that fleetdump has launched with the patch",
            f"fleetdump deploy --host {hosts_of}; or leave them out: --exclude {hosts_of}",
        )


NAMED = 5


def _length(row: Taken, factors: Mapping[str, float]) -> int:
    return row.tokens if row.form == "ids" else max(1, round(row.tokens * factors.get(row.form, 1.0)))


def _need(
    name: str,
    config: HostConfig,
    probe: ProbeResult,
    tokens: Mapping[Target, int],
    samples: Mapping[Target, int],
    rates: Mapping[Target, float],
) -> HostNeed:
    targets = [(name, server.name) for server in config.servers]
    rated = [tokens[target] / rates[target] for target in targets if rates.get(target)]
    count, total = sum(samples[target] for target in targets), sum(tokens[target] for target in targets)
    size = total * bytes_per_token(config, probe) + count * SAMPLE_BYTES
    return HostNeed(name, len(targets), count, total, size, probe.disk_free_bytes, max(rated, default=0.0))


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
