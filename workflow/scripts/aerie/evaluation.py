"""What a draft is worth in service: how many of its tokens the target accepts, the speed, and the outputs compared.

All numbers are vLLM's own. Engines ("baseline": no speculation; "ngram"; "draft") answer the same prompts, each in several
passes: a prompt set at a temperature, with so many requests at once.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .chat import Renderer
from .conversations import Message, conversation_of, with_system
from .errors import AerieError
from .generation import ServedAnswer, SpeculationCounters
from .keys import digest_of, file_sha256
from .run_results import LEAST_PROMPTS
from .sources import RawRow, Source, read_rows
from .stage import read_manifest

ENGINES = ("baseline", "ngram", "draft")
DIFFERENCES_SHOWN = 20
SAMPLES_SHOWN = 6
_RESAMPLES = 2000
_ROUNDING = (
    "Greedy answers with and without a draft are equal in exact arithmetic. In bfloat16 the order of summation depends on how "
    "many tokens are computed together, so where two tokens are almost equally likely the answers can part; such a difference "
    "is rounding, not an error of the draft."
)
NOTES = (
    "The figures at the top are those of the first prompt set, greedy, at the largest batch_size.",
    "acceptance_length is 1 + accepted tokens / steps; a step of the n-gram engine without a proposal counts as one that accepted nothing.",
    "accepted_per_position is unconditional: the share of all steps whose tokens up to and including this position were accepted.",
    f"confidence holds the bounds of 95 % by bootstrap over prompts; null for fewer than {LEAST_PROMPTS} prompts.",
    "by_draft_tokens is estimated from this one run: with fewer draft tokens, steps begin at other places of the text.",
    "vLLM counts an accepted token even if the answer ended before it; tokens_past_the_end says how many these were.",
    "prompts_left_out counts, by set, the prompts of the validation split that leave no room for an answer.",
    "tokens_per_second is generation only, prompts included, after a warm-up that is in no count.",
    "time_to_first_token_ms counts from the request, time_per_output_token_ms is a request's mean from its first token to its last.",
    _ROUNDING,
)


class Pass(NamedTuple):
    """What one engine answers in one go: a prompt set at a temperature, batch_size requests at once."""

    prompt_set: str
    temperature: float
    batch_size: int


def planned_passes(prompts: Mapping[str, int], temperatures: Sequence[float], batch_sizes: Sequence[int]) -> list[Pass]:
    """Every set at every temperature with the largest batch size; the first set, greedy, with the others too.

    The first one is the one that the summary speaks of. prompts: {set: how many it has}; a batch size that is no smaller would
    have all of them at once, as the largest has.
    """
    largest, first = max(batch_sizes), next(iter(prompts))
    found = [Pass(name, temperature, largest) for temperature in sorted(temperatures) for name in prompts]
    return found + [Pass(first, 0, size) for size in sorted(batch_sizes, reverse=True) if size < min(largest, prompts[first])]


@dataclass(frozen=True)
class EvaluationPrompt:
    """A prompt of the evaluation: the text of its user turn, its category ("" if it has none) and its token ids."""

    line: int
    text: str
    category: str
    token_ids: list[int]


@dataclass(frozen=True)
class PassResult:
    """An engine's answers in one pass. seconds: generation only; counters: vLLM's, None without speculation."""

    answers: list[ServedAnswer]
    seconds: float
    counters: SpeculationCounters | None

    @property
    def tokens(self) -> int:
        """Tokens of all answers, the end tokens included."""
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class EngineRun:
    """All passes of one engine, loaded once."""

    engine: str
    device: str
    dtype: str
    passes: dict[Pass, PassResult]

    def to_json(self) -> str:
        passes = [[list(name), asdict(found)] for name, found in self.passes.items()]
        return json.dumps({"engine": self.engine, "device": self.device, "dtype": self.dtype, "passes": passes})

    @classmethod
    def from_json(cls, text: str) -> "EngineRun":
        stored = json.loads(text)
        passes = {}
        for name, found in stored["passes"]:
            counters = found["counters"]
            if counters:
                counters = SpeculationCounters(**{**counters, "accepted_per_position": tuple(counters["accepted_per_position"])})
            passes[Pass(*name)] = PassResult([ServedAnswer(**answer) for answer in found["answers"]], found["seconds"], counters)
        return cls(stored["engine"], stored["device"], stored["dtype"], passes)


# --- prompts ----------------------------------------------------------------------------------------------------------


class Room(NamedTuple):
    """Tokens that the target takes in all, and those of them that an answer is given."""

    limit: int
    max_new_tokens: int

    def has(self, prompt: EvaluationPrompt) -> bool:
        """Whether an answer to the prompt fits."""
        return len(prompt.token_ids) + self.max_new_tokens <= self.limit


class Turn(NamedTuple):
    """A row's messages up to its first user turn, and the tools on offer."""

    source: str
    line: int
    category: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


def first_turns(rows: Iterable[RawRow], max_prompts: int | None) -> list[Turn]:
    """The first turn of each row, in file order; its category is the row's own (as MT-Bench has it).

    max_prompts takes those with the lowest hashes, so a larger number contains the smaller. AerieError for unusable rows:
    an evaluation that skips prompts cannot be compared with another.
    """
    found = []
    for row in rows:
        conversation = conversation_of(row)
        problem = conversation.problem or ("found token ids, expected messages or a prompt as text" if conversation.tokens else "")
        if problem:
            raise AerieError(f"{row.source}:{row.line}: {problem}; every prompt must be usable. Mend the row, or take it out.")
        end = next(number for number, message in enumerate(conversation.messages) if message["role"] == "user")
        messages = [{"role": one["role"], "content": one["content"]} for one in conversation.messages[: end + 1]]
        data = json.loads(row.data) if isinstance(row.data, str) else row.data
        found.append(Turn(row.source, row.line, str(data.get("category") or ""), messages, conversation.tools))
    chosen = sorted(found, key=lambda turn: digest_of([turn.messages, turn.tools] if turn.tools else turn.messages))[:max_prompts]
    return sorted(chosen, key=lambda turn: turn.line)


def read_prompts(
    path: Path, renderer: Renderer, max_prompts: int | None, room: Room, system_prompt: str | None = None
) -> list[EvaluationPrompt]:
    """The prompts of a file of conversations, system_prompt before those that have no system message, as the dataset has it.

    AerieError, naming the place, for one that cannot be asked.
    """
    found = []
    for turn in first_turns(read_rows(Source(path=str(path))), max_prompts):
        place = f"{turn.source}:{turn.line}"
        try:
            ids = renderer.prompt(with_system(turn.messages, system_prompt), turn.tools)
        except Exception as error:  # a template may raise anything
            raise AerieError(
                f"{place}: the target's chat template refuses the prompt: {type(error).__name__}: {error}. Mend the row, or take it out."
            ) from error
        prompt = EvaluationPrompt(turn.line, turn.messages[-1]["content"], turn.category, ids)
        if not room.has(prompt):
            raise AerieError(
                f"{place}: a prompt of {len(ids)} tokens and {room.max_new_tokens} new ones exceed the target's {room.limit}. "
                "Lower the evaluation's max_new_tokens, or take the row out."
            )
        found.append(prompt)
    if not found:
        raise AerieError(f"{path}: the evaluation has no prompts there; expected MT-Bench's question.jsonl or a file of conversations")
    return found


def validation_prompts(dataset: Path, tokenizer: Any, max_prompts: int | None, room: Room) -> tuple[list[EvaluationPrompt], int]:
    """What stands before the first supervised token of each validation sample, each once; line is the sample's row.

    Those too long for an answer, which nobody can shorten, are left out; the second value counts them.
    """
    from .samples import load_samples

    found: dict[tuple[int, ...], EvaluationPrompt] = {}
    for number, row in enumerate(load_samples(dataset)):
        if row["split"] == "validation" and 1 in row["loss_mask"]:
            ids = row["input_ids"][: row["loss_mask"].index(1)]
            if ids:
                found.setdefault(tuple(ids), EvaluationPrompt(number, tokenizer.decode(ids), "", list(ids)))
    fitting = [prompt for prompt in found.values() if room.has(prompt)]
    if not fitting:
        raise AerieError(
            f"{dataset}: of {len(found)} different prompts in the validation split none leaves room for {room.max_new_tokens} new tokens in "
            f"the target's {room.limit}. Lower the evaluation's max_new_tokens, or set validation_prompts: false."
        )
    chosen = sorted(fitting, key=lambda prompt: digest_of(prompt.token_ids))[:max_prompts]
    return sorted(chosen, key=lambda prompt: prompt.line), len(found) - len(fitting)


def prompts_digest(path: Path) -> str:
    """Content digest of a prompt set: of its file, or of the dataset that is its folder."""
    if path.is_dir():
        return str(read_manifest(path)["digest"])
    if not path.is_file():
        raise AerieError(f"{path}: no such file. Check the evaluation's prompts.")
    return file_sha256(path)


# --- counting ---------------------------------------------------------------------------------------------------------


def step_counts(answers: Sequence[ServedAnswer], positions: int) -> np.ndarray:
    """int64 [prompts, 1 + positions]: the target's steps after each prompt's own, and those that accepted 1, 2, … tokens or more."""
    found = np.zeros((len(answers), 1 + positions), dtype=np.int64)
    for row, answer in zip(found, answers, strict=True):
        # A step gives one token and what it accepts, the last one no more than the answer has room for.
        least = max(len(answer.accepted), len(answer.token_ids) - 1 - sum(answer.accepted))
        row[0] = least if answer.steps is None else answer.steps
        row[1:] = [sum(count >= position for count in answer.accepted) for position in range(1, positions + 1)]
    return found


def acceptance(counts: np.ndarray) -> dict[str, Any]:
    """acceptance_length and accepted_per_position (both as in NOTES) with their confidence, from `step_counts`."""
    found: dict[str, Any] = _figures(counts.sum(axis=0)) | {"confidence": None}
    if int((counts[:, 0] > 0).sum()) >= LEAST_PROMPTS:
        drawn = np.random.default_rng(0).multinomial(len(counts), np.full(len(counts), 1 / len(counts)), size=_RESAMPLES) @ counts
        lengths, resampled = _shares(drawn[drawn[:, 0] > 0])
        found["confidence"] = {
            "acceptance_length": _bounds(lengths),
            "accepted_per_position": [_bounds(column) for column in resampled.T],
        }
    return found


def _shares(totals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Acceptance length and shares by position, of totals [..., 1 + positions]."""
    shares = totals[..., 1:] / np.maximum(totals[..., :1], 1)
    return 1 + shares.sum(axis=-1), shares


def _figures(totals: np.ndarray) -> dict[str, Any]:
    """The same of totals [1 + positions], with the steps they are of, rounded."""
    length, shares = _shares(totals)
    rounded = [round(float(share), 6) for share in shares]
    return {"steps": int(totals[0]), "acceptance_length": round(float(length), 6), "accepted_per_position": rounded}


def _bounds(values: np.ndarray) -> list[float]:
    return [round(float(bound), 6) for bound in np.percentile(values, [2.5, 97.5])]


def by_draft_tokens(accepted_per_position: Sequence[float]) -> list[dict[str, Any]]:
    """The acceptance length with 1, 2, … draft tokens, from the shares of a run with the most."""
    sums = np.cumsum(accepted_per_position)
    return [{"num_draft_tokens": k, "acceptance_length": round(1 + float(total), 6)} for k, total in enumerate(sums, 1)]


def by_category(prompts: Sequence[EvaluationPrompt], counts: np.ndarray) -> list[dict[str, Any]]:
    """Acceptance in each category of a prompt set, by name; empty where the set has no categories."""
    names = sorted({prompt.category for prompt in prompts})
    if names == [""]:
        return []
    found = []
    for name in names:
        chosen = np.array([prompt.category == name for prompt in prompts])
        found.append({"category": name or "none", "prompts": int(chosen.sum())} | acceptance(counts[chosen]))
    return found


def by_context(pairs: Sequence[tuple[int, ServedAnswer]], positions: int) -> list[dict[str, Any]]:
    """Acceptance by the tokens before a draft, in classes of doubling length; pairs: (tokens of the prompt, answer)."""
    lengths, accepted = [], []
    for prompt_tokens, answer in pairs:
        before = np.cumsum([0, *(count + 1 for count in answer.accepted)])[:-1]
        lengths += list(prompt_tokens + 1 + before)
        accepted += answer.accepted
    if not lengths:
        return []
    edges = 2 ** np.arange(int(np.log2(min(lengths))), int(np.log2(max(lengths))) + 2)
    places, counts = np.asarray(lengths), np.asarray(accepted)
    found = []
    for low, high in pairwise(edges.tolist()):
        inside = counts[(places >= low) & (places < high)]
        totals = np.array([len(inside), *((inside >= position).sum() for position in range(1, positions + 1))])
        if len(inside):
            found.append({"from": low, "below": high} | _figures(totals))
    return found


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position where two token sequences differ (also where one ends before the other); None if equal."""
    for position, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return position
    return None if len(one) == len(other) else min(len(one), len(other))


def compared(baseline: PassResult, other: PassResult) -> dict[str, int]:
    """How many answers are the same, token by token."""
    same = sum(left.token_ids == right.token_ids for left, right in zip(baseline.answers, other.answers, strict=True))
    return {"same": same, "different": len(other.answers) - same}


def latency(values: Sequence[float]) -> dict[str, float]:
    """Median and 90th percentile in milliseconds, of seconds."""
    median, high = np.percentile([1000 * value for value in values], [50, 90])
    return {"median": round(float(median), 3), "p90": round(float(high), 3)}


# --- the stage's files ------------------------------------------------------------------------------------------------

PromptSets = dict[str, list[EvaluationPrompt]]  # by name, in the configuration's order
Runs = dict[str, EngineRun]  # by engine


def summary(sets: PromptSets, runs: Runs, settings: dict[str, Any], rows: list[dict[str, Any]], tokenizer: Any) -> dict[str, Any]:
    """acceptance.json: the figures of the first pass, then all others; see NOTES. rows: those of `per_prompt`."""
    head = next(iter(runs["draft"].passes))
    baseline, draft = runs["baseline"].passes[head], runs["draft"].passes[head]
    positions = settings["num_draft_tokens"]
    counts = step_counts(draft.answers, positions)
    if not counts[:, 0].sum():
        raise AerieError("vLLM verified no draft at all: the answers are too short to speculate (is max_new_tokens 1?)")
    accepted = int(counts[:, 1:].sum())
    # Each answer's first token comes from the prompt alone, each verification gives one more than it accepts.
    emitted = len(draft.answers) + int(counts[:, 0].sum()) + accepted
    passes = {engine: run.passes[head] for engine, run in runs.items()}
    found = acceptance(counts)
    greedy = {name: runs["draft"].passes[Pass(name, 0, head.batch_size)] for name in sets}
    contexts = [
        (len(prompt.token_ids), answer) for name, one in greedy.items() for prompt, answer in zip(sets[name], one.answers, strict=True)
    ]
    different = [row for row in rows if not row["same"]]
    places = ("prompt_set", "line", "first_difference", "baseline_token_there", "draft_token_there")
    return {
        **found,
        "drafts": sum(len(answer.accepted) for answer in draft.answers),
        "draft_tokens": draft.counters.draft_tokens if draft.counters else None,
        "accepted_tokens": accepted,
        "tokens_past_the_end": max(0, emitted - draft.tokens),
        "prompt_set": head.prompt_set,
        "prompts": len(draft.answers),
        "num_draft_tokens": positions,
        "max_new_tokens": settings["max_new_tokens"],
        "batch_size": min(head.batch_size, len(draft.answers)),
        "output_tokens": {engine: one.tokens for engine, one in passes.items()},
        "seconds": {engine: round(one.seconds, 3) for engine, one in passes.items()},
        "tokens_per_second": {engine: round(one.tokens_per_second, 1) for engine, one in passes.items()},
        "speed_up": round(draft.tokens_per_second / baseline.tokens_per_second, 3),
        "identical_outputs": compared(baseline, draft),
        "device": {engine: run.device for engine, run in runs.items()},
        "dtype": runs["draft"].dtype,
        "vllm_counters": asdict(draft.counters) if draft.counters else None,
        "by_draft_tokens": by_draft_tokens(found["accepted_per_position"]),
        "by_category": [
            {"prompt_set": name} | row
            for name, one in greedy.items()
            for row in by_category(sets[name], step_counts(one.answers, positions))
        ],
        "by_context": by_context(contexts, positions),
        "acceptance": _acceptance_rows(runs, positions),
        "speed": _speed_rows(runs, head),
        "differences": [{name: row[name] for name in places} for row in different[:DIFFERENCES_SHOWN]],
        "samples": samples(sets[head.prompt_set], draft.answers, tokenizer),
        "notes": list(NOTES),
    }


def _acceptance_rows(runs: Runs, positions: int) -> list[dict[str, Any]]:
    """One row for each speculating engine, prompt set and temperature; greedy ones with the answers that are the baseline's own."""
    found = []
    largest = max(name.batch_size for name in runs["draft"].passes)
    for engine, run in runs.items():
        for name, one in run.passes.items():
            if engine != "baseline" and name.batch_size == largest:
                row = {"engine": engine, "prompt_set": name.prompt_set, "temperature": name.temperature, "prompts": len(one.answers)}
                same = {"identical_outputs": compared(runs["baseline"].passes[name], one)} if name.temperature == 0 else {}
                found.append(row | acceptance(step_counts(one.answers, positions)) | same)
    return found


def _speed_rows(runs: Runs, head: Pass) -> list[dict[str, Any]]:
    """One row for each engine and batch size, smallest first: the first prompt set, greedy."""
    found = []
    for engine, run in runs.items():
        for name, one in run.passes.items():
            if (name.prompt_set, name.temperature) == (head.prompt_set, 0):
                found.append(
                    {
                        "engine": engine,
                        "batch_size": min(name.batch_size, len(one.answers)),  # more are not there to be in flight
                        "output_tokens": one.tokens,
                        "seconds": round(one.seconds, 3),
                        "tokens_per_second": round(one.tokens_per_second, 1),
                        "speed_up": round(one.tokens_per_second / runs["baseline"].passes[name].tokens_per_second, 3),
                        "time_to_first_token_ms": latency([answer.first_token_seconds for answer in one.answers]),
                        "time_per_output_token_ms": latency(
                            [answer.seconds_per_token for answer in one.answers if len(answer.token_ids) > 1] or [0.0]
                        ),
                    }
                )
    return sorted(found, key=lambda row: (row["batch_size"], ENGINES.index(row["engine"])))


def samples(prompts: Sequence[EvaluationPrompt], answers: Sequence[ServedAnswer], tokenizer: Any) -> list[dict[str, Any]]:
    """Some answers in pieces [text, whether the draft's tokens gave it]; one of each category as far as they go."""
    seen: dict[str, int] = {}
    order = []
    for number, prompt in enumerate(prompts):
        seen[prompt.category] = seen.get(prompt.category, 0) + 1
        order.append((seen[prompt.category], number))
    found = []
    for _, number in sorted(order)[:SAMPLES_SHOWN]:
        pieces = coloured(answers[number], tokenizer)
        found.append({"line": prompts[number].line, "category": prompts[number].category, "prompt": prompts[number].text, "pieces": pieces})
    return found


def coloured(answer: ServedAnswer, tokenizer: Any) -> list[list[Any]]:
    """An answer in pieces [text, whether it was proposed by the draft and accepted]."""
    from_draft = [False, *(place < count for count in answer.accepted for place in range(count + 1))]
    pieces: list[list[Any]] = []
    done = ""
    for end in range(1, len(answer.token_ids) + 1):
        text = tokenizer.decode(answer.token_ids[:end], skip_special_tokens=True)
        if text.endswith("\ufffd") and end < len(answer.token_ids):  # a character of several tokens: with the last of them
            continue
        new, done = text[len(done) :], text
        mark = end <= len(from_draft) and from_draft[end - 1]
        if pieces and pieces[-1][1] == mark:
            pieces[-1][0] += new
        elif new:
            pieces.append([new, mark])
    return pieces


def per_prompt(sets: PromptSets, runs: Runs, batch_size: int, tokenizer: Any) -> list[dict[str, Any]]:
    """Rows of per_prompt.parquet: every prompt's greedy answers without and with the draft.

    accepted_per_step: tokens accepted of each verified draft. first_difference is a token position in the answers, with both
    tokens' texts ("" where an answer had ended); null where the answers are equal.
    """

    def text(ids: Sequence[int], special: bool = False) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=not special))

    rows = []
    for name, prompts in sets.items():
        both = (runs[engine].passes[Pass(name, 0, batch_size)].answers for engine in ("baseline", "draft"))
        for prompt, baseline, draft in zip(prompts, *both, strict=True):
            left, right = baseline.token_ids, draft.token_ids
            at = first_difference(left, right)
            rows.append(
                {
                    "prompt_set": name,
                    "line": prompt.line,
                    "category": prompt.category,
                    "prompt": prompt.text,
                    "prompt_tokens": len(prompt.token_ids),
                    "baseline_tokens": len(left),
                    "draft_tokens": len(right),
                    "accepted_per_step": draft.accepted,
                    "baseline_finish_reason": baseline.finish_reason,
                    "draft_finish_reason": draft.finish_reason,
                    "same": at is None,
                    "first_difference": at,
                    "baseline_token_there": None if at is None else text(left[at : at + 1], special=True),
                    "draft_token_there": None if at is None else text(right[at : at + 1], special=True),
                    "baseline_answer": text(left),
                    "draft_answer": text(right),
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
            ("prompt_set", text),
            ("line", whole),
            ("category", text),
            ("prompt", text),
            ("prompt_tokens", whole),
            ("baseline_tokens", whole),
            ("draft_tokens", whole),
            ("accepted_per_step", pa.list_(pa.int8())),
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
