"""Fixtures for all tests: a bundle of the agent that has the verbs of ``testverbs``, and calls of this machine."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

import fleetdump
from fleetdump.fleet import ConnectOptions, Host, connect
from fleetdump.fleet.bundle import Bundle, build
from fleetdump.inventory import HostConfig

HERE = Path(__file__).parent

# How long an example takes says nothing on a machine that does other work as well.
hypothesis.settings.register_profile("fleetdump", deadline=None)
hypothesis.settings.load_profile("fleetdump")


def pytest_configure() -> None:
    """Under nohup, and where a shell started us in the background, SIGINT is ignored and children inherit that: tests
    that interrupt a command would wait for ever."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What shares a bridge with hosts or a copy of SGLang stays in one process of ``make test``; else a file does."""
    for item in items:
        folder, *rest = item.path.relative_to(HERE).parts
        item.add_marker(pytest.mark.xdist_group(folder if folder in ("lab", "sglang") else "/".join(rest)))


@pytest.fixture(scope="session")
def verbs_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package ``fleetdump`` whose agent also knows the verbs of ``testverbs``."""
    package = tmp_path_factory.mktemp("verbs") / "fleetdump"
    source = Path(fleetdump.__file__).parent
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(HERE / "testverbs.py", package / "agent" / "testverbs.py")
    with (package / "agent" / "main.py").open("a") as main:
        main.write("\n\nfrom fleetdump.agent import testverbs\n\ntestverbs.register(VERB_TABLE, Verb)\n")
    return package


@pytest.fixture(scope="session")
def verbs_bundle(verbs_package: Path) -> Bundle:
    """The bundle of ``verbs_package``."""
    return build(verbs_package)


@pytest.fixture
def use_verbs(verbs_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """Hosts of this test run the agent with the test verbs."""
    monkeypatch.setattr("fleetdump.fleet.host.bundle", lambda: verbs_bundle)
    return verbs_bundle


@pytest.fixture
def local_config(tmp_path: Path) -> HostConfig:
    """This machine by subprocess, with a state directory of the test's own."""
    return HostConfig(
        name="here", address="localhost", connection="local", state_dir=str(tmp_path / "state"), agent_python="python3"
    )


@pytest.fixture
def local_host(local_config: HostConfig, use_verbs: Bundle) -> Iterator[Host]:
    """An open ``local_config``."""
    with connect(local_config, ConnectOptions(operator="tester@here")) as host:
        yield host
