"""How many rows a forward of a server can have, and whether the tap's buffers take them. Pure.

The tap gathers a forward on the device, in ``device_bytes``: what is larger is skipped, and with room for less than two
each forward waits until the one before is copied to the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional, Sequence

from fleetdump.agent.arguments import option_value
from fleetdump.agent.hostmessages import ModelFacts
from fleetdump.agent.protocol import Finding
from fleetdump.agent.specs import ServerSpec

KEY = "forward"
MIB = 1 << 20
DEFAULT_CHUNKS = ((20 << 10, 2048), (60 << 10, 4096), (160 << 10, 8192))
"""SGLang's ``--chunked-prefill-size`` by memory of the GPU below so many MiB: the largest of 0.5.5 to 0.5.23."""
LARGEST_CHUNK = 16384
"""The same above, and where the memory is not known."""
CPU_CHUNK = 4096
MAX_PREFILL = 16384
"""SGLang's default of ``--max-prefill-tokens``, which counts where chunks are switched off."""
ITEM_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}


@dataclass
class Forward:
    """The most rows of one forward, whether the server's arguments say so, and the argument that decides."""

    rows: int
    given: bool
    flag: str


def largest_forward(argv: Sequence[str], dp: int, gpu_mib: Optional[int]) -> Forward:
    """Of a server with these arguments; ``gpu_mib`` is None on the CPU, 0 where it is not known. Raises ``ValueError``
    for a size that is no number. Data parallelism inside attention divides the chunk."""
    flag = "--chunked-prefill-size"
    text = option_value(argv, (flag,))
    rows = int(text) if text else default_chunk(gpu_mib)
    if rows <= 0:
        flag, text = "--max-prefill-tokens", option_value(argv, ("--max-prefill-tokens",))
        rows = int(text) if text else MAX_PREFILL
    elif "--enable-dp-attention" in argv:
        rows = max(1, rows // dp)
    return Forward(rows, bool(text), flag)


def default_chunk(gpu_mib: Optional[int]) -> int:
    """What SGLang takes for ``--chunked-prefill-size`` without being told."""
    if gpu_mib is None:
        return CPU_CHUNK
    return next((chunk for limit, chunk in DEFAULT_CHUNKS if 0 < gpu_mib < limit), LARGEST_CHUNK)


def row_bytes(server: ServerSpec, model: ModelFacts, slots: int) -> int:
    """Bytes of a captured row of ``slots`` states, 0 when model and arguments do not tell. Quantised models compute in
    16 bits."""
    asked = option_value(server.args, ("--dtype",), "auto")
    return slots * model.hidden_size * ITEM_BYTES.get(model.dtype if asked == "auto" else asked, 2)


def judge(forward: Forward, row: int, device_bytes: int, ring_bytes: int) -> List[Finding]:
    """Whether buffers of these sizes take forwards of ``forward.rows`` rows of ``row`` bytes, and what to set."""
    room, wanted = device_bytes // row, forward.rows * row
    what = (
        f"a forward has up to {forward.rows} rows of {row} bytes ({forward.flag}{'' if forward.given else ', default'})"
    )
    two = f"capture.device_bytes: {_mib(2 * wanted)}"
    if ring_bytes < row:
        text = f"a captured row takes {row} bytes, capture.ring_bytes is {ring_bytes}"
        return [Finding(KEY, "blocker", text, f"set capture.ring_bytes to a thousand rows or more, {_mib(1000 * row)}")]
    if room < forward.rows:
        fix = f"set {two}, or give the server --chunked-prefill-size {smaller(room)}" if smaller(room) else f"set {two}"
        text = f"{what}; {room} fit into capture.device_bytes ({device_bytes}), larger ones are not captured"
        return [Finding(KEY, "blocker" if forward.given else "warning", text, fix)]
    if room < 2 * forward.rows:
        text = f"{what}; capture.device_bytes ({device_bytes}) has no room for two, so each waits for the one before"
        return [Finding(KEY, "warning", text, f"set {two}")]
    return [Finding(KEY, "ok", f"{what}; two take {_mib(2 * wanted)} of capture.device_bytes")]


def smaller(room: int) -> int:
    """A chunk size that fits into ``room`` rows twice, or at least once: a multiple of any page size; 0 if none is."""
    return room // 2 // 128 * 128 or room // 128 * 128


def _mib(size: int) -> str:
    """A size as the inventory takes it, rounded up."""
    return f"{-(-size // MIB)}MiB"
