"""From what the user typed to a folder on this machine."""

import re
from pathlib import Path

from convert.gguf_file import gguf_of
from dflash_jax.errors import UserError

# Weights, configs, tokenizer, chat template; no pickles, no code, no other formats.
_PATTERNS = ["*.safetensors", "*.json", "*.jinja"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(name_or_path: str | Path, revision: str | None = None) -> Path:
    """The folder of a model, or its GGUF file: what exists itself, or a Hub id (`org/name`) fetched into the local
    cache. A folder that holds a GGUF file and no other kind of model stands for the file.

    Raises:
      UserError: no such folder, or the Hub has no such repository or cannot be reached.
    """
    path = Path(name_or_path).expanduser()
    if (file := gguf_of(path)) is not None:
        return file
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"{path}: a file; expected the folder of a model, or a .gguf file")
    if not isinstance(name_or_path, str) or not _HUB_ID.fullmatch(name_or_path):
        raise UserError(f"{name_or_path}: no such folder (and not a Hub id of the form org/name)")
    import huggingface_hub  # here, because it takes a second to import and most runs do not need it

    try:
        return Path(
            huggingface_hub.snapshot_download(name_or_path, revision=revision, allow_patterns=_PATTERNS)
        )
    except Exception as error:  # its HTTP client's errors have no common type with its own
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"{name_or_path}: no such folder, and fetching it from the Hub failed: {reason}"
        ) from None
