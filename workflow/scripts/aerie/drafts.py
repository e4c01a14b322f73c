"""A draft on disk, trained here or made elsewhere: which files it is, and what kind."""

import json
from collections.abc import Callable
from pathlib import Path

from .errors import AerieError
from .keys import digest_of, file_sha256


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
