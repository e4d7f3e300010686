"""The documentation is true: its Python runs, its links resolve, its commands parse, its figures are the files'.

A fenced block marked exactly `python` in the README or in `docs/*.md` is executed, the blocks of a file one after the
other in one namespace; one marked `py` needs a server and is compiled, its imports executed. Every `python -m …` in a
fenced block or in inline code is parsed by the program's own parser, not run. Targets and variables of `make`, extras
of `pip install` and files named in code exist. The text cells of notebooks are pages too.
"""

import argparse
import ast
import base64
import importlib.util
import json
import re
import runpy
import shlex
import sys
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from benchmarks.shapes import configs
from convert.keymap import abstract_drafter
from convert.quantise import GROUP_SIZE
from dflash_jax import SamplingParams, UserError
from dflash_jax.config import check_pair, parse_drafter_config, parse_target_config
from dflash_jax.engine import Engine
from dflash_jax.loading import BUNDLED_DRAFTER, BUNDLED_TARGET, SMOLLM2_DRAFTER
from dflash_jax.request import Method
from dflash_jax.sharding import check_divides
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.train.settings import RECIPES, load_draft_recipe, load_target_recipe
from tests.models import random_drafter, random_target

ROOT = Path(__file__).resolve().parents[1]
CARDS = [folder / "README.md" for folder in (BUNDLED_TARGET, BUNDLED_DRAFTER, SMOLLM2_DRAFTER)]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS, *CARDS]
# Text cells as a page: the comments of their sources (that the notebooks are made of these, another test holds).
SOURCES = sorted((ROOT / "notebooks" / "source").glob("0*.py"))
ARCHITECTURE = ROOT / "docs" / "architecture.md"

_FENCE = re.compile(r"^(`{3,})([^\n`]*)\n(.*?)^\1[ \t]*$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"^ {4}(\S.*)$", re.MULTILINE)
_INLINE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
_COMMAND = re.compile(r"(?:^|[\s/])python3? -m ([\w.]+)([^\n]*)")
# Programs of others: it is enough that they can be imported.
_FOREIGN = ("pytest", "venv", "pip")


def page_text(page: Path) -> str:
    """Markdown of a page, or of a notebook's text cells."""
    text = page.read_text()
    if page.suffix == ".md":
        return text
    cells = re.split(r"^# %% *", text, flags=re.MULTILINE)
    said = [cell.partition("\n")[2] for cell in cells if cell.startswith("[markdown]")]
    return "\n\n".join(re.sub(r"^# ?", "", cell, flags=re.MULTILINE) for cell in said)


def folder_of(page: Path) -> Path:
    """Where the links of a page start from."""
    return page.parent if page.suffix == ".md" else page.parents[1]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(text: str) -> list[tuple[str, str]]:
    """Language and content of every fenced block."""
    return [(match[2].strip(), match[3]) for match in _FENCE.finditer(text)]


def commands(text: str) -> list[tuple[str, str]]:
    """Module and arguments of every `python -m` in code."""
    prose = _FENCE.sub("", text)
    code = [content for language, content in blocks(text) if language != "python"]
    code += _INDENTED.findall(prose) + _INLINE.findall(prose)
    joined = (piece.replace("\\\n", " ") for piece in code)
    return [(match[1], match[2]) for piece in joined for match in _COMMAND.finditer(piece)]


def arguments(rest: str) -> list[str]:
    """A shell command's arguments, up to a comment, a pipe, a redirection or the next command."""
    lexer = shlex.shlex(rest, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found = []
    for word in lexer:
        if set(word) <= set("|&;<>()"):
            break
        found.append(word)
    return found


class Parsed(BaseException):
    """Raised in place of running a program: its arguments were accepted. Holds the flags that the program knows."""

    def __init__(self, flags: set[str]):
        super().__init__()
        self.flags = flags


def parse_command(module: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Starts `python -m module words` up to the end of argument parsing; returns the flags it knows."""
    own = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, args: list[str] | None = None, namespace: object = None) -> None:
        self.allow_abbrev = False  # a flag that is only the beginning of one is a mistake in a page
        own(self, args, namespace)
        raise Parsed(set(self._option_string_actions))

    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        patch.setattr(sys, "argv", [module, *words])
        with pytest.raises(Parsed) as parsed:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    return parsed.value.flags


COMMANDS = sorted(
    {(name_of(page), *command) for page in [*PAGES, *SOURCES] for command in commands(page_text(page))}
)


@pytest.mark.parametrize(("page", "module", "rest"), COMMANDS)
def test_commands_parse(page: str, module: str, rest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert importlib.util.find_spec(module) is not None, f"{page}: no module {module}"
    words = arguments(rest)
    # Without arguments it is a mention, and "STAGE" stands for what the page lists below it.
    if words and words != ["STAGE"] and module not in _FOREIGN:
        parse_command(module, words, monkeypatch)


def test_flags_in_the_prose_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    known = parse_command("dflash_jax.train", ["draft"], monkeypatch)
    for module in ("convert", "convert.quantise"):
        known |= parse_command(module, ["a", "b"], monkeypatch)
    benchmarks = ("acceptance", "divergence", "kernels", "round")
    programs = ("dflash_jax.generate", "serve", "serve.client", "serve.load")
    for module in (*programs, *(f"benchmarks.{name}" for name in benchmarks)):
        known |= parse_command(module, [], monkeypatch)
    for page in [ROOT / "README.md", *DOCS, *CARDS]:
        for code in _INLINE.findall(_FENCE.sub("", page.read_text())):
            flag = re.match(r"--[a-z][\w-]*", code)
            assert flag is None or flag[0] in known, f"{name_of(page)}: no program has {flag[0]}"


def test_the_parser_check_sees_wrong_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for module, words in (
        ("dflash_jax.train", ["bundled", "--no-such-flag"]),
        ("dflash_jax.train", ["bundled", "--resum"]),
        ("dflash_jax.train", ["no-such-stage"]),
        ("dflash_jax.generate", ["--prompt", "x", "--method", "magic"]),
        ("benchmarks.acceptance", ["--limit", "many"]),
    ):
        with pytest.raises(SystemExit) as stopped:
            parse_command(module, words, monkeypatch)
        assert stopped.value.code == 2
    capsys.readouterr()
    assert arguments(" a --b 'c d' | tee x") == ["a", "--b", "c d"]
    assert arguments(" a  # why") == ["a"]
    text = (
        "Say `python -m one --x` or\n\n    .venv/bin/python -m two\n\n```sh\npython -m three \\\n  --y\n```\n"
    )
    assert [module for module, _ in commands(text)] == ["three", "two", "one"]


@pytest.mark.parametrize("page", [*PAGES, *SOURCES], ids=name_of)
def test_relative_links_resolve(page: Path) -> None:
    text = _FENCE.sub("", page_text(page))
    for link in _LINK.findall(text):
        if "://" in link or link.startswith(("#", "mailto:")):
            continue
        target = folder_of(page) / link.partition("#")[0]
        assert target.exists(), f"{name_of(page)}: {link} leads nowhere"
        assert target.resolve().is_relative_to(ROOT), f"{name_of(page)}: {link} leaves the repository"


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name_of(page), marks=pytest.mark.slow if page.name == "README.md" else ())
        for page in PAGES
        if any(kind == "python" for kind, _ in blocks(page.read_text()))
    ],
)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "__docs__"}
    for number, (kind, code) in enumerate(blocks(page.read_text()), 1):
        if kind == "python":
            exec(compile(code, f"{name_of(page)}, block {number}", "exec"), namespace)


@pytest.mark.parametrize(
    ("page", "code"),
    [
        pytest.param(name_of(page), code, id=name_of(page))
        for page in PAGES
        for kind, code in blocks(page.read_text())
        if kind == "py"
    ],
)
def test_python_that_needs_a_server_compiles_and_imports(page: str, code: str) -> None:
    tree = ast.parse(code, page)
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names: dict = {}
    exec(compile(ast.Module(imports, []), page, "exec"), names)
    for node in ast.walk(tree):  # what is called of the modules is there
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
            assert hasattr(names[node.value.id], node.attr), f"{page}: no {node.value.id}.{node.attr}"


def in_code(page: Path) -> list[str]:
    """Content of shell blocks and inline code."""
    text = page_text(page)
    shell = [code for kind, code in blocks(text) if kind in ("", "sh")]
    return shell + _INLINE.findall(_FENCE.sub("", text))


def make_mistakes(code: str, makefile: str) -> list[str]:
    """Targets and variables of every `make …` that the Makefile does not have."""
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))
    variables = set(re.findall(r"^(\w+) \?=", makefile, re.MULTILINE)) | {"PYTHON"}
    wrong = []
    for line in re.findall(r"^make((?: .*)?)$", code, re.MULTILINE):
        for word in arguments(line):
            name, sign, _ = word.partition("=")
            wrong += [word] if name not in (variables if sign else targets) else []
    return wrong


def test_make_targets_and_extras_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    seen = 0
    for page in [*PAGES, *SOURCES]:
        for code in in_code(page):
            assert make_mistakes(code, makefile) == [], f"{name_of(page)}: {code}"
            for found in re.findall(r"pip install [^\n]*\.\[([\w,]+)\]", code):
                assert set(found.split(",")) <= set(extras), f"{name_of(page)}: {code}"
                seen += 1
    assert seen >= 5
    assert make_mistakes("make demos\nmake demo EXTRAS=cpu ARGS='-k x'  # why\n", makefile) == ["demos", "EXTRAS=cpu"]


_FOLDERS = "dflash_jax|pallas_kernels|convert|serve|tests|benchmarks|docs|notebooks|tools|locks"
_FILE = re.compile(rf"(?:{_FOLDERS})/[\w./-]+\.\w+")


def test_files_named_in_the_prose_exist() -> None:
    for page in [*PAGES, *SOURCES]:
        for code in _INLINE.findall(_FENCE.sub("", page_text(page))):
            if _FILE.fullmatch(code):
                assert (ROOT / code).exists(), f"{name_of(page)}: no file {code}"


# --- what architecture.md says of errors ---------------------------------------------------------------------------


def method_without_drafter(method: Method) -> str:
    engine = Engine(random_target(1), None, Tokenizer.from_folder(BUNDLED_TARGET))
    return engine.method_of(SamplingParams(method=method))


@pytest.mark.parametrize(
    "cause",
    [
        lambda: SamplingParams(method="ddtree", draft_sampling="probabilistic"),
        lambda: check_divides(configs("qwen3.6-27b")[0], None, 3),
        lambda: method_without_drafter("mtp"),
        lambda: method_without_drafter("ddtree"),
        lambda: parse_target_config({"model_type": "gpt2"}),
        lambda: parse_drafter_config({"architectures": ["DFlash2DraftModel"]}),
    ],
)
def test_limits_quote_the_real_errors(cause: Callable[[], object]) -> None:
    with pytest.raises(UserError) as caught:
        cause()
    message = str(caught.value).removeprefix("config.json: ")
    assert f"`{message}`" in ARCHITECTURE.read_text()


# --- what the model cards say of the files -------------------------------------------------------------------------


def parameters(folder: Path, *, head: bool = False) -> int:
    """Of a model, or of the draft head in its file."""
    count = 0
    with safe_open(folder / "model.safetensors", "np") as file:
        for name in file.keys():  # noqa: SIM118 - the file object is no mapping
            if name.startswith("mtp.") is not head:
                continue
            size = 1
            for length in file.get_slice(name).get_shape():
                size *= length
            count += size
    return count


def test_cards_state_the_recipes_and_weights_that_ship() -> None:
    target = load_target_recipe(RECIPES / "bundled_target.json")
    draft = load_draft_recipe(RECIPES / "bundled_draft.json")
    one, two, three = (card.read_text() for card in CARDS)
    assert target.loop.steps is not None and draft.loop.steps is not None  # nothing depends on the clock
    tokens = target.loop.steps * target.loop.batch * target.sequence_length
    for said in (
        f" {parameters(BUNDLED_TARGET):,},",
        f"{target.loop.steps:,} steps of {target.loop.batch} windows",
        f"{tokens / 1e6:.1f}M tokens",
        f"peak rate {target.optimizer.peak_lr}",
        f"{target.corpus.heldout_tokens:,} tokens",
    ):
        assert said in one
    head = parameters(BUNDLED_TARGET, head=True)
    assert not head or f" {head:,} parameters" in one
    for said in (
        f" {parameters(BUNDLED_DRAFTER):,},",
        f"{draft.loop.steps:,} steps of {draft.loop.batch} answers (6.6 epochs), {draft.anchors}\n",
        f"{draft.optimizer.peak_lr}, {draft.optimizer.warmup_steps} steps of warm-up",
        f"cut at {draft.responses.max_new_tokens}",
    ):
        assert said in two
    assert round(draft.loop.steps / (32_720 // draft.loop.batch), 1) == 6.6
    assert target.loop.steps % target.loop.steps_per_dispatch == 0
    assert draft.loop.steps % draft.loop.steps_per_dispatch == 0
    for recipe, folder in ((target, BUNDLED_TARGET), (draft, BUNDLED_DRAFTER)):
        assert recipe.model == json.loads((folder / "config.json").read_text())
    assert draft.responses.max_seconds is None

    other = load_draft_recipe(RECIPES / "smollm2_draft.json")
    config = json.loads((SMOLLM2_DRAFTER / "config.json").read_text())
    assert other.model == {key: value for key, value in config.items() if key != "quantization_config"}
    drafter = abstract_drafter(parse_drafter_config(config)[0], "bfloat16")
    for said in (
        f" {sum(leaf.size for leaf in drafter.values()):,},",
        f"groups of {GROUP_SIZE}",
        f"{other.loop.batch} answers",
        f"{other.anchors} random anchors",
        f"exp(−(k − 1) / {other.decay_gamma:g})",
        f"{other.optimizer.peak_lr}, {other.optimizer.warmup_steps} steps of warm-up",
        f"cut at {other.responses.max_new_tokens}",
    ):
        assert said in three


@pytest.mark.parametrize("card", CARDS, ids=name_of)
def test_cards_have_a_header(card: Path) -> None:
    head = card.read_text().split("---\n")
    assert head[0] == ""
    assert "license: apache-2.0" in head[1].splitlines()


def test_depth_tables_agree_with_tau() -> None:
    """τ = 1 + Σ over depths of the share of rounds that reached it."""
    text = CARDS[1].read_text()
    taus = [
        float(x)
        for x in re.findall(r"^\| d\w+, \d+ nodes \|.* (\d+\.\d\d) \| \d+/\d+ \|$", text, re.MULTILINE)
    ]
    rows = re.findall(r"^\| d[\w, ]+ \|((?: \.\d\d \|){15})$", text, re.MULTILINE)
    sums = [1 + sum(float(x) for x in re.findall(r"\.\d\d", row)) for row in rows]
    assert len(taus) == len(sums) == 4
    assert taus == pytest.approx(sums, abs=0.08)


# --- what faq.md says that no other test holds ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_engine() -> Engine:
    target = random_target(3)
    return Engine(target, random_drafter(target), Tokenizer.from_folder(BUNDLED_TARGET), prefill_chunk=32)


@pytest.mark.parametrize("method", ["ar", "dflash", "ddtree"])
def test_a_target_may_say_the_mask_token(small_engine: Engine, method: Method) -> None:
    mask = small_engine.drafter.config.mask_token_id
    params = SamplingParams(max_new_tokens=6, method=method, tree_budget=7, logit_bias=((mask, 1e4),))
    assert small_engine.generate([[5, 6, 7]], params)[0].token_ids == [mask] * 6


def test_a_request_does_not_depend_on_the_one_before(small_engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=24, method="ddtree", tree_budget=7)
    first, other, again = (small_engine.generate([ids], params)[0].token_ids for ids in ([5, 6], [9] * 40, [5, 6]))
    assert first == again != other


def test_a_drafter_of_another_model_is_named() -> None:
    drafter = configs("bundled")[1]
    with pytest.raises(UserError) as caught:
        check_pair(random_target(1).config, drafter)
    assert f"`{str(caught.value).removeprefix('drafter: ')}`" in (ROOT / "docs" / "faq.md").read_text()


# --- pages made by programs ----------------------------------------------------------------------------------------


def test_the_api_page_is_that_of_the_docstrings() -> None:
    made = runpy.run_path(str(ROOT / "tools" / "api_docs.py"))["page"]()
    assert made == (ROOT / "docs" / "api.md").read_text(), "run python tools/api_docs.py"


def test_the_readmes_figure_is_that_of_the_notebook() -> None:
    notebook = json.loads((ROOT / "notebooks" / "02_inside_a_round.ipynb").read_text())
    outputs = [out for cell in notebook["cells"] for out in cell.get("outputs", [])]
    pictures = [base64.b64decode(out["data"]["image/png"]) for out in outputs if "image/png" in out.get("data", {})]
    assert (ROOT / "docs" / "images" / "token_tree.png").read_bytes() in pictures, "run python -m notebooks.build"


def test_headings_that_links_name_exist() -> None:
    """Anchors are GitHub's: lower case, blanks to hyphens, punctuation dropped."""
    for page in [*PAGES, *SOURCES]:
        for link in _LINK.findall(_FENCE.sub("", page_text(page))):
            path, _, anchor = link.partition("#")
            if not anchor or "://" in link:
                continue
            text = (folder_of(page) / path).read_text() if path else page_text(page)
            titles = re.findall(r"^#+ (.*)$", _FENCE.sub("", text), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert anchor in anchors, f"{name_of(page)}: {link} names no heading"
