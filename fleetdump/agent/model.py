"""What a model's directory says about it, without loading anything."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any, Dict

from fleetdump.agent.hostmessages import ModelFacts
from fleetdump.agent.protocol import AgentFailure

UNKNOWN = "unknown"
"""What the config.json does not say."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def read_model(path: str, needs_weights: bool = True) -> ModelFacts:
    """Facts from ``config.json`` and an identity over it and the weight files' names and sizes; raises
    ``AgentFailure`` not_found, also when there are no weights and they are needed."""
    folder = os.path.expanduser(path)
    try:
        with open(os.path.join(folder, "config.json"), "rb") as file:
            raw = file.read()
        config = json.loads(raw)
        names = sorted(name for name in os.listdir(folder) if name.endswith(WEIGHT_SUFFIXES))
        sizes = [os.stat(os.path.join(folder, name)).st_size for name in names]
    except (OSError, ValueError) as error:
        raise AgentFailure(
            "not_found",
            "there is no readable model",
            where=folder,
            why=str(error),
            next_step="set `model_path` in the inventory to a directory with config.json and weights",
        ) from error
    if not names and needs_weights:
        raise AgentFailure(
            "not_found",
            "the model directory has no weight files",
            where=folder,
            why=f"none of {', '.join('*' + s for s in WEIGHT_SUFFIXES)}",
            next_step="finish the download of the model",
        )
    digest = hashlib.sha256(raw)
    digest.update(json.dumps(list(zip(names, sizes))).encode())
    return facts_of(config, digest.hexdigest())


def facts_of(config: Dict[str, Any], sha256: str) -> ModelFacts:
    """What a config.json says; a multimodal model's sizes stand in its ``text_config``."""
    text = _text_config(config)
    return ModelFacts(
        architecture=str((config.get("architectures") or [UNKNOWN])[0]),
        num_layers=int(text.get("num_hidden_layers", 0)),
        hidden_size=int(text.get("hidden_size", 0)),
        dtype=str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or UNKNOWN),
        sha256=sha256,
    )


def vocabulary_size(path: str) -> int:
    """Ids that the model at ``path`` knows; 0 when no config.json there says."""
    try:
        with open(os.path.join(os.path.expanduser(path), "config.json"), "rb") as file:
            return int(_text_config(json.load(file)).get("vocab_size", 0))
    except (OSError, ValueError):
        return 0


def _text_config(config: Dict[str, Any]) -> Dict[str, Any]:
    if "num_hidden_layers" in config:
        return config
    nested = [v for v in config.values() if isinstance(v, dict) and "num_hidden_layers" in v and "vocab_size" in v]
    return nested[0] if nested else config
