"""Libraries that only some formats need."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from fleetdump.errors import UsageError


def pyarrow(path: Path, submodule: str = "") -> Any:
    """``pyarrow``, or a submodule of it; raises ``UsageError``, which names it, when it is not installed."""
    try:
        return importlib.import_module(f"pyarrow.{submodule}" if submodule else "pyarrow")
    except ImportError as error:
        raise UsageError(
            "pyarrow is needed to read this data",
            str(path),
            str(error),
            "pip install pyarrow; or convert the data to .jsonl or .jsonl.gz",
        ) from None
