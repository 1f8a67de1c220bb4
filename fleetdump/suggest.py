"""The valid name nearest to a wrong one, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_SHOWN = 8


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """A clause for the end of a message: the nearest of ``valid``, or the first few when none is near; "" if empty."""
    names = list(dict.fromkeys(valid))
    if not names:
        return ""
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    ranked = difflib.get_close_matches(name, names, n=_SHOWN, cutoff=0.0)
    more = len(names) - len(ranked)
    return f"; valid: {', '.join(ranked)}" + (f" and {more} more" if more else "")
