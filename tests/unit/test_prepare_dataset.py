"""Dataset preparation: the ledger adds up, order and workers do not matter, the split is stable and never empty."""

import functools
import hashlib
import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from test_conversations import ODD_ROWS
from transformers import AutoTokenizer

import prepare_dataset
from aerie import audit, preparation
from aerie.conversations import conversation_of
from aerie.errors import AerieError, ProcessFailed, Terminated
from aerie.keys import digest_of
from aerie.preparation import Options, choose, prepare
from aerie.regeneration import Response, write_responses
from aerie.samples import load_samples, write_samples
from aerie.sources import RawRow, Source, numbered_rows
from tiny_targets import make_tiny_llama


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("target"))


@pytest.fixture
def made(target, tmp_path):
    """made(rows, …): the rows of one or several sources (bytes are a line as it is), prepared and chosen."""

    def run(rows, sources=None, workers=1, share=0.1, max_samples=None, **options):
        given = rows if sources else [rows]
        sources = sources or [Source(path="f.jsonl")]
        numbered = [
            (number, RawRow(source.name, line, row.decode() if isinstance(row, bytes) else json.dumps(row)))
            for number, (source, part) in enumerate(zip(sources, given, strict=True))
            for line, row in enumerate(part, 1)
        ]
        load = functools.partial(AutoTokenizer.from_pretrained, target)
        settings = Options(load, [3], **{"max_length": 512, "vocab_size": 320, **options})
        prepared = prepare([source.name for source in sources], numbered, settings, tmp_path / "work" / str(random.random()), workers)
        choose(prepared, sources, share, max_samples)
        return prepared

    return run


def talk(question, answer):
    return {"prompt": question, "response": answer}


def many(count):
    return [talk(f"question {number}", f"answer {number * number}") for number in range(count)]


def chosen(prepared):
    """The chosen samples as plain values, in their order."""
    return [(list(one.input_ids), list(one.loss_mask), one.split) for one in prepared.samples()]


def splits(prepared):
    return {prepared.entries[number].order: split for number, split in prepared.chosen.items()}


def test_rows_are_kept_or_rejected(made):
    mute = [{"role": role, "content": "" if role == "assistant" else "x"} for role in ("system", "user", "assistant", "user")]
    unasked = [{"role": "user", "content": " "}, {"role": "assistant", "content": "x"}]
    others = [{"messages": unasked}, {"messages": None}, {"input_ids": [4, 5], "loss_mask": [0, 0]}]
    others.append({"question": "when?", "answer": ["June 14", "14 June 1947"]})
    found = made([*many(30), talk("question 3", "answer 9"), talk("only", ""), {"messages": []}, {"messages": mute}, *others])
    assert [(one["line"], one["reason"], one["detail"]) for one in found.rejects()] == [
        (31, "duplicate", "same as f.jsonl:4"),
        (32, "no assistant turn with text", "found 1 user"),
        (33, "no messages", "the list is empty"),
        (34, "no assistant turn with text", "found 1 system, 2 user, 1 assistant without text"),
        (35, "no user message with text", "found 1 user without text, 1 assistant"),
        (36, "no messages", "messages is null"),
        (37, "no supervised token", "of the 2 tokens, none has 1 in the mask"),
        (38, "no assistant turn with text", "found 1 user; alternative answers left out"),
    ]
    stats = prepare_dataset.describe(found)
    assert stats["rows"] == 38 == stats["kept"] + sum(stats["rejected"].values()) and stats["kept"] == 30


def test_odd_rows_one_by_one(made):
    """Every odd row alone, and all of them in any order, among good ones: the same samples and the same fate."""
    odd = [row for row, _ in ODD_ROWS]
    found = made([*many(40), *odd], max_length=2_000_000)
    reasons = {one["line"]: f"{one['reason']}: {one['detail']}" for one in found.rejects()}
    for line, (_, reason) in enumerate(ODD_ROWS, 41):
        if reason:
            assert reasons[line].startswith(reason)
        else:  # tool calls, which the tiny target's template does not show, and rows that are the same but for their tools
            assert reasons.get(line, "chat template").partition(":")[0] in ("chat template", "duplicate")
    rows = list(enumerate([*many(40), *odd]))
    random.Random(1).shuffle(rows)
    again = made([row for _, row in rows], max_length=2_000_000)
    assert chosen(again) == chosen(found)
    before = Counter(one["reason"] for one in found.rejects())
    assert Counter(one["reason"] for one in again.rejects()) == before


def test_a_worker_that_dies_while_it_sends_is_noticed(monkeypatch):
    """The pool's own thread then waits for the rest of what it sent: its future never ends."""
    monkeypatch.setattr(preparation, "_SECONDS_BETWEEN_LOOKS", 0.1)
    worker = multiprocessing.get_context("fork").Process(target=os._exit, args=(9,))
    worker.start()
    with pytest.raises(ProcessFailed, match=f"worker process {worker.pid} ended with exit code 9"):
        preparation._result(Future(), [worker])


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_change_nothing(made, tmp_path, workers):
    rows = many(1200)
    alone, together = made(rows), made(rows, workers=workers)
    assert chosen(alone) == chosen(together) and alone.fates == together.fates
    folders = []
    for name, prepared in (("alone", alone), ("together", together)):
        write_samples(prepared.samples(), tmp_path / name / "samples")
        folders.append({path.name: path.read_bytes() for path in (tmp_path / name / "samples").iterdir()})
    assert folders[0] == folders[1]


def test_the_split_is_stable_under_growth_and_regeneration(made):
    small, large = splits(made(many(50))), splits(made(many(200)))
    assert small.items() <= large.items()
    again = splits(made([talk(f"question {n}", f"another {n}") for n in range(50)]))
    assert Counter(again.values()) == Counter(small.values())
    # 20 of 200 expected; 4 standard deviations of the binomial are 17
    assert 3 <= Counter(large.values())["validation"] <= 37


def test_validation_is_never_empty(made, tmp_path):
    assert Counter(splits(made(many(2), share=1e-9)).values()) == {"train": 1, "validation": 1}
    with pytest.raises(AerieError, match="no train sample is left of 1 rows"):
        prepare_dataset.check(made(many(1)), 0.1, tmp_path)


def test_limits_contain_each_other(made):
    for fewer, more in [(2, 5), (5, 20), (20, 60)]:
        small, large = splits(made(many(60), max_samples=fewer)), splits(made(many(60), max_samples=more))
        assert len(small) == fewer and set(small.values()) == {"train", "validation"}
        # all but the one that may be exchanged for the other split's sake
        assert len(set(small) - set(large)) <= 1


def test_sources_are_mixed_by_weight_and_cap(made):
    rows = [[talk(f"{name} {number}", "a") for number in range(count)] for name, count in (("x", 100), ("y", 50), ("z", 30))]

    def counts(*sources):
        found = made(rows, [source._replace(path=name) for name, source in zip("xyz", sources, strict=True)])
        stats = prepare_dataset.describe(found)
        assert all(one["rows"] == one["kept"] + sum(one["rejected"].values()) for one in stats["sources"])
        return [one["samples"] for one in stats["sources"]]

    assert counts(Source(), Source(), Source()) == [100, 50, 30]
    assert counts(Source(max_samples=10), Source(), Source(max_samples=99)) == [10, 50, 30]
    # 3 : 1 from 100 and 50 rows: the first is used up; the third has no weight and is taken whole
    assert counts(Source(weight=3), Source(weight=1), Source()) == [100, 33, 30]
    assert counts(Source(weight=1), Source(weight=1), Source(weight=1, max_samples=7)) == [7, 7, 7]


def test_a_weight_without_a_usable_row_is_an_error_that_says_why(made):
    sources = [Source(path="x", weight=3), Source(path="y", weight=0.5), Source(path="z")]
    answered, mute = [talk(f"x {number}", "a") for number in range(9)], [talk(f"y {number}", "") for number in range(4)]
    cause = r"y: its weight is 0\.5, but none of its rows can be used \(2 × duplicate, 4 × no assistant turn with text\).*take the source"
    with pytest.raises(AerieError, match=cause):
        made([answered, [*mute, *answered[:2]], many(5)], sources)
    with pytest.raises(AerieError, match=r"y: its weight is 0\.5, but none of its rows can be used \(it has none\)"):
        made([answered, [], many(5)], sources)


def test_a_weight_that_gives_nothing_is_warned_of(made, capsys):
    rows = [[talk(f"{name} {number}", "a") for number in range(40)] for name in "xyz"]
    found = made(rows, [Source(path="x", weight=1000), Source(path="y", weight=12), Source(path="z", weight=13)])
    # 40 / 1000 = 0.04 a unit of weight: 0.48 and 0.52 samples
    assert [one["samples"] for one in prepare_dataset.describe(found)["sources"]] == [40, 0, 1]
    assert capsys.readouterr().err.count("WARNING") == 1
    made(rows, [Source(path="x", weight=1000), Source(path="y", weight=12), Source(path="z")])
    assert "WARNING: y: nothing is taken of it, since its weight of 12 makes less than one of the 40" in capsys.readouterr().err


def test_sources_without_a_row_are_an_error_that_names_them(made, tmp_path):
    with pytest.raises(AerieError, match="no row in x, y; expected conversations"):
        prepare_dataset.check(made([[], []], [Source(path="x"), Source(path="y")]), 0.1, tmp_path)


def test_rows_supervised_from_their_first_token_are_not_one_prompt(made):
    """Each decides for itself; all others still by what comes before the first supervised token, or the first message."""
    whole = [{"input_ids": [5, 6, 7 + number], "loss_mask": [1, 1, number % 2]} for number in range(40)]
    found = made([*whole, {"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]}, talk("q", "a")])
    prompts = [entry.prompt.hex() for entry in found.entries]
    assert len(set(prompts)) == 42 and prompts[40:] == [digest_of([5, 6]), digest_of("q")]
    assert set(splits(made(whole)).values()) == {"train", "validation"}


def test_a_row_that_is_not_chosen_names_the_limit(made):
    rows = [[talk(f"{name} {number}", "a") for number in range(10)] for name in "xyz"]
    sources = [Source(path="x", weight=2), Source(path="y", weight=1), Source(path="z", max_samples=4)]
    found = Counter((one["source"], one["reason"], one["detail"]) for one in made(rows, sources, max_samples=15).rejects())
    by_source = {
        ("y", "not chosen", "beyond its source's share by weight (1): 5 of 10"): 5,
        ("z", "not chosen", "beyond its source's max_samples of 4"): 6,
    }
    assert by_source.items() <= found.items()
    rest = [key for key in found if key not in by_source]
    assert {key[1:] for key in rest} == {("not chosen", "beyond max_samples of 15 for the whole dataset")}
    assert sum(found[key] for key in rest) == 10 + 5 + 4 - 15


def test_a_duplicate_names_the_row_that_is_taken(made):
    """Also among rows without samples, and where the other lies in another source."""
    rows = [[talk("x", ""), talk("a", "b"), talk("x", ""), talk("c", "d")], [talk("c", "d"), talk("y", ""), talk("a", "b"), talk("e", "f")]]
    found = [one for one in made(rows, [Source(path="p"), Source(path="q")]).rejects() if one["reason"] == "duplicate"]
    assert [(one["source"], one["line"], one["detail"]) for one in found] == [("q", 1, "same as p:4"), ("q", 3, "same as p:2")]


def test_truncation_and_rows_without_supervision(made):
    [sample] = made([talk("q", "a " * 100)], max_length=64).samples()
    assert len(sample.input_ids) == len(sample.loss_mask) == 64 and sum(sample.loss_mask) > 20
    found = made([talk("q " * 100, "a"), {"input_ids": [5, 6], "loss_mask": [0, 0]}], max_length=64)
    assert [one["reason"] for one in found.rejects()] == ["no supervised token within max_length", "no supervised token"]
    long = {"input_ids": [5] * 80, "loss_mask": [0] * 70 + [1] * 10}
    assert [one["detail"] for one in made([long], max_length=64).rejects()] == ["the first is token 71, max_length is 64"]
    assert not list(made([long], max_length=71).rejects())


def test_a_system_prompt_is_added_where_there_is_none(made, target):
    tokenizer = AutoTokenizer.from_pretrained(target)
    rows = [talk("a", "b"), {"messages": [{"role": r, "content": r} for r in ("system", "user", "assistant")]}]
    texts = [tokenizer.decode(one.input_ids) for one in made(rows, system_prompt="Be kind.").samples()]
    assert sorted("Be kind." in text for text in texts) == [False, True]


def test_token_ids_beyond_the_vocabulary_are_rejected(made):
    rows = [{"input_ids": [5, 319], "loss_mask": [0, 1]}, {"input_ids": [5, 320], "loss_mask": [0, 1]}]
    found = made(rows)
    assert len(found.chosen) == 1 and [one["line"] for one in found.rejects()] == [2]


def test_too_many_rejects_are_an_error(made, tmp_path):
    found = made([*many(17), *many(3), talk("x", ""), talk("y", ""), {"text": 1}])
    prepare_dataset.check(found, 3 / 23, tmp_path)  # duplicates do not count
    with pytest.raises(AerieError, match=r"3 of 23 rows cannot be used") as caught:
        prepare_dataset.check(found, 0.1, tmp_path)
    assert "  f.jsonl:23: unknown shape: keys text\n" in str(caught.value)
    assert "3 × duplicate, 2 × no assistant turn with text, 1 × unknown shape" in str(caught.value)


def test_a_line_that_is_no_json_counts_as_rejected(made, tmp_path):
    found = made([*many(9), b'{"prompt": '])
    prepare_dataset.check(found, 0.1, tmp_path)
    with pytest.raises(AerieError, match=r"(?s)1 of 10 rows cannot be used.*f\.jsonl:10: not valid JSON"):
        prepare_dataset.check(found, 0.09, tmp_path)


def test_samples_come_back_from_disk(made, tmp_path):
    found = made(many(10))
    write_samples(found.samples(), tmp_path / "samples")
    rows = load_samples(tmp_path)
    assert [(row["input_ids"], row["loss_mask"], row["split"]) for row in rows] == chosen(found)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("samples")] == ["samples"]


def test_stats_add_up(made):
    found = made([*many(20), talk("x", "")])
    stats = prepare_dataset.describe(found)
    assert sum(stats["lengths"]["counts"]) == stats["samples"] == stats["turns"] == 20
    assert stats["tokens"] == sum(len(sample.input_ids) for sample in found.samples())
    assert stats["supervised_tokens"] == sum(sum(map(int, sample.loss_mask)) for sample in found.samples())
    assert stats["rejected"] == {"no assistant turn with text": 1}
    for name, split in stats["splits"].items():
        own = [sample for sample in found.samples() if sample.split == name]
        assert split["samples"] == len(own) > 0
        assert split["tokens"] == sum(len(sample.input_ids) for sample in own)
        assert split["supervised_tokens"] == sum(sum(map(int, sample.loss_mask)) for sample in own)
    assert set(stats["splits"]) == {"train", "validation"}
    json.dumps(stats)


def test_the_audit_page_marks_what_is_supervised(made, target):
    rows = [talk("What is <b>?", "It & that"), talk("x", "y"), talk("z", "")]
    found = made(rows)
    page = audit.page(
        "A dataset", prepare_dataset.describe(found), found, AutoTokenizer.from_pretrained(target), Path("results/datasets/t/d")
    )
    assert "What is &lt;b&gt;?&lt;|im_end|&gt;\n&lt;|im_start|&gt;assistant\n<mark>It &amp; that&lt;|im_end|&gt;</mark>\n" in page
    assert page.count("<mark>") == 3  # two samples, and the explanation
    assert "rejected: no assistant turn with text" in page
    places = re.findall(r"<h3>(.*?), (?:train|validation)</h3>", page)
    assert sorted(places) == ["f.jsonl:1", "f.jsonl:2"]  # of the three rows, those that became samples
    assert "What is" in page.partition("f.jsonl:1, ")[2].partition("<h3>")[0]
    assert "results/datasets/t/d/rejects.jsonl" in page and "results/datasets/t/d/stats.json" in page
    assert not re.search(r"(src|href)=", page)  # the page needs nothing but itself


@pytest.fixture
def regenerated(tmp_path):
    """Answers to prompts of two files, and what regeneration says of them."""
    said = [("b.jsonl", 7, "x", "stop"), ("a.jsonl", 3, "y", "length"), ("b.jsonl", 2, "z", "stop"), ("a.jsonl", 9, " ", "stop")]
    responses = [
        Response(f"key {line}", source, line, [{"role": "user", "content": f"q {line}"}, {"role": "assistant", "content": text}], reason, 1)
        for source, line, text, reason in said
    ]
    path = tmp_path / "regenerated/responses.parquet"
    path.parent.mkdir()
    write_responses(responses, path)
    figures = {"prompts": 6, "kept": 4, "cut_off": 1, "tokens": 4, "dropped": {"empty answer": 2, "duplicate prompt": 5}}
    figures |= {"shortened": {"repeats itself": 1}, "asked": 6}
    path.with_name("manifest.json").write_text(json.dumps({"digest": "0" * 64, "figures": figures}))
    return Source(path=str(path))


def test_the_ledger_of_regenerated_answers_names_the_original_rows(target, regenerated, tmp_path):
    listed, rows = numbered_rows([regenerated])
    load = functools.partial(AutoTokenizer.from_pretrained, target)
    prepared = prepare([source.name for source in listed], rows, Options(load, [3], 512, 320), tmp_path / "work")
    choose(prepared, listed, 0.1)
    assert [(one["source"], one["line"]) for one in prepared.rejects()] == [("a.jsonl", 9)]
    stats = prepare_dataset.describe(prepared) | prepare_dataset.regeneration([regenerated])
    assert [(one["source"], one["rows"], one["kept"], one["samples"]) for one in stats["sources"]] == [
        ("a.jsonl", 2, 1, 1),
        ("b.jsonl", 2, 2, 2),
    ]
    assert Counter(sample.source for sample in prepared.samples()) == {"a.jsonl": 1, "b.jsonl": 2}
    assert stats["regeneration"] == {
        "prompts": 6,
        "kept": 4,
        "cut_off": 1,
        "dropped": {"empty answer": 2, "duplicate prompt": 5},
        "shortened": {"repeats itself": 1},
        "folder": str(tmp_path / "regenerated"),
        "warning": "",
    }
    page = audit.page("A dataset", stats, prepared, load(), tmp_path)
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page))
    assert set(re.findall(r"([ab]\.jsonl:\d+), (?:train|validation)", text)) == {"b.jsonl:7", "a.jsonl:3", "b.jsonl:2"}
    assert f"{tmp_path / 'regenerated'}/rejects.jsonl" in text and "those of the sources are not used" in text
    stats["regeneration"]["warning"] = "Most were cut off."
    assert '<p class="notice">Most were cut off.</p>' in audit.page("A dataset", stats, prepared, load(), tmp_path)
    assert "asked 6 prompts, and 4 conversations came of them. 1 of 4 end in an answer that reached max_new_tokens and was kept" in text
    for said in ("dropped: empty answer 2", "dropped: duplicate prompt 5", "kept without its later turns: repeats itself 1"):
        assert said in text


def test_what_the_target_said_is_known_by_its_file(regenerated, tmp_path):
    """Not by its keys: a user's row may have each of them."""
    own = {"prompt_key": "k", "source": "s", "line": 1, "messages": [], "prompt": "q", "finish_reason": "length"}
    own["messages"] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    (tmp_path / "own.jsonl").write_text(json.dumps(own))
    _, rows = numbered_rows([regenerated, Source(path=str(tmp_path / "own.jsonl"))])
    found = [(row.line, conversation.generated, conversation.cut) for _, row in rows for conversation in [conversation_of(row)]]
    assert found == [(7, True, False), (3, True, True), (2, True, False), (9, True, False), (1, False, False)]


def test_a_weight_holds_for_all_regenerated_answers(regenerated):
    listed, rows = numbered_rows([Source(path="none.jsonl"), regenerated._replace(weight=2)])
    assert [source.weight for source in listed] == [None, 2]
    assert prepare_dataset.regeneration([Source(path="none.jsonl")]) == {}
    with pytest.raises(AerieError, match=r"none\.jsonl: no such file"):
        list(rows)
    _, rows = numbered_rows([regenerated._replace(weight=2)])
    assert sorted((number, row.source, row.line) for number, row in rows) == [
        (0, "a.jsonl", 3),
        (0, "a.jsonl", 9),
        (0, "b.jsonl", 2),
        (0, "b.jsonl", 7),
    ]


def test_the_end_of_the_job_is_no_rejected_row(made, monkeypatch):
    def ended(*_):
        raise Terminated("ended by SIGTERM")

    monkeypatch.setattr("aerie.chat.Renderer.plan", ended)
    with pytest.raises(Terminated):
        made(many(3))


def test_the_command(target, tmp_path):
    """Two workers on two sources through the command line; a broken line is rejected by file and number."""
    scripts = Path(prepare_dataset.__file__).parent
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in many(300)) + '{"prompt": \n')
    (tmp_path / "b.json").write_text(json.dumps([talk(f"b {number}", "c") for number in range(300)]))
    fingerprint = {"name": "tiny", "digest": digest_of("tiny"), "location": {"path": str(target)}, "trust_remote_code": False}
    (tmp_path / "fingerprint.json").write_text(json.dumps(fingerprint))
    settings: dict[str, Any] = {"max_length": 64, "max_samples": None, "validation_share": 0.1, "max_rejected": 0.1}
    settings |= {"last_turn_only": False, "system_prompt": None, "template_options": {}}
    runtime = {"sources": ["a.jsonl", {"path": "b.json", "max_samples": 100}]}
    recipe = {"stage": "prepare_dataset", "version": prepare_dataset.VERSION, "settings": settings, "runtime": runtime}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    line: list[Any] = [
        sys.executable,
        scripts / "prepare_dataset.py",
        "--recipe",
        "recipe.json",
        "--target",
        "fingerprint.json",
        "--store",
        "store",
    ]
    done = subprocess.run([*line, "--output", "out", "--workers", "2", "--log", "log"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    stats = json.loads((tmp_path / "out/stats.json").read_text())
    assert [(one["source"], one["rows"], one["kept"]) for one in stats["sources"]] == [("a.jsonl", 301, 300), ("b.json", 300, 100)]
    rejects = [json.loads(line) for line in (tmp_path / "out/rejects.jsonl").read_text().splitlines()]
    assert len(rejects) == 201 and {one["reason"] for one in rejects} == {"not valid JSON", "not chosen"}
    assert [one["line"] for one in rejects if one["source"] == "a.jsonl"] == [301]
    assert len(load_samples(tmp_path / "out")) == 400
    assert "<mark>" in (tmp_path / "out/audit.html").read_text()
    assert (tmp_path / "out/manifest.json").exists()


def test_golden(made, tmp_path):
    """The same input gives the same bytes for ever, or VERSION is raised (then record the new digests with it)."""
    recorded = {
        5: (
            "807db294cc7578e800c3f1348c4dd2bdef07b3aba77e82bebc64279bc81c484d",
            "f6ccc802b42424f6505edabdc1c89ec1c6d526328f9d84da509d45683c07d6db",
        )
    }
    rows = [*many(12), {"messages": [{"role": r, "content": f"{r} <|bos|>"} for r in ("user", "assistant", "user", "assistant")]}]
    found = made(rows)
    digest = write_samples(found.samples(), tmp_path / "samples")
    content = b"".join(path.read_bytes() for path in sorted((tmp_path / "samples").glob("*.arrow")))
    assert (digest, hashlib.sha256(content).hexdigest()) == recorded[prepare_dataset.VERSION]
