"""The ``servers`` list: templates of servers, replicas dealt their ports and GPUs, and what two may not share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from yaml.nodes import Node

from fleetdump.agent.arguments import is_secret_option, own_option
from fleetdump.agent.formats import SERVER_NAME
from fleetdump.agent.specs import ServerSpec
from fleetdump.hostpatterns import is_address
from fleetdump.inventory.secrets import is_reference, is_secret_name
from fleetdump.yamlmarks import Parser, Reader, Schema, Wrong, line_of

MAX_REPLICAS = 256
MAX_GPUS = 1024
_INDEX = "{i}"
_FLAG = re.compile(r"--[a-z][a-z0-9-]*\Z")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_HARMLESS = re.compile(r"(?:[0-9.]+|true|false|)\Z", re.IGNORECASE)


@dataclass(frozen=True)
class ServerTemplate:
    """One item of ``servers``, which stands for ``replicas`` servers; ``python`` is "" where the host's is meant."""

    line: int
    name: str
    model_path: str
    port: int
    replicas: int = 1
    python: str = ""
    host: str = "127.0.0.1"
    tp: int = 1
    dp: int = 1
    pp: int = 1
    gpus: tuple[int, ...] = ()
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    without: tuple[str, ...] = ()

    @property
    def gpus_each(self) -> int:
        """GPUs that one server takes: data parallelism multiplies them unless it is inside attention only."""
        return self.tp * self.pp * (1 if "--enable-dp-attention" in self.args else self.dp)

    @property
    def on_cpu(self) -> bool:
        """Whether the arguments say ``--device cpu``."""
        return "--device=cpu" in self.args or ("--device", "cpu") in pairwise(self.args)

    def specs(self, host_python: str) -> Iterator[ServerSpec]:
        """The servers: names and ports counted up, GPUs dealt out in order."""
        each = len(self.gpus) // self.replicas
        for i in range(self.replicas):
            yield ServerSpec(
                name=self.name.replace(_INDEX, str(i)),
                python=self.python or host_python,
                model_path=self.model_path,
                port=self.port + i,
                host=self.host,
                tp=self.tp,
                dp=self.dp,
                pp=self.pp,
                gpus=list(self.gpus[i * each : (i + 1) * each]),
                args=list(self.args),
                env=dict(self.env),
                without=list(self.without),
            )


def parse_servers(reader: Reader, node: Node, what: str) -> tuple[ServerTemplate, ...]:
    """The templates of a ``servers`` list; servers that share a name, port or GPU are noted as mistakes."""
    templates = reader.list_of(_server, node, what)
    if not reader.items(node, what):
        reader.fail(node, f"{what}: is empty")
    _check_shared(reader, what, templates)
    return tuple(templates)


def _server(reader: Reader, node: Node, what: str) -> ServerTemplate:
    required = ("name", "model_path", "port")
    values = reader.fields(node, what, SERVER, required)
    if any(key not in values for key in required):
        raise Wrong
    template = ServerTemplate(line=line_of(node), **values)
    _check_replicas(reader, node, what, template)
    if "gpus" in values:
        _check_gpus(reader, node, what, template)
    elif "replicas" in values and not template.on_cpu:
        values["gpus"] = tuple(range(template.replicas * template.gpus_each))
    return ServerTemplate(line=line_of(node), **values)


def _check_replicas(reader: Reader, node: Node, what: str, template: ServerTemplate) -> None:
    if template.replicas > 1 and _INDEX not in template.name:
        reader.fail(node, f"{what}: {template.replicas} replicas need {_INDEX} in their name, for instance 'r{_INDEX}'")
    if template.port + template.replicas - 1 > 65535:
        reader.fail(node, f"{what}: {template.replicas} ports from {template.port} on go beyond 65535")
    last = template.name.replace(_INDEX, str(template.replicas - 1))
    if not SERVER_NAME.match(last):
        reader.fail(node, f"{what}.name: {last!r} is not a name of 1 to 32 letters, digits, '_' and '-'")


def _check_gpus(reader: Reader, node: Node, what: str, template: ServerTemplate) -> None:
    each, rest = divmod(len(template.gpus), template.replicas)
    if rest or each < template.gpus_each:
        need = template.replicas * template.gpus_each
        reader.fail(
            node,
            f"{what}.gpus: {template.replicas} x {template.gpus_each} GPUs (tp {template.tp}, dp {template.dp}, pp "
            f"{template.pp}) are {need}, but the list has {len(template.gpus)}",
        )


def _check_shared(reader: Reader, what: str, templates: Sequence[ServerTemplate]) -> None:
    owners: dict[tuple[str, Any], str] = {}
    several = sum(template.replicas for template in templates) > 1
    for template in templates:
        if several and not template.gpus and not template.on_cpu:
            reader.note(
                template.line,
                f"{what}: server {template.name!r} names no gpus; where a host has several servers each says which, "
                "for instance gpus: [0, 1]",
            )
        for spec in template.specs(""):
            uses = [("name", spec.name), ("port", spec.port), *(("GPU", gpu) for gpu in spec.gpus)]
            for use in uses:
                if use in owners:
                    reader.note(
                        template.line, f"{what}: {use[0]} {use[1]} is used by {owners[use]!r} and {spec.name!r}"
                    )
                owners.setdefault(use, spec.name)


# --------------------------------------------------------------------------- parsers
def bounded(low: int, high: int) -> Parser[int]:
    """A parser of whole numbers in ``low..high``."""
    return lambda reader, node, what: reader.integer(node, what, low, high)


def interpreter(reader: Reader, node: Node, what: str) -> str:
    """A Python interpreter on the host: an absolute path or a command's name."""
    value = reader.text(node, what)
    if value.startswith("-") or ("/" in value and not value.startswith("/")):
        reader.fail(node, f"{what}: {value!r} is neither an absolute path nor a command's name")
    return value


def _name(reader: Reader, node: Node, what: str) -> str:
    value = reader.text(node, what)
    rest = value.replace(_INDEX, "0")
    if not SERVER_NAME.match(rest):
        reader.fail(
            node,
            f"{what}: {value!r} is not a name of 1 to 32 letters, digits, '_' and '-' (with {_INDEX} for replicas)",
        )
    return value


def _model_path(reader: Reader, node: Node, what: str) -> str:
    value = reader.text(node, what)
    if value.startswith("-"):
        reader.fail(node, f"{what}: {value!r} begins with '-'")
    return value


def _listen(reader: Reader, node: Node, what: str) -> str:
    value = reader.text(node, what)
    if not is_address(value):
        reader.fail(node, f"{what}: {value!r} is not an address to listen on")
    return value


def _gpus(reader: Reader, node: Node, what: str) -> tuple[int, ...]:
    gpus = reader.list_of(bounded(0, MAX_GPUS - 1), node, what)
    if len(set(gpus)) < len(gpus):
        reader.fail(node, f"{what}: a GPU stands twice")
    return tuple(gpus)


def _args(reader: Reader, node: Node, what: str) -> tuple[str, ...]:
    args = reader.list_of(_arg, node, what)
    for previous, arg in pairwise(args):
        if is_secret_option(previous):
            _check_secret(reader, node, f"{what}: {previous}", arg)
    return tuple(args)


def _arg(reader: Reader, node: Node, what: str) -> str:
    value = reader.raw_text(node, what)
    flag, equals, rest = value.partition("=")
    if own_option(flag):
        reader.fail(node, f"{what}: {flag} is set by the key {own_option(flag)!r}")
    if flag.startswith("--") and " " in flag:
        reader.fail(
            node, f"{what}: {flag.split()[0]!r} and its value are one argument with a space; write two list items"
        )
    if equals and is_secret_option(flag):
        _check_secret(reader, node, f"{what}: {flag}", rest)
    return value


def _env(reader: Reader, node: Node, what: str) -> tuple[tuple[str, str], ...]:
    env: list[tuple[str, str]] = []
    for name, (key, item) in reader.mapping(node, what).items():
        if not _ENV_NAME.match(name):
            reader.fail(key, f"{what}: {name!r} is not the name of an environment variable")
        value = reader.raw_text(item, f"{what}.{name}")
        if is_secret_name(name) and not _HARMLESS.match(value):
            _check_secret(reader, item, f"{what}.{name}", value)
        env.append((name, value))
    return tuple(env)


def _check_secret(reader: Reader, node: Node, what: str, value: str) -> None:
    if not is_reference(value):
        reader.fail(node, f"{what}: a secret is given by reference: env:NAME or file:/absolute/path")


def _without(reader: Reader, node: Node, what: str) -> tuple[str, ...]:
    flags = reader.list_of(Reader.text, node, what)
    for flag in flags:
        if not _FLAG.match(flag):
            reader.fail(node, f"{what}: {flag!r} is not a flag such as --disable-radix-cache")
    return tuple(flags)


SERVER: Schema = {
    "name": _name,
    "model_path": _model_path,
    "port": bounded(1, 65535),
    "host": _listen,
    "replicas": bounded(1, MAX_REPLICAS),
    "python": interpreter,
    "tp": bounded(1, MAX_GPUS),
    "dp": bounded(1, MAX_GPUS),
    "pp": bounded(1, MAX_GPUS),
    "gpus": _gpus,
    "args": _args,
    "env": _env,
    "without": _without,
}
