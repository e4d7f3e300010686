"""The command line: `python -m dflash_jax.generate --prompt "Once upon a time"`.

Generated text and tables go to stdout, progress and the summary line to stderr. Exit status: 0; 1 where --compare finds
that fp32 methods disagree; 2 with one line on stderr for anything the user can put right; 130 after Ctrl-C.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

# Nothing here may import JAX: --help and a mistyped flag must not wait for it.
from dflash_jax import __version__, distributed
from dflash_jax.errors import UserError
from dflash_jax.prompts import PromptText, encode_prompt, read_prompts
from dflash_jax.request import DRAFT_SAMPLING, MAX_LOGPROBS, METHODS, Completion, SamplingParams

if TYPE_CHECKING:
    from dflash_jax.engine import Engine
    from dflash_jax.reporting import CompileProgress, Trace

COMPARED = ("ar", "dflash", "ddtree")
# Those of `load`, whose module imports JAX.
DTYPES = ("auto", "bfloat16", "float32")
KERNELS = ("auto", "xla", "pallas")
# Programs that compile faster than this are not worth a file.
CACHED_FROM_SECONDS = 0.5
CACHE_BYTES = 4 << 30
NO_CACHE = "none"


class _Parser(argparse.ArgumentParser):
    """One line for an error, instead of the usage of thirty flags."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')} (see --help)")


def _budget(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number or 'auto', found {text!r}") from None


def _methods(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in METHODS or name == "auto":
            raise argparse.ArgumentTypeError(f"unknown method {name!r}; give a list such as {','.join(COMPARED)}")
    return names


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected TOKEN=BIAS such as 42=-5, found {text!r}") from None


def build_parser() -> argparse.ArgumentParser:
    """The flags, in groups."""
    parser = _Parser(
        prog="python -m dflash_jax.generate",
        description="Generates text with a target model, losslessly faster with DFlash drafts and DDTree verification.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"dflash-jax {__version__}")
    switch = argparse.BooleanOptionalAction

    models = parser.add_argument_group("models")
    models.add_argument(
        "--model",
        help="Hugging Face folder, Hub id, Orbax folder or GGUF file of the target (default: the bundled pair)",
    )
    models.add_argument("--draft-model", help="the same for its DFlash drafter")
    models.add_argument("--revision", help="branch, tag or commit of Hub ids")
    models.add_argument("--dtype", choices=DTYPES, default="auto", help="of weights and activations (default: auto)")
    models.add_argument("--tp", type=int, default=1, metavar="N", help="devices that share each layer (default: 1)")
    models.add_argument("--max-model-len", type=int, metavar="N", help="longest prompt + text (default: the model's)")
    models.add_argument("--kernels", choices=KERNELS, default="auto", help="implementation (default: auto)")

    processes = parser.add_argument_group(
        "several processes",
        "Start the same command line in each; --tp counts all their devices, and process 0 prints. Flags left out are"
        f" read from {', '.join(distributed.VARIABLES.values())}.",
    )
    processes.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    processes.add_argument("--num-processes", type=int, metavar="N", help="how many there are")
    processes.add_argument("--process-id", type=int, metavar="I", help="which this is, from 0")

    prompts = parser.add_argument_group("prompts")
    prompts.add_argument("stdin", nargs="?", choices=["-"], metavar="-", help="read one prompt from standard input")
    prompts.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated")
    prompts.add_argument(
        "--prompt-file", action="append", default=[], metavar="FILE",
        help="a prompt a line (- for standard input); or .jsonl with an object a line, or .json with an array of them:"
        ' {"prompt": ...} as --prompt, {"text": ...} to continue, {"messages": [...]} a conversation',
    )
    prompts.add_argument(
        "--chat", action=switch, help="put prompts through the chat template (default: if the model has one)"
    )
    prompts.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    prompts.add_argument("--thinking", action=switch, help="passed to the chat template (default: the template's own)")

    decoding = parser.add_argument_group("decoding")
    decoding.add_argument(
        "--method", choices=METHODS, default="auto",
        help="ar: a token a pass; mtp: chains of the checkpoint's own draft head; dflash: a drafter's chains; ddtree:"
        " its trees (default: ddtree with a drafter, else mtp if the checkpoint has the head, else ar)",
    )
    decoding.add_argument(
        "--mtp-steps", type=int, default=3, metavar="N", help="tokens the head drafts a round (default: 3)"
    )
    decoding.add_argument("--tree-budget", type=_budget, default="auto", metavar="N|auto", help="nodes of the tree")
    decoding.add_argument("--block-size", type=int, metavar="N", help="rows of a draft (default: the drafter's)")
    decoding.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="default: 256")
    decoding.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the text (repeatable)")
    decoding.add_argument("--ignore-eos", action="store_true", help="go on past the model's end tokens")

    sampling = parser.add_argument_group(
        "sampling",
        "Greedy unless --temperature is given: the sampling defaults of a model's generation_config.json are not"
        " applied. The steps are taken in this order: penalties, bias, temperature, top-k, top-p, min-p.",
    )
    sampling.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R", help="default: 1 (off)")
    sampling.add_argument("--frequency-penalty", type=float, default=0.0, metavar="F", help="default: 0 (off)")
    sampling.add_argument("--presence-penalty", type=float, default=0.0, metavar="F", help="default: 0 (off)")
    sampling.add_argument(
        "--logit-bias", type=_bias, action="append", default=[], metavar="TOKEN=BIAS",
        help="added to the logit of a token id (repeatable)",
    )
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    sampling.add_argument("--top-k", type=int, default=0, metavar="K", help="default: 0 (off)")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P", help="default: 1 (off)")
    sampling.add_argument("--min-p", type=float, default=0.0, metavar="P", help="default: 0 (off)")
    sampling.add_argument("--seed", type=int, default=0, metavar="N", help="of the noise, for each prompt (default: 0)")
    sampling.add_argument(
        "--draft-sampling", choices=DRAFT_SAMPLING, default="greedy",
        help="probabilistic: draw the chain of --method dflash and accept it by rejection sampling (default: greedy)",
    )
    sampling.add_argument(
        "--logprobs", type=int, metavar="N",
        help=f"with --json: log-probabilities of the tokens and of the N best, 0 to {MAX_LOGPROBS}",
    )

    output = parser.add_argument_group("output")
    output.add_argument(
        "--compare", nargs="?", type=_methods, const=COMPARED, metavar="METHODS",
        help=f"decode with each method, one prompt at a time, and print a table (default: {','.join(COMPARED)},"
        " and mtp where the checkpoint has the head)",
    )
    output.add_argument("--stream", action=switch, help="print text as it comes (default: one prompt on a terminal)")
    output.add_argument(
        "--json", action="store_true",
        help="a JSON object a line on stdout for each prompt (with --compare: each prompt and method)",
    )
    output.add_argument("--progress", action=switch, help="loading and compiling on stderr (default: on a terminal)")
    output.add_argument("--profile", metavar="DIR", help="write a profiler trace of decoding, compilation left out")
    output.add_argument(
        "--compile-cache-dir", metavar="DIR",
        help=f"of compiled programs, or {NO_CACHE} (default: $JAX_COMPILATION_CACHE_DIR, or in ~/.cache/dflash-jax)",
    )
    return parser


def _check(args: argparse.Namespace) -> None:
    """Refuses, before a model is loaded, what no model can serve."""
    if args.compare and args.method != "auto":
        raise UserError(f"--method and --compare exclude each other; give the methods as --compare ar,{args.method}")
    if args.tp < 1:
        raise UserError(f"--tp {args.tp}: must be at least 1")
    if args.logprobs is not None and not args.json:
        raise UserError("--logprobs are printed with --json only; add it")
    if args.draft_sampling != "greedy" and args.compare:
        raise UserError("--draft-sampling probabilistic draws other tokens than the methods of --compare; leave it out")
    if args.stream and (args.json or args.compare):
        raise UserError(f"--stream cannot be combined with {'--json' if args.json else '--compare'}; leave it out")


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        repetition_penalty=args.repetition_penalty,
        logit_bias=tuple(args.logit_bias),
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
        method=args.method,
        tree_budget=args.tree_budget,
        block_size=args.block_size,
        seed=args.seed,
        draft_sampling=args.draft_sampling,
        logprobs=args.logprobs,
        mtp_steps=args.mtp_steps,
    )


def set_up_compile_cache(folder: str | None) -> None:
    """Keeps compiled programs between runs. A damaged entry costs its compilation and nothing else.

    Args:
      folder: where; "none" for nowhere; None for the user's cache folder, unless JAX' own variable names another.

    Raises:
      UserError: a folder that was asked for cannot be made.
    """
    import jax

    from dflash_jax import executables

    if folder == NO_CACHE:
        executables.keep_in(None)
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if folder is None and (own := os.environ.get("JAX_COMPILATION_CACHE_DIR")):
        executables.keep_in(Path(own) / "programs")
        return
    if folder is None:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
        path = base / "dflash-jax" / f"xla-{executables.host_digest()}"
    else:
        path = Path(folder)
    try:
        path = path.expanduser()
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        if folder is None:
            return  # a read-only home: every run compiles
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--compile-cache-dir {folder}: cannot be made ({reason})") from None
    executables.keep_in(path / "programs")
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", CACHED_FROM_SECONDS)
    # JAX locks the folder against other processes only if its size is bounded.
    jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES)


def _start_jax(args: argparse.Namespace) -> None:
    """Imports JAX, joins the other processes and finds the devices; `UserError` where there are none."""
    several = distributed.settings(args.coordinator, args.num_processes, args.process_id)
    import jax

    set_up_compile_cache(args.compile_cache_dir)
    if several is not None:
        distributed.connect(*several)
        process = several[2]
        distributed.claim_stdout(process)
        args.stream = bool(args.stream)  # not by each one's own terminal: they must run the same programs
        if process:
            args.progress, args.json = False, True  # says nothing: its stdout is gone, and JSON has no summary
    try:
        jax.devices()
    except RuntimeError as error:
        asked = os.environ.get("JAX_PLATFORMS", "")
        raise UserError(f"JAX_PLATFORMS={asked}: JAX finds no device ({str(error).splitlines()[0]})") from None


def _trace(folder: str | None) -> "Trace | None":
    """What to enter around profiled decoding; `UserError` where the trace could not be written."""
    if folder is None:
        return None
    import jax

    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--profile {folder}: cannot be made ({error.strerror})") from None
    return lambda: jax.profiler.trace(str(path))


def _heading(number: int, prompt: PromptText, width: int = 72) -> str:
    title = prompt.title
    return f"--- prompt {number}: {title if len(title) <= width else title[: width - 1] + '…'}"


def _print_json(completion: Completion) -> None:
    print(json.dumps(dataclasses.asdict(completion)), flush=True)


def _stream(engine: "Engine", prompt: list[int], params: SamplingParams, progress: "CompileProgress") -> Completion:
    """Prints text as rounds finish."""
    completion = None
    for chunk in engine.stream(prompt, params):
        progress.stop()  # its line and the text share a terminal
        print(chunk.text, end="", flush=True)
        completion = chunk.completion
    assert completion is not None
    print(flush=True)
    return completion


def _generate(
    engine: "Engine",
    args: argparse.Namespace,
    prompts: Sequence[PromptText],
    ids: Sequence[list[int]],
    params: SamplingParams,
    progress: "CompileProgress",
) -> int:
    """One method: text, streamed or at the end, or JSON; then the summary."""
    from dflash_jax.reporting import summary

    trace = _trace(args.profile)
    if trace is not None:
        engine.generate(ids, params)  # compiles
    stream = not args.json and len(prompts) == 1 and sys.stdout.isatty() if args.stream is None else args.stream
    several = len(prompts) > 1
    completions: list[Completion] = []
    compiled, start = engine.programs.compile_seconds, time.perf_counter()
    with contextlib.nullcontext() if trace is None else trace():
        if stream:
            for i, prompt in enumerate(prompts):
                if several:
                    print(_heading(i + 1, prompt), flush=True)
                completions.append(_stream(engine, ids[i], params, progress))
        else:
            completions = engine.generate(ids, params)
    wall = time.perf_counter() - start - (engine.programs.compile_seconds - compiled)
    progress.stop()
    for i, completion in enumerate(completions):
        if args.json:
            _print_json(completion)
        elif not stream:
            if several:
                print(_heading(i + 1, prompts[i]))
            print(completion.text, flush=True)
    if not args.json:
        print(summary(completions, wall, auto=params.method == "auto"), flush=True, file=sys.stderr)
    return 0


def _compare(
    engine: "Engine",
    args: argparse.Namespace,
    prompts: Sequence[PromptText],
    ids: Sequence[list[int]],
    params: SamplingParams,
    progress: "CompileProgress",
) -> int:
    """Several methods: the text once, a table, and whether they agree."""
    from dflash_jax.reporting import comparison_table, differences, measure

    trace = _trace(args.profile)
    methods = args.compare
    if methods is COMPARED and engine.mtp is not None:
        methods = ("ar", "mtp", *COMPARED[1:])
    each = {method: dataclasses.replace(params, method=method) for method in methods}
    for one in each.values():
        engine.method_of(one)  # a method that needs a drafter is refused before the others have run
    results: dict[str, Sequence[Completion]] = {}
    for method, one in each.items():
        progress.method = method
        results[method] = measure(engine, ids, one, trace)
        progress.stop()
        if method == methods[0] and not args.json:
            for i, (prompt, completion) in enumerate(zip(prompts, results[method], strict=True), 1):
                print(f"{_heading(i, prompt)}\n{completion.text}\n", flush=True)
    lines = differences(results)
    if args.json:
        for completions in zip(*results.values(), strict=True):
            for completion in completions:
                _print_json(completion)
    else:
        first = results[methods[0]]
        print(comparison_table(results))
        tokens = sum(c.completion_tokens for c in first)
        what = f"{tokens} tokens, {first[0].device}, {first[0].dtype}"
        verdict = "NOT identical" if lines else "identical tokens from all methods"
        print(f"{verdict} ({what})")
    exact = engine.target.dtype == "float32"
    for line in lines:
        hint = "" if exact else " (legal in bfloat16 only where two logits are within rounding; see --dtype float32)"
        print(f"{line}{hint}", file=sys.stderr)
    return 1 if lines and exact else 0


def _run(argv: Sequence[str] | None) -> int:
    args = build_parser().parse_args(argv)
    _check(args)
    params = _sampling_params(args)
    prompts = read_prompts([*args.prompt, *([args.stdin] if args.stdin else [])], args.prompt_file)
    _start_jax(args)
    from dflash_jax import loading
    from dflash_jax.reporting import CompileProgress

    engine = loading.load(
        args.model,
        args.draft_model,
        tp=args.tp,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        kernels=args.kernels,
        revision=args.revision,
        progress=args.progress,
    )
    ids = [
        encode_prompt(engine, prompt, chat=args.chat, system=args.system, thinking=args.thinking) for prompt in prompts
    ]
    progress = CompileProgress(engine, sys.stderr.isatty() if args.progress is None else args.progress)
    try:
        return (_compare if args.compare else _generate)(engine, args, prompts, ids, params, progress)
    finally:
        progress.stop()


def _fail(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status (see the module's docstring); prints, never raises.

    Args:
      argv: arguments; None for those of the process.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character still gets the rest
    try:
        with warnings.catch_warnings():
            # Of a damaged entry of the compile cache, which is compiled again.
            warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry")
            try:
                return _run(argv)
            finally:
                sys.stdout.flush()  # here, where a closed pipe is expected
    except SystemExit as done:  # --help and --version
        return done.code if isinstance(done.code, int) else 0
    except UserError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Python flushes stdout once more when it ends, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        return _fail(f"{error.filename or 'input or output'}: {error.strerror or error}")
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _fail(
            "out of device memory; use fewer --max-new-tokens, a smaller --tree-budget or --dtype bfloat16 "
            f"({str(error).splitlines()[0]})"
        )


if __name__ == "__main__":
    sys.exit(main())
