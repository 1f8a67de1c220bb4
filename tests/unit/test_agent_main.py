"""The agent's entry in-process: dispatch, lock, audit, answers; and the whole of it under another Python."""

from __future__ import annotations

import ast
import dataclasses
import errno
import importlib
import inspect
import io
import json
import os
import shutil
import threading
import time
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetdump.agent import audit, bootstrap, bundles, hostmessages, lock, main, names, protocol, servermessages, specs
from fleetdump.agent.audit import shorten
from fleetdump.agent.context import AgentContext, ControllerGone, State
from fleetdump.agent.detach import spawn_detached
from fleetdump.agent.procfs import is_alive, start_time
from fleetdump.agent.protocol import AgentFailure, Request
from fleetdump.agent.scrub import scrub_argv
from fleetdump.agent.watchdog import Watchdog

AGENT = Path(main.__file__).parent


def context(tmp_path: Path, verb: str = "status", args: dict[str, Any] | None = None, **request: Any) -> AgentContext:
    return AgentContext(
        Request(verb, args or {}, operator="tester@here", **request),
        State(tmp_path / "state"),
        stdin=io.BytesIO(),
        stdout=io.BytesIO(),
    )


def answers(ctx: AgentContext) -> list[dict[str, Any]]:
    assert isinstance(ctx.stdout, io.BytesIO)
    return [json.loads(line) for line in ctx.stdout.getvalue().splitlines()]


def serve_with(ctx: AgentContext, monkeypatch: pytest.MonkeyPatch, verb: Any, mutates: bool = False) -> dict[str, Any]:
    """Serve a request whose verb is the function ``verb``."""
    monkeypatch.setattr(main, "verb_under_test", verb, raising=False)
    monkeypatch.setitem(main.VERB_TABLE, "status", main.Verb(hostmessages.StatusArgs, "main:verb_under_test", mutates))
    main.serve(ctx)
    return answers(ctx)[-1]


class TestTable:
    def test_every_verb_of_the_protocol_and_no_other(self) -> None:
        assert set(main.VERB_TABLE) == set(protocol.VERBS)

    @pytest.mark.parametrize("name", protocol.VERBS)
    def test_verb_takes_its_arguments_and_the_context(self, name: str) -> None:
        verb = main.VERB_TABLE[name]
        module, _, function = verb.target.partition(":")
        call = getattr(importlib.import_module(f"fleetdump.agent.{module}"), function)
        assert function == name
        assert len(inspect.signature(call).parameters) == 2


def minimal(kind: Any) -> Any:
    """JSON that decodes as ``kind``, with nothing in it that may be left out."""
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        required = [f for f in dataclasses.fields(kind) if dataclasses.MISSING is f.default is f.default_factory]
        return {field.name: minimal(hints[field.name]) for field in required}
    return {str: "x", int: 1, float: 1.0, bool: False}.get(kind, {} if typing.get_origin(kind) is dict else [])


def naming(kind: Any, name: str) -> Any:
    """A value of an argument that names servers or runs, with that name."""
    if typing.get_origin(kind) is list:
        return [naming(typing.get_args(kind)[0], name)]
    return {**minimal(kind), "name": name} if kind is specs.ServerSpec else name


NAMED = [
    (verb, field.name)
    for verb in protocol.VERBS
    for field in dataclasses.fields(main.VERB_TABLE[verb].args)
    if field.name in (*names.SERVER_FIELDS, *names.RUN_FIELDS)
]


class TestNames:
    def test_which_verbs_take_names(self) -> None:
        verbs = {verb for verb, _ in NAMED}
        assert {"logs", "watch", "monitor", "stop", "restart", "selfcheck", "evidence", "launch", "submit"} <= verbs
        assert {"order", "follow", "manifest", "verify", "shards", "fetch", "withdraw", "clean"} <= verbs

    @pytest.mark.parametrize(("verb", "field"), NAMED)
    @pytest.mark.parametrize("name", ["../../tmp", "/tmp", "..", "a/b", ".x", "main\n"])
    def test_a_name_that_leads_elsewhere_is_refused_before_the_verb_sees_it(
        self, tmp_path: Path, verb: str, field: str, name: str
    ) -> None:
        kind = main.VERB_TABLE[verb].args
        args = {**minimal(kind), field: naming(typing.get_type_hints(kind)[field], name)}
        ctx = context(tmp_path, verb, args)
        main.serve(ctx)
        error = answers(ctx)[-1]["error"]
        assert (error["code"], repr(name) in error["what"]) == ("usage", True)
        assert not ctx.state.root.exists(), "the host was not even locked for it"

    def test_names_are_found_at_any_depth(self) -> None:
        server = specs.ServerSpec(**{**minimal(specs.ServerSpec), "name": "../x"})
        with pytest.raises(AgentFailure, match="no server name"):
            names.require_names(servermessages.ForecastArgs(launches=[servermessages.LaunchArgs(server)]))


class TestServe:
    def test_result(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        stopped = servermessages.StopResult(stopped=["main"])
        answer = serve_with(context(tmp_path), monkeypatch, lambda args, ctx: stopped)
        assert answer == {
            "type": "result",
            "result": protocol.to_json(servermessages.StopResult(["main"])),
            "error": None,
        }

    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (AgentFailure("conflict", "no"), "conflict"),
            (OSError(28, "No space left on device", "/x"), "disk_full"),
            (PermissionError(13, "Permission denied", "/x"), "permission"),
            (OSError(30, "Read-only file system", b"/x"), "permission"),
            (IsADirectoryError(21, "Is a directory", "/x"), "failed"),
            (FileNotFoundError(2, "No such file", "/x"), "bug"),
            (ValueError("?"), "bug"),
        ],
    )
    def test_errors_by_their_code(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: str
    ) -> None:
        def fail(args: Any, ctx: AgentContext) -> None:
            raise error

        assert serve_with(context(tmp_path), monkeypatch, fail)["error"]["code"] == code

    def test_other_protocol_and_unknown_verb(self, tmp_path: Path) -> None:
        for ctx in (context(tmp_path, protocol=99), context(tmp_path, "dance"), context(tmp_path, args={"x": 1})):
            main.serve(ctx)
            assert answers(ctx)[-1]["error"]["code"] == "usage"

    def test_controller_gone_is_silent(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        ctx = context(tmp_path)
        ctx.stdout = os.fdopen(writer, "wb", buffering=0)
        monkeypatch.setattr(main, "verb_under_test", lambda args, ctx: ctx.emit("x"), raising=False)
        monkeypatch.setitem(main.VERB_TABLE, "status", main.Verb(hostmessages.StatusArgs, "main:verb_under_test"))
        main.serve(ctx)
        ctx.stdout.close()

    def test_change_is_locked_and_audited(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        held: list[Any] = []

        def change(args: Any, ctx: AgentContext) -> servermessages.StopResult:
            held.append(lock.read_holder(ctx.state.root / "lock"))
            return servermessages.StopResult()

        ctx = context(tmp_path)
        serve_with(ctx, monkeypatch, change, mutates=True)
        assert (held[0].operator, held[0].pid) == ("tester@here", os.getpid())
        assert lock.read_holder(ctx.state.root / "lock") is None
        line = json.loads((ctx.state.root / "audit.jsonl").read_text())
        assert (line["verb"], line["ok"], line["v"]) == ("status", True, 1)

    @pytest.mark.parametrize(
        ("ending", "code"),
        [
            (AgentFailure("conflict", "no"), "conflict"),
            (OSError(errno.ENOSPC, "full"), "disk_full"),
            (ValueError("unforeseen"), "bug"),
            (ControllerGone(), "gone"),
            (hostmessages.ControllerResult(3, "", ""), "exit 3"),
        ],
    )
    def test_the_audit_says_how_a_change_failed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: Any, code: str
    ) -> None:
        def change(args: Any, ctx: AgentContext) -> Any:
            if isinstance(ending, Exception):
                raise ending
            return ending

        ctx = context(tmp_path)
        monkeypatch.setattr(main, "verb_under_test", change, raising=False)
        monkeypatch.setitem(main.VERB_TABLE, "stop", main.Verb(servermessages.StopArgs, "main:verb_under_test", True))
        ctx.request.verb = "stop"
        main.serve(ctx)
        (entry,) = audit.audit(hostmessages.AuditArgs(), ctx).entries
        assert (entry.ok, entry.code) == (False, code)

    def test_clean_leaves_no_audit_behind(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def remove_all(args: Any, ctx: AgentContext) -> servermessages.StopResult:
            shutil.rmtree(ctx.state.root)
            return servermessages.StopResult()

        ctx = context(tmp_path)
        assert serve_with(ctx, monkeypatch, remove_all, mutates=True)["error"] is None
        assert not ctx.state.root.exists()


class TestContext:
    def test_body_that_breaks_off(self, tmp_path: Path) -> None:
        ctx = context(tmp_path, body_lines=2)
        ctx.stdin = io.BytesIO(b'{"n": 1}\n{"n"')
        rows = ctx.body()
        assert next(rows) == {"n": 1}
        with pytest.raises(ControllerGone):
            next(rows)

    def test_short_blob_closes_the_stream(self, tmp_path: Path) -> None:
        ctx = context(tmp_path)
        with pytest.raises(ControllerGone):
            ctx.blob(io.BytesIO(b"123"), 4)
        with pytest.raises(ControllerGone):
            ctx.emit("more")

    def test_directories_are_private(self, tmp_path: Path) -> None:
        path = State(tmp_path / "s").share("r1", "main")
        while path != tmp_path:
            assert path.stat().st_mode & 0o777 == 0o700
            path = path.parent

    def test_frames_of_two_threads_never_mix(self, tmp_path: Path) -> None:
        ctx = context(tmp_path)
        threads = [
            threading.Thread(target=lambda n=n: [ctx.emit("e", text=str(n) * 2000) for _ in range(50)])
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(answers(ctx)) == 200


class TestLock:
    def test_only_one_of_many_takers_of_a_dead_lock_gets_it(self, tmp_path: Path) -> None:
        ctx = context(tmp_path)
        directory = ctx.state.directory("lock")
        dead = lock.Holder("ghost", "here", 2**22 + 1, 1, "launch", 0.0)
        (directory / "holder.json").write_text(json.dumps(protocol.to_json(dead)))
        pids = []
        for n in range(8):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    with lock.host_lock(context(tmp_path)):
                        (tmp_path / f"in-{n}").touch()
                        time.sleep(0.5)
                        code = 0
                finally:
                    os._exit(code)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        assert codes.count(0) >= 1
        assert len(list(tmp_path.glob("in-*"))) == codes.count(0)
        assert not directory.exists()

    def test_broken_holder_file_does_not_lock_for_ever(self, tmp_path: Path) -> None:
        ctx = context(tmp_path)
        (ctx.state.directory("lock") / "holder.json").write_text("{")
        with lock.host_lock(ctx):
            assert lock.read_holder(ctx.state.root / "lock") is not None

    def test_living_holder_is_named(self, tmp_path: Path) -> None:
        ctx = context(tmp_path)
        with lock.host_lock(ctx), pytest.raises(AgentFailure) as caught, lock.host_lock(ctx):
            pass
        assert caught.value.error.code == "locked"
        assert "tester@here" in caught.value.error.why


@pytest.fixture
def own_group() -> Iterator[None]:
    """The watchdog makes its process a group of its own; pytest goes back to the one it came with."""
    group = os.getpgrp()
    yield
    os.setpgid(0, group)


@pytest.mark.usefixtures("own_group")
class TestWatchdog:
    def test_deadline(self, tmp_path: Path) -> None:
        ended = threading.Event()
        ctx, pipe = self._piped(tmp_path, deadline=0.1)
        with Watchdog(ctx, end=ended.set):
            assert ended.wait(5)
        assert answers(ctx)[-1]["error"]["code"] == "timeout"
        os.close(pipe)

    def test_controller_hangs_up(self, tmp_path: Path) -> None:
        ended = threading.Event()
        ctx, pipe = self._piped(tmp_path, deadline=60)
        with Watchdog(ctx, end=ended.set):
            assert not ended.wait(0.1)
            os.close(pipe)
            assert ended.wait(5)

    def test_verb_that_ends_in_time_is_left_alone(self, tmp_path: Path) -> None:
        ended = threading.Event()
        ctx, pipe = self._piped(tmp_path, deadline=60)
        with Watchdog(ctx, end=ended.set):
            pass
        assert not ended.is_set()
        os.close(pipe)

    @staticmethod
    def _piped(tmp_path: Path, deadline: float) -> tuple[AgentContext, int]:
        reader, writer = os.pipe()
        ctx = context(tmp_path, deadline=deadline)
        ctx.stdin = os.fdopen(reader, "rb")
        return ctx, writer


class TestProcesses:
    def test_name_with_spaces_and_parentheses(self, tmp_path: Path) -> None:
        odd = tmp_path / "a) R 1 (b"
        odd.symlink_to("/bin/sleep")
        pid, started = spawn_detached([str(odd), "30"], log_path=tmp_path / "log")
        try:
            assert started == start_time(pid) > 0
            assert is_alive(pid, started)
            assert not is_alive(pid, started + 1)
        finally:
            os.kill(pid, 9)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(pid, started), "a zombie is not alive"
        os.waitpid(pid, 0)
        assert start_time(pid) is None

    def test_program_that_is_missing(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            spawn_detached(["/no/such/program"], log_path=tmp_path / "log")


class TestAudit:
    @pytest.mark.parametrize(
        ("argv", "clean"),
        [
            (["--api-key", "s3"], ["--api-key", "***"]),
            (["--api-key=s3"], ["--api-key=***"]),
            (["--admin-api-key", "s3", "--port", "1"], ["--admin-api-key", "***", "--port", "1"]),
            (["--hf-token", "s3"], ["--hf-token", "***"]),
            (["--ssl-keyfile-password", "s3"], ["--ssl-keyfile-password", "***"]),
            (["--tokenizer-path", "/m"], ["--tokenizer-path", "/m"]),
            (["--max-total-tokens", "9"], ["--max-total-tokens", "9"]),
            (["--ssl-keyfile", "/k"], ["--ssl-keyfile", "/k"]),
            (["--api-k", "s3"], ["--api-k", "***"]),
            (["--admin_api_key=s3"], ["--admin_api_key=***"]),
        ],
    )
    def test_secrets_in_arguments(self, argv: list[str], clean: list[str]) -> None:
        assert scrub_argv(argv) == clean

    def test_long_things_are_cut(self) -> None:
        short = shorten({"files": {"a.py": "x" * 9999}, "text": "y" * 9999, "list": list(range(999)), "n": 3})
        assert short["files"] == ["a.py"]
        assert len(json.dumps(short)) < 600
        assert short["n"] == 3


class TestBundles:
    def test_newest_stay_and_used_ones_too(self, tmp_path: Path) -> None:
        state = State(tmp_path / "state")
        for age in range(6):
            path = state.directory("agent", f"{age:064x}")
            os.utime(path, (1000 - age, 1000 - age))
        pid, _ = spawn_detached(["/bin/sleep", "30"], log_path=tmp_path / "log", env={"PYTHONPATH": f"/x/{5:064x}"})
        try:
            removed = bundles.prune(state)
        finally:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        assert sorted(removed) == [f"{3:064x}", f"{4:064x}"]


class TestBootstrap:
    def test_damaged_bundle_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="damaged"):
            bootstrap.unpack(b"not it", "0" * 64, str(tmp_path / "agent" / "x"))
        assert not (tmp_path / "agent").exists()

    def test_reads_as_python_3_6(self) -> None:
        ast.parse((AGENT / "bootstrap.py").read_text(), feature_version=(3, 6))


@pytest.mark.parametrize("path", sorted(AGENT.rglob("*.py")), ids=lambda p: str(p.relative_to(AGENT)))
def test_agent_reads_as_python_3_8(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 8))
