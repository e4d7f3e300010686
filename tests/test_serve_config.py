"""Flags from a TOML file: what is read, what wins, and what is said of a mistake."""

import argparse
import re
import tomllib
from pathlib import Path

import pytest

from dflash_jax import UserError
from serve import config_file
from serve.__main__ import build_parser, main

ROOT = Path(__file__).parents[1]


def parsed(tmp_path: Path, text: str, *words: str) -> argparse.Namespace:
    (tmp_path / "serve.toml").write_text(text)
    return config_file.parse(build_parser(), ["--config", str(tmp_path / "serve.toml"), *words])


def test_the_file_gives_what_the_command_line_leaves_out(tmp_path: Path) -> None:
    text = 'max-slots = 16\ndrain-seconds = 5\ntoken-file = "tokens"\nhost = "::1"\nhttp-port = 0\ncompression = "gzip"'
    args = parsed(tmp_path, text, "--host", "0.0.0.0", "--max-slots", "8")
    assert (args.host, args.max_slots) == ("0.0.0.0", 8)  # 8 is the default too: given, it still wins
    assert (args.drain_seconds, args.token_file) == (5.0, Path("tokens")) and isinstance(args.drain_seconds, float)
    assert (args.http_port, args.compression, args.port) == (0, "gzip", 50051)
    assert parsed(tmp_path, "") == config_file.parse(build_parser(), ["--config", str(tmp_path / "serve.toml")])
    assert config_file.parse(build_parser(), []) == build_parser().parse_args([])


def test_every_flag_can_be_in_it(tmp_path: Path) -> None:
    samples = {int: 3, float: 2.5, Path: "file", None: "text"}
    actions = [a for a in build_parser()._actions if a.dest not in ("help", "config")]
    assert len(actions) > 20
    for action in actions:
        (flag,) = action.option_strings
        value = next(iter(action.choices)) if action.choices else samples[action.type]
        given = parsed(tmp_path, f"{flag[2:]} = {value!r}")
        assert getattr(given, action.dest) == getattr(build_parser().parse_args([flag, str(value)]), action.dest)


def test_flags_without_a_value_are_true_or_false(tmp_path: Path) -> None:
    def parser() -> argparse.ArgumentParser:
        one = argparse.ArgumentParser()
        config_file.add_flag(one)
        one.add_argument("--loud", action="store_true")
        one.add_argument("--chat", action=argparse.BooleanOptionalAction, default=True)
        return one

    path = tmp_path / "a.toml"
    path.write_text("loud = true\nchat = false\n")
    args = config_file.parse(parser(), ["--config", str(path)])
    assert (args.loud, args.chat) == (True, False)
    assert config_file.parse(parser(), ["--config", str(path), "--chat"]).chat is True
    path.write_text("loud = 1\n")
    with pytest.raises(UserError, match="loud must be true or false, found 1"):
        config_file.parse(parser(), ["--config", str(path)])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-slot = 4", "serve.toml: unknown key 'max-slot'; the nearest flag is 'max-slots'"),
        ("prefix_cache_mib = 4", "serve.toml: unknown key 'prefix_cache_mib'; the nearest flag is 'prefix-cache-mib'"),
        ('config = "other.toml"', "serve.toml: unknown key 'config'; the nearest flag is "),
        ("[server]\nport = 1", "serve.toml: unknown key 'server'; the nearest flag is "),
        ('max-slots = "8"', "serve.toml: max-slots must be a whole number, found '8'"),
        ("max-slots = 8.0", "serve.toml: max-slots must be a whole number, found 8.0"),
        ("max-slots = true", "serve.toml: max-slots must be a whole number, found True"),
        ("drain-seconds = [1]", "serve.toml: drain-seconds must be a number, found [1]"),
        ("token-file = 3", "serve.toml: token-file must be a string, found 3"),
        ('dtype = "float16"', "serve.toml: dtype must be one of auto, bfloat16, float32, found 'float16'"),
        ("max-slots = ", "serve.toml: not a TOML file (Invalid value"),
        ("max-slots = 0", "--max-slots must be at least 1"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "serve.toml").write_text(text)
    assert main(["--config", str(tmp_path / "serve.toml")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(tmp_path / "no.toml")]) == 2
    assert "no.toml: cannot be read (No such file or directory)" in capsys.readouterr().err
    (tmp_path / "latin.toml").write_bytes(b'host = "\xe4"')
    assert main(["--config", str(tmp_path / "latin.toml")]) == 2
    assert "latin.toml: not a TOML file (" in capsys.readouterr().err


def test_the_example_of_the_page_is_read(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/serving.md").read_text(), re.DOTALL)
    args = parsed(tmp_path, text)
    assert {key: getattr(args, key.replace("-", "_")) for key in tomllib.loads(text)} == tomllib.loads(text)
