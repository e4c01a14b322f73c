#!/usr/bin/env python
"""Serves the draft with vLLM and measures it: acceptance, speed with and without it, and whether the outputs agree.

    evaluate_draft.py --recipe R --target fingerprint.json --draft DIR --prompts FILE --store S --output DIR --log L

Each of the two runs is a process of its own (--role baseline, --role draft; this command starts them), so that one
engine's memory is free for the next. The run without a draft is kept in the store and serves every draft of the same
target, prompts, settings and device.

Output: acceptance.json, per_prompt.parquet, manifest.json.
Settings: num_draft_tokens, max_new_tokens, max_prompts (null: all), batch_size (requests at once), dtype.
Runtime: device, tensor_parallel, engine_options.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from aerie import cli, evaluation, generation
from aerie.chat import Renderer
from aerie.conversations import read_conversations
from aerie.devices import lease
from aerie.errors import AerieError, ProcessFailed, describe_exit
from aerie.evaluation import EvaluationPrompt, Half
from aerie.keys import digest_of, file_sha256
from aerie.provenance import versions
from aerie.stage import Recipe, StageResult, locked, read_manifest, run_stage, write_atomically
from aerie.targets import Target
from aerie.vocabulary import draft_map

VERSION = 1


def build_parser() -> argparse.ArgumentParser:
    parser = cli.engine_parser(__doc__)
    parser.add_argument("--draft", type=Path, required=True, help="folder of the draft: config.json, model.safetensors, manifest.json")
    parser.add_argument("--prompts", type=Path, required=True, help="MT-Bench's question.jsonl, or conversations (first turns)")
    parser.add_argument("--role", choices=["baseline", "draft"], help="run only this half (used by this command itself)")
    return parser


def main(args: argparse.Namespace) -> None:
    recipe = Recipe.read(args.recipe)
    target = Target.read(args.target)
    if args.role:
        write_atomically(args.output, run_half(args.role, recipe, target, args.draft, args.prompts).to_json())
        return
    inputs = {"target": target.digest, "draft": read_manifest(args.draft)["digest"], "prompts": file_sha256(args.prompts)}

    def compute(work: Path, out: Path) -> StageResult:
        check_draft(args.draft)
        # The children inherit the lease with the environment; this process touches no GPU.
        key = baseline_key(recipe, target, inputs["prompts"])
        baseline = args.store / "baselines" / f"{key}.json"
        if not baseline.exists():
            with locked(baseline.with_suffix(".lock"), "baseline"), lease(recipe.runtime["gpus"], args.gpus):
                half_of("baseline", baseline, args)
        with lease(recipe.runtime["gpus"], args.gpus):
            # Named by the key, so that a half measured on another device is not taken up.
            return evaluate(args, recipe, target, baseline, work / f"draft-{key[:16]}.json", out)

    manifest = run_stage(recipe, VERSION, inputs, args.output, args.store, compute, args.log)
    found = manifest["figures"]
    speeds, outputs = found["tokens_per_second"], found["identical_outputs"]
    cli.say(
        f"evaluate: acceptance length {found['acceptance_length']:.3f}, by position {found['accepted_per_position']}; "
        f"{speeds['draft']:,} tok/s with the draft, {speeds['baseline']:,} without (x {found['speed_up']}); "
        f"{outputs['same']} of {found['prompts']} answers identical"
    )


def evaluate(args: argparse.Namespace, recipe: Recipe, target: Target, baseline_path: Path, draft_path: Path, out: Path) -> StageResult:
    """Runs the draft's half if it is not there yet, compares the halves and writes the stage's files."""
    baseline = half_of("baseline", baseline_path, args)
    draft = half_of("draft", draft_path, args)
    tokenizer = target.tokenizer()
    prompts = prompts_of(args.prompts, tokenizer, recipe.settings)
    if not len(prompts) == len(baseline.token_ids) == len(draft.token_ids):
        raise AerieError(
            f"{len(prompts)} prompts, but {len(baseline.token_ids)} answers without and {len(draft.token_ids)} with the draft. "
            f"Delete {baseline_path} and run snakemake again."
        )
    summary = evaluation.summary(baseline, draft, recipe.settings)
    (out / "acceptance.json").write_text(json.dumps(summary, indent=1) + "\n")
    evaluation.write_per_prompt(evaluation.per_prompt(prompts, baseline, draft, tokenizer), out / "per_prompt.parquet")
    return StageResult(figures={name: value for name, value in summary.items() if name != "notes"})


def check_draft(folder: Path) -> None:
    """AerieError where vLLM could not load the draft, before the target is loaded for it."""
    config = folder / "config.json"
    try:
        kind = json.loads(config.read_text()).get("speculators_model_type")
    except (OSError, ValueError) as error:
        kind = f"unreadable ({error})"
    if kind != "eagle3":
        raise AerieError(f"{config}: speculators_model_type is {kind}; expected an EAGLE-3 draft as train_draft writes it. Run snakemake.")
    draft_map(folder)


def baseline_key(recipe: Recipe, target: Target, prompts_digest: str) -> str:
    """Key of the run without a draft: everything that its answers or its speed depend on, the device included."""
    tensor_parallel = int(recipe.runtime.get("tensor_parallel") or 1)
    parts = {
        "version": VERSION,
        "target": target.digest,
        "prompts": prompts_digest,
        "settings": {name: value for name, value in recipe.settings.items() if name != "num_draft_tokens"},
        "engine_options": recipe.runtime.get("engine_options") or {},
        "device": generation.device_name(tensor_parallel),
        "engine": {name: version for name, version in versions().items() if name.startswith(("vllm", "torch"))},
    }
    return digest_of(parts)


def half_of(role: str, path: Path, args: argparse.Namespace) -> Half:
    """One half: as found at `path`, or run in a child process that writes it there."""
    if path.exists():
        cli.say(f"evaluate: found the answers {phrase(role)} from an earlier run")
    else:
        cli.say(f"evaluate: answering the prompts {phrase(role)}")
        command = [sys.executable, sys.argv[0], "--role", role, "--output", str(path)]
        for name in ("recipe", "store", "target", "draft", "prompts"):
            command += [f"--{name}", str(getattr(args, name))]
        # The child's output goes to the log with ours; it inherits the lock on this stage, and so outlives us safely.
        done = subprocess.run(command, check=False, close_fds=False, stdin=subprocess.DEVNULL)
        if done.returncode or not path.exists():
            raise ProcessFailed(f"the run {phrase(role)} {describe_exit(done.returncode)}")
    return Half.from_json(path.read_text())


def phrase(role: str) -> str:
    return "with the draft" if role == "draft" else "without a draft"


def run_half(role: str, recipe: Recipe, target: Target, draft: Path, prompts_file: Path) -> Half:
    """Answers all prompts with or without the draft, after a warm-up prompt; greedy."""
    settings, runtime = recipe.settings, recipe.runtime
    if generation.device_type(runtime.get("device", "auto")) == "cpu":
        # vLLM-CPU cannot hold caches of latent and plain attention side by side ("No common block size"), so a target with
        # latent attention, whose draft has plain attention, is computed in the plain form, which is equal. In both halves.
        os.environ["VLLM_MLA_DISABLE"] = "1"
    dtype = settings.get("dtype") or "auto"
    tokenizer = target.tokenizer()
    prompts = prompts_of(prompts_file, tokenizer, settings)
    end_tokens = target.end_tokens(tokenizer)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    # Speculation may run past the last token by one draft; without that room vLLM stops drafting near the end.
    needed = longest + settings["max_new_tokens"] + (settings["num_draft_tokens"] + 1 if role == "draft" else 0)
    limit = generation.length_limit(target, runtime)
    if longest + settings["max_new_tokens"] > limit:
        line = max(prompts, key=lambda prompt: len(prompt.token_ids)).line
        raise AerieError(
            f"{prompts_file}:{line}: a prompt of {longest} tokens and {settings['max_new_tokens']} new ones exceed the target's {limit}. "
            "Lower max_new_tokens or take shorter prompts."
        )
    speculation = None
    if role == "draft":
        speculation = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": settings["num_draft_tokens"]}
    engine = generation.start(
        target,
        runtime,
        end_tokens=end_tokens,
        max_length=min(needed, limit),
        dtype=dtype,
        speculation=speculation,
        max_num_seqs=settings["batch_size"],
        enable_prefix_caching=False,  # else the second request for a common beginning would look faster
    )
    ids = [prompt.token_ids for prompt in prompts]
    engine.generate(ids[:1], settings["max_new_tokens"])
    before = engine.counters() if speculation else None
    started = time.monotonic()
    answers = engine.generate(ids, settings["max_new_tokens"])
    seconds = time.monotonic() - started
    counters = engine.counters().since(before) if before else None
    engine.close()
    device = generation.device_name(int(runtime.get("tensor_parallel") or 1))
    return Half(
        role=role,
        token_ids=[answer.token_ids for answer in answers],
        texts=[answer.text for answer in answers],
        finish_reasons=[answer.finish_reason for answer in answers],
        seconds=seconds,
        counters=counters,
        device=device,
        dtype=dtype,
    )


def prompts_of(path: Path, tokenizer: Any, settings: dict[str, Any]) -> list[EvaluationPrompt]:
    """The evaluation's prompts as token ids."""
    turns = evaluation.first_turns(read_conversations([path]), settings["max_prompts"])
    renderer = Renderer(tokenizer, [], settings.get("template_options"))
    return [EvaluationPrompt(line, messages[-1]["content"], renderer.prompt(messages)) for line, messages in turns]


if __name__ == "__main__":
    cli.run(main, build_parser())
