"""How far a vLLM server's start is, by its log; SGLang's marks are in ``logmarks``.

The phase is of the server as a whole: most of vLLM's lines come from one rank only, and from which one depends on the
release, so that a rank that says less than others is no suspect. Texts are those of vLLM 0.6 to 0.19.
"""

from __future__ import annotations

import re
from typing import Tuple

_PHASES: Tuple[Tuple[str, re.Pattern[str]], ...] = tuple(
    (phase, re.compile("|".join(texts)))
    for phase, *texts in (
        ("imports", r"vLLM API server version", r"Initializing an? (?:\w+ )?LLM engine"),
        ("init", r"world_size=\d+ rank=\d+ .*distributed_init_method", r"vLLM is using nccl",
         r"rank \d+ in world size"),
        ("weights", r"Starting to load model", r"Loading drafter model", r"checkpoint shards:",
         r"Loading (?:model )?weights(?! took)", r"Loading model from"),
        ("kv_pool", r"Loading (?:model )?weights took", r"Model loading took"),
        ("jit", r"vLLM's torch\.compile", r"Dynamo bytecode transform", r"Compiling a graph for",
         r"torch\.compile takes",
         r"DeepGEMM warmup", r"[Ff]lash[Ii]nfer autotun", r"Available KV cache memory", r"# GPU blocks",
         r"KV cache size: [\d,]+ tokens", r"Maximum concurrency for"),
        ("capture", r"Capturing .{0,20}?(?:CUDA |cuda)[Gg]raphs?", r"[Rr]egistering \d+ cuda graph addresses"),
        ("http", r"Graph capturing finished", r"init engine .{0,80} took", r"Starting vLLM (?:API )?server"),
        ("serving", r"Application startup complete"),
    )
)  # fmt: skip
"""Phases by what vLLM logs when it enters them; the last line that says one counts, since ranks come one by one."""
_ANY = re.compile("|".join(pattern.pattern for _, pattern in _PHASES))


class VllmLog:
    """Reads lines; ``phase`` is empty before the first that tells one."""

    def __init__(self) -> None:
        self.phase = ""

    def feed(self, line: str) -> None:
        """Take one line, or what there is of the last one: a progress bar has no newline until it is full."""
        if _ANY.search(line):
            self.phase = next(phase for phase, pattern in _PHASES if pattern.search(line))
