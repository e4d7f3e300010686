"""Several processes as one run: `jax.distributed` set up from flags or the environment, before devices are touched.

Every process runs the same program on the same prompts; its devices are part of one mesh. What the host decides
follows from tokens, which are alike in all processes, so nothing but the collectives of the programs is exchanged.
"""

import os
import socket
import sys
import time
from collections.abc import Mapping

from dflash_jax.errors import UserError

# Variables that stand for flags left out. The first is JAX' own.
VARIABLES = {
    "--coordinator": "JAX_COORDINATOR_ADDRESS",
    "--num-processes": "JAX_NUM_PROCESSES",
    "--process-id": "JAX_PROCESS_ID",
}
# How long a process waits for the others; JAX' own default.
WAIT_SECONDS = 300


def settings(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    environment: Mapping[str, str] = os.environ,
) -> tuple[str, int, int] | None:
    """Coordinator, number of processes and this one's number, each from its flag or else its variable.

    Returns:
      None where neither a flag nor a variable is set: a run of one process.

    Raises:
      UserError: some are missing or make no sense.
    """
    flags = dict(zip(VARIABLES, (coordinator, num_processes, process_id), strict=True))
    given = {
        flag: environment.get(VARIABLES[flag]) if value is None else value for flag, value in flags.items()
    }
    if all(value is None for value in given.values()):
        return None
    missing = [f"{flag} (or {VARIABLES[flag]})" for flag, value in given.items() if value is None]
    if missing:
        raise UserError(f"a run of several processes also needs {' and '.join(missing)}")
    address = str(given["--coordinator"])
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"--coordinator {address}: expected HOST:PORT")
    count, number = (_whole(flag, given[flag]) for flag in ("--num-processes", "--process-id"))
    if count < 1:
        raise UserError(f"--num-processes {count}: must be at least 1")
    if not 0 <= number < count:
        raise UserError(f"--process-id {number}: must be 0 to {count - 1} (--num-processes {count})")
    return address, count, number


def _whole(flag: str, value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise UserError(f"{flag} (or {VARIABLES[flag]}): expected a whole number, found {value!r}") from None


def connect(coordinator: str, num_processes: int, process_id: int) -> None:
    """Joins the run; returns when all processes have. Must come before anything that needs a device.

    A process that the others never join is ended by JAX, with its own message, after five minutes.

    Raises:
      UserError: the coordinator cannot be reached, or process 0 cannot listen at its address.
    """
    import jax

    if process_id:
        _await(coordinator)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            coordinator, num_processes, process_id, initialization_timeout=WAIT_SECONDS
        )
    except RuntimeError as error:
        raise UserError(f"--coordinator {coordinator}: {str(error).splitlines()[0]}") from None


def _await(coordinator: str) -> None:
    """Waits until something listens there: JAX' client would end the process without a word to the user."""
    host, _, port = coordinator.rpartition(":")
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"--coordinator {coordinator}: process 0 does not answer ({error.strerror or error})"
                ) from None
            time.sleep(0.2)


def claim_stdout(process_id: int) -> None:
    """Leaves standard output to process 0 and to Python: Gloo writes a line there for every connection it makes."""
    sys.stdout.flush()
    own = os.dup(1) if process_id == 0 else os.open(os.devnull, os.O_WRONLY)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(own, "w", encoding=sys.stdout.encoding, errors="replace")
