"""Evaluations in the workflow: a draft made elsewhere, a least acceptance, and Snakemake's own report."""

import contextlib
import json
import re
import shutil
import zipfile


def test_a_draft_made_elsewhere_is_evaluated_and_nothing_is_trained(llama):
    """The same weights under another roof, without a manifest: the same figures, from the draft's engine alone."""
    shutil.copytree(llama.folder / "results/drafts/a", llama.folder / "theirs")
    (llama.folder / "theirs/manifest.json").unlink()
    llama.config["drafts"]["theirs"] = {"path": "theirs"}
    llama.write()
    (llama.folder / "config/runs.tsv").write_text("run\ttarget\tdataset\tdraft\nb\ttiny\ttalk\ttheirs\n")
    planner = llama.planner()
    with contextlib.chdir(llama.folder):
        verdicts = {step[0]: planner.forecast(step).verdict for step in planner.plan.steps(planner.plan.runs["b"])}
    assert verdicts == {"fingerprint_target": "nothing", "preflight_target": "nothing", "evaluate_draft": "run"}
    result = llama.run()
    assert result.code == 0, result.text
    assert dict(result.rules) == {"evaluate_draft": 1, "build_report": 1, "write_recipe": 3, "all": 1}
    assert "found the answers without a draft" in result.text
    a, b = (json.loads((llama.folder / f"results/evaluations/{run}/acceptance.json").read_text()) for run in "ab")
    for figure in ("acceptance_length", "accepted_per_position", "confidence", "drafts", "identical_outputs", "samples"):
        assert a[figure] == b[figure]
    assert "lacks" not in (llama.folder / "results/report.html").read_text()
    assert "nothing to do" in llama.run("plan").text
    # Other weights, another evaluation.
    path = llama.folder / "theirs/model.safetensors"
    path.write_bytes((raw := path.read_bytes())[:-1] + bytes([raw[-1] ^ 1]))
    assert llama.plan()["evaluate_draft"] == 1


def test_a_least_acceptance_fails_the_run_after_the_report(llama):
    llama.config["evaluation"]["min_acceptance_length"] = 3.9
    llama.write()
    (llama.folder / "results/report.html").unlink()
    result = llama.run()
    assert result.code != 0
    assert dict(result.rules) == {"write_recipe": 1, "build_report": 1, "check_acceptance": 1}
    assert "run a: its draft has an acceptance length of" in result.text and "min_acceptance_length asks for 3.9" in result.text
    assert (llama.folder / "results/report.html").exists() and (llama.folder / "results/evaluations/a/acceptance.json").exists()
    llama.config["evaluation"]["min_acceptance_length"] = 1
    llama.write()
    result = llama.run()
    assert result.code == 0 and result.rules["check_acceptance"] == 1 and not result.rules["evaluate_draft"], result.text


def test_snakemakes_own_report_has_captions_and_categories(llama):
    result = llama.run("--report", "report.zip")
    assert result.code == 0, result.text
    with zipfile.ZipFile(llama.folder / "report.zip") as archive:
        names = archive.namelist()
        text = "".join(archive.read(name).decode() for name in names if name.endswith((".js", ".html")))
    for category in ("All runs", "Evaluations", "Datasets", "Targets"):
        assert category in text, category
    assert "the target accepts in run a" in text and "Some samples of dataset talk" in text
    assert {"report.html", "summary.txt", "acceptance.json", "audit.html", "tiny.txt"} <= {name.rpartition("/")[2] for name in names}


def test_of_several_runs_the_finished_ones_are_reported(llama):
    """One run's draft is of another kind: the other run's figures are there all the same, apart from the whole report."""
    other = shutil.copytree(llama.folder / "results/drafts/a", llama.folder / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"speculators_model_type": "mlp"}))
    whole = (llama.folder / "results/report.html").read_bytes()
    runs = (llama.folder / "config/runs.tsv").read_text()
    (llama.folder / "config/runs.tsv").write_text(runs + "b\ttiny\ttalk\tother\n")
    llama.config["drafts"]["other"] = {"path": "other"}
    llama.write()
    result = llama.run("-k")
    assert result.code != 0 and "its kind is mlp" in result.text
    unfinished = llama.folder / "results/report-unfinished.html"
    assert "1 of 2 runs are finished, see results/report-unfinished.html" in result.text
    assert re.search(r"^a +\d\.\d{3} .* tiny$", result.text, re.MULTILINE) and "<svg" in unfinished.read_text()
    assert (llama.folder / "results/report.html").read_bytes() == whole
    (llama.folder / "config/runs.tsv").write_text(runs)
    assert llama.run().code == 0 and not unfinished.exists()
