"""Methods by name, as the benchmarks' `--methods` takes them."""

import dataclasses
from typing import Any

from dflash_jax import SamplingParams, UserError

# What may follow a method's name and a colon: which parameter it sets.
_NUMBERS = {"ddtree": "tree_budget", "mtp": "mtp_steps"}


def parse_methods(text: str, base: SamplingParams) -> dict[str, SamplingParams]:
    """`ar,mtp:3,dflash,ddtree:63,ddtree:auto` -> name -> parameters.

    Args:
      text: names, separated by commas; after a colon the tree budget (or "auto"), or the steps of mtp.
      base: everything else.

    Raises:
      UserError: a name, number or repetition that makes no sense.
    """
    methods: dict[str, SamplingParams] = {}
    for name in text.split(","):
        method, colon, number = name.partition(":")
        changes: dict[str, Any] = {"method": method}
        if colon:
            if method not in _NUMBERS:
                raise UserError(f"--methods {name}: only {' and '.join(_NUMBERS)} take a number after ':'")
            if not number.isdecimal() and (method, number) != ("ddtree", "auto"):
                raise UserError(f"--methods {name}: what follows ':' must be a number (ddtree: or 'auto')")
            changes[_NUMBERS[method]] = number if number == "auto" else int(number)
        if name in methods:
            raise UserError(f"--methods names {name} twice")
        methods[name] = dataclasses.replace(base, **changes)
    return methods
