#!/usr/bin/env python
"""Has the target answer the prompts of a dataset itself, so that the draft learns what the target says.

    regenerate_responses.py --recipe R --target fingerprint.json --store S --output DIR --log L

Each conversation is asked turn by turn; later turns see the new answers, a system prompt is kept. Answers are kept in
the store by prompt, batch by batch: a kill loses at most one batch, and other or more data asks only what is new.

Output: responses.parquet, rejects.jsonl, manifest.json.
Settings: max_new_tokens, temperature, top_p, seed, dtype, max_prompts (null: all), keep_cut_off, system_prompt,
template_options, max_rejected.
Runtime: sources (the files), device, tensor_parallel, engine_options, batch_prompts (prompts between two writes to the store).
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from aerie import cli, generation
from aerie.chat import Renderer
from aerie.conversations import Message, conversation_of
from aerie.devices import lease
from aerie.errors import AerieError
from aerie.generation import Answer
from aerie.keys import digest_of
from aerie.preparation import check_rejected, write_rejects
from aerie.progress import Progress, loading
from aerie.regeneration import (
    Answers,
    AnswerStore,
    Prompt,
    Rejection,
    assemble,
    batch_key,
    choose_prompts,
    cut_off_warning,
    fault_of,
    figures_of,
    reason_of,
    responses_digest,
    write_responses,
)
from aerie.sources import Source, by_reason, read_rows, sources_digest
from aerie.stage import Recipe, StageResult, run_stage
from aerie.targets import Target

VERSION = 6
ANSWERS_VERSION = 3  # of the answers in the store, which cost the most: raised only when the target would be asked otherwise

# What an answer depends on; the other settings only choose among prompts and answers.
ANSWER_SETTINGS = ("max_new_tokens", "temperature", "top_p", "seed", "dtype", "value_options", "template_options")

Reply = Callable[[int, Answer], list[int] | None]
Converse = Callable[[dict[int, list[int]], Reply, int], None]


def main(args: argparse.Namespace) -> None:
    recipe = Recipe.read(args.recipe)
    target = Target.read(args.target)
    sources = [Source.of(item) for item in recipe.runtime["sources"]]
    inputs = {"target": target.digest, "prompts": sources_digest(sources)}

    def compute(work: Path, out: Path) -> StageResult:
        with lease(recipe.runtime.get("gpus", 0), args.gpus, nodes=recipe.runtime.get("nodes", 1)):
            return regenerate(recipe, target, sources, args.store, work, out)

    answers = [f"answers/{answers_key(recipe, target)}"]
    manifest = run_stage(recipe, VERSION, inputs, args.output, args.store, compute, args.log, answers)
    figures = manifest["figures"]
    cli.say(
        f"regenerate: {figures['kept']:,} of {figures['prompts']:,} conversations kept ({figures['cut_off']:,} of them cut off at "
        f"max_new_tokens), dropped {json.dumps(figures['dropped'])}, shortened {json.dumps(figures['shortened'])}"
    )
    warning = cut_off_warning(figures)
    if warning:
        cli.say(warning)


def answers_key(recipe: Recipe, target: Target) -> str:
    """Key of the folder of the store that keeps a target's answers under these settings."""
    how = {name: recipe.settings.get(name) for name in ANSWER_SETTINGS}
    return digest_of({"version": ANSWERS_VERSION, "target": target.digest, "settings": how})


def regenerate(recipe: Recipe, target: Target, sources: Sequence[Source], store: Path, work: Path, out: Path) -> StageResult:
    """Asks what the store does not answer yet, and writes the dataset's responses into `out`."""
    settings = recipe.settings
    found = [(source, map(conversation_of, read_rows(source))) for source in sources]
    prompts, rejected = choose_prompts(found, settings["max_prompts"], settings.get("system_prompt"))
    faulty = [f"{one.source}:{one.line}: {one.detail}" for one in rejected if one.reason == "unusable row"]
    counts = Counter(map(reason_of, rejected))
    write_rejects(in_order(rejected), work / "rejects.jsonl")
    check_rejected(faulty, by_reason(counts), len(prompts) + len(rejected), settings.get("max_rejected", 1.0), work / "rejects.jsonl")
    if not prompts:
        reasons = sorted({one.reason for one in rejected})
        raise AerieError(
            f"no prompt to answer in {', '.join(source.name for source in sources)}; rows were rejected for: {', '.join(reasons) or 'no rows'}"
        )
    cli.say("regenerate: the target answers every prompt itself; answers that the sources have are not used")
    answer_store = AnswerStore(store / "answers" / answers_key(recipe, target))
    with answer_store.locked():
        answered = answer_store.read(prompt.key for prompt in prompts)
        missing = [prompt for prompt in prompts if prompt.key not in answered]
        unasked = sum(not one.answers for one in answered.values())
        cli.say(
            f"regenerate: {len(answered) - unasked:,} of {len(prompts):,} prompts found answered, {len(missing):,} to ask"
            f"{f', {unasked:,} known to be too long or refused by the chat template' if unasked else ''}"
        )
        seconds, tokens = 0.0, 0
        if missing:
            seconds, tokens = ask_all(missing, recipe, target, answer_store, done=len(answered))
            answered = answer_store.read(prompt.key for prompt in prompts)
    responses = []
    for prompt in prompts:
        response, rejection = assemble(prompt, answered[prompt.key], settings["keep_cut_off"])
        responses += [response] if response else []
        rejected += [rejection] if rejection else []
    figures = figures_of(len(prompts), responses, rejected)
    if not responses:
        raise AerieError(f"none of the {len(prompts)} answers can be used ({json.dumps(figures['dropped'])}). Check the target.")
    write_responses(responses, out / "responses.parquet")
    write_rejects(in_order(rejected), out / "rejects.jsonl")
    # Of this run alone: what earlier ones answered is in the store with no time beside it.
    measured = {"asked": len(missing), "generated_tokens": tokens, "tokens_per_second": round(tokens / seconds, 1) if tokens else None}
    return StageResult(digest=responses_digest(responses, rejected), figures=figures | measured)


def in_order(rejected: Sequence[Rejection]) -> Iterator[dict[str, Any]]:
    """Rows of rejects.jsonl, by source and line."""
    return map(asdict, sorted(rejected, key=lambda one: (one.source, one.line)))


def ask_all(missing: Sequence[Prompt], recipe: Recipe, target: Target, answer_store: AnswerStore, done: int) -> tuple[float, int]:
    """Answers the prompts in batches, each stored before the next begins. Returns seconds and tokens of generation."""
    settings, runtime = recipe.settings, recipe.runtime
    tokenizer = target.tokenizer()
    limit = generation.length_limit(target, runtime)
    with loading("regenerate"):
        engine = generation.start(
            target,
            runtime,
            end_tokens=target.end_tokens(tokenizer),
            max_length=limit,
            dtype=settings.get("dtype") or "auto",
            seed=settings["seed"],
        )

    def converse(first: dict[int, list[int]], reply: Reply, seed: int) -> None:
        def counted(index: int, answer: Answer) -> list[int] | None:
            following = reply(index, answer)
            progress.update(following is None)
            return following

        engine.converse(first, counted, settings["max_new_tokens"], settings["temperature"], settings["top_p"], seed)
        progress.update(len(batch) - len(first))  # those that could not be asked

    renderer = Renderer(tokenizer, target.end_tokens(tokenizer), settings.get("template_options"))
    special = renderer.special_ids - renderer.ends
    progress = Progress("regenerate", done + len(missing), "prompts", start=done)
    size = int(runtime.get("batch_prompts") or 500)
    seconds, tokens = 0.0, 0
    for start in range(0, len(missing), size):
        batch = missing[start : start + size]
        key = batch_key(batch)
        started = time.monotonic()
        answers = ask(batch, converse, renderer.prompt, limit - settings["max_new_tokens"], seed_of(settings["seed"], key), special)
        seconds += time.monotonic() - started
        tokens += sum(sum(one.tokens) for one in answers)
        answer_store.write(key, answers)
        progress.update(0, tokens_per_second=round(tokens / seconds))
    progress.done(tokens_per_second=round(tokens / max(seconds, 1e-9)))
    engine.close()
    return seconds, tokens


IdsOf = Callable[[Sequence[Message], list[dict[str, Any]] | None], list[int]]


def ask(
    prompts: Sequence[Prompt], converse: Converse, ids_of: IdsOf, max_prompt: int, seed: int, special: frozenset[int] = frozenset()
) -> list[Answers]:
    """Asks a batch, each conversation turn by turn up to its first answer that is not good.

    max_prompt: the longest prompt, in tokens, that leaves room for an answer. special: tokens that an answer's text does
    not show, so that one with them is not good.
    """
    messages: list[list[Message]] = [[] for _ in prompts]
    given: list[list[Answer]] = [[] for _ in prompts]
    problems = ["" for _ in prompts]

    def next_prompt(index: int) -> list[int] | None:
        prompt, turn = prompts[index], len(given[index])
        if turn == len(prompt.turns):
            return None
        messages[index] += prompt.turns[turn]
        ids, problems[index] = rendered(messages[index], prompt.tools, ids_of, max_prompt)
        return None if problems[index] else ids

    def reply(index: int, answer: Answer) -> list[int] | None:
        if special.intersection(answer.token_ids):
            answer = replace(answer, finish_reason="special")
        given[index].append(answer)
        messages[index].append({"role": "assistant", "content": answer.text})
        return None if fault_of(answer.text, answer.finish_reason)[0] else next_prompt(index)

    converse({index: ids for index in range(len(prompts)) if (ids := next_prompt(index)) is not None}, reply, seed)
    return [
        Answers(
            prompt.key,
            tuple(answer.text for answer in answers),
            tuple(answer.finish_reason for answer in answers),
            tuple(len(answer.token_ids) for answer in answers),
            problem,
        )
        for prompt, answers, problem in zip(prompts, given, problems, strict=True)
    ]


def rendered(messages: Sequence[Message], tools: Any, ids_of: IdsOf, max_prompt: int) -> tuple[list[int], str]:
    """Token ids of a prompt, and why it cannot be asked ("" if it can)."""
    from jinja2 import TemplateError

    try:
        ids = ids_of(messages, tools)
    except TemplateError as error:
        return [], f"refused by the chat template: {error}"
    too_long = f"prompt too long: {len(ids):,} tokens; at most {max_prompt:,} leave room for max_new_tokens"
    return ids, too_long if len(ids) > max_prompt else ""


def seed_of(seed: int, key: str) -> int:
    """The sampling seed of a batch: the same batch is sampled alike whatever was answered before it."""
    return int(digest_of([seed, key])[:8], 16)


if __name__ == "__main__":
    cli.run(main, cli.engine_parser(__doc__))
