"""Sources and shapes: what becomes of each row, whatever its form."""

import datetime
import gzip
import json
import random
import zlib
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aerie.conversations import conversation_of, read_conversations, read_row
from aerie.errors import AerieError
from aerie.sources import RawRow, Source, read_rows, sources_digest


def said(role, content, **more):
    return {"role": role, "content": content, **more}


CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": 1}}, "id": "call00000"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [said("user", "a")]}, [said("user", "a")]),
        ({"messages": json.dumps([said("user", "a")])}, [said("user", "a")]),
        ({"messages": [said("developer", "s"), said("user", "a")]}, [said("system", "s"), said("user", "a")]),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, [said("user", "a"), said("assistant", "b")]),
        ({"conversations": [{"from": "user", "value": "a"}, {"from": "bing", "value": "b"}]}, [said("user", "a"), said("assistant", "b")]),
        ({"instruction": "a", "input": "b", "output": "c"}, [said("user", "a\nb"), said("assistant", "c")]),
        ({"instruction": "a", "input": "", "output": ""}, [said("user", "a")]),
        ({"instruction": "c", "history": [["a", "b"]], "output": "d", "system": "s"},
         [said("system", "s"), said("user", "a"), said("assistant", "b"), said("user", "c"), said("assistant", "d")]),
        ({"system": "s", "conversations": [{"from": "human", "value": "a"}]}, [said("system", "s"), said("user", "a")]),
        ({"instruction": "a", "context": "b", "response": "c", "category": "d"}, [said("user", "a\nb"), said("assistant", "c")]),  # Dolly
        ({"instruction": "a", "context": "", "response": "c"}, [said("user", "a"), said("assistant", "c")]),
        ({"id": "1", "system_prompt": "s", "question": "a", "response": "b"},  # OpenOrca
         [said("system", "s"), said("user", "a"), said("assistant", "b")]),
        ({"system_prompt": "", "question": "a", "response": "b"}, [said("user", "a"), said("assistant", "b")]),
        ({"system_prompt": "t", "messages": [said("system", "s"), said("user", "a")]}, [said("system", "s"), said("user", "a")]),
        ({"instruction": "a", "input": "b", "chosen": [said("assistant", "c")]}, [said("user", "a\nb"), said("assistant", "c")]),
        ({"question": "a", "answer": ["b", "c"]}, [said("user", "a")]),  # NQ-open: the answers that count as right
        ({"question": "a", "answer": ["b"]}, [said("user", "a"), said("assistant", "b")]),
        ({"prompt": "a", "response": "b"}, [said("user", "a"), said("assistant", "b")]),
        ({"question": "a", "answer": "b"}, [said("user", "a"), said("assistant", "b")]),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, [said("user", "a"), said("assistant", "b")]),
        ({"chosen": [said("user", "a"), said("assistant", "b")], "rejected": []}, [said("user", "a"), said("assistant", "b")]),
        ({"conversations": [{"from": "human", "value": "a"}], "chosen": {"from": "gpt", "value": "b"}, "rejected": {}},
         [said("user", "a"), said("assistant", "b")]),
        ({"prompt": [said("user", "a")], "chosen": [said("assistant", "b")]}, [said("user", "a"), said("assistant", "b")]),
        ({"question_id": 1, "turns": ["a", "b"]}, [said("user", "a"), said("user", "b")]),
        ({"question": [[said("user", "a")], [], [said("user", "b")]]}, [said("user", "a"), said("user", "b")]),
        ({"messages": [[{"sender": "x", "text": "a"}, {"sender": "x", "text": "b"}], [{"sender": "y", "text": "c"}]]},
         [said("user", "a\nb"), said("assistant", "c")]),
        ({"messages": [said("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]}, [said("user", "ab")]),
        ({"messages": [said("user", "a"), said("assistant", "b", reasoning_content="r")]},
         [said("user", "a"), said("assistant", "b", reasoning_content="r")]),
        ({"messages": [said("user", "a"), said("assistant", "b", thinking="r")]},
         [said("user", "a"), said("assistant", "b", reasoning_content="r")]),
        ({"messages": [said("user", "a"), {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": '{"at": 1}'}}]},
                       said("tool", "t")]},
         [said("user", "a"), said("assistant", "", tool_calls=[CALL]), said("tool", "t", tool_call_id="call00000")]),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": '{"name": "look", "arguments": {"at": 1}}'},
                            {"from": "observation", "value": "t"}]},
         [said("user", "a"), said("assistant", "", tool_calls=[CALL]), said("tool", "t", tool_call_id="call00000")]),
        ({"messages": [said("user", [{"type": "text", "value": "a"}]),
                       said("assistant", [{"type": "reasoning", "value": "r"}, {"type": "tool_call", "value": '{"name": "look", "arguments": {"at": 1}}'}])]},
         [said("user", "a"), said("assistant", "", tool_calls=[CALL], reasoning_content="r")]),
        # what stands before the first user's message answers nothing
        ({"conversations": [{"from": "gpt", "value": "x"}, {"from": "human", "value": "a"}]}, [said("user", "a")]),
    ],
)  # fmt: skip
def test_shapes(row, expected):
    found = read_row(row, "f", 1)
    assert not found.problem
    assert found.messages == expected


def test_tools_come_in_one_form():
    function = {"name": "look", "parameters": {}}
    expected = [{"type": "function", "function": function}]
    given: Any
    for given in (expected, [function], json.dumps([function]), [json.dumps(function)]):
        assert read_row({"prompt": "a", "tools": given}, "f", 1).tools == expected
    for given in (None, "", "[]", [], "null"):
        assert read_row({"prompt": "a", "tools": given}, "f", 1).tools is None


def calling(arguments, name="look"):
    return {"messages": [said("user", "a"), said("assistant", "", tool_calls=[{"function": {"name": name, "arguments": arguments}}])]}


# Rows as they are found in the wild: the reason why each is rejected, or None for one that is kept.
ODD_ROWS = [
    ([1], "not an object: row is a list"),
    ("text", "not an object: row is a str"),
    (None, "not an object: row is a NoneType"),
    ({}, "unknown shape: keys none"),
    ({"text": "a"}, "unknown shape: keys text"),
    ({"messages": []}, "no messages"),
    ({"messages": None}, "no messages"),
    ({"conversations": []}, "no messages"),
    ({"messages": "hello"}, "not valid JSON: messages"),
    ({"messages": 5}, "wrong type: the messages are a int"),
    ({"messages": {"role": "user", "content": "a"}}, "wrong type: the messages are a dict"),
    ({"messages": ["a"]}, "wrong type: message 1 is a str"),
    ({"messages": [[said("user", "a")]]}, "wrong type: message 1 is a list"),
    ({"messages": [said(None, "a")]}, "unknown role: message 1 has the role None"),
    ({"messages": [said("narrator", "a")]}, "unknown role: message 1 has the role 'narrator'"),
    ({"messages": [{"content": "a"}]}, "unknown role: message 1 has the role None"),
    ({"messages": [said(["user"], "a")]}, "unknown role: message 1 has the role ['user']"),
    ({"messages": [said("user", None)]}, "no text: message 1"),
    ({"messages": [{"role": "user"}]}, "no text: message 1"),
    ({"messages": [said("user", 7)]}, "wrong type: message 1 holds a int, expected text"),
    ({"messages": [said("user", [["a"]])]}, "wrong type: message 1 has a part that is a list"),
    ({"messages": [said("user", [{"type": "image_url", "image_url": {"url": "x"}}])]}, "needs image_url: only text can be prepared"),
    ({"messages": [said("user", "<image>a")], "images": ["x.png"]}, "needs images: only text can be prepared"),
    ({"messages": [said("user", "\ud800")]}, "not valid Unicode: message 1, a lone surrogate \\ud800"),
    ({"messages": [said("system", "s")]}, "no user message with text"),
    ({"messages": [said("assistant", "a")]}, "no user message with text"),
    ({"messages": [said("user", ""), said("assistant", "b")]}, "no user message with text"),
    ({"turns": None}, "unknown shape: keys turns"),
    ({"turns": 5}, "wrong type: turns is a int"),
    ({"instruction": ["a"]}, "wrong type: message 1 is a str"),
    ({"prompt": {"a": 1}}, "wrong type: prompt holds a dict"),
    ({"instruction": "a", "history": "b", "output": "c"}, "wrong type: history"),
    ({"prompt": "a", "tools": "look"}, "not valid JSON: tools"),
    ({"prompt": "a", "tools": [None]}, "bad tools: one has no name"),
    ({"prompt": "a", "tools": {"name": "look"}}, "bad tools: a dict, expected a list"),
    (calling("[]"), "bad tool call: the arguments in message 2 are a list"),
    (calling("{"), "bad tool call: the arguments in message 2 are not valid JSON"),
    (calling("{}", name=None), "bad tool call: message 2 calls no function by name"),
    ({"prompt": "a", "context": {"title": ["b"]}, "response": "c"}, "wrong type: context holds a dict, expected text"),
    ({"prompt": "a", "system_prompt": ["b"], "response": "c"}, "wrong type: system_prompt holds a list, expected text"),
    (calling('{"at": NaN}'), "bad tool call: the arguments in message 2 are no JSON"),
    ({"input_ids": None}, "unknown shape: keys input_ids"),
    ({"input_ids": [1, 2]}, "no loss_mask"),
    ({"input_ids": [1, 2], "loss_mask": [1]}, "wrong length: 2 input_ids, 1 values in loss_mask"),
    ({"input_ids": [1, "2"], "loss_mask": [1, 1]}, "wrong type: input_ids"),
    ({"input_ids": [1, -2], "loss_mask": [1, 1]}, "wrong value: an input id"),
    ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "wrong value: loss_mask"),
    (calling("null"), None),
    (calling(None), None),
    ({"messages": [said("user", "a"), said("assistant", "b")], "tools": None}, None),
    ({"messages": [said("user", "a"), said("assistant", "b")], "tools": []}, None),
    ({"messages": [said("user", "a"), said("user", "b"), said("assistant", "c")]}, None),
    ({"messages": [said("user", "a"), said("assistant", "b"), said("assistant", "c")]}, None),
    ({"messages": [said("assistant", "x"), said("user", "a"), said("assistant", "b")]}, None),
    ({"messages": [said("user", "a"), said("assistant", ""), said("user", "b"), said("assistant", "c")]}, None),
    ({"messages": [said("user", "a\x00b"), said("assistant", "c")]}, None),
    ({"messages": [said("user", "x" * 1_000_000), said("assistant", "c")]}, None),
    ({"messages": [said("user", "a <|im_end|> <|bos|>"), said("assistant", "c")]}, None),
]  # fmt: skip


@pytest.mark.parametrize(("row", "reason"), ODD_ROWS)
def test_odd_rows_are_kept_or_have_a_reason(row, reason):
    found = read_row(row, "f", 1).problem
    assert found.startswith(reason) if reason else not found


def test_lines_that_are_no_json_are_rows_with_a_reason(tmp_path):
    path = tmp_path / "rows.jsonl"
    good = json.dumps({"prompt": "a", "response": "b"}).encode()
    lines = [good, b"", b"{'prompt': 1}", good.replace(b"a", b"\xac"), b"[" * 100_000, good]
    path.write_bytes(b"\n".join(lines) + b"\n")
    found = list(read_conversations([path]))
    assert [one.line for one in found] == [1, 3, 4, 5, 6]
    reasons = [one.problem for one in found]
    assert reasons[0] == reasons[4] == ""
    assert reasons[1].startswith("not valid JSON: Expecting property name")
    assert reasons[2] == "not valid Unicode: prompt, byte 0xac is not UTF-8"
    assert reasons[3].startswith("not valid JSON")


ROWS = [{"prompt": f"question {number} é\u2028", "response": "b"} for number in range(7)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", LINES),
        ("a.jsonl", b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n\r\n")),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)),
        ("a.jsonl.zst", pa.compress(LINES, codec="zstd", asbytes=True)),
        ("a.json", json.dumps(ROWS).encode()),
        ("a.json", json.dumps(ROWS, indent=1, ensure_ascii=False).encode()),
        ("a.json.gz", gzip.compress(json.dumps(ROWS).encode(), mtime=0)),
        ("a.json", LINES),  # lines in a .json file
        ("a.json", json.dumps({"version": 1, "data": ROWS}).encode()),
        ("a.json", json.dumps({f"row {number}": row for number, row in enumerate(ROWS)}).encode()),
    ],
)
def test_files_of_every_kind_give_the_same_rows(tmp_path, name, content, monkeypatch):
    (tmp_path / name).write_bytes(content)
    expected = [read_row(row, "", 0).messages for row in ROWS]
    for size in (1 << 22, 7, 1):  # however little is read at once
        monkeypatch.setattr("aerie.sources._CHUNK", size)
        assert [one.messages for one in read_conversations([tmp_path / name])] == expected


def test_parquet_folders_and_globs(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.jsonl").write_bytes(LINES)
    (tmp_path / "notes.txt").write_text("not data")
    expected = [read_row(row, "", 0).messages for row in ROWS]
    assert [one.messages for one in map(conversation_of, read_rows(Source(path=str(tmp_path / "a.parquet"))))] == expected
    assert [one.messages for one in map(conversation_of, read_rows(Source(path=str(tmp_path))))] == expected * 2
    assert [path.name for path in Source(path=str(tmp_path / "*" / "*.jsonl")).files()] == ["b.jsonl"]
    with pytest.raises(AerieError, match="no file there"):
        Source(path=str(tmp_path / "*.csv")).files()


def call(name, arguments, **more):
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
        **more,
    }


def offer(name, **properties):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


# Rows whose objects have different keys: Arrow gives each the keys of all.
UNLIKE: list[dict[str, Any]] = [
    {"messages": [said("user", "q"), call("weather", {"city": "Rome"})], "tools": [offer("weather", city={"type": "string"})]},
    {
        "messages": [said("user", "q"), call("add", {"a": 1, "of": [{"b": 2}, {"c": {"d": None}}]}), said("tool", "3", name="add")],
        "tools": [offer("add", a={"type": "integer", "enum": [1, None]}), offer("none")],
    },
    {"messages": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    {"input_ids": [5, 6], "loss_mask": [0, 1]},
    {"prompt": "q", "response": "a"},
]


def without_d(row):
    """A null that was written is the same to Arrow as one that was not."""
    return json.loads(json.dumps(row).replace('"d": null', ""))


def test_nulls_that_arrow_filled_in_are_not_there(tmp_path, monkeypatch):
    keys = {key: None for row in UNLIKE for key in row}
    pq.write_table(pa.Table.from_pylist([keys | row for row in UNLIKE]), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(without_d(row)) + "\n" for row in UNLIKE))
    expected = [one._replace(source="") for one in read_conversations([tmp_path / "a.jsonl"])]
    assert not any(one.problem for one in expected)
    assert [one._replace(source="") for one in read_conversations([tmp_path / "a.parquet"])] == expected
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pq.read_table(tmp_path / "a.parquet").to_pylist())
    hub = read_rows(Source(hub_id="a/b", revision="0" * 40, split="train"))
    assert [conversation_of(row)._replace(source="") for row in hub] == expected


def test_nulls_that_were_written_are_there(tmp_path):
    """In a file of JSON, and in JSON text in a column."""
    arguments = {"city": "Rome", "day": None}
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [said("user", "q"), call("weather", arguments)]}))
    rows = [{"messages": [said("user", "q"), call("weather", json.dumps(arguments))]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        [found] = read_conversations([tmp_path / name])
        assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == arguments


def test_what_is_no_json_in_a_parquet_file_rejects_its_row(tmp_path):
    day = datetime.datetime(2020, 1, 1)
    rows = {
        "bad tool call: the arguments in message 2 are no JSON": {"messages": [said("user", "q"), call("look", {"at": day})]},
        "bad tools: they are no JSON": {"prompt": "q", "tools": [{"name": "look", "parameters": {"since": b"x"}}]},
        "wrong type: message 2 is no JSON": {"messages": [{"from": "human", "value": "q"}, said("tool", {"at": day})]},
    }
    for reason, row in rows.items():
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
        assert [one.problem.partition(": Object")[0] for one in read_conversations([tmp_path / "a.parquet"])] == [reason]


@pytest.mark.parametrize("name", ["data [v2].jsonl", "what?.jsonl", "all*.jsonl"])
def test_a_name_that_is_there_is_no_pattern(tmp_path, name, monkeypatch):
    folder = tmp_path / "set [1]"
    folder.mkdir()
    (folder / name).write_bytes(LINES)
    (folder / "other.jsonl").write_bytes(LINES)
    for path, names in [(name, [name]), ("*.jsonl", sorted([name, "other.jsonl"])), ("[o]*.jsonl", ["other.jsonl"])]:
        assert [file.name for file in Source(path=str(folder / path)).files()] == names
    assert len(list(read_conversations([folder / name]))) == len(ROWS)
    monkeypatch.chdir(folder)
    assert [str(file) for file in Source(path=name).files()] == [name]


def many_rows(count):
    draw = random.Random(0)
    return [{"prompt": f"{number} {draw.randbytes(20).hex()}", "response": "b"} for number in range(count)]


def cut_files():
    """(name, content, number of complete rows in it)."""
    rows = many_rows(2000)
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    listed = json.dumps(rows).encode()
    for name, text in (("a.jsonl", lines), ("a.jsonl", lines[:-1]), ("a.json", lines), ("a.json", listed)):
        packed = gzip.compress(text, mtime=0)
        for length in (len(packed) // 2, len(packed) // 7, len(packed) - 4):
            readable = zlib.decompressobj(wbits=31).decompress(packed[:length])
            yield f"{name}.gz", packed[:length], readable.count(b"}")  # each row ends in the only one that it has
        # A frame that is whole, and one that is cut within its first block: what is in the first can be read.
        half = text[: len(text) // 2 - 1]
        whole, cut = (pa.compress(part, codec="zstd", asbytes=True) for part in (half, text[len(half) :]))
        for length in (6, len(cut) // 2):
            yield f"{name}.zst", whole + cut[:length], half.count(b"}")


@pytest.mark.parametrize(("name", "content", "complete"), list(cut_files()))
def test_of_a_file_that_is_cut_off_the_complete_rows_are_taken(tmp_path, name, content, complete):
    (tmp_path / name).write_bytes(content)
    source = Source(path=str(tmp_path / name))
    with pytest.raises(AerieError, match=r"cut off.* allow_truncated: true"):
        list(read_rows(source))
    found = [conversation_of(row).messages[0]["content"] for row in read_rows(source._replace(allow_truncated=True))]
    assert found == [row["prompt"] for row in many_rows(2000)][:complete] and 200 < complete <= 2000


def test_a_file_that_is_cut_off_before_its_first_row_is_an_error(tmp_path):
    packed = {"gz": gzip.compress(LINES, mtime=0), "zst": pa.compress(LINES, codec="zstd", asbytes=True)}
    for ending, content in packed.items():
        for name in ("a.json", "a.jsonl"):
            path = tmp_path / f"{name}.{ending}"
            path.write_bytes(content[:6])
            for source in (Source(path=str(path)), Source(path=str(path), allow_truncated=True)):
                with pytest.raises(AerieError, match="cut off before its first row"):
                    list(read_rows(source))


def test_a_line_that_is_cut_off_in_a_plain_file(tmp_path):
    """It is a row that cannot be used, unless one said that the file is cut off."""
    source = Source(path=str(tmp_path / "a.jsonl"))
    for lost, whole in ((1, 7), (2, 6)):  # the line break; and the row's last bracket
        (tmp_path / "a.jsonl").write_bytes(LINES[:-lost])
        assert [bool(conversation_of(row).problem) for row in read_rows(source)] == [False] * whole + [True] * (7 - whole)
        assert len(list(read_rows(source._replace(allow_truncated=True)))) == whole


def test_a_file_without_a_row_is_named(tmp_path, capsys):
    pq.write_table(pa.Table.from_pylist(ROWS[:0], schema=pa.schema([("prompt", pa.string())])), tmp_path / "b.parquet")
    for name, content in (("a.jsonl", b""), ("c.jsonl", b" \n\n"), ("d.json", b"[]"), ("e.jsonl", LINES), ("f.jsonl.zst", b"")):
        (tmp_path / name).write_bytes(content)
    assert len(list(read_rows(Source(path=str(tmp_path))))) == len(ROWS)
    warned = [line for line in capsys.readouterr().err.splitlines() if line.startswith("WARNING")]
    assert warned == [
        f"WARNING: {tmp_path / name}: no row in it. Get it again, or take it out of the dataset's sources."
        for name in ("a.jsonl", "b.parquet", "c.jsonl", "d.json", "f.jsonl.zst")
    ]


def test_files_that_cannot_be_read_are_errors(tmp_path):
    def read(name, content, **options):
        (tmp_path / name).write_bytes(content)
        return list(read_rows(Source(path=str(tmp_path / name), **options)))

    with pytest.raises(AerieError, match="no such file"):
        list(read_rows(Source(path=str(tmp_path / "none.json"))))
    with pytest.raises(AerieError, match="unknown ending"):
        read("x.csv", b"a")
    with pytest.raises(AerieError, match="the file is empty"):
        read("x.json", b" \n")
    cut = json.dumps(ROWS).encode()[:-3]
    with pytest.raises(AerieError, match=r"Unterminated string .* in row 7 .* 6 complete rows .* allow_truncated"):
        read("x.json", cut)
    assert len(read("x.json", cut, allow_truncated=True)) == 6
    wrong = json.dumps(ROWS).encode().replace(b'"prompt": "question 3', b'"prompt" "question 3')
    with pytest.raises(AerieError, match=rf"':' delimiter at byte {wrong.index(b'question 3') - 1}, in row 4 .* mend it"):
        read("x.json", wrong + b" " * 100, allow_truncated=True)
    for name in ("x.parquet", "x.jsonl.gz", "x.jsonl.zst"):
        with pytest.raises(AerieError, match="cannot be read to its end"):
            read(name, b"PAR1 and no more PAR1")
    with pytest.raises(AerieError, match="cannot be read to its end"):
        read("x.jsonl.gz", gzip.compress(random.Random(0).randbytes(1000) + LINES)[:-50])


def test_a_hub_source_that_cannot_be_had_is_an_error():
    source = Source.of({"hub_id": "nobody/nothing", "revision": "0" * 40, "split": "train"})
    with pytest.raises(AerieError, match=r"nobody/nothing\[train\]: could not be loaded from the hub"):
        list(read_rows(source))


def test_the_digest_is_of_the_content_and_the_mixture(tmp_path):
    for name, content in (("a.jsonl", LINES), ("b.jsonl", LINES), ("c.jsonl", LINES * 2)):
        (tmp_path / name).write_bytes(content)
    a, b, c = (Source(path=str(tmp_path / name)) for name in ("a.jsonl", "b.jsonl", "c.jsonl"))
    assert sources_digest([a, c]) == sources_digest([c, b]) != sources_digest([a, b])
    assert a.digest() != a._replace(weight=1.0).digest() != a._replace(max_samples=3).digest()


def test_a_row_that_is_text_is_no_object():
    assert conversation_of(RawRow("f", 1, '"hello"')).problem == "not an object: row is a str"
