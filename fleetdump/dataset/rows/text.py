"""Text that can be tokenised, and strict JSON."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from fleetdump.dataset.rows.broken import Broken

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def loads(text: str, reason: str) -> Any:
    """Strict JSON: no NaN, and nothing that cannot be written again as UTF-8. Raises ``Broken`` with ``reason``, or
    bad_text for half of a surrogate pair."""
    try:
        data = json.loads(text, parse_constant=_refuse_constant)
        if _SURROGATE.search(text):
            json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Broken("bad_text", "half of a surrogate pair (\\ud800 to \\udfff)") from None
    except RecursionError:
        raise Broken(reason, "nested too deeply") from None
    except ValueError as error:
        raise Broken(reason, f"no JSON: {error}") from None
    return data


def check_text(text: str, what: str) -> None:
    """Raise ``Broken`` for a text with NUL characters: nobody writes them, they come of a damaged file."""
    at = text.find("\0")
    if at >= 0:
        raise Broken("bad_text", f"{what} has a NUL character at {at}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed")
