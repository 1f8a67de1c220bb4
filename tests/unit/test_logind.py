"""Surviving a logout: the decision from real files, and a launch through it."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from fleetdump.agent import logind, procfs
from fleetdump.agent.detach import spawn_detached
from fleetdump.agent.logind import LogindFacts, Shelter, decide, parse_config, read_facts
from tests.unit.engineinstall import wait_for

DEBIAN = "#  defaults are shown\n[Login]\n#NAutoVTs=6\n#KillUserProcesses=no\n#KillOnlyUsers=\n#KillExcludeUsers=root\n"
UPSTREAM = DEBIAN.replace("KillUserProcesses=no", "KillUserProcesses=yes")


def in_danger(**changes: object) -> LogindFacts:
    values = {"booted": True, "in_session": True, "kills": True, "manager": True, "systemd_run": "/usr/bin/systemd-run"}
    return LogindFacts("anna", 1000, **{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (in_danger(booted=False), "no systemd here"),
        (in_danger(in_session=False), "not in a login session's scope"),
        (in_danger(kills=False), "KillUserProcesses is off"),
        (in_danger(kills=None), "KillUserProcesses is off"),
        (in_danger(exclude=["root", "anna"]), "spares this user"),
        (in_danger(only=["bert"]), "spares this user"),
    ],
)
def test_nohup_is_enough(facts: LogindFacts, said: str) -> None:
    found = decide(facts)
    assert (found.prefix, found.linger, found.warning) == ([], False, "")
    assert found.said.startswith("nohup and setsid")
    assert said in found.said


def test_a_scope_of_the_users_manager_and_linger() -> None:
    found = decide(in_danger())
    assert found.prefix[:3] == ["/usr/bin/systemd-run", "--user", "--scope"]
    assert found.env == {"XDG_RUNTIME_DIR": "/run/user/1000"}
    assert found.linger
    assert not decide(in_danger(lingers=True)).linger
    assert decide(in_danger(only=["anna"])).prefix


@pytest.mark.parametrize("facts", [in_danger(systemd_run=""), in_danger(manager=False)])
def test_where_nothing_helps_it_is_said_with_the_remedy(facts: LogindFacts) -> None:
    found = decide(facts)
    assert found.prefix == []
    assert "ends at logout" in found.warning
    assert "KillExcludeUsers" in found.warning


def host(root: Path, **files: str) -> Path:
    """A root of files; ``__`` in a name is a slash."""
    (root / "run/systemd/system").mkdir(parents=True)
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_conf", ".conf")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


SESSION = "0::/user.slice/user-1000.slice/session-4.scope\n"


def test_the_shipped_comments_are_the_builtin_defaults(tmp_path: Path) -> None:
    assert read_facts(host(tmp_path / "a", etc__systemd__logind_conf=DEBIAN)).kills is False
    assert read_facts(host(tmp_path / "b", usr__lib__systemd__logind_conf=UPSTREAM)).kills is True
    assert read_facts(host(tmp_path / "c")).kills is None


def test_drop_ins_outweigh_the_main_file_in_the_order_of_their_names(tmp_path: Path) -> None:
    root = host(
        tmp_path,
        etc__systemd__logind_conf=DEBIAN + "KillUserProcesses=no\n",
        usr__lib__systemd__logind_conf="[Login]\nKillUserProcesses=no\n",
        etc__systemd__logind_conf_d__10_conf="",
    )
    folder = root / "etc/systemd/logind.conf.d"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "20-kill.conf").write_text("[Login]\nKillUserProcesses = YES\nKillExcludeUsers=root anna\n")
    (folder / "10-no.conf").write_text("[Login]\nKillUserProcesses=no\n")
    found = read_facts(root)
    assert (found.kills, found.exclude) == (True, ["root", "anna"])


@pytest.mark.parametrize(
    ("cgroup", "inside"),
    [
        (SESSION, True),
        ("1:name=systemd:/user.slice/user-0.slice/session-c1.scope\n", True),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/x.scope\n", False),
        ("0::/system.slice/ssh.service\n", False),
        ("0::/\n", False),
    ],
)
def test_whether_we_are_in_a_session(tmp_path: Path, cgroup: str, inside: bool) -> None:
    assert read_facts(host(tmp_path, proc__self__cgroup=cgroup)).in_session is inside


def test_linger_and_manager_are_files(tmp_path: Path) -> None:
    uid = os.getuid()
    user = pwd.getpwuid(uid).pw_name
    root = host(tmp_path, **{f"var__lib__systemd__linger__{user}": "", f"run__user__{uid}__systemd__private": ""})
    found = read_facts(root)
    assert (found.user, found.lingers, found.manager) == (user, True, True)
    assert not read_facts(host(tmp_path / "none")).lingers


def test_a_host_without_systemd(tmp_path: Path) -> None:
    assert decide(read_facts(tmp_path)).said.endswith("no systemd here")


def test_odd_configuration_is_read_without_error() -> None:
    assert parse_config(["KillUserProcesses", "=yes", "\x00KillUserProcesses=maybe\n#KillExcludeUsers=\n"])[0] == {}


def test_a_user_who_may_not_linger_is_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logind, "read_facts", in_danger)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "enable-linger anna" in logind.shelter().warning


def test_a_process_in_a_scope_is_the_one_that_was_started(tmp_path: Path) -> None:
    """systemd-run --scope becomes the program, as does this stand-in for it: pid and start time are the program's."""
    stand_in = tmp_path / "systemd-run"
    stand_in.write_text(
        '#!/bin/sh\necho "$XDG_RUNTIME_DIR $*"\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$@"\n'
    )
    stand_in.chmod(0o755)
    within = Shelter("", [str(stand_in), "--user", "--scope", "--"], {"XDG_RUNTIME_DIR": "/run/user/1000"})
    log = tmp_path / "log"
    pid, started = spawn_detached(["/bin/sleep", "600"], log_path=log, within=within)
    try:
        wait_for(lambda: procfs.read_cmdline(pid) == ["/bin/sleep", "600"], 60.0)
        assert procfs.is_alive(pid, started)
        assert os.getsid(pid) == pid
        assert log.read_text().startswith("/run/user/1000 --user --scope")
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
