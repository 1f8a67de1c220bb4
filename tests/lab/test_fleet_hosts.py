"""Reaching hosts: host keys, logins, dead and slow hosts, noisy shells; over real sshd."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import testverbs
from hosts import LabHost, wait_for

from fleetdump.errors import HostError, UnreachableError
from fleetdump.fleet import ConnectOptions, Host, connect, fan_out
from fleetdump.inventory import HostConfig

StartHosts = Callable[[int], list[LabHost]]
pytestmark = pytest.mark.usefixtures("use_verbs")


def nothing(host: Host) -> int:
    """The cheapest verb."""
    return host.call(testverbs.NapArgs(0), testverbs.Done, verb="nap", deadline=40).pid


def refused(config: HostConfig, options: ConnectOptions | None = None) -> UnreachableError:
    with pytest.raises(UnreachableError) as caught:
        connect(config, options).close()
    assert caught.value.where == config.name
    assert caught.value.next_step
    return caught.value


@pytest.fixture
def known_hosts(tmp_path: Path) -> Path:
    return tmp_path / "config" / "known_hosts"


class TestHostKeys:
    def test_unknown_is_refused_with_its_fingerprint(self, lab_host: LabHost, known_hosts: Path) -> None:
        error = refused(lab_host.config(host_key=""), ConnectOptions(known_hosts=known_hosts))
        assert "unknown" in error.what
        assert lab_host.host_key_fingerprint() in error.why
        assert "--accept-new" in error.next_step
        assert not known_hosts.exists()

    def test_accept_new_remembers_in_our_own_file_only(self, lab_host: LabHost, known_hosts: Path) -> None:
        config = lab_host.config(host_key="")
        users = Path("~/.ssh/known_hosts").expanduser()
        before = users.read_bytes() if users.exists() else None
        connect(config, ConnectOptions(accept_new=True, known_hosts=known_hosts)).close()
        connect(config, ConnectOptions(known_hosts=known_hosts)).close()
        assert known_hosts.read_text().startswith(f"{lab_host.address} ssh-ed25519 ")
        assert (users.read_bytes() if users.exists() else None) == before

    def test_changed_is_refused_even_with_accept_new(self, lab_host: LabHost, known_hosts: Path) -> None:
        options = ConnectOptions(accept_new=True, known_hosts=known_hosts)
        old = lab_host.host_key_fingerprint()
        connect(lab_host.config(host_key=""), options).close()
        lab_host.change_host_key()
        error = refused(lab_host.config(host_key=""), options)
        assert "is not the one we know" in error.what
        assert old in error.why
        assert lab_host.host_key_fingerprint() in error.why

    def test_pin_outweighs_the_files(self, lab_host: LabHost, known_hosts: Path) -> None:
        config = lab_host.config()
        connect(config, ConnectOptions(known_hosts=known_hosts)).close()
        wrong = dataclasses.replace(config, host_key="SHA256:" + "A" * 43)
        for accept_new in (False, True):
            error = refused(wrong, ConnectOptions(accept_new=accept_new, known_hosts=known_hosts))
            assert "pinned" in error.why
        assert not known_hosts.exists()


class TestJumpHosts:
    def test_way_over_a_jump_host(self, start_hosts: StartHosts, known_hosts: Path) -> None:
        jump, target = start_hosts(2)
        config = target.config(proxy_jump=f"root@{jump.address}")
        with connect(config, ConnectOptions(accept_new=True, known_hosts=known_hosts)) as host:
            assert nothing(host)
        assert known_hosts.read_text().split()[0] == jump.address

    def test_key_of_the_jump_host_is_checked_too(self, start_hosts: StartHosts, known_hosts: Path) -> None:
        jump, target = start_hosts(2)
        config = target.config(proxy_jump=f"root@{jump.address}")
        error = refused(config, ConnectOptions(known_hosts=known_hosts))
        assert "unknown" in error.what
        assert jump.host_key_fingerprint() in error.why

    def test_host_that_only_the_jump_host_cannot_reach(self, start_hosts: StartHosts, known_hosts: Path) -> None:
        jump, target = start_hosts(2)
        config = target.config(proxy_jump=f"root@{jump.address}", port=2222)
        error = refused(config, ConnectOptions(accept_new=True, known_hosts=known_hosts))
        assert "jump host could not reach" in error.what


class TestUnreachable:
    def test_name_that_does_not_resolve(self, lab_host: LabHost) -> None:
        assert "resolved" in refused(lab_host.config(address="no-such-host.invalid")).what

    def test_closed_port(self, lab_host: LabHost) -> None:
        assert "refused the connection" in refused(lab_host.config(port=2222)).what

    def test_no_answer(self, lab_host: LabHost) -> None:
        lab_host.cut_link()
        began = time.monotonic()
        error = refused(lab_host.config(connect_timeout=2.0))
        assert time.monotonic() - began < 6
        assert "in time" in error.what or "no route" in error.what

    def test_stopped_sshd_is_told_from_a_dead_host(self, lab_host: LabHost) -> None:
        lab_host.stop_sshd()
        try:
            assert "SSH server did not answer" in refused(lab_host.config(connect_timeout=2.0)).what
        finally:
            lab_host.continue_sshd()
        connect(lab_host.config()).close()

    def test_wrong_user(self, lab_host: LabHost) -> None:
        error = refused(lab_host.config(user="stranger"))
        assert "refused to let stranger in" in error.what
        assert "IdentitiesOnly" in error.next_step

    def test_missing_key_file(self, lab_host: LabHost) -> None:
        assert "key file is missing" in refused(lab_host.config(identity_file="/nowhere/key")).what

    def test_sshd_that_drops_connections_names_max_startups(self, lab_host: LabHost) -> None:
        config = lab_host.path("/lab/sshd_config")
        config.write_text(config.read_text() + "MaxStartups 1:100:1\n")
        os.kill(lab_host.sshd_pid, 1)
        time.sleep(0.5)
        with _hold_login_slot(lab_host):
            error = refused(lab_host.config(connect_timeout=5.0))
        assert "dropped the connection" in error.what
        assert "MaxStartups" in error.next_step


class TestShells:
    def test_noisy_start_up_file(self, lab_host: LabHost) -> None:
        rc = lab_host.path("/root/.bashrc")
        rc.write_text('echo "welcome to lab"\necho \'{"not": "ours"}\'\necho oops >&2\nprintf "no newline"\n')
        with connect(lab_host.config()) as host:
            assert nothing(host)

    def test_missing_python(self, lab_host: LabHost) -> None:
        with connect(lab_host.config(agent_python="/opt/none/python3")) as host:
            with pytest.raises(HostError, match="cannot be run") as caught:
                nothing(host)
            assert "agent_python" in caught.value.next_step

    def test_old_python(self, lab_host: LabHost) -> None:
        fake = lab_host.path("/usr/local/bin/oldpython")
        fake.write_text(
            "#!/usr/bin/python3\nimport sys, json\n"
            "sys.version_info = (3, 6, 9, 'final', 0)\nsys.version = '3.6.9 (x)'\n"
            "exec(json.loads(sys.stdin.buffer.readline()))\n"
        )
        fake.chmod(0o755)
        with connect(lab_host.config(agent_python="/usr/local/bin/oldpython")) as host:
            with pytest.raises(HostError, match=r"too old: 3\.6\.9") as caught:
                nothing(host)
            assert "3.8" in caught.value.why

    def test_full_disk_on_the_first_push(self, lab_host: LabHost) -> None:
        lab_host.fill_disk()
        with connect(lab_host.config()) as host:
            with pytest.raises(HostError, match="cannot be put") as caught:
                nothing(host)
            assert "No space left" in caught.value.why
            lab_host.free_disk()
            assert nothing(host)
        assert len(list(next(lab_host.path("/lab-state").iterdir()).joinpath("agent").iterdir())) == 1


class TestFanOut:
    def test_dead_hosts_cost_the_others_nothing(self, start_hosts: StartHosts) -> None:
        hosts = start_hosts(6)
        configs = [host.config(connect_timeout=20.0) for host in hosts]
        assert all(outcome.error is None for outcome in fan_out(configs, nothing).values())
        hosts[0].kill()
        hosts[1].cut_link()
        hosts[2].stop_sshd()
        ended: dict[str, float] = {}
        began = time.monotonic()
        outcomes = fan_out(
            configs, nothing, limit=2, on_outcome=lambda name, _: ended.update({name: time.monotonic() - began})
        )
        assert list(outcomes) == [config.name for config in configs]
        dead, living = configs[:3], configs[3:]
        assert all(isinstance(outcomes[config.name].error, UnreachableError) for config in dead)
        assert all(outcomes[config.name].error is None for config in living)
        silent = (hosts[1].name, hosts[2].name)
        assert max(ended[config.name] for config in living) < min(ended[name] for name in silent)

    def test_host_that_never_returns_is_reported(self, start_hosts: StartHosts) -> None:
        hosts = start_hosts(2)
        never = threading.Event()

        def work(host: Host) -> int:
            if host.config.name == hosts[0].name:
                never.wait(120)
            return nothing(host)

        began = time.monotonic()
        outcomes = fan_out([host.config() for host in hosts], work, limit=1, deadline=15)
        never.set()
        assert time.monotonic() - began < 60
        assert isinstance(outcomes[hosts[0].name].error, UnreachableError)
        assert outcomes[hosts[1].name].error is None


def test_more_calls_on_a_connection_than_sshd_allows_at_once(lab_host: LabHost) -> None:
    with connect(lab_host.config()) as host:
        nothing(host)
        results: list[int] = []
        threads = [threading.Thread(target=lambda: results.append(nothing(host))) for _ in range(14)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 14


def test_nothing_leaks_over_fifty_connections(lab_host: LabHost) -> None:
    with connect(lab_host.config()) as host:
        nothing(host)
    before = (threading.active_count(), len(os.listdir("/proc/self/fd")))
    for _ in range(50):
        connect(lab_host.config()).close()
    refusing = lab_host.config(host_key="SHA256:" + "A" * 43)
    for _ in range(5):
        refused(refusing)
    wait_for(
        lambda: (threading.active_count(), len(os.listdir("/proc/self/fd"))) <= before,
        10,
        "threads or descriptors leak",
    )


@contextlib.contextmanager
def _hold_login_slot(host: LabHost) -> Iterator[None]:
    """Be the one connection that may be waiting for login."""
    with socket.create_connection((host.address, 22), timeout=5) as connection:
        connection.recv(4)
        yield
