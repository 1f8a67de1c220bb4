"""Logs of a start as SGLang and vLLM write them, as far as a case needs them."""

from __future__ import annotations


def sgl(ranks: int, *after: str, at: str = "2026-11-28 03:1") -> str:
    """SGLang's log of a start as far as ``after``, which every rank says in turn."""
    lines = [f"[{at}0:11] server_args=ServerArgs(model_path='/models/m', tp_size={ranks}, port=9123)"]
    for n, text in enumerate(after):
        lines += [f"[{at}{1 + n // 2}:{10 + n} TP{r}] {text}" for r in range(ranks)]
    return "\n".join(lines) + "\n"


INIT = ("Init torch distributed begin.", "Init torch distributed ends. mem usage=1.21 GB")
LOAD = (*INIT, "Load weight begin. avail mem=138.10 GB")
LOADED = (
    *LOAD,
    "Load weight end. type=DeepseekV3ForCausalLM, dtype=torch.bfloat16, avail mem=60.02 GB, mem usage=78.08 GB.",
)
POOLED = (*LOADED, "KV Cache is allocated. #tokens: 401234, KV size: 26.1 GB", "Memory pool end. avail mem=31.45 GB")
CAPTURE = (*POOLED, "Capture cuda graph begin. This can take up to several minutes. avail mem=31.20 GB")


def vllm_log(*lines: str, who: str = "EngineCore_DP0 pid=31001") -> str:
    """vLLM's log; each line is "minute:second [file:line] text"."""
    said = "".join(f"({who}) INFO 11-28 03:{line}\n" for line in lines)
    return "INFO 11-28 03:09:58 [__init__.py:241] Automatically detected platform cuda.\n" + said


ENGINE = "10:01 [core.py:93] Initializing a V1 LLM engine (v0.18.0) with config: model='/models/x'"
STARTED = (
    ENGINE,
    "10:09 [pynccl.py:113] vLLM is using nccl==2.27.5",
    "10:14 [gpu_model_runner.py:3900] Starting to load model /models/x...",
    "12:10 [default_loader.py:314] Loading weights took 110.02 seconds",
    "12:50 [monitor.py:34] torch.compile takes 31.12 s in total",
    "13:02 [kv_cache_utils.py:1305] GPU KV cache size: 812,400 tokens",
    "13:31 [gpu_model_runner.py:5000] Graph capturing finished in 21 secs, took 1.90 GiB",
    "13:31 [core.py:259] init engine (profile, create kv cache, warmup model) took 81.02 seconds",
)
OPENED = "(APIServer pid=31000) INFO:     Application startup complete.\n"
