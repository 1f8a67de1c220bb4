"""Moments for people, of numbers that files of a host hold. Shared with the controller."""

from __future__ import annotations

import time

LATEST = 1e11
"""Seconds since 1970 (the year 5138): what is later, or before 1970, no clock has said."""


def utc(moment: float) -> str:
    """``2026-11-30 07:40:00 UTC`` of seconds since 1970; empty for what is no believable time (0, NaN, 1e300)."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(moment)) if 0 < moment < LATEST else ""
