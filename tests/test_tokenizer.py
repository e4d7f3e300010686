"""Tokenizer files, chat templates and streaming, on a small byte-level BPE trained in the tests."""

import datetime
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from dflash_jax.errors import UserError
from dflash_jax.tokenizer import Tokenizer

SENTENCES = [
    "The quick brown fox jumps over the lazy dog. " * 3,
    "def add(a, b):\n    return a + b\n" * 3,
    "naïve café, größer als 3,14 € — 你好，世界。你好！ 日本語のテスト 👍🏽 👩‍👩‍👧",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Added, but shown to the reader. The last two leave the byte-level alphabet: a space, a three-byte character.
READABLE = ["<think>", "</think>", "<tool call>", "<▁>"]

CHAT = """\
{%- if tools %}
<|im_start|>system
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
{%- if messages[0].role == 'system' %}
{{ messages[0].content }}
{%- endif %}
<|im_end|>
{% elif messages[0].role == 'system' %}
<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- if message.role not in ['user', 'assistant'] %}
        {{- raise_exception('unknown role:\\n' ~ message.role) }}
    {%- endif %}
<|im_start|>{{ message.role }}
{% generation %}
{{ message.content }}{{ eos_token }}
{% endgeneration %}
{% endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}
<think>

</think>

{% elif enable_thinking is defined %}
<think>
{% endif %}
{%- endif %}
"""


def build_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    backend.add_tokens([AddedToken(text, normalized=False) for text in READABLE])
    return backend


TOKENIZER = Tokenizer(build_backend(), special={"eos_token": "<|im_end|>"})
IM_START, IM_END = TOKENIZER.token_to_id("<|im_start|>"), TOKENIZER.token_to_id("<|im_end|>")


def write_folder(folder: Path, config: dict | None = None, template: str | None = None) -> Path:
    build_backend().save(str(folder / "tokenizer.json"))
    values = {"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}, "bos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(values | (config or {})), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def refusal(call, *args, **kwargs) -> str:
    """The message of the `UserError` that a call raises, checked to be one line."""
    with pytest.raises(UserError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


def test_reads_a_folder(tmp_path):
    tokenizer = Tokenizer.from_folder(str(write_folder(tmp_path)))
    assert tokenizer.eos_token_id == IM_END
    assert tokenizer.pad_token_id == TOKENIZER.token_to_id("<|endoftext|>")
    assert tokenizer.bos_token_id is None
    assert not tokenizer.has_chat_template
    assert tokenizer.vocab_size == build_backend().get_vocab_size()
    assert tokenizer.encode(READABLE[-1]) == [tokenizer.vocab_size - 1]
    assert tokenizer.special_ids == {0, 1, 2}
    assert "no chat template" in refusal(tokenizer.apply_chat_template, [{"role": "user", "content": "x"}])


def test_saved_truncation_and_padding_do_not_touch_prompts(tmp_path):
    write_folder(tmp_path)
    backend = build_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "a, b, c, d, e, f"
    assert Tokenizer.from_folder(tmp_path).encode(text) == TOKENIZER.encode(text)


def test_encode_adds_only_what_the_post_processor_adds():
    backend = build_backend()
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer = Tokenizer(backend)
    plain = TOKENIZER.encode("the fox")
    assert 0 not in plain
    assert tokenizer.encode("the fox") == [0, *plain]
    assert tokenizer.encode("the fox", add_special_tokens=False) == plain


def test_special_tokens_in_text_become_single_ids():
    ids = TOKENIZER.encode("<|im_start|>user\nhi<|im_end|>\n", add_special_tokens=False)
    assert ids[0] == IM_START
    assert ids.count(IM_END) == 1
    assert TOKENIZER.decode(ids) == "user\nhi\n"
    assert TOKENIZER.decode(ids, skip_special=False) == "<|im_start|>user\nhi<|im_end|>\n"
    # Added but not special: stays readable.
    assert TOKENIZER.decode(TOKENIZER.encode("<think>a</think>")) == "<think>a</think>"


def test_lone_surrogate_is_refused():
    assert "character 2" in refusal(TOKENIZER.encode, "ab\udcff")


def test_ids_without_a_token_yield_nothing():
    ids = TOKENIZER.encode("the dog")
    padded = [ids[0], TOKENIZER.vocab_size, *ids[1:], 248319, 2**40, -1]
    assert TOKENIZER.decode(padded) == "the dog"
    assert TOKENIZER.decode(np.asarray(padded)) == "the dog"
    stream = TOKENIZER.detokenizer()
    assert stream.push(np.asarray(padded)) + stream.flush() == "the dog"


def test_config_adds_tokens_and_flags(tmp_path):
    new = TOKENIZER.vocab_size
    think = TOKENIZER.token_to_id("<think>")
    entries = {
        str(new): {"content": "<|extra|>", "special": True},
        str(think): {"content": "<think>", "special": True, "normalized": False},
    }
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, {"added_tokens_decoder": entries}))
    assert tokenizer.vocab_size == new + 1
    assert tokenizer.encode("a<|extra|>b")[1] == new
    assert tokenizer.decode(tokenizer.encode("a<|extra|><think>b")) == "ab"


def test_contradicting_added_token_is_refused(tmp_path):
    write_folder(tmp_path, {"added_tokens_decoder": {"5000": {"content": "<|extra|>", "special": True}}})
    message = refusal(Tokenizer.from_folder, tmp_path)
    assert "tokenizer_config.json" in message
    assert "5000" in message


@pytest.mark.parametrize("key", ["eos_token", "additional_special_tokens", "extra_special_tokens"])
def test_special_token_of_the_plain_vocabulary_becomes_special(tmp_path, key):
    # "def" comes from merges. Naming it as special makes it a token of its own wherever it stands, and hides it.
    plain = TOKENIZER.token_to_id("def")
    assert plain is not None
    assert plain not in TOKENIZER.special_ids
    value = "def" if key == "eos_token" else ["def"]
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, {key: value}))
    assert plain in tokenizer.special_ids
    assert tokenizer.decode(tokenizer.encode("xdefy")) == "xy"


def test_special_tokens_map_fills_gaps_only(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": "<|endoftext|>", "unk_token": {"content": "<|im_start|>"}}), encoding="utf-8"
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.special["eos_token"] == "<|im_end|>"
    assert tokenizer.special["unk_token"] == "<|im_start|>"


def test_broken_folders_are_refused(tmp_path):
    assert "no such folder" in refusal(Tokenizer.from_folder, tmp_path / "absent")
    assert "tokenizer.json" in refusal(Tokenizer.from_folder, tmp_path)
    write_folder(tmp_path, {"eos_token": "<|nowhere|>"})
    assert "'eos_token' '<|nowhere|>'" in refusal(Tokenizer.from_folder, tmp_path)
    write_folder(tmp_path, {"additional_special_tokens": "<|im_end|>"})
    assert "'additional_special_tokens'" in refusal(Tokenizer.from_folder, tmp_path)
    write_folder(tmp_path, {"chat_template": 3})
    assert "'chat_template'" in refusal(Tokenizer.from_folder, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{\n}", encoding="utf-8")
    assert "tokenizer.json: not a readable tokenizer" in refusal(Tokenizer.from_folder, tmp_path)
    write_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert "tokenizer_config.json" in refusal(Tokenizer.from_folder, tmp_path)


def test_other_decoders_are_refused():
    backend = build_backend()
    backend.decoder = decoders.Metaspace()
    assert "Metaspace" in refusal(Tokenizer, backend)
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    assert "Sequence" in refusal(Tokenizer, backend)
    backend.decoder = decoders.Sequence([decoders.ByteLevel()])
    assert Tokenizer(backend).decode(TOKENIZER.encode("the dog")) == "the dog"


# --- chat templates ---


@pytest.fixture
def chat(tmp_path) -> Tokenizer:
    return Tokenizer.from_folder(write_folder(tmp_path, {"chat_template": "wrong one"}, CHAT))


USER = {"role": "user", "content": "1 < 2 & 'ä'?"}


def test_chat_renders_a_conversation(chat):
    messages = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Why?"},
    ]
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n1 < 2 & 'ä'?<|im_end|>\n"
        "<|im_start|>assistant\nYes.<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n"
    )
    assert chat.apply_chat_template(messages, add_generation_prompt=False) == expected
    prompt = chat.apply_chat_template(messages)
    assert prompt == expected + "<|im_start|>assistant\n"
    ids = chat.encode(prompt, add_special_tokens=False)
    assert ids.count(IM_START) == 5
    assert ids.count(IM_END) == 4


def test_chat_thinking_is_passed_only_when_given(chat):
    end = "<|im_start|>assistant\n"
    assert chat.apply_chat_template([USER]).endswith(end)
    assert chat.apply_chat_template([USER], enable_thinking=True).endswith(end + "<think>\n")
    assert chat.apply_chat_template([USER], enable_thinking=False).endswith(end + "<think>\n\n</think>\n\n")


def test_chat_tools_are_json_without_escapes(chat):
    tool = {"type": "function", "function": {"name": "größe", "description": "a < b & c > 'd'"}}
    prompt = chat.apply_chat_template([{"role": "system", "content": "S"}, USER], tools=[tool])
    assert json.dumps(tool, ensure_ascii=False) in prompt
    assert prompt.startswith("<|im_start|>system\n{")


def test_chat_template_sources(tmp_path):
    message = [{"role": "user", "content": "hi"}]
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, {"chat_template": named}))
    assert tokenizer.apply_chat_template(message) == "plain"
    assert tokenizer.apply_chat_template(message, tools=[{}]) == "tools"
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, {"chat_template": "from config"}))
    assert tokenizer.apply_chat_template(message) == "from config"
    write_folder(tmp_path, {"chat_template": named[1:]})
    assert "tool_use" in refusal(Tokenizer.from_folder(tmp_path).apply_chat_template, message)
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, {"chat_template": named}, "from file"))
    assert tokenizer.apply_chat_template(message, tools=[{}]) == "from file"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("named file", encoding="utf-8")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.apply_chat_template(message) == "from file"
    assert tokenizer.apply_chat_template(message, tools=[{}]) == "named file"


def render(template: str, **kwargs) -> str:
    tokenizer = Tokenizer(
        build_backend(), chat_templates={"default": (template, "folder/chat_template.jinja")}
    )
    return tokenizer.apply_chat_template([USER], **kwargs)


def test_template_whitespace_rules():
    # Lines that hold only a block leave nothing behind: neither their indentation nor their line end.
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


def test_template_globals():
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)
    assert render("{{ [2, 'é'] | tojson(indent=1) }}") == '[\n 2,\n "é"\n]'
    assert render("{{ {'b': 1, 'a': 2} | tojson }}") == '{"b": 1, "a": 2}'
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{{ preserve }}", template_arguments={"preserve": "kept"}) == "kept"
    # Ours win: a further argument cannot replace the conversation.
    assert render("{{ messages | length }}", template_arguments={"messages": []}) == "1"
    assert render("{{ tools is none }}{{ enable_thinking is defined }}") == "TrueFalse"


@pytest.mark.parametrize(
    "hostile",
    [
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ [''] | map(attribute='__class__') | list }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ self._TemplateReference__context }}{{ self.__init__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
    ],
)
def test_hostile_template_is_refused(hostile):
    message = refusal(render, hostile)
    assert message.startswith("folder/chat_template.jinja: the chat template is unsafe")


def test_template_errors_name_the_file(chat):
    message = refusal(chat.apply_chat_template, [{"role": "wizard", "content": ""}])
    assert "chat_template.jinja: the chat template refuses these messages: unknown role: wizard" in message
    assert "folder/chat_template.jinja: chat template, line 2" in refusal(render, "a\n{% if %}")
    assert "TypeError" in refusal(render, "{{ messages + 1 }}")
    assert "folder/chat_template.jinja" in refusal(render, "{{ nothing.at.all }}")


# --- streaming ---

# Whole planes of Unicode, weighted to what breaks streaming: joiners, modifiers, combining marks.
TEXT = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from("👩‍👧🏽🇩🇪é\u0301\u0323你好한글ก็\ufffd\ufeff\u200d\x00 \n"),
    ),
    max_size=60,
)
IDS = st.lists(st.integers(0, TOKENIZER.vocab_size + 5), max_size=60)


def stream(ids: list[int], cuts: list[int], skip_special: bool = True) -> list[str]:
    """Texts of successive pushes of blocks with the given sizes (then of the rest), and of the flush."""
    detokenizer = TOKENIZER.detokenizer(skip_special)
    pieces, start = [], 0
    for size in cuts:
        pieces.append(detokenizer.push(ids[start : start + size]))
        start += size
    pieces.append(detokenizer.push(ids[start:]))
    return [*pieces, detokenizer.flush()]


@pytest.mark.parametrize(
    "text",
    ["👩‍👩‍👧👍🏽🇩🇪", "漢字かな交じり文。한국어", "Z͑ͫ̓a̴l̵g̶ǫ", "\u05e9\u05c1\u05dc\u05d5\u05dd", "naïve 3 €"],
)
def test_streams_token_by_token(text):
    ids = TOKENIZER.encode(text)
    pieces = stream(ids, [1] * len(ids))
    whole = TOKENIZER.decode(ids)
    assert "".join(pieces) == whole
    assert "\ufffd" not in whole
    # A piece is released as soon as its last byte is there, and not before.
    assert pieces[-1] == ""
    assert all(whole.startswith("".join(pieces[: i + 1])) for i in range(len(pieces)))


@settings(max_examples=200, deadline=None)
@given(TEXT, st.lists(st.integers(1, 16), max_size=30))
def test_stream_equals_whole_decode(text, cuts):
    ids = TOKENIZER.encode(text)
    assert "".join(stream(ids, cuts)) == TOKENIZER.decode(ids)


@settings(max_examples=300, deadline=None)
@given(IDS, st.lists(st.integers(1, 16), max_size=30), st.booleans())
def test_stream_of_arbitrary_ids_equals_whole_decode(ids, cuts, skip_special):
    """Models may write any bytes: broken UTF-8, special and readable added tokens, ids of padding rows."""
    assert "".join(stream(ids, cuts, skip_special)) == TOKENIZER.decode(ids, skip_special)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from([0x41, 0x80, 0xBF, 0xC2, 0xE2, 0x82, 0xAC, 0xED, 0xA0, 0xF0, 0x9F, 0x91, 0xF4, 0xFF])
    )
)
def test_stream_of_broken_bytes_equals_whole_decode(data):
    single = {
        TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.vocab_size) if i not in TOKENIZER.special_ids
    }
    ids = [single[bytes([value])] for value in data]
    assert "".join(stream(ids, [1] * len(ids))) == TOKENIZER.decode(ids)


def test_nothing_is_held_back_for_ever():
    single = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.vocab_size)}
    detokenizer = TOKENIZER.detokenizer()
    # Continuation bytes with no start never become a character; a U+FFFD that the model wrote is one.
    assert detokenizer.push([single[b"\x80"]] * 3) == "\ufffd" * 3
    assert detokenizer.push(TOKENIZER.encode("\ufffd")) == "\ufffd"
    assert detokenizer.push([single[b"\xf0"], single[b"\x9f"]]) == ""
    assert detokenizer.flush() == "\ufffd"
    # After a flush nothing of the old sequence is left.
    assert detokenizer.push([single[b"\x91"], single[b"A"]]) == "\ufffdA"
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("text", READABLE)
def test_readable_added_tokens_stream_as_written(text):
    ids = TOKENIZER.encode(text)
    assert len(ids) == 1
    assert stream(ids, []) == [text, ""]


def test_special_tokens_can_be_shown():
    ids = TOKENIZER.encode("<|im_start|>a<think>b<|im_end|>")
    assert "".join(stream(ids, [1, 1])) == "a<think>b"
    assert "".join(stream(ids, [1, 1], skip_special=False)) == "<|im_start|>a<think>b<|im_end|>"
