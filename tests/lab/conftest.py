"""Fixtures: a lab for the session, and fresh hosts for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hosts import Lab, LabHost, missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    for item in items:
        if "lab" in item.path.parent.name:
            item.add_marker(pytest.mark.lab)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """One bridge for the whole session; it is removed at the end whatever the tests did."""
    with Lab() as made:
        yield made


@pytest.fixture
def start_hosts(lab: Lab) -> Iterator[Callable[[int], list[LabHost]]]:
    """``start_hosts(n)``: n fresh hosts, gone after the test."""
    before = list(lab.hosts)
    yield lab.start
    lab.remove([host for host in lab.hosts if host not in before])


@pytest.fixture
def lab_host(start_hosts: Callable[[int], list[LabHost]]) -> LabHost:
    """One fresh host."""
    return start_hosts(1)[0]
