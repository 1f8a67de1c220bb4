"""Rows of a data set: files in, ``Row`` out; what is wrong with a row is data (``BrokenRow``), not an exception."""

from fleetdump.agent.formats import Row
from fleetdump.dataset.rows.broken import BrokenRow
from fleetdump.dataset.rows.reader import numbered_rows, read_rows

__all__ = ["BrokenRow", "Row", "numbered_rows", "read_rows"]
