"""Arguments that a server's parser refused, and what it would have taken instead: argparse's own last words."""

from __future__ import annotations

import difflib
import re
from typing import List

from fleetdump.agent.scrub import scrub

EXCERPT = 400
OPTIONS = 3000
"""Options of a usage that are kept; SGLang has some 700."""
LIKE = 0.6
"""How alike two words must be, of 0 to 1, as difflib counts it."""
_REFUSED = re.compile(
    r"^[\w./ -]{1,80}: error: (?P<what>unrecognized arguments: .+|argument \S+: .+|"
    r"the following arguments are required: .+|ambiguous option: .+)"
)
_USAGE = re.compile(r"^(?:usage: |\[|--?\w)")
_OPTION = re.compile(r"(?<![\w-])--[a-zA-Z][\w-]*")
_UNKNOWN = re.compile(r"^unrecognized arguments: .*?(?P<word>--[^\s=]+)")
_CHOICE = re.compile(r"invalid choice: '?(?P<word>[^'\s]+)'? \(choose from (?P<choices>.+)\)$")
_WORDS = re.compile(r"[\w./-]+")


class Usage:
    """Reads lines; ``refused`` is the first refusal in the parser's own words, empty before there is one."""

    def __init__(self) -> None:
        self.refused = ""
        self._options: List[str] = []
        self._word = ""
        self._known: List[str] = []

    def feed(self, line: str) -> None:
        """Take one line, without blanks around it."""
        if self.refused:
            return
        if _USAGE.match(line) and len(self._options) < OPTIONS:
            self._options += _OPTION.findall(line)
            return
        match = _REFUSED.match(line)
        if match:
            self._refuse(match["what"])

    def nearest(self) -> str:
        """The known option or choice that is most like the refused one; empty when none is."""
        return (difflib.get_close_matches(self._word, self._known, 1, LIKE) or [""])[0] if self._word else ""

    def _refuse(self, what: str) -> None:
        self.refused = scrub(what[:EXCERPT])
        unknown, choice = _UNKNOWN.match(what), _CHOICE.search(what)
        if unknown:
            self._word, self._known = unknown["word"], sorted(set(self._options))
        elif choice:
            self._word, self._known = choice["word"], _WORDS.findall(choice["choices"])
