"""Messages about a run: preview, shares, orders, manifests, shards, self-check. Shared with the controller."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional

from fleetdump.agent.protocol import Finding
from fleetdump.agent.specs import CaptureSpec, ServerSpec

TOO_LONG = ("drop", "truncate")
"""What becomes of a sample that is longer than the limit: it is rejected with reason too_long, or cut at its end."""


@dataclass
class SampleSpans:
    """A sample for a person to look at: how much of it is supervised, and its first supervised spans, decoded."""

    id: str
    tokens: int
    supervised: int
    spans: List[str]


@dataclass
class SubmitArgs:
    """Give a host one server's whole share of a run; the body holds one row of the data set a line
    (``dataset.rows.Row`` as JSON). Submitting the same share again changes nothing; another share is a ``conflict``."""

    run: str
    server: str
    share_sha256: str
    """SHA-256 of the body's lines: the identity of the share."""
    capture: CaptureSpec
    max_tokens: Optional[int] = None
    """0: no limit but the server's. None: as the share was begun, no limit for a new one; another value than it was
    begun with is a ``conflict``."""
    too_long: str = ""
    """What becomes of a longer sample, one of ``TOO_LONG``; empty as None above, the first for a new share."""
    token_budget: int = 32768
    max_attempts: int = 3
    allow_failed_selfcheck: bool = False
    """Without it a server whose last self-check failed gets no work."""
    engine: str = ""
    patch_sha256: str = ""
    model_sha256: str = ""
    run_samples: int = 0
    """Of the whole run, each once; 0: not told."""


FINISHED = ("done", "failed")
"""States of a share in which no driver is needed."""


@dataclass
class RunProgress:
    """State of one share; ``server`` is its name (``formats.SHARE_NAME``). ``state``: tokenising, running, paused,
    closing, done, failed, stopped (the driver is dead). ``samples`` and ``tokens`` are what it has not given away.
    Counters are totals over all drivers of this share; rates are of the last 10 s."""

    run: str
    server: str
    state: str
    samples: int = 0
    done: int = 0
    rejected: int = 0
    in_flight: int = 0
    retries: int = 0
    tokens: int = 0
    tokens_done: int = 0
    bytes_written: int = 0
    tokens_per_second: float = 0.0
    eta_seconds: float = 0.0
    manifest_bytes: int = 0
    detail: str = ""
    driver_pid: int = 0
    driver_alive: bool = False
    updated_at: float = 0.0
    notes: List[str] = field(default_factory=list)
    """For people: decoded supervised spans of the first samples, and warnings about the loss masks."""
    share_id: str = ""
    """Another one for each submit that made a share: its manifest is another file, even of the same run and server."""
    order: str = ""
    """What the run's drivers on this host were told: ``pause``, ``drain``, ``cancel``, or nothing. An order that cannot
    be read counts as a ``pause`` of the whole run."""
    whole_run: bool = False
    """All hosts were told it (``OrderArgs``)."""
    dead_launch: str = ""
    """Id of the server's launch that died by itself and that the driver waits to see replaced, if there is one."""
    suspect: str = ""
    """The sample that was alone in flight when that launch died, or is while ``silent_launch`` is silent."""
    silent_launch: str = ""
    """Id of the server's living launch that gives nothing, though samples are in flight there, or though it was ready
    once: it is slow, or it hangs."""
    silent_seconds: float = 0.0
    """For how long; told only from several times its longest such silence before on, 0 until then."""
    restarts: int = 0
    """How often a controller has restarted the server in this run with no such sample to blame."""
    bytes_per_second: float = 0.0
    """Of the samples' rows on the disk, as ``bytes_written``."""
    disk_free_bytes: Optional[int] = None
    """What the capture directory's disk has left; None while no driver has looked."""
    last_error: str = ""
    """Of the latest attempt that ended without a sample: which, how and why."""
    given_away: int = 0
    """Samples that were this share's once."""
    run_samples: int = 0
    """As in ``SubmitArgs``. The shares together have more when some samples were given to two hosts."""


@dataclass
class PreviewArgs:
    """Tokenise some rows (the body, as for ``SubmitArgs``) as an extraction would, and keep nothing. The server need
    not run; when it does, its context length is the limit."""

    server: ServerSpec
    max_tokens: int = 0
    too_long: str = TOO_LONG[0]


@dataclass
class PreviewReject:
    """A row that would be rejected, and why."""

    id: str
    reason: str
    detail: str


@dataclass
class PreviewResult:
    """``lengths``: tokens of each row in order, 0 for a rejected one. ``limit``: most tokens of a sample, 0 for none.
    ``shown``: the first samples that have supervised tokens. Counts are as in work.jsonl's head."""

    lengths: List[int]
    tokens: int
    supervised: int
    limit: int
    template_sha256: str
    tokenizer_sha256: str
    methods: Dict[str, int]
    shown: List[SampleSpans]
    rejected: List[PreviewReject]
    unsupervised_samples: int = 0
    all_supervised_samples: int = 0
    truncated: int = 0


@dataclass
class BurstArgs:
    """Send prompts of random ids with these ``lengths`` through each of ``servers``, at most ``token_budget`` tokens in
    flight at one, for at most ``seconds``; they are captured, and removed again."""

    servers: List[str]
    capture: CaptureSpec
    lengths: List[int]
    token_budget: int = 32768
    seconds: float = 20.0


@dataclass
class BurstResult:
    """Tokens a second of each server, from the first request to the last row in a journal."""

    tokens_per_second: Dict[str, float]


PAUSE, CANCEL, DRAIN = "pause", "cancel", "drain"

ORDERS = (PAUSE, "resume", CANCEL, DRAIN)


@dataclass
class OrderArgs:
    """Tell the drivers of a run on this host what to do, those of shares that come later too. ``order``: ``pause``
    (send nothing more until ``resume``), ``cancel`` (for good: what is not done is rejected as ``cancelled``), or
    ``drain`` (as ``pause``, and what is not in flight is given away as soon as somebody asks for it: the host leaves).
    ``whole_run``: all hosts of the run are told; a pause of some hosts alone has them give their work away too, as
    others have need of it."""

    run: str
    order: str
    whole_run: bool = True


@dataclass
class OrderResult:
    """State of each share, as it was when the order was left; the drivers follow it within a second."""

    shares: List[RunProgress]


@dataclass
class WithdrawArgs:
    """Have a share give samples away that it has not begun, of about ``tokens`` together; 0: none, only tell. A share
    of a run that is paused as a whole, or cancelled, gives nothing."""

    run: str
    share: str
    tokens: int


@dataclass
class WithdrawResult:
    """Every sample that the share has ever given away: its host works on none of them any more."""

    ids: List[str]


@dataclass
class HeldArgs:
    """Ask which samples are a share's: those that it was given and has not given away."""

    run: str
    share: str


@dataclass
class HeldResult:
    """The samples, done or not, and the identity of the share as it was submitted."""

    ids: List[str]
    share_sha256: str


@dataclass
class DoneArgs:
    """Ask which of these samples (the body, a line ``{"id": …}`` each) the run's shares on this host have done."""

    run: str


@dataclass
class DoneResult:
    """Those that stand in the shares' manifests, once for each share."""

    ids: List[str]


@dataclass
class FollowArgs:
    """Stream ``progress`` events of a run on this host until every share is done or failed, or the deadline.
    ``revive``: start dead drivers again; without it the stream ends too when nobody has started them for a while.
    ``ahead``: end that many seconds before the servers will have nothing to do, by the shares' rates; 0 for not."""

    run: str
    interval: float = 1.0
    revive: bool = True
    ahead: float = 0.0


@dataclass
class FollowResult:
    """Progress of each share on this host."""

    shares: List[RunProgress]


@dataclass
class ManifestArgs:
    """Read manifest and reject lines of a run from byte ``offset`` of each server's file on; each comes as a
    ``manifest`` or ``rejected`` event with its text as ``line`` and the byte after it as ``end``."""

    run: str
    server: str
    offset: int = 0
    rejected_offset: int = 0


@dataclass
class ManifestResult:
    """Offsets to continue from (whole lines only) and the share's progress."""

    offset: int
    rejected_offset: int
    progress: RunProgress


@dataclass
class VerifyArgs:
    """Read and check what a run (empty: each) has written on this host. ``repair``: finish what dead writers left
    open first."""

    run: str = ""
    repair: bool = False


@dataclass
class RunVerification:
    """What ``verify`` read of one run, and what is wrong with it. ``open``: parts of living writers, right so far;
    ``torn``: parts that dead writers left (``repaired`` when they were finished). ``faults`` names files."""

    run: str
    shards: int = 0
    pieces: int = 0
    bytes: int = 0
    samples: int = 0
    open: List[str] = field(default_factory=list)
    torn: List[str] = field(default_factory=list)
    repaired: List[str] = field(default_factory=list)
    faults: List[str] = field(default_factory=list)
    more_faults: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether nothing is wrong and nothing is left to repair."""
        return not (self.torn or self.faults)


@dataclass
class VerifyResult:
    """Every run that was asked for."""

    runs: List[RunVerification]


@dataclass
class ShardsArgs:
    """List closed shards of a run. ``close``: finish the ``.part`` files of writers that are dead."""

    run: str
    capture_dir: str
    close: bool = True


@dataclass
class ShardInfo:
    """A file in the run's capture directory: ``kind`` is shard, tokens, norm or journal."""

    name: str
    kind: str
    bytes: int
    sha256: str = ""
    open: bool = False


@dataclass
class ShardsResult:
    """All files of the run, sorted by name. ``faults``: files that cannot be read or finished, one sentence each."""

    shards: List[ShardInfo]
    faults: List[str] = field(default_factory=list)


@dataclass
class FetchArgs:
    """Send one file of a run's capture directory from byte ``offset`` on, as one ``blob`` event and its bytes."""

    run: str
    capture_dir: str
    name: str
    offset: int = 0


@dataclass
class FetchResult:
    """Bytes sent, and the size of the whole file."""

    sent: int
    size: int


@dataclass
class SelfCheckArgs:
    """Send a few prompts through the tap of a server that captures so, and judge what was written."""

    server: str
    capture: CaptureSpec


@dataclass
class SelfCheckResult:
    """``passed`` is False with the first reason in ``detail``. ``checks`` has one finding a check, ``causes`` the codes
    of the likely causes of those that failed; ``max_logprob_diff`` is that of lm_head over the captured final states
    against the server's own tokens."""

    passed: bool
    prompts: int
    rows: int
    max_logprob_diff: float
    detail: str = ""
    checks: List[Finding] = field(default_factory=list)
    causes: List[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class TapStatus:
    """What one tap of a launched server said last (``servers/<name>/tap-<role>-<pid>.json``): counters since its
    process began, ``bytes_per_second`` over the last second, ``queue_bytes`` of ``ring_bytes`` wait for the disk.
    ``slow_down``: forwards wait for the disk, or soon would. ``failing``: nothing was written since ``last_error``."""

    server: str
    launch_id: str
    role: str
    pid: int
    rows: int
    bytes: int
    bytes_per_second: float
    ring_bytes: int
    queue_bytes: int
    slow_down: bool
    waited_seconds: float
    skips: Dict[str, int]
    errors: int
    last_error: str
    failing: bool
    t: float
    v: int = 1


@dataclass
class CollectedShare:
    """Ids of the samples of one server's share that the controller has, every byte verified."""

    run: str
    server: str
    ids: List[str] = field(default_factory=list)
