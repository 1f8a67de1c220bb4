"""``fleetdump init``: a commented inventory from host names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from fleetdump.errors import UsageError
from fleetdump.hostpatterns import Destination, PatternError, compress, expand

_TEMPLATE = """\
# Inventory of fleetdump: which hosts there are, what runs on them, what is captured.
# inventory/example.yaml of fleetdump's documentation shows every setting.
# Precedence: defaults < group < host < command line. ~/.ssh/config supplies what is silent here.

defaults:
  # user: root                        # else from ~/.ssh/config
  python: {python}  # the interpreter that imports sglang, on the hosts
  servers:
    - name: main
      model_path: {model_path}  # a folder on the hosts
      port: 8000
      tp: {tp}  # GPUs of the server
      # args: [--trust-remote-code]   # any further arguments of SGLang
      # env: {{HF_TOKEN: "env:HF_TOKEN"}} # secrets by reference: env:NAME or file:/path
  capture:
    layers: [{layers}]  # hidden states that are written, ascending
    layer_ids: input  # input j: the stream that enters layer j; output j: the one that leaves it
    dir: {capture_dir}  # a fast local disk of the hosts

# groups:
#   small: {{hosts: ["gpu[02-08]"], vars: {{connect_timeout: 20}}}}

hosts:
{hosts}"""

_PLAIN = re.compile(r"[a-z][a-z0-9.-]*\Z")
_YAML_WORDS = ("y", "n", "yes", "no", "on", "off", "true", "false", "null")


def example_for(
    hosts: Sequence[str],
    python: str = "/opt/sglang/bin/python",
    model_path: str = "/models/my-model",
    tp: int = 1,
    layers: Sequence[int] = (3, 31, 59),
    capture_dir: str = "/nvme/hidden-states",
) -> str:
    """A commented inventory that ``load`` accepts, for hosts written as ``[user@]host[:port]`` or ``gpu[01-08]``.

    Raises ``UsageError`` naming every host that is neither, or that stands twice.
    """
    lines: list[str] = []
    mistakes: list[str] = []
    seen: set[str] = set()
    for text in hosts:
        try:
            destinations = _destinations(text)
        except PatternError as error:
            mistakes.append(str(error))
            continue
        mistakes += [f"{d.host!r} stands twice" for d in destinations if d.host in seen]
        seen.update(d.host for d in destinations)
        lines += _host_lines(destinations)
    if mistakes or not lines:
        raise UsageError(
            "no inventory was written",
            why="\n".join(mistakes[:20]) or "no host was named",
            next_step="name hosts as host, user@host, host:port or gpu[01-08]",
        )
    return _TEMPLATE.format(
        python=json.dumps(python),
        model_path=json.dumps(model_path),
        tp=tp,
        layers=", ".join(map(str, layers)),
        capture_dir=json.dumps(capture_dir),
        hosts="\n".join(lines) + "\n",
    )


def _destinations(text: str) -> list[Destination]:
    return [Destination.parse(one) for one in ([text] if "::" in text else expand(text))]


def _host_lines(destinations: list[Destination]) -> Iterator[str]:
    """Lines for destinations that came from one argument, so that user and port are the same in all."""
    user, port = destinations[0].user, destinations[0].port
    settings = [f"user: {_quoted(user)}"] if user else []
    settings += [f"port: {port}"] if port else []
    for pattern in compress(destination.host for destination in destinations):
        yield f"  {_quoted(pattern)}:" + (f" {{{', '.join(settings)}}}" if settings else "")


def _quoted(text: str) -> str:
    return text if _PLAIN.match(text) and text not in _YAML_WORDS else json.dumps(text)
