"""The training corpus and the bundled tokenizer: seeded, correct in content, rendered as the chat template says."""

import json
import re
from itertools import islice
from pathlib import Path
from random import Random

import jinja2.sandbox
import numpy as np
import pytest
from tokenizers import Tokenizer

from dflash_jax.train import tokenizer as tokenizer_training
from dflash_jax.train.corpus import code, document_text, documents, is_heldout, prompts, render, token_stream
from dflash_jax.train.corpus.documents import MIXTURE, make

ASSETS = Path(tokenizer_training.__file__).resolve().parents[1] / "assets"
TARGET = ASSETS / "target"


@pytest.fixture(scope="module")
def sample() -> list:
    return list(islice(documents(11), 3000))


@pytest.fixture(scope="module")
def bundled() -> Tokenizer:
    return Tokenizer.from_file(str(TARGET / "tokenizer.json"))


def _answers(docs) -> list[str]:
    return [doc.text if doc.text is not None else doc.messages[-1]["content"] for doc in docs]


def _sentences(text: str) -> list[str]:
    return [s.strip() for s in re.split(r"(?<=[.!?])[\s\"]+|\n+", text) if len(s.split()) > 3]


def _template(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(source)


def test_same_seed_gives_the_same_documents(sample):
    again = list(islice(documents(11), 300))
    assert again == sample[:300]
    assert list(islice(documents(12), 300)) != again


def test_mixture_is_sixty_percent_chat(sample):
    assert sum(MIXTURE.values()) == 100
    assert 0.56 < np.mean([doc.messages is not None for doc in sample]) < 0.64
    assert {doc.kind for doc in sample} == set(MIXTURE)


def test_heldout_content_never_appears_in_training(sample):
    heldout = list(islice(documents(3, "heldout"), 800))
    assert all(is_heldout(*doc.keys) for doc in heldout)
    assert not any(is_heldout(*doc.keys) for doc in sample)
    assert not {doc.keys for doc in heldout} & {doc.keys for doc in sample}
    with pytest.raises(ValueError, match="split"):
        next(documents(0, "test"))


def test_no_sentence_is_repeated_within_an_answer(sample):
    for text in _answers(sample):
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        found = _sentences(prose)
        repeated = {s for s in found if found.count(s) > 1}
        assert not repeated, (repeated, text)


def test_prose_has_no_leftovers_and_right_articles(sample):
    for doc in sample:
        for text in [doc.text] if doc.text else [m["content"] for m in doc.messages]:
            prose = re.sub(r"```.*?(```|$)|`[^`]*`", "Code", text, flags=re.DOTALL)
            assert not re.search(r"[\[\]{}<>@|]| {2}| [,.!?:;](?!\w)|\.\.|,\.|\?\.|^\s|\s$", prose), prose
            wrong = re.search(
                r"(?i)\ba (?!(uni|use|usu|uku|eu|one))[aeiou]|\ban (?!hour|honest)[^aeiou8]", prose
            )
            # "a" may also be an argument of a small function.
            assert wrong is None or "def " in text or "sides a" in text, (wrong, prose)
            assert not re.search(r"[.!?] [a-z]", prose), prose


def test_every_answer_is_long_enough_to_speculate_on(sample, bundled):
    lengths = [len(e.ids) for e in bundled.encode_batch_fast(_answers(sample))]
    assert 120 <= np.mean(lengths) <= 250
    assert max(lengths) < 450


def test_arithmetic_is_right():
    rng = Random(5)
    for _ in range(500):
        doc = make("chat_math", rng, "train")
        answer = doc.messages[-1]["content"]
        equations = re.findall(r"((?:\d+ [-+x/] )+\d+) = (\d+)", answer)
        assert equations
        for left, right in equations:
            assert eval(left.replace("x", "*")) == int(right), answer  # digits and signs only
        final = re.search(r"(?:answer|result) is (\d+)", answer)
        assert final and any(final[1] in equation for equation in equations), answer


def test_python_snippets_run_and_their_examples_hold():
    rng = Random(6)
    seen = set()
    for _ in range(600):
        answer = make("chat_code", rng, "train").messages[-1]["content"]
        source = re.search(r"```python\n(.*?)\n```", answer, re.DOTALL)[1]
        scope: dict = {}
        exec(source, scope)
        seen.update(set(scope) & set(code.FUNCTIONS))
        examples = re.findall(r"`(\w+\([^`]+\))`[^`]*? `([^`]+)`", answer)
        assert len(examples) == 2, answer
        for call, shown in examples:
            assert eval(call, scope) == eval(shown), answer
    assert seen == set(code.FUNCTIONS)


def test_story_prompt_and_answer_share_their_content():
    rng = Random(8)
    for _ in range(200):
        *_, user, assistant = make("chat_story", rng, "train").messages
        name = re.search(r"(?:named|called|about) ([A-Z][a-z]+)", user["content"])
        assert name and name[1] in assistant["content"], user


def test_chat_documents_are_rendered_by_the_template(sample):
    template = _template((TARGET / "chat_template.jinja").read_text())
    chats = [doc for doc in sample if doc.messages is not None][:200]
    assert any(doc.messages[0]["role"] == "system" for doc in chats)
    for doc in chats:
        assert template.render(messages=doc.messages) == document_text(doc)
    messages = [{"role": "user", "content": "Hello"}]
    prompt = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(messages=messages, add_generation_prompt=True) == prompt
    assert template.render(messages=messages, add_generation_prompt=True, enable_thinking=False) == prompt
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    assert template.render(messages=parts, add_generation_prompt=True) == prompt
    assert render(messages) + "<|im_start|>assistant\n" == prompt


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"enable_thinking": True}, "non-thinking"),
        ({"tools": [{"name": "f"}]}, "tools"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "unknown role tool"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "text only"),
    ],
)
def test_template_refuses_what_the_model_cannot_do(arguments, message):
    template = _template((TARGET / "chat_template.jinja").read_text())
    with pytest.raises(jinja2.TemplateError, match=message):
        template.render(**({"messages": [{"role": "user", "content": "x"}]} | arguments))


@pytest.mark.parametrize(
    "text",
    [
        "Once upon a time.",
        "na\u00efve caf\u00e9 \u00c5\u00f1\u00df",
        "\U0001f680 to the \U0001f319\U0001f469\u200d\U0001f680!",
        "def f(x):\n    return x * 12345\n",
        "  two  blanks\t\ttab\r\n",
        "\u65e5\u672c\u8a9e \u0440\u0443\u0441",
        "",
    ],
)
def test_tokenizer_round_trip(bundled, text):
    ids = bundled.encode(text).ids
    assert bundled.decode(ids, skip_special_tokens=False) == text
    assert all(0 <= i < 2048 for i in ids)


def test_tokenizer_layout(bundled):
    assert bundled.get_vocab_size() == 2048
    assert [bundled.token_to_id(t) for t in tokenizer_training.CONTROL_TOKENS] == list(range(2042, 2048))
    assert len(bundled.encode("12345").ids) == 5
    assert bundled.encode("e\u0301").ids == bundled.encode("\u00e9").ids  # NFC
    ids = bundled.encode("<|im_start|>a<think>b</think><|im_end|>").ids
    assert bundled.decode(ids) == "a<think>b</think>"  # thinking marks are not special
    config = json.loads((TARGET / "tokenizer_config.json").read_text())
    assert config["chat_template"] == (TARGET / "chat_template.jinja").read_text()
    generation = json.loads((TARGET / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2044, 2042] and generation["pad_token_id"] == 2042


def test_tokenizer_training_is_deterministic():
    first = tokenizer_training.train_tokenizer(n_bytes=1_500_000)
    assert first.to_str() == tokenizer_training.train_tokenizer(n_bytes=1_500_000).to_str()


def test_bundled_prompts_are_heldout():
    stored = json.loads((ASSETS / "prompts.json").read_text())
    assert stored == prompts("heldout", tokenizer_training.PROMPT_COUNT, tokenizer_training.PROMPT_SEED)
    assert len(stored) == 64
    assert all(is_heldout(*prompt["keys"]) for prompt in stored)
    assert {"messages", "text"} == {k for prompt in stored for k in prompt} - {"kind", "keys"}
    chats = [prompt["messages"][-1] for prompt in stored if "messages" in prompt]
    assert all(message["role"] == "user" for message in chats)


def test_token_stream_is_packed_and_independent_of_its_cut(bundled):
    ids = token_stream(4, 60_000)
    assert ids.dtype == np.uint16 and ids.shape == (60_000,) and ids.max() < 2048
    assert np.array_equal(ids[:20_000], token_stream(4, 20_000))
    first = ids[: int(np.argmax(ids == 2042))]
    assert bundled.decode(first.tolist(), skip_special_tokens=False) == document_text(
        next(documents(4 * 1_000_003))
    )
