"""The target: where its folder is, its fingerprint (of content), its configuration, tokenizer and head weights."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import AerieError
from .keys import digest_of, file_sha256
from .stage import write_atomically

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

# What decides a target's behaviour: configuration, tokenizer, chat template, remote code and weights.
PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.py")


@dataclass(frozen=True)
class Target:
    """A target as results/targets/{target}/fingerprint.json describes it."""

    name: str
    digest: str
    location: dict[str, str]
    trust_remote_code: bool

    @classmethod
    def read(cls, fingerprint: Path) -> "Target":
        stored = json.loads(fingerprint.read_text())
        return cls(stored["name"], stored["digest"], stored["location"], stored["trust_remote_code"])

    @cached_property
    def folder(self) -> Path:
        """The local folder; a hub id is looked up in the hub's cache and downloaded if need be."""
        return locate(self.location)

    @cached_property
    def config(self) -> "PretrainedConfig":
        """The configuration as transformers reads it."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.folder, trust_remote_code=self.trust_remote_code)

    @cached_property
    def text_config(self) -> "PretrainedConfig":
        """The language model's part of the configuration (the whole of it, where there is no wrapper)."""
        return self.config.get_text_config()

    @property
    def num_layers(self) -> int:
        return int(self._setting("num_hidden_layers"))

    @property
    def hidden_size(self) -> int:
        return int(self._setting("hidden_size"))

    @property
    def vocab_size(self) -> int:
        """Rows of the output head, padding rows included."""
        return int(self._setting("vocab_size"))

    @property
    def max_positions(self) -> int | None:
        """Tokens of the longest sequence that the model takes; None where its configuration sets no limit."""
        found = self._setting("max_position_embeddings")
        return int(found) if found else None

    def _setting(self, name: str) -> Any:
        """A setting of the language model: from config.json where it is there, else as transformers fills it in.

        Reading the file spares cheap commands the import of transformers, which takes seconds.
        """
        stored = json.loads((self.folder / "config.json").read_text())
        stored = stored.get("text_config", stored)
        return stored[name] if name in stored else getattr(self.text_config, name, None)

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer, with its chat template."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder, trust_remote_code=self.trust_remote_code)

    def end_tokens(self, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
        """Ids at which generation stops: those of generation_config.json, of the configuration and of the tokenizer."""
        generation = self.folder / "generation_config.json"
        stops = [tokenizer.eos_token_id, getattr(self.text_config, "eos_token_id", None)]
        if generation.exists():
            stops.append(json.loads(generation.read_text()).get("eos_token_id"))
        flat = {token for stop in stops for token in (stop if isinstance(stop, list) else [stop]) if token is not None}
        return sorted(flat)

    def head_weights(self) -> "dict[str, torch.Tensor]":
        """embed_tokens [vocab, hidden], norm [hidden] and lm_head [vocab, hidden] in their stored dtype.

        Only these tensors are read. A tied head is the embedding. AerieError where one cannot be found, is quantised, or has
        another shape than the configuration says.
        """
        from safetensors import SafetensorError, safe_open

        where = weight_map(self.folder)
        shapes = {"embed_tokens": [self.vocab_size, self.hidden_size], "norm": [self.hidden_size]}
        shapes["lm_head"] = shapes["embed_tokens"]
        found = {}
        for part, name in head_names(where, self.text_config, self.folder).items():
            try:
                with safe_open(self.folder / where[name], framework="pt") as file:
                    tensor = file.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise AerieError(
                    f"{self.folder / where[name]}: {name} is to be there and cannot be read ({error}). Download or save the model anew."
                ) from error
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype not in ("float32", "bfloat16", "float16"):
                raise AerieError(
                    f"{self.folder}: {name} is {dtype} {list(tensor.shape)}: it is quantised, and a draft copies it as it is. Expected "
                    f"{shapes[part]} in float32, bfloat16 or float16: take a model whose embeddings, norm and head are not quantised."
                )
            if list(tensor.shape) != shapes[part]:
                raise AerieError(
                    f"{self.folder}: {name} is {list(tensor.shape)}, expected {shapes[part]} by config.json; mend the one or the other"
                )
            found[part] = tensor
        return found

    def aux_layer_ids(self, chosen: list[int] | None) -> list[int]:
        """The draft's aux layer ids: as chosen, or [2, n/2, n-3] of n layers, as in the EAGLE-3 reference.

        Id k is the input of decoder layer k. AerieError for ids that are not ascending, distinct and within 1…n-1.
        """
        n = self.num_layers
        ids = chosen or [2, n // 2, n - 3]
        if sorted(set(ids)) != list(ids) or ids[0] < 1 or ids[-1] >= n:
            source = "the draft's aux_layer_ids" if chosen else "the default aux layer ids [2, n/2, n-3]"
            raise AerieError(
                f"{source} are {ids}; target {self.name} has {n} layers. Expected ascending, distinct ids from 1 to {n - 1}: "
                "set the draft's aux_layer_ids accordingly"
            )
        return list(ids)


def head_names(where: dict[str, str], text_config: Any, folder: Path) -> dict[str, str]:
    """Names of the tensors embed_tokens, norm and lm_head among `where`; a tied head is the embedding."""
    embeddings = one_tensor(where, r"(^|\.)embed_tokens\.weight$")
    beside = f"{(embeddings or '').removesuffix('embed_tokens.weight')}norm.weight"  # a vision tower may have a norm with a shorter name
    names = {
        "embed_tokens": embeddings,
        "norm": beside if embeddings and beside in where else one_tensor(where, r"(^|\.)model\.norm\.weight$|^norm\.weight$"),
        "lm_head": one_tensor(where, r"(^|\.)lm_head\.weight$"),
    }
    if names["lm_head"] is None:
        packed = one_tensor(where, r"(^|\.)lm_head\.(weight_packed|qweight|weight_scale|scales)$")
        if packed:
            raise AerieError(
                f"{folder}: the head is there as {packed}: it is quantised, and a draft copies it as it is. Take a model whose head is not."
            )
        if getattr(text_config, "tie_word_embeddings", False):
            names["lm_head"] = names["embed_tokens"]
    missing = [part for part, name in names.items() if name is None]
    if missing:
        near = sorted(name for name in where if not re.search(r"\.\d+\.", name))[:8]
        raise AerieError(
            f"{folder}: no {' and no '.join(missing)} among the {len(where)} tensors of its safetensors files; expected names like "
            "model.embed_tokens.weight (the head may be missing only where tie_word_embeddings is true). "
            f"Outside its layers it has {', '.join(near) or 'nothing'}."
        )
    return {part: name for part, name in names.items() if name is not None}


def one_tensor(where: dict[str, str], pattern: str) -> str | None:
    """The name that matches, the shortest if several do (a wrapper's vision tower has longer names)."""
    return min((name for name in where if re.search(pattern, name)), key=lambda name: (len(name), name), default=None)


def weight_map(folder: Path) -> dict[str, str]:
    """{tensor name: safetensors file name} of a single-file or sharded model."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return dict(json.loads(index.read_text())["weight_map"])
    from safetensors import safe_open

    where = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            where.update(dict.fromkeys(file.keys(), path.name))
    if not where:
        raise AerieError(f"{folder}: no *.safetensors file; Aerie reads weights in safetensors only. Convert the model first.")
    return where


def locate(location: dict[str, str]) -> Path:
    """The local folder of {"path": …} or {"hub_id": …, "revision": …}; AerieError where it cannot be had."""
    if "path" in location:
        folder = Path(location["path"])
        if not (folder / "config.json").is_file():
            raise AerieError(f"{folder}: no config.json there; expected a model folder as transformers saves it. Check the target's path.")
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    hub_id, revision = location["hub_id"], location["revision"]
    cause: Exception | None = None
    for local in (True, False):  # what is complete in the cache asks no network
        try:
            folder = Path(
                snapshot_download(hub_id, revision=revision, allow_patterns=list(PATTERNS), etag_timeout=10, local_files_only=local)
            )
            if is_complete(folder):  # without a network the hub's client returns even a download that was cut short
                return folder
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            cause = error
    raise AerieError(
        f"target {hub_id} at revision {revision}: not (or not wholly) in the hub's cache "
        f"({os.environ.get('HF_HOME', '~/.cache/huggingface')}), and the hub could not be asked. Check the id, the revision and the "
        "network, or download it and set the target's path."
    ) from cause


def is_complete(folder: Path) -> bool:
    """Whether a folder has a configuration and every weight file that its index names (a download may have been cut short)."""
    if not (folder / "config.json").exists() or not any(folder.glob("*.safetensors")):
        return False
    return all((folder / file).exists() for file in set(weight_map(folder).values()))


def where_to_get(target: Target, files: Sequence[str]) -> str:
    """What to do about files that a target's folder lacks; no files: whichever these may be."""
    if "hub_id" in target.location:
        model, into = target.location["hub_id"], f"--revision {target.location['revision']}"
    else:
        model, into = "OWNER/NAME", f"--local-dir {target.folder}"
    return (
        f"Take {' and '.join(files) or 'what may be missing'} from the model's repository: `hf download {' '.join([model, *files, into])}`. "
        f"A download limited by allow_patterns or --include has to take {', '.join(PATTERNS)}"
    )


def fingerprint(name: str, location: dict[str, str], trust_remote_code: bool, cache: Path) -> dict[str, Any]:
    """The content of fingerprint.json: digest over the names and contents of every file that matters.

    cache: folder that keeps hashes by path, size, mtime, ctime and inode.
    """
    paths = target_files(locate(location))
    hashes = {path.name: _content_hash(path, cache) for path in paths}
    files = {path.name: {"sha256": hashes[path.name], "bytes": path.stat().st_size} for path in paths}
    digest = fingerprint_digest(hashes)
    return {"name": name, "digest": digest, "location": location, "trust_remote_code": trust_remote_code, "files": files}


def target_files(folder: Path) -> list[Path]:
    """The files of a model's folder that decide its fingerprint."""
    return sorted({path for pattern in PATTERNS for path in folder.glob(pattern)})


def fingerprint_digest(hashes: dict[str, str]) -> str:
    """A target's digest from the sha256 of each of its files, by name."""
    return digest_of(hashes)


def known_hash(path: Path, cache: Path) -> str | None:
    """sha256 of a file if it need not be read for that: it is the name of a large blob in the hub's cache, or in our cache."""
    real = path.resolve()
    if real.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", real.name):
        return real.name
    known = _cached(real, cache)
    return known.read_text() if known.exists() else None


def _content_hash(path: Path, cache: Path) -> str:
    """sha256 of a file, which is hashed once for each of its states on disk."""
    found = known_hash(path, cache)
    if found is None:
        found = file_sha256(path)
        known = _cached(path.resolve(), cache)
        known.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(known, found)
    return found


def _cached(real: Path, cache: Path) -> Path:
    stat = real.stat()
    state = digest_of([str(real), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino])
    return cache / state[:2] / state
