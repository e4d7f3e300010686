"""What PyTorch offers for the same work: fused attention with a mask, and the delta rule in its own operations.

All are replayed from a CUDA graph, so that Python's cost a launch is not counted; where a graph cannot be captured (an
operation that waits for the host), the error is shown instead of a time.
"""

import importlib
import importlib.util
import statistics
from collections.abc import Callable
from typing import Any

# Calls that one graph holds: beyond the caches' reach, or two where one call is.
CALLS = 36
LONG_CALLS = 2


def find_torch() -> Any:
    """The module, or None where it is not installed or sees no CUDA device."""
    if importlib.util.find_spec("torch") is None:
        return None
    torch = importlib.import_module("torch")
    return torch if torch.cuda.is_available() else None


class GraphLoop:
    """A captured sequence of calls, timed by events; the interface of `timing.Loop`."""

    def __init__(self, torch: Any, call: Callable[[int], Any], calls: int = CALLS):
        self.torch, self.calls, self.repeats = torch, calls, 1
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for i in range(2):  # libraries set themselves up outside the capture
                call(i)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.kept = [call(i) for i in range(calls)]

    def _run(self, repeats: int) -> float:
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def calibrate(self, seconds: float) -> None:
        """Warms up and chooses the repeats that take about `seconds`."""
        self._run(1)
        once = statistics.median(self._run(1) for _ in range(3))
        self.repeats = int(min(1000, max(1, seconds / max(once, 1e-6))))

    def sample(self) -> float:
        """Seconds a call, measured once."""
        return self._run(self.repeats) / self.repeats / self.calls


def attention(
    torch: Any, shape: Any, seen: int, layers: int, dtype: Any, device: str
) -> Callable[[int], Any]:
    """scaled_dot_product_attention on contiguous keys and values, without pages or writes to a cache.

    The query heads of a group are rows beside one another, so that keys are read once a group (fused kernels with a
    mask take no grouped heads). The mask is added, in the model's width: a Boolean one would be converted in each call.
    """
    group = shape.heads // shape.kv_heads
    q = torch.randn(1, shape.kv_heads, shape.rows * group, shape.head_dim, dtype=dtype, device=device)
    context = [
        torch.randn(2, 1, shape.kv_heads, seen + shape.rows, shape.head_dim, dtype=dtype, device=device)
        for _ in range(min(layers, CALLS))
    ]
    tree = torch.ones(shape.rows, shape.rows, dtype=torch.bool, device=device).tril()
    visible = torch.cat([torch.ones(shape.rows, seen, dtype=torch.bool, device=device), tree], 1)
    visible = visible.repeat_interleave(group, 0)
    mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill(~visible, float("-inf"))[None, None]

    def call(i: int) -> Any:
        keys, values = context[i % len(context)]
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)

    return call


def _rows(torch: Any, heads: Any, rows: int, dtype: Any, device: str) -> tuple[Any, ...]:
    """q, k, v [H, N, d], beta, g [H, N]; unit keys and queries."""
    make = torch.nn.functional.normalize
    q, k = (
        make(torch.randn(heads.key_heads, rows, heads.dim, device=device), dim=-1).to(dtype) for _ in range(2)
    )
    v = torch.randn(heads.value_heads, rows, heads.dim, dtype=dtype, device=device)
    beta = torch.rand(heads.value_heads, rows, device=device)
    return q, k, v, beta, -0.01 * torch.rand(heads.value_heads, rows, device=device)


def tree_delta_rule(
    torch: Any, q: Any, k: Any, v: Any, beta: Any, g: Any, state: Any, ancestors: Any
) -> tuple[Any, Any]:
    """Outputs and innovations [Hv, N, d] of the tree form, fp32; arguments as `_rows`, state [Hv, dk, dv]."""
    group = v.shape[0] // k.shape[0]
    q, k = (x.float().repeat_interleave(group, 0) for x in (q, k))
    total = g @ ancestors.float().T
    rise = total.exp()[..., None]
    difference = total[:, :, None] - total[:, None, :]
    decay = difference.masked_fill(~ancestors, float("-inf")).exp()
    beta = beta[..., None]
    right = beta * (v.float() - rise * (k @ state))
    lower = (beta * decay * (k @ k.mT)).tril(-1)
    u = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    out = rise * (q @ state) + (decay * (q @ k.mT)) @ u
    return q.shape[-1] ** -0.5 * out, u


def chunk_delta_rule(
    torch: Any, q: Any, k: Any, v: Any, beta: Any, g: Any, state: Any, size: int
) -> tuple[Any, Any]:
    """Outputs [Hv, N, d] and the last state: the tree form of a chain, chunk by chunk; what needs no state at once.

    Arguments as `_rows`; N is a multiple of `size`.
    """
    value_heads, rows, dim = v.shape
    group, chunks = value_heads // k.shape[0], rows // size
    q, k = (x.float().repeat_interleave(group, 0).reshape(value_heads, chunks, size, dim) for x in (q, k))
    v, beta = v.float().reshape(value_heads, chunks, size, dim), beta.reshape(value_heads, chunks, size, 1)
    total = g.reshape(value_heads, chunks, size).cumsum(-1)
    rise = total.exp()[..., None]
    lower = torch.ones(size, size, dtype=torch.bool, device=v.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    system = (beta * decay * (k @ k.mT)).tril(-1)
    right = torch.cat([beta * v, beta * rise * k], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    own, read = solved[..., :dim], solved[..., dim:]
    scores = decay * (q @ k.mT)
    to_end = ((total[..., -1:] - total).exp()[..., None] * k).mT
    from_start = rise * q
    last = total[..., -1].exp()[..., None, None]
    outputs = []
    for c in range(chunks):
        u = own[:, c] - read[:, c] @ state
        outputs.append(from_start[:, c] @ state + scores[:, c] @ u)
        state = last[:, c] * state + to_end[:, c] @ u
    return dim**-0.5 * torch.cat(outputs, 1), state


def make(torch: Any, counterpart: tuple[Any, ...], dtype: str) -> GraphLoop:
    """The loop for a case's `counterpart`: ("attention" | "tree" | "chunk", arguments of that kind …)."""
    kind, *arguments = counterpart
    width, device = getattr(torch, dtype), "cuda"
    torch.backends.cuda.matmul.allow_tf32 = False  # as the references: fp32 products are fp32
    if kind == "attention":
        shape, seen, layers = arguments
        return GraphLoop(torch, attention(torch, shape, seen, layers, width, device))
    heads, rows, extra = arguments
    q, k, v, beta, g = _rows(torch, heads, rows, width, device)
    states = torch.randn(heads.layers, heads.value_heads, heads.dim, heads.dim, device=device)
    if kind == "tree":
        ancestors = torch.from_numpy(extra[0].copy()).to(device)
        return GraphLoop(
            torch, lambda i: tree_delta_rule(torch, q, k, v, beta, g, states[i % len(states)], ancestors)
        )
    return GraphLoop(torch, lambda i: chunk_delta_rule(torch, q, k, v, beta, g, states[i], extra), LONG_CALLS)
