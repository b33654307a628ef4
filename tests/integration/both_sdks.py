"""The unmodified `openai` SDK, sync and async, called alike: a test that takes `Sdk` runs against both clients."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import openai

KINDS = ("sync", "async")


class Sdk:
    """One client. Calls are named as in its documentation: `sdk.call("batches.create", ...)`."""

    def __init__(self, client: openai.OpenAI | openai.AsyncOpenAI, loop: asyncio.AbstractEventLoop) -> None:
        self.client = client
        self._loop = loop

    def call(self, name: str, /, *args: Any, **fields: Any) -> Any:
        """What the call returns; the first page of a list."""
        made = reduce(getattr, name.split("."), self.client)
        answer = made(*args, **fields)  # type: ignore[operator]
        return self._wait(answer) if inspect.isawaitable(answer) else answer

    def items(self, name: str, /, **fields: Any) -> list[Any]:
        """Everything that the SDK's iterator over a list yields: it walks from page to page by itself."""
        made = reduce(getattr, name.split("."), self.client)
        pages = made(**fields)  # type: ignore[operator]
        return self._wait(_collect(pages)) if hasattr(pages, "__aiter__") else list(pages)

    def refused(self, name: str, /, *args: Any, **fields: Any) -> openai.APIStatusError:
        """The exception that a refused call raises. It must be that of the first try, where the SDK repeats some."""
        try:
            self.call(name, *args, **fields)
        except openai.APIStatusError as error:
            return error
        raise AssertionError(f"{name} was not refused")

    def _wait(self, answer: Awaitable[Any]) -> Any:
        async def wait() -> Any:
            return await answer

        return asyncio.run_coroutine_threadsafe(wait(), self._loop).result(60)

    def close(self) -> None:
        closed = self.client.close()
        if inspect.isawaitable(closed):
            self._wait(closed)


async def _collect(pages: Any) -> list[Any]:
    return [item async for item in pages]


def tries(error: openai.APIStatusError) -> int:
    """How often the SDK had asked when it gave up."""
    return int(error.request.headers["x-stainless-retry-count"]) + 1


@contextmanager
def sdk_of(kind: str, url: str, key: str = "none", **options: Any) -> Iterator[Sdk]:
    """A client of the API at `url`; the async one has an event loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    make = openai.OpenAI if kind == "sync" else openai.AsyncOpenAI
    sdk = Sdk(make(base_url=f"{url}/v1", api_key=key, **options), loop)
    try:
        yield sdk
    finally:
        sdk.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
