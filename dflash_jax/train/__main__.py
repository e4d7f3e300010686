"""Command line of training: `python -m dflash_jax.train STAGE`."""

import argparse
import sys
from pathlib import Path

from dflash_jax.errors import UserError
from dflash_jax.train.settings import RECIPES, load_draft_recipe, load_mtp_recipe, load_target_recipe

STAGES = ("corpus", "target", "responses", "draft", "mtp", "bundled")
# What `bundled` runs.
BUNDLED_STAGES = ("target", "responses", "draft", "mtp")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dflash_jax.train", description="Train a hybrid target, its drafter and its own draft head."
    )
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument(
        "--config", type=Path, help="recipe of the stage (default: the bundled pair's; `responses` reads the drafter's)"
    )
    parser.add_argument("--target-config", type=Path, help="`bundled`: recipe of the target")
    parser.add_argument("--draft-config", type=Path, help="`bundled`: recipe of the drafter")
    parser.add_argument("--mtp-config", type=Path, help="`bundled`: recipe of the target's own draft head")
    parser.add_argument("--out", type=Path, default=Path("runs/bundled"), help="run folder (default: %(default)s)")
    parser.add_argument(
        "--target", help="the frozen target: a folder, GGUF file or Hub id (default: the folder OUT/target)"
    )
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    parser.add_argument(
        "--seconds", type=float, help="`draft`: box loading, answering and training together into so many wall seconds"
    )
    parser.add_argument("--seconds-target", type=float, help="box the target's stage into so many wall seconds")
    parser.add_argument("--seconds-draft", type=float, help="box the drafter's training likewise")
    parser.add_argument("--seconds-mtp", type=float, help="box the training of the target's own draft head likewise")
    parser.add_argument("--stages", default=",".join(BUNDLED_STAGES), help="`bundled`: which stages to run")
    return parser


def _run(arguments: argparse.Namespace) -> None:
    stage, out = arguments.stage, arguments.out
    bundled_target, bundled_draft = RECIPES / "bundled_target.json", RECIPES / "bundled_draft.json"
    bundled_mtp = RECIPES / "bundled_mtp.json"
    if stage == "corpus":
        # No JAX here: the process runs beside one that owns the device.
        from dflash_jax.train.corpus_files import write_corpus

        write_corpus(load_target_recipe(arguments.config or bundled_target).corpus, out)
        return
    from dflash_jax.train import bundled

    if stage == "bundled":
        stages = tuple(arguments.stages.split(","))
        unknown = sorted(set(stages) - set(BUNDLED_STAGES))
        if unknown:
            raise UserError(f"--stages: unknown stage '{unknown[0]}' (known: {', '.join(BUNDLED_STAGES)})")
        target_path = arguments.target_config or bundled_target
        draft_path = arguments.draft_config or bundled_draft
        bundled.run(
            bundled.scaled(load_target_recipe(target_path), arguments.seconds_target), target_path,
            bundled.scaled(load_draft_recipe(draft_path), arguments.seconds_draft), draft_path,
            bundled.scaled(load_mtp_recipe(arguments.mtp_config or bundled_mtp), arguments.seconds_mtp),
            out, stages=stages, resume=arguments.resume,
        )
        return
    say = bundled.narrator()
    if stage == "target":
        from dflash_jax.train.target_loop import train_target

        path = arguments.config or bundled_target
        bundled.copy_side_files(out / "target")
        recipe = bundled.scaled(load_target_recipe(path), arguments.seconds_target)
        train_target(recipe, path, out, resume=arguments.resume, say=say)
        return
    from convert import resolve_model

    folder = resolve_model(arguments.target or out / "target")
    if stage == "mtp":
        from dflash_jax.train.mtp_loop import train_mtp

        head = bundled.scaled(load_mtp_recipe(arguments.config or bundled_mtp), arguments.seconds_mtp)
        answers, heldout = bundled.write_answers(folder, head.responses, out, say=say)
        train_mtp(head, folder, answers, heldout, out, resume=arguments.resume, say=say)
        return
    path = arguments.config or bundled_draft
    recipe = bundled.scaled(load_draft_recipe(path), arguments.seconds_draft)
    clock = None
    if arguments.seconds is not None:
        recipe, clock = bundled.boxed(recipe, arguments.seconds)
    answers, heldout = bundled.write_answers(folder, recipe.responses, out, say=say)
    if stage == "draft":
        from convert import load_target
        from dflash_jax.train.draft_loop import train_draft

        _, target = load_target(folder, "bfloat16")
        train_draft(recipe, path, target, answers, heldout, out, resume=arguments.resume, say=say, clock=clock)


def main(argv: list[str] | None = None) -> int:
    """Runs one stage; returns the exit status (2 for errors a user can cause)."""
    try:
        _run(_parser().parse_args(argv))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
