"""What the tap takes of a forward's thread, without SGLang and a GPU: ``python thread_time.py PATCH_DIR ...``.

Under an interpreter with torch. Each folder's tap is driven through made-up forwards in a process of its own: small
operations between its calls, as launches are (each lets go of the interpreter's lock); then a sleep, as the device
computes; then Python, as the scheduler runs between two forwards. Its threads write to a temporary folder meanwhile.
Prints one JSON object a folder: by samples a batch the microseconds of processor time of the thread in the tap, the
median of ``REPETITIONS`` (on a busy machine the clock says more of the others), and how often it was blocked there; and
those of a forward without a request of ours, whose calls are ``first``, ``further`` and ``last``.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from typing import Any

SIZES = (1, 16, 64, 189, 256, 1024)
REPETITIONS = 60
ROWS = 8
HIDDEN = 128
"""Small, so that copying in memory, which a GPU does by itself, is little of it."""
LAYERS = 5
CAPTURED = [1, 2, 4]
LAUNCHES = 40
"""Operations between two calls of the tap."""
DEVICE_SECONDS = 0.15
SCHEDULER_SECONDS = 0.004


def main() -> None:
    if len(sys.argv) > 2 or "FLEETDUMP_TAP_CONFIG" not in os.environ:
        for patch in sys.argv[1:]:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                subprocess.run([sys.executable, __file__, patch], env=environment(folder), check=True)
        return
    sys.path.insert(0, sys.argv[1])
    print(json.dumps({"patch": sys.argv[1], **measure()}))


def environment(folder: str) -> dict[str, str]:
    """With a tap.json in ``folder``, where the tap writes too."""
    sizes = {"shard_bytes": 1 << 28, "header_bytes": 1 << 18, "ring_bytes": 1 << 29, "device_bytes": 1 << 28}
    settings = {"v": 1, "server": "main", "launch_id": "00000000", "layers": CAPTURED, "dir": f"{folder}/capture"}
    with open(f"{folder}/tap.json", "w") as file:
        json.dump({**settings, **sizes, "idle_close_seconds": 2.0, "ranks": 1}, file)
    return {**os.environ, "FLEETDUMP_TAP_CONFIG": f"{folder}/tap.json"}


def measure() -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    model = stand_in()
    import fleetdump_tap as tap

    for rid in ("others", "fleetdump/r/warm-up"):
        forward(tap, model, batch(1, rid))
    captured = {}
    for size in SIZES:
        made = [forward(tap, model, batch(size, f"fleetdump/r/{size}x{n}")) for n in range(REPETITIONS)]
        spent = statistics.median(sum(calls) for calls, _ in made)
        captured[size] = {"us": round(spent, 1), "blocked": round(statistics.mean(times for _, times in made), 2)}
        tap._tap._writer.drain(60)
    others = [forward(tap, model, batch(4, f"others/{n}"))[0] for n in range(REPETITIONS)]
    first, *further, last = [statistics.median(calls) for calls in zip(*others, strict=True)]
    tap._tap._writer.stop()
    inert = {"first": round(first, 2), "further": round(statistics.mean(further), 2), "last": round(last, 2)}
    return {"captured": captured, "inert": inert}


def stand_in() -> Any:
    """A model; makes ``sglang`` importable as far as the tap asks it."""
    import torch

    place = {"tp_rank": 0, "tp_size": 1, "attn_tp_rank": 0, "attn_dp_size": 1, "attn_cp_size": 1}
    layout = types.SimpleNamespace(**place, pp_rank=0, pp_size=1)
    arguments = types.SimpleNamespace(chunked_prefill_size=8192)
    for name in ("sglang", "sglang.srt", "sglang.srt.runtime_context"):
        sys.modules[name] = types.ModuleType(name)
    context: Any = sys.modules["sglang.srt.runtime_context"]
    context.get_parallel, context.get_server_args = (lambda: layout), (lambda: arguments)
    norm = types.SimpleNamespace(weight=torch.ones(HIDDEN, dtype=torch.bfloat16), variance_epsilon=1e-6)
    return types.SimpleNamespace(layers=[types.SimpleNamespace()] * LAYERS, norm=norm)


def batch(size: int, rid: str) -> Any:
    import torch

    mode = types.SimpleNamespace(name="EXTEND")
    rids = [f"{rid}-{number}/1" for number in range(size)]
    rows, starts, ids = [ROWS] * size, [0] * size, torch.arange(size * ROWS)
    return types.SimpleNamespace(
        forward_mode=mode, rids=rids, extend_seq_lens_cpu=rows, extend_prefix_lens_cpu=starts, input_ids=ids
    )


def line(tap: Any, model: Any, layer: int, states: Any, made: Any) -> None:
    """As the patch has it in the loop."""
    if made is not tap.idle:
        tap.before_layer(model, layer, states, made, residual=states)


def forward(tap: Any, model: Any, made: Any) -> tuple[list[float], int]:
    """Microseconds of each of the tap's calls, and how often the thread was blocked in them."""
    import torch

    states = torch.zeros(len(made.input_ids), HIDDEN, dtype=torch.bfloat16)
    small, spent, blocked = torch.randn(64, 64), [], 0
    calls: list[Callable[[], None]] = [
        lambda layer=layer: line(tap, model, layer, states, made)  # type: ignore[misc]
        for layer in range(LAYERS)
    ]
    for call in [*calls, lambda: tap.after_layers(model, states, made, residual=states)]:
        switches, start = _switches(), time.thread_time()
        call()
        spent.append((time.thread_time() - start) * 1e6)
        blocked += _switches() - switches
        for _ in range(LAUNCHES):
            torch.mm(small, small)
    time.sleep(DEVICE_SECONDS)
    end = time.perf_counter() + SCHEDULER_SECONDS
    while time.perf_counter() < end:
        pass
    return spent, blocked


def _switches() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


if __name__ == "__main__":
    main()
