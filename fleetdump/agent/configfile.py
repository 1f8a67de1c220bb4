"""The file of SGLang's ``--config``, read as SGLang reads it: by the server's own interpreter, which has YAML."""

from __future__ import annotations

from typing import Dict, List

from fleetdump.agent import engine
from fleetdump.agent.arguments import option_value
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.specs import ServerSpec

# As ConfigArgumentMerger of SGLang 0.5.5 to 0.5.23: a true flag stands alone, a false one is left out.
_READ = r"""
import json, sys
try:
    import yaml
    with open(json.load(sys.stdin)["path"]) as file:
        config = yaml.safe_load(file) or {}
    args = []
    for key, value in config.items():
        if value is not False and value != []:
            args.append("--%s" % key)
            args += [str(item) for item in value] if isinstance(value, list) else [] if value is True else [str(value)]
    answer = {"args": args}
except Exception as error:
    answer = {"error": "%s: %s" % (type(error).__name__, error)}
json.dump(answer, sys.stdout)
"""


def config_path(server: ServerSpec) -> str:
    """The path that ``--config`` names, empty without one."""
    return option_value(server.args, ["--config"])


def config_arguments(server: ServerSpec, env: Dict[str, str]) -> List[str]:
    """The arguments that the file stands for; none without a file. ``env`` is the server's environment. Raises
    ``AgentFailure`` failed when the file cannot be read."""
    path = config_path(server)
    if not path:
        return []
    answer = engine.run_json(engine.find_python(server.python), ["-B", "-c", _READ], {"path": path}, env)
    if "error" in answer:
        raise AgentFailure(
            "failed",
            "the file of --config cannot be read",
            where=path,
            why=answer["error"],
            next_step="give an absolute path of a YAML file with one mapping of options",
        )
    return [str(arg) for arg in answer["args"]]
