"""A draft that does not suit its target ends the run before anything is loaded, with the lines that say so."""

import json

from tiny_targets import make_tiny_llama
from tiny_workflow import TinyWorkflow


def test_a_vocabulary_too_small_and_a_layer_too_deep_are_named_with_their_lines(tmp_path):
    workflow = TinyWorkflow(tmp_path)
    target = make_tiny_llama(tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"architectures": ["NobodyForCausalLM"]}))  # no time for the twin
    drafts = workflow.config["drafts"]
    drafts["eagle3"]["vocab_size"] = 100
    drafts |= {"other": {"vocab_size": 100}, "whole": {"vocab_size": None}, "next": {"vocab_size": 16, "init_from": "results/drafts/a"}}
    drafts["deep"] = {"vocab_size": None, "aux_layer_ids": [2, 4, 99]}
    workflow.write()
    rows = "".join(f"{name}\ttiny\ttalk\t{name}\n" for name in drafts)
    (tmp_path / "config/runs.tsv").write_text("run\ttarget\tdataset\tdraft\na\ttiny\ttalk\teagle3\n" + rows)
    lines = (tmp_path / "config/config.yaml").read_text().splitlines()
    first, second = (number for number, line in enumerate(lines, 1) if line == "    vocab_size: 100")
    result = workflow.run("preflight")
    assert result.code != 0 and not (tmp_path / "results/preflight/tiny.json").exists()
    found = " ".join(result.text.split())
    assert (
        f"config/config.yaml:{first}: drafts.eagle3.vocab_size and config/config.yaml:{second}: drafts.other.vocab_size is 100. "
        "Expected 259 to 280"
    ) in found, result.text
    deep = lines.index("    aux_layer_ids:") + 1
    assert f"config/config.yaml:{deep}: drafts.deep.aux_layer_ids: the draft's aux_layer_ids are [2, 4, 99]; target tiny has" in found
    assert "is 16" not in found  # the vocabulary of the draft that it starts from counts
