"""Details of errors: the field at fault by its real path, and when to ask again."""

import asyncio
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from dflash_jax import Engine, SamplingParams, UserError
from dflash_jax.loading import BUNDLED_TARGET
from dflash_jax.tokenizer import Tokenizer
from serve import messages
from serve.async_client import AsyncClient
from serve.failures import RETRY_SECONDS, Failure
from serve.proto import dflash_pb2 as pb
from serve.proto import dflash_pb2_grpc as pb_grpc
from serve.worker import Draining, QueueFull
from tests.models import VOCAB, random_target
from tests.servers import serving

GOOD = pb.Input(tokens=pb.TokenIds(ids=[5, 6]))
NAN = float("nan")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(random_target(), None, Tokenizer.from_folder(BUNDLED_TARGET), max_slots=1, max_model_len=64)


@pytest.fixture(scope="module")
def port(engine: Engine) -> Iterator[int]:
    with serving(engine, max_queue=0) as one:
        yield one


def sampled(**values: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(input=GOOD, params=pb.SamplingParams(**values))  # type: ignore[arg-type]


HELLO = [pb.Message(role="user", content="Hello")]
BAD = [
    (pb.GenerateRequest(), "input"),
    (pb.GenerateRequest(input=pb.Input(text="")), "input.text"),
    (pb.GenerateRequest(input=pb.Input(tokens=pb.TokenIds())), "input.tokens.ids"),
    (pb.GenerateRequest(input=pb.Input(tokens=pb.TokenIds(ids=[VOCAB]))), "input.tokens.ids"),
    (pb.GenerateRequest(input=pb.Input(tokens=pb.TokenIds(ids=[1] * 64))), "input.tokens.ids"),
    (pb.GenerateRequest(input=pb.Input(chat=pb.Chat())), "input.chat.messages"),
    (pb.GenerateRequest(input=pb.Input(chat=pb.Chat(messages=HELLO, thinking=True))), "input.chat"),
    (sampled(max_new_tokens=0), "params.max_new_tokens"),
    (sampled(temperature=NAN), "params.temperature"),
    (sampled(top_k=-1), "params.top_k"),
    (sampled(top_p=2), "params.top_p"),
    (sampled(min_p=NAN), "params.min_p"),
    (sampled(presence_penalty=NAN), "params.presence_penalty"),
    (sampled(frequency_penalty=NAN), "params.frequency_penalty"),
    (sampled(repetition_penalty=0), "params.repetition_penalty"),
    (sampled(logit_bias={10**6: 1.0}), "params.logit_bias"),
    (sampled(logit_bias=dict.fromkeys(range(1025), 1.0)), "params.logit_bias"),
    (sampled(stop=[""]), "params.stop"),
    (sampled(method=17), "params.method"),
    (sampled(method=pb.METHOD_MTP), "params.method"),
    (sampled(method=pb.METHOD_DDTREE), "params.method"),
    (sampled(tree_budget=0), "params.tree_budget"),
    (sampled(block_size=2), "params.block_size"),
    (sampled(draft_sampling=9), "params.draft_sampling"),
    (sampled(logprobs=21), "params.logprobs"),
    (sampled(mtp_steps=99), "params.mtp_steps"),
]


def exists(path: str, message: Descriptor) -> bool:
    """Whether a message has such a field."""
    for name in path.split("."):
        field: FieldDescriptor = message.fields_by_name[name]
        message = field.message_type
    return True


def violations(status: status_pb2.Status) -> dict[str, str]:
    bad = error_details_pb2.BadRequest()
    (detail,) = status.details
    assert detail.Unpack(bad)
    return {one.field: one.description for one in bad.field_violations}


def status_of(call) -> status_pb2.Status:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error = caught.value
    status = rpc_status.from_call(error)
    assert status is not None and (status.code, status.message) == (error.code().value[0], error.details())
    return status


def test_the_field_at_fault_is_named(port: int) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = pb_grpc.DFlashStub(channel)
        for request, path in BAD:
            status = status_of(lambda asked=request: list(stub.Generate(asked)))
            assert violations(status) == {path: status.message}, request
            assert exists(path, pb.GenerateRequest.DESCRIPTOR)
        for request, path in BAD[:7]:
            status = status_of(lambda asked=request: stub.Tokenize(pb.TokenizeRequest(input=asked.input)))
            assert violations(status) == {path: status.message} and exists(path, pb.TokenizeRequest.DESCRIPTOR)
        status = status_of(lambda: list(stub.GenerateBatch(pb.GenerateBatchRequest())))
        assert list(violations(status)) == ["requests"]


def test_every_parameter_that_can_be_wrong_is_tried() -> None:
    tried = {path.removeprefix("params.") for _, path in BAD if path.startswith("params.")}
    anything_goes = {"ignore_eos", "seed"}
    assert tried | anything_goes == {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}


def test_a_batch_names_the_request_too(port: int) -> None:
    async def run() -> None:
        async with AsyncClient(f"127.0.0.1:{port}", timeout=60) as client:
            params = [SamplingParams(max_new_tokens=1), SamplingParams(method="mtp")]
            errors = [p async for p in client.generate_batch([[5, 6], [5, 6]], params) if p.HasField("error")]
            (part,) = errors
            assert part.index == 1
            assert violations(part.error) == {"requests[1].params.method": part.error.message}  # type: ignore[arg-type]

    asyncio.run(run())


def test_a_full_line_says_when_to_ask_again(port: int) -> None:
    long = messages.sampling_message(SamplingParams(max_new_tokens=60, method="ar", ignore_eos=True))

    async def run() -> None:
        async with AsyncClient(f"127.0.0.1:{port}", timeout=60) as client:
            first = client.stub.Generate(pb.GenerateRequest(input=GOOD, params=long))
            await first.read()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.generate_text([5, 6])
            first.cancel()
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]
        assert status is not None
        retry = error_details_pb2.RetryInfo()
        (detail,) = status.details
        assert detail.Unpack(retry) and retry.retry_delay.seconds == RETRY_SECONDS > 0

    asyncio.run(run())


def test_what_each_exception_means() -> None:
    codes = {
        grpc.StatusCode.UNAVAILABLE: Draining("the server is shutting down"),
        grpc.StatusCode.INTERNAL: RuntimeError("/root/secret"),
        grpc.StatusCode.INVALID_ARGUMENT: UserError("there is no such thing", file="/root/secret"),
        grpc.StatusCode.RESOURCE_EXHAUSTED: QueueFull("full"),
    }
    for code, error in codes.items():
        failure = Failure.of(error)
        assert failure.code == code and "secret" not in failure.words
        assert bool(failure.details) == (code == grpc.StatusCode.RESOURCE_EXHAUSTED)
    # Metadata is short: clients take 8 KiB, of which a byte of the words may need three.
    long = Failure.of(UserError("--stop " + "ß" * 10**5))
    assert long.words.startswith("--stop ß")
    assert 3 * len(long.words.encode()) + 4 / 3 * len(long.message().SerializeToString()) < 8000
