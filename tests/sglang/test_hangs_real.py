"""Diagnosis of a real SGLang server of two ranks: healthy, idle, busy, and with a rank that spins, stays away or dies.

Nobody told fleetdump about this server. Its model file has one more call in the loop over the layers: a rank that finds
``<folder>/<kind>-<rank>`` there hangs in that way until SIGUSR1, so that one start serves many hangs.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fleetdump.agent import procfs
from fleetdump.agent.specs import Patience
from fleetdump.diagnosis import OK, STALL
from fleetdump.errors import FleetdumpError
from fleetdump.fleet import ConnectOptions, connect
from fleetdump.inventory import HostConfig
from fleetdump.tasks.server import Diagnosis, Target, diagnose_host
from tests.liverecord import FALSE_ALARM_RUNS, NEVER_HUNG, Tally, loaded, record, together
from tests.sglang.cpuserver import RunningServer, SglangEnv, copy_of, free_port, start_server

LOOP = "                index_topk_share.update(topk_indices)\n"
CALL = "                _hang_on_request(i, get_parallel().tp_rank)\n"
HANG = """

def _hang_on_request(layer, rank):
    import os, signal, threading
    if layer != 2:
        return
    released = threading.Event()
    for kind in ("spin", "absent"):
        request = f"{os.environ['HANG_FOLDER']}/{kind}-{rank}"
        if not os.path.exists(request):
            continue
        signal.signal(signal.SIGUSR1, lambda *_: released.set())
        os.rename(request, request + "-taken")
        if kind == "spin":
            while not released._flag:
                pass
        else:
            released.wait()
"""
HANGS = {"spin": ("RANK_SPIN",), "absent": ("MISSING_RANK", "COLLECTIVE_DIVERGED")}
"""What rank 1 does in a request while rank 0 waits in a collective, and what may be said first."""
DEAD = ("API_ALIVE_ENGINE_DEAD", "RANK_CRASHED", "LAUNCHER_DIED")
"""By when the look is: the HTTP server answers on; rank 0 finds its peer gone; the launcher ends all."""
RANK = 1
RUNS = 20
SECONDS = 2.0
LOADING_LOOKS, LOADING_PAUSE = 5, 4.0
"""Diagnoses of one start, and seconds between them: without a pause they would slow the start that they look at."""
PATIENCE = Patience(*[1.0] * 9)


@pytest.fixture(scope="module")
def hanging_env(sglang_installed: SglangEnv, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEnv]:
    """A copy of SGLang with the call in the loop."""
    with copy_of(sglang_installed, tmp_path_factory) as env:
        model = env.package / "srt" / "models" / "deepseek_v2.py"
        text = model.read_text()
        assert text.count(LOOP) == 1
        part = model.with_suffix(".part")
        part.write_text(text.replace(LOOP, LOOP + CALL) + HANG)
        os.replace(part, model)
        yield env


@dataclass
class Subject:
    """A real server and the way to make its rank 1 hang."""

    server: RunningServer
    folder: Path
    config: HostConfig

    def rank_pid(self, rank: int) -> int:
        (pid,) = (p.pid for p in procfs.tree(self.server.pid) if p.rank and p.rank.tp == rank)
        return pid

    def generate(self, seconds: float = 60.0, tokens: int = 8) -> int:
        """One request; its status, 0 when no answer came in time."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=seconds)
        body = json.dumps({"text": "The sea", "sampling_params": {"max_new_tokens": tokens, "temperature": 0}})
        try:
            connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()

    @contextlib.contextmanager
    def hung(self, kind: str) -> Iterator[None]:
        """Rank 1 hangs in a request until the block ends; then that request is answered."""
        request = self.folder / f"{kind}-{RANK}"
        request.touch()
        answers: list[int] = []
        asker = threading.Thread(target=lambda: answers.append(self.generate(300.0)), daemon=True)
        asker.start()
        taken = request.with_name(f"{request.name}-taken")
        _wait_for(taken.exists)
        time.sleep(1.0)
        try:
            yield
        finally:
            taken.unlink()
            os.kill(self.rank_pid(RANK), signal.SIGUSR1)
        asker.join(120.0)
        assert answers == [200], "nothing was done to the server that it does not survive"

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Requests all the time."""
        done = threading.Event()

        def ask() -> None:
            while not done.is_set():
                self.generate(tokens=64)

        askers = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
        for asker in askers:
            asker.start()
        time.sleep(2.0)
        try:
            yield
        finally:
            done.set()
            for asker in askers:
                asker.join(120.0)

    def diagnose(self) -> Diagnosis:
        return diagnosed(self.config, self.server.port)


def diagnosed(config: HostConfig, port: int) -> Diagnosis:
    """One diagnosis of the server that was told to listen on ``port``."""
    with connect(config, ConnectOptions(operator="tester@here")) as connection:
        (diagnosis,) = diagnose_host(connection, Target(port=port, seconds=SECONDS))
    return diagnosis


def here(scratch: Path, patience: Patience) -> HostConfig:
    """This machine."""
    state = str(scratch / "state")
    return HostConfig(
        "here", "localhost", connection="local", state_dir=state, agent_python="python3", patience=patience
    )


def _wait_for(condition: Callable[[], object], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@contextlib.contextmanager
def started(env: SglangEnv, scratch: Path, port: int = 0) -> Iterator[Subject]:
    """A server by hand."""
    folder = scratch / "hang"
    folder.mkdir(exist_ok=True)
    extra = {"HANG_FOLDER": str(folder)}
    with start_server(env, scratch / "server.log", tp=2, extra_env=extra, port=port) as server:
        yield Subject(server, folder, here(scratch, PATIENCE))


@pytest.fixture(scope="module")
def subject(hanging_env: SglangEnv, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """One start for the whole module; the test that kills a rank comes last."""
    with started(hanging_env, tmp_path_factory.mktemp("server")) as subject:
        yield subject


def listed(diagnosis: Diagnosis) -> str:
    return "\n".join(f"{v.code} rank {v.rank} {v.severity} ({v.confidence}): {v.title}" for v in diagnosis.verdicts)


def test_idle_and_busy_server_is_healthy(subject: Subject) -> None:
    idle = subject.diagnose()
    assert (idle.verdicts[0].code, idle.verdicts[0].severity) == ("IDLE_OK", OK), listed(idle)
    with subject.busy():
        busy = subject.diagnose()
    assert busy.verdicts[0].code in ("HEALTHY", "IDLE_OK", "BUSY_NOT_HUNG"), listed(busy)
    assert not any(verdict.severity == STALL for verdict in busy.verdicts), listed(busy)


@pytest.mark.parametrize("kind", HANGS)
def test_rank_that_hangs_in_a_request(kind: str, subject: Subject) -> None:
    with subject.hung(kind):
        found = subject.diagnose()
    assert not judge(found, HANGS[kind])
    after = subject.diagnose()
    assert after.verdicts[0].severity == OK, f"it recovered\n{listed(after)}"


def test_dead_rank_behind_a_living_http_server(subject: Subject) -> None:
    os.kill(subject.rank_pid(RANK), signal.SIGKILL)
    assert not judge(subject.diagnose(), DEAD)


# --------------------------------------------------------------------------- again and again
@pytest.mark.nightly
def test_twenty_of_twenty_and_no_false_alarm(hanging_env: SglangEnv, tmp_path_factory: pytest.TempPathFactory) -> None:
    """On a loaded machine, again and again: a server that loads, is idle, is busy, hangs twice and recovers, and loses
    a rank at last, each time diagnosed. None that works may ever be called hung."""
    hangs = {name: Tally() for name in (*HANGS, "dead rank")}
    working = {name: Tally() for name in ("loading", "idle", "busy")}
    with loaded():
        for _ in range(RUNS):
            with watched_start(hanging_env, tmp_path_factory.mktemp("server"), working["loading"]) as subject:
                working["idle"].count(stalls(subject.diagnose()))
                with subject.busy():
                    working["busy"].count(stalls(subject.diagnose()))
                for kind, codes in HANGS.items():
                    with subject.hung(kind):
                        hangs[kind].count(judge(subject.diagnose(), codes))
                os.kill(subject.rank_pid(RANK), signal.SIGKILL)
                hangs["dead rank"].count(judge(subject.diagnose(), DEAD))
            record("SGLang on the CPU, loaded machine", {**hangs, **working, NEVER_HUNG: together(working)})
    assert not [name for name, tally in {**hangs, **working}.items() if tally.wrong], (hangs, working)
    assert together(working).runs >= FALSE_ALARM_RUNS


@contextlib.contextmanager
def watched_start(env: SglangEnv, scratch: Path, tally: Tally) -> Iterator[Subject]:
    """A server, diagnosed a few times while it starts; ``tally`` counts what was called hung."""
    ready = threading.Event()
    port = free_port()
    config = here(scratch, Patience())

    def watch() -> None:
        looks = 0
        while looks < LOADING_LOOKS and not ready.wait(LOADING_PAUSE):
            with contextlib.suppress(FleetdumpError):  # it is not there yet
                tally.count(stalls(diagnosed(config, port)))
                looks += 1

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        with started(env, scratch, port) as subject:
            ready.set()
            watcher.join(120.0)
            yield subject
    finally:
        ready.set()


def judge(diagnosis: Diagnosis, codes: tuple[str, ...]) -> str:
    """Empty when the first verdict is right."""
    best = diagnosis.verdicts[0]
    return "" if best.code in codes and best.rank == RANK else listed(diagnosis)


def stalls(diagnosis: Diagnosis) -> str:
    """Empty when nothing is called hung."""
    return ", ".join(f"{v.code}: {v.title}" for v in diagnosis.verdicts if v.severity == STALL)
