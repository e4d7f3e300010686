"""Servers for tests, in the loop of another thread of this process."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dflash_jax import Engine
from serve.server import Server


@contextmanager
def serving(engine: Engine, max_queue: int = 1, **options: object) -> Iterator[int]:
    """A server that compiles nothing before it is asked; yields its port."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def started() -> Server:
        server = Server(engine, "127.0.0.1", 0, max_queue, warm_up="none", **options)  # type: ignore[arg-type]
        await server.start()
        return server

    server = asyncio.run_coroutine_threadsafe(started(), loop).result(60)
    try:
        yield server.port
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(1), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
