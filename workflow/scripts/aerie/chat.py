"""Chat templates: a conversation rendered into token ids with a loss mask over what the target would generate.

Where a turn begins and ends is learned from the template's own renderings: it begins where the rendering of the messages
before it, with a generation prompt, ends, and lasts to the end-of-turn token of the rendering that ends with it.
"""

import datetime
import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from .conversations import Conversation, Message, count_roles
from .text_parts import Cutter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A special token that a user wrote is hidden from the template as <HIDDEN[0] number HIDDEN[1]>: two of Unicode's
# non-characters, which no text holds.
_HIDDEN = "\ufdd0", "\ufdd1"
_HIDDEN_PATTERN = re.compile(f"{_HIDDEN[0]}(\\d+){_HIDDEN[1]}")
# Templates that ask for today's date get this one, so that samples do not depend on the day.
_TODAY = datetime.date(2025, 1, 1)
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "aerie_probe", "description": "d", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


class Rendered(NamedTuple):
    """Token ids and loss mask (1: supervised) [tokens] of one row for training; turns: supervised turns."""

    input_ids: list[int]
    loss_mask: list[int]
    turns: int = 1


class Planned(NamedTuple):
    """A row not yet encoded: its text, in parts, and where each answer in it begins and ends, in characters."""

    parts: list[str]
    answers: list[tuple[int, int]]


class Unusable(Exception):
    """Why a conversation gives no row, as "reason: detail"."""


class Renderer:
    """Renders conversations with one tokenizer's chat template.

    end_tokens: ids that end a turn. options: arguments of the template, such as enable_thinking. last_turn_only: supervise
    the last answer alone.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        end_tokens: Sequence[int],
        options: dict[str, Any] | None = None,
        last_turn_only: bool = False,
    ) -> None:
        self.tokenizer, self.ends, self.last_turn_only = tokenizer, frozenset(end_tokens), last_turn_only
        self.options = dict(options or {})
        if "strftime_now" in str(tokenizer.chat_template):
            self.options.setdefault("strftime_now", _TODAY.strftime)
        self.backend = getattr(tokenizer, "backend_tokenizer", None)  # None: a tokenizer written in Python (Kimi's)
        if self.backend is not None:
            self.backend.no_truncation()
            self.backend.no_padding()
            self.backend.encode_special_tokens = False
            self.cutter = Cutter(self.backend)
        special = {token.content: number for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
        self.special = {text: special[text] for text in sorted(special, key=lambda text: (-len(text), text))}
        self.special_ids = frozenset(special.values())
        self.special_texts = list(self.special)
        self.special_pattern = re.compile("|".join(map(re.escape, self.special)) or r"(?!)")

    def render(self, conversation: Conversation) -> tuple[list[Rendered], list[str]]:
        """The rows of a conversation, and what is worth counting about it. Raises Unusable where there is none, and whatever
        the template raises."""
        plan, notes = self.plan(conversation)
        return self.rows(plan), notes

    def plan(self, conversation: Conversation) -> tuple[list[Rendered | Planned], list[str]]:
        """As `render`, its rows not yet encoded.

        One row with every answer supervised where the template is prefix-stable: where a longer conversation's text begins
        with the shorter one's. Where it rewrites history, as few rows as show each answer once with the prompt that it has
        in service.
        """
        if conversation.tokens:
            return [Rendered(*conversation.tokens, turns=count_turns(conversation.tokens[1]))], []
        notes: list[str] = []
        messages, tools = self._prepared(conversation.messages, conversation.tools, notes)
        answers = [
            place for place, one in enumerate(messages) if one["role"] == "assistant" and ("tool_calls" in one or one["content"].strip())
        ]
        if not answers:
            left_out = "".join(f"; {note}" for note in dict.fromkeys(conversation.notes))
            raise Unusable(f"no assistant turn with text: found {count_roles(messages)}{left_out}")
        if self.last_turn_only:
            answers = answers[-1:]
        texts = self._texts([messages[: place + 1] for place in answers], tools)
        if conversation.generated:  # a template that trims or rewrites an answer does not show what the target said
            prompts = self._texts([messages[:place] for place in answers], tools, True)
            said = [prompt + (messages[place]["content"] or "") for place, prompt in zip(answers, prompts, strict=True)]
            texts = [text if text.startswith(own) else own + self.closing for text, own in zip(texts, said, strict=True)]
            if conversation.cut and answers[-1] == len(messages) - 1:  # nothing followed
                texts[-1] = said[-1]
        starts = self._starts(messages, tools, answers, texts)
        for place, text, start in zip(answers, texts, starts, strict=True):
            if start is not None and any(call["function"]["name"] not in text[start:] for call in messages[place].get("tool_calls", ())):
                raise Unusable("chat template: leaves out a tool call")
            if start is not None and messages[place].get("reasoning_content", "").strip() not in text[start:]:
                notes.append("reasoning left out by the chat template")
        pending = [number for number, start in enumerate(starts) if start is not None]
        if not pending:
            raise Unusable("chat template: the rendering of an answer does not begin with its prompt")
        notes += ["answer that does not begin with its prompt, not supervised"] * (len(answers) - len(pending))
        rows: list[Rendered | Planned] = []
        same: dict[str, str] = {}
        while pending:
            text = texts[pending[-1]]
            inside = [number for number in pending if text.startswith(texts[number])]
            parts = [same.setdefault(part, part) for part in self._parts(text)]
            rows.append(Planned(parts, [(starts[number] or 0, len(texts[number])) for number in inside]))
            pending = [number for number in pending if number not in inside]
        return rows[::-1], notes

    def rows(self, plan: Sequence[Rendered | Planned]) -> list[Rendered]:
        """The planned rows of a conversation, encoded."""
        known: dict[str, list[int]] = {}
        return [one if isinstance(one, Rendered) else self._row(one, known) for one in plan]

    def _row(self, planned: Planned, known: dict[str, list[int]]) -> Rendered:
        ids, found = self._encode(planned.parts, planned.answers, known)
        mask = [0] * len(ids)
        for begin, end in found:
            closing = next((place for place in range(end - 1, begin - 1, -1) if ids[place] in self.ends), None)
            # What follows the end of turn (a line break) is the template's, not the target's.
            end = end if closing is None else closing + 1
            mask[begin:end] = [1] * (end - begin)
        return Rendered(ids, mask, len(found))

    def text(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None, ready: bool = False) -> str:
        """The template's text of the messages; ready: with the generation prompt behind them. Special tokens in them are hidden."""
        formed, tools = self._prepared(messages, tools, [])
        [text] = self._texts([formed], tools, ready)
        return text

    def prompt(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Token ids of the messages, ready for an answer."""
        return self._encode(self._parts(self.text(messages, tools, True)), [], {})[0]

    @cached_property
    def closing(self) -> str:
        """The text of the token that ends an answer."""
        [text] = self._texts([[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]], None)
        found = [token for token in self._encode(self._parts(text), [], {})[0] if token in self.ends]
        return str(self.tokenizer.decode(found[-1:])) if found else str(self.tokenizer.eos_token)

    @cached_property
    def no_thought(self) -> dict[str, bool]:
        """The option with which the template opens an answer with an empty thought; none where it has no such option."""
        probe = [{"role": "user", "content": "a"}]
        for name in ("enable_thinking", "thinking"):
            if name in str(self.tokenizer.chat_template) and self.options.get(name) is not False:
                option = {name: False}
                if self._texts([probe], None, True) != self._texts([probe], None, True, **option):
                    return option
        return {}

    @cached_property
    def call_form(self) -> tuple[str | None, bool] | None:
        """How the template wants a message with tool calls: its empty content, and whether arguments are text.

        None where it shows no tool calls. Templates differ, and the wrong form is an error or, worse, another text.
        """
        for content in ("", None):
            for as_text in (False, True):
                call = {"type": "function", "id": "call00000", "function": {"name": "aerie_probe", "arguments": {"city": "x"}}}
                calling = _formed({"role": "assistant", "content": "", "tool_calls": [call]}, (content, as_text))
                probe = [{"role": "user", "content": "a"}, calling]
                try:
                    [text] = self._texts([probe], [_PROBE_TOOL])
                    [without] = self._texts([probe[:1]], [_PROBE_TOOL])
                except Exception:  # noqa: BLE001 - a template that cannot take this form may raise anything
                    continue
                if text.startswith(without) and "aerie_probe" in text[len(without) :] and '"city"' in text[len(without) :]:
                    return content, as_text
        return None

    def _starts(self, messages: list[Message], tools: Any, answers: list[int], texts: list[str]) -> list[int | None]:
        """Where each answer begins in its text: behind the empty thought that the template opens for an answer without one,
        else behind the prompt. None where the text does not begin so."""
        starts: list[int | None] = [None] * len(answers)
        bare = [place for place, answer in enumerate(answers) if self.no_thought and not messages[answer].get("reasoning_content")]
        for options, wanted in ((self.no_thought, bare), ({}, range(len(answers)))):
            left = [place for place in wanted if starts[place] is None]
            prompts = self._texts([messages[: answers[place]] for place in left], tools, True, **options) if left else []
            for place, prompt in zip(left, prompts, strict=True):
                if texts[place].startswith(prompt):
                    starts[place] = len(prompt)
        return starts

    def _texts(self, chats: list[Any], tools: Any, add_generation_prompt: bool = False, **options: Any) -> list[str]:
        given = {"tools": tools, "tokenize": False, "add_generation_prompt": add_generation_prompt, **self.options, **options}
        if self.backend is None:  # such a tokenizer may have a function of its own, which takes one chat
            return [str(self.tokenizer.apply_chat_template(chat, **given)) for chat in chats]
        return list(self.tokenizer.apply_chat_template(chats, **given))

    def _prepared(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, notes: list[str]
    ) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """Messages and tools as the template takes them; special tokens that they hold are hidden, and noted."""
        if any("tool_calls" in message for message in messages):
            if self.call_form is None:
                raise Unusable("chat template: shows no tool calls")
            messages = [_formed(message, self.call_form) if "tool_calls" in message else message for message in messages]
        if any("reasoning_content" in message for message in messages):
            messages = [
                {**message, "thinking": message["reasoning_content"]} if "reasoning_content" in message else message for message in messages
            ]
        return self._hide(list(messages), notes), self._hide(tools, notes)

    def _hide(self, value: Any, notes: list[str]) -> Any:
        """The value with each special token in its strings hidden; itself where there is none."""
        if isinstance(value, str):
            if not self.special_pattern.search(value):
                return value
            notes += ["special token in a text"] * len(self.special_pattern.findall(value))
            if self.backend is None:
                return value
            return self.special_pattern.sub(lambda found: f"{_HIDDEN[0]}{self.special_texts.index(found[0])}{_HIDDEN[1]}", value)
        if isinstance(value, dict):
            return {key: self._hide(part, notes) if key not in ("role", "type") else part for key, part in value.items()}
        if isinstance(value, list):
            return [self._hide(part, notes) for part in value]
        return value

    def _parts(self, text: str) -> list[str]:
        """The text in parts that may be encoded apart."""
        return [text] if self.backend is None or _HIDDEN[0] in text else self.cutter.parts(text)

    def _encode(
        self, parts: Sequence[str], spans: Sequence[tuple[int, int]], known: dict[str, list[int]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a text in parts, and the token range of each span of characters.

        A span always begins at a token: in service, the prompt is encoded without what follows it. known: the ids of the
        parts encoded before, and of those of this text from now on.
        """
        if self.backend is None or any(_HIDDEN[0] in part for part in parts):
            return self._encode_pieces("".join(parts), spans)
        starts = {begin for begin, _ in spans}
        edges = sorted({edge for span in spans for edge in span}, reverse=True)
        places: dict[int, int] = {}  # of each edge, the first token from there on
        ids: list[int] = []
        begin = 0
        for part in parts:
            end = begin + len(part)
            if edges and edges[-1] == begin:
                places[edges.pop()] = len(ids)
            if edges and edges[-1] < end:
                encoding = self.backend.encode(part, add_special_tokens=False)
                known[part] = encoding.ids
            elif part not in known:  # no need of offsets, which take a fifth of the time
                known[part] = self.backend.encode_batch_fast([part], add_special_tokens=False)[0].ids
            while edges and edges[-1] < end:
                edge = edges.pop()
                token = encoding.char_to_token(edge - begin)
                chars = encoding.token_to_chars(token) if token is not None else None
                if token is None or chars is None or (edge in starts and chars[0] != edge - begin):
                    return self._encode_pieces("".join(parts), spans)
                places[edge] = len(ids) + token
            ids += known[part]
            begin = end
        places[begin] = len(ids)
        return ids, [(places[begin], places[end]) for begin, end in spans]

    def _encode_pieces(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[tuple[int, int]]]:
        """As `_encode`, piece by piece between the spans' edges; what is hidden stays text."""
        ids: list[int] = []
        places = {0: 0}
        for begin, end in pairwise(sorted({0, len(text), *(edge for span in spans for edge in span)})):
            for piece, as_text in self._pieces(text[begin:end]):
                ids += self._piece_ids(piece, as_text)
            places[end] = len(ids)
        return ids, [(places[begin], places[end]) for begin, end in spans]

    def _pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        """The text in pieces; with hidden tokens in it, cut at the template's own special tokens."""
        if _HIDDEN[0] not in text:
            yield text, False
            return
        at = 0
        for found in self.special_pattern.finditer(text):
            yield self._shown(text[at : found.start()]), True
            yield found[0], False
            at = found.end()
        yield self._shown(text[at:]), True

    def _shown(self, text: str) -> str:
        return _HIDDEN_PATTERN.sub(lambda found: self.special_texts[int(found[1])], text)

    def _piece_ids(self, text: str, as_text: bool) -> list[int]:
        if self.backend is None:
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if not as_text:
            return list(self.backend.encode(text, add_special_tokens=False).ids)
        self.backend.encode_special_tokens = True
        try:
            return list(self.backend.encode(text, add_special_tokens=False).ids)
        finally:
            self.backend.encode_special_tokens = False


def _formed(message: Message, form: tuple[str | None, bool]) -> Message:
    """A message with tool calls in the form that a template wants."""
    content, as_text = form
    calls = message["tool_calls"]
    if as_text:
        calls = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}}
            for call in calls
        ]
    return {**message, "content": message["content"] or content, "tool_calls": calls}


def count_turns(mask: Sequence[int]) -> int:
    """How many supervised runs a mask has."""
    return sum(bit and not before for before, bit in pairwise([0, *mask]))
