"""Manifest lines for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fleetdump.agent.formats import ManifestLine, ManifestPiece, TokenRef
from fleetdump.agent.jsonl import encode_line


def manifest_line(name: str, rows: int = 5, shards: Sequence[str] = ("s0",), **changes: object) -> ManifestLine:
    """A good line of sample ``name`` with one piece of ``rows`` rows in each of ``shards``."""
    pieces = [
        ManifestPiece(shard, f"{name}:{n * rows}", n * rows, rows, 0, rows * 16, 1, [0, 1])
        for n, shard in enumerate(shards)
    ]
    line = ManifestLine(
        id=name,
        run="r1",
        server="main",
        host="m",
        attempt=1,
        tokens=rows * len(shards),
        supervised=2,
        ids_sha256="i",
        pieces=pieces,
        token_shard=TokenRef("tokens", f"{name}/1:ids", f"{name}/1:mask", 1, 2),
        dtype="BF16",
        hidden=4,
        layers={"input": [1], "output": [0]},
        final="pre_norm",
        norm="norm-main-0000000a.safetensors",
        engine="sglang 0.5.20",
        patch_sha256="p",
        model_sha256="m",
        template_sha256="t",
        settings_sha256="s",
        t=1.0,
    )
    return replace(line, **changes)  # type: ignore[arg-type]


def text_of(line: ManifestLine) -> str:
    return encode_line(line).decode().rstrip("\n")
