"""What a draft is worth in service: how many of its tokens the target accepts, the speed, and the outputs compared.

All numbers are vLLM's own: the same prompts are answered once without and once with the draft.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .conversations import Conversation, Message
from .errors import AerieError
from .generation import SpeculationCounters
from .keys import digest_of

_ROUNDING = (
    "Greedy answers with and without a draft are equal in exact arithmetic. In bfloat16 the order of summation depends on how "
    "many tokens are computed together, so where two tokens are almost equally likely the answers can part; such a difference "
    "is rounding, not an error of the draft."
)
NOTES = (
    "acceptance_length is 1 + accepted_tokens / drafts.",
    "accepted_per_position is unconditional: the share of all drafts whose tokens up to and including this position were accepted.",
    "vLLM counts an accepted token even if the answer ended before it; tokens_past_the_end says how many these were.",
    "tokens_per_second is generation only, prompts included, after a warm-up prompt that is in no count.",
    _ROUNDING,
)


@dataclass(frozen=True)
class EvaluationPrompt:
    """A prompt of the evaluation: the messages up to the first user turn, and their token ids."""

    line: int
    text: str
    token_ids: list[int]


@dataclass(frozen=True)
class Half:
    """One of the two runs: "baseline" (no speculation) or "draft".

    token_ids, texts and finish_reasons are by prompt; seconds is generation only; counters is None without a draft.
    """

    role: str
    token_ids: list[list[int]]
    texts: list[str]
    finish_reasons: list[str]
    seconds: float
    counters: SpeculationCounters | None
    device: str
    dtype: str

    @property
    def tokens(self) -> int:
        """Tokens of all answers, the end tokens included."""
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Half":
        stored = json.loads(text)
        counters = stored.pop("counters")
        if counters:
            counters = SpeculationCounters(**{**counters, "accepted_per_position": tuple(counters["accepted_per_position"])})
        return cls(**stored, counters=counters)


def first_turns(conversations: Iterable[Conversation], max_prompts: int | None) -> list[tuple[int, list[Message]]]:
    """(line, messages up to the first user turn) of each conversation, in file order.

    max_prompts takes those with the lowest hashes, so a larger number contains the smaller. AerieError for unusable rows:
    an evaluation that skips prompts cannot be compared with another.
    """
    found = []
    for conversation in conversations:
        if conversation.problem:
            raise AerieError(f"{conversation.source}:{conversation.line}: {conversation.problem}; every prompt must be usable")
        end = next(number for number, message in enumerate(conversation.messages) if message["role"] == "user")
        found.append((conversation.line, [{"role": one["role"], "content": one["content"]} for one in conversation.messages[: end + 1]]))
    if not found:
        raise AerieError("the evaluation has no prompts; expected MT-Bench's question.jsonl or a file of conversations")
    chosen = sorted(found, key=lambda one: digest_of(one[1]))[:max_prompts]
    return sorted(chosen, key=lambda one: one[0])


def acceptance(counters: SpeculationCounters) -> dict[str, Any]:
    """acceptance_length, accepted_per_position (both as in NOTES) and the counts they come from."""
    if counters.drafts == 0:
        raise AerieError("vLLM verified no draft at all: the answers are too short to speculate (is max_new_tokens 1?)")
    return {
        "acceptance_length": round(1 + counters.accepted_tokens / counters.drafts, 6),
        "accepted_per_position": [round(count / counters.drafts, 6) for count in counters.accepted_per_position],
        "drafts": counters.drafts,
        "draft_tokens": counters.draft_tokens,
        "accepted_tokens": counters.accepted_tokens,
    }


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position where two token sequences differ (also where one ends before the other); None if equal."""
    for position, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return position
    return None if len(one) == len(other) else min(len(one), len(other))


def summary(baseline: Half, draft: Half, settings: dict[str, Any]) -> dict[str, Any]:
    """acceptance.json: acceptance, speeds and the comparison of the outputs."""
    if draft.counters is None:
        raise AerieError("the run with the draft has no speculation counters")
    prompts = len(draft.token_ids)
    same = sum(left == right for left, right in zip(baseline.token_ids, draft.token_ids, strict=True))
    # Each answer's first token comes from the prompt alone, each draft's verification gives one more than it accepts.
    emitted = prompts + draft.counters.drafts + draft.counters.accepted_tokens
    return {
        **acceptance(draft.counters),
        "tokens_past_the_end": max(0, emitted - draft.tokens),
        "num_draft_tokens": settings["num_draft_tokens"],
        "max_new_tokens": settings["max_new_tokens"],
        "batch_size": settings["batch_size"],
        "prompts": prompts,
        "output_tokens": {"baseline": baseline.tokens, "draft": draft.tokens},
        "seconds": {"baseline": round(baseline.seconds, 3), "draft": round(draft.seconds, 3)},
        "tokens_per_second": {"baseline": round(baseline.tokens_per_second, 1), "draft": round(draft.tokens_per_second, 1)},
        "speed_up": round(draft.tokens_per_second / baseline.tokens_per_second, 3),
        "identical_outputs": {"same": same, "different": prompts - same},
        "device": {"baseline": baseline.device, "draft": draft.device},
        "dtype": draft.dtype,
        "notes": list(NOTES),
    }


def per_prompt(prompts: Sequence[EvaluationPrompt], baseline: Half, draft: Half, tokenizer: Any) -> list[dict[str, Any]]:
    """Rows of per_prompt.parquet. first_difference is a token position in the answers, with both tokens' texts ("" where
    an answer had ended); null where the answers are equal."""
    rows = []
    for index, prompt in enumerate(prompts):
        left, right = baseline.token_ids[index], draft.token_ids[index]
        at = first_difference(left, right)
        rows.append(
            {
                "line": prompt.line,
                "prompt": prompt.text,
                "prompt_tokens": len(prompt.token_ids),
                "baseline_tokens": len(left),
                "draft_tokens": len(right),
                "baseline_finish_reason": baseline.finish_reasons[index],
                "draft_finish_reason": draft.finish_reasons[index],
                "same": at is None,
                "first_difference": at,
                "baseline_token_there": None if at is None else tokenizer.decode(left[at : at + 1]),
                "draft_token_there": None if at is None else tokenizer.decode(right[at : at + 1]),
                "baseline_answer": baseline.texts[index],
                "draft_answer": draft.texts[index],
            }
        )
    return rows


def write_per_prompt(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """per_prompt.parquet, one row a prompt."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text, whole = pa.string(), pa.int64()
    schema = pa.schema(
        [
            ("line", whole),
            ("prompt", text),
            ("prompt_tokens", whole),
            ("baseline_tokens", whole),
            ("draft_tokens", whole),
            ("baseline_finish_reason", text),
            ("draft_finish_reason", text),
            ("same", pa.bool_()),
            ("first_difference", whole),
            ("baseline_token_there", text),
            ("draft_token_there", text),
            ("baseline_answer", text),
            ("draft_answer", text),
        ]
    )
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), path)
