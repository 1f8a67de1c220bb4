"""All parts of the table: importing this fills it."""

from __future__ import annotations

import importlib
import pkgutil

import cases

PARTS = tuple(
    importlib.import_module(f"cases.{module.name}")
    for module in pkgutil.iter_modules(cases.__path__)
    if module.name.startswith("part_")
)
"""By name; a new file ``part_*.py`` is one of them."""
