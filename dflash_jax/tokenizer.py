"""Text <-> token ids, chat templates, and text that streams.

A model folder in Hugging Face layout is read here and nowhere else: tokenizer.json (the `tokenizers` library
does the work), tokenizer_config.json (names of the special tokens, further added tokens, chat templates),
chat_template.jinja. Only byte-level BPE is served (all Qwen models); another decoder is a `UserError`,
because the streaming below relies on every token being a fixed string of bytes.

A chat template is a program that came with the weights. It runs in Jinja's immutable sandbox, and reaching
for anything the sandbox hides is an error rather than an empty string. The sandbox bounds what a template can
touch, not how long it runs.
"""

import codecs
import datetime
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers
from tokenizers import AddedToken, decoders

from dflash_jax.config import read_json
from dflash_jax.errors import UserError

NAMED_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _one_line(value: object) -> str:
    return " ".join(str(value).split())


@functools.cache
def _char_to_byte() -> dict[str, int]:
    """The byte-level alphabet of GPT-2, which every byte-level BPE uses: one printable character a byte.

    Printable Latin-1 bytes stand for themselves; the other 68 take code points from 256 up, in byte order.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = sorted(set(range(256)) - set(plain))
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(moved)}


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` ... `{% endgeneration %}` marks text for training masks; it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Refusal(Exception):
    """The template itself called `raise_exception`."""


class _TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja as Hugging Face templates expect it: its whitespace rules, globals and filters, sandboxed."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        )
        names: dict[str, Any] = self.globals  # declared for Jinja's own functions only
        names["raise_exception"] = self._raise_exception
        names["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        # Jinja's own `tojson` escapes <, > and & for HTML, which would change the prompt.
        self.filters["tojson"] = self._to_json

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        # Jinja hands out an undefined that prints as "": an attack would fail silently. Say so instead.
        raise jinja2.sandbox.SecurityError(
            f"access to attribute {attribute!r} of {type(obj).__name__!r} is unsafe"
        )

    @staticmethod
    def _raise_exception(message: str) -> None:
        raise _Refusal(message)

    @staticmethod
    def _to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )


def template_variables(source: str) -> set[str]:
    """What a chat template reads that is given to it from outside; empty for one that is broken."""
    environment = _TemplateEnvironment()
    try:
        return jinja2.meta.find_undeclared_variables(environment.parse(source))
    except jinja2.TemplateSyntaxError:  # rendering it says what is wrong
        return set()


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text ({_one_line(error)})") from None


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Named chat templates as name -> (source, file it came from); empty where the folder has none.

    Template files win over tokenizer_config.json, which holds either one string or a list of named ones.
    """
    found: dict[str, tuple[str, str]] = {}
    for file in sorted(folder.glob("additional_chat_templates/*.jinja")):
        found[file.stem] = (_read_text(file), str(file))
    main = folder / "chat_template.jinja"
    if main.exists():
        found["default"] = (_read_text(main), str(main))
    if found:
        return found
    config_path = folder / "tokenizer_config.json"
    value = config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": (value, str(config_path))}
    if isinstance(value, dict):
        value = [{"name": name, "template": source} for name, source in value.items()]
    for entry in value if isinstance(value, list) else [None]:
        name, source = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(source, str):
            raise UserError(
                f"{config_path}: 'chat_template' must be a string or a list of {{'name', 'template'}} objects"
            )
        found[name] = (source, str(config_path))
    return found


def _content(value: Any) -> str | None:
    """The text of a token given as a string or as a serialised AddedToken."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Special tokens by name, and all of them. special_tokens_map.json fills keys that the config lacks."""
    map_path = folder / "special_tokens_map.json"
    merged = {**(read_json(map_path) if map_path.exists() else {}), **config}
    named = {key: text for key in NAMED_SPECIAL if (text := _content(merged.get(key))) is not None}
    others: list[str] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = merged.get(key) or []
        if isinstance(value, dict):
            named |= {
                str(name): text for name, entry in value.items() if (text := _content(entry)) is not None
            }
        elif not isinstance(value, list):
            raise UserError(f"{folder / 'tokenizer_config.json'}: '{key}' must be a list or object of tokens")
        else:
            others += [text for entry in value if (text := _content(entry)) is not None]
    return named, list(dict.fromkeys([*named.values(), *others]))


def _add_configured_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], source: str) -> None:
    """Adds the tokens that only tokenizer_config.json lists, and takes over its flags where they differ."""
    declared = config.get("added_tokens_decoder") or {}
    try:
        entries = sorted((int(number), dict(entry)) for number, entry in declared.items())
    except (AttributeError, TypeError, ValueError):
        raise UserError(f"{source}: 'added_tokens_decoder' must map token ids to objects") from None
    present = backend.get_added_tokens_decoder()
    for number, entry in entries:
        content = _content(entry)
        if content is None:
            raise UserError(f"{source}: 'added_tokens_decoder' has no 'content' for id {number}")
        flags = {
            key: bool(entry[key])
            for key in ("single_word", "lstrip", "rstrip", "normalized", "special")
            if key in entry
        }
        token = AddedToken(content, **flags)
        if number in present and present[number].__getstate__() == token.__getstate__():
            continue
        if token.special:
            backend.add_special_tokens([token])
        else:
            backend.add_tokens([token])
        if backend.token_to_id(content) != number:
            raise UserError(
                f"{source}: 'added_tokens_decoder' gives {content!r} the id {number}, "
                f"but with tokenizer.json it is {backend.token_to_id(content)}"
            )


def _is_byte_level(decoder: Any) -> bool:
    """Whether decoding is exactly "join the tokens' bytes, read them as UTF-8"."""
    if isinstance(decoder, decoders.Sequence):
        kinds = [part.get("type") for part in json.loads(decoder.__getstate__()).get("decoders", [])]
        return kinds == ["ByteLevel"]
    return isinstance(decoder, decoders.ByteLevel)


class Tokenizer:
    """A byte-level BPE tokenizer with its special tokens and chat templates.

    Attributes:
      backend: the `tokenizers.Tokenizer` that does the work.
      special: special tokens by Hugging Face name (`eos_token`, `pad_token`, ...), as text.
      special_ids: ids of all tokens that `decode` leaves out by default. Marked up tokens that are meant to
        be read, such as <think> in Qwen3.5, are added tokens but not special.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, tuple[str, str]] | None = None,
        source: str = "tokenizer.json",
    ):
        """Wraps a loaded backend; `from_folder` is the usual way in.

        Args:
          backend: must have a ByteLevel decoder; its truncation and padding are switched off.
          special: name -> text of special tokens, all present in the backend.
          chat_templates: name -> (Jinja source, file it came from).
          source: the file's name, for errors.

        Raises:
          UserError: the decoder is not ByteLevel, or a named special token is not in the vocabulary.
        """
        if not _is_byte_level(backend.decoder):
            kind = type(backend.decoder).__name__
            raise UserError(
                f"{source}: decoder {kind} is not supported (supported: 'ByteLevel', as Qwen models have)"
            )
        # Saved training-time settings would silently cut or pad prompts.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special = dict(special or {})
        for name, text in self.special.items():
            if backend.token_to_id(text) is None:
                raise UserError(f"{source}: '{name}' {text!r} is not in the vocabulary")
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        self._size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self._templates = dict(chat_templates or {})
        self._compiled: dict[str, jinja2.Template] = {}
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer":
        """Reads the tokenizer of a Hugging Face model folder.

        Args:
          path: a folder with tokenizer.json and tokenizer_config.json; chat_template.jinja,
            additional_chat_templates/ and special_tokens_map.json are read where present.

        Raises:
          UserError: a file is missing, broken, contradicts another one, or is of an unsupported kind.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; a Hugging Face model folder is needed")
        model_path, config_path = folder / "tokenizer.json", folder / "tokenizer_config.json"
        if not model_path.exists():
            raise UserError(
                f"{model_path}: no such file; a Hugging Face model folder with a fast tokenizer has one"
            )
        config = read_json(config_path)
        try:
            backend = tokenizers.Tokenizer.from_file(str(model_path))
        except Exception as error:  # The library raises bare Exception, whatever is wrong.
            raise UserError(f"{model_path}: not a readable tokenizer ({_one_line(error)})") from None
        _add_configured_tokens(backend, config, str(config_path))
        named, all_special = _special_tokens(folder, config)
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        for text in all_special:
            # In the plain vocabulary only, it would be split by BPE and shown to the user.
            if text not in known and backend.token_to_id(text) is not None:
                backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])
        return cls(
            backend,
            special=named,
            chat_templates=_chat_templates(folder, config),
            source=str(model_path),
        )

    @property
    def vocab_size(self) -> int:
        """One more than the highest id that has a token; a model's embedding may be padded beyond it."""
        return self._size

    @property
    def bos_token_id(self) -> int | None:
        """Id of the beginning-of-text token, where the folder names one."""
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of `eos_token`. A model may stop on more: see `TargetConfig.eos_token_ids`."""
        return self._named_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        """Id of the padding token, where the folder names one."""
        return self._named_id("pad_token")

    def _named_id(self, name: str) -> int | None:
        text = self.special.get(name)
        return None if text is None else self.backend.token_to_id(text)

    def token_to_id(self, token: str) -> int | None:
        """Id of a token given in its vocabulary spelling (byte-level alphabet; added tokens as they are)."""
        return self.backend.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Added and special tokens written out in it become their single ids.

        Args:
          text: any text without lone surrogates.
          add_special_tokens: let the folder's post-processor add what it adds to a plain prompt (for Qwen:
            nothing). Pass False for a rendered chat, whose template has written every special token itself.

        Raises:
          UserError: the text has a lone surrogate, so it is not Unicode text (say a bad byte in an argument).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(
                f"prompt: not valid Unicode text (lone surrogate at character {error.start})"
            ) from None
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD.

        Ids that have no token (rows of a padded embedding, beyond `vocab_size`) yield nothing. Text is never
        tidied up (`clean_up_tokenization_spaces` is ignored): what the model wrote is what comes out.
        """
        known = [number for number in map(int, ids) if 0 <= number < self._size]
        return self.backend.decode(known, skip_special_tokens=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token contributes to the text; empty for an id without a token."""
        cached = self._bytes.get(token_id)
        if cached is None:
            token = self.backend.id_to_token(token_id) if 0 <= token_id < self._size else None
            table = _char_to_byte()
            if token is None:
                cached = b""
            elif all(char in table for char in token):
                cached = bytes(table[char] for char in token)
            else:
                # An added token with a character outside the alphabet: the decoder takes it literally.
                cached = token.encode("utf-8")
            self._bytes[token_id] = cached
        return cached

    def detokenizer(self, skip_special: bool = True) -> "IncrementalDetokenizer":
        """A fresh streaming decoder for one generated sequence."""
        return IncrementalDetokenizer(self, skip_special)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can work."""
        return bool(self._templates)

    def _template_name(self, tools: bool) -> str:
        if not self._templates:
            raise UserError(
                "chat: this model has no chat template (chat_template.jinja); use plain prompts (--no-chat)"
            )
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            names = ", ".join(sorted(self._templates))
            raise UserError(f"chat: this model's templates have no 'default' among their names ({names})")
        return name

    def chat_template_source(self, *, tools: bool) -> str:
        """The Jinja source that `apply_chat_template` renders, with tools or without.

        Raises:
          UserError: there is no chat template.
        """
        return self._templates[self._template_name(tools)][0]

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._compiled:
            source, file = self._templates[name]
            try:
                self._compiled[name] = _TemplateEnvironment().from_string(source)
            except jinja2.TemplateSyntaxError as error:
                words = f"chat template, line {error.lineno}: {_one_line(error.message)}"
                raise UserError(words, file=file) from None
        return self._compiled[name]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders a conversation as prompt text; encode it with `add_special_tokens=False`.

        Args:
          messages: objects with `role` and `content` (and what else the template knows: `tool_calls`, ...).
          add_generation_prompt: end with the opening of the assistant's turn.
          enable_thinking: passed on only when not None, so that None leaves the template's own default.
          tools: JSON schemas of callable functions; selects the template named "tool_use" where there is one.
          template_arguments: further variables that a template knows, such as `preserve_thinking`.

        Raises:
          UserError: there is no chat template, or it is broken or unsafe or refuses the messages.
        """
        name = self._template_name(tools is not None)
        template, file = self._template(name), self._templates[name][1]
        arguments: dict[str, Any] = {**self.special, **(template_arguments or {})}
        arguments |= {"messages": messages, "tools": tools, "documents": None}
        arguments["add_generation_prompt"] = add_generation_prompt
        if enable_thinking is not None:
            arguments["enable_thinking"] = enable_thinking
        try:
            return template.render(arguments)
        except _Refusal as error:
            raise UserError(f"the chat template refuses these messages: {_one_line(error)}", file=file) from None
        except jinja2.sandbox.SecurityError as error:
            raise UserError(f"the chat template is unsafe: {_one_line(error)}", file=file) from None
        except Exception as error:  # A template is foreign code and can fail in any way.
            raise UserError(f"chat template failed: {type(error).__name__}: {_one_line(error)}", file=file) from None


class IncrementalDetokenizer:
    """Streams the text of one sequence, in whole characters.

    All `push` results and the final `flush` together equal `Tokenizer.decode` of all ids. In a byte-level
    vocabulary every token is a fixed byte string, so an incremental UTF-8 decoder is exact where re-decoding
    a window of tokens is not: it costs O(1) a token, holds back at most three bytes, and cannot mistake a
    U+FFFD that the model wrote, or a run of invalid bytes, for a character that is still to come.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next token ids and returns the characters they complete (possibly none).

        Bytes that cannot become a character come out as U+FFFD at once; ids without a token yield nothing.
        """
        pieces = [
            self._tokenizer.token_bytes(number) for number in map(int, ids) if number not in self._skipped
        ]
        return self._decoder.decode(b"".join(pieces))

    def flush(self) -> str:
        """Ends the sequence: U+FFFD if a character is unfinished, else "". The object is then as new."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
