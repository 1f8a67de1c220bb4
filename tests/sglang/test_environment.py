"""The CPU recipe itself: a copy that can be patched, a model that can be compared, and a check that finds faults."""

import json
import os
import shutil
import subprocess
import urllib.request

import pytest
from safetensors.numpy import load_file, save_file

from demo.sglang_cpu import recipe
from tests.sglang.cpuserver import copy_of, session_pids, start_server

pytestmark = pytest.mark.sglang

FACTS = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
from reference_check import Reference
torch.set_num_threads(1)
reference = Reference(sys.argv[2])
facts = []
for row in json.load(sys.stdin):
    ids, mask = reference.tokens(row["messages"])
    _, margins = reference.states(ids, [1])
    facts.append({"ids": ids, "mask": mask, "margin": float(margins.min())})
print(json.dumps(facts))
"""

COLLECTED = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from reference_check import Reference
from safetensors.torch import save_file
torch.set_num_threads(1)
reference, out, lines = Reference(sys.argv[2]), Path(sys.argv[3]), []
(out / "host").mkdir()
for row in json.load(sys.stdin):
    ids, mask = reference.tokens(row["messages"])
    states, _ = reference.states(ids, [1, 3, 5])
    half, name = len(ids) // 2, row["id"]
    save_file({"a": states[:half].contiguous(), "b": states[half:].contiguous()}, out / "host" / (name + ".s"))
    save_file({"ids": torch.tensor(ids, dtype=torch.int32), "mask": torch.tensor(mask, dtype=torch.uint8)},
              out / "host" / (name + ".t"))
    whole = {"shard": name + ".s", "slots": [0, 1, 2, 3]}
    pieces = [{**whole, "name": "b", "start": half, "rows": len(ids) - half},
              {**whole, "name": "a", "start": 0, "rows": half}]
    lines.append({"id": name, "path": "host", "tokens": len(ids), "hidden": states.shape[-1], "pieces": pieces,
                  "layers": {"input": [1, 3, 5]},
                  "token_shard": {"shard": name + ".t", "ids": "ids", "mask": "mask"}})
(out / "manifest.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
"""


def run_python(env, code, *arguments, stdin=""):
    command = [str(env.python), "-c", code, str(recipe.ROOT / "demo"), str(env.model), *map(str, arguments)]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, env={**os.environ, **env.env})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def conversations():
    rows = [json.loads(line) for line in recipe.CONVERSATIONS.open(encoding="utf-8")]
    return [rows[0], rows[5], rows[14], rows[63]]


def expected_tokens(messages):
    """Number of ids and the loss mask, from the template and bytes alone: one id a byte, a role or an end."""
    mask = []
    for message in messages:
        size = len(message["content"].encode())
        mask += [0] + ([1] * (size + 1) if message["role"] == "assistant" else [0] * size)
    return mask


def test_a_copy_is_apart_from_the_original(sglang_installed, tmp_path_factory):
    with copy_of(sglang_installed, tmp_path_factory) as copy:
        original = sglang_installed.package / "version.py"
        before = original.read_bytes()
        fresh = copy.package / "version.py.new"
        fresh.write_bytes(before + b"# patched\n")
        os.replace(fresh, copy.package / "version.py")
        assert original.read_bytes() == before
        where = "import importlib.util as u; print(u.find_spec('sglang').origin)"
        origin = subprocess.run([copy.python, "-c", where], capture_output=True, text=True, check=True).stdout
        assert origin.startswith(str(copy.package))
    assert not copy.python.exists()


def test_masks_and_margins_are_exact(sglang_env, conversations):
    if sglang_env.model != recipe.MODEL:
        pytest.skip("another model than the demo's is set by FLEETDUMP_SGLANG_MODEL")
    facts = json.loads(run_python(sglang_env, FACTS, stdin=json.dumps(conversations)))
    for row, fact in zip(conversations, facts, strict=True):
        assert fact["mask"] == expected_tokens(row["messages"]), row["id"]
        assert fact["margin"] >= 1e-3, row["id"]


@pytest.fixture(scope="module")
def right(sglang_env, conversations, tmp_path_factory):
    """A right manifest and right shards of a few conversations, each in two pieces."""
    rows, folder = conversations[:3], tmp_path_factory.mktemp("right")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_python(sglang_env, COLLECTED, folder, stdin=json.dumps(rows))
    return folder


@pytest.fixture
def collected(right, tmp_path):
    """A copy of it that may be spoilt."""
    return shutil.copytree(right, tmp_path / "collected")


def reference_check(env, folder):
    command = [str(env.python), str(recipe.ROOT / "demo" / "reference_check.py")]
    command += ["--manifest", str(folder / "manifest.jsonl"), "--data", str(folder), "--model", str(env.model)]
    command += ["--conversations", str(folder / "rows.jsonl")]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env.env})


def spoil(path, key, index, by):
    tensors = load_file(path)
    flat = tensors[key].reshape(-1)
    flat[index] += flat.dtype.type(by)
    save_file({**tensors, key: flat.reshape(tensors[key].shape)}, path)


def test_the_check_passes_right_data(sglang_env, collected):
    found = json.loads(reference_check(sglang_env, collected).stdout)
    assert (found["samples"], found["max_rel_err"], found["rows_excluded"]) == (3, 0.0, 0)
    assert found["lost"] == found["duplicated"] == found["wrong_ids"] == found["wrong_masks"] == []


def test_the_check_finds_every_kind_of_fault(sglang_env, collected):
    manifest = collected / "manifest.jsonl"
    first, second, third = manifest.read_text().splitlines(keepends=True)
    spoil(collected / "host" / "c01.s", "b", 7, 0.01)
    spoil(collected / "host" / "c06.t", "mask", 0, 1)
    manifest.write_text(first + second + second)
    found = json.loads(reference_check(sglang_env, collected).stdout)
    assert 1e-4 < found["max_rel_err"] < 1
    assert found["worst"].startswith("c01")
    assert (found["lost"], found["duplicated"], found["wrong_masks"]) == ([json.loads(third)["id"]], ["c06"], ["c06"])

    spoil(collected / "host" / "c06.t", "ids", 0, 1)
    assert json.loads(reference_check(sglang_env, collected).stdout)["wrong_ids"] == ["c06"]

    gap = json.loads(first)
    gap["pieces"] = [piece for piece in gap["pieces"] if piece["start"]]
    manifest.write_text(json.dumps(gap) + "\n")
    assert "are missing" in reference_check(sglang_env, collected).stderr


@pytest.mark.nightly  # every other test with a server shows it too
@pytest.mark.parametrize("tp", [1, 2])
def test_a_server_by_hand_answers_and_leaves_nothing(sglang_env, tmp_path, tp):
    with start_server(sglang_env, tmp_path / "server.log", tp=tp) as server:
        body = {"input_ids": [4, 40, 5], "sampling_params": {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}}
        request = urllib.request.Request(
            f"{server.url}/generate", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["meta_info"]["completion_tokens"] == 2
        assert "type=DeepseekV3ForCausalLM" in (tmp_path / "server.log").read_text()
    assert session_pids(server.pid) == []
