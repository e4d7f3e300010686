"""`python -m convert SRC DST`: a Hugging Face model folder -> an Orbax folder, which loads to any sharding."""

import argparse
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

from convert import gguf_tokenizer, orbax_io
from convert.command import finish
from convert.hub import resolve_model
from convert.keymap import abstract_drafter, abstract_mtp, abstract_target, match_target
from convert.load import (
    is_drafter,
    open_drafter,
    open_source,
    read_config,
    read_target_config,
    read_tensors,
    stored_dtype,
)
from convert.save import tensor_name
from convert.source import shapes_of
from dflash_jax.errors import UserError

_PROGRAM = "python -m convert"


def convert(
    src: Path, dst: Path, dtype: str = "auto", *, overwrite: bool = False, progress: bool | None = None
) -> int:
    """Converts a target's or a drafter's folder; returns the bytes of the weights written.

    Args:
      src: Hugging Face or Orbax folder, or GGUF file.
      dst: Orbax folder to write, whole or not at all.
      dtype: "auto" (as stored), "bfloat16" or "float32".
      overwrite: replace an existing `dst`.
      progress: show a bar on stderr; None only on a terminal.
    """
    # Said before the long part; writing looks again.
    if dst.exists() and not overwrite:
        raise UserError(f"{dst}: exists; name another folder or pass --overwrite")
    if dst.exists() and (not dst.is_dir() or dst.resolve() == src.resolve()):
        raise UserError(f"{dst}: not a folder that can be replaced (it is the source, or a file)")
    raw = read_config(src)
    if is_drafter(raw):
        config, source, keys, notes = open_drafter(src, None)
        kind = stored_dtype(src) if dtype == "auto" else jnp.dtype(dtype)
        abstract, names = abstract_drafter(config, kind), keys.weights
    else:
        target = read_target_config(src)
        source, notes = open_source(src), []
        keys = match_target(target, shapes_of(source), str(src))
        kind = stored_dtype(src) if dtype == "auto" else jnp.dtype(dtype)
        abstract = abstract_target(target, kind) | (abstract_mtp(target, kind) if keys.mtp else {})
        names = keys.weights | keys.mtp
    if keys.skipped:
        notes.append(
            f"{src}: {len(keys.skipped)} tensors skipped by rule (vision tower, copies of a tied head)"
        )
    for note in notes:
        print(f"{_PROGRAM}: {note}", file=sys.stderr)
    # On the host, whatever accelerator there is: a model need not fit on one device to be converted.
    host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    values = read_tensors(source, names, abstract, host, progress, "reading")
    stored = values if is_drafter(raw) else {tensor_name(name): array for name, array in values.items()}
    with tempfile.TemporaryDirectory() as scratch:
        side = src
        if src.is_file():
            side = Path(scratch)
            gguf_tokenizer.write_side_files(src, side)
        orbax_io.write(dst, stored, side, overwrite=overwrite)
    return sum(array.nbytes for array in values.values())


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status (2: the user can put it right)."""
    parser = argparse.ArgumentParser(prog=_PROGRAM, description=__doc__)
    parser.add_argument(
        "src", metavar="SRC", help="a Hugging Face model folder, Hub id or GGUF file, target or DFlash drafter"
    )
    parser.add_argument("dst", metavar="DST", type=Path, help="the Orbax folder to write")
    parser.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="auto: as stored"
    )
    parser.add_argument("--revision", help="branch, tag or commit of a Hub id")
    parser.add_argument("--overwrite", action="store_true", help="replace DST if it exists")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args(argv)

    def work() -> int:
        src = resolve_model(args.src, args.revision)
        return convert(
            src, args.dst, args.dtype, overwrite=args.overwrite, progress=False if args.quiet else None
        )

    return finish(_PROGRAM, args.dst, work)


if __name__ == "__main__":
    sys.exit(main())
