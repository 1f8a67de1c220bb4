"""How far a vLLM server's start is, by its log, whatever was said since and however the log is torn."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetdump.agent.evidence_engine import LogFacts
from fleetdump.agent.probes.logfile import LogReader
from fleetdump.agent.probes.vllmlog import VllmLog
from fleetdump.agent.specs import PHASES

LINES = (
    ("imports", "(EngineCore_DP0 pid=7) INFO 11-28 03:10:01 [core.py:93] Initializing a V1 LLM engine (v0.18.0) with"),
    ("imports", "INFO 05-11 17:59:14 [api_server.py:1090] vLLM API server version 0.8.5"),
    ("init", "(Worker pid=9) INFO [parallel_state.py] world_size=8 rank=7 local_rank=7 distributed_init_method=tcp://h:3"),
    ("init", "INFO 08-31 09:50:46 pynccl.py:63] vLLM is using nccl==2.20.5"),
    ("weights", "INFO 11-10 17:05:23 model_runner.py:1056] Starting to load model /models/m..."),
    ("weights", "Loading safetensors checkpoint shards:  64% Completed | 105/163 [09:30<04:59,  5.16s/it]"),
    ("kv_pool", "(Worker_TP1 pid=9) INFO 11-28 [default_loader.py:262] Loading weights took 0.38 seconds"),
    ("kv_pool", "INFO 11-10 17:06:02 model_runner.py:1067] Loading model weights took 14.9888 GB"),
    ("jit", "(Worker_TP0 pid=8) INFO 10-22 09:33:48 [monitor.py:34] torch.compile takes 39.60 s in total"),
    ("jit", "(EngineCore_DP0 pid=7) INFO 10-22 [kv_cache_utils.py:1087] GPU KV cache size: 162,704 tokens"),
    ("jit", "INFO 11-10 17:06:10 gpu_executor.py:122] # GPU blocks: 27896, # CPU blocks: 2048"),
    ("capture", "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  61%|######| 41/67 [00:06<00:04, 6.3it/s]"),
    ("capture", "INFO 11-10 model_runner.py:1402] Capturing cudagraphs for decoding. This may lead to unexpected"),
    ("capture", "Capturing CUDA graph shapes:   0%|          | 0/35 [00:00<?, ?it/s]"),
    ("http", "INFO 07-28 23:02:27 [core.py:193] init engine (profile, create kv cache, warmup model) took 1.44 s"),
    ("http", "INFO 05-11 17:59:14 [api_server.py:1090] Starting vLLM API server on http://0.0.0.0:8080"),
    ("serving", "(APIServer pid=1) INFO:     Application startup complete."),
)  # fmt: skip
CHATTER = "(Worker_TP0 pid=8) WARNING 11-28 03:13:{:02} [cuda.py:410] something that says nothing of a phase\n"
SGLANG = "[2026-01-01 00:00:01 TP0] Init torch distributed begin.\n"


def read(path: Path, first: str, more: str = "") -> LogFacts:
    """The agent's look at a log that says ``more`` between its two reads."""
    path.write_text(first)
    reader = LogReader(str(path), 2)
    reader.first()
    with path.open("a") as file:
        file.write(more)
    return reader.second()


@pytest.mark.parametrize(("phase", "line"), LINES, ids=lambda text: text[-30:])
def test_line_tells_its_phase(phase: str, line: str) -> None:
    log = VllmLog()
    log.feed("nothing of this is known")
    assert log.phase == ""
    log.feed(line)
    assert log.phase == phase
    assert phase in PHASES


def test_phase_is_known_however_much_was_said_since(tmp_path: Path) -> None:
    start = "".join(f"{line}\n" for _, line in LINES[:10])
    facts = read(tmp_path / "log", start + "".join(CHATTER.format(n) for n in range(90)))
    assert facts.phase == "jit"
    assert not any("KV cache size" in line for line in facts.tail)
    assert facts.ranks == [], "of no rank does it say anything: most lines come from one of them"


@pytest.mark.parametrize("end", ["", "\r", "\n"])
def test_bar_that_was_drawn_once(end: str, tmp_path: Path) -> None:
    """At its first step it stands: tqdm ends it with a carriage return, or with nothing at all."""
    bar = "Capturing CUDA graph shapes:   0%|          | 0/35 [00:00<?, ?it/s]"
    facts = read(tmp_path / "log", f"{LINES[9][1]}\n{bar[:20]}", bar[20:] + end)
    assert facts.phase == "capture"
    assert facts.tail[-1] == bar
    assert len(facts.tail) == 2


def test_a_start_in_the_same_log_begins_anew(tmp_path: Path) -> None:
    served = "".join(f"{line}\n" for _, line in LINES)
    assert read(tmp_path / "log", served).phase == "serving"
    assert read(tmp_path / "log", served, LINES[0][1] + "\n").phase == "imports"


def test_phase_of_sglang_is_that_of_its_marks(tmp_path: Path) -> None:
    bar = "Loading safetensors checkpoint shards:  64% Completed | 105/163 [09:30<04:59,  5.16s/it]\n"
    second = SGLANG.replace("TP0", "TP1")
    assert read(tmp_path / "log", SGLANG + second + bar).phase == "init"
