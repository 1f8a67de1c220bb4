"""What of a patch a release and its models get: the fewest files, and a refusal by name before anything is touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleetdump.agent.applicable import architectures_of, choose_edits
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.specs import Edit, PatchSpec
from fleetdump.patches import load_patch

OURS = load_patch(Path(__file__).resolve().parents[2] / "patches" / "hidden-states")


def an_edit(module: str, first: str = "", last: str = "") -> Edit:
    return Edit(module, "*Model", "forward", [], first_release=first, last_release=last)


SPEC = PatchSpec(
    "p",
    "1",
    "00",
    [
        an_edit("old", "0.5.5", "0.5.20"),
        an_edit("own", "0.5.21"),
        an_edit("old", "0.5.21"),
        an_edit("all", "", "0.5.9"),
    ],
    architectures={"Old": ["old"], "Own": ["own", "old"], "Late": ["own"]},
    refused={"Other": "its stream is another"},
)


def modules(release: str, *architectures: str, spec: PatchSpec = SPEC) -> list[str]:
    return list(dict.fromkeys(edit.module for edit in choose_edits(spec, release, architectures)))


@pytest.mark.parametrize(
    ("release", "architectures", "chosen"),
    [
        ("0.5.20", ["Old"], ["old"]),
        ("0.5.20", ["Own"], ["old"]),  # before its loop was its own
        ("0.5.21", ["Own"], ["own"]),
        ("0.5.24", ["Own"], ["own"]),
        ("0.5.21", ["Own", "Old"], ["old", "own"]),  # two servers on one host
        ("0.5.9", ["Own"], ["old", "all"]),  # a module of no architecture goes to all
        ("0.5.9.post1", ["Old"], ["old", "all"]),
        ("0.5.10", [], ["old"]),  # a model that is not here yet may be any
        ("0.5.21", [], ["old", "own"]),
    ],
)
def test_the_fewest_modules_are_chosen(release: str, architectures: list[str], chosen: list[str]) -> None:
    assert modules(release, *architectures) == chosen


@pytest.mark.parametrize(
    ("release", "architecture", "what", "why"),
    [
        ("0.5.20", "Other", "architecture Other", "its stream is another"),
        ("0.5.20", "Strange", "architecture Strange", "it knows Late, Old, Own"),
        ("0.5.20", "Late", "Late on sglang 0.5.20", "release 0.5.20 is outside 0.5.21 to any"),
        ("", "Old", "sglang ", "outside"),
    ],
)
def test_a_model_or_release_that_the_patch_is_not_for_is_named(
    release: str, architecture: str, what: str, why: str
) -> None:
    with pytest.raises(AgentFailure) as caught:
        choose_edits(SPEC, release, ["Old", architecture])
    assert caught.value.error.code == "conflict"
    assert what in caught.value.error.what
    assert why in caught.value.error.why


def test_a_patch_without_a_map_goes_to_every_module_of_the_release() -> None:
    spec = PatchSpec("p", "1", "00", [an_edit("a"), an_edit("b", "0.5.21")])
    assert modules("0.5.20", "Anything", spec=spec) == ["a"]
    assert modules("0.5.21", "Anything", spec=spec) == ["a", "b"]


def test_architectures_come_from_the_models_and_one_unknown_makes_all_unknown(tmp_path: Path) -> None:
    for name in ("Old", "Own"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"architectures": [name], "num_hidden_layers": 1}))
        (tmp_path / name / "model.safetensors").write_bytes(b"")
    known = [str(tmp_path / "Old"), str(tmp_path / "Own")]
    assert architectures_of(known) == ["Old", "Own"]
    assert architectures_of([*known, "somebody/model-to-download"]) == []
    assert architectures_of([]) == []


# --------------------------------------------------------------------------- our patch
@pytest.mark.parametrize("release", ["0.5.5", "0.5.12.post1", "0.5.20", "0.5.21", "0.5.23", "0.5.24"])
def test_ours_goes_into_one_model_file_and_before_0_5_10_into_the_scheduler(release: str) -> None:
    for architecture in OURS.architectures:
        chosen = modules(release, architecture, spec=OURS)
        assert [m for m in chosen if "models" not in m] == (
            ["sglang.srt.managers.schedule_batch"] if release == "0.5.5" else []
        )
        assert len([m for m in chosen if "models" in m]) == 1


@pytest.mark.parametrize(
    "architecture",
    [
        "DeepseekV4ForCausalLM",
        "Glm5NextForConditionalGeneration",
        "KimiK3ForConditionalGeneration",
        "KimiLinearForCausalLM",
    ],
)
def test_ours_refuses_models_whose_residual_is_another(architecture: str) -> None:
    with pytest.raises(AgentFailure, match=architecture) as caught:
        choose_edits(OURS, "0.5.23", [architecture])
    assert "residual" in caught.value.error.why


def test_ours_is_for_no_release_before_0_5_5() -> None:
    with pytest.raises(AgentFailure, match=r"not for sglang 0[.]5[.]4[.]post3"):
        choose_edits(OURS, "0.5.4.post3", [])
