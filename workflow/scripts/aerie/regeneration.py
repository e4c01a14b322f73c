"""Prompts whose answers the target gives anew: what is asked, what counts as a good answer, and the answers kept on disk.

Answers are kept by prompt, like hidden states by sample: `<store>/answers/<answers key>/` holds one parquet file a batch,
so more data costs only the new prompts, and a prompt keeps its answer when others come or go.
"""

import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from . import cli
from .conversations import Conversation, Message, with_system
from .files import replacing
from .keys import digest_of
from .sources import Source, limit_of, mixture

LOOP_REPEATS = 4
LOOP_CHARACTERS = 64

_ANSWER_SCHEMA = pa.schema(
    [
        ("prompt_key", pa.string()),
        ("answers", pa.list_(pa.string())),
        ("finish_reasons", pa.list_(pa.string())),
        ("tokens", pa.list_(pa.int32())),
        ("problem", pa.string()),
    ]
)
_RESPONSE_SCHEMA = pa.schema(
    [
        ("prompt_key", pa.string()),
        ("source", pa.string()),
        ("line", pa.int64()),
        ("messages", pa.string()),
        ("tools", pa.string()),
        ("finish_reason", pa.string()),
    ]
)


@dataclass(frozen=True)
class Prompt:
    """A conversation without its answers.

    turns: the messages that come before each answer; system messages stand before the user's first. tools: those on offer.
    """

    key: str
    source: str
    line: int
    turns: tuple[tuple[Message, ...], ...]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Answers:
    """What the target answered to a prompt, turn by turn, up to and including the first answer that is not good.

    tokens: generated tokens of each answer. problem: why the next turn could not be asked, "reason" or "reason: detail"
    ("" where all were asked, or the last answer was not good).
    """

    prompt_key: str
    answers: tuple[str, ...]
    finish_reasons: tuple[str, ...]
    tokens: tuple[int, ...]
    problem: str = ""


@dataclass(frozen=True)
class Response:
    """A row of responses.parquet: the conversation with the target's answers. finish_reason is the last answer's."""

    prompt_key: str
    source: str
    line: int
    messages: list[Message]
    finish_reason: str
    tokens: int
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Rejection:
    """A row of rejects.jsonl. kept_turns: answers kept before the one that was not; 0 if the whole conversation is lost."""

    source: str
    line: int
    reason: str
    detail: str
    kept_turns: int = 0


def prompt_of(conversation: Conversation, system_prompt: str | None = None) -> Prompt:
    """The conversation's prompt; its key is a hash of the messages asked, and of the tools on offer.

    It ends before the first tool's message: that one answers a call which the new answer may not make. `turns` is empty
    where no user message comes before that. Without any answer in the row, each user message is a turn.
    """
    turns: list[tuple[Message, ...]] = []
    asked: list[Message] = []
    unanswered = not any(message["role"] == "assistant" for message in conversation.messages)
    for message in with_system(conversation.messages, system_prompt):
        if message["role"] == "tool":
            break
        if unanswered and message["role"] == "user" and any(earlier["role"] == "user" for earlier in asked):
            turns.append(tuple(asked))
            asked = []
        if message["role"] != "assistant":
            asked.append({"role": message["role"], "content": message["content"]})
        elif any(earlier["role"] == "user" for earlier in asked):
            turns.append(tuple(asked))
            asked = []
    if any(message["role"] == "user" for message in asked):
        turns.append(tuple(asked))
    key = digest_of([turns, conversation.tools] if conversation.tools else turns)[:32]
    return Prompt(key, conversation.source, conversation.line, tuple(turns), conversation.tools)


def choose_prompts(
    sources: Sequence[tuple[Source, Iterable[Conversation]]], max_prompts: int | None, system_prompt: str | None = None
) -> tuple[list[Prompt], list[Rejection]]:
    """Distinct usable prompts by ascending key, as many as the sources' caps and weights and `max_prompts` allow; and the
    rows that are not asked.

    The key is a hash, so this is a fair sample, and a larger number contains the smaller.
    """
    prompts: dict[str, Prompt] = {}
    source_of: dict[str, int] = {}
    rejected: list[Rejection] = []
    own: list[list[Rejection]] = [[] for _ in sources]
    for number, (_, conversations) in enumerate(sources):
        its = own[number]
        for conversation in conversations:
            problem = conversation.problem or ("tokenised already" if conversation.tokens else "")
            if problem:
                its.append(Rejection(conversation.source, conversation.line, "unusable row", problem))
                continue
            prompt = prompt_of(conversation, system_prompt)
            first = prompts.get(prompt.key)
            if not prompt.turns:
                its.append(Rejection(prompt.source, prompt.line, "no user turn", "no user message before the first tool message"))
            elif first:
                its.append(Rejection(prompt.source, prompt.line, "duplicate prompt", f"same as {first.source}:{first.line}"))
            else:
                prompts[prompt.key], source_of[prompt.key] = prompt, number
        rejected += its
    there = Counter(source_of.values())
    most = mixture(there, [source for source, _ in sources], lambda number: Counter(map(reason_of, own[number])))
    taken: Counter[int] = Counter()
    chosen: list[Prompt] = []
    for key in sorted(prompts):
        number = source_of[key]
        if taken[number] == most[number]:
            detail = limit_of(sources[number][0], most[number], there[number])
        elif len(chosen) == max_prompts:
            detail = f"beyond max_prompts (or max_samples) of {max_prompts} for the whole dataset"
        else:
            taken[number] += 1
            chosen.append(prompts[key])
            continue
        rejected.append(Rejection(prompts[key].source, prompts[key].line, "not chosen", detail))
    return chosen, rejected


def reason_of(rejection: Rejection) -> str:
    """Why a row is not asked; of an unusable one, what is wrong with it."""
    return rejection.detail.partition(": ")[0] if rejection.reason == "unusable row" else rejection.reason


def find_loop(text: str) -> str:
    """The unit that a degenerate answer ends in, or "".

    An answer loops if it ends in one unit of text repeated back to back at least 4 times (the last repetition may be
    incomplete) over at least 64 characters. White space at the end does not count.
    """
    # Borders of the reversed text (Knuth, Morris, Pratt): a suffix of length n with border b has the period n - b.
    backwards = text.rstrip()[::-1]
    borders = [0] * len(backwards)
    border = 0
    for position in range(1, len(backwards)):
        while border and backwards[position] != backwards[border]:
            border = borders[border - 1]
        border += backwards[position] == backwards[border]
        borders[position] = border
        length, period = position + 1, position + 1 - border
        if length >= LOOP_CHARACTERS and length >= LOOP_REPEATS * period:
            return backwards[:period][::-1]
    return ""


def fault_of(answer: str, finish_reason: str) -> tuple[str, str]:
    """Why an answer is not good, and the detail: "special tokens", "empty answer", "repeats itself", "cut off", or "" for a good one."""
    if finish_reason == "special":
        return "special tokens", "the answer holds special tokens, which its text does not show"
    if not answer.strip():
        return "empty answer", f"{len(answer)} characters of white space" if answer else "the target ended its answer at once"
    loop = find_loop(answer)
    if loop:
        return "repeats itself", f"ends in a repetition of {loop!r}"
    if finish_reason == "length":
        return "cut off", "reached max_new_tokens"
    return "", ""


def assemble(prompt: Prompt, answered: Answers, keep_cut_off: bool) -> tuple[Response | None, Rejection | None]:
    """The conversation as far as its answers are good; a rejection says why and where it ends early.

    An answer cut off by the token limit is kept if `keep_cut_off`; then it is the last one.
    """
    messages: list[Message] = []
    kept, finish_reason, tokens = 0, "", 0
    problem, _, detail = answered.problem.partition(": ")
    for turn, answer, finished, count in zip(prompt.turns, answered.answers, answered.finish_reasons, answered.tokens, strict=False):
        fault, fault_detail = fault_of(answer, finished)
        if fault and not (fault == "cut off" and keep_cut_off):
            problem, detail = fault, fault_detail
            break
        messages += [*turn, {"role": "assistant", "content": answer}]
        kept, finish_reason, tokens = kept + 1, finished, tokens + count
        if fault and kept < len(prompt.turns):
            problem, detail = fault, f"{fault_detail} before the last turn"
    response = Response(prompt.key, prompt.source, prompt.line, messages, finish_reason, tokens, prompt.tools) if kept else None
    return response, Rejection(prompt.source, prompt.line, problem, detail, kept) if problem else None


def batch_key(prompts: Sequence[Prompt]) -> str:
    """Key of a batch: hash of its prompts' keys. It names the batch's file and seeds its sampling."""
    return hashlib.sha256("\n".join(prompt.key for prompt in prompts).encode()).hexdigest()


class AnswerStore:
    """Answers on disk: one immutable parquet file a batch, written as temporary file, fsync, rename."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process answers at a time; another that wants some of the same prompts waits and then finds them."""
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            cli.say(f"another process is answering with the same settings; waiting for {self.folder / 'lock'}")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.set_inheritable(descriptor, True)  # an engine's processes may outlive a killed parent
        try:
            yield
        finally:
            os.close(descriptor)

    def read(self, keys: Iterable[str]) -> dict[str, Answers]:
        """The stored answers to these prompts, by prompt key."""
        wanted = set(keys)
        found: dict[str, Answers] = {}
        for path in sorted(self.folder.glob("*.parquet")):
            for row in pq.read_table(path, schema=_ANSWER_SCHEMA).to_pylist():
                if row["prompt_key"] in wanted:
                    found.setdefault(
                        row["prompt_key"],
                        Answers(
                            row["prompt_key"], tuple(row["answers"]), tuple(row["finish_reasons"]), tuple(row["tokens"]), row["problem"]
                        ),
                    )
        return found

    def write(self, key: str, answers: Sequence[Answers]) -> Path:
        """Stores a batch's answers under the batch's key."""
        path = self.folder / f"{key}.parquet"
        rows = [
            {
                "prompt_key": one.prompt_key,
                "answers": list(one.answers),
                "finish_reasons": list(one.finish_reasons),
                "tokens": list(one.tokens),
                "problem": one.problem,
            }
            for one in answers
        ]
        with replacing(path) as temporary:
            pq.write_table(pa.Table.from_pylist(rows, schema=_ANSWER_SCHEMA), temporary)
        return path


def write_responses(responses: Sequence[Response], path: Path) -> None:
    """responses.parquet: prompt_key, source, line, messages (JSON of a list of {role, content}), tools (JSON), finish_reason."""
    rows = [
        {
            "prompt_key": one.prompt_key,
            "source": one.source,
            "line": one.line,
            "messages": json.dumps(one.messages, ensure_ascii=False),
            "tools": json.dumps(one.tools, ensure_ascii=False) if one.tools else None,
            "finish_reason": one.finish_reason,
        }
        for one in responses
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=_RESPONSE_SCHEMA), path)


def responses_digest(responses: Sequence[Response], rejected: Sequence[Rejection]) -> str:
    """Content digest of the conversations and of what was left out, each with its source and line, since the dataset's ledger
    names them; their order is not in it."""
    kept = sorted([one.prompt_key, one.source, one.line, one.messages, one.finish_reason] for one in responses)
    return digest_of([kept, sorted(list(asdict(one).values()) for one in rejected)])


def figures_of(prompts: int, responses: Sequence[Response], rejected: Sequence[Rejection]) -> dict[str, Any]:
    """Numbers for the manifest. dropped: conversations lost, by reason; shortened: kept without their later turns."""
    return {
        "prompts": prompts,
        "kept": len(responses),
        "cut_off": sum(one.finish_reason == "length" for one in responses),
        "tokens": sum(one.tokens for one in responses),
        "dropped": dict(sorted(Counter(one.reason for one in rejected if not one.kept_turns).items())),
        "shortened": dict(sorted(Counter(one.reason for one in rejected if one.kept_turns).items())),
    }


def cut_off_warning(figures: dict[str, Any]) -> str:
    """What to say where more than half of the answers reached the token limit, whether these were kept or not; else ""."""
    dropped = figures["dropped"].get("cut off", 0)
    cut, answered = figures["cut_off"] + dropped, figures["kept"] + dropped
    if cut <= answered / 2:
        return ""
    return (
        f"WARNING: {cut:,} of {answered:,} answers reached regenerate.max_new_tokens and were cut off. The draft then hardly learns how "
        "answers go on and end. Raise max_new_tokens (and max_length with it), unless time is what you are short of."
    )
