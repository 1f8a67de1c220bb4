"""Connections of many threads at once, before any of them is opened."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fleetdump.fleet import connection
from fleetdump.fleet.hostkeys import KnownHosts


@pytest.fixture
def eager_threads():
    """Threads that take turns as often as can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_threads")
def test_threads_that_connect_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Fabric's connection writes into its configuration, which is empty while it does."""
    known = KnownHosts(tmp_path / "known_hosts")

    def make(number: int) -> str:
        config = connection._fabric_config()
        made = connection.StrictConnection("198.18.0.1", known=known, connect_timeout=1, config=config, port=number)
        return f"{made.host}:{made.port}"

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(make, range(1, 601))) == [f"198.18.0.1:{n}" for n in range(1, 601)]
