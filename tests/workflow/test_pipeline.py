"""All stages on tiny targets with the real engines: stored states against transformers, results complete."""

import json
import re

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from aerie.hidden_states import StatesIndex
from aerie.samples import load_samples
from tiny_targets import make_tiny_deepseek_v3
from tiny_workflow import TinyWorkflow

STAGES = [
    "build_report",
    "evaluate_draft",
    "extract_hidden_states",
    "find_missing_states",
    "fingerprint_target",
    "index_hidden_states",
    "map_vocabulary",
    "preflight_target",
    "prepare_dataset",
    "regenerate_responses",
    "train_draft",
]


@pytest.fixture(scope="module")
def finished_deepseek(tmp_path_factory):
    made = TinyWorkflow(tmp_path_factory.mktemp("deepseek"))
    make_tiny_deepseek_v3(made.folder / "target")
    result = made.run()
    assert result.code == 0, result.text
    return made, result


@pytest.fixture(params=["llama", "deepseek"])
def finished(request):
    return request.getfixturevalue(f"finished_{request.param}")


def test_every_stage_ran_once(finished):
    _, result = finished
    assert {rule: count for rule, count in result.rules.items() if rule not in ("all", "write_recipe")} == dict.fromkeys(STAGES, 1)
    assert result.rules["write_recipe"] == 9
    assert not result.restored


def test_stored_states_are_transformers_own(finished):
    """Each stored layer k is transformers' hidden_states[k], the last one gives the target's own logits."""
    made, _ = finished
    folder = made.folder
    index = StatesIndex(folder / "results/hidden_states/tiny/talk/default_float32", folder / "results/.store")
    assert list(index.layer_ids) == [2, 4, 5, 8]
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    rows = load_samples(folder / "results/datasets/tiny/talk")
    assert len(rows) >= 30
    for row in rows:
        stored = index.states(row["sample_key"])
        assert stored.dtype == torch.float32
        with torch.no_grad():
            found = model(torch.tensor([row["input_ids"]]), output_hidden_states=True)
        for position, layer in enumerate(index.layer_ids[:-1]):
            expected = found.hidden_states[layer][0]
            assert torch.linalg.norm(stored[:, position] - expected) / torch.linalg.norm(expected) <= 1e-5
        with torch.no_grad():
            logits = model.lm_head(model.model.norm(stored[:, -1]))
        assert torch.linalg.norm(logits - found.logits[0]) / torch.linalg.norm(found.logits[0]) <= 1e-5


def test_the_results_are_complete_and_consistent(finished):
    made, _ = finished
    results = made.folder / "results"
    regenerated = pq.read_table(results / "regenerated/tiny/talk/responses.parquet").num_rows
    dataset = made.manifest("datasets", "tiny", "talk")
    states = made.manifest("hidden_states", "tiny", "talk", "default_float32")
    keys = {row["sample_key"] for row in load_samples(results / "datasets/tiny/talk")}
    figures = made.manifest("regenerated", "tiny", "talk")["figures"]
    assert dataset["figures"]["rows"] == regenerated == figures["kept"] == 40 - sum(figures["dropped"].values())
    assert states["figures"]["samples"] == len(keys)
    d2t, t2d = np.load(results / "vocab_maps/a/d2t.npy"), np.load(results / "vocab_maps/a/t2d.npy")
    assert len(d2t) == t2d.sum() == 270 and (np.arange(270) + d2t == np.flatnonzero(t2d)).all()
    acceptance = json.loads((results / "evaluations/a/acceptance.json").read_text())
    assert {"acceptance_length", "accepted_per_position", "draft_tokens", "prompts", "tokens_per_second"} <= set(acceptance)
    assert acceptance["prompts"] == 6 and set(acceptance["tokens_per_second"]) == {"baseline", "draft"}
    assert acceptance["acceptance_length"] == pytest.approx(1 + sum(acceptance["accepted_per_position"]))
    # float32: speculation changes no token
    assert acceptance["identical_outputs"]["different"] == 0
    for stage in ("datasets/tiny/talk", "vocab_maps/a", "drafts/a", "evaluations/a", "regenerated/tiny/talk"):
        manifest = made.manifest(*stage.split("/"))
        assert {"stage", "key", "settings", "inputs", "files", "versions", "seconds"} <= set(manifest)
        assert all({"sha256", "bytes"} == set(entry) for entry in manifest["files"].values())
    assert "<svg" in (results / "report.html").read_text()
    assert re.search(r"^a +\d\.\d{3} .* tiny$", (results / "summary.txt").read_text(), re.MULTILINE)
