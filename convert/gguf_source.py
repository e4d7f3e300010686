"""The tensors of a GGUF file under their Hugging Face names and in Hugging Face's order of rows.

llama.cpp's converter renames tensors and changes some of them (`conversion/`, classes `LlamaModel`, `Qwen3Model`,
`Qwen3NextModel`, `_LinearAttentionVReorderBase`); here that is undone:

    llama     rows of q and k go from pairs of neighbours back to halves (rotary pairs i and i + dim / 2)
    qwen35    zero-centred norms lose the 1 that was added (all but the gated norm)
              value heads go from tiled (k + r · key heads) back to grouped (k · ratio + r), wherever they are rows or
              columns: qkv, z, a, b, A_log, dt_bias, convolution, output
              A_log is log(−ssm_a); the convolution gets its middle axis back
"""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from convert.gguf_config import config_json
from convert.gguf_file import PLAIN, StoredTensor, open_gguf
from convert.reader import FileSource, Quantised
from convert.source import TensorInfo

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z", "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b", "ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}  # fmt: skip
# Whole names, for parameters that are no weight or bias of a module.
_WHOLE = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
# Read into the config.
_NO_PARAMETER = ("rope_freqs.weight",)


@dataclasses.dataclass(frozen=True)
class _Changes:
    """What leads from a stored tensor to the parameter: rows and columns in another order, then a function."""

    rows: np.ndarray | None = None
    columns: np.ndarray | None = None
    then: Callable[[np.ndarray], np.ndarray] | None = None


def parameter_name(name: str) -> str:
    """The Hugging Face name of a tensor; its own name where there is none, for the key map to report."""
    block = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    if block is None:
        base, _, kind = name.rpartition(".")
        return f"{_OUTER[base]}.{kind}" if base in _OUTER else name
    layer, rest = block.groups()
    base, _, kind = rest.rpartition(".")
    inner = _WHOLE.get(rest) or (f"{_BLOCK[base]}.{kind}" if base in _BLOCK else None)
    return name if inner is None else f"model.layers.{layer}.{inner}"


def grouped_heads(keys: int, values: int, dim: int) -> np.ndarray:
    """Rows of tiled value heads in the order of grouped ones, `dim` rows a head."""
    head = np.arange(values)
    tiled = head % (values // keys) * keys + head // (values // keys)
    return (tiled[:, None] * dim + np.arange(dim)).reshape(-1)


def halves(heads: int, rows: int) -> np.ndarray:
    """Rows of `heads` heads whose rotary pairs are neighbours, in the order in which they are half a head apart."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


class GGUFSource(FileSource):
    """A GGUF file. Quantised weights count as bfloat16, in which they run unless more is asked for."""

    def __init__(self, path: Path):
        self.folder = path
        file = open_gguf(path)
        self._config = config_json(file)
        self._kind = file.architecture
        named = [
            (parameter_name(tensor.name), place, tensor)
            for place, tensor in enumerate(file.tensors)
            if tensor.name not in _NO_PARAMETER
        ]
        self._stored = {name: (place, tensor) for name, place, tensor in named}
        # Two of one name stay in the list; the key map reports them.
        self.tensors = tuple(
            TensorInfo(name, self._shape(name, tensor), PLAIN.get(tensor.kind, "BF16")) for name, _, tensor in named
        )

    def _shape(self, name: str, tensor: StoredTensor) -> tuple[int, ...]:
        return (tensor.shape[0], 1, tensor.shape[1]) if name.endswith("conv1d.weight") else tensor.shape

    def _place_of(self, name: str) -> int:
        return self._stored[name][0]

    def _view(self, name: str, shape: tuple[int, ...]) -> np.ndarray | Quantised:
        tensor = self._stored[name][1]
        changes = self._changes(name, tensor.shape)
        plain = tensor.plain()
        if changes is None and plain is not None:
            return plain
        changes = changes or _Changes()

        def rows(start: int, stop: int) -> np.ndarray:
            values = tensor.rows(slice(start, stop) if changes.rows is None else changes.rows[start:stop])
            if changes.columns is not None:
                values = values[:, changes.columns]
            if changes.then is not None:
                values = changes.then(values)
            return values.reshape(-1, *shape[1:])

        return Quantised(shape, rows)

    def _changes(self, name: str, shape: tuple[int, ...]) -> _Changes | None:
        config = self._config
        if self._kind == "llama" and name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")):
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            return _Changes(rows=halves(heads, shape[0]))
        if self._kind != "qwen35":
            return None
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            return _Changes(then=lambda values: values - 1)
        keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        dim = config["linear_value_head_dim"]
        part = name.rpartition("linear_attn.")[2]
        if part in ("in_proj_qkv.weight", "conv1d.weight"):
            first = np.arange(2 * keys * config["linear_key_head_dim"])
            return _Changes(rows=np.concatenate([first, len(first) + grouped_heads(keys, values, dim)]))
        if part == "in_proj_z.weight":
            return _Changes(rows=grouped_heads(keys, values, dim))
        if part in ("in_proj_a.weight", "in_proj_b.weight", "dt_bias"):
            return _Changes(rows=grouped_heads(keys, values, 1))
        if part == "A_log":
            return _Changes(rows=grouped_heads(keys, values, 1), then=lambda stored: np.log(-stored))
        return _Changes(columns=grouped_heads(keys, values, dim)) if part == "out_proj.weight" else None
