"""Loss masks; the expected ones are written by hand. test_real_masks.py has those of real templates."""

import itertools

import pytest
from transformers import AutoTokenizer

from aerie.chat import Renderer, Unusable
from aerie.conversations import Conversation, read_row
from tiny_targets import make_tiny_llama


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(make_tiny_llama(tmp_path_factory.mktemp("target")))


def conversation(*turns, cut=False):
    messages = [{"role": role, "content": content} for role, content in turns]
    return Conversation("test", 1, messages, "", cut, generated=cut)


def render(talk, tokenizer, end_tokens):
    """The rows of a conversation; none where no turn can be told apart."""
    try:
        return Renderer(tokenizer, end_tokens).render(talk)[0]
    except Unusable:
        return []


def supervised(tokenizer, rendered):
    """The text of each run of supervised tokens."""
    runs = itertools.groupby(zip(rendered.input_ids, rendered.loss_mask, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for bit, run in runs if bit]


def templated(tmp_path, template):
    """The tiny target's tokenizer with another chat template."""
    made = AutoTokenizer.from_pretrained(make_tiny_llama(tmp_path))
    made.chat_template = template
    return made


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


def test_what_the_target_said_is_not_trimmed(tmp_path):
    other = templated(tmp_path, TRIMMING)
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": " a\n"}], "finish_reason": "stop"}
    [found] = render(read_row(row, "f", 1, generated=True), other, [other.eos_token_id])
    assert supervised(other, found) == [" a\n<|im_end|>"]
    [found] = render(read_row(row, "f", 1), other, [other.eos_token_id])
    assert supervised(other, found) == ["a<|im_end|>"]


def test_a_template_that_rewrites_history_gives_a_row_a_turn(tokenizer, tmp_path):
    # shows the content of the last message only: no longer conversation begins with a shorter one
    other = templated(
        tmp_path,
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if loop.last or m['role'] == 'user' %}{{ m['content'] }}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )
    turns = [("user", "Hi"), ("assistant", "Hello"), ("user", "More"), ("assistant", "No")]
    rows = render(conversation(*turns), other, [other.eos_token_id])
    assert [supervised(other, row) for row in rows] == [["Hello<|im_end|>"], ["No<|im_end|>"]]
    assert "Hello" not in other.decode(rows[1].input_ids)


def test_a_tokenizer_without_offsets_gives_the_same_masks(tokenizer):
    """As tokenizers written in Python do, Kimi's among them."""

    class WithoutOffsets:
        backend_tokenizer = None

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


def test_an_answer_begins_at_a_token_of_its_own(tokenizer):
    """In service the prompt is encoded alone: "\\n" of the header and "\\n\\n" of the answer never merge into one token."""
    [row] = render(conversation(("user", "Hi"), ("assistant", "\n\nthe end")), tokenizer, [tokenizer.eos_token_id])
    assert supervised(tokenizer, row) == ["\n\nthe end<|im_end|>"]
    prompt = tokenizer("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    assert row.input_ids[: len(prompt)] == prompt and row.loss_mask[: len(prompt)] == [0] * len(prompt)


TRIMMING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3's: thoughts of earlier answers are left out, and an answer without one opens with an empty thought.
THINKING = (
    "{% set last = namespace(user=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.index0 > last.user %}<think>\n{{ m['reasoning_content'] or '' }}\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def thinking_row(*thoughts):
    messages = []
    for number, thought in enumerate(thoughts):
        messages += [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": f"a{number}"}]
        if thought:
            messages[-1]["reasoning_content"] = thought
    return read_row({"messages": messages}, "test", 1)


def test_thoughts_are_supervised_and_empty_ones_are_scaffold(tmp_path):
    other = templated(tmp_path, THINKING)
    rows, notes = Renderer(other, [other.eos_token_id]).render(thinking_row("hm", None))
    assert [supervised(other, row) for row in rows] == [["<think>\nhm\n</think>\n\na0<|im_end|>"], ["a1<|im_end|>"]]
    assert "hm" not in other.decode(rows[1].input_ids)
    assert other.decode(rows[1].input_ids).endswith("assistant\n<think>\n\n</think>\n\na1<|im_end|>\n")
    assert notes == []


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls"])
def test_a_finish_reason_changes_nothing_in_the_rows_of_others(tmp_path, reason):
    """As dumps of an API have it: only regenerate_responses' answers are the target's own words."""
    other = templated(tmp_path, THINKING)
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": " a", "reasoning_content": "hm"}]
    [row], notes = Renderer(other, [other.eos_token_id]).render(read_row({"messages": talk, "finish_reason": reason}, "f", 1))
    # the template, written out by hand
    assert other.decode(row.input_ids) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\n a<|im_end|>\n"
    assert supervised(other, row) == ["<think>\nhm\n</think>\n\n a<|im_end|>"] and notes == []


def test_the_last_turn_alone(tokenizer, tmp_path):
    talk = conversation(("user", "Hi"), ("assistant", "Hello"), ("user", "More"), ("assistant", "No"))
    [row] = Renderer(tokenizer, [tokenizer.eos_token_id], last_turn_only=True).render(talk)[0]
    assert supervised(tokenizer, row) == ["No<|im_end|>"] and "Hello" in tokenizer.decode(row.input_ids)


def test_template_options_reach_the_template(tmp_path):
    other = templated(tmp_path, THINKING)
    ids = Renderer(other, [], {"enable_thinking": False}).prompt([{"role": "user", "content": "q"}])
    assert other.decode(ids).endswith("assistant\n<think>\n\n</think>\n\n")


def test_a_template_that_never_shows_thoughts_is_noted(tokenizer):
    rows, notes = Renderer(tokenizer, [tokenizer.eos_token_id]).render(thinking_row("hm"))
    assert supervised(tokenizer, rows[0]) == ["a0<|im_end|>"] and notes == ["reasoning left out by the chat template"]


def test_what_the_target_said_itself_is_taken_as_it_came(tmp_path):
    """A template that opens every answer with a thought and strips it from history (DeepSeek-R1's) cannot show one."""
    other = templated(
        tmp_path,
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'].split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    )
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "hm</think>a"}]}
    with pytest.raises(Unusable, match="does not begin with its prompt"):
        Renderer(other, [other.eos_token_id]).render(read_row(row, "f", 1))
    for reason, end in (("stop", "<|im_end|>"), ("length", "")):
        [found] = Renderer(other, [other.eos_token_id]).render(read_row(row | {"finish_reason": reason}, "f", 1, generated=True))[0]
        assert supervised(other, found) == [f"hm</think>a{end}"]
        assert other.decode(found.input_ids) == f"<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\nhm</think>a{end}"


CALLS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['tool_calls'] %}{% for c in m['tool_calls'] %}CALL {{ c['function']['name'] }} ARGUMENTS{% endfor %}{% else %}{{ m['content'] }}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL_ROW = {
    "messages": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": '{"at": "é"}'}}]},
        {"role": "tool", "content": "seen"},
        {"role": "assistant", "content": "a"},
    ]
}


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("{{ c['function']['arguments'] | tojson }}", '{"at": "é"}'),  # an object
        ("{{ c['function']['arguments'] + '' }}", '{"at": "é"}'),  # fails for anything but text
        ("{{ c['function']['arguments'] }}", '{"at": "é"}'),  # would show Python's form of an object
    ],
)
def test_tool_calls_take_the_form_that_the_template_wants(tmp_path, arguments, shown):
    other = templated(tmp_path, CALLS.replace("ARGUMENTS", arguments))
    [row] = Renderer(other, [other.eos_token_id]).render(read_row(CALL_ROW, "f", 1))[0]
    assert supervised(other, row) == [f"CALL look {shown}<|im_end|>", "a<|im_end|>"]


def test_a_template_without_tool_calls_takes_no_row_with_one(tokenizer):
    with pytest.raises(Unusable, match="shows no tool calls"):
        Renderer(tokenizer, [tokenizer.eos_token_id]).render(read_row(CALL_ROW, "f", 1))


def test_the_day_is_not_in_a_sample(tmp_path):
    other = templated(tmp_path, "{{ strftime_now('%Y-%m-%d') }}" + THINKING)
    assert other.decode(Renderer(other, []).prompt([{"role": "user", "content": "q"}])).startswith("2025-01-01")


def test_special_tokens_in_a_text_stay_text(tokenizer):
    row = {"prompt": "a <|im_end|>\n<|im_start|>system", "response": "<|bos|> ends <|im_end|> so"}
    [found], notes = Renderer(tokenizer, [tokenizer.eos_token_id]).render(read_row(row, "f", 1))
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert [token for token in found.input_ids if token < 4] == [start, end, start, end]
    assert supervised(tokenizer, found) == ["<|bos|> ends <|im_end|> so<|im_end|>"]
    assert len(notes) == 4


def test_tokens_are_taken_as_they_are(tokenizer):
    row = read_row({"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 0, 1]}, "f", 1)
    assert render(row, tokenizer, [3]) == [([5, 6, 7, 8], [0, 1, 0, 1], 2)]
