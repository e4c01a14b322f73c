"""Conversations: the shapes they come in, and their rendering into token ids with a loss mask."""

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import AerieError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

# ShareGPT's names for the roles.
_ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system", "tool": "tool"}


class Conversation(NamedTuple):
    """One row of a source. messages: [{"role", "content"}, …]; problem: why the row is not usable ("" if it is).

    cut: the last answer was cut off, so that no end of turn follows it.
    """

    source: str
    line: int
    messages: list[Message]
    problem: str = ""
    cut: bool = False


def read_conversations(paths: Sequence[Path]) -> Iterator[Conversation]:
    """Every row of the files (.json, .jsonl or .parquet), in order; nothing is dropped silently.

    AerieError where a file cannot be read at all; the message names file and line.
    """
    for path in paths:
        for line, row in _rows(path):
            yield read_row(row, str(path), line)


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    if not path.is_file():
        raise AerieError(f"{path}: no such file; expected a .json, .jsonl or .parquet file of conversations. Check the dataset's sources.")
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        yield from enumerate(pq.read_table(path).to_pylist(), 1)
    elif path.suffix == ".jsonl":
        with open(path, encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield number, _parse(text.strip(), path, number)
    elif path.suffix == ".json":
        rows = _parse(path.read_text(encoding="utf-8"), path, 1)
        if not isinstance(rows, list):
            raise AerieError(f"{path}:1: found a JSON {type(rows).__name__}, expected a list of rows")
        yield from enumerate(rows, 1)
    else:
        raise AerieError(f"{path}: found the ending {path.suffix!r}, expected .json, .jsonl or .parquet")


def _parse(text: str, path: Path, line: int) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        at = line + getattr(error, "lineno", 1) - 1
        raise AerieError(f"{path}:{at}: not valid JSON ({error}). Mend or remove this line.") from error


def read_row(row: Any, source: str, line: int) -> Conversation:
    """Recognises a row's shape: OpenAI messages, ShareGPT, instruction/input/output, prompt/response, MT-Bench turns,
    or what regenerate_responses writes. A row of prompts only has no assistant turn."""
    if not isinstance(row, dict):
        return Conversation(source, line, [], f"row is a {type(row).__name__}, expected an object")
    cut = row.get("finish_reason") == "length"
    try:
        messages = _messages(row)
    except (ValueError, TypeError, AttributeError) as error:
        return Conversation(source, line, [], f"a value of the wrong kind ({type(error).__name__}: {error})")
    if messages is None:
        return Conversation(source, line, [], f"unknown shape with keys {', '.join(sorted(map(str, row)))}")
    return Conversation(source, line, messages, _problem(messages), cut)


def _messages(row: dict[str, Any]) -> Any:
    """The row's messages, whatever its shape; None for a shape that is not known."""
    if "messages" in row:
        turns = row["messages"]
        return json.loads(turns) if isinstance(turns, str) else turns
    if "conversations" in row:
        return [
            {"role": _ROLES.get(str(turn.get("from")), turn.get("from")), "content": turn.get("value")} if isinstance(turn, dict) else turn
            for turn in row["conversations"] or []
        ]
    if "instruction" in row:
        return _pair("\n".join(text for text in (row["instruction"], row.get("input")) if text), row.get("output"))
    if "prompt" in row:
        return _pair(row["prompt"], row.get("response"))
    if "turns" in row:
        return [{"role": "user", "content": turn} for turn in row["turns"][:1]]
    return None


def _pair(prompt: Any, response: Any) -> list[Message]:
    return [{"role": "user", "content": prompt}] + ([{"role": "assistant", "content": response}] if response else [])


def _problem(messages: Any) -> str:
    if not isinstance(messages, list) or not messages:
        return "no messages"
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            return f"message {number} is a {type(message).__name__}, expected an object"
        if message.get("role") not in ("system", "user", "assistant", "tool"):
            return f"message {number} has the role {message.get('role')!r}"
        if not isinstance(message.get("content"), str):
            return f"message {number} has no text"
        try:
            message["content"].encode()
        except UnicodeEncodeError:
            return f"message {number} is not valid Unicode"
    if not any(message["role"] == "user" and message["content"].strip() for message in messages):
        return "no user message with text"
    return ""


class Rendered(NamedTuple):
    """Token ids and loss mask (1: supervised) [tokens] of one row for training."""

    input_ids: list[int]
    loss_mask: list[int]


def render(conversation: Conversation, tokenizer: "PreTrainedTokenizerBase", end_tokens: Sequence[int]) -> list[Rendered]:
    """Renders a conversation with the tokenizer's chat template; supervises what the target would generate.

    A turn begins where the template's rendering with a generation prompt ends, and lasts to the end-of-turn token,
    included. One row with every assistant turn supervised where the template is prefix-stable (a longer conversation's
    text begins with the shorter one's), else one row for each assistant turn. No row where no turn can be told apart.
    """
    messages = conversation.messages
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant" and message["content"].strip()]
    if not answers:
        return []
    prompts = [_apply(tokenizer, messages[:number], add_generation_prompt=True) for number in answers]
    texts = [_apply(tokenizer, messages[: number + 1]) for number in answers]
    stable = all(text.startswith(prompt) and texts[-1].startswith(text) for prompt, text in zip(prompts, texts, strict=True))
    last = len(answers) - 1
    if stable:
        groups = [(texts[-1], [(len(prompt), len(text)) for prompt, text in zip(prompts, texts, strict=True)], conversation.cut)]
    else:
        groups = [
            (text, [(len(prompt), len(text))], conversation.cut and number == last)
            for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
            if text.startswith(prompt)
        ]
    return [_masked(text, spans, cut, tokenizer, frozenset(end_tokens)) for text, spans, cut in groups]


def _apply(tokenizer: "PreTrainedTokenizerBase", messages: list[Message], add_generation_prompt: bool = False) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt))


def _masked(text: str, spans: list[tuple[int, int]], cut: bool, tokenizer: "PreTrainedTokenizerBase", ends: frozenset[int]) -> Rendered:
    ids, offsets = _tokens(text, spans, tokenizer)
    mask = [0] * len(ids)
    for start, stop in spans:
        inside = [position for position, (begin, end) in enumerate(offsets) if begin >= start and end <= stop and end > begin]
        closing = [position for position in inside if ids[position] in ends]
        if closing:  # what follows the end of turn (a line break) is the template's, not the target's
            inside = [position for position in inside if position <= closing[-1]]
        for position in inside:
            mask[position] = 1
    if cut:  # the answer was cut off: neither its end of turn nor what follows was generated
        length = max((position for position, bit in enumerate(mask) if bit), default=-1) + 1
        while length and ids[length - 1] in ends:
            length -= 1
        ids, mask = ids[:length], mask[:length]
    return Rendered(ids, mask)


def _tokens(text: str, spans: list[tuple[int, int]], tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of the text, and where each lies in it as (begin, end); in pieces between the spans' ends for a tokenizer
    written in Python (Kimi's), which gives no offsets."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    if "offset_mapping" in encoded:
        return list(encoded["input_ids"]), list(encoded["offset_mapping"])
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    for begin, end in pairwise(sorted({0, len(text), *(edge for span in spans for edge in span)})):
        piece = tokenizer(text[begin:end], add_special_tokens=False)["input_ids"]
        ids += piece
        offsets += [(begin, end)] * len(piece)
    if ids != encoded["input_ids"]:
        raise AerieError("a turn does not begin or end at a token, so its tokens cannot be told apart")
    return ids, offsets
