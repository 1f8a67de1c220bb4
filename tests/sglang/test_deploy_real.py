"""``deploy`` on the real SGLang: by the import hook with the prefix cache kept on, and with a patch that is broken."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.sglang_cpu import recipe
from fleetdump.agent import engine, procfs
from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.formats import PieceRecord, SkipRecord
from fleetdump.agent.gate import capture_mismatch
from fleetdump.agent.generate import post, prefill, server_info
from fleetdump.agent.hostmessages import AuditArgs, AuditResult
from fleetdump.agent.jsonl import read_journal
from fleetdump.agent.neighbours import engine_users
from fleetdump.agent.protocol import Request
from fleetdump.agent.server import ServerRecord, load_record, save_record
from fleetdump.agent.servermessages import SettingsArgs
from fleetdump.agent.settings import settings
from fleetdump.agent.specs import Expectation, PatchSpec, ServerSpec
from fleetdump.fleet import ConnectOptions, Host, connect
from fleetdump.inventory import CaptureConfig, HostConfig
from fleetdump.patches import find_patch, load_patch
from fleetdump.tasks.deploy import deploy
from fleetdump.tasks.deployplan import DeployPlan, DeployReport
from fleetdump.tasks.revert import revert
from fleetdump.tasks.server import stop
from tests.sglang.cpuserver import SglangEnv, free_port

pytestmark = pytest.mark.sglang

RADIX = "--disable-radix-cache"
CACHE_ARGS = tuple(arg for arg in recipe.SERVER_ARGS if arg not in (RADIX, "--disable-overlap-schedule"))
SAMPLING = {"max_new_tokens": 1, "temperature": 0}
IDS = [5 + n % 290 for n in range(200)]


def config_of(tmp: Path, server: ServerSpec) -> HostConfig:
    return HostConfig(
        "here",
        "localhost",
        connection="local",
        state_dir=str(tmp / "state"),
        python=server.python,
        servers=(server,),
        capture=CaptureConfig(layers=(1, 3, 5), dir=str(tmp / "capture")),
    )


def state_of(tmp: Path) -> State:
    (bundles,) = (tmp / "state").glob("*/agent")
    return State(bundles.parent)


def record_of(tmp: Path) -> ServerRecord:
    record = load_record(state_of(tmp), "main")
    assert record is not None
    return record


def digest(package: Path) -> dict[str, str]:
    """Hash of every source file of the package, and of the modules beside it."""
    files = [*package.rglob("*.py"), *package.parent.glob("*.py")]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# --------------------------------------------------------------------------- the import hook, the prefix cache kept on
class Deployed:
    """A server of two ranks, deployed by the import hook, with SGLang's prefix cache and overlap schedule on."""

    def __init__(self, env: SglangEnv, tmp: Path):
        self.env, self.tmp = env, tmp
        self.before = digest(env.package)
        self.events: list[dict[str, Any]] = []
        server = ServerSpec(
            name="main",
            python=str(env.python),
            model_path=str(env.model),
            port=free_port(),
            tp=2,
            args=list(CACHE_ARGS),
            env=recipe.server_env(2),
            without=[RADIX],
        )
        self.port = server.port
        self.host = connect(config_of(tmp, server), ConnectOptions(operator="tester@here"))
        self.plan = DeployPlan(load_patch(find_patch("hidden-states")), delivery="import-hook")
        self.report: DeployReport = deploy(self.host, self.plan, self.events.append)

    def step(self, name: str) -> str:
        return "\n".join(str(event["text"]) for event in self.events if event.get("step") == name and "text" in event)

    def journal(self, run: str) -> list[Any]:
        records: list[Any] = []
        for path in sorted((self.tmp / "capture" / run).glob("journal-*.jsonl")):
            records += read_journal(path)[0]
        return records

    def written(self, run: str, rows: int) -> list[Any]:
        """The run's journals, once they name that many rows or skips."""
        end = time.monotonic() + 60
        while True:
            records = self.journal(run)
            done = sum(r.rows if isinstance(r, PieceRecord) else isinstance(r, SkipRecord) for r in records)
            if done >= rows or time.monotonic() > end:
                return records
            time.sleep(0.2)


@pytest.fixture(scope="module")
def deployed(sglang_env: SglangEnv, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    made = Deployed(sglang_env, tmp_path_factory.mktemp("hook"))
    try:
        yield made
    finally:
        stop(made.host, [], made.events.append)


def test_the_hook_delivers_to_every_rank_and_changes_no_file(deployed: Deployed) -> None:
    (server,) = deployed.report.servers
    assert server.outcome == "ready", (server.detail, server.log_tail[-5:])
    assert server.selfcheck is not None
    assert server.selfcheck.passed
    record = record_of(deployed.tmp)
    log = Path(record.log).read_text()
    assert all(f"{record.mark} rank={rank}/2" in log for rank in range(2))
    assert record.delivery == "import-hook"
    assert digest(deployed.env.package) == deployed.before


def test_a_deploy_of_what_runs_as_wanted_touches_nothing(deployed: Deployed) -> None:
    """It is proven already: no patch, no launch, no self-check."""

    def audited() -> int:
        return len(deployed.host.call(AuditArgs(), AuditResult, verb="audit").entries)

    before, told = audited(), list[dict[str, Any]]()
    again = deploy(deployed.host, deployed.plan, told.append)
    (server,) = again.servers
    assert (server.outcome, server.reused, server.selfcheck) == ("ready", True, None)
    assert [event for event in told if event["event"] == "step" and event["step"] != "check"] == []
    assert audited() == before


def test_deploy_says_which_flags_it_added_and_that_they_took_effect(deployed: Deployed) -> None:
    launched = deployed.step("launch")
    assert "--disable-prefill-cuda-graph" in launched
    assert RADIX not in launched, "the user keeps the cache"
    assert "all that the patch needs" in deployed.step("settings")
    info = server_info(deployed.port)
    assert (info["disable_radix_cache"], info["disable_overlap_schedule"]) == (False, False)
    assert record_of(deployed.tmp).settings == "passed"


def test_repeated_prompts_come_out_whole_with_the_cache_on(deployed: Deployed) -> None:
    """Another user's requests come first, so that the prefix is in the cache; theirs are never written."""
    theirs = {"input_ids": IDS, "sampling_params": SAMPLING}
    for rid in (None, "somebody/else/1"):
        answer = post(deployed.port, "/generate", {**theirs, **({"rid": rid} if rid else {})})
        assert answer.status == 200, answer.detail
    assert answer.data["meta_info"]["cached_tokens"] > 0, "the cache is on"

    for sample in ("a", "b", "a2"):
        assert prefill(deployed.port, f"fleetdump/cached/{sample}/1", IDS).status == 200

    records = deployed.written("cached", 3 * len(IDS))
    rows = {record.rid.split("/")[2]: record.rows for record in records if isinstance(record, PieceRecord)}
    assert rows == dict.fromkeys(("a", "b", "a2"), len(IDS))
    assert not [record for record in records if isinstance(record, SkipRecord)]
    assert {path.name for path in (deployed.tmp / "capture").iterdir()} <= {"cached", "short"}, "nobody else's"


def test_without_a_key_of_its_own_a_cached_prompt_is_a_skip_and_never_short(deployed: Deployed) -> None:
    body = {"input_ids": IDS, "sampling_params": SAMPLING}
    assert post(deployed.port, "/generate", body).status == 200
    assert post(deployed.port, "/generate", {**body, "rid": "fleetdump/short/a/1"}).status == 200
    (record,) = deployed.written("short", 1)
    assert (record.reason, record.rid) == ("prefix_missing", "fleetdump/short/a/1")


def test_a_rid_twice_in_flight_is_rejected(deployed: Deployed) -> None:
    rids = ["fleetdump/twice/a/1"] * 2
    answer = post(deployed.port, "/generate", {"input_ids": [IDS, IDS], "rid": rids, "sampling_params": SAMPLING})
    assert answer.status == 400
    assert "uplicate" in answer.detail


def test_the_servers_own_settings_are_what_counts(deployed: Deployed) -> None:
    """As if the patch had needed the cache off: the server says that it is on, and gets no work."""
    record = record_of(deployed.tmp)
    expected = Expectation(RADIX, "rows of a cached prefix are never computed", {"disable_radix_cache": ["true"]}, True)
    save_record(state_of(deployed.tmp), dataclasses.replace(record, expectations=[*record.expectations, expected]))
    try:
        ctx = AgentContext(Request("settings", {}, deadline=60.0), state_of(deployed.tmp))
        (fault,) = settings(SettingsArgs("main"), ctx).faults
        assert fault.startswith(f"{RADIX} did not take effect: /server_info has disable_radix_cache = false")
        assert RADIX in capture_mismatch(record_of(deployed.tmp), deployed.host.config.capture.spec())
    finally:
        save_record(state_of(deployed.tmp), record)


def test_a_running_server_is_found_as_a_user_of_its_installation(deployed: Deployed) -> None:
    facts = engine.query(str(deployed.env.python))
    record = record_of(deployed.tmp)
    (user,) = engine_users(facts)
    assert (user.pid, user.start_time) == (record.pid, record.start_time)
    assert abs(user.started_at - record.started_at) < 5
    assert procfs.is_alive(user.pid, user.start_time)


# --------------------------------------------------------------------------- a patch that is broken
def broken(patch: PatchSpec) -> PatchSpec:
    """The same patch with a tap that cannot be imported, and with it the model file."""
    files = {**patch.files, "fleetdump_tap.py": "raise ImportError('broken on purpose')\n"}
    return dataclasses.replace(patch, files=files, sha256="0" * 64)


@pytest.fixture
def in_place(sglang_env: SglangEnv, tmp_path: Path) -> Iterator[Host]:
    server = ServerSpec(
        "main",
        str(sglang_env.python),
        str(sglang_env.model),
        free_port(),
        args=list(recipe.SERVER_ARGS),
        env=recipe.server_env(),
    )
    with connect(config_of(tmp_path, server), ConnectOptions(operator="tester@here")) as made:
        try:
            yield made
        finally:
            stop(made, [], lambda _: None)
            revert(made, lambda _: None)


def test_a_model_file_that_fails_to_import_is_an_error_that_names_it(in_place: Host) -> None:
    """SGLang falls back to another implementation without a word; ready it is not."""
    plan = DeployPlan(broken(load_patch(find_patch("hidden-states"))))
    (server,) = deploy(in_place, plan, lambda _: None).servers
    assert server.outcome in ("wrong_model", "died"), server
    assert "broken on purpose" in server.detail
