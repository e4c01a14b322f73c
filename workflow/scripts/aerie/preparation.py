"""From rows to samples: every row rendered by one of several workers, its samples kept on disk, its fate in a ledger.

What a sample is and which are chosen depends on the rows alone: not on their order, nor on the number of workers.
"""

import json
import multiprocessing
import os
import signal
import threading
from array import array
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from itertools import chain, islice
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .chat import Planned, Rendered, Renderer, Unusable, count_turns
from .conversations import Conversation, conversation_of, with_system
from .errors import AerieError, ProcessFailed, describe_exit
from .keys import digest_of
from .progress import Progress
from .samples import Sample
from .sources import RawRow, Source, limit_of, mixture

CHUNK_ROWS = 64  # rows that a worker takes at once …
CHUNK_CHARACTERS = 1 << 22  # … or fewer, where they are long
_SECONDS_BETWEEN_LOOKS = 10
NOT_COUNTED = ("duplicate", "not chosen")  # reasons that say nothing against a row


class Options(NamedTuple):
    """How rows become samples. tokenizer: a function that loads it (in each worker); vocab_size: of the target's head."""

    tokenizer: Callable[[], Any]
    end_tokens: Sequence[int]
    max_length: int
    vocab_size: int = 2**31
    system_prompt: str | None = None
    last_turn_only: bool = False
    template_options: dict[str, Any] | None = None


class Fate(NamedTuple):
    """What became of a row: its samples (as numbers), or the reason why there are none."""

    source: int
    file: str
    line: int
    reason: str
    detail: str
    samples: range


class Entry(NamedTuple):
    """A sample in the ledger; its tokens lie on disk. prompt: hash of its first user message, which decides the split."""

    order: bytes
    prompt: bytes
    source: int
    supervised: int
    turns: int


class Prepared:
    """All samples, and the fate of every row.

    tokens and mask of sample i are rows offsets[i]:offsets[i+1] of the files input_ids (int32) and loss_mask (uint8) in `folder`.
    """

    def __init__(self, folder: Path, sources: Sequence[str]) -> None:
        self.folder, self.sources = folder, list(sources)
        self.entries: list[Entry] = []
        self.fates: list[Fate] = []
        self.notes: list[Counter[str]] = [Counter() for _ in sources]
        self.lengths: list[int] = []
        self.chosen: dict[int, str] = {}  # sample: split, in canonical order

    def finish(self) -> None:
        """Opens the tokens on disk for reading."""
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        empty = not self.offsets[-1]
        self._ids, self._mask = (
            np.zeros(0, dtype) if empty else np.memmap(self.folder / name, dtype, "r")
            for name, dtype in (("input_ids", np.int32), ("loss_mask", np.uint8))
        )

    def sample(self, number: int) -> Sample:
        """A sample with its tokens."""
        begin, end = self.offsets[number], self.offsets[number + 1]
        entry = self.entries[number]
        return Sample(
            self._ids[begin:end].tolist(), self._mask[begin:end].tolist(), self.sources[entry.source], self.chosen.get(number, "train")
        )

    def fate_of(self, number: int) -> Fate:
        """The row that a sample came from."""
        # Samples are numbered in the order of their rows; of rows that begin at one number, the last is that with samples.
        return self.fates[bisect_right(self.fates, number, key=lambda fate: fate.samples.start) - 1]

    def samples(self) -> Iterator[Sample]:
        """The chosen samples in canonical order."""
        return map(self.sample, self.chosen)

    def rejects(self) -> Iterator[dict[str, Any]]:
        """{source, line, reason, detail} of each row of which no sample was chosen."""
        for fate in self.fates:
            if fate.reason:
                yield {"source": fate.file, "line": fate.line, "reason": fate.reason, "detail": fate.detail}


def prepare(sources: Sequence[str], rows: Iterable[tuple[int, RawRow]], options: Options, folder: Path, workers: int = 1) -> Prepared:
    """Renders, masks and truncates every row, in `workers` processes. sources: their names; rows: each with its source's number."""
    folder.mkdir(parents=True, exist_ok=True)
    prepared = Prepared(folder, sources)
    progress = Progress("prepare_dataset", 0, "rows")
    with open(folder / "input_ids", "wb") as ids, open(folder / "loss_mask", "wb") as mask:
        for chunk in _run(_chunks(rows), options, workers):
            ids.write(chunk.input_ids)
            mask.write(chunk.loss_mask)
            known = len(prepared.entries)
            prepared.entries += chunk.entries
            prepared.lengths += chunk.lengths
            prepared.fates += [fate._replace(samples=range(fate.samples.start + known, fate.samples.stop + known)) for fate in chunk.fates]
            for source, notes in chunk.notes.items():
                prepared.notes[source].update(notes)
            progress.total = progress.count + len(chunk.fates)
            progress.update(len(chunk.fates))
    progress.done()
    prepared.finish()
    return prepared


class _Chunk(NamedTuple):
    """What a worker made of some rows."""

    input_ids: bytes
    loss_mask: bytes
    lengths: list[int]
    entries: list[Entry]
    fates: list[Fate]
    notes: dict[int, Counter[str]]


def _chunks(rows: Iterable[tuple[int, RawRow]]) -> Iterator[list[tuple[int, RawRow]]]:
    chunk: list[tuple[int, RawRow]] = []
    characters = 0
    for number, row in rows:
        chunk.append((number, row))
        characters += len(row.data) if isinstance(row.data, str) else 1000
        if len(chunk) == CHUNK_ROWS or characters > CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _run(chunks: Iterator[list[tuple[int, RawRow]]], options: Options, workers: int) -> Iterator[_Chunk]:
    """The chunks' results in order; here where there is one worker or little to do, else in processes."""
    first = list(islice(chunks, 2))
    if workers == 1 or len(first) < 2:
        worker = Worker(options)
        yield from map(worker, chain(first, chunks))
        return
    # Forked, so that they start at once; this process has no engine and no thread that holds a lock.
    context = multiprocessing.get_context("fork")
    waiting: deque[Future[_Chunk]] = deque()
    others: list[BaseProcess] = []
    with ProcessPoolExecutor(workers, context, _start_worker, (options,)) as pool:
        try:
            for chunk in chain(first, chunks):
                waiting.append(pool.submit(_work, chunk))
                others = others or multiprocessing.active_children()
                if len(waiting) > 2 * workers:  # so many at once that no worker waits, and no more are held in memory
                    yield _result(waiting.popleft(), others)
            while waiting:
                yield _result(waiting.popleft(), others)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _result(future: "Future[_Chunk]", others: "list[BaseProcess]") -> _Chunk:
    """A worker's result. The pool itself waits for ever for the rest of one that was killed while it was sending its result."""
    while True:
        try:
            return future.result(timeout=_SECONDS_BETWEEN_LOOKS)
        except TimeoutError:
            if future.done():
                raise
            dead = [other for other in others if other.exitcode is not None]
            if dead:
                ended = f"worker process {dead[0].pid} {describe_exit(dead[0].exitcode or 0)}"
                raise ProcessFailed(f"{ended}; what it said is in the log") from None


_worker: "Worker"


def _start_worker(options: Options) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)  # the parent was killed: nobody waits for the results

    threading.Thread(target=follow, daemon=True).start()
    _worker = Worker(options)


def _work(chunk: list[tuple[int, RawRow]]) -> _Chunk:
    return _worker(chunk)


class Worker:
    """Makes samples of rows."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.renderer = Renderer(options.tokenizer(), options.end_tokens, options.template_options, options.last_turn_only)

    def __call__(self, chunk: list[tuple[int, RawRow]]) -> _Chunk:
        ids, masks, lengths = [], [], []
        entries: list[Entry] = []
        fates: list[Fate] = []
        all_notes: dict[int, Counter[str]] = {}
        # The template's turn for all rows, then the tokenizer's: each would drive the other out of the processor's caches.
        planned = [self.plan(conversation_of(row)) for _, row in chunk]
        for (source, row), (conversation, plan, notes) in zip(chunk, planned, strict=True):
            known = len(entries)
            reason, detail = "", ""
            try:
                samples, turns = self.samples(plan, notes)
            except Unusable as problem:
                samples, turns, notes = [], [], []
                reason, _, detail = str(problem).partition(": ")
            prompt = _prompt_hash(conversation, samples)
            for sample, count in zip(samples, turns, strict=True):
                entries.append(Entry(bytes.fromhex(sample.order), prompt, source, int(sum(sample.loss_mask)), count))
                ids.append(np.asarray(sample.input_ids, dtype="<i4").tobytes())
                masks.append(bytes(sample.loss_mask))
                lengths.append(len(sample.input_ids))
            fates.append(Fate(source, row.source, row.line, reason, detail, range(known, len(entries))))
            if notes:
                all_notes.setdefault(source, Counter()).update(notes)
        return _Chunk(b"".join(ids), b"".join(masks), lengths, entries, fates, all_notes)

    def plan(self, conversation: Conversation) -> tuple[Conversation, list[Rendered | Planned] | Unusable, list[str]]:
        """The conversation, its rows not yet encoded or why it gives none, and notes."""
        try:
            if conversation.problem:
                raise Unusable(conversation.problem)
            if conversation.tokens and max(conversation.tokens[0]) >= self.options.vocab_size:
                raise Unusable(f"wrong value: an input id is not below the target's vocabulary of {self.options.vocab_size}")
            if not conversation.tokens:
                conversation = conversation._replace(messages=with_system(conversation.messages, self.options.system_prompt))
            with _template_errors():
                plan, notes = self.renderer.plan(conversation)
        except Unusable as problem:
            return conversation, problem, []
        return conversation, plan, notes + list(conversation.notes)

    def samples(self, plan: list[Rendered | Planned] | Unusable, notes: list[str]) -> tuple[list[Sample], list[int]]:
        """The samples of a planned conversation, their numbers of supervised turns; adds to the notes. Raises Unusable."""
        if isinstance(plan, Unusable):
            raise plan
        with _template_errors():
            rendered = self.renderer.rows(plan)
        most = self.options.max_length
        notes += ["cut at max_length"] * sum(len(one.input_ids) > most for one in rendered)
        kept = [one for one in rendered if any(one.loss_mask[:most])]
        if not kept:
            first = min((one.loss_mask.index(1) + 1 for one in rendered if any(one.loss_mask)), default=0)
            if not first:
                raise Unusable(f"no supervised token: of the {sum(len(one.loss_mask) for one in rendered)} tokens, none has 1 in the mask")
            raise Unusable(f"no supervised token within max_length: the first is token {first}, max_length is {most}")
        turns = [one.turns if len(one.input_ids) <= most else count_turns(one.loss_mask[:most]) for one in kept]
        # Numbers in a row, which everything from here on would else make of the lists again.
        return [Sample(array("i", one.input_ids[:most]), bytes(one.loss_mask[:most]), "") for one in kept], turns


@contextmanager
def _template_errors() -> Iterator[None]:
    """A template may raise anything; its words become the reason."""
    try:
        yield
    except Unusable:
        raise
    except Exception as error:
        raise Unusable(f"chat template: {type(error).__name__}: {error}") from error


def _prompt_hash(conversation: Conversation, samples: Sequence[Sample]) -> bytes:
    """Hash of the first user message, or of the tokens before the first supervised one."""
    if not samples:
        return b""
    if conversation.tokens:
        ids, mask = conversation.tokens
        # A row that is supervised from its first token on does not say where its prompt ends: it stands for itself.
        return bytes.fromhex(digest_of(ids[: mask.index(1)] or ids))
    return bytes.fromhex(digest_of(next(message["content"] for message in conversation.messages if message["role"] == "user")))


def write_rejects(rejects: Iterable[Mapping[str, Any]], path: Path) -> None:
    """rejects.jsonl: {source, line, reason, detail, …} a row."""
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(reject) + "\n" for reject in rejects)


def check_rejected(faulty: Sequence[str], reasons: str, rows: int, max_rejected: float, where: Path) -> None:
    """AerieError where more than max_rejected of the rows cannot be used.

    faulty: "file:line: reason" of each of them. reasons: `by_reason` of all rejected rows; where: the file that lists them.
    """
    if len(faulty) > max_rejected * rows:
        first = "".join(f"\n  {one}" for one in faulty[:5])
        raise AerieError(
            f"{len(faulty):,} of {rows:,} rows cannot be used, more than the dataset's max_rejected of {max_rejected:g} allows. The first:"
            f"{first}\nBy reason: {reasons}. All are in {where}. Mend the rows, or raise max_rejected."
        )


def choose(prepared: Prepared, sources: Sequence[Source], validation_share: float, max_samples: int | None = None) -> None:
    """Chooses the samples, fills in `chosen`, and reason and detail of rows that have none of them.

    Exact duplicates are taken once; each source gives its samples of lowest hash, as many as its cap and the weights allow.
    Validation is chosen by the hash of the first user message, so it is stable when data is added or regenerated.
    """
    entries = prepared.entries
    canonical = sorted(range(len(entries)), key=lambda number: (entries[number].order, prepared.sources[entries[number].source], number))
    unique: list[int] = []
    twin_of: dict[int, int] = {}  # of each duplicate, the sample that is taken
    for number in canonical:
        if unique and entries[number].order == entries[unique[-1]].order:
            twin_of[number] = unique[-1]
        else:
            unique.append(number)
    taken: Counter[int] = Counter()
    there = Counter(entries[number].source for number in unique)
    # Where none of a source's samples is unique, each row that gave some is a duplicate.
    most = mixture(there, sources, lambda number: Counter(fate.reason or "duplicate" for fate in prepared.fates if fate.source == number))
    mixed = []
    for number in unique:
        source = entries[number].source
        if taken[source] < most[source]:
            taken[source] += 1
            mixed.append(number)
    prepared.chosen = limit(split(mixed, entries, validation_share), max_samples)
    within = set(mixed)
    for place, fate in enumerate(prepared.fates):
        if not fate.samples or any(number in prepared.chosen for number in fate.samples):
            continue
        own = [number for number in fate.samples if number not in twin_of]
        if not own:
            twin = prepared.fate_of(twin_of[fate.samples.start])
            reason, detail = "duplicate", f"same as {twin.file}:{twin.line}"
        elif any(number in within for number in own):
            reason, detail = "not chosen", f"beyond max_samples of {max_samples} for the whole dataset"
        else:
            reason, detail = "not chosen", limit_of(sources[fate.source], most[fate.source], there[fate.source])
        prepared.fates[place] = fate._replace(reason=reason, detail=detail)


def split(numbers: Sequence[int], entries: Sequence[Entry], share: float) -> dict[int, str]:
    """{sample: split}: validation where the first message's hash falls into the share; at least one message does."""
    prompts = {entries[number].prompt for number in numbers}
    first = min(prompts, default=b"")
    border = share * 2**32
    return {
        number: "validation" if int.from_bytes(prompt[:4]) < border or prompt == first else "train"
        for number in numbers
        if (prompt := entries[number].prompt) is not None
    }


def limit(chosen: dict[int, str], most: int | None) -> dict[int, str]:
    """The `most` samples of lowest hash in canonical order, so that a larger number contains the smaller.

    Where these happen to be of one split only, the last is exchanged for the first of the other.
    """
    kept = list(islice(chosen.items(), most))
    for wanted in ("train", "validation"):
        if len(kept) > 1 and not any(name == wanted for _, name in kept):
            kept = kept[:-1] + [pair for pair in chosen.items() if pair[1] == wanted][:1]
    return dict(kept)
