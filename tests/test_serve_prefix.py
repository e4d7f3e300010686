"""The prefix cache behind the service: what it saves is said, and texts are those without it."""

import asyncio
import dataclasses
from pathlib import Path

import grpc

import dflash_jax
from dflash_jax import SamplingParams
from serve import messages
from serve.proto import dflash_pb2 as pb
from serve.proto import dflash_pb2_grpc as pb_grpc
from serve.server import Server
from tests.models import save_random_pair

PARAMS = SamplingParams(max_new_tokens=12, method="dflash", ignore_eos=True)


def test_the_second_of_two_that_begin_alike_reads_only_the_rest(tmp_path: Path) -> None:
    engine = dflash_jax.load(*save_random_pair(tmp_path), dtype="float32", max_slots=2, max_model_len=512)
    shared = [(7 * i) % 250 for i in range(200)]
    prompts = [shared + tail for tail in ([1, 2, 3], [4, 5, 6], list(range(60)))]
    expected = [done.token_ids for done in engine.generate(prompts, PARAMS)]

    async def run() -> None:
        server = Server(
            engine, "127.0.0.1", 0, max_queue=4, warm_up="none", prefix_bytes=4 * engine.prefix_state_bytes()
        )
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            stub = pb_grpc.DFlashStub(channel)

            async def ask(prompt: list[int], params: SamplingParams) -> tuple[list[int], pb.Usage]:
                request = pb.GenerateRequest(
                    input=pb.Input(tokens=pb.TokenIds(ids=prompt)), params=messages.sampling_message(params)
                )
                parts = [part async for part in stub.Generate(request, timeout=120)]
                return [i for part in parts for i in part.token_ids], parts[-1].finished.usage

            answers = [await ask(prompt, PARAMS) for prompt in prompts]
            assert [ids for ids, _ in answers] == expected
            # Three whole pages of 64 tokens are shared; the state was kept there.
            assert [usage.cached_tokens for _, usage in answers] == [0, 192, 192]
            assert [usage.prompt_tokens for _, usage in answers] == [203, 203, 260]
            info = await stub.GetServerInfo(pb.GetServerInfoRequest())
            assert (info.prefix_hits, info.prefix_misses, info.prefixes) == (2, 1, 2)
            # What was kept with the drafter's context does not serve a method without one.
            ids, usage = await ask(prompts[0], dataclasses.replace(PARAMS, method="ar"))
            assert (ids, usage.cached_tokens) == (expected[0], 0)
        await server.stop(1)

    asyncio.run(asyncio.wait_for(run(), 300))
