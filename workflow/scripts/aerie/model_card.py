"""The README.md of an exported draft: what it is for, what it was trained on, its figures, and the licences that bind it."""

import json
import re
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .targets import Target


def model_card(
    target: "Target",
    recipe: Mapping[str, Any],
    key: str,
    inputs: Mapping[str, str],
    coverage: Mapping[str, Any],
    figures: Mapping[str, Any],
) -> str:
    """recipe: the settings trained with. inputs: digests that `key` was made of. coverage, figures: those in the manifests of
    the vocabulary map and of the training."""
    base = base_model(target)
    licence = target_licence(target)
    validation = figures["validation"]
    lines = [
        "---",
        *([f"base_model: {json.dumps(base)}"] if base else []),
        f"license: {json.dumps(licence or 'other')}",
        "library_name: speculators",
        "tags: [eagle3, speculative-decoding, draft-model]",
        "---",
        f"# EAGLE-3 draft for {base or target.name}",
        "",
        "A draft model for speculative decoding: it proposes tokens, the target decides. Serve both with vLLM:",
        "",
        "```",
        f"vllm serve {_served(target)} --speculative-config "
        f'\'{{"method": "eagle3", "model": "THIS_FOLDER", "num_speculative_tokens": {len(validation["accuracy"])}}}\'',
        "```",
        "",
        "## Figures",
        "On the validation split, simulated (the draft's tokens against the target's greedy ones):",
        "",
        f"- acceptance length {validation['acceptance_length']:.3f}, accepted at each position "
        + ", ".join(f"{value:.3f}" for value in validation["accepted_per_position"]),
        f"- trained {figures['epochs']} epochs, {figures['steps']:,} steps, {figures['tokens']:,} tokens; the weights are those of step "
        f"{figures['best_step']:,}, the best validation",
        f"- {coverage['draft_vocab_size']:,} of {coverage['target_vocab_size']:,} tokens in its vocabulary, which cover "
        f"{coverage['coverage']:.2%} of the train split's supervised tokens",
        "",
        "## Data",
        "The train split, by source:",
        "",
        "| source | supervised tokens | in the vocabulary |",
        "| --- | --- | --- |",
        *(f"| {source} | {own['supervised_tokens']:,} | {own['coverage']:.2%} |" for source, own in coverage["by_source"].items()),
        "",
        "## Keys",
        f"- train_draft {key}",
        *(f"- {name} {digest}" for name, digest in inputs.items()),
        "",
        "```json",
        json.dumps(recipe, indent=1, sort_keys=True),
        "```",
        "",
        "## Licences",
        f"- target: {licence or 'its folder names none; put its licence here and above'}",
        "- data: put the licence of each source here",
        "- embeddings and output head are copies of the target's weights, so the target's licence binds this folder as well",
    ]
    return "\n".join(lines) + "\n"


def base_model(target: "Target") -> str | None:
    """The target's id on the hub: its own, or that of the hub's cache if its folder lies there. None for another folder, since
    the hub takes nothing but ids of its own for a card's base_model."""
    if "hub_id" in target.location:
        return target.location["hub_id"]
    found = re.search(r"/models--([^/]+)--([^/]+)/snapshots/[^/]+$", str(target.folder.absolute()))
    return f"{found[1]}/{found[2]}" if found else None


def _served(target: "Target") -> str:
    """The target as `vllm serve` takes it: a folder as the configuration names it, or the hub's id at the revision trained for."""
    location = target.location
    served = shlex.quote(location["path"]) if "path" in location else f"{location['hub_id']} --revision {location['revision']}"
    return f"{served} --trust-remote-code" if target.trust_remote_code else served


def target_licence(target: "Target") -> str | None:
    """What the target's own README.md says under `license:`, if it is there."""
    path = target.folder / "README.md"
    if not path.is_file():
        return None
    found = re.match(r"---\n.*?^license:\s*(\S+)\s*$.*?^---$", path.read_text(errors="replace"), re.DOTALL | re.MULTILINE)
    return found[1] if found else None
