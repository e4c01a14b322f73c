"""Conversations and loss masks; the expected masks are written by hand or found by a route that is not ours."""

import json

import pytest
from transformers import AutoTokenizer

from aerie.chat import Conversation, read_conversations, read_row, render
from aerie.errors import AerieError
from tiny_targets import make_tiny_llama


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(make_tiny_llama(tmp_path_factory.mktemp("target")))


def conversation(*turns, cut=False):
    messages = [{"role": role, "content": content} for role, content in turns]
    return Conversation("test", 1, messages, "", cut)


def supervised(tokenizer, rendered):
    """The text of each run of supervised tokens."""
    runs, open_run = [], []
    for token, bit in [*zip(rendered.input_ids, rendered.loss_mask, strict=True), (0, 0)]:
        if bit:
            open_run.append(token)
        elif open_run:
            runs.append(tokenizer.decode(open_run))
            open_run = []
    return runs


def test_every_answer_and_its_end_of_turn_is_supervised(tokenizer):
    turns = [("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello you"), ("user", "More"), ("assistant", "No\nmore")]
    [row] = render(conversation(*turns), tokenizer, [tokenizer.eos_token_id])
    assert supervised(tokenizer, row) == ["Hello you<|im_end|>", "No\nmore<|im_end|>"]
    # the template of the tiny target, written out by hand
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    assert tokenizer.decode(row.input_ids) == text


def test_a_cut_answer_has_no_end_of_turn(tokenizer):
    [row] = render(conversation(("user", "Hi"), ("assistant", "Hello you"), cut=True), tokenizer, [tokenizer.eos_token_id])
    assert supervised(tokenizer, row) == ["Hello you"]
    assert tokenizer.decode(row.input_ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello you"


def test_a_template_that_rewrites_history_gives_a_row_a_turn(tokenizer, tmp_path):
    # shows the content of the last message only: no longer conversation begins with a shorter one
    other = AutoTokenizer.from_pretrained(make_tiny_llama(tmp_path))
    other.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if loop.last or m['role'] == 'user' %}{{ m['content'] }}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    turns = [("user", "Hi"), ("assistant", "Hello"), ("user", "More"), ("assistant", "No")]
    rows = render(conversation(*turns), other, [other.eos_token_id])
    assert [supervised(other, row) for row in rows] == [["Hello<|im_end|>"], ["No<|im_end|>"]]
    assert "Hello" not in other.decode(rows[1].input_ids)


def test_a_tokenizer_without_offsets_gives_the_same_masks(tokenizer):
    """As tokenizers written in Python do, Kimi's among them."""

    class WithoutOffsets:
        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def __call__(self, text, **options):
            options.pop("return_offsets_mapping", None)
            return tokenizer(text, **options)

    talk = conversation(("user", "Hi"), ("assistant", "Hello you"), ("user", "More"), ("assistant", "No"))
    ends = [tokenizer.eos_token_id]
    assert render(talk, WithoutOffsets(), ends) == render(talk, tokenizer, ends)


def test_prompts_alone_give_no_row(tokenizer):
    assert render(conversation(("user", "Hi")), tokenizer, [3]) == []


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, [("user", "a")]),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, [("user", "a"), ("assistant", "b")]),
        ({"instruction": "a", "input": "b", "output": "c"}, [("user", "a\nb"), ("assistant", "c")]),
        ({"instruction": "a", "input": "", "output": ""}, [("user", "a")]),
        ({"prompt": "a", "response": "b"}, [("user", "a"), ("assistant", "b")]),
        ({"question_id": 1, "turns": ["a", "b"]}, [("user", "a")]),
    ],
)
def test_shapes(row, expected):
    found = read_row(row, "f", 1)
    assert not found.problem
    assert [(message["role"], message["content"]) for message in found.messages] == expected


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1], "row is a list"),
        ({"text": "a"}, "unknown shape with keys text"),
        ({"messages": []}, "no messages"),
        ({"messages": [{"role": None, "content": "a"}]}, "message 1 has the role None"),
        ({"messages": [{"role": "user", "content": None}]}, "message 1 has no text"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "not valid Unicode"),
        ({"conversations": [{"from": "gpt", "value": "a"}]}, "no user message"),
        ({"messages": ["a"]}, "message 1 is a str"),
        ({"messages": "hello"}, "a value of the wrong kind"),
        ({"turns": None}, "a value of the wrong kind"),
        ({"conversations": 5}, "a value of the wrong kind"),
        ({"instruction": ["a"]}, "a value of the wrong kind"),
    ],
)
def test_bad_rows_have_a_reason(row, reason):
    assert reason in read_row(row, "f", 1).problem


def test_files_name_the_line_of_an_error(tmp_path):
    good = {"prompt": "a", "response": "b"}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(good) + "\n\n{'prompt': 1}\n")
    with pytest.raises(AerieError, match=r"rows\.jsonl:3: not valid JSON"):
        list(read_conversations([path]))
    path.write_text(json.dumps(good) + '\n{"prompt": \n')  # the error is at the end of line 2, not on line 3
    with pytest.raises(AerieError, match=r"rows\.jsonl:2: not valid JSON"):
        list(read_conversations([path]))
    path.write_text(json.dumps(good) + "\n\n" + json.dumps(good) + "\n")
    assert [row.line for row in read_conversations([path])] == [1, 3]
    with pytest.raises(AerieError, match="no such file"):
        list(read_conversations([tmp_path / "none.json"]))
    (tmp_path / "x.csv").write_text("a")
    with pytest.raises(AerieError, match=r"expected \.json"):
        list(read_conversations([tmp_path / "x.csv"]))
