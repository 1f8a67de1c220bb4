"""Which flags a patch adds, which it refuses under every name that releases have, and what a server must then say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleetdump.agent.flagrules import expectations, faults, patch_arguments, refused
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.specs import PatchSpec, ReleaseArg
from fleetdump.patches import load_patch

OURS = load_patch(Path(__file__).resolve().parents[2] / "patches" / "hidden-states")
RADIX, PIECEWISE, PREFILL = "--disable-radix-cache", "--disable-piecewise-cuda-graph", "--disable-prefill-cuda-graph"
FUSION = "--enforce-disable-flashinfer-allreduce-fusion"


# --------------------------------------------------------------------------- added
def test_arguments_follow_the_release() -> None:
    spec = PatchSpec("p", "1", "00", [], server_args=["--a", "1"])
    spec.release_args = [ReleaseArg("--old", last_release="0.5.13"), ReleaseArg("--new", "0.5.14")]
    assert patch_arguments(spec, "0.5.13.post1") == ["--a", "1", "--old"]
    assert patch_arguments(spec, "0.5.14") == ["--a", "1", "--new"]


@pytest.mark.parametrize(
    ("release", "flags"),
    [
        ("0.5.5", []),
        ("0.5.9", []),
        ("0.5.10", [PIECEWISE, FUSION]),
        ("0.5.10.post1", [PIECEWISE, FUSION]),
        ("0.5.13.post1", [PIECEWISE, FUSION]),
        ("0.5.14", [PREFILL, FUSION]),
        ("0.5.20", [PREFILL, FUSION]),
        ("0.5.24", [PREFILL, FUSION]),
    ],
)
def test_ours_adds_the_flags_that_a_release_has(release: str, flags: list[str]) -> None:
    assert patch_arguments(OURS, release) == [RADIX, *flags]


@pytest.mark.parametrize("release", ["0.5.11", "0.5.12.post1", "0.5.23", "0.5.24"])
def test_the_prefix_cache_may_stay_on_where_requests_have_keys(release: str) -> None:
    assert RADIX not in patch_arguments(OURS, release, [RADIX])
    assert not [one for one in expectations(OURS, release, [RADIX]) if one.flag == RADIX]


@pytest.mark.parametrize("release", ["0.5.5", "0.5.9", "0.5.10.post1"])
def test_before_that_the_cache_goes_off_whatever_the_user_wants(release: str) -> None:
    """Schedulers until 0.5.10 take ``extra_key`` and drop it (measured on real servers)."""
    with pytest.raises(AgentFailure, match=f"needs {RADIX} on sglang {release}") as caught:
        patch_arguments(OURS, release, [RADIX])
    assert caught.value.error.code == "conflict"
    assert "only from 0.5.11 on" in caught.value.error.why


def test_what_the_patch_needs_or_does_not_know_cannot_be_left_out() -> None:
    with pytest.raises(AgentFailure, match=f"needs {PREFILL}"):
        patch_arguments(OURS, "0.5.20", [PREFILL])
    with pytest.raises(AgentFailure, match="--no-such") as caught:
        patch_arguments(OURS, "0.5.20", ["--no-such"])
    assert caught.value.error.code == "usage"
    assert patch_arguments(OURS, "0.5.20", [PIECEWISE])[1:] == [PREFILL, FUSION], "it is not of this release"


# --------------------------------------------------------------------------- refused
@pytest.mark.parametrize(
    "args",
    [
        ["--enable-two-batch-overlap"],
        ["--enable-two-batch"],  # argparse takes an abbreviation
        ["--enable-prefill-cp"],
        ["--enable-prefill-context-parallel"],
        ["--enable-nsa-prefill-context-parallel"],
        ["--enable-dsa-prefill-context-parallel"],
        ["--attn-cp-size", "2"],
        ["--attention-context-parallel-size=2"],
        ["--moe-a2a-backend", "deepep"],
        ["--moe-a2a-backend=deepep"],
        ["--enable-attn-tp-input-scattered"],
        ["--enable-layernorm-sp"],
        ["--enable-megamoe-for-layernorm-sp"],
        ["--speculative-algorithm", "EAGLE3"],
        ["--speculative-algo", "EAGLE3"],
        ["--enable-piecewise-cuda-graph"],
        ["--enforce-piecewise-cuda-graph"],
        ["--enable-breakable-cuda-graph"],
        ["--cuda-graph-backend-prefill", "breakable"],
        ["--cuda-graph-backend-prefill=tc_piecewise"],
        ["--enable-torch-compile"],
        ["--enable_torch_compile"],  # as a key of a configuration file may be written
        ["--enable-pdmux"],
        ["--nnodes", "2"],
        ["--nnod=2"],
    ],
)
def test_what_ours_cannot_be_right_with_is_refused_by_every_name(args: list[str]) -> None:
    (text,) = refused(OURS, ["--mem-fraction-static", "0.8", *args, "--trust-remote-code"])
    assert text.startswith(args[0])
    assert len(text.partition(": ")[2]) > 20, "it says why"


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--attn-cp-size", "1"],
        ["--nnodes", "1"],
        ["--moe-a2a-backend", "none"],
        ["--moe-a2a-backend=None"],
        ["--cuda-graph-backend-prefill", "disabled"],
        ["--enable-torch-compile-debug-mode"],
        ["--enable-mixed-chunk", "--enable-dp-attention", "--chunked-prefill-size", "-1"],
        ["--speculative", "--e", "--", "-x"],  # several options begin so: argparse refuses it itself
        ["--attention-backend", "fa3", "--enable-p2p-check", "--moe-runner-backend", "triton"],
    ],
)
def test_everything_else_is_the_users_own(args: list[str]) -> None:
    assert [text for text in refused(OURS, args) if not text.startswith("--speculative")] == []


def test_all_that_is_wrong_is_named_at_once() -> None:
    found = list(refused(OURS, ["--enable-pdmux", "--moe-a2a-backend", "deepep"]))
    assert [text.split(":")[0] for text in found] == ["--enable-pdmux", "--moe-a2a-backend deepep"]


# --------------------------------------------------------------------------- what the server says
def said(**changes: Any) -> dict[str, Any]:
    """The settings of a real 0.5.20 that has what ours needs, as /server_info showed them, with changes."""
    info: dict[str, Any] = {
        "disable_radix_cache": True,
        "disable_prefill_cuda_graph": True,
        "cuda_graph_config": {"decode": {"backend": "full"}, "prefill": {"backend": "disabled"}},
        "enforce_disable_flashinfer_allreduce_fusion": True,
        "enable_two_batch_overlap": False,
        "moe_a2a_backend": "none",
        "attn_cp_size": 1,
        "speculative_algorithm": None,
        "cuda_graph_backend_prefill": None,
        "enable_torch_compile": False,
    }
    info["internal_states"] = [dict(info)]
    return {**info, **changes}


def found(info: dict[str, Any], log: list[str] | None = None, release: str = "0.5.20") -> list[str]:
    return list(faults(expectations(OURS, release), info, log or []))


LOG = [
    "Capture target decode cuda graph begin. backend=full",
    "Prefill batch, #new-seq: 1, #new-token: 29, #cached-token: 0, cuda graph: False",
    "Decode batch, #running-req: 1, cuda graph: True",
]


def test_a_server_that_has_it_all_has_no_fault() -> None:
    assert found(said(), LOG) == []


@pytest.mark.parametrize(
    ("changes", "flag", "seen"),
    [
        ({"disable_radix_cache": False}, RADIX, "disable_radix_cache = false"),
        ({"disable_prefill_cuda_graph": None}, PREFILL, "disable_prefill_cuda_graph = none"),
        (
            {"cuda_graph_config": {"prefill": {"backend": "breakable"}}},
            PREFILL,
            "cuda_graph_config.prefill.backend = breakable",
        ),
        ({"enforce_disable_flashinfer_allreduce_fusion": False}, FUSION, "= false"),
        ({"moe_a2a_backend": "deepep"}, "--moe-a2a-backend is on", "moe_a2a_backend = deepep"),
        ({"attn_cp_size": 2}, "--attn-cp-size is on", "attn_cp_size = 2"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm is on", "= eagle"),
        ({"enable_torch_compile": True}, "--enable-torch-compile is on", "= true"),
        ({"cuda_graph_backend_prefill": "breakable"}, "--cuda-graph-backend-prefill is on", "= breakable"),
    ],
)
def test_each_setting_that_is_not_so_is_named_with_what_was_seen(changes: dict[str, Any], flag: str, seen: str) -> None:
    (fault,) = found(said(**changes))
    assert fault.startswith(flag)
    assert seen in fault


def test_a_scheduler_of_its_own_mind_is_found() -> None:
    """The launcher's arguments are as wanted, but a rank resolved them otherwise."""
    states = [said()["internal_states"][0], {**said()["internal_states"][0], "moe_a2a_backend": "deepep"}]
    (fault,) = found(said(internal_states=states))
    assert "moe_a2a_backend = deepep" in fault


def test_a_setting_that_the_server_does_not_show_cannot_be_relied_on() -> None:
    info = said(internal_states=[])
    del info["disable_radix_cache"]
    del info["enable_two_batch_overlap"]  # what is not there is not on
    (fault,) = found(info)
    assert fault.startswith(f"{RADIX} did not take effect: /server_info has no disable_radix_cache")


@pytest.mark.parametrize(
    ("line", "flag"),
    [
        ("[..] Capture target prefill CUDA graph begin. backend=breakable, avail mem=1 GB", PREFILL),
        ("[..] Capture piecewise CUDA graph begin. avail mem=1 GB", PREFILL),
        ("[..] Prefill batch, #new-seq: 1, #new-token: 64, cuda graph: True", PREFILL),
    ],
)
def test_the_log_tells_what_the_settings_do_not(line: str, flag: str) -> None:
    (fault,) = found(said(), [*LOG, line])
    assert fault.startswith(f"{flag} did not take effect: the log says: [..]")


def test_what_sglang_logs_before_it_applies_the_flag_is_no_fault() -> None:
    """At TP 2 on Hopper 0.5.14 says that it enables the fusion, and then that the flag disables it."""
    line = "[..] Auto-enabling FlashInfer AllReduce Fusion on SM90/SM10X for DeepseekV3ForCausalLM"
    assert found(said(), [*LOG, line]) == []


def test_the_settings_of_older_releases() -> None:
    old = {"disable_radix_cache": True, "enable_piecewise_cuda_graph": False, "internal_states": [{}]}
    assert found(old, release="0.5.9") == []
    (fault,) = found({**old, "enable_piecewise_cuda_graph": True}, release="0.5.9")
    assert "--enable-piecewise-cuda-graph is on" in fault
    middle = {**old, "disable_piecewise_cuda_graph": True, "enforce_disable_flashinfer_allreduce_fusion": True}
    assert found(middle, release="0.5.12") == []
    assert len(found({**middle, "disable_piecewise_cuda_graph": False}, release="0.5.12")) == 1
