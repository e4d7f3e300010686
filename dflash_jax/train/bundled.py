"""The bundled pair, end to end: corpus, target, answers, drafter, draft head, evaluation.

Each stage continues from its files.
"""

import dataclasses
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from convert import load_target, load_tokenizer
from convert.load import has_head
from dflash_jax.target import Target
from dflash_jax.train.data import Answers
from dflash_jax.train.draft_loop import train_draft
from dflash_jax.train.loop import Clock
from dflash_jax.train.mtp_loop import train_mtp
from dflash_jax.train.responses import answer, encode_open_prompts, encode_prompts, repeated_share
from dflash_jax.train.settings import DraftRecipe, MTPRecipe, ResponseSettings, TargetRecipe
from dflash_jax.train.target_loop import train_target

TOKENIZER_FILES = Path(__file__).resolve().parents[1] / "assets" / "target"
SIDE_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def narrator(began: float | None = None) -> Callable[[str], None]:
    """A printer of progress lines with the seconds since the program began."""
    start = time.monotonic() if began is None else began

    def say(text: str) -> None:
        print(f"[{time.monotonic() - start:6.1f} s] {text}", flush=True)

    return say


def copy_side_files(folder: Path, source: Path = TOKENIZER_FILES) -> None:
    """Tokenizer, chat template and generation config beside the weights, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in SIDE_FILES:
        if not (folder / name).exists():
            shutil.copy(source / name, folder / name)


def answers_paths(out: Path) -> tuple[Path, Path]:
    """Files of the answers to training and to held-out prompts."""
    return out / "responses" / "train.npz", out / "responses" / "heldout.npz"


def write_answers(
    folder: Path, settings: ResponseSettings, out: Path, *, say: Callable[[str], None] = print
) -> tuple[Answers, Answers]:
    """The answers of the target in `folder` to both splits, from their files where those exist."""
    paths = answers_paths(out)
    if not all(path.exists() for path in paths):
        _, target = load_target(folder, "bfloat16")
        is_open = settings.source == "open"
        prompts = encode_open_prompts(target, load_tokenizer(folder), settings, say=say) if is_open else {}
        for path, split, count in zip(
            paths, ("train", "heldout"), (settings.prompts, settings.heldout_prompts), strict=True
        ):
            began = time.monotonic()
            encoded = prompts.get(split) or encode_prompts(folder / "tokenizer.json", split, settings, count)
            say(f"{split} prompts: {len(encoded)} in {time.monotonic() - began:.0f} s")
            answers = answer(target, encoded, settings, say=say, name=f"{split} answers")
            answers.save(path)
    train, heldout = (Answers.load(path) for path in paths)
    return train, heldout


def sample_lines(answers: Answers, tokenizer_file: Path, count: int = 3) -> list[str]:
    """The first few prompts and answers as text, one line each."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    lines = []
    for row in range(min(count, len(answers))):
        tokens = answers.tokens[row, : answers.lengths[row]].tolist()
        cut = int(answers.prompt_lengths[row])
        prompt, text = tokenizer.decode(tokens[:cut]), tokenizer.decode(tokens[cut:])
        lines.append(" ".join(f"<<{prompt}>> {text}".split()))
    return lines


def run(
    target_recipe: TargetRecipe,
    target_path: Path,
    draft_recipe: DraftRecipe,
    draft_path: Path,
    mtp_recipe: MTPRecipe,
    out: Path,
    *,
    stages: tuple[str, ...],
    resume: bool = False,
) -> dict[str, Any]:
    """Runs the stages named, skipping those whose result lies in `out`; prints progress and a final table.

    A stage's result is `target/model.safetensors`, `responses/*.npz`, `drafter/model.safetensors`, and the tensors
    `mtp.*` in the target's file. The head learns from the drafter's answers. Carrying
    `target/` (and `responses/`) to another machine is enough to go on there.
    """
    say = narrator()
    report: dict[str, Any] = {}
    target_folder = out / "target"
    if "target" in stages and not (target_folder / "model.safetensors").exists():
        copy_side_files(target_folder)
        clock = Clock(target_recipe.loop, target_recipe.optimizer)
        train_target(target_recipe, target_path, out, resume=resume, say=say, clock=clock)
    if "responses" in stages:
        write_answers(target_folder, draft_recipe.responses, out, say=say)
    if "draft" in stages and not (out / "drafter" / "model.safetensors").exists():
        clock = Clock(draft_recipe.loop, draft_recipe.optimizer)
        answers, heldout = write_answers(target_folder, draft_recipe.responses, out, say=say)
        target: Target
        _, target = load_target(target_folder, "bfloat16")
        train_draft(draft_recipe, draft_path, target, answers, heldout, out, resume=resume, say=say, clock=clock)
    if "mtp" in stages and not has_head(target_folder):
        clock = Clock(mtp_recipe.loop, mtp_recipe.optimizer)
        answers, heldout = write_answers(target_folder, draft_recipe.responses, out, say=say)
        train_mtp(mtp_recipe, target_folder, answers, heldout, out, resume=resume, say=say, clock=clock)
    for name in ("target_run", "draft_run", "mtp_run"):
        path = out / name / "summary.json"
        if path.exists():
            report[name] = json.loads(path.read_text(encoding="utf-8"))
    heldout_path = answers_paths(out)[1]
    if heldout_path.exists():
        heldout = Answers.load(heldout_path)
        new = heldout.lengths - heldout.prompt_lengths
        report["answers"] = {
            "heldout_prompts": len(heldout),
            "mean_tokens": round(float(np.mean(new)), 1),
            "unfinished": round(float(np.mean(new >= draft_recipe.responses.max_new_tokens)), 4),
            "repeated_8grams": round(repeated_share(heldout), 4),
        }
        for line in sample_lines(heldout, target_folder / "tokenizer.json"):
            say(line)
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for line in table(report):
        print(line, flush=True)
    say(f"done; results in {out}")
    return report


def table(report: dict[str, Any]) -> list[str]:
    """The report as aligned lines."""
    lines = []
    for stage, values in report.items():
        for key, value in values.items():
            if isinstance(value, dict):
                lines += [f"{stage + '.' + key + '.' + name:44s} {entry}" for name, entry in value.items()]
            else:
                lines.append(f"{stage + '.' + key:44s} {value}")
    return lines


# Share of a boxed run that answers to the training prompts may take (a batch that has begun is finished, and programs
# are compiled besides); a quarter of that for prompts that the target writes itself.
_ANSWERING = 0.25


def boxed(recipe: DraftRecipe, seconds: float) -> tuple[DraftRecipe, Clock]:
    """The recipe with answering and training bounded together, and the clock of both, which starts now."""
    recipe = scaled(recipe, seconds)
    responses = dataclasses.replace(recipe.responses, max_seconds=_ANSWERING * seconds)
    return dataclasses.replace(recipe, responses=responses), Clock(recipe.loop, recipe.optimizer)


def scaled(recipe: Any, seconds: float | None) -> Any:
    """The recipe boxed into `seconds`, if given."""
    if seconds is None:
        return recipe
    return dataclasses.replace(recipe, loop=dataclasses.replace(recipe.loop, steps=None, max_seconds=seconds))


