"""Hidden states on disk: one immutable safetensors file a shard, keyed by sample, read by memory map.

`<store>/hidden_states/<capture key>/<digest>.safetensors`, readable by any safetensors reader:

    offsets        [samples + 1] int64          sample i is rows offsets[i]:offsets[i + 1]
    token_ids      [tokens] int32
    scales         [tokens, layers] float32     only for float8: value = stored * scale
    hidden_states  [tokens, layers, hidden]     float32, bfloat16 or float8 (F8_E4M3); layers in ascending id

The header's metadata carries the sample keys, the capture (key, layer ids, dtypes, engine, versions, provenance) and the seconds
that the extraction of these tokens took. A file's name is the sha256 of its bytes (32 hex digits), so `sha256sum` finds
damage; a shorter or longer file than its header promises is never read.
"""

import fcntl
import hashlib
import json
import math
import os
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd

from . import cli
from .errors import AerieError
from .files import is_damage, replacing, sync_folder, write_atomically
from .keys import canonical_json, digest_of, file_sha256, sample_key
from .stage import read_manifest

if TYPE_CHECKING:
    import torch

Given = TypeVar("Given")
Found = TypeVar("Found")

VERSION = 1  # raised when the same settings would give other states or another file format
BUCKETS = 256
SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float8": "F8_E4M3"}
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float8": 1}
_FLOAT8_MAX = 448.0
_HEADER_BYTES = 16384  # one read takes an ordinary header
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_STALE_SECONDS = 60
_LOOKUP = ".lookup.parquet"  # in a capture's folder: what the last lookup read of its shards
_FAILED = "failed"  # in a capture's folder: a text for each sample that has no states
_CHECKED_BYTES = 64 * 2**20
REMEDY = "Delete this shard and run `snakemake --forcerun find_missing_states`; only its samples are extracted anew."


def capture_key(
    fingerprint: str,
    layer_ids: Iterable[int],
    stored_dtype: str,
    compute_dtype: str,
    engine_family: str,
    value_options: Mapping[str, Any] | None = None,
) -> str:
    """Key of everything that decides a sample's states, apart from its tokens.

    engine_family: "vllm" or "transformers"; its version and its other options are only recorded in the shards.
    value_options: engine options that change what is computed, such as a quantization.
    """
    return digest_of(
        {
            "version": VERSION,
            "target": fingerprint,
            "layer_ids": sorted(set(layer_ids)),
            "stored_dtype": stored_dtype,
            "compute_dtype": compute_dtype,
            "engine": engine_family,
        }
        | ({"value_options": dict(value_options)} if value_options else {})
    )


def bucket_of(key: str) -> int:
    """The bucket (0 to 255) that a sample's key falls into; locks and parts go by bucket."""
    return int(key[:2], 16)


def part_of(key: str, parts: int) -> int:
    """Which of `parts` parts extracts this sample."""
    return bucket_of(key) * parts // BUCKETS


def row_bytes(layers: int, hidden_size: int, stored_dtype: str) -> int:
    """Bytes a token takes in a shard: its states, its scales if any, and its id."""
    scales = 4 * layers if stored_dtype == "float8" else 0
    return layers * hidden_size * _ITEM_BYTES[stored_dtype] + scales + 4


def torch_dtype(stored_dtype: str) -> "torch.dtype":
    """The torch dtype of a stored dtype's name; AerieError for a name that is none."""
    import torch

    found = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn}
    if stored_dtype not in found:
        raise AerieError(f"stored_dtype {stored_dtype!r}: expected one of {', '.join(found)}")
    return found[stored_dtype]


def encode(states: "torch.Tensor", stored_dtype: str) -> "tuple[torch.Tensor, torch.Tensor | None]":
    """States [tokens, layers, hidden] in the stored dtype, on their device; for float8 with scales [tokens, layers].

    A float8 value is the state divided by its token's and layer's scale, which maps the largest magnitude to 448.
    """
    import torch

    if stored_dtype != "float8":
        return states.to(torch_dtype(stored_dtype)), None
    wide = states.float()
    scales = wide.abs().amax(dim=-1) / _FLOAT8_MAX
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return (wide / scales.unsqueeze(-1)).to(torch.float8_e4m3fn), scales


def decode(states: "torch.Tensor", scales: "torch.Tensor | None") -> "torch.Tensor":
    """The inverse of `encode`: float8 comes back as bfloat16, the others as they are."""
    import torch

    if scales is None:
        return states
    return (states.float() * scales.unsqueeze(-1)).to(torch.bfloat16)


class StoredSample(NamedTuple):
    """A sample ready to be written: states [tokens, layers, hidden] and scales as `encode` gives them, on the CPU."""

    key: str
    token_ids: np.ndarray
    states: "torch.Tensor"
    scales: "torch.Tensor | None"


@dataclass(frozen=True)
class Capture:
    """What a folder of shards holds, as each shard's header repeats it."""

    key: str
    layer_ids: tuple[int, ...]
    stored_dtype: str
    compute_dtype: str
    engine: str
    versions: dict[str, str]
    engine_options: dict[str, Any]
    provenance: dict[str, Any] = field(default_factory=dict)

    def header(self) -> dict[str, Any]:
        """What a shard's metadata says of it."""
        known = {name: value for name, value in vars(self).items() if name != "provenance" or value}
        return known | {"layer_ids": list(self.layer_ids), "version": VERSION}


@dataclass(frozen=True)
class Shard:
    """A shard's header, checked against the file: keys[i] has rows offsets[i]:offsets[i + 1]."""

    path: Path
    capture_key: str
    keys: list[str]
    offsets: np.ndarray
    layers: int
    hidden_size: int
    stored_dtype: str
    seconds: float
    engine: str
    data_start: int  # byte of the file at which the tensors begin: offsets, then token_ids

    @property
    def tokens(self) -> int:
        return int(self.offsets[-1])

    def token_ids(self) -> np.ndarray:
        """All token ids of the shard [tokens] int32."""
        with open(self.path, "rb") as file:
            file.seek(self.data_start + self.offsets.nbytes)
            return np.frombuffer(file.read(4 * self.tokens), dtype="<i4")

    def check(self) -> None:
        """Reads all of the shard; DamagedShard where its bytes are not its name's, its ids not its keys' or a value not finite."""
        if self.path.stem != file_sha256(self.path)[:32]:
            raise DamagedShard(f"{self.path}: its bytes have another sha256 than its name says. {REMEDY}")
        ids = self.token_ids()
        for i, key in enumerate(self.keys):
            if sample_key(ids[self.offsets[i] : self.offsets[i + 1]]) != key:
                raise DamagedShard(f"{self.path}: its token ids are not those of sample {key}. {REMEDY}")
        layout = _layout(len(self.keys), self.tokens, self.layers, self.hidden_size, self.stored_dtype)
        for name in {"scales", "hidden_states"} & set(layout):
            start, end = layout[name]["data_offsets"]
            for first in range(start, end, _CHECKED_BYTES):
                size = min(_CHECKED_BYTES, end - first)
                if not _all_finite(np.fromfile(self.path, np.uint8, size, offset=self.data_start + first), layout[name]["dtype"]):
                    raise DamagedShard(f"{self.path}: its {name} hold infinities or NaN. {REMEDY}")


def _all_finite(raw: np.ndarray, dtype: str) -> bool:
    """Whether values given as bytes are finite. bfloat16 has all exponent bits set where not, float8 all bits but the sign."""
    if dtype == "F32":
        return bool(np.isfinite(raw.view("<f4")).all())
    bits, mask = (raw.view("<u2"), 0x7F80) if dtype == "BF16" else (raw, 0x7F)
    return not bool(((bits & mask) == mask).any())


class DamagedShard(AerieError):
    """A shard that cannot be trusted."""


def read_shard(path: Path) -> Shard:
    """Reads and checks a shard's header; DamagedShard says what is wrong with it, another AerieError why it could not be looked at."""
    try:
        with open(path, "rb", buffering=_HEADER_BYTES) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # a lookup is to read no more of each shard
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise ValueError(f"{size} bytes are too few for its header")
            header = json.loads(file.read(length))
            meta = header.pop("__metadata__")
            end = 8 + length + max(int(entry["data_offsets"][1]) for entry in header.values())
            if end != size:
                raise ValueError(f"it has {size} bytes, and its header promises {end}")
            keys = json.loads(meta["sample_keys"])
            raw = file.read(8 * (len(keys) + 1))
        offsets = np.frombuffer(raw, dtype="<i8")
        stored = header["hidden_states"]
        tokens, layers, hidden_size = stored["shape"]
        capture = _capture_of(meta["capture"])
        expected = _layout(len(keys), tokens, layers, hidden_size, capture["stored_dtype"])
        if header != expected or layers != len(capture["layer_ids"]):
            raise ValueError("its tensors are not those that its metadata describes")
        if offsets[0] != 0 or offsets[-1] != tokens or (np.diff(offsets) <= 0).any():
            raise ValueError("its offsets do not divide its tokens into samples")
        return Shard(
            path=path,
            capture_key=capture["key"],
            keys=keys,
            offsets=offsets,
            layers=layers,
            hidden_size=hidden_size,
            stored_dtype=capture["stored_dtype"],
            seconds=float(meta["seconds"]),
            engine=capture["engine"],
            data_start=8 + length,
        )
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        if isinstance(error, OSError) and not is_damage(error):
            raise AerieError(f"{path}: this shard of hidden states may not be read: {error}. Mend that; the shard may be whole.") from error
        raise DamagedShard(f"{path}: this shard of hidden states cannot be read: {str(error) or repr(error)}. {REMEDY}") from error


@cache
def _capture_of(text: str) -> dict[str, Any]:
    """A capture as shards name it: the same in most, so read once."""
    found: dict[str, Any] = json.loads(text)
    return found


def _layout(samples: int, tokens: int, layers: int, hidden_size: int, stored_dtype: str) -> dict[str, Any]:
    """The safetensors header (without metadata). Widest items first, so that every tensor is aligned."""
    tensors: list[tuple[str, str, list[int], int]] = [
        ("offsets", "I64", [samples + 1], 8),
        ("token_ids", "I32", [tokens], 4),
        ("scales", "F32", [tokens, layers], 4),
        ("hidden_states", SAFETENSORS_DTYPES[stored_dtype], [tokens, layers, hidden_size], _ITEM_BYTES[stored_dtype]),
    ]
    if stored_dtype != "float8":
        del tensors[2]
    header, start = {}, 0
    for name, dtype, shape, item in tensors:
        end = start + item * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        start = end
    return header


def shard_header(capture: Capture, keys: Sequence[str], tokens: int, hidden_size: int, seconds: float) -> bytes:
    """What a shard begins with, up to its tensors: the header's length, and the header, filled up to a multiple of 8 bytes."""
    metadata = {
        "format": "aerie hidden states",
        "sample_keys": canonical_json(keys),
        "capture": canonical_json(capture.header()),
        "seconds": f"{seconds:.6f}",
    }
    layout = _layout(len(keys), tokens, len(capture.layer_ids), hidden_size, capture.stored_dtype)
    header = json.dumps({"__metadata__": metadata, **layout}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


class HiddenStateStore:
    """The shards of one capture: `<store root>/hidden_states/<capture key>/`."""

    def __init__(self, root: Path, key: str) -> None:
        self.root, self.key = Path(root), key
        self.folder = self.root / "hidden_states" / key

    def shards(self) -> list[Shard]:
        """Every readable shard, by name. A damaged one is named in a warning and left out: its samples are missing."""
        return self._read(sorted(path.name for path in self.folder.glob("*.safetensors")))

    def _read(self, names: Sequence[str]) -> list[Shard]:
        return [shard for shard in _in_threads(self._read_or_none, [self.folder / name for name in names]) if shard is not None]

    def _read_or_none(self, path: Path) -> Shard | None:
        try:
            shard = read_shard(path)
            if shard.capture_key != self.key:
                raise DamagedShard(f"{path}: this shard belongs to capture {shard.capture_key}, not to its folder's. Move it there.")
            return shard
        except DamagedShard as error:
            if os.path.lexists(path):
                cli.say(f"warning: {error} Until then its samples count as missing.")
            return None

    def known(self, remember: bool = False) -> pd.DataFrame:
        """One row a stored sample: sample_key, shard (file name), sample (position in the shard), tokens, seconds (of the shard's).

        A shard that an earlier lookup read, with the size and time that it still has, is not opened again. remember: for
        later lookups, where the store can be written to.
        """
        there = self._listing()
        before = self._remembered().merge(there, on=list(there.columns))
        new = there[~among(there["shard"], set(before["shard"].to_list()))]
        read = self._read(list(new["shard"]))
        unread = set(new["shard"].to_list()) - {shard.path.name for shard in read}
        if not all(os.path.lexists(self.folder / name) for name in unread):
            return self.known(remember)  # `snakemake gc` has packed what was left of it into another
        found = pd.concat([before, _table(read).merge(new, on="shard")], ignore_index=True)
        if remember and len(new):
            with suppress(OSError):
                write_table(found, self.folder / _LOOKUP)
        return found.drop(columns=["bytes", "mtime"]).drop_duplicates("sample_key", ignore_index=True)

    def _listing(self) -> pd.DataFrame:
        """shard, bytes, mtime (ns) of each shard, by name."""
        rows = []
        with suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.endswith(".safetensors"):
                    try:
                        stat = entry.stat()
                        rows.append((entry.name, stat.st_size, stat.st_mtime_ns))
                    except FileNotFoundError:  # it has just gone, as `known` will see
                        rows.append((entry.name, 0, 0))
        return pd.DataFrame(sorted(rows), columns=["shard", "bytes", "mtime"]).astype({"shard": "str", "bytes": "int64", "mtime": "int64"})

    def _remembered(self) -> pd.DataFrame:
        """What the last lookup noted: the columns of `known`, with the shards' bytes and mtime."""
        empty = _table([]).assign(bytes=np.int64(0), mtime=np.int64(0))
        try:
            return pd.read_parquet(self.folder / _LOOKUP, columns=list(empty.columns))
        except (OSError, ValueError, KeyError):  # none, or of another kind
            return empty

    def write_shard(self, capture: Capture, samples: Sequence[StoredSample], seconds: float) -> Path:
        """Writes samples as one shard, durably, and returns its path.

        seconds: wall time that extracting them took. Either the whole file is there under its name, or nothing is.
        Raises OSError where the file system refuses.
        """
        lengths = [len(sample.token_ids) for sample in samples]
        for sample, length in zip(samples, lengths, strict=True):
            _check_sample(sample, length, capture)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype("<i8")
        hidden_size = samples[0].states.shape[2]
        header = shard_header(capture, [sample.key for sample in samples], int(offsets[-1]), hidden_size, seconds)

        def parts() -> Iterator[Any]:
            yield header
            yield offsets
            for sample in samples:
                yield sample.token_ids.astype("<i4")
            for sample in samples:
                if sample.scales is not None:
                    yield _bytes_of(sample.scales)
            for sample in samples:
                yield _bytes_of(sample.states)

        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".{uuid.uuid4().hex}.tmp"
        try:
            with open(temporary, "wb") as file, ThreadPoolExecutor(1) as beside:
                fcntl.flock(file, fcntl.LOCK_EX)  # says that its writer lives, see remove_stale
                digest = beside.submit(_sha256, parts())  # hashing takes as long as writing
                for part in parts():
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
                path = self.folder / f"{digest.result()[:32]}.safetensors"
                temporary.replace(path)
            sync_folder(self.folder)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return path

    def failed(self) -> set[str]:
        """Keys of the samples that `note_failed` noted."""
        with suppress(FileNotFoundError):
            return {path.stem for path in (self.folder / _FAILED).iterdir() if path.suffix == ".txt"}
        return set()

    def why_failed(self, key: str) -> str:
        """The cause noted for a failed sample."""
        return (self.folder / _FAILED / f"{key}.txt").read_text().strip()

    def note_failed(self, causes: Mapping[str, str]) -> None:
        """Notes {sample key: cause} of samples for which the target has no states, so that they need not be tried each time."""
        folder = self.folder / _FAILED
        folder.mkdir(parents=True, exist_ok=True)
        for key, cause in causes.items():
            write_atomically(folder / f"{key}.txt", f"{cause}\n")

    def verify_token_ids(self, table: pd.DataFrame) -> None:
        """Checks the token ids of the samples that a `known` table lists; DamagedShard where they are not the key's."""
        samples: dict[str, list[tuple[str, int]]] = {}
        for name, key, sample in zip(table["shard"], table["sample_key"], table["sample"], strict=True):
            samples.setdefault(name, []).append((key, sample))

        def verify(name: str) -> None:
            shard = read_shard(self.folder / name)
            ids = shard.token_ids()
            for key, sample in samples[name]:
                if shard.keys[sample] != key or sample_key(ids[shard.offsets[sample] : shard.offsets[sample + 1]]) != key:
                    raise DamagedShard(f"{shard.path}: its token ids are not those of sample {key}. {REMEDY}")

        _in_threads(verify, sorted(samples))

    def remove_stale(self) -> None:
        """Removes what killed writers left: temporary files that nobody holds a lock on."""
        for path in self.folder.glob(".*.tmp"):
            try:
                with open(path, "r+b") as file:  # NFS gives an exclusive lock only on a file that is open for writing
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # A writer that has just made the file may not hold its lock yet.
                    if time.time() - os.fstat(file.fileno()).st_mtime > _STALE_SECONDS:
                        path.unlink()
            except (BlockingIOError, FileNotFoundError, PermissionError):  # the last: another user's
                continue

    @contextmanager
    def locked(self, buckets: Iterable[int]) -> Iterator[None]:
        """Holds the locks of key buckets, waiting for other processes; ascending, so that nobody waits in a ring.

        The kernel frees them when this process and what it forked are gone, however they ended.
        """
        folder = self.folder / ".locks"
        with ExitStack() as stack:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                files = [stack.enter_context(open(folder / f"{bucket:02x}", "ab")) for bucket in sorted(set(buckets))]
            except OSError as error:
                raise AerieError(f"the store cannot be written to: {error}. Make it writable, or set another store.") from error
            waited = False
            for file in files:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if not waited:
                        cli.say(f"another process extracts some of the same samples; waiting for {folder}")
                        waited = True
                    fcntl.flock(file, fcntl.LOCK_EX)
                except OSError as error:
                    raise AerieError(
                        f"{folder}: its file system gives no locks ({error}). Keep the store on one that does, "
                        "see Shared file systems in config/README.md."
                    ) from error
            yield


def _in_threads(function: Callable[[Given], Found], items: Sequence[Given]) -> list[Found]:
    """function of each item, in their order, in threads that wait for the file system; many at once, as threads cost too."""
    chunks = [items[first : first + 64] for first in range(0, len(items), 64)]
    with ThreadPoolExecutor(16) as pool:
        return [found for chunk in pool.map(lambda chunk: list(map(function, chunk)), chunks) for found in chunk]


def among(column: pd.Series, keys: Container[str]) -> np.ndarray:
    """Which of a column's texts are among the keys, bool; for millions, where pandas' isin takes ten times as long."""
    return np.fromiter((text in keys for text in column.to_list()), dtype=bool, count=len(column))


def _table(shards: Sequence[Shard]) -> pd.DataFrame:
    """One row for each sample of each shard, see `HiddenStateStore.known`."""
    return pd.DataFrame(
        {
            "sample_key": np.concatenate([np.array(shard.keys, dtype=object) for shard in shards] or [np.array([], dtype=object)]),
            "shard": np.repeat(np.array([shard.path.name for shard in shards], dtype=object), [len(shard.keys) for shard in shards]),
            "sample": np.concatenate([np.arange(len(shard.keys)) for shard in shards] or [np.array([], dtype=np.int64)]).astype(np.int64),
            "tokens": np.concatenate([np.diff(shard.offsets) for shard in shards] or [np.array([], dtype=np.int64)]).astype(np.int64),
            "seconds": np.concatenate(
                [np.diff(shard.offsets) * (shard.seconds / shard.tokens) for shard in shards] or [np.array([], dtype=np.float64)]
            ),
        }
    ).astype({"sample_key": "str", "shard": "str"})


def write_table(table: pd.DataFrame, path: Path) -> None:
    """Writes a parquet file, see `replacing`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        table.to_parquet(temporary, index=False)


def _check_sample(sample: StoredSample, length: int, capture: Capture) -> None:
    """The last check before the disk: shapes, dtype, and that the key is that of these very tokens."""
    shape, dtype = tuple(sample.states.shape), sample.states.dtype
    if length == 0 or shape[:2] != (length, len(capture.layer_ids)) or dtype != torch_dtype(capture.stored_dtype):
        raise AerieError(
            f"sample {sample.key}: states {shape} {dtype}; expected [{length}, {len(capture.layer_ids)}, hidden] {capture.stored_dtype}"
        )
    if sample_key(sample.token_ids) != sample.key:
        raise AerieError(f"sample {sample.key}: its token ids have another key, {sample_key(sample.token_ids)}")


def _sha256(parts: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _bytes_of(tensor: "torch.Tensor") -> memoryview:
    """A contiguous CPU tensor's bytes, without a copy."""
    import torch

    return memoryview(tensor.contiguous().view(torch.uint8).numpy().reshape(-1))


def _places(table: pd.DataFrame) -> dict[str, tuple[str, int, int]]:
    """{sample key: (shard, position, tokens)} of a samples table."""
    return {
        key: (shard, int(sample), int(tokens))
        for key, shard, sample, tokens in zip(table["sample_key"], table["shard"], table["sample"], table["tokens"], strict=True)
    }


class StatesIndex:
    """The hidden states of one dataset, by sample key: results/hidden_states/{target}/{dataset}/{capture}/.

    Reads only the rows asked for, by memory map; at most `max_open` shards stay open. Safe to use from several threads,
    and to pickle for other processes.
    """

    def __init__(self, folder: Path, store_root: Path, max_open: int = 64) -> None:
        manifest = read_manifest(Path(folder))
        self.capture_key: str = manifest["capture_key"]
        self.digest: str = manifest["digest"]
        self.layer_ids: list[int] = manifest["layer_ids"]
        self.failed: set[str] = set(manifest.get("failed", ()))  # the dataset's samples that have no states
        self.stored_dtype: str = manifest["settings"]["stored_dtype"]
        self.max_open = max_open
        self._store = HiddenStateStore(store_root, self.capture_key)
        self._shard_folder = self._store.folder
        self._places = _places(pd.read_parquet(Path(folder) / "index.parquet"))
        self._open: OrderedDict[str, tuple[Any, np.ndarray]] = OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_open", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open, self._lock = OrderedDict(), threading.Lock()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def keys(self) -> list[str]:
        """Sample keys, in the index's order."""
        return list(self._places)

    def tokens(self, key: str) -> int:
        """Length of a sample in tokens."""
        return self._place(key)[2]

    def states(self, key: str) -> "torch.Tensor":
        """States [tokens, layers, hidden] in the stored dtype (float8 comes back as bfloat16)."""
        file, rows = self._rows(key)
        scales = file.get_slice("scales")[rows] if self.stored_dtype == "float8" else None
        return decode(file.get_slice("hidden_states")[rows], scales)

    def token_ids(self, key: str) -> np.ndarray:
        """Token ids [tokens] int32; AerieError if they are not those of the key."""
        file, rows = self._rows(key)
        ids: np.ndarray = file.get_slice("token_ids")[rows].numpy()
        if sample_key(ids) != key:
            raise DamagedShard(f"{self._shard_folder / self._place(key)[0]}: its token ids are not those of sample {key}. {REMEDY}")
        return ids

    def _place(self, key: str) -> tuple[str, int, int]:
        try:
            return self._places[key]
        except KeyError:
            raise AerieError(
                f"sample {key}: no hidden states in this index of {len(self._places)} samples; made for another dataset. Run snakemake."
            ) from None

    def _rows(self, key: str) -> tuple[Any, slice]:
        if not self._is_there(self._place(key)[0]):
            # `snakemake gc` packs what is left of a shard into another; the states are the same.
            known = self._store.known()
            self._places |= _places(known[among(known["sample_key"], self._places)])
        name, sample, tokens = self._place(key)
        file, offsets = self._shard(name)
        start, end = int(offsets[sample]), int(offsets[sample + 1])
        if end - start != tokens:
            raise DamagedShard(
                f"{self._shard_folder / name}: sample {key} has {end - start} tokens there, and {tokens} in the index. {REMEDY}"
            )
        return file, slice(start, end)

    def _is_there(self, name: str) -> bool:
        return name in self._open or (self._shard_folder / name).exists()

    def _shard(self, name: str) -> tuple[Any, np.ndarray]:
        with self._lock:
            if name in self._open:
                self._open.move_to_end(name)
                return self._open[name]
            from safetensors import safe_open

            shard = read_shard(self._shard_folder / name)
            self._open[name] = (safe_open(shard.path, framework="pt"), shard.offsets)
            if len(self._open) > self.max_open:
                self._open.popitem(last=False)  # closed when the last reader drops it
            return self._open[name]
