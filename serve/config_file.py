"""Flags from a file: `--config FILE`, TOML whose keys are the flags' long names. The command line wins."""

import argparse
import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_jax.errors import UserError


def add_flag(parser: argparse.ArgumentParser) -> None:
    """`--config`, which `parse` reads."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file of flags, as in max-slots = 16; the command line wins"
    )


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags of a command line, those that it leaves out from the file that it names.

    Raises:
      UserError: the file cannot be read, or has a key that is no flag or a value that its flag does not take.
    """
    args = parser.parse_args(argv)
    if args.config is None:
        return args
    parser.set_defaults(**_read(args.config, parser))
    return parser.parse_args(argv)


def _read(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Values by attribute of the namespace."""
    try:
        values = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise UserError(f"--config {path}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # not UTF-8, or not TOML
        raise UserError(f"--config {path}: not a TOML file ({error})") from None
    flags = {
        option.removeprefix("--"): action
        for action in parser._actions  # argparse has no public way to ask
        for option in action.option_strings
        if option.startswith("--") and action.dest not in ("help", "config")
    }
    found = {}
    for key, value in values.items():
        if key not in flags:
            (nearest,) = difflib.get_close_matches(key, flags, n=1, cutoff=0.0)
            raise UserError(f"{path}: unknown key {key!r}; the nearest flag is {nearest!r}")
        found[flags[key].dest] = _value(f"{path}: {key}", value, flags[key])
    return found


def _value(what: str, value: Any, action: argparse.Action) -> Any:
    """A value as its flag has it."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise UserError(f"{what} must be true or false, found {value!r}")
        return value
    kind = action.type if isinstance(action.type, type) else str
    words, takes = "a string", isinstance(value, str)
    if kind is int:
        words, takes = "a whole number", isinstance(value, int) and not isinstance(value, bool)
    elif kind is float:
        words, takes = "a number", isinstance(value, int | float) and not isinstance(value, bool)
    if not takes:
        raise UserError(f"{what} must be {words}, found {value!r}")
    if action.choices is not None and value not in action.choices:
        raise UserError(f"{what} must be one of {', '.join(map(str, action.choices))}, found {value!r}")
    return kind(value)
