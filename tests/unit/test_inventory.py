"""The inventory: the whole format, precedence, every kind of mistake with its line, selection, secrets, init."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetdump.agent.specs import CaptureSpec, Patience
from fleetdump.errors import ExitCode, UsageError
from fleetdump.inventory import HostConfig, Inventory, InventoryError, example_for, load, resolve_secrets
from fleetdump.inventory.schema import CAPTURE, HOST, PATIENCE
from fleetdump.inventory.servers import SERVER

EXAMPLE = Path(__file__).parents[2] / "inventory" / "example.yaml"
PIN = "SHA256:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU"
SERVER_LINE = "{name: main, model_path: /m, port: 8000, python: /p}"
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def _write(text: str) -> Path:
        path = tmp_path / "inventory.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return _write


def one(inventory: Inventory, name: str) -> HostConfig:
    return next(host for host in inventory.hosts if host.name == name)


def mistakes_of(path: Path) -> list[tuple[int, str]]:
    with pytest.raises(InventoryError) as caught:
        load(path)
    assert caught.value.exit_code == ExitCode.USAGE
    assert len(str(caught.value).splitlines()) <= 25
    return [(mistake.line, mistake.text) for mistake in caught.value.mistakes]


# --------------------------------------------------------------------------- the format
DESIGN = f"""\
defaults:
  user: root
  python: /opt/sglang/bin/python          # the interpreter that imports sglang
  servers:
    - {{name: main, model_path: /models/Kimi-K2.5, port: 8000, tp: 8, args: [--trust-remote-code]}}
  capture: {{layers: [3, 31, 59], layer_ids: input, dir: /nvme/hs}}
groups:
  small:
    hosts: ["gpu[02-08]"]
    vars: {{servers: [{{name: "r{{i}}", replicas: 8, tp: 1, port: 8000, model_path: /models/Qwen3-8B}}]}}
hosts:
  gpu01: {{address: 10.1.230.174, host_key: "{PIN}"}}
"""


def test_the_design_s_inventory(write: Write) -> None:
    inventory = load(write(DESIGN))
    assert [host.name for host in inventory.hosts] == ["gpu01", *(f"gpu{n:02d}" for n in range(2, 9))]
    big, small = one(inventory, "gpu01"), one(inventory, "gpu02")
    assert (big.address, big.user, big.port, big.host_key, big.groups) == ("10.1.230.174", "root", None, PIN, ())
    assert [(s.name, s.port, s.tp, s.gpus, s.args) for s in big.servers] == [
        ("main", 8000, 8, [], ["--trust-remote-code"])
    ]
    assert small.groups == ("small",)
    assert [(s.name, s.port, s.gpus) for s in small.servers] == [(f"r{i}", 8000 + i, [i]) for i in range(8)]
    assert {s.python for s in small.servers} == {"/opt/sglang/bin/python"}
    assert big.capture.spec() == CaptureSpec(layers=[3, 31, 59], dir="/nvme/hs")
    assert inventory.groups == {"small": tuple(f"gpu{n:02d}" for n in range(2, 9))}


def test_the_reference_page_loads_and_shows_every_setting() -> None:
    inventory = load(EXAMPLE)
    assert one(inventory, "dock2").address == "10.1.240.12"
    assert one(inventory, "dock2").exec_prefix == ("docker", "exec", "-i", "sglang")
    assert one(inventory, "here").connection == "local"
    text = EXAMPLE.read_text()
    missing = [
        key for schema in (HOST, SERVER, CAPTURE, PATIENCE) for key in schema if not re.search(rf"\b{key}:", text)
    ]
    assert missing == []
    assert one(inventory, "gpu01").patience == Patience()  # the page says: these are the defaults


def test_precedence_and_merging(write: Write) -> None:
    inventory = load(
        write(
            "defaults: {user: d, connect_timeout: 1,capture: {layers: [1], dir: /d}, patience: {weights: 7, init: 8}}\n"
            "groups:\n"
            "  a: {hosts: [h*], vars: {user: a, connect_timeout: 2, state_dir: /a}}\n"
            "  b: {hosts: [h1], vars: {connect_timeout: 3, capture: {dir: /b}}}\n"
            "hosts:\n"
            "  h1: {user: h, patience: {init: 9}}\n"
            "  h2:\n"
            "  x:\n"
        )
    )
    h1, h2, x = inventory.hosts
    assert (h1.user, h1.connect_timeout, h1.state_dir, h1.groups) == ("h", 3.0, "/a", ("a", "b"))
    assert (h1.capture.layers, h1.capture.dir) == ((1,), "/b")
    assert (h1.patience.weights, h1.patience.init, h1.patience.jit) == (7.0, 9.0, Patience.jit)
    assert (h2.user, h2.connect_timeout, h2.capture.dir) == ("a", 2.0, "/d")
    assert (x.user, x.state_dir, x.patience.init) == ("d", "~/.fleetdump", 8.0)


def test_silence_leaves_the_route_to_ssh_config(write: Write) -> None:
    host = load(write("hosts: [gpu01]")).hosts[0]
    assert (host.user, host.port, host.identity_file, host.proxy_jump, host.host_key) == (None, None, None, None, "")
    assert host.address == "gpu01"


@pytest.mark.parametrize("hosts", ["[a1, a2]", "['a[1-2]']", "{a1: , a2: ~}", "{'a[1-2]': {}}"])
def test_forms_of_hosts(write: Write, hosts: str) -> None:
    assert [host.name for host in load(write(f"hosts: {hosts}")).hosts] == ["a1", "a2"]


def test_names_are_taken_as_written(write: Write) -> None:
    inventory = load(write("hosts: [007, 1e3, on, 10.1]\n"))
    assert [host.name for host in inventory.hosts] == ["007", "1e3", "on", "10.1"]


def test_arguments_and_variables_are_taken_as_written(write: Write) -> None:
    text = (
        "hosts: {h: {python: /p, servers: [{name: s, port: 1, model_path: m, args: [--x, 0.80, on, '{\"a\": 1}', ''],"
        " env: {A: 010, B: yes, C: ''}}]}}"
    )
    server = load(write(text)).hosts[0].server("s")
    assert server.args == ["--x", "0.80", "on", '{"a": 1}', ""]
    assert server.env == {"A": "010", "B": "yes", "C": ""}


def test_flags_of_the_patch_that_a_server_does_without(write: Write) -> None:
    text = "hosts: {h: {python: /p, servers: [{name: s, port: 1, model_path: m, without: [--disable-radix-cache]}]}}"
    assert load(write(text)).hosts[0].server("s").without == ["--disable-radix-cache"]


def test_merge_keys_and_anchors(write: Write) -> None:
    inventory = load(
        write("defaults: &d {user: root, port: 22}\nhosts:\n  a: {<<: *d, port: 23}\n  b: {<<: [{port: 24}, *d]}\n")
    )
    assert [(host.user, host.port) for host in inventory.hosts] == [("root", 23), ("root", 24)]


def test_output_layer_ids_become_entry_ids(write: Write) -> None:
    path = write("hosts: [h]\ndefaults: {capture: {layers: [0, 2], layer_ids: output, dir: /d/, shard_bytes: 1.5GiB}}")
    capture = load(path).hosts[0].capture
    assert capture.layers == (0, 2)
    assert capture.spec() == CaptureSpec(layers=[1, 3], dir="/d", shard_bytes=3 << 29)


def test_nothing_to_capture_is_said_when_it_is_asked_for(write: Write) -> None:
    with pytest.raises(UsageError, match="what to capture"):
        load(write("hosts: [h]")).hosts[0].capture.spec()


def test_replicas_with_gpus_dealt_out(write: Write) -> None:
    path = write(
        "defaults: {python: /p, servers: [\n"
        "  {name: 'a{i}', replicas: 2, tp: 2, port: 8000, model_path: /m, gpus: [0, 2, 4, 6]},\n"
        "  {name: b, tp: 2, port: 9000, model_path: /m, gpus: [1, 3]}]}\n"
        "hosts: [h]"
    )
    assert [(s.name, s.port, s.gpus) for s in load(path).hosts[0].servers] == [
        ("a0", 8000, [0, 2]),
        ("a1", 8001, [4, 6]),
        ("b", 9000, [1, 3]),
    ]


@pytest.mark.parametrize(
    ("settings", "gpus"),
    [
        ("tp: 2, dp: 2", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("tp: 2, dp: 2, args: [--enable-dp-attention]", [[0, 1], [2, 3]]),
        ("tp: 2, pp: 2", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("tp: 2, args: [--device, cpu]", [[], []]),
        ("tp: 2, args: [--device=cpu]", [[], []]),
    ],
)
def test_gpus_a_replica_takes(write: Write, settings: str, gpus: list[list[int]]) -> None:
    server = f"{{name: 'r{{i}}', replicas: 2, port: 8000, model_path: /m, python: /p, {settings}}}"
    assert [s.gpus for s in load(write(f"hosts: {{h: {{servers: [{server}]}}}}")).hosts[0].servers] == gpus


def test_configurations_do_not_change(write: Write) -> None:
    host = load(write("hosts: [h]")).hosts[0]
    with pytest.raises(AttributeError):
        host.user = "x"  # type: ignore[misc]


def test_unknown_server_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'main'"):
        one(load(EXAMPLE), "gpu01").server("mian")


# --------------------------------------------------------------------------- mistakes
def server(text: str) -> str:
    return f"hosts: [h]\ndefaults:\n  servers:\n  - {{name: s, model_path: /m, port: 8000, python: /p, {text}}}"


def host(text: str) -> str:
    return f"hosts:\n  h: {{{text}}}"


@pytest.mark.parametrize(
    ("text", "line", "fragment"),
    [
        # the file
        ("", 0, "empty"),
        ("# nothing\n", 0, "empty"),
        ("~", 1, "expected a mapping"),
        ("just text", 1, "expected a mapping"),
        ("- a\n- b", 1, "got a list"),
        ("hosts: [a\nx: ]]", 2, "not YAML"),
        ("hosts:\n\t- a", 2, "tab"),
        ("hosts: [a]\n---\nhosts: [b]", 2, "second document"),
        ("hosts: *nope", 1, "not YAML"),
        ("hosts: [a\x01]", 0, "not YAML"),
        ('hosts: ["\\UFFFFFFFF"]', 0, "not YAML"),
        ('hosts: ["\\ud800"]', 1, "control character"),
        ("hosts: [a]\n" + "x" * 5000 + ": 1", 2, "not YAML"),
        ("hosts: &h [*h]", 1, "alias of itself"),
        ("[" * 1000, 0, "nested"),
        ("hosts: !!python/object:os.system {a: }", 1, "tag"),
        ("hosts: [!x a]", 1, "tag"),
        # keys
        ("host: [a]", 1, "did you mean 'hosts'?"),
        ("hosts: [a]\ndefaults:\n  usr: x", 3, "defaults: unknown key 'usr'; did you mean 'user'?"),
        ("hosts: [a]\ndefaults:\n  zzz: x", 3, "valid: "),
        ("hosts: [a]\ndefaults: {address: x}", 2, "unknown key 'address'"),
        ("hosts: [a]\nhosts: [b]", 2, "key 'hosts' stands twice, first on line 1"),
        (host("port: 1, user: x, port: 2"), 2, "key 'port' stands twice"),
        ("hosts: {[a]: }", 1, "plain name"),
        ("hosts: {~: }", 1, "plain name"),
        # values
        (host("port: 0"), 2, "hosts.h.port: 0 is outside 1..65535"),
        (host("port: 65536"), 2, "outside"),
        (host("capture: {max_wait_seconds: 61}"), 2, "capture.max_wait_seconds: 61 is more than 60"),
        (host("capture: {max_wait_seconds: 0}"), 2, "is not in 0.."),
        (host("port: '22'"), 2, "without quotes"),
        (host("port: 022"), 2, "whole number"),
        (host("port: 2.2"), 2, "whole number"),
        (host("port: true"), 2, "whole number"),
        (host("port: [22]"), 2, "got a list"),
        (host("port: "), 2, "got nothing"),
        (host("user: {a: b}"), 2, "got a mapping"),
        (host("user: '-x'"), 2, "not a user name"),
        (host("user: ''"), 2, "empty"),
        (host('python: "/p\\n"'), 2, "control character"),
        (host("python: bin/python"), 2, "neither an absolute path"),
        (host("agent_python: -m"), 2, "neither an absolute path"),
        (host("state_dir: x"), 2, "absolute"),
        (host("address: root@1.2.3.4"), 2, "not a host name or address"),
        (host("address: '10.0.0.[1-2]'"), 2, "1 hosts but 2 addresses"),
        (host("host_key: aa:bb"), 2, "fingerprint"),
        (host("host_key: SHA256:..."), 2, "fingerprint"),
        (host("connection: shh"), 2, "did you mean 'ssh'?"),
        (host("exec_prefix: docker exec"), 2, "expected a list"),
        (host("connect_timeout: 0"), 2, "not in"),
        (host("connect_timeout: .nan"), 2, "number of seconds"),
        (host("connect_timeout: nan"), 2, "not in"),
        (host("connect_timeout: soon"), 2, "number of seconds"),
        (host("proxy_jump: 'a b'"), 2, "proxy_jump"),
        (host("patience: {weight: 3}"), 2, "did you mean 'weights'?"),
        (host("patience: {weights: -1}"), 2, "not in"),
        (host("parallel_starts: 0"), 2, "outside 1..8"),
        (host("parallel_starts: 9"), 2, "outside 1..8"),
        (host("parallel_starts: -1"), 2, "outside 1..8"),
        (host("parallel_starts: 1000000000"), 2, "outside 1..8"),
        (host("parallel_starts: 1e9"), 2, "whole number"),
        (host("parallel_starts: 2.5"), 2, "whole number"),
        (host("parallel_starts: true"), 2, "whole number"),
        (host("parallel_starts: many"), 2, "whole number"),
        (host("parallel_starts: '4'"), 2, "without quotes"),
        (host("parallel_starts: \u0664"), 2, "whole number"),
        (host("parallel_starts: " + 30 * "9"), 2, "whole number"),
        (host("parallel_starts: [4]"), 2, "whole number"),
        (host("parallel_starts:"), 2, "parallel_starts"),
        (host("patience: {weights: 1e9}"), 2, "not in"),
        (host("patience: {weights: 1e999}"), 2, "not in"),
        (host("patience: {weights: 0}"), 2, "not in"),
        (host("patience: {weights: long}"), 2, "number of seconds"),
        # capture
        (host("capture: {layers: [1, -1], dir: /d}"), 2, "capture.layers[1]: -1 is outside"),
        (host("capture: {layers: [1, 1], dir: /d}"), 2, "layer 1 stands twice"),
        (host("capture: {layers: [3, 1], dir: /d}"), 2, "ascending"),
        (host("capture: {layers: [], dir: /d}"), 2, "no layer"),
        (host("capture: {layers: 3, dir: /d}"), 2, "expected a list"),
        (host("capture: {layers: [one], dir: /d}"), 2, "whole number"),
        (host("capture: {layers: [1], dir: d}"), 2, "absolute"),
        (host("capture: {layers: [1], dir: /}"), 2, "folder of its own"),
        (host("capture: {layers: [1]}"), 2, "no 'dir'"),
        (host("capture: {dir: /d}"), 2, "no 'layers'"),
        (host("capture: {layers: [1], dir: /d, layer_ids: entry}"), 2, "input, output"),
        (host("capture: {layers: [1], dir: /d, shard_bytes: 4 gigs}"), 2, "size such as 4GiB"),
        (host("capture: {layers: [1], dir: /d, shard_bytes: 1KiB}"), 2, "outside"),
        # servers
        ("hosts: [h]\ndefaults:\n  servers:\n  - {model_path: /m, port: 1, python: /p}", 4, "key 'name' is missing"),
        ("hosts: [h]\ndefaults:\n  servers:\n  - {name: s, model_path: /m, port: 1}", 4, "has no python"),
        ("hosts: [h]\ndefaults:\n  servers: []", 3, "empty"),
        (server("tp: 0"), 4, "outside"),
        (server("modl_path: x"), 4, "did you mean 'model_path'?"),
        (server("replicas: 2"), 4, "need {i} in their name"),
        (server("gpus: [0, 0]"), 4, "a GPU stands twice"),
        (server("tp: 2, gpus: [0]"), 4, "are 2, but the list has 1"),
        (server("args: [--port, 8]"), 4, "set by the key 'port'"),
        (server("args: [--tp-size=8]"), 4, "set by the key 'tp'"),
        (server("args: [--tp-s, 4]"), 4, "--tp-s is set by the key 'tp'"),
        (server("args: [--tp=4]"), 4, "set by the key 'tp'"),
        (server("args: [--tensor_parallel_size=4]"), 4, "set by the key 'tp'"),
        (server("args: [--pipeline, 2]"), 4, "set by the key 'pp'"),
        (server("args: [--model_path, /m]"), 4, "set by the key 'model_path'"),
        (server("args: [--mem-fraction-static 0.8]"), 4, "two list items"),
        (server("args: ['a\\0']").replace("'", '"'), 4, "NUL"),
        (server('env: {A: "\\ud800"}'), 4, "surrogate"),
        (server("args: --x"), 4, "expected a list"),
        (server("without: [x]"), 4, "not a flag such as --disable-radix-cache"),
        (server("without: [--x=1]"), 4, "not a flag"),
        (server("args: [--api-key, sk-1]"), 4, "by reference"),
        (server("args: [--api-key=sk-1]"), 4, "by reference"),
        (server("args: [--api-k, sk-1]"), 4, "by reference"),
        (server("args: [--ssl_keyfile_password=x]"), 4, "by reference"),
        (server("env: {HF_TOKEN: hf_1}"), 4, "by reference"),
        (server("env: {HF_TOKEN: 'file:relative'}"), 4, "by reference"),
        (server("env: {'A B': x}"), 4, "environment variable"),
        (server("env: [A]"), 4, "expected a mapping"),
        (server("host: 'a b'"), 4, "address to listen on"),
        (server("").replace("name: s", "name: 's{i}', replicas: 57537"), 4, "outside"),
        (server("").replace("name: s, ", "name: 's{i}', replicas: 2, ").replace("8000", "65535"), 4, "beyond 65535"),
        (server("").replace("name: s", "name: s p"), 4, "not a name"),
        # hosts and groups
        ("hosts: []", 1, "no hosts"),
        ("hosts: [a, b, a]", 1, "host 'a' stands twice"),
        ("hosts:\n  a1: \n  'a[1-3]': ", 3, "host 'a1' stands twice, first on line 2"),
        ("hosts: ['a[3-1]']", 1, "backwards"),
        ("hosts: ['a[1-99999]']", 1, "more than 10000"),
        ("hosts: ['a[1-6000]', 'b[1-6000]']", 1, "more than 10000"),
        ("hosts: ['a[1-6000]']\ngroups:\n  g: {hosts: ['b[1-6000]']}", 3, "more than 10000"),
        ("hosts: [a]\ngroups:\n  g: {hosts: ['b[1-6000]', 'b[1-6000]']}", 3, "more than 10000"),
        ("hosts: ['a*']", 1, "not a host name"),
        ("hosts: [root@a]", 1, "user and port are settings"),
        ("hosts: [a/b]", 1, "not a host name"),
        ("hosts: ['../x']", 1, "not a host name"),
        ("hosts: ['-oProxyCommand=x']", 1, "not a host name"),
        ("hosts:\n- a: {port: 1}", 2, "as a mapping"),
        ("hosts: a", 1, "expected a list"),
        ("hosts:\n  a: {address: x}\n  b: {address: x}", 3, "'a' and 'b' are the same machine"),
        ("hosts: [a]\ngroups:\n  g: {hosts: ['@h']}\n  hh: {hosts: [a]}", 3, "unknown group '@h'"),
        ("hosts: [a]\ngroups:\n  g: {hosts: ['@g']}", 3, "contains itself"),
        ("hosts: [a]\ngroups:\n  g: {hosts: ['@f']}\n  f: {hosts: ['@g']}", 4, "contains itself by way of @g"),
        ("hosts: [gpu01]\ngroups:\n  g: {hosts: ['gup*']}", 3, "no host matches 'gup*'"),
        ("hosts: [a]\ngroups:\n  g: {vars: {}}", 3, "'hosts' is missing"),
        ("hosts: [a]\ngroups:\n  g: {hosts: []}", 3, "has no host"),
        ("hosts: [a]\ngroups:\n  g: ", 3, "expected a mapping"),
        ("hosts: [a]\ngroups:\n  'g h': {hosts: [a]}", 3, "not a group name"),
        ("hosts: [a]\ngroups:\n  g: {hosts: [a], var: {}}", 3, "did you mean 'vars'?"),
        ("hosts: [a]\ngroups:\n  g: {hosts: ['a,,b']}", 3, "empty name"),
        ("hosts: [a]\ngroups:\n  g: {hosts: ['b c']}", 3, "not a host name"),
    ],
)
def test_mistake(write: Write, text: str, line: int, fragment: str) -> None:
    mistakes = mistakes_of(write(text))
    assert len(mistakes) == 1, mistakes  # and nothing that only follows from it
    assert mistakes[0][0] == line
    assert fragment in mistakes[0][1]


@pytest.mark.parametrize(
    ("second", "fragment"),
    [
        ("{name: b, model_path: /m, port: 8001, python: /p, gpus: [1, 2], tp: 2}", "GPU 1 is used by 'a' and 'b'"),
        ("{name: b, model_path: /m, port: 8000, python: /p, gpus: [2]}", "port 8000 is used by 'a' and 'b'"),
        ("{name: a, model_path: /m, port: 8001, python: /p, gpus: [2]}", "name a is used"),
        ("{name: b, model_path: /m, port: 8001, python: /p}", "names no gpus"),
        ("{name: 'r{i}', replicas: 2, model_path: /m, port: 7999, python: /p, gpus: [2, 3]}", "port 8000"),
    ],
)
def test_servers_share_nothing(write: Write, second: str, fragment: str) -> None:
    first = "{name: a, model_path: /m, port: 8000, python: /p, gpus: [0, 1], tp: 2}"
    mistakes = mistakes_of(write(f"hosts: [h, i]\ndefaults:\n  servers:\n  - {first}\n  - {second}\n"))
    assert [line for line, _ in mistakes] == [5]
    assert fragment in mistakes[0][1]


def test_every_mistake_at_once(write: Write) -> None:
    path = write(
        "defaults:\n"
        "  usr: root\n"
        "  servers:\n"
        "    - {name: main, port: 99999, model_path: /m}\n"
        "  capture: {layers: [3, 1], dir: nvme}\n"
        "groups:\n"
        "  g: {hosts: ['@x'], vars: {port: ssh}}\n"
        "hosts:\n"
        "  a: {addres: 1.2.3.4}\n"
        "  a: {}\n"
    )
    assert [line for line, _ in mistakes_of(path)] == [2, 4, 5, 5, 7, 7, 9, 10]
    with pytest.raises(InventoryError) as caught:
        load(path)
    assert f"{path}:9: hosts.a: unknown key 'addres'; did you mean 'address'?" in caught.value.why


def test_many_mistakes_still_fit_on_a_screen(write: Write) -> None:
    path = write("hosts:\n" + "".join(f"  h{n}: {{usr: x}}\n" for n in range(500)))
    assert len(mistakes_of(path)) == 500


def test_nested_groups_are_walked_once(write: Write) -> None:
    groups = [f"  g{n}: {{hosts: ['@g{n + 1}', '@g{n + 1}']}}\n" for n in range(60)]
    inventory = load(write("hosts: [a, b]\ngroups:\n" + "".join(groups) + "  g60: {hosts: [b]}\n"))
    assert inventory.groups["g0"] == ("b",)


def test_secrets_are_not_in_messages(write: Write) -> None:
    for arguments in (
        "args: [--api-key, sk-1]",
        "args: [--api-key sk-1]",
        "args: [--api-key=sk-1]",
        "env: {KEY: sk-1}",
    ):
        assert "sk-1" not in mistakes_of(write(server(arguments)))[0][1]


def test_alias_bomb(write: Write) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]
    assert "aliases" in mistakes_of(write("\n".join(lines)))[0][1]


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "i.yaml"
    path.write_bytes(b"hosts:\n  - a\n  - caf\xe9\n")
    assert mistakes_of(path) == [(3, "byte 0xe9 is not UTF-8; save the file as UTF-8")]
    path.write_bytes("hosts: [a]".encode("utf-16"))
    assert "UTF-8" in mistakes_of(path)[0][1]
    path.write_bytes(b"\xef\xbb\xbfhosts: [a]\r\n")
    assert load(path).hosts[0].name == "a"


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no inventory") as missing:
        load(tmp_path / "none.yaml")
    assert "fleetdump init" in missing.value.next_step
    assert "directory" in mistakes_of(tmp_path)[0][1]
    big = tmp_path / "big.yaml"
    big.write_bytes(b"#" * ((1 << 20) + 1))
    assert "larger than 1 MiB" in mistakes_of(big)[0][1]


LINES = EXAMPLE.read_text().splitlines()


@settings(deadline=None)
@given(st.integers(0, len(LINES) - 1), st.sampled_from(["", "- x", "  a: b", "\t", "{", "x: [", "*a", "\x07", "é: ~"]))
def test_any_damage_is_a_list_of_mistakes_or_loads(
    tmp_path_factory: pytest.TempPathFactory, line: int, damage: str
) -> None:
    path = tmp_path_factory.mktemp("damage") / "i.yaml"
    path.write_text("\n".join([*LINES[:line], damage, *LINES[line + 1 :]]))
    try:
        assert load(path).hosts
    except InventoryError as error:
        assert error.mistakes  # noqa: PT017


# --------------------------------------------------------------------------- selection
@pytest.fixture
def fleet(write: Write) -> Inventory:
    return load(
        write(
            "defaults: {user: root, python: /p}\n"
            "groups: {small: {hosts: ['gpu[02-04]']}, odd: {hosts: [gpu01, gpu03]}}\n"
            "hosts: {gpu01: {address: 10.0.0.1}, 'gpu[02-04]': , db: {address: '2001:db8::5'}}\n"
        )
    )


@pytest.mark.parametrize(
    ("patterns", "exclude", "names"),
    [
        ([], [], "gpu01 gpu02 gpu03 gpu04 db"),
        (["db", "gpu01"], [], "gpu01 db"),
        (["10.0.0.1"], [], "gpu01"),
        (["2001:db8::5"], [], "db"),
        (["gpu*"], [], "gpu01 gpu02 gpu03 gpu04"),
        (["gpu0?"], ["gpu01,gpu[03-04]"], "gpu02"),
        (["gpu[01-02]", "gpu02"], [], "gpu01 gpu02"),
        (["gpu[01,04]"], [], "gpu01 gpu04"),
        (["@small"], ["@odd"], "gpu02 gpu04"),
        (["@odd,db"], [], "gpu01 gpu03 db"),
        ([], ["@small"], "gpu01 db"),
        (["10.*"], [], "gpu01"),
    ],
)
def test_select(fleet: Inventory, patterns: list[str], exclude: list[str], names: str) -> None:
    assert [host.name for host in fleet.select(patterns, exclude)] == names.split()
    assert fleet.select_read_only(patterns, exclude).unlisted == []


@pytest.mark.parametrize(
    ("patterns", "exclude", "fragment"),
    [
        (["gpu05"], [], "no host matches 'gpu05'; did you mean 'gpu0"),
        (["gpu[03-05]"], [], "'gpu05'"),
        (["@smal"], [], "did you mean '@small'"),
        (["x*"], [], "'x*'"),
        (["gpu01"], ["gpu9"], "'gpu9'"),
        (["10.0.0.2"], [], "did you mean '10.0.0.1'"),
        (["gpu[2-1]"], [], "backwards"),
        (["gpu01,"], [], "empty name"),
        ([""], [], "empty name"),
        (["gpu01"], ["gpu*"], "no host is left"),
        (["nope", "nada"], [], "'nada'"),
    ],
)
def test_select_refuses(fleet: Inventory, patterns: list[str], exclude: list[str], fragment: str) -> None:
    with pytest.raises(UsageError) as caught:
        fleet.select(patterns, exclude)
    assert fragment in caught.value.what
    assert caught.value.exit_code == ExitCode.USAGE


def test_unlisted_hosts_get_the_defaults(fleet: Inventory) -> None:
    with pytest.raises(UsageError) as caught:
        fleet.select(["10.9.9.9"])
    assert "--ad-hoc" in caught.value.next_step
    hosts = fleet.select(["me@10.9.9.9:2222", "db", "[2001:db8::9]:23"], ad_hoc=True)
    assert [(h.name, h.address, h.user, h.port, h.python) for h in hosts] == [
        ("db", "2001:db8::5", "root", None, "/p"),
        ("10.9.9.9", "10.9.9.9", "me", 2222, "/p"),
        ("2001:db8::9", "2001:db8::9", "root", 23, "/p"),
    ]
    selection = fleet.select_read_only(["10.9.9.[1-2]", "gpu01"])
    assert [h.name for h in selection.hosts] == ["gpu01", "10.9.9.1", "10.9.9.2"]
    assert selection.unlisted == ["10.9.9.1", "10.9.9.2"]
    with pytest.raises(UsageError, match="no host matches 'gpu1'") as caught:
        fleet.select_read_only(["gpu1"])
    assert "add --ad-hoc for a host that the inventory does not have" in caught.value.next_step
    assert "change" not in caught.value.next_step, "it looks only"


@pytest.mark.parametrize("pattern", ["x*", "@nope", "root@gpu01", "-oProxyCommand=x", "a;b"])
def test_what_cannot_be_ad_hoc(fleet: Inventory, pattern: str) -> None:
    with pytest.raises(UsageError, match="no host matches"):
        fleet.select([pattern], ad_hoc=True)


def test_ad_hoc_needs_an_interpreter(write: Write) -> None:
    inventory = load(
        write("defaults: {servers: [{name: s, model_path: /m, port: 1}]}\nhosts: {a: {python: /p}}\n"),
    )
    with pytest.raises(UsageError, match=r"which Python imports sglang"):
        inventory.select(["b"], ad_hoc=True)
    assert inventory.select_read_only(["b.example"]).unlisted == ["b.example"]


def test_a_large_fleet_is_quick(write: Write) -> None:
    inventory = load(write("hosts: ['gpu[0001-5000]']\ngroups: {g: {hosts: ['gpu[0001-5000]', '*9']}}"))
    assert len(inventory.select(["gpu[0001-4000]", "gpu00*"], ["gpu0001"])) == 3999


# --------------------------------------------------------------------------- secrets
SECRETS = server("args: [--api-key, 'env:KEY', '--admin-api-key=file:%s', 'env:KEY'], env: {HF_TOKEN: 'env:HF', A: b}")


def test_secrets_are_resolved_on_demand_only(write: Write, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    config = load(write(SECRETS % secret)).hosts[0]
    resolved = resolve_secrets(config.servers[0], {"KEY": "k3y", "HF": "hf_1"})
    assert resolved.args == ["--api-key", "k3y", "--admin-api-key=s3cret", "env:KEY"]
    assert resolved.env == {"HF_TOKEN": "hf_1", "A": "b"}
    assert "k3y" not in repr(config) + str(config)
    assert config.servers[0].env["HF_TOKEN"] == "env:HF"


@pytest.mark.parametrize(
    ("content", "environ", "fragment"),
    [
        (b"x", {"HF": "y"}, "variable KEY"),
        (b"x", {"KEY": "", "HF": "y"}, "variable KEY"),
        (b"x", {"KEY": "k"}, "variable HF"),
        (b"", {"KEY": "k", "HF": "y"}, "file "),
        (b"\xff", {"KEY": "k", "HF": "y"}, "file "),
        (b"x" * 70_000, {"KEY": "k", "HF": "y"}, "file "),
        (None, {"KEY": "k", "HF": "y"}, "file "),
    ],
)
def test_missing_secrets(
    write: Write, tmp_path: Path, content: bytes | None, environ: dict[str, str], fragment: str
) -> None:
    secret = tmp_path / "secret"
    if content is not None:
        secret.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        resolve_secrets(load(write(SECRETS % secret)).hosts[0].servers[0], environ)
    assert fragment in caught.value.what
    assert caught.value.where == "server s"


# --------------------------------------------------------------------------- init
def test_example_for_keeps_user_and_port(write: Write) -> None:
    text = example_for(["root@10.0.0.1:2222", "gpu[01-02]", "me@n[1-2]:23", "on", "[2001:db8::1]:22"])
    inventory = load(write(text))
    assert [(h.name, h.user, h.port) for h in inventory.hosts] == [
        ("10.0.0.1", "root", 2222),
        ("gpu01", None, None),
        ("gpu02", None, None),
        ("n1", "me", 23),
        ("n2", "me", 23),
        ("on", None, None),
        ("2001:db8::1", None, 22),
    ]
    assert inventory.hosts[0].capture.spec().layers
    assert "#" in text


def test_example_for_takes_what_is_known(write: Write) -> None:
    text = example_for(["h"], python="/a b/python", model_path="/m: #x", tp=4, layers=[1, 2], capture_dir="/d")
    config = load(write(text)).hosts[0]
    assert (config.servers[0].python, config.servers[0].model_path, config.servers[0].tp) == (
        "/a b/python",
        "/m: #x",
        4,
    )
    assert (config.capture.layers, config.capture.dir) == ((1, 2), "/d")


@pytest.mark.parametrize("name", ["a: b", "a\nb", "{}", "-x", "", "a#b", "x@y@z", "*", "@g", "a/../b", "$(id)"])
def test_example_for_refuses_hostile_names(name: str) -> None:
    with pytest.raises(UsageError):
        example_for(["good", name])


def test_example_for_refuses_duplicates_and_nothing() -> None:
    with pytest.raises(UsageError, match="stands twice"):
        example_for(["a", "root@a"])
    with pytest.raises(UsageError, match="no host was named"):
        example_for([])


@settings(deadline=None)
@given(st.lists(st.text("ab01.-_[]@: #'\"*é", min_size=1, max_size=8), min_size=1, max_size=3, unique=True))
def test_example_for_is_valid_or_refused(tmp_path_factory: pytest.TempPathFactory, names: list[str]) -> None:
    try:
        text = example_for(names)
    except UsageError:
        return
    path = tmp_path_factory.mktemp("init") / "i.yaml"
    path.write_text(text)
    assert load(path).hosts
    assert isinstance(yaml.safe_load(text), dict)
