"""Edits by structure: lines go in at the right place, nothing else changes, and what is unclear is refused."""

from __future__ import annotations

import ast
import base64
import io
import json
import sys
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetdump.agent import edit as module
from fleetdump.agent.edit import EditError, apply_edits, release_within
from fleetdump.agent.protocol import to_json
from fleetdump.agent.specs import Edit, Insertion

MARK = "fleetdump:test@1"
TAIL = f"  # {MARK}"


def edit(*places: str, **changes: object) -> Edit:
    values = {"module": "m", "class_name": "*Model", "method": "forward", **changes}
    return Edit(insertions=[Insertion(at, [f"tap_{n}()"]) for n, at in enumerate(places)], **values)  # type: ignore[arg-type]


def run(source: str, *places: str, **changes: object) -> str:
    return apply_edits(source, [edit(*places, **changes)], "0.5.20", MARK).source


def without_marked(text: str) -> str:
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if MARK not in line)


PLAIN = textwrap.dedent('''\
    """Doc."""
    from __future__ import annotations
    import os  # the last import

    X = 1


    class LlamaModel:
        @decorated
        def forward(self, hidden_states, forward_batch):
            """Doc of forward."""
            residual = None
            # a comment in front
            for i in range(3):
                # first in the loop
                with ctx:
                    layer = self.layers[i]
                    hidden_states, residual = layer(
                        hidden_states,
                    )  # trailing
            return hidden_states
    ''')


def test_each_place_gets_its_line_with_the_indentation_of_the_code_around_it() -> None:
    lines = run(PLAIN, "module-imports", "method-head", "loop-head", "after-loop").splitlines()

    assert lines[lines.index("import os  # the last import") + 1] == f"tap_0(){TAIL}"
    assert lines[lines.index("        residual = None") - 1] == f"        tap_1(){TAIL}"
    assert lines[lines.index("            with ctx:") - 1] == f"            tap_2(){TAIL}"
    assert lines[lines.index("        return hidden_states") - 1] == f"        tap_3(){TAIL}"


def test_a_loop_that_calls_self_layers_directly_is_a_layer_loop() -> None:
    source = "class AModel:\n    def forward(self):\n        for i in range(2):\n            x = self.layers[i](x)\n"

    assert f"            tap_0(){TAIL}\n            x = self" in run(source, "loop-head")


@pytest.mark.parametrize(
    ("source", "places"),
    [
        pytest.param(PLAIN.replace("\n", "\r\n"), ["module-imports", "loop-head", "after-loop"], id="crlf"),
        pytest.param(PLAIN.replace("    ", "\t"), ["method-head", "loop-head", "after-loop"], id="tabs"),
        pytest.param(PLAIN.rstrip("\n"), ["loop-head", "after-loop"], id="no newline at the end"),
        pytest.param(PLAIN.replace("\n\n", "  \n \t\n"), ["module-imports", "after-loop"], id="trailing space"),
        pytest.param(PLAIN.replace("X = 1", "X = 'ä€😀'; Y = '''\n# no\r comment\n'''"), ["loop-head"], id="unicode"),
        pytest.param(PLAIN.replace("X = 1", "X = 1\x0c"), ["loop-head", "after-loop"], id="form feed"),
        pytest.param(
            PLAIN.replace("import os  # the last import", "import os; Z = (\n1)"), ["module-imports"], id="semicolon"
        ),
        pytest.param(
            PLAIN.replace("for i in range(3):", "for i in (\n  1, 2,\n):  # (:"), ["loop-head"], id="long header"
        ),
    ],
)
def test_no_other_byte_changes(source: str, places: list[str]) -> None:
    edited = run(source, *places)

    kept = "".join(line for line in edited.splitlines(keepends=True) if MARK not in line)
    assert kept == source
    assert edited.count(MARK) == len(places)
    ast.parse(edited)


@pytest.mark.parametrize(
    "body",
    ["for i in range(3): x = layer(x)\n", "for i in range(3): x = layer(x); y = 'ä'  # why\n"],
)
def test_a_body_on_the_header_line_is_moved_to_a_line_of_its_own(body: str) -> None:
    source = f"class AModel:\n    def forward(self, x):\n        {body}        return x\n"

    edited = run(source, "loop-head", "after-loop")

    assert (
        edited.replace(f"\n            tap_0(){TAIL}\n            ", "").replace(f"        tap_1(){TAIL}\n", "")
        == source
    )
    loop = ast.parse(edited).body[0].body[0].body[0]  # type: ignore[attr-defined]
    assert ast.unparse(loop.body[0]) == "tap_0()"


def test_after_a_loop_that_ends_the_file_without_a_newline() -> None:
    source = "class AModel:\n    def forward(self, x):\n        for i in x:\n            layer(i)"

    assert run(source, "after-loop") == f"{source}\n        tap_0(){TAIL}\n"


def test_after_a_loop_with_else_comes_after_the_else() -> None:
    loop = "        for i in x:\n            layer(i)\n        else:\n            pass\n"
    source = f"class AModel:\n    def forward(self, x):\n{loop}"

    assert run(source, "after-loop").endswith(f"            pass\n        tap_0(){TAIL}\n")


def test_a_decorated_first_statement_keeps_its_decorator() -> None:
    source = "class AModel:\n    def forward(self):\n        @wraps\n        def inner(): pass\n"

    assert f"        tap_0(){TAIL}\n        @wraps" in run(source, "method-head")


def test_a_method_of_a_docstring_alone_and_a_module_without_imports() -> None:
    source = '"""Doc."""\nclass AModel:\n    def forward(self):\n        """Doc."""\n'

    edited = run(source, "module-imports", "method-head")

    assert edited.startswith(f'"""Doc."""\ntap_0(){TAIL}\nclass')
    assert edited.endswith(f'"""Doc."""\n        tap_1(){TAIL}\n')


def test_several_lines_form_one_block() -> None:
    change = edit("loop-head")
    change.insertions[0].lines = ["if i:", "    tap(i)"]

    edited = apply_edits(PLAIN, [change], "0.5.20", MARK).source

    assert f"            if i:{TAIL}\n                tap(i){TAIL}\n            with" in edited


def test_the_inner_of_two_nested_loops_is_the_layer_loop_and_nested_functions_do_not_count() -> None:
    source = textwrap.dedent("""\
        class AModel:
            def forward(self, x):
                def other():
                    for j in x:
                        layer(j)
                for batch in x:
                    for i in batch:
                        layer(i)
        """)

    assert f"                tap_0(){TAIL}\n                layer(i)" in run(source, "loop-head")


TWO_LOOPS = PLAIN + "        for i in x:\n            layer(i)\n"
TWO_MODELS = PLAIN + PLAIN[PLAIN.index("class") :].replace("LlamaModel", "OtherModel")


@pytest.mark.parametrize(
    ("source", "changes", "reason"),
    [
        pytest.param(TWO_LOOPS, {}, r"2 loops that call layers \(lines 14, 22\)", id="two loops"),
        pytest.param(TWO_MODELS, {}, "more than one class .*LlamaModel, OtherModel", id="two classes"),
        pytest.param(PLAIN, {"method": "forwards"}, "no class .*Model with method forwards", id="no method"),
        pytest.param(PLAIN, {"present": ["nothing"]}, "no local named nothing", id="local missing"),
        pytest.param(PLAIN, {"absent": ["residual"]}, "a local named residual", id="local too many"),
        pytest.param(PLAIN, {"first_release": "0.5.21"}, "release 0.5.20 is outside 0.5.21 to any", id="too old"),
        pytest.param(PLAIN, {"last_release": "0.5.9"}, "release 0.5.20 is outside any to 0.5.9", id="too new"),
        pytest.param("def f(:\n", {}, "cannot parse the module", id="not Python"),
        pytest.param("", {}, "no class .*Model with method forward", id="no byte"),
        pytest.param(PLAIN.replace("layer(", "other("), {}, "and a layer loop", id="no layer loop"),
        pytest.param(PLAIN + "    def forward(self):\n        pass\n", {}, "defined 2 times", id="method twice"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(source: str, changes: dict[str, object], reason: str) -> None:
    with pytest.raises(EditError, match=reason):
        run(source, "loop-head", **changes)


@pytest.mark.parametrize(
    "lines",
    [["if True:"], ["x = ("], ["return None; '''"], ["for q in x:", "    pass", "else:"]],
)
def test_lines_that_would_swallow_or_break_the_code_are_refused(lines: list[str]) -> None:
    change = edit("loop-head")
    change.insertions[0].lines = lines

    with pytest.raises(EditError):
        apply_edits(PLAIN, [change], "0.5.20", MARK)


def test_an_unknown_place_is_refused() -> None:
    with pytest.raises(EditError, match="unknown place"):
        run(PLAIN, "before-loop")


def test_the_first_edit_whose_structure_fits_wins_and_says_whether_it_is_verified() -> None:
    edits = [edit("loop-head", absent=["residual"]), edit("after-loop", verified=["0.5.20"]), edit("loop-head")]

    outcome = apply_edits(PLAIN, edits, "0.5.20", MARK)

    assert (outcome.index, outcome.verified) == (1, True)
    assert outcome.places == ["LlamaModel.forward: after-loop, line 21"]
    assert not apply_edits(PLAIN, edits, "0.5.19", MARK).verified


@pytest.mark.parametrize(
    ("release", "within"),
    [
        ("0.5.9", False),
        ("0.5.10", True),
        ("0.5.10.post1", True),
        ("0.5.20rc1", True),
        ("0.5.20.post2", True),
        ("0.5.20.dev3+gabc.post1", True),
        ("0.5.21", False),
        ("1.0", False),
        ("", False),
        ("unknown", False),
    ],
)
def test_releases_are_compared_as_numbers(release: str, within: bool) -> None:
    assert release_within(release, "0.5.10", "0.5.20") is within


@pytest.mark.parametrize(
    ("release", "first", "last", "within"),
    [
        ("0.5.5", "0.5.5.post1", "", False),
        ("0.5.5.post1", "0.5.5.post1", "", True),
        ("0.5.5.post3", "0.5.5.post1", "0.5.5.post2", False),
        ("0.5.5.post2", "", "0.5.5.post2", True),
        ("0.5.5.post10", "", "0.5.5.post9", False),
        ("0.5.6", "", "0.5.5.post9", False),
        ("0.6", "0.6.0", "0.6.0", True),
        ("0.6.0", "0.6", "0.6", True),
        ("0.10.0", "0.9", "", True),
    ],
)
def test_a_bound_may_name_a_post_release(release: str, first: str, last: str, within: bool) -> None:
    assert release_within(release, first, last) is within


def test_a_name_that_must_be_there_may_be_imported_by_the_module() -> None:
    source = PLAIN.replace("import os", "from engine.residual import batch as residual_batch; import os")

    assert MARK in run(source, "loop-head", present=["residual_batch", "i", "forward_batch"])
    with pytest.raises(EditError, match="no local named residual_batch, and the module imports none"):
        run(PLAIN, "loop-head", present=["residual_batch"])
    with pytest.raises(EditError, match="a local named os"):
        run(PLAIN.replace("residual = None", "import os"), "loop-head", absent=["os"])
    assert MARK in run(PLAIN, "loop-head", absent=["os"])  # the module's own name is not the method's


NAMES = st.sampled_from(["x = 1", "# note", "", "if x:\n    y = 2", "'''text\n  of two lines'''", "with a:\n    b()"])


@settings(max_examples=60, deadline=None)
@given(before=st.lists(NAMES, max_size=4), inside=st.lists(NAMES, max_size=4), after=st.lists(NAMES, max_size=4))
def test_removing_the_marked_lines_gives_the_original(before: list[str], inside: list[str], after: list[str]) -> None:
    def block(parts: list[str], depth: int) -> str:
        return textwrap.indent("".join(part + "\n" for part in parts), " " * depth, lambda line: line.strip() != "")

    source = "class AModel:\n    def forward(self, x):\n        z = 0\n" + block(before, 8)
    source += "        for i in x:\n" + block(inside, 12) + "            layer(i)\n" + block(after, 8)

    assert without_marked(run(source, "method-head", "loop-head", "after-loop")) == source


def call_main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], source: bytes) -> dict[str, object]:
    request = {
        "source": base64.b64encode(source).decode(),
        "path": "m.py",
        "edits": to_json([edit("loop-head")]),
        "release": "0.5.20",
        "marker": MARK,
    }
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request)))
    module.main()
    answer: dict[str, object] = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.parametrize(
    "source",
    [
        b"\xef\xbb\xbf" + PLAIN.encode(),
        b"# coding: latin-1\n# \xe4\n" + PLAIN.encode(),
        PLAIN.encode(),
    ],
    ids=["byte order mark", "latin-1", "utf-8"],
)
def test_the_program_keeps_the_encoding(
    source: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = call_main(monkeypatch, capsys, source)

    edited = base64.b64decode(str(answer["source"]))
    assert b"".join(x for x in edited.splitlines(keepends=True) if MARK.encode() not in x) == source


def test_the_program_says_why_it_refuses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no class" in str(call_main(monkeypatch, capsys, b"x = 1\n")["refused"])
    assert "refused" in call_main(monkeypatch, capsys, b"x = '\xff'\n")
