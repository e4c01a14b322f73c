"""The report's page from hand-made results: complete, partly missing, self-contained and the same every time."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from aerie import report

SCRIPTS = Path(__file__).parents[2] / "workflow" / "scripts"
RUNS = [["first", "tiny", "chat", "eagle3"], ["second", "tiny", "chat", "wide & <deep>"]]
PLOTS = ("loss", "acceptance", "lengths", "coverage")
VOID = {"meta", "br", "img", "link", "hr", "input"}


def write(path: Path, value) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def manifest(stage: str, digest: str, figures: dict, **more) -> dict:
    files = {"some.bin": {"sha256": "0" * 64, "bytes": 1234}}
    versions = {"python": "3.11.7", "torch": "2.13.0"}
    base = {"stage": stage, "version": 1, "key": digest * 64, "digest": digest * 64, "files": files, "versions": versions, "seconds": 12.5}
    return base | {"figures": figures} | more


@pytest.fixture
def results(tmp_path):
    """What a finished workflow of two runs on one dataset leaves behind."""
    dataset = tmp_path / "datasets" / "tiny" / "chat"
    lengths = {"edges": [10.0, 20.0, 30.0, 40.0], "counts": [5, 9, 2]}
    stats = {"samples": 1016, "tokens": 140_000, "supervised_tokens": 90_000, "lengths": lengths, "rejected": {"no answer": 3}}
    write(dataset / "stats.json", stats)
    write(dataset / "manifest.json", manifest("prepare_dataset", "a", {}))
    write(tmp_path / "regenerated/tiny/chat/manifest.json", manifest("regenerate_responses", "f", {"dropped": {"loop": 7}}))
    figures = {"bytes": 9_876_543, "tokens_per_second": 1400.4, "seconds": 99.0}
    write(tmp_path / "hidden_states/tiny/chat/2-4-5_bfloat16/manifest.json", manifest("extract_hidden_states", "b", figures))
    write(tmp_path / "hidden_states/tiny/chat/1-2-3_bfloat16/manifest.json", manifest("extract_hidden_states", "0", {"bytes": 1}))
    for number, (run, *_) in enumerate(RUNS):
        coverage = {"coverage": 0.9876 - 0.1 * number, "draft_vocab_size": 8192}
        write(tmp_path / "vocab_maps" / run / "coverage.json", coverage)
        write(tmp_path / "vocab_maps" / run / "manifest.json", manifest("map_vocabulary", "c", coverage))
        validation = {"accuracy": [0.333, 0.118, 0.044], "loss": 2.5}
        trained = manifest("train_draft", "d", {"validation": validation, "tokens_per_second": 800}, inputs={"hidden_states": "b" * 64})
        write(tmp_path / "drafts" / run / "manifest.json", trained)
        lines = [{"split": "train", "step": step, "epoch": 1, "loss": 5 - step / 10} for step in range(1, 20)]
        lines.append({"split": "validation", "step": 19, "epoch": 1, "loss": 3.2})
        (tmp_path / "drafts" / run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"split": "tr')
        write(tmp_path / "evaluations" / run / "acceptance.json", acceptance(speed_up=0.512 if number == 0 else 2.1))
        write(tmp_path / "evaluations" / run / "manifest.json", manifest("evaluate_draft", "e", {"tokens_per_second": {"draft": 170.0}}))
    return tmp_path


def acceptance(speed_up: float) -> dict:
    return {
        "acceptance_length": 1.447,
        "accepted_per_position": [0.3, 0.1, 0.047],
        "drafts": 100,
        "draft_tokens": 300,
        "accepted_tokens": 45,
        "batch_size": 16,
        "prompts": 80,
        "tokens_per_second": {"baseline": 332.0, "draft": 332.0 * speed_up},
        "speed_up": speed_up,
        "identical_outputs": {"same": 77, "different": 3},
        "device": {"baseline": "2 cores", "draft": "2 cores"},
        "dtype": "bfloat16",
        "notes": ["a note about <rounding>"],
    }


class Page(HTMLParser):
    """Tags in balance, with every address that the page asks for and the ids it gives."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.labels: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.addresses += [value for name, value in attributes if name in ("src", "href", "xlink:href", "srcset", "action")]
        self.ids += [found["id"]] if "id" in found else []
        if tag == "svg":
            self.labels.append(found["aria-label"])
            assert found["role"] == "img"
            assert "width" not in found
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_data(self, data):
        self.text += data


def collected(results: Path) -> list[report.RunResults]:
    return [report.collect(results, *run) for run in RUNS]


def test_the_page_is_whole_and_needs_no_network(results):
    text = report.page(collected(results))
    page = Page(text)
    assert page.open == []
    assert all(address.startswith("#") for address in page.addresses)
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert "<script" not in text
    assert len(page.ids) == len(set(page.ids))
    assert {address[1:] for address in page.addresses} <= set(page.ids)
    assert set(PLOTS) <= set(page.ids)
    assert len(page.labels) == 4
    assert all(len(label) > 40 for label in page.labels)


def test_plots_have_real_labels(results):
    labels = {
        "loss": ["optimizer step", "loss", "first, train", "second, validation"],
        "acceptance": ["draft position", "first, served", "first, validation"],
        "lengths": ["tokens in a sample", "samples", "tiny/chat"],
        "coverage": ["98.76 %", "first", "8,192 tokens"],
    }
    for plot in report.plots(collected(results)):
        texts = ["".join(one.itertext()).strip() for one in ElementTree.fromstring(plot.svg).iter("{http://www.w3.org/2000/svg}text")]
        assert set(labels[plot.name]) <= set(texts), (plot.name, texts)


def test_the_tables_say_what_was_found(results):
    page = Page(report.page(collected(results)))
    for text in ("1,016", "98.76 %", "0.333 0.118 0.044", "1.447", "0.300 0.100 0.047", "332", "170", "0.51", "77 of 80", "45 / 300"):
        assert text in page.text, text
    # The capture that the draft was trained on, not the other one; its own seconds.
    assert "9,876,543" in page.text
    assert "99.0" in page.text
    assert "bbbbbbbbbbbb" in page.text
    assert "000000000000" not in page.text
    assert "regeneration: loop" in page.text
    assert "torch 2.13.0" in page.text
    assert "a note about <rounding>" in page.text


def test_slower_is_said_plainly(results):
    text = report.summary_text(collected(results))
    slower = "first: serving with the draft was SLOWER than without, 170 against 332 tokens/s at 16 requests at once on 2 cores (x 0.51)"
    assert slower in text
    assert "second: serving with the draft was 2.10 times as fast" in text
    header, rule, first, second, *_ = text.splitlines()
    assert header.split()[0] == "run"
    assert set(rule) == {"-", " "}
    assert first.index("1.447") == second.index("1.447") == header.index("accept. length")


def test_shared_stages_are_listed_once(results):
    stages = [(row[0], row[1]) for row in report.stage_rows(collected(results))]
    assert len(stages) == len(set(stages)) == 9
    assert stages[:3] == [(stage, "tiny/chat") for stage in ("regenerate_responses", "prepare_dataset", "extract_hidden_states")]


def test_the_same_results_give_the_same_bytes(results):
    assert report.page(collected(results)) == report.page(collected(results))


def test_what_is_missing_is_named(results):
    (results / "evaluations" / "first" / "acceptance.json").unlink()
    (results / "evaluations" / "first" / "manifest.json").unlink()
    (results / "vocab_maps" / "second" / "coverage.json").write_text("broken")
    runs = collected(results)
    page = Page(report.page(runs))
    assert "first lacks evaluate_draft." in page.text
    row = next(line for line in report.summary_text(runs).splitlines() if line.startswith("first"))
    assert row.count(report.MISSING) == 5


def test_nothing_at_all_is_still_a_page(tmp_path):
    runs = [report.collect(tmp_path, *RUNS[0])]
    page = Page(report.page(runs))
    assert page.text.count("There is nothing to draw yet.") == 4
    assert "No stage has finished yet." in page.text
    assert report.MISSING in report.summary_text(runs)


def test_names_are_escaped(results):
    text = report.page([report.collect(results, "first", "tiny<script>", "chat", "x")])
    assert "<script" not in text
    assert "tiny&lt;script&gt;" in text


def test_the_command(results):
    recipe = {"stage": "build_report", "version": 1, "settings": {"runs": RUNS}, "runtime": {}}
    write(results / "recipe.json", recipe)
    command = [sys.executable, SCRIPTS / "build_report.py", "--recipe", results / "recipe.json", "--results", results]
    command += ["--output", results / "report.html", "--summary", results / "summary.txt", "--log", results / "log"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    summary = (results / "summary.txt").read_text()
    assert summary in (results / "log").read_text()
    assert (results / "report.html").read_text() == report.page(collected(results))
