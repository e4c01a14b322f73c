"""The report's page from hand-made results: complete, partly missing, self-contained and the same every time."""

import html
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from aerie import report, status
from aerie.plots import plots
from aerie.run_results import MISSING, RunResults, collect

SCRIPTS = Path(__file__).parents[2] / "workflow" / "scripts"
RUNS = [["first", "tiny", "chat", "eagle3"], ["second", "tiny", "chat", "wide & <deep>"]]
PLOTS = ("loss", "accuracy", "acceptance", "draft-tokens", "categories", "contexts", "speed", "lengths", "coverage")
VOID = {"meta", "br", "img", "link", "hr", "input"}


def write(path: Path, value) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def manifest(stage: str, digest: str, figures: dict, **more) -> dict:
    files = {"some.bin": {"sha256": "0" * 64, "bytes": 1234}}
    versions = {"python": "3.11.7", "torch": "2.13.0"}
    base = {"stage": stage, "version": 1, "key": digest * 64, "digest": digest * 64, "files": files, "versions": versions, "seconds": 12.5}
    made = {"started": "2026-11-30T00:00:00Z", "host": "a host", "git": {"commit": "0123456789abcdef", "dirty": True}}
    return base | made | {"figures": figures} | more


@pytest.fixture
def results(tmp_path):
    """What a finished workflow of two runs on one dataset leaves behind."""
    dataset = tmp_path / "datasets" / "tiny" / "chat"
    lengths = {"edges": [10.0, 20.0, 30.0, 40.0], "counts": [5, 9, 2], "longest": 40}
    stats = {"samples": 1016, "tokens": 140_000, "supervised_tokens": 90_000, "lengths": lengths, "rejected": {"no answer": 3}}
    stats["splits"] = {"train": {"samples": 993}, "validation": {"samples": 23, "tokens": 3000, "supervised_tokens": 1900}}
    write(dataset / "stats.json", stats)
    write(dataset / "manifest.json", manifest("prepare_dataset", "a", {}))
    write(tmp_path / "regenerated/tiny/chat/manifest.json", manifest("regenerate_responses", "f", {"dropped": {"repeats itself": 7}}))
    figures = {"bytes": 9_876_543, "tokens_per_second": 1400.4, "seconds": 1800.0}
    captured = manifest("extract_hidden_states", "b", figures, runtime={"gpus": 2})
    for name in ("started", "host", "git"):  # an index, which may be made anew, does not say who extracted
        del captured[name]
    write(tmp_path / "hidden_states/tiny/chat/2-4-5_bfloat16/manifest.json", captured)
    write(tmp_path / "hidden_states/tiny/chat/1-2-3_bfloat16/manifest.json", manifest("extract_hidden_states", "0", {"bytes": 1}))
    for number, (run, *_) in enumerate(RUNS):
        coverage = {"coverage": 0.9876 - 0.1 * number, "draft_vocab_size": 8192}
        write(tmp_path / "vocab_maps" / run / "coverage.json", coverage)
        write(tmp_path / "vocab_maps" / run / "manifest.json", manifest("map_vocabulary", "c", coverage))
        validation = {
            "accuracy": [0.333, 0.118, 0.044],
            "accepted_per_position": [0.331, 0.117, 0.043],
            "acceptance_length": 1.491,
            "loss": 2.5,
        }
        trained = manifest("train_draft", "d", {"validation": validation, "tokens_per_second": 800}, inputs={"hidden_states": "b" * 64})
        write(tmp_path / "drafts" / run / "manifest.json", trained)
        lines = [{"split": "train", "step": step, "epoch": 1, "loss": 5 - step / 10} for step in range(1, 20)]
        lines.append({"split": "validation", "step": 10, "epoch": 1, "loss": 3.9, "accuracy": [0.2, 0.05, 0.01]})
        lines.append({"split": "validation", "step": 19, "epoch": 2, "loss": 3.2, "accuracy": [0.333, 0.118, 0.044]})
        (tmp_path / "drafts" / run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"split": "tr')
        write(tmp_path / "evaluations" / run / "acceptance.json", acceptance(speed_up=0.512 if number == 0 else 2.1))
        write(tmp_path / "evaluations" / run / "manifest.json", manifest("evaluate_draft", "e", {"tokens_per_second": {"draft": 170.0}}))
    return tmp_path


def acceptance(speed_up: float) -> dict:
    confidence = {"acceptance_length": [1.401, 1.492], "accepted_per_position": [[0.27, 0.33], [0.08, 0.12], [0.03, 0.06]]}
    counted = {"acceptance_length": 1.447, "accepted_per_position": [0.3, 0.1, 0.047], "confidence": confidence}
    latency = {"median": 12.34, "p90": 56.78}
    return counted | {
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
        "by_draft_tokens": [{"num_draft_tokens": k, "acceptance_length": 1 + 0.2 * k} for k in (1, 2, 3)],
        "by_category": [{"prompt_set": "mt", "category": name, "prompts": 10} | counted for name in ("maths & logic", "writing")],
        "by_context": [{"from": low, "below": 2 * low, "steps": 9} | counted for low in (64, 128)],
        "acceptance": [
            {"engine": engine, "prompt_set": "mt", "temperature": heat, "prompts": 80}
            | counted
            | ({} if heat else {"identical_outputs": {"same": 77, "different": 3}})
            for engine in ("ngram", "draft")
            for heat in (0, 0.7)
        ],
        "speed": [
            {
                "engine": engine,
                "batch_size": size,
                "tokens_per_second": 332.0 * (speed_up if engine == "draft" else 1),
                "speed_up": speed_up if engine == "draft" else 1.0,
                "time_to_first_token_ms": latency,
                "time_per_output_token_ms": latency,
            }
            for size in (1, 16)
            for engine in ("baseline", "ngram", "draft")
        ],
        "differences": [
            {"prompt_set": "mt", "line": 7, "first_difference": 31, "baseline_token_there": " a", "draft_token_there": "</b>\n"},
        ],
        "samples": [
            {"line": 1, "category": "writing", "prompt": "Why <b>?", "pieces": [["Because ", False], ["of <i>", True], [" it", False]]}
        ],
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


def collected(results: Path) -> list[RunResults]:
    return [collect(results, *run) for run in RUNS]


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
    assert len(page.labels) == 9
    assert all(len(label) > 40 for label in page.labels)


def test_plots_have_real_labels(results):
    labels = {
        "loss": ["optimizer step", "loss", "first, train", "second, validation"],
        "accuracy": ["validation accuracy", "first", "second"],
        "acceptance": ["draft position", "first, served", "first, simulated"],
        "draft-tokens": ["draft tokens a step", "acceptance length", "first", "3"],
        "categories": ["maths & logic", "writing", "first"],
        "contexts": ["64–127", "128–255"],
        "speed": ["requests at once", "tokens/s", "16", "tiny, without a draft", "tiny, n-gram", "second, with the draft"],
        "lengths": ["tokens in a sample", "samples", "tiny/chat"],
        "coverage": ["98.76 %", "first", "8,192 tokens"],
    }
    drawn = plots(collected(results))
    assert [plot.name for plot in drawn] == list(PLOTS)
    for plot in drawn:
        texts = ["".join(one.itertext()).strip() for one in ElementTree.fromstring(plot.svg).iter("{http://www.w3.org/2000/svg}text")]
        assert set(labels[plot.name]) <= set(texts), (plot.name, texts)


def test_one_batch_size_is_drawn_as_bars(results):
    path = results / "evaluations/first/acceptance.json"
    found = json.loads(path.read_text())
    write(path, found | {"speed": [row for row in found["speed"] if row["batch_size"] == 16 and row["engine"] != "ngram"]})
    [speed] = [plot for plot in plots(collected(results)[:1]) if plot.name == "speed"]
    assert "332</text>" in speed.svg.replace(" 332", "332") and "16 requests at once" in speed.svg


def test_the_tables_say_what_was_found(results):
    page = Page(report.page(collected(results)))
    for text in ("1,016", "98.76 %", "1.447", "1.401–1.492", "1.491", "0.300 0.100 0.047", "332", "170", "0.51", "77 of 80"):
        assert text in page.text, text
    # Supervised share; times; what differs; what was sampled, as text.
    for text in ("64.29 %", "12.3", "56.8", '"</b>\\n"', "Why <b>?", "of <i>"):
        assert text in page.text, text
    assert [table.rows for table in report.tables(collected(results)) if table.name == "datasets"] == [
        [("tiny/chat", "1,016", "23", "140,000", "64.29 %", "40")]
    ]
    # The capture that the draft was trained on, not the other one; its own seconds, on two GPUs.
    assert "9,876,543" in page.text
    assert "1,800.0" in page.text and "1.00" in page.text
    assert "bbbbbbbbbbbb" in page.text
    assert "000000000000" not in page.text
    assert "regeneration: repeats itself" in page.text
    assert "torch 2.13.0" in page.text and "0123456789ab, with changes" in page.text and "2026-11-30T00:00:00Z on a host" in page.text
    assert "each shard's header has its host" in page.text and "no git checkout" not in page.text
    assert "a note about <rounding>" in page.text


def test_accepted_tokens_are_marked(results):
    assert "Because <mark>of &lt;i&gt;</mark> it" in report.page(collected(results))


def test_slower_is_said_plainly(results):
    first_run, second_run = collected(results)
    second_run.acceptance["acceptance"][2]["acceptance_length"] = second_run.acceptance["acceptance_length"] = 2.11
    text = report.summary_text([first_run, second_run])
    slower = "first: serving with the draft was SLOWER than without, 170 against 332 tokens/s at 16 requests at once on 2 cores (x 0.51)"
    assert slower in text
    assert "By requests at once: 1: x 0.51, 16: x 0.51." in text
    assert "second: serving with the draft was 2.10 times as fast" in text
    header, rule, first, second, legend, *_ = text.splitlines()
    assert all(name in header and name in legend for name in ("coverage", "simulated", "accept. length", "95 %", "by position"))
    assert re.split("  +", header)[:4] == ["run", "accept. length", "95 %", "speed-up"]  # what a phone shows without scrolling
    assert set(rule) == {"-", " "}
    assert first.index("1.447") == second.index("2.110") == header.index("accept. length")


def test_too_few_prompts_for_an_interval_are_told(results):
    first, second = collected(results)
    for found in (second.acceptance, *second.acceptance["acceptance"], *second.acceptance["by_category"]):
        found["confidence"] = None
    assert [row[2] for row in report.summary_rows([first, second])] == ["1.401–1.492", "< 10 prompts"]
    [detail] = [table for table in report.tables([first, second]) if table.name == "acceptance-table"]
    assert {(row[0], row[6]) for row in detail.rows} == {("first", "1.401–1.492"), ("second", "< 10 prompts")}
    assert "fewer are too few for one" in report.summary_text([first, second])
    assert "&lt; 10 prompts" in report.page([first, second])


def test_a_speed_up_above_the_acceptance_length_is_doubted(results):
    """1.447 tokens a step cannot make it 2.1 times as fast; 0.512 they can."""
    first, second = collected(results)
    [doubt] = report.doubts([first, second])
    assert "second (with the draft, 1 at once): x 2.10; second (with the draft, 16 at once): x 2.10." in doubt
    assert "first" not in doubt and "`baselines`" in doubt
    assert [row[3] for row in report.summary_rows([first, second])] == ["0.51", "2.10 (!)"]
    # Nor is it told as what was measured, in the summary, the page or the status.
    [_, said] = report.verdicts([first, second])
    assert said == (
        "second: how fast serving with the draft is, was not measured: 697 against 332 tokens/s at 16 requests at once on 2 cores "
        "(x 2.10 (!)) cannot be. By requests at once: 1: x 2.10 (!), 16: x 2.10 (!)."
    )
    assert "times as fast" not in report.page([first, second])
    for speed_up, shown in ((1.447, "x 1.45"), (2.1, "x 2.10 (!)")):
        told = status._KEY_FIGURES["evaluate_draft"]({"acceptance_length": 1.447, "speed_up": speed_up})
        assert told == f"acceptance length 1.45, {shown}"
    assert doubt in report.summary_text([first, second]) and doubt in Page(report.page([first, second])).text
    second.acceptance["acceptance"][2]["acceptance_length"] = second.acceptance["acceptance_length"] = 2.11
    assert report.doubts([first, second]) == [] and "(!)" not in report.page([first, second])


def test_shared_stages_are_listed_once(results):
    stages = [(stage, name) for stage, name, _ in report.computed(collected(results))]
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
    assert row.count(MISSING) == 6


def test_a_draft_made_elsewhere_lacks_nothing(results):
    """What was once trained under the run's name is not the draft that was evaluated."""
    path = results / "evaluations/first/manifest.json"
    write(path, json.loads(path.read_text()) | {"runtime": {"draft": "/somewhere"}})
    [first, second] = collected(results)
    assert (first.missing == () and list(first.manifests) == ["regenerate_responses", "evaluate_draft"]) or list(first.manifests) == [
        "evaluate_draft"
    ]
    assert not first.metrics and not first.coverage and not first.stats and second.metrics and second.coverage
    assert "1.447" in report.summary_text([first])


def test_nothing_at_all_is_still_a_page(tmp_path):
    runs = [collect(tmp_path, *RUNS[0])]
    page = Page(report.page(runs))
    assert "There is nothing to draw yet." in page.text
    assert "No stage has finished yet." in page.text
    assert MISSING in report.summary_text(runs)


def test_names_are_escaped(results):
    text = report.page([collect(results, "first", "tiny<script>", "chat", "x")])
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


PROBE = """
<script>
const problems = [];
addEventListener("error", event => problems.push(String(event.message || event.target.outerHTML)), true);
addEventListener("securitypolicyviolation", event => problems.push(event.blockedURI));
addEventListener("load", () => {
  const inside = document.documentElement.clientWidth;
  const plots = [...document.querySelectorAll("figure svg")].map(svg => {
    const box = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].map(text => text.getBoundingClientRect());
    return {
      wide: box.width, high: box.height, drawn: svg.querySelectorAll("path, use").length,
      smallest: Math.min(...texts.map(text => Math.min(text.width, text.height))),
      cut: texts.filter(text => text.left < box.left - 1 || text.right > box.right + 1).length,
    };
  });
  const tables = [...document.querySelectorAll(".wide")].map(wide => ({right: wide.getBoundingClientRect().right,
    size: parseFloat(getComputedStyle(wide.querySelector("td")).fontSize)}));
  const requests = performance.getEntriesByType("resource").map(entry => entry.name);
  parent.postMessage({inside, scroll: document.documentElement.scrollWidth, plots, tables, requests, problems}, "*");
});
</script>
"""


def browser() -> str | None:
    return next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)


def opened(page: str, width: int, folder: Path) -> dict:
    """What headless Chromium makes of the page in a window of this width."""
    # In a frame, since a browser's window cannot be as narrow as a phone; the probe needs scripts, which the page forbids.
    inner = page.replace("style-src 'unsafe-inline'", "style-src 'unsafe-inline'; script-src 'unsafe-inline'").replace(
        "<head>", "<head>" + PROBE
    )
    outer = f"""<!DOCTYPE html><body style="margin:0"><pre id="found"></pre><script>
      addEventListener("message", event => document.getElementById("found").textContent = JSON.stringify(event.data));
    </script><iframe style="border:0" width="{width}" height="30000" srcdoc="{html.escape(inner)}"></iframe>"""
    (folder / "outer.html").write_text(outer)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
    options += ["--disable-component-update", f"--user-data-dir={folder / 'profile'}", f"--window-size={width + 50},6000"]
    command = [str(browser()), *options, "--virtual-time-budget=5000", "--dump-dom", (folder / "outer.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found and found[1], done.stderr[-2000:]
    return json.loads(html.unescape(found[1]))


@pytest.mark.skipif(not browser(), reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_the_page(results, tmp_path, width):
    """No error, no request, every plot drawn and nothing of it cut off, tables inside the page, text large enough to read."""
    found = opened(report.page(collected(results)), width, tmp_path)
    assert found["problems"] == [] and found["requests"] == []
    assert found["inside"] == width and found["scroll"] <= width
    assert len(found["plots"]) == len(PLOTS)
    for plot in found["plots"]:
        assert plot["wide"] > 300 and plot["high"] > 100 and plot["drawn"] > 5 and plot["cut"] == 0
        assert plot["smallest"] > 4  # a narrow letter's width; lines of text are 9 pixels and more high
    assert len(found["tables"]) >= 6
    assert all(table["right"] <= width and table["size"] >= 12 for table in found["tables"])
