"""Conversations: the shapes that rows come in, recognised one by one, and brought into one form.

A conversation's messages are those of OpenAI's chat format: {"role": system | user | assistant | tool, "content": str}, and
where the row has them "tool_calls" with arguments as an object, "tool_call_id", "name", and "reasoning_content".
A row that cannot be used has a problem: "reason" or "reason: detail".
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .sources import RawRow, Source, read_rows

Message = dict[str, Any]

_ROLES = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "model", "ai", "bot", "function_call", "tool_call"),
    "tool": ("tool", "function", "observation", "function_response", "tool_response", "ipython"),
}
_ROLE_OF = {name: role for role, names in _ROLES.items() for name in names}
_PROMPTS = ("prompt", "instruction", "question", "query")
_ANSWERS = ("response", "output", "answer", "completion", "chosen")
_INPUTS = ("input", "context")  # what a question is about
_SYSTEM = ("system", "system_prompt")
_MEDIA = ("images", "image", "videos", "video", "audios", "audio")
_REASONING = ("reasoning_content", "reasoning", "thinking")


class Conversation(NamedTuple):
    """One row of a source. problem: why it cannot be used ("" if it can); notes: what was left out of it.

    generated: the answers are the target's own, as they came; cut: the last of them was cut off, so that no end of turn
    follows it. tokens: (input_ids, loss_mask) of a tokenised row.
    """

    source: str
    line: int
    messages: list[Message]
    problem: str = ""
    cut: bool = False
    generated: bool = False
    tools: list[dict[str, Any]] | None = None
    tokens: tuple[list[int], list[int]] | None = None
    notes: tuple[str, ...] = ()


class _Problem(Exception):
    """Why a row cannot be used, as "reason: detail"."""


def read_conversations(paths: Sequence[Path]) -> Iterator[Conversation]:
    """Every row of the files, in order; nothing is dropped silently."""
    for path in paths:
        for row in read_rows(Source(path=str(path))):
            yield conversation_of(row)


def conversation_of(row: RawRow) -> Conversation:
    """The conversation of a row as it lies in a file."""
    data = row.data
    if isinstance(data, str):
        try:
            data = json.loads(data)
        except (ValueError, RecursionError) as error:
            return Conversation(row.source, row.line, [], f"not valid JSON: {error}")
    return read_row(data, row.source, row.line, row.generated)


def read_row(row: Any, source: str, line: int, generated: bool = False) -> Conversation:
    """Recognises a row's shape: OpenAI messages, ShareGPT, instruction/input/output, prompt/response, question/answer,
    preference pairs (the chosen answer), turns without answers, two people's chat, token ids, or what
    regenerate_responses writes (generated). A row of prompts only has no assistant message."""
    try:
        if not isinstance(row, dict):
            raise _Problem(f"not an object: row is a {type(row).__name__}")
        if row.get("input_ids") is not None:
            return Conversation(source, line, [], tokens=_tokens(row))
        media = next((key for key in _MEDIA if row.get(key)), None)
        if media:
            raise _Problem(f"needs {media}: only text can be prepared")
        notes: list[str] = []
        turns = _turns(row, notes)
        if not isinstance(turns, list):
            raise _Problem(f"wrong type: the messages are a {type(turns).__name__}, expected a list")
        if not turns:
            raise _Problem("no messages: the list is empty")
        messages = [_message(turn, number) for number, turn in enumerate(turns, 1)]
        _number_calls(messages)
        # An answer to nothing cannot be learned from: files split from longer conversations begin so.
        first = next((place for place, message in enumerate(messages) if message["role"] == "user"), None)
        if first is None or not any(message["role"] == "user" and message["content"].strip() for message in messages):
            raise _Problem(f"no user message with text: found {count_roles(messages)}")
        kept = [message for place, message in enumerate(messages) if place > first or message["role"] in ("system", "user")]
        notes += ["messages before the first user's left out"] * (len(messages) - len(kept))
        system = next((key for key in _SYSTEM if row.get(key)), None)
        if system:
            kept = with_system(kept, _text(row[system], system))
        # Other rows have a finish_reason, too: their answers are as the template shows them.
        cut = generated and row["finish_reason"] == "length"
        return Conversation(source, line, kept, "", cut, generated, _tools(row), notes=tuple(notes))
    except _Problem as problem:
        return Conversation(source, line, [], str(problem))


def count_roles(messages: Sequence[Message]) -> str:
    """The messages by role, for a person: "1 user, 2 assistant without text"."""
    counts = Counter(message["role"] + " without text" * (not message["content"].strip()) for message in messages)
    return ", ".join(f"{count} {role}" for role, count in counts.items())


def with_system(messages: list[Message], prompt: str | None) -> list[Message]:
    """The messages with a system prompt before them, where they have none."""
    if not prompt or any(message["role"] == "system" for message in messages):
        return messages
    return [{"role": "system", "content": prompt}, *messages]


def _turns(row: dict[str, Any], notes: list[str]) -> Any:
    """The row's messages as they are, whatever its shape. What is left out is noted."""
    for key in ("messages", "conversations", "conversation", "chosen_messages"):
        if row.get(key) is not None:
            turns = _parsed(row[key], key)
            if isinstance(turns, list) and any(isinstance(turn, list) for turn in turns):
                turns = _chat(turns)
            return [*turns, row["chosen"]] if isinstance(turns, list) and isinstance(row.get("chosen"), dict) else turns
    prompt = next((row[key] for key in _PROMPTS if row.get(key) is not None), None)
    answer = next((row[key] for key in _ANSWERS if row.get(key) not in (None, "")), None)
    if isinstance(answer, list) and len(answer) > 1 and all(isinstance(one, str) for one in answer):
        notes.append("alternative answers left out")  # to grade with: nobody gave them all
        answer = None
    if isinstance(prompt, list):  # messages, or turns of messages
        turns = [turn for part in prompt for turn in (part if isinstance(part, list) else [part])]
        return turns + (answer if isinstance(answer, list) else [_said("assistant", answer)] if answer is not None else [])
    if isinstance(answer, list) and all(isinstance(turn, dict) for turn in answer):
        roles = [turn.get("role", turn.get("from")) for turn in answer]
        return answer if "user" in roles or "human" in roles or prompt is None else [*_asked(row, prompt), *answer]
    if prompt is not None:
        return [*_asked(row, prompt), *([_said("assistant", answer)] if answer is not None else [])]
    if row.get("turns") is not None:
        if not isinstance(row["turns"], list):
            raise _Problem(f"wrong type: turns is a {type(row['turns']).__name__}, expected a list")
        return [turn if isinstance(turn, dict) else _said("user", turn) for turn in row["turns"]]
    for key in ("messages", "conversations"):
        if key in row:
            raise _Problem(f"no messages: {key} is null")
    raise _Problem(f"unknown shape: keys {', '.join(sorted(map(str, row))) or 'none'}")


def _said(role: str, content: Any) -> Message:
    return {"role": role, "content": content}


def _asked(row: dict[str, Any], prompt: Any) -> list[Message]:
    """What comes before the answer to a prompt: earlier turns, the prompt and what it is about."""
    history = [_said(role, text) for pair in _history(row) for role, text in zip(("user", "assistant"), pair, strict=True)]
    inputs = [_text(row[key], key) for key in _INPUTS if row.get(key)]
    return [*history, _said("user", "\n".join(text for text in (_text(prompt, "prompt"), *inputs) if text))]


def _history(row: dict[str, Any]) -> list[list[str]]:
    """Earlier turns of an instruction: [[prompt, answer], …]."""
    history = row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise _Problem("wrong type: history is not a list of pairs")
    return history


def _chat(turns: list[Any]) -> list[Any]:
    """Two people's chat, [[{sender, text}, …], …]: who speaks first is the user, what is said in one go is one message."""
    senders: list[Any] = []
    messages = []
    for turn in turns:
        said = turn if isinstance(turn, list) else [turn]
        if not all(isinstance(part, dict) and "sender" in part and isinstance(part.get("text"), str) for part in said):
            return turns
        if not said:
            continue
        sender = said[0]["sender"]
        senders += [sender] if sender not in senders else []
        if len(senders) > 2:
            raise _Problem("unknown role: a chat of more than two people")
        messages.append(_said(("user", "assistant")[senders.index(sender)], "\n".join(part["text"] for part in said)))
    return messages


def _message(turn: Any, number: int) -> Message:
    """One message, brought into OpenAI's form."""
    if not isinstance(turn, dict):
        raise _Problem(f"wrong type: message {number} is a {type(turn).__name__}, expected an object")
    name = turn.get("role", turn.get("from"))
    role = _ROLE_OF.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise _Problem(f"unknown role: message {number} has the role {name!r}")
    where = f"message {number}"
    content: Any = turn.get("content", turn.get("value"))
    message: Message = {"role": role}
    calls = turn.get("tool_calls") or []
    if name in ("function_call", "tool_call"):
        content, calls = "", _parsed(content, where)
        calls = calls if isinstance(calls, list) else [calls]
        if not calls:
            raise _Problem(f"bad tool call: {where} has none")
    elif isinstance(content, list):
        content, thought, found = _parts(content, where)
        calls = [*(calls if isinstance(calls, list) else [calls]), *found]
        if thought:
            message["reasoning_content"] = thought
    elif isinstance(content, dict) and role == "tool":
        content = _json(content, f"wrong type: {where} is")
    if isinstance(calls, str):
        calls = _parsed(calls, where) or []
    if calls and role == "assistant":
        if not isinstance(calls, list):
            raise _Problem(f"bad tool call: {where} has a {type(calls).__name__}, expected a list")
        message["tool_calls"] = [_call(call, where) for call in calls]
        content = "" if content is None else content
    message["content"] = _text(content, where)
    thoughts = next((turn[key] for key in _REASONING if isinstance(turn.get(key), str) and turn[key]), None)
    if thoughts and role == "assistant":
        message["reasoning_content"] = _text(thoughts, where)
    for key in ("tool_call_id", "name"):
        if role == "tool" and isinstance(turn.get(key), str):
            message[key] = _text(turn[key], where)
    return message


def _text(value: Any, where: str) -> str:
    """The value, if it is text that can be encoded."""
    if value is None:
        raise _Problem(f"no text: {where}")
    if not isinstance(value, str):
        raise _Problem(f"wrong type: {where} holds a {type(value).__name__}, expected text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        code = ord(value[error.start])
        fault = f"byte 0x{code - 0xDC00:02x} is not UTF-8" if 0xDC80 <= code <= 0xDCFF else f"a lone surrogate \\u{code:04x}"
        raise _Problem(f"not valid Unicode: {where}, {fault}") from None
    return value


def _parts(parts: list[Any], where: str) -> tuple[str, str, list[Any]]:
    """Text, reasoning and tool calls of a content given in parts."""
    texts, thoughts, calls = [], [], []
    for part in parts:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, dict):
            raise _Problem(f"wrong type: {where} has a part that is a {type(part).__name__}")
        kind = part.get("type", "text")
        value = next((part[key] for key in ("text", "value", "content", kind) if part.get(key) is not None), None)
        if kind in ("text", "input_text", "output_text"):
            texts.append(_text(value, where))
        elif kind in _REASONING:
            thoughts.append(_text(value, where))
        elif kind in ("tool_call", "tool_calls"):
            found = _parsed(value, where)
            calls += found if isinstance(found, list) else [found]
        else:
            raise _Problem(f"needs {kind}: only text can be prepared")
    return "".join(texts), "".join(thoughts), calls


def _parsed(value: Any, where: str) -> Any:
    """JSON given as text, parsed; any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise _Problem(f"not valid JSON: {where}: {error}") from None


def _json(value: Any, what: str) -> str:
    """The value as JSON text, if JSON can hold it: a column of a Parquet file may have dates or bytes."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _Problem(f"{what} no JSON: {error}") from None


def _call(call: Any, where: str) -> dict[str, Any]:
    """A tool call in OpenAI's form, its arguments an object."""
    function = call.get("function", call) if isinstance(call, dict) else call
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise _Problem(f"bad tool call: {where} calls no function by name")
    arguments = function.get("arguments", function.get("parameters"))
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) and arguments.strip() else arguments or {}
    except (ValueError, RecursionError) as error:
        raise _Problem(f"bad tool call: the arguments in {where} are not valid JSON: {error}") from None
    if arguments is None:  # "null": a function without parameters
        arguments = {}
    if not isinstance(arguments, dict):
        raise _Problem(f"bad tool call: the arguments in {where} are a {type(arguments).__name__}, expected an object")
    _text(_json(arguments, f"bad tool call: the arguments in {where} are"), where)
    found: dict[str, Any] = {"type": "function", "function": {"name": _text(function["name"], where), "arguments": arguments}}
    if isinstance(call, dict) and isinstance(call.get("id"), str):
        found["id"] = _text(call["id"], where)
    return found


def _number_calls(messages: list[Message]) -> None:
    """Gives each tool call without an id one, and each result the id of the call that it answers: templates ask for them."""
    open_ids: list[str] = []
    count = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            call.setdefault("id", f"call{count:05d}")
            open_ids.append(call["id"])
            count += 1
        if message["role"] == "tool":
            wanted = message.setdefault("tool_call_id", open_ids[0] if open_ids else f"call{count:05d}")
            if wanted in open_ids:
                open_ids.remove(wanted)


def _tools(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The tools that the row offers, in OpenAI's form; None where there are none."""
    tools = row.get("tools") or row.get("functions")
    tools = _parsed(tools, "tools") if tools != "" else None
    if not tools:
        return None
    if not isinstance(tools, list):
        raise _Problem(f"bad tools: a {type(tools).__name__}, expected a list")
    found = []
    for tool in tools:
        tool = _parsed(tool, "tools")
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _Problem("bad tools: one has no name")
        found.append({"type": "function", "function": function})
    _text(_json(found, "bad tools: they are"), "tools")
    return found


def _tokens(row: dict[str, Any]) -> tuple[list[int], list[int]]:
    """input_ids and loss_mask of a row that is tokenised already."""
    ids, mask = row["input_ids"], row.get("loss_mask")
    if mask is None:
        raise _Problem("no loss_mask: a tokenised row needs input_ids and loss_mask")
    for name, values in (("input_ids", ids), ("loss_mask", mask)):
        if not isinstance(values, list) or not all(type(value) is int or (name == "loss_mask" and type(value) is bool) for value in values):
            raise _Problem(f"wrong type: {name} is not a list of integers")
    if len(ids) != len(mask) or not ids:
        raise _Problem(f"wrong length: {len(ids)} input_ids, {len(mask)} values in loss_mask")
    if not set(mask) <= {0, 1}:
        raise _Problem("wrong value: loss_mask holds other values than 0 and 1")
    if min(ids) < 0 or max(ids) >= 2**31:
        raise _Problem("wrong value: an input id is out of range")
    return ids, [int(bit) for bit in mask]
