"""Secrets taken out of command lines, log lines and proxy addresses before they are stored or shown, and what a
terminal would obey."""

from __future__ import annotations

import re
from typing import List, Sequence

from fleetdump.agent.arguments import is_secret_option

HIDDEN = "***"

# Every pattern that begins with a repetition begins at a word's start alone: else a long line costs the square of its
# length.
_NAME = r"[\w-]*(?:api[_-]?key|secret|password|passwd|access[_-]?token|auth[_-]?token|hf[_-]?token|admin[_-]?key)[\w-]*"
_SECRET_OPTION = re.compile(
    rf"--?(?:(?:.*[-_])?(?:key|token|secret|password|passwd|credentials?)|{_NAME})\Z", re.IGNORECASE
)
_ASSIGNED = re.compile(
    rf"(?<![\w-])(?P<name>{_NAME})(?P<mark>['\"]?\s*[=:]\s*|\s+)(?P<quote>['\"]?)(?!None\b)[^\s'\",)&]+", re.I
)
_OPTION_VALUE = re.compile(rf"(?<![\w-])(?P<name>--{_NAME})[ =]+(?P<quote>['\"]?)[^\s'\"]+", re.IGNORECASE)
_BEARER = re.compile(r"(?P<name>\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{6,}", re.IGNORECASE)
_TOKEN = re.compile(r"\b(?:hf_[A-Za-z0-9]{10,}|sk-[A-Za-z0-9_-]{10,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16})")
_USERINFO = re.compile(r"(?<![a-z0-9+.-])(?P<scheme>[a-z][a-z0-9+.-]*://)[^/\s@'\"]+@", re.IGNORECASE)
_ADDRESS = re.compile(r"(?:[a-z][a-z0-9+.-]*://)?(?:[^@/\s]*@)?(?P<address>\[[0-9a-f:]+\](?::\d+)?|[^/@\s?#]+)", re.I)
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b.?"  # terminal escapes, whole
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]+"
)


def printable(text: str) -> str:
    """``text`` as one line that does nothing to a terminal: no escapes, control characters or changes of direction."""
    return _CONTROL.sub(lambda match: "" if match[0][0] == "\x1b" else "\ufffd", text)


def scrub(text: str) -> str:
    """``text`` without API keys, tokens, passwords and credentials in addresses."""
    text = _USERINFO.sub(rf"\g<scheme>{HIDDEN}@", text)
    text = _OPTION_VALUE.sub(rf"\g<name> \g<quote>{HIDDEN}", text)
    text = _ASSIGNED.sub(_hide_assigned, text)
    text = _BEARER.sub(rf"\g<name>{HIDDEN}", text)
    return _TOKEN.sub(HIDDEN, text)


def scrub_argv(argv: Sequence[str]) -> List[str]:
    """A command line with the values of secret options hidden (``--api-key …`` and ``--api-key=…``)."""
    clean: List[str] = []
    hide = False
    for word in argv:
        option, equals, _ = word.partition("=")
        secret = bool(_SECRET_OPTION.match(option)) or is_secret_option(option)
        if hide:
            clean.append(HIDDEN)
        else:
            clean.append(f"{option}={HIDDEN}" if secret and equals else scrub(word))
        hide = secret and not equals and not hide
    return clean


def proxy_address(value: str) -> str:
    """``host:port`` of a proxy variable, without scheme, credentials and path."""
    match = _ADDRESS.match(value.strip())
    return match["address"] if match else ""


def _hide_assigned(match: re.Match[str]) -> str:
    if match["mark"].isspace():  # plain prose ("the api key is …") has no value to hide; options were done before
        return match[0]
    return f"{match['name']}{match['mark']}{match['quote']}{HIDDEN}"
