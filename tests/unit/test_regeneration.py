"""Prompts, loops and the assembly of conversations by hand; the command on a tiny target, killed and resumed."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

import regenerate_responses
import tiny_targets
from aerie import regeneration
from aerie.conversations import Conversation, read_conversations
from aerie.errors import AerieError
from aerie.generation import Answer
from aerie.keys import digest_of
from aerie.regeneration import Answers, AnswerStore, assemble, choose_prompts, find_loop, prompt_of
from aerie.sources import Source
from aerie.stage import Recipe
from aerie.targets import Target

SCRIPTS = Path(__file__).parents[2] / "workflow" / "scripts"


def conversation(*roles: str, line: int = 1, tag: str = "") -> Conversation:
    return Conversation("file", line, [{"role": role, "content": f"{role} {number}{tag}"} for number, role in enumerate(roles)])


def choose(rows, max_prompts, sources=None):
    return choose_prompts(list(zip(sources or [Source()] * len(rows), rows, strict=True)), max_prompts)


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("The sky is blue. " + "I see. " * 20, " I see."),
        ("The sky is blue. " + "I see. " * 9 + "I s", "ee. I s"),  # cut off within the unit
        ("x" * 64, "x"),
        ("x" * 63, ""),
        (" a phrase of thirty characters." * 4, " a phrase of thirty characters."),
        (" a phrase of thirty characters." * 3, ""),  # three times is not yet a loop
        ("ha ha ha ha ha", ""),  # too short to matter
        ("no " * 40 + "and then it went on to say something else entirely.", ""),  # recovered
        ("| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n| 5 | 6 |\n| 7 | 8 |\n| 9 | 0 |", ""),
        ("1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21", ""),
        ("same line\n" * 10 + "\n\n   ", "\nsame line"),  # white space at the end does not hide it
        ("", ""),
    ],
)
def test_find_loop(text, unit):
    assert find_loop(text) == unit


def test_find_loop_agrees_with_the_definition():
    def by_definition(text: str) -> bool:
        text = text.rstrip()
        return any(
            all(text[-1 - i] == text[-1 - i - period] for i in range(length - period))
            for length in range(regeneration.LOOP_CHARACTERS, len(text) + 1)
            for period in range(1, length // regeneration.LOOP_REPEATS + 1)
        )

    texts = ["ab" * n + tail for n in (20, 31, 32, 40) for tail in ("", "a", "b", "ba")]
    texts += ["start " + "abc" * 21 + "abx"[:n] for n in range(4)]
    assert [bool(find_loop(text)) for text in texts] == [by_definition(text) for text in texts]
    assert any(map(by_definition, texts))
    assert not all(map(by_definition, texts))


def test_prompt_has_no_answers():
    prompt = prompt_of(conversation("system", "user", "assistant", "user", "assistant"))
    assert [[message["role"] for message in turn] for turn in prompt.turns] == [["system", "user"], ["user"]]
    other = conversation("system", "user", "assistant", "user")
    other.messages[2]["content"] = "another answer"
    assert prompt_of(other).key == prompt.key


def test_prompt_ends_before_a_tool_message():
    assert len(prompt_of(conversation("user", "assistant", "tool", "assistant", "user")).turns) == 1
    assert prompt_of(conversation("tool", "user")).turns == ()


def test_without_answers_each_user_message_is_a_turn():
    """As MT-Bench's turns and BFCL's questions."""
    prompt = prompt_of(conversation("system", "user", "user", "user"))
    assert [[message["role"] for message in turn] for turn in prompt.turns] == [["system", "user"], ["user"], ["user"]]
    assert [len(turn) for turn in prompt_of(conversation("user", "user", "assistant")).turns] == [2]


def test_tools_and_system_prompt_are_part_of_the_prompt():
    row = conversation("user")
    tools = [{"type": "function", "function": {"name": "look"}}]
    assert prompt_of(row._replace(tools=tools)).tools == tools
    keys = {prompt_of(row).key, prompt_of(row._replace(tools=tools)).key, prompt_of(row, "Be kind.").key}
    assert len(keys) == 3
    assert prompt_of(row, "Be kind.").turns[0][0] == {"role": "system", "content": "Be kind."}


def test_a_greeting_of_the_assistant_is_left_out():
    assert [len(turn) for turn in prompt_of(conversation("system", "assistant", "user", "assistant")).turns] == [2]


def test_more_prompts_contain_fewer():
    rows = [conversation("user", line=line, tag=f" of {line}") for line in range(1, 31)]
    few, many = choose([rows], 5)[0], choose([rows], 20)[0]
    assert len(few) == 5
    assert {prompt.key for prompt in few} < {prompt.key for prompt in many}
    assert many == choose([list(reversed(rows))], 20)[0]


def test_sources_give_prompts_by_cap_and_weight():
    rows = [[conversation("user", line=line, tag=f" of {name}{line}") for line in range(1, 31)] for name in "ab"]
    prompts, rejected = choose(rows, None, [Source(max_samples=7), Source()])
    assert len(prompts) == 37 and {one.reason for one in rejected} == {"not chosen"} and len(rejected) == 23
    assert {one.detail for one in rejected} == {"beyond its source's max_samples of 7"}
    prompts, rejected = choose(rows, None, [Source(weight=1), Source(weight=2)])
    assert len(prompts) == 45
    assert {one.detail for one in rejected} == {"beyond its source's share by weight (1): 15 of 30"}
    prompts, rejected = choose(rows, 9, [Source(weight=1), Source(weight=1)])
    assert len(prompts) == 9
    assert Counter(one.detail for one in rejected) == {"beyond max_prompts (or max_samples) of 9 for the whole dataset": 51}


def test_a_weight_without_a_prompt_is_an_error_that_says_why():
    rows = [[conversation("user")], [conversation("user"), Conversation("file", 2, [], "no messages: the list is empty")], []]
    sources = [Source(path=name, weight=1) for name in "abc"]
    with pytest.raises(AerieError, match=r"b: its weight is 1, but none .* \(1 × duplicate prompt, 1 × no messages\)"):
        choose(rows[:2], None, sources[:2])
    with pytest.raises(AerieError, match=r"c: its weight is 1, but none .* \(it has none\)"):
        choose([rows[0], rows[2]], None, [sources[0], sources[2]])


def test_every_row_that_is_not_asked_has_a_reason():
    rows = [
        conversation("user"),
        conversation("user", line=2),
        Conversation("file", 3, [], "no messages"),
        conversation("tool", "user", line=4),
    ]
    prompts, rejected = choose([rows], None)
    assert len(prompts) == 1
    assert [(one.line, one.reason) for one in rejected] == [(2, "duplicate prompt"), (3, "unusable row"), (4, "no user turn")]
    assert rejected[0].detail == "same as file:1"


TWO_TURNS = prompt_of(conversation("system", "user", "assistant", "user"))


def answers(*texts_and_reasons: tuple[str, str], problem: str = "") -> Answers:
    texts, reasons = zip(*texts_and_reasons, strict=True) if texts_and_reasons else ((), ())
    return Answers(TWO_TURNS.key, texts, reasons, (5,) * len(texts), problem)


def test_assemble_a_good_conversation():
    response, rejection = assemble(TWO_TURNS, answers(("one", "stop"), ("two", "stop")), keep_cut_off=True)
    assert response is not None
    assert rejection is None
    assert [message["role"] for message in response.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert (response.finish_reason, response.tokens) == ("stop", 10)


@pytest.mark.parametrize(
    ("given", "keep_cut_off", "kept", "reason"),
    [
        (answers(("one", "stop"), ("two", "length")), True, 2, None),
        (answers(("one", "stop"), ("two", "length")), False, 1, "cut off"),
        (answers(("one", "length")), True, 1, "cut off"),  # the second turn was not asked
        (answers(("one", "length")), False, 0, "cut off"),
        (answers((" \n", "stop")), True, 0, "empty answer"),
        (answers(("one", "stop"), ("no " * 40, "length")), True, 1, "repeats itself"),
        (answers(("one", "stop"), problem="prompt too long"), True, 1, "prompt too long"),
        (answers(problem="refused by the chat template: no system"), True, 0, "refused by the chat template"),
    ],
)
def test_assemble_ends_at_the_first_answer_that_is_not_good(given, keep_cut_off, kept, reason):
    response, rejection = assemble(TWO_TURNS, given, keep_cut_off)
    assert (sum(one["role"] == "assistant" for one in response.messages) if response else 0) == kept
    assert (rejection.reason if rejection else None) == reason
    assert rejection is None or rejection.kept_turns == kept


def test_ask_shows_later_turns_the_new_answers():
    prompts = [prompt_of(conversation("user", "assistant", "user", tag=tag)) for tag in ("a", "b", "long" * 9)]
    asked = []

    def converse(first, reply, seed):
        waiting = list(first.items())
        while waiting:
            index, ids = waiting.pop(0)
            asked.append((seed, index))
            answer = Answer([1, 2], f"answer of {bytes(ids).decode()[-8:]}", "length" if b"0b" in bytes(ids) else "stop")
            following = reply(index, answer)
            waiting += [(index, following)] if following is not None else []

    def ids_of(messages, tools):
        return list("|".join(message["content"] for message in messages).encode())

    found = regenerate_responses.ask(prompts, converse, ids_of, 40, seed=7)
    assert found[0].answers == ("answer of user 0a", "answer of |user 2a")
    assert found[0].tokens == (2, 2)
    assert (len(found[1].answers), found[1].finish_reasons) == (1, ("length",))  # cut off: the next turn is not asked
    assert (found[2].answers, found[2].problem) == ((), "prompt too long: 42 tokens; at most 40 leave room for max_new_tokens")
    assert asked == [(7, 0), (7, 1), (7, 0)]


def test_an_answer_with_special_tokens_is_not_good():
    """Its text does not show them, so the conversation would not be what the target said."""

    def converse(first, reply, seed):
        assert reply(0, Answer([5, 9, 6], "answer", "stop")) is None

    prompts = [prompt_of(conversation("user", "assistant", "user"))]
    [found] = regenerate_responses.ask(prompts, converse, lambda messages, tools: [1], 40, seed=7, special=frozenset([9]))
    response, rejection = assemble(prompts[0], found, keep_cut_off=True)
    assert response is None and rejection and rejection.reason == "special tokens"


def test_the_digest_covers_what_the_ledger_says():
    """In any order; the same answers with other rows left out, or from other lines, are another digest."""
    responses = [regeneration.Response(f"k{n}", "f", n, [{"role": "user", "content": "q"}], "stop", 1) for n in (1, 2)]
    rejected = [regeneration.Rejection("f", n, "cut off", "") for n in (3, 4)]
    digest = regeneration.responses_digest(responses, rejected)
    assert regeneration.responses_digest(responses[::-1], rejected[::-1]) == digest
    moved = [responses[0], dataclasses.replace(responses[1], line=5)]
    assert len({digest, regeneration.responses_digest(responses, rejected[:1]), regeneration.responses_digest(moved, rejected)}) == 3


def test_a_new_version_keeps_the_answers_in_the_store():
    """They cost GPU-days; what is made of them does not."""
    key = regenerate_responses.answers_key(Recipe("regenerate_responses", 4, {}, {}), Target("none", "0" * 64, {}, False))
    assert key == digest_of({"version": 3, "target": "0" * 64, "settings": dict.fromkeys(regenerate_responses.ANSWER_SETTINGS)})


def test_golden(tmp_path):
    """The same rows and answers give the same files for ever, or VERSION is raised (then record the new digest with it)."""
    recorded = {6: "cc3ef539f584d37ad768e77dd3623adb07c701631e8bb52f33b81d91c99d48d0"}
    rows = [conversation("system", "user", "assistant", "user"), conversation("user", line=2, tag=" b"), conversation("tool", line=3)]
    prompts, rejected = choose([rows], None)
    responses = []
    for prompt, texts in zip(prompts, (("Good.", "Better."), ("no " * 40,)), strict=True):
        given = Answers(prompt.key, texts[: len(prompt.turns)], ("stop",) * len(prompt.turns), (5,) * len(prompt.turns))
        response, rejection = assemble(prompt, given, keep_cut_off=True)
        responses += [response] if response else []
        rejected += [rejection] if rejection else []
    regeneration.write_responses(responses, tmp_path / "responses.parquet")
    table = pq.read_table(tmp_path / "responses.parquet")
    figures = regeneration.figures_of(len(prompts), responses, rejected)
    digest = regeneration.responses_digest(responses, rejected)
    content = [table.to_pylist(), str(table.schema), [dataclasses.asdict(one) for one in rejected], figures, digest]
    assert digest_of(content) == recorded[regenerate_responses.VERSION]


@pytest.mark.parametrize(
    ("kept", "cut_off", "dropped", "said"),
    [
        (10, 5, {}, ""),
        (10, 6, {"repeats itself": 9}, "6 of 10 answers"),
        (4, 0, {"cut off": 5}, "5 of 9 answers"),  # keep_cut_off: false
        (0, 0, {"empty answer": 3}, ""),
    ],
)
def test_mostly_cut_off_answers_are_warned_of(kept, cut_off, dropped, said):
    warning = regeneration.cut_off_warning({"prompts": 20, "kept": kept, "cut_off": cut_off, "dropped": dropped, "shortened": {}})
    assert warning.startswith(f"WARNING: {said} reached regenerate.max_new_tokens") if said else warning == ""


def test_answers_come_back_from_the_store(tmp_path):
    store = AnswerStore(tmp_path / "answers")
    one, two = answers(("one", "stop")), Answers("k" * 32, (), (), (), "prompt too long")
    store.write("a" * 64, [one, two])
    assert store.read([one.prompt_key, two.prompt_key, "unknown"]) == {one.prompt_key: one, two.prompt_key: two}
    assert sorted(path.name for path in store.folder.iterdir()) == ["a" * 64 + ".parquet"]


def test_no_prompts_is_an_error(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"messages": []}\n')
    recipe = Recipe("regenerate_responses", regenerate_responses.VERSION, {"max_prompts": None}, {})
    target = Target("none", "0" * 64, {}, False)
    with pytest.raises(AerieError, match=r"no prompt to answer .* unusable row"):
        regenerate_responses.regenerate(recipe, target, [Source(path=str(empty))], tmp_path, tmp_path, tmp_path)


def test_too_many_unusable_rows_are_all_named(tmp_path):
    """As prepare_dataset names them: the first ones, how many for each reason, and the file that has the others."""
    file, work = tmp_path / "chats.jsonl", tmp_path / "work"
    work.mkdir()
    lines = [json.dumps({"messages": [{"role": "user", "content": f"q{number}"}]}) for number in (1, 2, 2)]
    file.write_text("\n".join([*lines, *['{"messages": []}'] * 6, '{"prompt": ']) + "\n")
    settings = {"max_prompts": None, "max_rejected": 0.5}
    recipe = Recipe("regenerate_responses", regenerate_responses.VERSION, settings, {})
    target = Target("none", "0" * 64, {}, False)
    with pytest.raises(AerieError, match=r"7 of 10 rows cannot be used, more than the dataset's max_rejected of 0.5") as caught:
        regenerate_responses.regenerate(recipe, target, [Source(path=str(file))], tmp_path, work, tmp_path)
    assert f"  {file}:8: no messages" in str(caught.value) and f"{file}:9" not in str(caught.value)
    listed = "By reason: 1 × duplicate prompt, 6 × no messages, 1 × not valid JSON. "
    assert f"\n{listed}All are in {work / 'rejects.jsonl'}. Mend the rows, or raise max_rejected." in str(caught.value)
    rejects = [json.loads(line) for line in (work / "rejects.jsonl").read_text().splitlines()]
    assert [one["line"] for one in rejects] == list(range(3, 11))
    assert (rejects[1]["reason"], rejects[1]["detail"]) == ("unusable row", "no messages: the list is empty")


def test_a_prompt_that_is_too_long_is_not_said_to_be_answered(tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in ("short", "long " * 300)))
    settings = {"max_prompts": None, "keep_cut_off": True, "max_new_tokens": 16}
    recipe, target = Recipe("regenerate_responses", 5, settings, {}), Target("none", "0" * 64, {}, False)
    source = Source(path=str(file))
    prompts, _ = choose_prompts([(source, read_conversations([file]))], None)
    short, long = sorted(prompts, key=lambda prompt: len(prompt.turns[0][0]["content"]))
    stored = [Answers(short.key, ("Yes.",), ("stop",), (2,)), Answers(long.key, (), (), (), "prompt too long: 900 tokens")]
    AnswerStore(tmp_path / "answers" / regenerate_responses.answers_key(recipe, target)).write("a" * 64, stored)
    for name in ("work", "out"):
        (tmp_path / name).mkdir()
    made = regenerate_responses.regenerate(recipe, target, [source], tmp_path, tmp_path / "work", tmp_path / "out")
    assert (made.figures["kept"], made.figures["dropped"]) == (1, {"prompt too long": 1})
    said = "regenerate: 1 of 2 prompts found answered, 0 to ask, 1 known to be too long or refused by the chat template\n"
    assert said in capsys.readouterr().err


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A tiny target and 40 conversations, two of them of two turns, one too long."""
    folder = tmp_path_factory.mktemp("regeneration")
    target = tiny_targets.make_tiny_llama(folder / "target")
    fingerprint = {"name": "tiny", "digest": digest_of("tiny"), "location": {"path": str(target)}, "trust_remote_code": False}
    (folder / "fingerprint.json").write_text(json.dumps(fingerprint))
    rows = [{"messages": conversation("user", tag=f" of {number}").messages} for number in range(37)]
    rows += [{"messages": conversation("system", "user", "assistant", "user", tag=tag).messages} for tag in ("a", "b")]
    rows += [{"messages": [{"role": "user", "content": "long " * 300}]}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def command(folder: Path, output: str, max_prompts: int | None = None) -> list[str]:
    settings = {"max_new_tokens": 16, "temperature": 0.7, "top_p": 1.0, "seed": 0, "max_prompts": max_prompts, "keep_cut_off": True}
    runtime = {"device": "cpu", "tensor_parallel": 1, "batch_prompts": 4}
    runtime["engine_options"] = {"enforce_eager": True, "kv_cache_memory_bytes": 2**26}
    runtime["sources"] = [str(folder / "prompts.jsonl")]
    recipe = {"stage": "regenerate_responses", "version": regenerate_responses.VERSION, "settings": settings, "runtime": runtime}
    (folder / f"{output}.json").write_text(json.dumps(recipe))
    line = [sys.executable, SCRIPTS / "regenerate_responses.py", "--recipe", folder / f"{output}.json"]
    line += ["--target", folder / "fingerprint.json", "--store", folder / "store"]
    return list(map(str, [*line, "--output", folder / output, "--log", folder / f"{output}.log"]))


def batches(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.glob("store/answers/*/*.parquet")}


@pytest.fixture(scope="module")
def answered(workplace):
    """The folder after a run over all prompts that was killed and started again. before: batches that the killed one left."""
    folder = workplace
    # Slowed down between batches, so that the kill surely lands in the middle.
    slow = "import sys, time, runpy; sys.argv = sys.argv[1:]; sys.path.insert(0, sys.argv[0].rsplit('/', 1)[0])\n"
    slow += "from aerie.regeneration import AnswerStore; write = AnswerStore.write\n"
    slow += "AnswerStore.write = lambda *given: (write(*given), time.sleep(1))[0]\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    line = command(folder, "all")
    process = subprocess.Popen([line[0], "-c", slow, *line[1:]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while len(batches(folder)) < 2:
            assert process.poll() is None, (folder / "all.log").read_text()[-3000:]
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert not (folder / "all" / "manifest.json").exists()
    before = batches(folder)
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(folder=folder, before=before, stderr=done.stderr)


def test_a_killed_run_goes_on(answered):
    found = len(answered.before)
    assert 2 <= found < 10
    unasked = "1 known to be too long" in answered.stderr  # where its batch is among them
    assert f"{4 * found - unasked} of 40 prompts found answered, {40 - 4 * found} to ask" in answered.stderr
    assert len(batches(answered.folder)) == 10
    assert answered.before.items() <= batches(answered.folder).items()  # what was finished is untouched


def test_responses_are_complete_and_readable(answered):
    rows = list(read_conversations([answered.folder / "all" / "responses.parquet"]))
    asked = {row.line: row for row in read_conversations([answered.folder / "prompts.jsonl"])}
    assert all(row.source == str(answered.folder / "prompts.jsonl") for row in rows)
    assert all(asked[row.line].messages[0] == row.messages[0] for row in rows)
    figures = json.loads((answered.folder / "all" / "manifest.json").read_text())["figures"]
    assert (figures["prompts"], figures["dropped"].get("prompt too long")) == (40, 1)
    assert figures["kept"] == len(rows) == 40 - sum(figures["dropped"].values())
    assert figures["tokens"] > 0
    assert all(row.problem == "" and row.messages[-1]["role"] == "assistant" for row in rows)
    table = pq.read_table(answered.folder / "all" / "responses.parquet").to_pylist()
    assert {row["finish_reason"] for row in table} <= {"stop", "length"}
    assert figures["cut_off"] == sum(row.cut for row in rows) > 0
    assert answered.stderr.count("answers that the sources have are not used") == 1
    assert (f"WARNING: {figures['cut_off']} of {len(rows)} answers" in answered.stderr) == (figures["cut_off"] > len(rows) / 2)
    rejects = [json.loads(line) for line in (answered.folder / "all" / "rejects.jsonl").read_text().splitlines()]
    assert any(one["reason"] == "prompt too long" and one["line"] == 40 for one in rejects)


def test_fewer_prompts_ask_nothing_and_answer_alike(answered):
    done = subprocess.run(command(answered.folder, "few", max_prompts=10), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "10 of 10 prompts found answered, 0 to ask" in done.stderr
    few = pq.read_table(answered.folder / "few" / "responses.parquet").to_pylist()
    every = {row["prompt_key"]: row for row in pq.read_table(answered.folder / "all" / "responses.parquet").to_pylist()}
    assert few
    assert all(every[row["prompt_key"]] == row for row in few)
