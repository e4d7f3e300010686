"""Results that come back as one array, and arguments that need not be sent again."""

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.packing import pack
from dflash_jax.programs import Programs
from tests.models import random_target


def test_what_is_packed_comes_back_bit_for_bit():
    rng = np.random.default_rng(0)
    odd = np.asarray([np.nan, -np.nan, np.inf, -0.0, 1e-45], np.float32)
    tree = (
        {"tokens": rng.integers(-5, 5, (2, 3)).astype(np.int32), "none": None},
        [odd, np.float32(2.5), np.zeros((0, 4), np.float32), np.asarray([2**32 - 1], np.uint32)],
    )
    packed = jax.jit(pack)(jax.tree.map(jnp.asarray, tree))
    assert len(jax.tree.leaves(packed)) == 1
    found = jax.block_until_ready(packed).fetch()
    assert packed.ready and jax.tree.structure(found) == jax.tree.structure(tree)
    for old, new in zip(jax.tree.leaves(tree), jax.tree.leaves(found), strict=True):
        assert new.dtype == old.dtype and new.shape == old.shape and new.tobytes() == old.tobytes()


def test_arguments_that_repeat_are_sent_once(monkeypatch):
    one = Programs(random_target(3), None)
    state = one.init(None, 2, 512, 64)
    values = (np.asarray(3, np.int32), None, np.asarray([True, False]))
    first, second = one._beside(state, values), one._beside(state, jax.tree.map(np.copy, values))
    assert first[0] is second[0] and first[1] is None and first[2] is second[2]
    others = one._beside(state, (np.asarray([3], np.int32), np.asarray(3, np.uint32), np.asarray([False, True])))
    assert [(x.tolist(), x.dtype) for x in others] == [([3], np.int32), (3, np.uint32), ([False, True], bool)]
    assert first[0].tolist() == 3 and first[0].sharding == state.anchor.sharding
    # Several processes would have to agree on every copy.
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert one._beside(state, values) is values
