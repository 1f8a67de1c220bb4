"""The checks behind ``probe`` of what a server loads: the model's directory, or the hub that its name stands for."""

from __future__ import annotations

import os
from typing import List, Sequence

from fleetdump.agent import hub
from fleetdump.agent.arguments import option_value
from fleetdump.agent.findings import Checked, blocked
from fleetdump.agent.hostmessages import ModelFacts
from fleetdump.agent.launchplan import environment_of
from fleetdump.agent.model import facts_of, read_model
from fleetdump.agent.protocol import AgentFailure, Finding
from fleetdump.agent.specs import ServerSpec

KEY = "model"


def check_model(server: ServerSpec, layers: Sequence[int]) -> Checked:
    """The model's sizes, whether it can be loaded, and whether the wanted entry ids exist in it."""
    try:
        if hub.is_hub_name(server.model_path):
            return _check_hub(server, layers)
        model = read_model(server.model_path, _needs_weights(server))
    except AgentFailure as failure:
        return Checked([blocked(KEY, failure)])
    return Checked([Finding(KEY, "ok", _describe(model)), *_check_layers(model, layers)], {"model": model})


def _needs_weights(server: ServerSpec) -> bool:
    return option_value(server.args, ("--load-format",)) != "dummy"


def _describe(model: ModelFacts) -> str:
    return f"model {model.architecture}, {model.num_layers} layers, hidden {model.hidden_size}, {model.dtype}"


def _check_layers(model: ModelFacts, layers: Sequence[int]) -> List[Finding]:
    wrong = [layer for layer in layers if not 0 <= layer <= model.num_layers]
    if not wrong:
        return []
    fix = f"choose from 0 to {model.num_layers} with layer_ids: input, to {model.num_layers - 1} with output"
    text = f"entry ids {wrong} do not exist: {model.architecture} has {model.num_layers} layers"
    return [Finding("layers", "blocker", text, fix)]


def _check_hub(server: ServerSpec, layers: Sequence[int]) -> Checked:
    """A model of the hub: in this host's cache already, or there to be downloaded. Raises ``AgentFailure``."""
    env = environment_of(server)
    name, revision = server.model_path, option_value(server.args, ("--revision",), hub.MAIN)
    if hub.is_switched_on(env, "SGLANG_USE_MODELSCOPE"):
        text = f"model {name} comes from ModelScope; it is not looked at"
        return Checked([Finding(KEY, "warning", text, "prefer a local directory: hosts then cannot differ")])
    folder = hub.cached(name, revision, env)
    if folder and (not _needs_weights(server) or _has_weights(folder)):
        model = read_model(folder, needs_weights=False)
        text = f"{_describe(model)}, in the hub's cache here"
        return Checked([Finding(KEY, "ok", text), *_check_layers(model, layers)], {"model": model})
    model = facts_of(hub.fetch_config(name, revision, env), sha256="")
    text = f"{_describe(model)}, will be downloaded from {hub.endpoint(env)}"
    fix = "download it before the deploy, or give a local directory: a start waits for the weights without a word"
    return Checked([Finding(KEY, "warning", text, fix), *_check_layers(model, layers)])


def _has_weights(folder: str) -> bool:
    try:
        read_model(folder)
    except AgentFailure:
        return False
    return not any(name.endswith(".incomplete") for name in os.listdir(folder))
