"""The ends of a checkpoint: embeddings and lm_head, read slice by slice from its safetensors files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fleetdump.worker.capturedrows import STORED, Array, as_float32, read_header_of

SLICE_ROWS = 8192
"""Rows of lm_head that are in memory as float32 at a time."""
HEADS = ("lm_head.weight", "output.weight")
EMBEDDINGS = ("embed_tokens.weight", "tok_embeddings.weight", "wte.weight")


class NotFound(Exception):
    """The checkpoint has no such tensor, or none that can be read (quantised, broken); the text says which."""


class Checkpoint:
    """Folder of a model: its settings, and where its tensors lie. A model without a readable one has no settings."""

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            config = {}
        self.settings: dict[str, Any] = {**config, **(config.get("text_config") or {})}
        """config.json, with what a multimodal model says of its language model on top."""

    @property
    def depth(self) -> int:
        """Number of layers, -1 when config.json does not say."""
        return int(self.settings.get("num_hidden_layers", -1))

    def weight(self, endings: Sequence[str]) -> Weight:
        """The tensor whose name ends so; of several the one with the shortest name, which belongs to the model itself
        and not to a layer that predicts further tokens. Raises ``NotFound``."""
        try:
            places = self._places()
            for ending in endings:
                names = [name for name in places if name == ending or name.endswith("." + ending)]
                if names:
                    return Weight(self.folder / places[min(names, key=len)], min(names, key=len))
        except (OSError, ValueError, LookupError) as error:
            raise NotFound(f"{self.folder} cannot be read: {error}") from error
        raise NotFound(f"{self.folder} has no tensor {' or '.join(endings)} in safetensors files")

    def _places(self) -> dict[str, str]:
        """File of each tensor, by its name."""
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            return dict(json.loads(index.read_bytes())["weight_map"])
        files = sorted(self.folder.glob("*.safetensors"))
        return {tensor.name: file.name for file in files for tensor in read_header_of(file).tensors}


class Weight:
    """A matrix of a checkpoint, ``[rows, hidden]``, mapped and not loaded. Raises ``NotFound`` when it is not one of
    floats, and ``OSError`` or ``ValueError`` for a file that is not what it should be."""

    def __init__(self, path: Path, name: str):
        header = read_header_of(path)
        tensor = {tensor.name: tensor for tensor in header.tensors}[name]
        if tensor.dtype not in STORED or len(tensor.shape) != 2:
            raise NotFound(f"{name} is {tensor.dtype} {tensor.shape}")
        self._dtype = tensor.dtype
        offset = header.data_start + tensor.offset
        self._stored: Array = np.memmap(path, STORED[tensor.dtype], "r", offset, tuple(tensor.shape))

    def __len__(self) -> int:
        return len(self._stored)

    def rows(self, which: Any) -> Array:
        """Float32 rows; ``which`` is a slice or a list of numbers."""
        return as_float32(np.asarray(self._stored[which]), self._dtype)


class OutputHead:
    """The map from normed final states to logits, as the served model has it."""

    def __init__(self, checkpoint: Checkpoint):
        settings = checkpoint.settings
        self._weight = _head_weight(checkpoint)
        self._vocabulary = min(len(self._weight), int(settings.get("vocab_size") or len(self._weight)))
        self._scale = float(settings.get("logit_scale") or 1.0) / float(settings.get("logits_scaling") or 1.0)
        self._cap = float(settings.get("final_logit_softcapping") or 0.0)

    def logits(self, states: Array) -> Array:
        """Float32 ``[n, vocabulary]`` of normed states ``[n, hidden]``."""
        slices = [
            slice(start, min(start + SLICE_ROWS, self._vocabulary)) for start in range(0, self._vocabulary, SLICE_ROWS)
        ]
        logits = np.concatenate([states @ self._weight.rows(each).T for each in slices], axis=1)
        logits *= self._scale
        return self._cap * np.tanh(logits / self._cap) if self._cap > 0 else logits


def _head_weight(checkpoint: Checkpoint) -> Weight:
    """lm_head, or the embeddings where the two are tied; a checkpoint without lm_head ties them unless it denies it."""
    tied = checkpoint.settings.get("tie_word_embeddings")
    if tied:
        return checkpoint.weight(EMBEDDINGS)
    try:
        return checkpoint.weight(HEADS)
    except NotFound:
        if tied is False:
            raise
        return checkpoint.weight(EMBEDDINGS)
