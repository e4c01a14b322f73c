#!/usr/bin/env python
"""Converts a GGUF file into a model folder: weights dequantised to bfloat16, tokenizer mended, chat template kept."""

import argparse
import functools
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from aerie import cli
from aerie.errors import AerieError
from aerie.keys import file_sha256
from aerie.stage import Recipe, StageResult, run_stage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VERSION = 1


def main(args: argparse.Namespace) -> None:
    recipe = Recipe.read(args.recipe)

    def compute(work: Path, out: Path) -> StageResult:
        model = work / "model"
        shutil.rmtree(model, ignore_errors=True)
        convert(args.gguf, model)
        model.rename(out / "model")
        return StageResult()

    run_stage(recipe, VERSION, {"gguf": file_sha256(args.gguf)}, args.output, args.store, compute, args.log)


def convert(gguf: Path, folder: Path) -> None:
    """Writes config, safetensors (bfloat16), tokenizer and chat template of `gguf` into `folder`."""
    import gguf as package
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # A reader goes through the file's half a million fields, for seconds, and transformers makes three.
    read = functools.cache(package.GGUFReader)
    package.GGUFReader = lambda path, *_: read(str(path))  # type: ignore[assignment,misc]
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    mend_pre_tokenizer(tokenizer, gguf)
    model = AutoModelForCausalLM.from_pretrained(**source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def mend_pre_tokenizer(tokenizer: "PreTrainedTokenizerBase", gguf: Path) -> None:
    """Puts back what transformers' GGUF import drops: the pre-tokenizer named by tokenizer.ggml.pre.

    Without it digits are merged into numbers that the model never saw as single tokens.
    """
    from gguf import GGUFReader
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    known = {"smollm": lambda: Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)])}
    field = GGUFReader(gguf).fields.get("tokenizer.ggml.pre")
    name = str(bytes(field.parts[field.data[0]]), "utf-8") if field else "none"
    if name not in known:
        raise AerieError(
            f"{gguf}: its pre-tokenizer is {name!r}; Aerie knows how to rebuild {', '.join(known)}. Use the model's original folder as the "
            "target's path instead of a GGUF file."
        )
    tokenizer.backend_tokenizer.pre_tokenizer = known[name]()  # type: ignore[attr-defined]


if __name__ == "__main__":
    parser = cli.stage_parser(__doc__)
    parser.add_argument("--gguf", type=Path, required=True)
    cli.run(main, parser)
