"""What vLLM's log says of its start. SGLang's marks are the agent's; of vLLM the last lines of the log are enough."""

from __future__ import annotations

import re

from fleetdump.agent.evidence_types import Evidence

_NAMES = ("VLLM::", "vllm")
_PHASES = (
    ("weights", r"Loading (?:safetensors|pt) checkpoint shards|Starting to load model|Loading model weights"),
    ("kv_pool", r"Loading weights took|Model loading took"),
    ("jit", r"Available KV cache memory|GPU KV cache size|Maximum concurrency for|torch\.compile takes"),
    ("capture", r"Capturing (?:CUDA )?[Gg]raphs?|registering \d+ cuda graph addresses"),
    ("http", r"Graph capturing finished|init engine .{0,80} took|Starting vLLM (?:API )?server"),
    ("serving", r"Application startup complete"),
)
"""Phases by what vLLM logs when it enters them, of releases 0.6 to 0.11."""
_MARKS = [(phase, re.compile(text)) for phase, text in _PHASES]


def is_vllm(evidence: Evidence) -> bool:
    """By its processes' own names, or by the launcher's command line."""
    named = any(p.name.startswith(_NAMES) for p in evidence.processes)
    return named or any(p.role == "launcher" and "vllm" in p.cmdline.lower() for p in evidence.processes)


def phase(tail: list[str]) -> str:
    """The phase that the last lines are in; empty when they do not tell."""
    for line in reversed(tail):
        for name, mark in _MARKS:
            if mark.search(line):
                return name
    return ""
