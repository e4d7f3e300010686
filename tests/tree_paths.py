"""The paths of trees as the search's kernel gives them, in NumPy."""

import numpy as np
from jaxtyping import Int

from pallas_kernels.ancestry import LENGTH, SHARED


def paths_of(parents: Int[np.ndarray, "B N"], size: int) -> Int[np.ndarray, "B N P"]:
    """To each row without children, all rows from the root; rows that several share are the first one's own."""
    found = np.zeros((*parents.shape, size), np.int32)
    for slot, above in enumerate(parents):
        taken: set[int] = set()
        for number, row in enumerate(sorted(set(range(len(above))) - set(above[above >= 0].tolist()))):
            path = [row]
            while above[path[0]] >= 0:
                path.insert(0, int(above[path[0]]))
            found[slot, number, : len(path)] = [x | SHARED * (x in taken) for x in path]
            found[slot, number, 0] |= len(path) << LENGTH
            taken.update(path)
    return found
