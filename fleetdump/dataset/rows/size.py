"""About how many tokens a row has: only for sharing out and planning, the hosts count exactly."""

from __future__ import annotations

import json
from typing import Any

from fleetdump.agent.formats import Row

CHARACTERS_PER_TOKEN = 3.5
TOKENS_PER_MESSAGE = 6


def estimate_tokens(row: Row) -> int:
    """Exact for a row of ids; else by characters."""
    if row.input_ids is not None:
        return len(row.input_ids)
    if row.text is not None:
        return 1 + int(len(row.text) / CHARACTERS_PER_TOKEN)
    messages = row.messages or []
    characters = sum(_characters(value) for message in messages for key, value in message.items() if key != "role")
    characters += _characters(row.tools)
    return TOKENS_PER_MESSAGE * len(messages) + int(characters / CHARACTERS_PER_TOKEN)


def _characters(value: Any) -> int:
    if value is None:
        return 0
    return len(value) if isinstance(value, str) else len(json.dumps(value, ensure_ascii=False))
