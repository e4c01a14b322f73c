"""Texts cut into parts: the tokens of the parts are those that the tokenizer makes of the whole."""

import random

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

import real_files
from aerie.text_parts import _PATTERNS, Cutter

# What texts are made of: all that the patterns of pre-tokenizers tell apart, and what is nearly a special token.
PIECES = [
    *("a", "The", "don't", "I'LL", "'s", "x" * 40, "é", "e\u0301", "\u0301", "ﬁ", "İ", "ſ", "ß", "Å", "한국", "\u1100\u1161", "日本語", "。", "字", "ไทย"),
    *("1", "12345", "٣", "²", "Ⅷ", "!", "...", "?!", "/", "//", "#", "##", "- ", "```", "“", "—", "🙂", "👩‍💻", "\ufe0f", "\u200b", "\ufeff", "\x00", "\x1c", "\x85"),
    *(" ", "  ", "    ", "\t", "\n", "\n\n", "\n\n\n", "\r\n", "\r", "\n ", " \n", "\n\t", "\u00a0", "\u3000", "\u2028", "\u180e", "\v", "\f"),
    *("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<think>", "</think>", "<|", "|>", "<", "<|im_", "<|im_end|", "<think", "<｜end▁of▁sentence｜>", "<start_of_turn>", "<0x0A>"),
    *("assistant\n", "user\n", "<think>\n\n</think>\n\n", "\n\nThe answer\nis", "<|im_end|>\n<|im_start|>", "<|im_end|><|im_start|>"),
]  # fmt: skip
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])


def texts(count):
    chosen = random.Random(0)
    return ["".join(chosen.choices(PIECES, k=chosen.randint(1, 24))) for _ in range(count)]


def split(pattern):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), BYTES])


def trained(pre_tokenizer, *added, normalizer=None):
    """A byte-level BPE whose merges come from the same texts, so that what is one word is one token in many places."""
    made = Tokenizer(models.BPE())
    made.normalizer, made.pre_tokenizer = normalizer, pre_tokenizer
    trainer = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    made.train_from_iterator(texts(4000), trainer)
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.add_tokens([AddedToken(text, normalized=False) if isinstance(text, str) else text for text in added])
    return made


def check(backend, count):
    """Whether each text is put together rightly; how many came in several parts."""
    cutter, several = Cutter(backend), 0
    for text in texts(count):
        parts = cutter.parts(text)
        ids = [token for part in parts for token in backend.encode(part, add_special_tokens=False).ids]
        assert "".join(parts) == text and ids == backend.encode(text, add_special_tokens=False).ids, (text, parts)
        several += len(parts) > 1
    return several


@pytest.mark.parametrize("pre_tokenizer", [*map(split, _PATTERNS), GPT2], ids=["Qwen3", "Qwen3.5", "Llama-3", "GPT-2"])
def test_parts_are_the_tokens_of_the_whole(pre_tokenizer):
    backend = trained(pre_tokenizer, "<think>", "</think>", normalizer=normalizers.NFC())
    assert check(backend, 3000) > 1800


@pytest.mark.parametrize(
    "added",
    [
        *(AddedToken("<think>", normalized=False, **{flag: True}) for flag in ("lstrip", "rstrip", "single_word")),
        AddedToken("a", normalized=False, single_word=True),
        AddedToken("\nThe", normalized=True),
        *("\n\n", "<|im_end|>\n", "<|im_start|>a", "<|im_end|><|im_start|>", "|><|"),
    ],
)
def test_added_tokens_of_every_kind(added):
    check(trained(split(_PATTERNS[0]), added), 1000)


@pytest.mark.parametrize(
    "pre_tokenizer",
    [
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\s+|\S+(?=\n)|."), "isolated"), BYTES]),
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_PATTERNS[0]), "merged_with_previous"), BYTES]),
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.Metaspace(prepend_scheme="first"),
    ],
)
def test_an_unknown_pre_tokenizer_is_cut_at_added_tokens_alone(pre_tokenizer):
    backend = trained(pre_tokenizer)
    assert check(backend, 1000)
    assert Cutter(backend).parts("<|im_start|>user\nHi\nyou<|im_end|>\n") == ["<|im_start|>user\nHi\nyou", "<|im_end|>\n"]


def test_an_answer_is_one_part_with_and_without_an_empty_thought():
    cutter = Cutter(trained(split(_PATTERNS[0]), "<think>", "</think>"))
    answer = "Yes.\n\n1. one\n2. two"
    assert cutter.parts(f"<|im_start|>assistant\n{answer}<|im_end|>\n") == ["<|im_start|>assistant\n", answer, "<|im_end|>\n"]
    assert cutter.parts(f"<|im_start|>assistant\n<think>\n\n</think>\n\n{answer}")[-1] == answer


@pytest.mark.long
@pytest.mark.parametrize("name", ["smollm2", "qwen3", "llama3_1", "deepseek_v3", "gemma3"])
def test_parts_are_the_tokens_of_the_whole_for_real_tokenizers(name):
    backend = real_files.tokenizer(name).backend_tokenizer
    assert check(backend, 6000) > 500
