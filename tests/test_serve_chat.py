"""Tools and thoughts: conversations through a chat template, answers in parts, whole and streamed."""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import hypothesis
import hypothesis.strategies as st
import pytest

import dflash_jax
from dflash_jax import Chunk, Completion, Engine
from dflash_jax.flights import Request
from dflash_jax.loading import BUNDLED_TARGET
from dflash_jax.tokenizer import Tokenizer
from serve.answer_parser import AnswerParser, Call, Words, typed
from serve.front import Front
from serve.http import HttpServer, make_app
from serve.tracing import Origin
from serve.worker import Worker
from tests.models import save_random_pair

# ---------------------------------------------------------------- the parser

SCHEMAS: dict[str, dict[str, Any]] = {
    "look": {"type": "object", "properties": {"n": {"type": "integer"}, "where": {"type": "string"}}},
    "stop": {},
}
LOOK = '<tool_call>\n{"name": "look", "arguments": {"n": 3, "where": "<b> ä"}}\n</tool_call>'
LOOKS = (
    "<tool_call>\n<function=look>\n<parameter=n>\n3\n</parameter>\n"
    "<parameter=where>\n<b> ä\n</parameter>\n</function>\n</tool_call>"
)
LOOKED = Call("look", '{"n": 3, "where": "<b> ä"}')
STOPS, STOPPED = "<tool_call><function=stop></function></tool_call>", Call("stop", "{}")


def merged(pieces: list[Words | Call]) -> list[Words | Call]:
    """Neighbouring words as one."""
    result: list[Words | Call] = []
    for piece in pieces:
        last = result[-1] if result else None
        if isinstance(piece, Words) and isinstance(last, Words) and piece.thought == last.thought:
            result[-1] = Words(last.text + piece.text, piece.thought)
        else:
            result.append(piece)
    return result


def parsed(*texts: str, thoughts: bool = True, thinking: bool = False, tools: Any = SCHEMAS) -> list[Words | Call]:
    parser = AnswerParser(thoughts=thoughts, thinking=thinking, tools=tools)
    return merged([*itertools.chain(*(parser.feed(text) for text in texts)), *parser.end()])


# Text, whether the prompt has opened a thought, and what it is made of.
ANSWERS: list[tuple[str, bool, list[Words | Call]]] = [
    ("", False, []),
    (" \n plain \n", False, [Words(" \n plain \n")]),
    (LOOK, False, [LOOKED]),
    (LOOKS, False, [LOOKED]),
    ("I look.\n\n" + LOOKS + "\n" + LOOK + "\n", False, [Words("I look."), LOOKED, LOOKED]),
    ("a\n\n" + LOOK + "\n  b", False, [Words("a"), LOOKED, Words("\n\n  b")]),
    (LOOK + "\n\nb", False, [LOOKED, Words("b")]),
    ("hm\n</think>\n\nyes", True, [Words("hm", True), Words("yes")]),
    ("\nhm \n", True, [Words("hm \n", True)]),
    ("<think>\nhm\n</think>\n\nyes", False, [Words("hm", True), Words("yes")]),
    ("<think>\nhm\n</think>\n\nyes", True, [Words("hm", True), Words("yes")]),
    ("<think>\n\n</think>\n\nyes", False, [Words("yes")]),
    ("yes <think>no</think>", False, [Words("yes <think>no</think>")]),
    ("hm</think>\n\n" + LOOKS, True, [Words("hm", True), LOOKED]),
    ("hm\n" + LOOKS, True, [Words("hm", True), LOOKED]),
    ("hm " + LOOK + "\nso\n</think>\nyes", True, [Words("hm", True), LOOKED, Words(" so", True), Words("yes")]),
    # No calls: what is left out, unknown, cut off or broken is text as it came.
    ("a < b <tool <tool_calls>", False, [Words("a < b <tool <tool_calls>")]),
    ("the tag <tool_call> is", False, [Words("the tag <tool_call> is")]),
    ("<tool_call>" + LOOK, False, [Words("<tool_call>"), LOOKED]),
    (LOOKS[:-3], False, [Words(LOOKS[:-3])]),
    (LOOK.replace("look", "leap"), False, [Words(LOOK.replace("look", "leap"))]),
    (LOOKS.replace("look", "leap"), False, [Words(LOOKS.replace("look", "leap"))]),
    (LOOKS.replace("</function>", ""), False, [Words(LOOKS.replace("</function>", ""))]),
    (LOOK.replace('"n": 3', '"n": 1e999'), False, [Words(LOOK.replace('"n": 3', '"n": 1e999'))]),
    ("<tool_call>\n{[[\n</tool_call>\n" + STOPS, False, [Words("<tool_call>\n{[[\n</tool_call>"), STOPPED]),
    ("hm <tool_call>\n{\n</think>\n" + LOOK, True, [Words("hm <tool_call>\n{", True), LOOKED]),
    ('<tool_call>{"name": "stop"}</tool_call>', False, [STOPPED]),
    (LOOK.replace("ä", "\\ud800"), False, [Call("look", '{"n": 3, "where": "<b> \\ud800"}')]),
]


@pytest.mark.parametrize(("text", "thinking", "pieces"), ANSWERS)
def test_an_answer_in_two_pieces_is_the_whole(text: str, thinking: bool, pieces: list[Words | Call]) -> None:
    assert parsed(text, thinking=thinking) == pieces
    for at in range(len(text) + 1):
        assert parsed(text[:at], text[at:], thinking=thinking) == pieces, text[:at]
    assert parsed(*text, thinking=thinking) == pieces
    # What is no part of an answer is left alone.
    assert parsed(text, thoughts=False, tools=None) == ([Words(text)] if text else [])


PARTS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<function=stop>", "<", "\n", " ", "x", LOOK, STOPS]
PARTS += ["{", "</function>", "</tool"]


@hypothesis.given(st.lists(st.sampled_from(PARTS), max_size=12), st.data(), st.booleans())
@hypothesis.settings(max_examples=300)
def test_any_text_however_it_is_cut_is_the_whole(parts: list[str], data: st.DataObject, thinking: bool) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    cut = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    pieces = parsed(text, thinking=thinking)
    assert parsed(*cut, thinking=thinking) == pieces
    # Nothing but tags and white space is lost.
    kept = "".join(piece.text for piece in pieces if isinstance(piece, Words))
    calls = sum(isinstance(piece, Call) for piece in pieces)
    assert kept.count("x") == text.count("x") and calls <= text.count("</tool_call>")


def test_plain_text_streams_and_no_tag_leaks() -> None:
    parser = AnswerParser(thoughts=True, thinking=False, tools=SCHEMAS)
    said = [parser.feed(char) for char in "yes <tool." + LOOKS]
    assert said[:3] == [[Words("y")], [Words("e")], [Words("s")]] and said[8:10] == [[], [Words(" <tool.")]]
    words = [piece.text for pieces in said for piece in pieces if isinstance(piece, Words)]
    assert "".join(words) == "yes <tool." and said[-1] == [LOOKED]
    # A tag that begins no call is text as soon as that is certain.
    parser = AnswerParser(thoughts=True, thinking=False, tools=SCHEMAS)
    assert merged(parser.feed("<tool_call> is a tag")) == [Words("<tool_call> is a tag")]


def test_long_answers_cost_no_more_than_their_length() -> None:
    for text in ("<tool_call>{" * 20_000, "<tool_call>{</tool_call>" * 20_000, "</parameter>" * 20_000):
        assert parsed(text) == [Words(text)]
    body = "<parameter=where>" + "</parameter> " * 50_000
    assert parsed(f"<tool_call><function=look>{body}</tool_call>") == [
        Words(f"<tool_call><function=look>{body}</tool_call>")
    ]


def test_a_long_answer_at_once_costs_no_more_than_piece_by_piece() -> None:
    def seconds(*pieces: str) -> float:
        begun = time.process_time()
        parsed(*pieces)
        return time.process_time() - begun

    parts = [STOPS] * 60_000
    assert seconds("".join(parts)) < 3 * seconds(*parts)


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "integer"}, 3),
        ("3.0", {"type": "integer"}, 3),
        ("3.5", {"type": "integer"}, "3.5"),
        ("-3.5", {"type": "number"}, -3.5),
        ("1e999", {"type": "number"}, "1e999"),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("True", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("3", {"type": "string"}, "3"),
        ("3", {}, "3"),
        ("3", None, "3"),
        ("None", {"type": ["string", "null"]}, None),
        ("null", {"type": "string"}, "null"),
        (" 3\n", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 3),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ('{"a": [1]}', {"properties": {}}, {"a": [1]}),
        ('{"a": NaN}', {"type": "object"}, '{"a": NaN}'),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ("[" * 10**5, {"type": "array"}, "[" * 10**5),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("2", {"type": "string", "enum": [2]}, "2"),
        ("2", {"$ref": "#/$defs/count"}, 2),
        ("2", {"$ref": "#/$defs/circle"}, 2),
        ("2", {"$ref": "#/$defs/none"}, "2"),
        ("many", {"type": "integer"}, "many"),
    ],
)
def test_arguments_have_the_types_of_their_schema(text: str, schema: Any, value: Any) -> None:
    circle = {"anyOf": [{"$ref": "#/$defs/circle"}] * 20 + [{"$ref": "#/$defs/count"}]}
    found = typed(text, schema, {"$defs": {"count": {"type": "integer"}, "circle": circle}})
    assert found == value and type(found) is type(value)


# ---------------------------------------------------------------- over HTTP

# In the manner of Qwen3.5's: tools in the system turn, thoughts kept, values on lines of their own.
TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\\nCall a tool as <tool_call>...</tool_call>:' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for turn in messages %}{{ '<|im_start|>' + turn.role + '\\n' }}
{%- if turn.reasoning_content %}{{ '<think>\\n' + turn.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- turn.content }}
{%- for call in turn.tool_calls or [] %}{{ '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' + name + '>\\n' + (value | string) + '\\n</parameter>\\n' }}{% endfor %}
{{- '</function>\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}
{%- if enable_thinking is false %}{{ '\\n</think>\\n\\n' }}{% endif %}{% endif %}"""
NO_TOOLS = "{% for turn in messages %}{{ turn.role + turn.content }}{% endfor %}"
OTHER_CALLS = NO_TOOLS + "{{ tools | tojson }}"

LOOK_TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMAS["look"]}}
STOP_TOOL = {"type": "function", "function": {"name": "stop", "description": "ends it"}}
TURNS: list[dict[str, Any]] = [{"role": "user", "content": "Look there"}]


class Scripted(Front):
    """A front whose requests are made as always, and answered with a text given beforehand."""

    text, reason, size = "", "stop", 3
    prompt = ""

    async def open(self, make: Callable[[], Request], origin: Origin) -> Any:
        request = await asyncio.to_thread(make)
        self.prompt = self.engine.tokenizer.decode(request.prompt, skip_special=False)
        texts = [self.text[at : at + self.size] for at in range(0, len(self.text), self.size)]
        values = dict.fromkeys(Completion.__dataclass_fields__, 0) | {"text": self.text, "logprobs": None}
        done = Completion(**values | {"finish_reason": self.reason})
        chunks = [*(Chunk(text, (1,)) for text in texts), Chunk("", (), done)]
        return _Stream(chunks)


class _Stream:
    def __init__(self, chunks: list[Chunk]):
        self._chunks = iter(chunks)

    async def next(self) -> Chunk:
        await asyncio.sleep(0)
        return next(self._chunks)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    target, drafter = save_random_pair(tmp_path_factory.mktemp("pair"))
    (target / "chat_template.jinja").write_text(TEMPLATE)
    return dflash_jax.load(target, drafter, dtype="float32", max_slots=1, max_model_len=2048)


@pytest.fixture(scope="module")
def served(engine: Engine) -> Iterator[tuple[Scripted, str]]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    front = Scripted(Worker(engine, 1))
    server = HttpServer(make_app(front, (), lambda: True), "127.0.0.1", 0)
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(60)
    yield front, f"http://127.0.0.1:{server.port}"
    asyncio.run_coroutine_threadsafe(server.stop(5), loop).result(60)
    assert front.worker.stop(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def front(served: tuple[Scripted, str]) -> Scripted:
    front, _ = served
    front.text, front.reason, front.size, front.prompt = "", "stop", 3, ""
    return front


@pytest.fixture
def ask(served: tuple[Scripted, str], front: Scripted) -> Iterator[Callable[..., httpx2.Response]]:
    model = next(iter(front.engine.names))
    with httpx2.Client(base_url=served[1], timeout=60) as client:
        yield lambda **body: client.post(
            "/v1/chat/completions", json={"model": Path(model).name, "messages": TURNS} | body
        )


def answer(response: httpx2.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def streamed(response: httpx2.Response) -> tuple[dict[str, Any], str]:
    """The message that a stream's deltas make, as OpenAI's clients put it together, and why it ended."""
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.splitlines() if line]
    assert lines.pop() == "data: [DONE]"
    choices = [json.loads(line[6:])["choices"][0] for line in lines]
    message: dict[str, Any] = {}
    for choice in choices:
        for key, value in choice["delta"].items():
            if key == "tool_calls":
                (call,) = value
                assert call.pop("index") == len(message.setdefault(key, []))
                message[key].append(call)
            else:
                message[key] = message.get(key, "") + value
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    return message, choices[-1]["finish_reason"]


def calls(message: dict[str, Any]) -> list[Any]:
    found = message["tool_calls"]
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in found)
    assert len({call["id"] for call in found}) == len(found)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("form", [LOOK, LOOKS])
def test_calls_thoughts_and_text_are_told_apart(
    front: Scripted, ask: Callable[..., httpx2.Response], size: int, form: str
) -> None:
    front.text, front.size = f"I think.\n</think>\n\nI look.\n\n{form}\n{STOPS}\n", size
    wanted = [("look", {"n": 3, "where": "<b> ä"}), ("stop", {})]
    choice = answer(ask(tools=[LOOK_TOOL, STOP_TOOL], tool_choice="auto"))
    message = choice["message"]
    assert (message["reasoning_content"], message["content"], calls(message)) == ("I think.", "I look.", wanted)
    assert choice["finish_reason"] == "tool_calls" and "index" not in message["tool_calls"][0]
    assert json.dumps(LOOK_TOOL) in front.prompt and front.prompt.endswith("assistant\n<think>\n")
    message, reason = streamed(ask(tools=[LOOK_TOOL, STOP_TOOL], stream=True))
    assert (message["reasoning_content"], message["content"], calls(message)) == ("I think.", "I look.", wanted)
    assert reason == "tool_calls"
    # A text that was cut off has not been ended by its calls.
    front.reason = "length"
    assert answer(ask(tools=[LOOK_TOOL]))["finish_reason"] == "length"
    front.text = "</think>I see " + form[:-1]
    assert answer(ask(tools=[LOOK_TOOL]))["message"]["content"] == "I see " + form[:-1]
    assert streamed(ask(tools=[LOOK_TOOL], stream=True)) == ({"role": "assistant", "content": front.text[8:]}, "length")
    front.reason, front.text = "stop", LOOKS
    message = answer(ask(tools=[LOOK_TOOL]))["message"]
    assert message["content"] is None and calls(message) == wanted[:1]


def test_without_tools_there_are_no_calls(front: Scripted, ask: Callable[..., httpx2.Response]) -> None:
    front.text = "\n</think>\n\n" + LOOK
    for more in ({}, {"tools": []}, {"tools": [LOOK_TOOL], "tool_choice": "none"}):
        choice = answer(ask(**more))
        assert choice["message"] == {"role": "assistant", "content": LOOK, "refusal": None}
        assert choice["finish_reason"] == "stop" and "Call a tool" not in front.prompt
    # Without a thought to open none is looked for after the text has begun.
    choice = answer(ask(chat_template_kwargs={"enable_thinking": False}))
    assert choice["message"]["content"] == front.text and front.prompt.endswith("</think>\n\n")


def test_text_before_a_call_streams(front: Scripted, ask: Callable[..., httpx2.Response]) -> None:
    front.text, front.size = "</think>one two three" + LOOKS, 4
    lines = ask(tools=[LOOK_TOOL], stream=True).text.splitlines()
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
    texts = [delta["content"] for delta in deltas if delta.get("content")]
    assert len(texts) > 3 and "".join(texts) == "one two three"


def test_what_came_of_calls_is_in_the_conversation(front: Scripted, ask: Callable[..., httpx2.Response]) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"n": 3, "where": "ä"}'}}
    turns = [
        {"role": "developer", "content": "Be kind"},
        *TURNS,
        {"role": "assistant", "content": None, "reasoning_content": "So.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "an owl"}]},
    ]
    front.text = "</think>An owl"
    assert answer(ask(messages=turns))["message"]["content"] == "An owl"
    value = "<parameter=n>\n3\n</parameter>\n<parameter=where>\nä\n</parameter>"
    assert f"<think>\nSo.\n</think>\n\n\n<tool_call>\n<function=look>\n{value}\n</function>" in front.prompt
    assert "system\nBe kind<|im_end|>" in front.prompt and "tool\nan owl<|im_end|>" in front.prompt
    for wrong, words in (
        ({"arguments": "[3]"}, "arguments of a call must be a JSON object, found '[3]'"),
        ({"arguments": "[" * 10**5}, "must be a JSON object"),
        ({"arguments": 3}, "Input should be a valid string"),
    ):
        bad = call | {"function": call["function"] | wrong}
        response = ask(messages=[*TURNS, {"role": "assistant", "tool_calls": [bad]}])
        assert response.status_code == 400 and words in response.json()["error"]["message"]
        assert response.json()["error"]["param"] == "messages"


def test_what_is_asked_in_vain(front: Scripted, ask: Callable[..., httpx2.Response]) -> None:
    named = {"type": "function", "function": {"name": "look"}}
    cases = [
        ({"tools": [LOOK_TOOL], "tool_choice": "required"}, "tool_choice", "found required"),
        ({"tools": [LOOK_TOOL], "tool_choice": named}, "tool_choice", "found a function by name"),
        ({"tools": [LOOK_TOOL, LOOK_TOOL]}, "tools", "two have the same name"),
        ({"tools": [LOOK_TOOL], "parallel_tool_calls": False}, "parallel_tool_calls", "Input should be True"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "should match pattern"),
        ({"messages": [{"role": "assistant"}]}, "messages", "neither content nor tool_calls"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "tool_call_id: Field required"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages", "'tool'"),
    ]
    strict = {"type": "function", "function": {"name": "look", "strict": True}}
    cases.append(({"tools": [strict]}, "tools", "tools.0.function.strict: Input should be False"))
    for body, param, words in cases:
        for stream in (False, True):
            error = ask(**body, stream=stream)
            assert error.status_code == 400 and error.json()["error"]["param"] == param, error.text
            assert words in error.json()["error"]["message"]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (NO_TOOLS, "tools: the model's chat template has no place for tools"),
        (OTHER_CALLS, "tools: the model's chat template has no <tool_call>"),
        ((BUNDLED_TARGET / "chat_template.jinja").read_text(), "this model was not trained to call tools"),
    ],
)
def test_a_template_that_takes_no_tools_says_so(
    front: Scripted, ask: Callable[..., httpx2.Response], monkeypatch: pytest.MonkeyPatch, template: str, words: str
) -> None:
    old = front.engine.tokenizer
    other = Tokenizer(old.backend, special=old.special, chat_templates={"default": (template, "x.jinja")})
    monkeypatch.setattr(front.engine, "tokenizer", other)
    front.text = "<think>" + LOOK
    error = ask(tools=[LOOK_TOOL])
    assert error.status_code == 400 and words in error.json()["error"]["message"]
    # And one that speaks of no thoughts has none.
    assert answer(ask())["message"]["content"] == front.text
    if template == NO_TOOLS:
        error = ask(messages=[*TURNS, {"role": "tool", "tool_call_id": "1", "content": "x"}])
        assert error.status_code == 400 and "messages: the model's chat template has no place" in error.text


def test_openais_own_client_calls_tools(served: tuple[Scripted, str], front: Scripted) -> None:
    openai = pytest.importorskip("openai")
    front.text = f"I think.\n</think>\n\nI look.\n\n{LOOKS}\n{STOPS}"
    with openai.OpenAI(base_url=f"{served[1]}/v1", api_key="none", max_retries=0) as client:
        asked = {"model": client.models.list().data[0].id, "messages": TURNS, "tools": [LOOK_TOOL, STOP_TOOL]}
        choice = client.chat.completions.create(**asked).choices[0]
        first, second = choice.message.tool_calls
        assert (first.function.name, json.loads(first.function.arguments)) == ("look", {"n": 3, "where": "<b> ä"})
        assert (second.function.name, choice.finish_reason) == ("stop", "tool_calls")
        assert (choice.message.content, choice.message.reasoning_content) == ("I look.", "I think.")
        # Its own way of putting deltas together; and its message goes back as it is.
        with client.chat.completions.stream(**asked) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion().choices[0]
        assert [call.function.name for call in final.message.tool_calls] == ["look", "stop"]
        assert final.finish_reason == "tool_calls" and final.message.content == "I look."
        result = {"role": "tool", "tool_call_id": first.id, "content": "an owl"}
        other = {"role": "tool", "tool_call_id": second.id, "content": "done"}
        message = choice.message.model_dump(exclude_none=True)
        client.chat.completions.create(**asked | {"messages": [*TURNS, message, result, other]})
        assert "<parameter=n>\n3\n</parameter>" in front.prompt and "tool\nan owl" in front.prompt
        with pytest.raises(openai.BadRequestError, match="calls cannot be forced"):
            client.chat.completions.create(**asked, tool_choice="required")
