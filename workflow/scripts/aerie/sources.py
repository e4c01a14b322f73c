"""Sources: where conversations come from, and their rows one by one, as they lie in files or on the hub."""

import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pyarrow import ArrowInvalid, CompressedInputStream

from . import cli
from .errors import AerieError
from .keys import digest_of, file_sha256

_ENDINGS = (".json", ".jsonl", ".parquet", ".json.gz", ".jsonl.gz", ".json.zst", ".jsonl.zst")
_RESPONSE_COLUMNS = {"prompt_key", "source", "line", "messages", "finish_reason"}  # of what regenerate_responses writes
_CHUNK = 1 << 22  # characters read at a time from a .json file
_BETWEEN = re.compile(r"[\s,]*")  # what separates the elements of a list
_SPACE = re.compile(r"\s*")


class Source(NamedTuple):
    """One entry of a dataset's `sources`. path: a file, folder or glob; or a data set on the hub, at one commit.

    weight: its share of the dataset, relative to the other sources' weights. max_samples: its samples of lowest hash.
    """

    path: str = ""
    hub_id: str = ""
    revision: str = ""
    split: str = ""
    subset: str | None = None
    weight: float | None = None
    max_samples: int | None = None
    allow_truncated: bool = False

    @classmethod
    def of(cls, item: "str | dict[str, Any]") -> "Source":
        """From the configuration: a path alone, or an object with these keys."""
        return cls(path=item) if isinstance(item, str) else cls(**item)

    @property
    def name(self) -> str:
        """What the ledger calls it."""
        return self.path or f"{self.hub_id}[{':'.join(part for part in (self.subset, self.split) if part)}]"

    def files(self) -> list[Path]:
        """The files, sorted; none for the hub. AerieError where the path names nothing that can be read."""
        if self.hub_id:
            return []
        path = Path(self.path)
        there = next(one for one in (path, *path.parents) if one.exists())  # a name that is there is no pattern, whatever its letters
        pattern = str(path.relative_to(there))
        if path.is_dir():
            found = [file for file in path.rglob("*") if file.name.endswith(_ENDINGS)]
        elif path != there and any(letter in pattern for letter in "*?["):
            found = [file for file in there.glob(pattern) if file.is_file()]
        else:
            found = [path]
        if not found:
            raise AerieError(f"{self.path}: no file there; expected files ending in {', '.join(_ENDINGS)}. Check the dataset's sources.")
        return sorted(found)

    def digest(self, digest_of_file: Callable[[Path], str] | None = None) -> str:
        """Digest of what is in it and how it is mixed; neither its place nor its name is in it."""
        if self.hub_id:
            content: Any = [self.hub_id, self.revision, self.subset, self.split]
        else:
            content = sorted((digest_of_file or file_digest)(path) for path in self.files())
        return digest_of([content, self.weight, self.max_samples, self.allow_truncated])


class RawRow(NamedTuple):
    """One row as found. line: its line in a .jsonl file, else its number; data: JSON text, or the parsed row.

    A regenerated answer has the source and line of the row that its prompt came from. generated: it is one.
    """

    source: str
    line: int
    data: Any
    generated: bool = False


def sources_digest(sources: Sequence[Source], digest_of_file: Callable[[Path], str] | None = None) -> str:
    """Digest of all sources; their order is not in it. digest_of_file: for files whose digest is known otherwise."""
    return digest_of(sorted(source.digest(digest_of_file) for source in sources))


def file_digest(path: Path) -> str:
    """Content digest of a file: that of its manifest where a stage made it, else its sha256."""
    manifest = path.with_name("manifest.json")
    if path.name == "responses.parquet" and manifest.exists():
        return str(json.loads(manifest.read_text())["digest"])
    if not path.is_file():
        raise AerieError(f"{path}: no such file. Check the dataset's sources.")
    return file_sha256(path)


def numbered_rows(sources: Sequence[Source]) -> tuple[list[Source], Iterator[tuple[int, RawRow]]]:
    """The sources as the ledger lists them, and every row with the number of its source among them.

    A file of regenerated answers counts as the files that its prompts came from.
    """
    listed: list[Source] = []
    numbers: list[dict[str, int]] = []  # by file; empty for a source that is listed as it is
    firsts = []
    for source in sources:
        names = _origins(source)
        firsts.append(len(listed))
        numbers.append({name: len(listed) + place for place, name in enumerate(names)})
        listed += [Source(path=name) for name in names] or [source]

    def rows() -> Iterator[tuple[int, RawRow]]:
        for source, first, number_of in zip(sources, firsts, numbers, strict=True):
            for row in read_rows(source):
                yield number_of.get(row.source, first), row

    return listed, rows()


def _origins(source: Source) -> list[str]:
    """The files that the prompts of regenerated answers came from; none for a source of another kind.

    Nor for one with a weight or cap, since these hold for all of it.
    """
    import pyarrow.parquet as pq

    path = Path(source.path)
    if path.suffix != ".parquet" or not path.is_file() or source.weight is not None or source.max_samples is not None:
        return []
    try:
        if not _is_regenerated(pq.read_schema(path).names):
            return []
        return sorted(pq.read_table(path, columns=["source"])["source"].unique().to_pylist())
    except (OSError, ArrowInvalid):  # read_rows says what is wrong with it
        return []


def _is_regenerated(columns: Iterable[str]) -> bool:
    return set(columns) >= _RESPONSE_COLUMNS


def read_rows(source: Source) -> Iterator[RawRow]:
    """Every row of a source, in order, in memory that does not grow with the source.

    AerieError where a file cannot be read at all; a row that is wrong in itself is passed on, to be rejected with its reason.
    """
    parts = [(source.name, _hub_rows(source))] if source.hub_id else [(str(path), _file_rows(path, source)) for path in source.files()]
    for name, rows in parts:
        empty = True
        for row in rows:
            empty = False
            yield row
        if empty:
            cli.say(f"WARNING: {name}: no row in it. Get it again, or take it out of the dataset's sources.")


def _file_rows(path: Path, source: Source) -> Iterator[RawRow]:
    """Every row of one of a source's files."""
    name = str(path)
    if not path.is_file():
        raise AerieError(f"{path}: no such file. Check the dataset's sources.")
    if not path.name.endswith(_ENDINGS):
        raise AerieError(f"{path}: unknown ending; expected one of {', '.join(_ENDINGS)}")
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            file = pq.ParquetFile(path)
            regenerated = _is_regenerated(file.schema_arrow.names)
            for number, row in enumerate((row for batch in file.iter_batches(1000) for row in batch.to_pylist()), 1):
                yield RawRow(row["source"], row["line"], row, True) if regenerated else RawRow(name, number, _as_written(row))
            return
        raw = _Unpacked(path) if path.suffix in (".gz", ".zst") else path.open("rb", buffering=0)
        with _as_text(raw) as text_file:
            if ".jsonl" in path.suffixes:
                for number, text in enumerate(text_file, 1):
                    if source.allow_truncated and not text.endswith("\n") and not _is_json(text):
                        return  # the file is cut off within this row
                    if text.strip():
                        yield RawRow(name, number, text.strip())
            else:
                for number, data in enumerate(_json_rows(text_file, path, source.allow_truncated), 1):
                    yield RawRow(name, number, data)
        if isinstance(raw, _Unpacked) and raw.cut and not source.allow_truncated:
            raise AerieError(
                f"{path}: cannot be read to its end: the file is cut off ({raw.cut}). Get it again, or set allow_truncated: true to take "
                "the complete rows before."
            )
    except (OSError, EOFError, zlib.error, ArrowInvalid) as error:  # a file that is damaged
        raise AerieError(f"{path}: cannot be read to its end ({error}). Get the file again.") from error


def _as_written(row: dict[str, Any]) -> dict[str, Any]:
    """A row of Arrow's without the nulls in its objects: Arrow gives each the keys that the others have."""

    def written(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: written(part) for key, part in value.items() if part is not None}
        # All of a list's values are of one kind; it may be a long one of numbers.
        if isinstance(value, list) and isinstance(next((part for part in value if part is not None), None), dict | list):
            return [written(part) for part in value]
        return value

    return {key: written(value) for key, value in row.items()}


def _as_text(raw: io.RawIOBase) -> io.TextIOWrapper:
    """The file as text. A byte that is not UTF-8 becomes a lone surrogate, by which its row is known and rejected."""
    return io.TextIOWrapper(io.BufferedReader(raw), encoding="utf-8-sig", errors="surrogateescape", newline="\n")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


class _Unpacked(io.RawIOBase):
    """What is in a compressed file. It ends where the file is cut off; `cut` then has the decompressor's words."""

    def __init__(self, path: Path) -> None:
        self.path, self.at, self.cut = path, 0, ""  # at: bytes that were read
        self.stream = self._opened()

    def _opened(self) -> Any:
        return gzip.GzipFile(self.path) if self.path.suffix == ".gz" else CompressedInputStream(str(self.path), "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self.cut:
            return 0
        try:
            piece = self.stream.read(len(buffer))
        except (EOFError, OSError) as error:
            if not isinstance(error, EOFError) and "Truncated" not in str(error):
                raise
            self.cut = str(error)
            piece = self._rest()
            if not self.at and not piece:
                raise AerieError(f"{self.path}: the file is cut off before its first row ({error}). Get it again.") from error
        buffer[: len(piece)] = piece
        self.at += len(piece)
        return len(piece)

    def _rest(self) -> bytes:
        """What lies between `at` and the cut: the read that met the cut lost it, so it is read again, byte by byte."""
        stream = self._opened()
        left = self.at
        while left and (piece := stream.read(min(left, _CHUNK))):
            left -= len(piece)
        found = b""
        with suppress(EOFError, OSError):
            while piece := stream.read(1):
                found += piece
        return found


def _hub_rows(source: Source) -> Iterator[RawRow]:
    from datasets import load_dataset

    try:
        rows = load_dataset(source.hub_id, source.subset, revision=source.revision, split=source.split)
    except Exception as error:
        raise AerieError(f"{source.name}: could not be loaded from the hub ({type(error).__name__}: {error})") from error
    for number, row in enumerate(rows, 1):
        yield RawRow(source.name, number, _as_written(row))


class _Text:
    """A file of JSON values, read in pieces."""

    def __init__(self, file: io.TextIOWrapper, path: Path) -> None:
        self.file, self.path = file, path
        self.buffer, self.at, self.ended = "", 0, False
        self.bytes = 0  # in what was dropped from the buffer
        self.decoder = json.JSONDecoder()

    def more(self) -> bool:
        """Reads on, twice as far each time that one value is longer; False at the end of the file."""
        self.bytes += len(self.buffer[: self.at].encode("utf-8", "surrogateescape"))
        self.buffer, self.at = self.buffer[self.at :], 0
        piece = self.file.read(max(_CHUNK, len(self.buffer)))
        self.ended = not piece
        self.buffer += piece
        return bool(piece)

    def skip(self, what: "re.Pattern[str]") -> str:
        """The first character behind `what`; "" at the end of the file."""
        while True:
            self.at = what.match(self.buffer, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.buffer) or not self.more():
                return self.buffer[self.at : self.at + 1]

    def value(self) -> tuple[str, Any]:
        """Text and value of the next JSON value. Raises ValueError."""
        while True:
            try:
                value, end = self.decoder.raw_decode(self.buffer, self.at)
            except ValueError as error:
                # An error close to the end of what was read may be no error once more is read; so may an open string.
                open_end = getattr(error, "pos", 0) > len(self.buffer) - 16 or "Unterminated string" in str(error)
                if self.ended or not open_end:
                    raise
                self.more()
                continue
            if end == len(self.buffer) and not self.ended and self.more():
                continue  # a number may go on
            text, self.at = self.buffer[self.at : end], end
            return text, value

    def offset(self, position: int) -> int:
        """The byte of the file at a position of the buffer."""
        return self.bytes + len(self.buffer[:position].encode("utf-8", "surrogateescape"))


def _json_rows(file: io.TextIOWrapper, path: Path, allow_truncated: bool) -> Iterator[Any]:
    """The rows of a .json file: the elements of a list; or of an object that holds them, as a list or by name; or JSON values
    that follow each other, as in .jsonl."""
    text = _Text(file, path)
    first = text.skip(_SPACE)
    if not first:
        raise AerieError(f"{path}: the file is empty; expected JSON")
    rows = 0
    try:
        if first == "[":
            text.at += 1
            while (next_one := text.skip(_BETWEEN)) != "]":
                if not next_one:
                    raise json.JSONDecodeError("the list has no end", text.buffer, text.at)
                yield text.value()[0]
                rows += 1
            text.at += 1
            if text.skip(_SPACE):
                raise json.JSONDecodeError("more text after the end of the list", text.buffer, text.at)
            return
        alone, value = text.value()
        if not text.skip(_SPACE):
            yield from _rows_of(value, alone)
            return
        yield alone
        rows = 1
        while text.skip(_SPACE):
            yield text.value()[0]
            rows += 1
    except RecursionError as error:
        raise AerieError(f"{path}: row {rows + 1} is nested too deeply to be read. Remove it.") from error
    except json.JSONDecodeError as error:
        cut_off = text.ended
        if cut_off and allow_truncated and rows:
            return
        advice = "the file looks cut off: get it again" + ", or set allow_truncated: true to take the rows before" * bool(rows)
        raise AerieError(
            f"{path}: not valid JSON: {error.msg.removesuffix(' at')} at byte {text.offset(error.pos):,}, in row {rows + 1} which begins at byte "
            f"{text.offset(text.at):,}; {rows:,} complete rows come before it; {advice if cut_off else 'mend it'}"
        ) from error


def _rows_of(value: Any, text: str) -> Iterator[Any]:
    """The rows in a file that is one JSON value, not a list."""
    if isinstance(value, dict):
        lists = [part for part in value.values() if isinstance(part, list) and part and all(isinstance(row, dict) for row in part)]
        if len(value) > 1 and all(isinstance(part, dict) for part in value.values()):
            yield from value.values()
            return
        if len(lists) == 1 and not {"messages", "conversations", "turns", "question"} & set(value):
            yield from lists[0]
            return
    yield text


def mixture(counts: Counter[int], sources: Sequence[Source], reasons: Callable[[int], Mapping[str, int]]) -> dict[int, int]:
    """How many samples (or prompts) each source gives: all, up to its cap; those with weights as many as keep the weights' proportions.

    reasons: why a source's rows cannot be used, for the AerieError where one with a weight has none to give.
    """
    most = {
        number: counts[number] if one.max_samples is None else min(counts[number], one.max_samples) for number, one in enumerate(sources)
    }
    weights = {number: one.weight for number, one in enumerate(sources) if one.weight is not None}
    for number, weight in weights.items():
        if not counts[number]:
            raise AerieError(
                f"{sources[number].name}: its weight is {weight:g}, but none of its rows can be used ({by_reason(reasons(number)) or 'it has none'}); "
                "without it no mixture keeps the weights' proportions. Mend its rows, or take the source or its weight out of the dataset's sources."
            )
    shares = {number: most[number] / weight for number, weight in weights.items()}
    scarce = min(shares, key=lambda number: shares[number], default=0)
    mixed = most | {number: min(most[number], round(weight * shares[scarce])) for number, weight in weights.items()}
    for number, weight in weights.items():
        if not mixed[number]:
            cli.say(
                f"WARNING: {sources[number].name}: nothing is taken of it, since its weight of {weight:g} makes less than one of the "
                f"{counts[number]:,} that it has. Raise its weight, or add data to {sources[scarce].name}, which limits the mixture."
            )
    return mixed


def by_reason(counts: Mapping[str, int]) -> str:
    """{reason: rows} for a person."""
    return ", ".join(f"{count:,} × {reason}" for reason, count in sorted(counts.items()))


def limit_of(source: Source, most: int, there: int) -> str:
    """Which of a source's limits leaves out what is beyond the first `most` (see `mixture`) of the samples or prompts that it has."""
    if most == source.max_samples:
        return f"beyond its source's max_samples of {most}"
    return f"beyond its source's share by weight ({source.weight:g}): {most} of {there}"
