"""A draft on disk, trained here or made elsewhere: which files it is, and what kind."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .errors import AerieError
from .keys import digest_of, file_sha256

_TRAINED_HERE = ("speculators_config", "transformer_layer_config", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids")


def draft_files(folder: Path) -> list[Path]:
    """The configuration and weights of a draft; AerieError where the folder has none."""
    weights = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    if not (folder / "config.json").is_file() or not weights:
        raise AerieError(
            f"{folder}: expected a draft's config.json and weights (*.safetensors or *.bin) there. Check the draft's path; "
            "one that is to be trained needs no path."
        )
    return [folder / "config.json", *weights]


def files_digest(folder: Path, digest_of_file: Callable[[Path], str] = file_sha256) -> str:
    """Content digest of a draft that was made elsewhere and so has no manifest."""
    return digest_of({path.name: digest_of_file(path) for path in draft_files(folder)})


def check_first_draft(folder: Path, layers: int, aux_layer_ids: Sequence[int] | None) -> dict[str, Any]:
    """The config.json of a draft; AerieError where one of so many layers cannot start from it, as far as that tells. None: default ids."""
    config = folder / "config.json"
    try:
        found: dict[str, Any] = json.loads(config.read_text())
        lacking = [name for name in _TRAINED_HERE if name not in found]
    except (OSError, ValueError) as error:
        raise AerieError(f"{config}: cannot be read ({error}); expected a draft as train_draft writes it.") from error
    if lacking:
        raise AerieError(f"{config}: it has no {lacking[0]}; a draft can start only from one that train_draft or speculators wrote.")
    own, own_ids = found["transformer_layer_config"]["num_hidden_layers"], found["eagle_aux_hidden_state_layer_ids"]
    if own != layers:
        raise AerieError(f"{config}: that draft has {own} layers, this one {layers}. Set layers: {own}.")
    if aux_layer_ids is not None and sorted(aux_layer_ids) != sorted(own_ids):
        raise AerieError(f"{config}: that draft reads layers {own_ids}, this one {list(aux_layer_ids)}. Set aux_layer_ids: {own_ids}.")
    return found


def check_kind(folder: Path) -> None:
    """AerieError for a folder that holds no EAGLE-3 draft: speculators' format, or one with "Eagle3" in its architecture."""
    draft_files(folder)
    config = folder / "config.json"
    try:
        found = json.loads(config.read_text())
        kind = found.get("speculators_model_type") or ", ".join(found.get("architectures") or []) or "not named"
    except (OSError, ValueError) as error:
        kind = f"unreadable ({error})"
    if "eagle3" not in kind.lower():
        raise AerieError(f"{config}: its kind is {kind}; expected an EAGLE-3 draft, as train_draft or speculators writes it.")
