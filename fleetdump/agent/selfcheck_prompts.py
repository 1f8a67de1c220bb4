"""What the self-check sends: a few prompts alone, and two batches that hold them again. Pure.

The small batch fits into ``FUSED_TOKENS`` rows, the large one does not: up to that many rows of a forward SGLang may
leave a layer's sum over the ranks to the next layer, and replays graphs of the prefill.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import cycle
from typing import List, Tuple

ALONE = (1, 7, 300, 2100)
"""Tokens of the prompts that are sent one after another."""
FUSED_TOKENS = 2048
"""``FUSE_ALLREDUCE_MAX_BATCH_SIZE`` of SGLang."""
SHARED = tuple(2 + 13 * n % 59 for n in range(21))
"""Tokens of the prompts that are in both batches, beside the first three of ``ALONE``."""
FURTHER = tuple(20 + 47 * n % 121 for n in range(26))
"""Tokens of the prompts of the large batch alone."""
SMALL, LARGE = "small", "large"
CONTEXT_MARGIN = 8
"""Positions of the context that no prompt takes: one is for the generated token."""
VOCABULARY = 256
"""Ids that every vocabulary has, when the model's is not known."""


@dataclass(frozen=True)
class Prompt:
    """``batch`` is ``SMALL``, ``LARGE``, or empty for a prompt that is sent alone. ``same_as`` names the prompt with
    the same ids that was sent before it, alone or in the small batch; empty for the first."""

    name: str
    ids: List[int]
    batch: str = ""
    same_as: str = ""


@dataclass(frozen=True)
class Plan:
    """The prompts in the order of sending, and what had to be shortened, in words."""

    prompts: List[Prompt]
    shortened: str = ""

    def alone(self) -> List[Prompt]:
        return self.batch("")

    def batch(self, name: str) -> List[Prompt]:
        return [prompt for prompt in self.prompts if prompt.batch == name]

    def forward_tokens(self, prompt: Prompt) -> int:
        """Tokens that are in flight together with ``prompt``, itself included."""
        together = self.batch(prompt.batch) if prompt.batch else [prompt]
        return sum(len(each.ids) for each in together)


def plan(vocabulary: int, context: int) -> Plan:
    """Prompts for a model of ``vocabulary`` ids and a server whose prompts may have ``context`` tokens (0: unknown).

    Ids are random, but the same each time. They leave out both ends of the vocabulary, where special tokens are. No two
    prompts begin alike, so that a prefix cache has nothing of one for another.
    """
    vocabulary = vocabulary or VOCABULARY
    limit = max(1, context - CONTEXT_MARGIN) if context else max(ALONE)
    source = random.Random(vocabulary)  # noqa: S311 (nothing secret)
    usual = range(vocabulary // 20, vocabulary // 2)
    first = cycle(usual)

    def ids(tokens: int) -> List[int]:
        return [next(first), *(source.choice(usual) for _ in range(min(tokens, limit) - 1))]

    alone = {f"alone-{tokens}": ids(tokens) for tokens in ALONE}
    small = _again(list(alone.items())[:3], SMALL)
    small += [Prompt(f"{SMALL}-{n}", ids(tokens), SMALL) for n, tokens in enumerate(SHARED)]
    large = [Prompt(f"{LARGE}-{n}", ids(tokens), LARGE) for n, tokens in enumerate(FURTHER)]
    # Behind the others: a server may begin with the first of a batch before it has seen the rest.
    large += _again([(prompt.same_as or prompt.name, prompt.ids) for prompt in small], LARGE)
    long_ones = [tokens for tokens in ALONE if tokens > limit]
    shortened = f"the context takes {limit} tokens, so a prompt of {long_ones[-1]} has as many" if long_ones else ""
    return Plan([*(Prompt(name, prompt) for name, prompt in alone.items()), *small, *large], shortened)


def _again(prompts: List[Tuple[str, List[int]]], batch: str) -> List[Prompt]:
    """(name, ids) once more, in ``batch``."""
    return [Prompt(f"{batch}-{name}", ids, batch, same_as=name) for name, ids in prompts]
