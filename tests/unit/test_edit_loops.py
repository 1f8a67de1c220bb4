"""The hidden-states patch on the shapes that the layer loop has had: where its lines go, and that they get their names.

Each shape is a small model in our own words. The edited module is run: what reaches the tap is the residual stream at
each layer's entry and behind the last layer, and what forward returns is what it returned before.
"""

from __future__ import annotations

import textwrap
import types
from pathlib import Path
from typing import Any

import pytest

from fleetdump.agent.applicable import choose_edits
from fleetdump.agent.edit import EditError, apply_edits
from fleetdump.agent.specs import Edit
from fleetdump.patches import load_patch

SPEC = load_patch(Path(__file__).resolve().parents[2] / "patches" / "hidden-states")

HEAD = '''\
"""A model."""
from contextlib import nullcontext
from engine import capture_sum, residual_batch

class Owed:
    """Not a tensor: what 0.5.21 may hand from layer to layer."""


class LlamaModel:
    def forward(self, input_ids, positions, forward_batch, input_embeds=None):
        hidden_states = input_ids
        {start}
        aux_hidden_states = []
'''
TAIL = """\
        if {more}:
            return hidden_states, aux_hidden_states
        return hidden_states
"""
SHAPES = {
    "A plain": """\
        for i in range(self.start_layer, self.end_layer):
            layer = self.layers[i]
            hidden_states, residual = layer(positions, hidden_states, forward_batch, residual)
        hidden_states = self.norm(hidden_states, residual)
    """,
    "B captured in the loop": """\
        for i in range(self.start_layer, self.end_layer):
            if i in self.layers_to_capture:
                aux_hidden_states.append(capture_sum(hidden_states, residual))
            layer = self.layers[i]
            hidden_states, residual = layer(positions, hidden_states, forward_batch, residual)
        hidden_states = self.norm(hidden_states, residual)
    """,
    "B' captured behind the layer, which is called in place": """\
        for i in range(self.start_layer, self.end_layer):
            with nullcontext():
                hidden_states, residual = self.layers[i](
                    positions, hidden_states, forward_batch, residual
                )
                if i + 1 in self.layers_to_capture:
                    aux_hidden_states.append(capture_sum(hidden_states, residual))
        hidden_states = self.norm(hidden_states, residual)
    """,
    "C captured inside the layer, the loop in an else": """\
        if forward_batch.overlap:
            hidden_states, residual = self.overlapped(hidden_states, residual)
        else:
            for i in range(self.start_layer, self.end_layer):
                ctx = nullcontext()
                with ctx:
                    layer = self.layers[i]
                    hidden_states, residual = layer(
                        positions, hidden_states, forward_batch, residual,
                        captured_last_layer_outputs=aux_hidden_states if i in self.layers_to_capture else None,
                    )
        hidden_states = self.norm(hidden_states, residual)
    """,
    "D the residual in the batch, a collector": """\
        for i in range(self.start_layer, self.end_layer):
            with nullcontext():
                layer = self.layers[i]
                (hidden_states, _) = layer(
                    positions, hidden_states, forward_batch, None,
                    captured_last_layer_outputs=aux_hidden_states if i in self.layers_to_capture else None,
                )
        hidden_states = residual_batch.final_norm(hidden_states, forward_batch, self.norm)
    """,
    "E the residual in the batch, a callback": """\
        for i in range(self.start_layer, self.end_layer):
            hidden_states = self.layers[i](
                positions, hidden_states, forward_batch, None,
                capture_output=aux_hidden_states.append if i in self.layers_to_capture else None,
            )[0]
        hidden_states = residual_batch.final_norm(hidden_states, forward_batch, self.norm)
    """,
}
RELEASE = {"A": "0.5.5.post1", "B": "0.5.10", "C": "0.5.20", "D": "0.5.22", "E": "0.5.23"}


def module_of(shape: str) -> str:
    old = shape[0] in "ABC"
    start = "residual = None" if old else "residual_batch.start(forward_batch)"
    body = textwrap.indent(textwrap.dedent(SHAPES[shape]), " " * 8)
    return HEAD.replace("{start}", start) + body + TAIL.format(more="len(aux_hidden_states) > 0")


def edited(shape: str, source: str = "") -> str:
    release = RELEASE[shape[0]]
    edits = [e for e in choose_edits(SPEC, release, ["LlamaForCausalLM"]) if e.module.endswith(".llama")]
    return apply_edits(source or module_of(shape), edits, release, "mark").source


class Calls:
    """Stands for fleetdump_tap: notes the stream at each call."""

    idle = None

    def __init__(self) -> None:
        self.streams: list[tuple[Any, float]] = []

    def before_layer(self, model: Any, i: int, hidden: float, batch: Any, residual: Any = None, snapshot: Any = None) -> None:  # fmt: skip  # noqa: E501
        self.streams.append((i, snapshot(hidden, batch) if snapshot else hidden + (residual or 0)))

    def after_layers(self, model: Any, hidden: float, batch: Any, residual: Any = None, snapshot: Any = None) -> None:
        self.streams.append(("end", snapshot(hidden, batch) if snapshot else hidden + (residual or 0)))


def forward(text: str, shape: str, capture: set[int]) -> tuple[Any, list[tuple[Any, float]]]:
    """Run the module's forward: layer i adds i + 1 to the stream, which begins at 1."""
    calls = Calls()
    old = shape[0] in "ABC"

    def layer(number: int) -> Any:
        def run(positions: Any, hidden: float, batch: Any, residual: float | None, **_: Any) -> tuple[float, float]:
            if old:
                return number + 1, hidden + (residual or 0)
            batch.stream += hidden
            return number + 1, 0

        return run

    engine = types.SimpleNamespace(
        start=lambda batch: setattr(batch, "stream", 0),
        snapshot=lambda hidden, batch: batch.stream + hidden,
        final_norm=lambda hidden, batch, norm: norm(hidden, batch.stream),
    )
    names: dict[str, Any] = {}
    modules = {
        "engine": types.SimpleNamespace(capture_sum=lambda h, r: h + (r or 0), residual_batch=engine),
        "fleetdump_tap": calls,
    }

    def importing(name: str, *rest: Any) -> Any:
        return modules[name] if name in modules else __import__(name, *rest)

    exec(
        compile(text, shape, "exec"), {"__builtins__": {**vars(__import__("builtins")), "__import__": importing}}, names
    )
    model = types.SimpleNamespace(
        start_layer=0,
        end_layer=3,
        layers=[layer(number) for number in range(3)],
        layers_to_capture=capture,
        norm=lambda hidden, residual: (hidden + residual) * 100,
    )
    # The class body's functions see the module's names through their globals.
    function = names["LlamaModel"].forward
    function.__globals__.update(names)
    batch = types.SimpleNamespace(overlap=False, stream=0)
    return function(model, 1, None, batch), calls.streams


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("capture", [set(), {1}], ids=["no capture of its own", "with its own capture"])
def test_the_tap_gets_the_stream_and_forward_returns_what_it_did(shape: str, capture: set[int]) -> None:
    before, nothing = forward(module_of(shape), shape, capture)
    after, streams = forward(edited(shape), shape, capture)

    assert nothing == []
    assert streams == [(0, 1), (1, 2), (2, 4), ("end", 7)]
    assert after == before


@pytest.mark.parametrize("shape", SHAPES)
def test_three_lines_go_in_and_no_other_changes(shape: str) -> None:
    lines = edited(shape).splitlines(keepends=True)

    assert sum("# mark" in line for line in lines) == 3
    assert "".join(line for line in lines if "# mark" not in line) == module_of(shape)


LOOP = "        for i in ():\n            layer(i)\n"
CLASS = f"class LlamaModel:\n    def forward(self):\n{LOOP}\nclass Owed"
NORM = "        hidden_states = self.norm"
E_SHAPE = "E the residual in the batch, a callback"
D_SHAPE = "D the residual in the batch, a collector"
AUX = "aux_hidden_states = []"
HOSTILE = {
    "the loop variable has another name": ("A plain", "for i in", "for index in", "no local named i"),
    "the batch has another name": ("A plain", "forward_batch", "batch", "no local named forward_batch"),
    "the residual has another name": ("A plain", "residual", "skip", "no local named residual"),
    "the residual came back": (E_SHAPE, AUX, f"{AUX}; residual = None", "a local named residual"),
    "no snapshot to call": (D_SHAPE, "capture_sum, residual_batch", "capture_sum", "no local named residual_batch"),
    "layers are called by a helper": ("A plain", "layer(", "self.run(", "no class LlamaModel .* and a layer loop"),
    "a second loop of layers": ("A plain", NORM, LOOP + NORM, "2 loops that call layers"),
    "the class has another name": ("A plain", "LlamaModel", "LlamaStack", "no class LlamaModel"),
    "two classes of that name": ("A plain", "class Owed", CLASS, "more than one class LlamaModel"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_shape_that_the_lines_do_not_fit_is_refused(case: str) -> None:
    shape, old, new, reason = HOSTILE[case]
    source = module_of(shape)
    assert old in source

    with pytest.raises(EditError, match=reason):
        edited(shape, source.replace(old, new))


def test_each_model_file_has_an_edit_for_every_release_since_its_loop_is_its_own() -> None:
    """No gap between the two shapes, and the newest edit is open: a release to come is tried, and not verified."""
    by_module: dict[str, list[Edit]] = {}
    for edit in SPEC.edits:
        by_module.setdefault(edit.module, []).append(edit)
    for module, edits in by_module.items():
        spans = [(edit.first_release, edit.last_release) for edit in edits]
        if module.endswith("schedule_batch"):
            assert spans == [("0.5.5", "0.5.9")]
            continue
        assert spans[-1][1] == ""
        assert spans in (
            [("0.5.5", "0.5.20"), ("0.5.21", "")],
            [("0.5.5", "0.5.21"), ("0.5.22", "")],
            [("0.5.13", "0.5.20"), ("0.5.21", "")],
            [("0.5.21", "")],
        ), module
