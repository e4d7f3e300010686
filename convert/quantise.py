"""`python -m convert.quantise SRC DST`: a DFlash drafter in 8 bits, a Hugging Face folder of half the size.

The layout is `pack-quantized` of the library compressed-tensors (0.20): symmetric 8-bit integers in groups along a row,
four to an int32, each group with a scale. Norms stay as they are. A target verifies whatever is drafted, so a rounded
drafter gives the same text; what it may cost is τ. A rounded target would be another model, so targets are refused.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from convert.command import finish
from convert.hub import resolve_model
from convert.keymap import abstract_drafter
from convert.load import is_drafter, open_drafter, read_config, stored_dtype
from convert.save import plain_config, write_folder
from convert.source import nbytes, place, progress_bar
from dflash_jax.errors import UserError

# Relative error of the weights of assets/smollm2_drafter, rms: .0054, .0060, .0064 and .0069 with groups of 32, 64, 96
# and 192, which add 6, 3, 2 and 1 % to the bytes of the integers; .0265 as fp8 in blocks of 128 × 128.
GROUP_SIZE = 64
_PROGRAM = "python -m convert.quantise"
_LARGEST, _OFFSET = 127, 128


def quantization_config(group_size: int) -> dict[str, Any]:
    """What compressed-tensors 0.20.1 writes to config.json for such weights."""
    weights = {
        "dynamic": False, "group_size": group_size, "num_bits": 8, "strategy": "group", "symmetric": True,
        "type": "int",
    }  # fmt: skip
    group = {
        "format": "pack-quantized", "input_activations": None, "output_activations": None, "targets": ["Linear"],
        "weights": weights,
    }  # fmt: skip
    return {
        "config_groups": {"group_0": group}, "format": "pack-quantized", "global_compression_ratio": None, "ignore": [],
        "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed",
        "sparsity_config": {}, "transform_config": {}, "version": "0.20.1",
    }  # fmt: skip


def pack_groups(
    weight: Float[np.ndarray, "o i"], group_size: int, dtype: np.dtype
) -> tuple[Int[np.ndarray, "o w"], Float[np.ndarray, "o g"]]:
    """The nearest multiples of each group's scale, offset by 128 and packed lowest bits first, and the scales.

    A scale is 1/127 of the group's largest magnitude, rounded to `dtype` before the values are divided by it. Rounded
    down, it leaves the largest value below 127.5 of it, so no value is off by more than half a scale.
    """
    grouped = weight.astype(np.float32).reshape(len(weight), -1, group_size)
    scales = (np.abs(grouped).max(axis=-1) / _LARGEST).astype(dtype)
    scales = np.where(scales == 0, np.ones((), dtype), scales)  # a group of zeros
    values = np.rint(grouped / scales.astype(np.float32)[..., None]) + _OFFSET
    packed = np.clip(values, 0, 255).astype(np.uint8).reshape(weight.shape)
    return packed.view(np.dtype("<i4")), scales


def quantise(
    src: Path, dst: Path, group_size: int = GROUP_SIZE, *, overwrite: bool = False, progress: bool | None = None
) -> int:
    """Writes a drafter's weights in 8 bits, with its config.json; returns the bytes of the tensors written.

    Args:
      src: Hugging Face or Orbax folder of a drafter.
      dst: Hugging Face folder to write.
      group_size: columns that share a scale; must divide the width of every product.
      overwrite: replace the weights and the config that lie in `dst`.
      progress: show a bar on stderr; None only on a terminal.
    """
    if dst.exists() and not overwrite:
        raise UserError(f"{dst}: exists; name another folder or pass --overwrite")
    if dst.exists() and (not dst.is_dir() or dst.resolve() == src.resolve()):
        raise UserError(f"{dst}: not a folder that can be replaced (it is the source, or a file)")
    raw = read_config(src)
    if not is_drafter(raw):
        raise UserError(f"{src}: no DFlash drafter; only drafters are quantised (a rounded target writes another text)")
    config, source, keys, notes = open_drafter(src, None)
    for note in notes:
        print(f"{_PROGRAM}: {note}", file=sys.stderr)
    kind = stored_dtype(src)
    host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    requests: dict[str, jax.ShapeDtypeStruct] = {}
    for name, leaf in abstract_drafter(config, kind).items():
        if len(leaf.shape) == 2:
            _check_group(group_size, name, leaf.shape[1])
            leaf = jax.ShapeDtypeStruct(leaf.shape, np.float32)
        requests[keys.weights[name]] = place(name, leaf, host)
    tensors: dict[str, np.ndarray] = {}
    with progress_bar(sum(map(nbytes, requests.values())), "quantising", progress) as advance:
        for name, array in source.read(requests, advance):
            value = np.asarray(array)
            if value.ndim != 2:
                tensors[name] = value
                continue
            if not np.isfinite(value).all():
                raise UserError(f"{src}: {name} has values that are not finite")
            packed, scales = pack_groups(value, group_size, kind)
            tensors |= {f"{name}_packed": packed, f"{name}_scale": scales}
            tensors[f"{name}_shape"] = np.array(value.shape, np.int64)
    settings = {"quantization_config": quantization_config(group_size)}
    write_folder(dst, plain_config(raw) | settings, tensors, {name: array.dtype for name, array in tensors.items()})
    return sum(array.nbytes for array in tensors.values())


def _check_group(group_size: int, name: str, width: int) -> None:
    if group_size < 4 or group_size % 4 or width % group_size:
        raise UserError(
            f"--group-size {group_size}: must be a multiple of 4 that divides the {width} columns of {name}"
        )


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status (2: the user can put it right)."""
    parser = argparse.ArgumentParser(prog=_PROGRAM, description=__doc__)
    parser.add_argument("src", metavar="SRC", help="a DFlash drafter: a Hugging Face or Orbax folder, or a Hub id")
    parser.add_argument("dst", metavar="DST", type=Path, help="the Hugging Face folder to write")
    parser.add_argument(
        "--group-size", type=int, default=GROUP_SIZE, help="columns that share a scale (default: %(default)s)"
    )
    parser.add_argument("--revision", help="branch, tag or commit of a Hub id")
    parser.add_argument("--overwrite", action="store_true", help="replace config and weights in DST")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args(argv)

    def work() -> int:
        src = resolve_model(args.src, args.revision)
        return quantise(
            src, args.dst, args.group_size, overwrite=args.overwrite, progress=False if args.quiet else None
        )

    return finish(_PROGRAM, args.dst, work)


if __name__ == "__main__":
    sys.exit(main())
