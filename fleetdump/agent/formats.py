"""File formats shared by agent, driver and controller (docs/formats.md): names, records, safetensors headers, hashes.

Standard library alone, Python 3.8. Nothing here opens a network or a process.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional
from urllib.parse import quote, unquote

FORMAT_VERSION = 1
RID_PREFIX = "fleetdump"
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
SERVER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}\Z")


@dataclass
class Rid:
    """The request id fleetdump gives to SGLang: which run, which sample, which attempt (from 1)."""

    run: str
    sample: str
    attempt: int

    def __str__(self) -> str:
        return f"{RID_PREFIX}/{self.run}/{quote(self.sample, safe='')}/{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> Optional[Rid]:
        """The parts of ``text``, or None when it is not a rid of ours."""
        parts = text.split("/")
        if len(parts) != 4 or parts[0] != RID_PREFIX or not parts[3].isdigit():
            return None
        return cls(parts[1], unquote(parts[2]), int(parts[3]))


@dataclass
class PieceRecord:
    """Journal line ``piece``; see docs/formats.md."""

    name: str
    rid: str
    start: int
    rows: int
    ids_sha256: str
    shard: str
    dtype: str
    shape: List[int]
    offset: int
    bytes: int
    crc32: int
    t: float
    kind: str = "piece"
    v: int = FORMAT_VERSION


@dataclass
class ShardRecord:
    """Journal line ``shard``: a closed shard's size and SHA-256."""

    shard: str
    bytes: int
    sha256: str
    t: float
    kind: str = "shard"
    v: int = FORMAT_VERSION


@dataclass
class SkipRecord:
    """Journal line ``skip``: a request of ours whose rows were not (all) written, with the reason."""

    rid: str
    reason: str
    detail: str
    t: float
    kind: str = "skip"
    v: int = FORMAT_VERSION


@dataclass
class ManifestPiece:
    """A piece of a sample, as the manifest names it. Offsets count from the shard's data section."""

    shard: str
    name: str
    start: int
    rows: int
    offset: int
    bytes: int
    crc32: int


@dataclass
class TokenRef:
    """Where a sample's ids (I32 ``[tokens]``) and loss mask (U8 ``[tokens]``) lie."""

    shard: str
    ids: str
    mask: str
    ids_crc32: int
    mask_crc32: int


@dataclass
class ManifestLine:
    """A sample that exists; see docs/formats.md. ``layers`` has the keys ``input`` and ``output``."""

    id: str
    run: str
    server: str
    host: str
    attempt: int
    tokens: int
    supervised: int
    ids_sha256: str
    pieces: List[ManifestPiece]
    token_shard: TokenRef
    dtype: str
    hidden: int
    layers: Dict[str, List[int]]
    final: str
    norm: str
    engine: str
    patch_sha256: str
    model_sha256: str
    template_sha256: str
    settings_sha256: str
    t: float
    path: str = ""
    """Set in the merged manifest: the folder of the pulled shards, relative to the data root."""
    v: int = FORMAT_VERSION


@dataclass
class RejectedLine:
    """A sample that will not exist, and why."""

    id: str
    run: str
    server: str
    reason: str
    detail: str
    attempts: int
    t: float
    v: int = FORMAT_VERSION


@dataclass
class Row:
    """One row of a data set on its way to a host: conversation, text or ids; exactly one of the three is set."""

    id: str
    messages: Optional[List[Dict[str, Any]]] = None
    text: Optional[str] = None
    input_ids: Optional[List[int]] = None
    loss_mask: Optional[List[int]] = None
    tools: Optional[List[Dict[str, Any]]] = None
    extra: Dict[str, Any] = field(default_factory=dict)
