"""What the self-check knows before it judges: messages between agent and worker, and what became of each prompt.

Measurements are numbers; what they mean is said in ``selfcheck_rules`` and ``selfcheck_causes`` alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional


# --------------------------------------------------------------------------- what the worker is asked
@dataclass
class PieceRef:
    """Rows ``start`` on of a prompt: a tensor ``shape`` ``[rows, slots, hidden]`` at ``offset`` of the data section of
    ``shard`` (a path below the run's directory, closed or still a ``.part``). ``slots`` says which each one is."""

    shard: str
    offset: int
    dtype: str
    shape: List[int]
    start: int
    slots: List[int]


@dataclass
class CapturedPrompt:
    """A prompt of which all rows are there. ``token`` and ``logprob`` are the server's own answer; -1: it gave none."""

    name: str
    ids: List[int]
    pieces: List[PieceRef]
    token: int
    logprob: float
    batch: str = ""
    same_as: str = ""


@dataclass
class RankCopy:
    """The same rows by two ranks, with different bytes."""

    prompt: str
    rank: str
    ours: PieceRef
    theirs: PieceRef


@dataclass
class MeasureJob:
    """Everything that the worker needs. ``layers`` are entry ids; ``norm`` is a path below ``directory``."""

    model_path: str
    directory: str
    layers: List[int]
    norm: str
    prompts: List[CapturedPrompt]
    copies: List[RankCopy]


# --------------------------------------------------------------------------- what it measures
@dataclass
class SlotValues:
    """Values of one slot over all prompts: numbers of rows with what no state has, and the range of the rows' largest
    absolute values. ``repeated`` counts prompts of three different tokens or more whose rows are all the same."""

    slot: int
    rows: int = 0
    not_finite: int = 0
    zero: int = 0
    constant: int = 0
    repeated: int = 0
    least: float = 0.0
    largest: float = 0.0
    where: str = ""


@dataclass
class SlotErrors:
    """How far two captures of the same rows are apart in one slot. A row's error is the largest difference over the
    largest absolute value of the reference's row. ``moved`` is the share of rows that are more like another row of the
    reference than like their own."""

    slot: int
    rows: int
    median: float
    p95: float
    largest: float
    moved: float
    where: str


@dataclass
class Layers:
    """Which slots hold the same stream. ``equal`` are pairs of slots that are identical in every prompt; ``embedding``
    gives each slot's median error against the embeddings of the ids, empty when the checkpoint's could not be read."""

    equal: List[List[int]] = field(default_factory=list)
    embedding: List[float] = field(default_factory=list)
    depth: int = -1
    """Number of layers of the model, -1 when config.json does not say."""


@dataclass
class Head:
    """lm_head over the normed final state against the server's answers. ``agree``: same token (or a tie within
    rounding, counted in ``ties`` too) and log-probability within the row's ``tolerance``, whose largest is given.
    ``elsewhere`` counts the prompts that agree when the state is read another way. ``problem``: why nothing could be
    compared."""

    prompts: int = 0
    agree: int = 0
    ties: int = 0
    largest_difference: float = 0.0
    tolerance: float = 0.0
    where: str = ""
    elsewhere: Dict[str, int] = field(default_factory=dict)
    problem: str = ""


@dataclass
class Measured:
    """What the worker found. ``small`` and ``large`` compare prompts alone (or in the small batch) with the same ones
    in a small and in a large batch; ``ranks`` the copies whose bytes differ."""

    dtype: str
    values: List[SlotValues]
    layers: Layers
    small: List[SlotErrors]
    large: List[SlotErrors]
    ranks: List[SlotErrors]
    head: Head


# --------------------------------------------------------------------------- what the journals say
@dataclass
class PromptFate:
    """What became of one prompt. ``rows`` were captured from position ``first`` on (-1: none); ``skip`` is the tap's
    reason; ``error`` says that the server did not answer; ``fault`` why the pieces do not join; ``unreadable`` why the
    disk does not give back what was journalled."""

    name: str
    tokens: int
    forward_tokens: int
    rows: int = 0
    first: int = -1
    skip: str = ""
    detail: str = ""
    error: str = ""
    fault: str = ""
    unreadable: str = ""
    other_ids: bool = False

    @property
    def whole(self) -> bool:
        wrong = self.skip or self.error or self.fault or self.unreadable or self.other_ids
        return self.rows == self.tokens and not wrong


@dataclass
class RankFacts:
    """The copies of the attention ranks. ``expected`` ranks hold each row (1: nothing to compare); ``rows`` are those
    of which all have a copy, ``differing`` of them with other bytes, ``lacking`` those that some rank did not write,
    ``skips`` the reasons that ranks gave for that, and ``unreadable`` says why some could not be read back."""

    expected: int = 1
    writers: List[str] = field(default_factory=list)
    skips: List[str] = field(default_factory=list)
    rows: int = 0
    differing: int = 0
    lacking: int = 0
    unreadable: str = ""


@dataclass
class Facts:
    """Everything that is judged."""

    layers: List[int]
    prompts: List[PromptFate]
    ranks: RankFacts
    measured: Optional[Measured] = None
    shortened: str = ""
