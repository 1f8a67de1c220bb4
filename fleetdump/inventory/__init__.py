"""The inventory: which hosts there are, what runs on them, what is captured, and which of them a command means.

``load`` reads the YAML file (inventory/example.yaml shows every setting) and reports every mistake at once.
"""

from __future__ import annotations

from fleetdump.inventory.config import CaptureConfig, HostConfig
from fleetdump.inventory.example import example_for
from fleetdump.inventory.loading import InventoryError, load
from fleetdump.inventory.secrets import resolve_secrets
from fleetdump.inventory.selection import Inventory, Selection
from fleetdump.yamlmarks import Mistake

__all__ = [
    "CaptureConfig",
    "HostConfig",
    "Inventory",
    "InventoryError",
    "Mistake",
    "Selection",
    "example_for",
    "load",
    "resolve_secrets",
]
