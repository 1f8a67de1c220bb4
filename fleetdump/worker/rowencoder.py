"""One row into token ids and a loss mask, by a model's own tokenizer and chat template.

A mask has one entry a token, 1 where an assistant wrote the token, and is not shifted. A wrong mask is worse than a
missing sample: what cannot be masked with certainty is rejected with reason ``template_error``.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fleetdump.agent.formats import Row

GENERATION_TAG = re.compile(r"\{%-?\s*generation\b")
SPAN_CHARACTERS = 160
UNLIMITED = 1 << 40
MIN_TOKENS = 2
"""Nothing follows a single token that a draft model could learn."""

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None


class RejectRow(Exception):
    """A row that cannot become a sample; ``reason`` is one of docs/formats.md's."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason


@dataclass
class Encoded:
    """Ids and mask (equal lengths) and the method that found the mask. ``cut``: tokens left out at the end."""

    ids: list[int]
    mask: list[int]
    method: str
    cut: int = 0


class RowEncoder:
    """Encodes rows with one tokenizer. ``limit``: most tokens that a sample may have; a longer one is rejected, or cut
    at its end with ``truncate``."""

    def __init__(self, tokenizer: Any, vocab_size: int, limit: int = UNLIMITED, truncate: bool = False):
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.limit = limit
        self.truncate = truncate
        template = tokenizer.chat_template
        self.template = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
        self.marks_generation = bool(template) and bool(GENERATION_TAG.search(self.template))

    def encode(self, row: Row) -> Encoded:
        """Ids and mask of ``row``; raises ``RejectRow``."""
        if row.input_ids is not None:
            encoded = self._given(row.input_ids, row.loss_mask)
        elif row.text is not None:
            ids = self._ids(row.text)
            encoded = Encoded(ids, [1] * len(ids), "text")
        else:
            encoded = self._conversation(row.messages or [], row.tools)
        return self._within_limits(encoded)

    def spans(self, encoded: Encoded) -> Iterator[str]:
        """Each run of supervised tokens, decoded and cut to what a screen shows."""
        start = None
        for n, entry in enumerate([*encoded.mask, 0]):
            if entry and start is None:
                start = n
            elif not entry and start is not None:
                yield self.tokenizer.decode(encoded.ids[start:n])[:SPAN_CHARACTERS]
                start = None

    def _within_limits(self, encoded: Encoded) -> Encoded:
        tokens = len(encoded.ids)
        if not tokens:
            raise RejectRow("empty", "no token")
        if tokens < MIN_TOKENS:
            raise RejectRow("too_short", "one token: nothing follows it that a draft model could learn")
        if tokens <= self.limit:
            return encoded
        if not self.truncate:
            raise RejectRow("too_long", f"{tokens} tokens, limit {self.limit}")
        return Encoded(encoded.ids[: self.limit], encoded.mask[: self.limit], encoded.method, tokens - self.limit)

    def _given(self, ids: list[int], mask: list[int] | None) -> Encoded:
        mask = [1] * len(ids) if mask is None else mask
        if len(mask) != len(ids):
            raise RejectRow("template_error", f"loss_mask has {len(mask)} entries, input_ids {len(ids)}")
        outside = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if outside is not None:
            raise RejectRow("not_in_vocabulary", f"id {outside} is outside the vocabulary of {self.vocab_size}")
        if any(entry not in (0, 1) for entry in mask):
            raise RejectRow("template_error", "loss_mask has entries other than 0 and 1")
        return Encoded(ids, mask, "given")

    # ------------------------------------------------------------------ conversations
    def _conversation(self, messages: Messages, tools: Tools) -> Encoded:
        if not messages:
            raise RejectRow("empty", "a conversation without messages")
        if not self.tokenizer.chat_template:
            raise RejectRow("template_error", "the model's tokenizer has no chat template")
        parsed = with_parsed_arguments(messages)
        if parsed is messages:
            return self._by_template(messages, tools)
        try:
            return self._by_template(parsed, tools)
        except RejectRow:  # a template that wants the arguments as text
            return self._by_template(messages, tools)

    def _by_template(self, messages: Messages, tools: Tools) -> Encoded:
        try:
            if self.marks_generation:
                return self._by_generation(messages, tools)
            return self._by_prefix(messages, tools)
        except RejectRow:
            raise
        except Exception as error:  # templates raise what they like: jinja errors, raise_exception(), KeyError
            raise RejectRow("template_error", f"{type(error).__name__}: {error}"[:300]) from error

    def _by_generation(self, messages: Messages, tools: Tools) -> Encoded:
        """The template itself marks what an assistant writes."""
        out = self._tokenised(messages, tools, return_assistant_tokens_mask=True)
        return Encoded(list(out["input_ids"]), list(out["assistant_masks"]), "generation")

    def _by_prefix(self, messages: Messages, tools: Tools) -> Encoded:
        """Supervised is what each assistant message adds to the conversation before it (with the generation prompt).

        Sound only where growing the conversation grows the token sequence at its end, which is checked for each
        message; where tokens merge across a boundary, but the texts do grow, character offsets decide. The ids must be
        those that the template gives for the whole conversation, as the server would have them.
        """
        text = self._render(messages, tools, prompt=False)
        bounds = []
        for n, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self._render(messages[:n], tools, prompt=True) if n else ""
            after = self._render(messages[: n + 1], tools, prompt=False)
            bounds.append((before, after))
        ids = self._ids(text)
        if list(self._tokenised(messages, tools)["input_ids"]) != ids:
            raise RejectRow("template_error", "the rendered text has other ids than the chat template gives")
        mask = self._mask_by_ids(ids, bounds)
        if mask is not None:
            return Encoded(ids, mask, "prefix")
        return self._mask_by_offsets(text, ids, bounds)

    def _mask_by_ids(self, ids: list[int], bounds: list[tuple[str, str]]) -> list[int] | None:
        mask = [0] * len(ids)
        for before, after in bounds:
            start, end = self._ids(before), self._ids(after)
            if ids[: len(start)] != start or ids[: len(end)] != end or len(end) <= len(start):
                return None
            mask[len(start) : len(end)] = [1] * (len(end) - len(start))
        return mask

    def _mask_by_offsets(self, text: str, ids: list[int], bounds: list[tuple[str, str]]) -> Encoded:
        for before, after in bounds:
            if not (text.startswith(before) and text.startswith(after) and len(after) > len(before)):
                raise RejectRow(
                    "template_error",
                    "the chat template renders earlier messages differently as the conversation grows and has no "
                    "{% generation %} marks, so assistant tokens cannot be told apart",
                )
        out = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        mask = [0] * len(ids)
        for n, (left, right) in enumerate(out["offset_mapping"]):
            if any(len(before) <= left and right <= len(after) for before, after in bounds) and right > left:
                mask[n] = 1
        return Encoded(ids, mask, "offsets")

    def _tokenised(self, messages: Messages, tools: Tools, **options: Any) -> Any:
        # Said for those tokenizers of a model's own that end with the generation prompt unless told otherwise.
        options["add_generation_prompt"] = False
        return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=True, **options)

    def _render(self, messages: Messages, tools: Tools, prompt: bool) -> str:
        return str(
            self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)
        )

    def _ids(self, text: str) -> list[int]:
        try:
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        except (TypeError, UnicodeError) as error:  # a lone surrogate has no UTF-8 form
            raise RejectRow("template_error", f"cannot be tokenised: {error}"[:300]) from error


def with_parsed_arguments(messages: Messages) -> Messages:
    """The messages with each tool call's ``arguments`` as an object, where data sets keep them as a JSON text:
    templates render objects, and SGLang parses them so before it renders. ``messages`` itself when there is nothing
    to parse."""
    parsed = copy.deepcopy(messages)
    for message in parsed:
        for call in message.get("tool_calls") or []:
            function = call.get("function")
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                function["arguments"] = _as_object(function["arguments"])
    return messages if parsed == messages else parsed


def _as_object(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text
