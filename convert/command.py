"""What the command lines of this package say at their end."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from dflash_jax.errors import UserError


def finish(program: str, dst: Path, work: Callable[[], int]) -> int:
    """Runs `work`, which writes `dst` and returns its bytes; says how it went and returns the exit status.

    0, or 2 where the user can put it right: a `UserError`, or a file that cannot be read or written.
    """
    start = time.perf_counter()
    try:
        size = work()
    except UserError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{program}: error: {error.filename or dst}: {error.strerror or error}", file=sys.stderr)
        return 2
    print(f"{dst}: {size:,} bytes in {time.perf_counter() - start:.1f} s")
    return 0
