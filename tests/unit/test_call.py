"""The call protocol on this machine: real agents as subprocesses."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import paramiko
import pytest
import testverbs

from fleetdump.agent.hostmessages import AuditArgs, AuditResult, StatusArgs, StatusResult
from fleetdump.agent.procfs import is_alive, start_time
from fleetdump.errors import HostError, LockedError, UnreachableError
from fleetdump.fleet import ConnectOptions, Host, connect
from fleetdump.fleet.bundle import Bundle
from fleetdump.fleet.process import SshProcess
from fleetdump.inventory import HostConfig


def state_of(host: Host) -> Path:
    (root,) = Path(host.config.state_dir).iterdir()
    return root


def test_the_bundle_is_pushed_once(local_host: Host, use_verbs: Bundle) -> None:
    for _ in range(2):
        assert local_host.call(testverbs.CountArgs(), testverbs.Done, verb="count").pid > 0
    (pushed,) = (state_of(local_host) / "agent").iterdir()
    assert pushed.name == use_verbs.sha256
    assert pushed.stat().st_mode & 0o777 == 0o700


def test_body_lines_reach_the_verb(local_host: Host) -> None:
    body = [json.dumps({"n": n}) for n in range(20_000)]
    done = local_host.call(testverbs.CountArgs(), testverbs.Done, verb="count", body=body)
    assert done.numbers == list(range(20_000))


def test_events_come_while_the_verb_runs(local_host: Host) -> None:
    came: list[float] = []
    local_host.call(
        testverbs.NapArgs(0.6), testverbs.Done, verb="nap", on_event=lambda _: came.append(time.monotonic())
    )
    assert len(came) == 1
    assert time.monotonic() - came[0] > 0.3


def test_three_mebibytes_on_both_streams(local_host: Host) -> None:
    events: list[dict[str, object]] = []
    local_host.call(testverbs.TalkArgs(3 << 20), testverbs.Done, verb="talk", on_event=events.append, deadline=60)
    assert len(events) == 3 << 10


def test_blob_arrives_whole(local_host: Host) -> None:
    got: list[bytes] = []
    local_host.call(testverbs.BlobArgs(1 << 20), testverbs.Done, verb="blob", blob=lambda frame, data: got.extend(data))
    assert b"".join(got) == bytes(range(256)) * 4096


def test_blob_that_nobody_reads_is_dropped(local_host: Host) -> None:
    assert local_host.call(testverbs.BlobArgs(1 << 20), testverbs.Done, verb="blob").pid


def test_broken_blob_is_an_error_not_short_data(local_host: Host) -> None:
    got: list[bytes] = []
    with pytest.raises(UnreachableError, match="lost"):
        local_host.call(
            testverbs.BlobArgs(1024, short_by=10),
            testverbs.Done,
            verb="blob",
            blob=lambda frame, data: got.extend(data),
        )


@pytest.mark.parametrize("code", ["failed", "conflict", "not_found"])
def test_failure_of_the_verb_keeps_its_parts(local_host: Host, code: str) -> None:
    with pytest.raises(HostError) as caught:
        local_host.call(testverbs.CountArgs(fail=code), testverbs.Done, verb="count")
    error = caught.value
    assert (error.code, error.what, error.why, error.next_step) == (code, "it failed", "because", "do that")
    assert error.where == "here: /a/file"


def test_defect_in_a_verb_is_a_bug_with_its_traceback(local_host: Host) -> None:
    with pytest.raises(HostError) as caught:
        local_host.call(testverbs.CountArgs(fail="bug"), testverbs.Done, verb="count")
    assert caught.value.code == "bug"
    assert "RuntimeError: a defect" in caught.value.what
    assert "testverbs.py" in caught.value.why


def test_full_disk_is_named(local_host: Host) -> None:
    with pytest.raises(HostError, match="No space left") as caught:
        local_host.call(testverbs.CountArgs(fail="disk_full"), testverbs.Done, verb="count")
    assert caught.value.code == "disk_full"
    assert "/somewhere" in caught.value.where


def test_unknown_verb_and_wrong_arguments_are_usage_errors(local_host: Host) -> None:
    for verb, args in (("dance", testverbs.CountArgs()), ("nap", testverbs.CountArgs())):
        with pytest.raises(HostError) as caught:
            local_host.call(args, testverbs.Done, verb=verb)
        assert caught.value.code == "usage"


def test_agent_that_dies_says_its_last_words(local_host: Host) -> None:
    with pytest.raises(HostError, match="without an answer") as caught:
        local_host.call(testverbs.NapArgs(0), testverbs.Done, verb="crash")
    assert "last words" in caught.value.why
    assert "status 3" in caught.value.why


def test_deadline_ends_the_agent_and_its_children(local_host: Host) -> None:
    pids: list[int] = []
    began = time.monotonic()
    with pytest.raises(HostError) as caught:
        local_host.call(
            testverbs.NapArgs(60, child="left-behind-1"),
            testverbs.Done,
            verb="nap",
            deadline=2,
            on_event=lambda event: pids.append(event["pid"]),
        )
    assert caught.value.code == "timeout"
    assert time.monotonic() - began < 8
    assert not is_alive(pids[0], start_time(pids[0]) or 0)
    assert not _processes_with("left-behind-1")


def test_second_operator_is_locked_out_and_told_by_whom(local_config: HostConfig, use_verbs: Bundle) -> None:
    started = threading.Event()

    def hold(host: Host) -> None:
        host.call(testverbs.NapArgs(3), testverbs.Done, verb="busy", on_event=lambda _: started.set())

    with connect(local_config, ConnectOptions(operator="first@there")) as first, connect(local_config) as second:
        holder = threading.Thread(target=hold, args=(first,))
        holder.start()
        assert started.wait(20)
        with pytest.raises(LockedError, match="first@there runs busy"):
            second.call(testverbs.CountArgs(), testverbs.Done, verb="count")
        holder.join()
        assert second.call(testverbs.CountArgs(), testverbs.Done, verb="count").pid


def test_second_operator_may_wait_for_the_lock(local_config: HostConfig, use_verbs: Bundle) -> None:
    started = threading.Event()
    said: list[str] = []

    def hold(host: Host) -> None:
        host.call(testverbs.NapArgs(3), testverbs.Done, verb="busy", on_event=lambda _: started.set())

    patient = ConnectOptions(lock_wait=60.0, on_locked=lambda host, text: said.append(f"{host}: {text}"))
    with (
        connect(local_config, ConnectOptions(operator="first@there")) as first,
        connect(local_config, patient) as second,
    ):
        holder = threading.Thread(target=hold, args=(first,))
        holder.start()
        assert started.wait(20)
        assert "first@there runs busy (pid " in second.call(AuditArgs(), AuditResult, verb="audit").holder

        assert second.call(testverbs.CountArgs(), testverbs.Done, verb="count").pid
        holder.join()
        told = second.call(AuditArgs(), AuditResult, verb="audit")
    assert len(said) == 1
    assert f"{local_config.name}: waiting for the host's lock: first@there runs busy there" in said[0]
    assert ([(entry.verb, entry.ok) for entry in told.entries], told.holder) == ([("busy", True), ("count", True)], "")


def test_the_audit_log_is_read_from_its_end_and_past_broken_lines(local_host: Host) -> None:
    assert local_host.call(AuditArgs(), AuditResult, verb="audit") == AuditResult()
    for _ in range(3):
        local_host.call(testverbs.CountArgs(), testverbs.Done, verb="count")
    with (state_of(local_host) / "audit.jsonl").open("ab") as file:
        file.write(b'{"v":1,"t":"soon"}\n\xff\n')
        for moment in ("NaN", "1e300", "-1"):
            file.write(b'{"v":1,"t":%s,"operator":"x","verb":"x","args":{},"ok":true,"seconds":1}\n' % moment.encode())
        file.write(b'{"v":1,"t":1.0,"op')
    told = local_host.call(AuditArgs(2), AuditResult, verb="audit")
    assert [(entry.verb, entry.operator) for entry in told.entries] == [("count", "tester@here")] * 2


def test_lock_of_a_killed_agent_is_taken_over(local_host: Host) -> None:
    def kill(event: dict[str, int]) -> None:
        os.kill(event["pid"], 9)

    with pytest.raises(HostError, match="without an answer"):
        local_host.call(testverbs.NapArgs(60), testverbs.Done, verb="busy", on_event=kill)
    assert (state_of(local_host) / "lock" / "holder.json").exists()
    assert local_host.call(testverbs.CountArgs(), testverbs.Done, verb="count").pid
    assert not (state_of(local_host) / "lock").exists()


def test_audit_has_a_line_for_each_change_and_no_secret(local_host: Host) -> None:
    args = testverbs.CountArgs(env={"HF_TOKEN": "hunter2"}, argv=["--api-key", "hunter2", "--port", "8000"])
    local_host.call(args, testverbs.Done, verb="count")
    with pytest.raises(HostError):
        local_host.call(dataclasses.replace(args, fail="failed"), testverbs.Done, verb="count")
    local_host.call(testverbs.NapArgs(0), testverbs.Done, verb="nap")
    text = (state_of(local_host) / "audit.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [(line["verb"], line["ok"], line["operator"]) for line in lines] == [
        ("count", True, "tester@here"),
        ("count", False, "tester@here"),
    ]
    assert "hunter2" not in text
    assert lines[0]["args"]["env"] == ["HF_TOKEN"]
    assert lines[0]["args"]["argv"] == ["--api-key", "***", "--port", "8000"]


def test_no_such_python(local_config: HostConfig) -> None:
    config = dataclasses.replace(local_config, agent_python="python-that-is-not-there")
    with connect(config) as host, pytest.raises(HostError, match="cannot be run") as caught:
        host.call(testverbs.NapArgs(0), testverbs.Done, verb="nap")
    assert "agent_python" in caught.value.next_step


def _python38() -> str:
    candidate = os.environ.get("FLEETDUMP_PYTHON38") or shutil.which("python3.8") or ""
    works = candidate and subprocess.run([candidate, "-c", ""], capture_output=True).returncode == 0
    return candidate if works else ""


@pytest.mark.skipif(not _python38(), reason="no Python 3.8 here (FLEETDUMP_PYTHON38 names one)")
def test_agent_runs_under_python_3_8(local_config: HostConfig, use_verbs: Bundle) -> None:
    config = dataclasses.replace(local_config, agent_python=_python38())
    with connect(config) as host:
        assert host.call(testverbs.CountArgs(), testverbs.Done, verb="count", body=['{"n": 7}']).numbers == [7]
        status = host.call(StatusArgs(), StatusResult, verb="status")
        assert status.servers == []


def test_exec_prefix_stands_before_the_agent(local_config: HostConfig, use_verbs: Bundle) -> None:
    config = dataclasses.replace(local_config, exec_prefix=("sh", "-c", 'echo noise; printf half; exec "$@"', "sh"))
    with connect(config) as host:
        assert host.call(testverbs.NapArgs(0), testverbs.Done, verb="nap").pid


def test_detached_process_outlives_the_agent(local_host: Host, tmp_path: Path) -> None:
    log = tmp_path / "log"
    done = local_host.call(testverbs.DetachArgs("mark-d", str(log)), testverbs.Done, verb="detach")
    pid, started = done.pid, done.numbers[0]
    try:
        while log.read_text() != "alive\n":  # before that, its interpreter has files of its own open
            assert is_alive(pid, started)
            time.sleep(0.02)
        assert os.getsid(pid) == pid
        assert os.readlink(f"/proc/{pid}/cwd") == "/"
        assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"
        assert os.readlink(f"/proc/{pid}/fd/1") == os.readlink(f"/proc/{pid}/fd/2") == str(log)
        assert len(os.listdir(f"/proc/{pid}/fd")) == 3
        status = Path(f"/proc/{pid}/status").read_text()
        ignored = int(next(line for line in status.splitlines() if line.startswith("SigIgn")).split()[1], 16)
        assert ignored & 1, "SIGHUP is ignored"
    finally:
        os.kill(pid, 9)


def _processes_with(text: str) -> list[str]:
    return [
        line
        for line in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout.splitlines()
        if text in line
    ]


@pytest.mark.parametrize("error", [EOFError(), OSError("Socket is closed"), paramiko.SSHException("gone")])
def test_closing_on_a_broken_connection_hides_nothing_and_raises_nothing(error: Exception) -> None:
    """The channel is a stand-in: paramiko raises here only in a moment that cannot be hit on purpose."""

    class Channel:
        def exec_command(self, _command: str) -> None: ...
        def recv_stderr(self, _limit: int) -> bytes:
            return b""

        def close(self) -> None:
            raise error

    SshProcess(Channel(), "true").close()  # type: ignore[arg-type]
