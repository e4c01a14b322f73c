"""Real files to the last row: what becomes of each, recorded, in a ledger that adds up."""

import json
from collections import Counter

import pytest

import real_files
from aerie.conversations import conversation_of
from aerie.errors import AerieError
from aerie.preparation import Options, choose, prepare
from aerie.sources import Source, read_rows
from aerie.vocabulary import byte_tokens

pytestmark = pytest.mark.long

# file: (rows, rows by problem, rows with an answer, rows that offer tools)
FILES = {
    "sharegpt": (17671, {"no messages": 126, "no user message with text": 150}, 17390, 0),
    "chitchat": (7168, {"no user message with text": 1}, 4017, 0),
    "mt-bench": (80, {}, 0, 0),
    "bfcl-multi-turn": (200, {}, 0, 0),
    "bfcl-missing-function": (200, {}, 0, 0),
    "alpaca": (999, {}, 999, 0),
    "alpaca-zh": (1000, {}, 1000, 0),
    "glaive": (300, {}, 300, 191),
    "dpo": (300, {}, 300, 0),
    "dpo-parts": (10, {}, 10, 0),
    "kto": (300, {}, 300, 0),
    "reason-tool-use": (50, {}, 50, 48),
    "pictures": (6, {"needs images": 6}, 0, 0),
    "plain-text": (300, {"unknown shape": 300}, 0, 0),
}


@pytest.mark.parametrize("name", FILES)
def test_every_row_is_recognised_or_has_a_reason(name):
    source = Source(path=str(real_files.data(name)), allow_truncated=name == "sharegpt")
    found = list(map(conversation_of, read_rows(source)))
    problems = Counter(one.problem.partition(":")[0] for one in found if one.problem)
    answered = sum(any(message["role"] == "assistant" for message in one.messages) for one in found)
    assert (len(found), problems, answered, sum(bool(one.tools) for one in found)) == FILES[name]


def test_a_file_that_is_cut_off_names_the_place():
    path = real_files.data("sharegpt")
    content = path.read_bytes()
    begins = content.rindex(b'\n  {\n    "id"') + 3  # the last row, found without a parser
    with pytest.raises(AerieError) as caught:
        list(read_rows(Source(path=str(path))))
    message = str(caught.value)
    opens = content.rindex(b'"value": "') + len(b'"value": ')
    assert f"Unterminated string starting at byte {opens:,}, in row 17672 which begins at byte {begins:,}" in message
    assert "allow_truncated: true" in message


# file, target: samples, turns supervised, rows rejected by reason
PREPARED = {
    ("alpaca", "smollm2"): (985, 985, {"duplicate": 14}),
    ("glaive", "smollm2"): (126, 369, {"chat template": 153, "duplicate": 20, "no supervised token within max_length": 1}),
    ("glaive", "qwen3"): (841, 841, {"duplicate": 35, "no supervised token within max_length": 1}),
    ("glaive", "gemma3"): (126, 369, {"chat template": 153, "duplicate": 20, "no supervised token within max_length": 1}),
    ("dpo", "qwen3"): (547, 547, {"duplicate": 5}),
    ("reason-tool-use", "qwen3"): (70, 106, {}),
    ("chitchat", "llama3_1"): (4011, 52812, {"no assistant turn with text": 3150, "duplicate": 6, "no user message with text": 1}),
    ("mt-bench", "qwen3"): (0, 0, {"no assistant turn with text": 80}),
    ("sharegpt", "smollm2"): (
        16310,
        56788,
        {
            "no messages": 126,
            "no user message with text": 150,
            "no assistant turn with text": 5,
            "no supervised token within max_length": 352,
            "duplicate": 728,
        },
    ),
}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "target"), PREPARED)
def test_the_ledger_adds_up(name, target, tmp_path):
    tokenizer = real_files.tokenizer(target)
    source = Source(path=str(real_files.data(name)), allow_truncated=name == "sharegpt")
    options = Options(lambda: tokenizer, [tokenizer.eos_token_id], max_length=2048)
    prepared = prepare([name], ((0, row) for row in read_rows(source)), options, tmp_path)
    choose(prepared, [source], 0.05)
    rejected = Counter(fate.reason for fate in prepared.fates if fate.reason)
    kept = sum(not fate.reason for fate in prepared.fates)
    assert kept + rejected.total() == len(prepared.fates) == FILES[name][0]
    turns = sum(prepared.entries[number].turns for number in prepared.chosen)
    assert (len(prepared.chosen), turns, dict(rejected)) == PREPARED[name, target], json.dumps(rejected)


def test_byte_tokens_of_real_tokenizers():
    """SmolLM2's lacks 21 bytes, most of which UTF-8 never has."""
    for name in ("qwen3", "llama3_1", "deepseek_v3", "gemma3"):
        assert len(byte_tokens(real_files.tokenizer(name))) == 256, name
    smollm2 = real_files.tokenizer("smollm2")
    assert len(byte_tokens(smollm2)) == 235
    assert set(smollm2.convert_tokens_to_ids(["a", "Z", "Ġ", "Ċ", "ð"])) <= byte_tokens(smollm2)  # ð begins every emoji
