#!/usr/bin/env python
"""How fast conversations become samples, against the plainest thing: one apply_chat_template(tokenize=True) a conversation.

    python tests/benchmarks/benchmark_preparation.py rate [--target qwen3] [--conversations 2000] [--workers 2]
    python tests/benchmarks/benchmark_preparation.py memory [--conversations 1000000] [--workers 2]
    python tests/benchmarks/benchmark_preparation.py fan-out [--target qwen3]

rate: both on the same ShareGPT conversations with the same workers, in turn, three times; the best of each counts.
memory: synthetic conversations, prepared and written; the highest resident memory of each process.
fan-out: tokens to extract, against speculators' own preprocessing of the same multi-turn conversations.
"""

import argparse
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2] / "workflow" / "scripts")]

import real_files  # noqa: E402
from aerie.conversations import conversation_of  # noqa: E402
from aerie.preparation import Options, choose, prepare  # noqa: E402
from aerie.samples import write_samples  # noqa: E402
from aerie.sources import RawRow, Source, read_rows  # noqa: E402

os.environ["TOKENIZERS_PARALLELISM"] = "false"


def conversations(count: int) -> list[tuple[RawRow, list[dict[str, str]]]]:
    """The first usable multi-turn conversations of ShareGPT, as rows and as messages."""
    found = []
    for row in read_rows(Source(path=str(real_files.data("sharegpt")), allow_truncated=True)):
        messages = conversation_of(row).messages
        if sum(one["role"] == "assistant" for one in messages) >= 2:
            found.append((row, messages))
        if len(found) == count:
            break
    return found


_tokenizer = None


def _start(target: str) -> None:
    global _tokenizer
    _tokenizer = real_files.tokenizer(target)


def _plain(rows: list[str]) -> int:
    """Tokens of conversations given as JSON, rendered and encoded at once."""
    assert _tokenizer is not None
    return sum(len(_tokenizer.apply_chat_template(json.loads(row), tokenize=True)["input_ids"]) for row in rows)


def rate(target: str, count: int, workers: int) -> None:
    found = conversations(count)
    rows = [row for row, _ in found]
    plain = [json.dumps(messages) for _, messages in found]
    load = partial(real_files.tokenizer, target)
    ends = [load().eos_token_id]
    times: dict[str, list[float]] = {"plain": [], "prepared": []}
    for _ in range(3):
        with multiprocessing.get_context("fork").Pool(workers, _start, (target,)) as pool:
            pool.map(_plain, [[] for _ in range(workers)])  # started
            began = time.monotonic()
            tokens = sum(pool.imap(_plain, [plain[place : place + 64] for place in range(0, len(plain), 64)]))
            times["plain"].append(time.monotonic() - began)
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            prepared = prepare(["f"], ((0, row) for row in rows), Options(load, ends, 1 << 20), Path(folder), workers)
            choose(prepared, [Source()], 0.05)
            times["prepared"].append(time.monotonic() - began)
            samples, total = len(prepared.chosen), sum(prepared.lengths)
    best = {name: len(found) / min(values) for name, values in times.items()}
    print(
        f"{target}, {workers} workers, {len(found)} conversations: plain {best['plain']:.0f}/s ({tokens:,} tokens), "
        f"prepared {best['prepared']:.0f}/s ({samples:,} samples, {total:,} tokens), ratio {best['prepared'] / best['plain']:.2f}"
    )


def memory(target: str, count: int, workers: int) -> None:
    words = [
        "the",
        "of",
        "and",
        "to",
        "in",
        "is",
        "it",
        "that",
        "was",
        "for",
        "on",
        "are",
        "as",
        "with",
        "his",
        "they",
        "at",
        "be",
        "this",
        "have",
        "from",
        "or",
        "one",
        "had",
        "by",
    ]

    def rows():
        for number in range(count):
            text = " ".join(words[(number * step) % len(words)] for step in range(1, 60))
            messages = [{"role": ("user", "assistant")[turn % 2], "content": f"{number} {turn} {text}"} for turn in range(4)]
            yield RawRow("synthetic", number + 1, json.dumps({"messages": messages}))

    load = partial(real_files.tokenizer, target)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare(
            ["synthetic"], ((0, row) for row in rows()), Options(load, [load().eos_token_id], 2048), Path(folder) / "work", workers
        )
        choose(prepared, [Source()], 0.05)
        write_samples(prepared.samples(), Path(folder) / "samples")
    peak = {name: resource.getrusage(who).ru_maxrss / 2**20 for name, who in
            (("parent", resource.RUSAGE_SELF), ("largest worker", resource.RUSAGE_CHILDREN))}  # fmt: skip
    print(f"{count:,} conversations, {sum(prepared.lengths):,} tokens, {workers} workers: {time.monotonic() - began:.0f} s; highest memory "
          f"{peak['parent']:.2f} GiB (parent, the pages of mapped files included), {peak['largest worker']:.2f} GiB (worker)")  # fmt: skip


def fan_out(target: str, count: int) -> None:
    """speculators renders each assistant turn as a row of its own, asking a vLLM server for every rendering.

    Here its server is replaced by transformers in the same process, so its rate is an upper bound.
    """
    from datasets import Dataset
    from speculators.data_generation import preprocessing

    found = conversations(count)
    load = partial(real_files.tokenizer, target)
    tokenizer = load()

    def rendered(
        endpoint: str, messages: Any, *, add_generation_prompt: bool, tools: Any, truncate_prompt_tokens: int, **_: Any
    ) -> list[int]:
        ids = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=add_generation_prompt)["input_ids"]
        return list(ids[:truncate_prompt_tokens])

    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        prepared = prepare(["f"], ((0, row) for row, _ in found), Options(load, [tokenizer.eos_token_id], 8192), Path(folder), 1)
        choose(prepared, [Source()], 0.05)
        ours = time.monotonic() - began
    preprocessing.render_conversation = rendered
    rows = Dataset.from_list([{"conversations": messages} for _, messages in found])
    began = time.monotonic()
    theirs = preprocessing.build_speculator_training_dataset(rows, tokenizer, 8192, num_proc=None, render_endpoint="none")
    seconds = time.monotonic() - began
    tokens = sum(len(row["input_ids"]) for row in theirs)
    print(f"{target}: Aerie {len(prepared.chosen):,} samples, {sum(prepared.lengths):,} tokens, {len(found) / ours:.0f} conversations/s; "
          f"speculators {len(theirs):,} rows, {tokens:,} tokens, {len(found) / seconds:.0f}/s, its server replaced by a function")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["rate", "memory", "fan-out"])
    parser.add_argument("--target", default="qwen3")
    parser.add_argument("--conversations", type=int)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    if given.what == "rate":
        rate(given.target, given.conversations or 2000, given.workers)
    elif given.what == "memory":
        memory(given.target, given.conversations or 1_000_000, given.workers)
    else:
        fan_out(given.target, given.conversations or 2000)
