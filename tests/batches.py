"""A fake engine that counts what is in its batch, and may go on with what was given up.

async with Engine("vllm") as engine, gateway(engine.pool()) as gate:
    ...
    assert engine.most == 1
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal, Self

from tests.harness import DONE, MODEL, FakeWorker, Reply, Seen, completion, delta, pool

EngineName = Literal["vllm", "sglang"]

SCORES: dict[EngineName, dict[str, Any]] = {
    "vllm": {"object": "list", "data": [{"index": 0, "label": "LABEL_0", "probs": [0.5], "num_classes": 1}]},
    "sglang": {"embedding": [0.5], "meta_info": {"id": "x", "prompt_tokens": 3}},
}


class Engine(FakeWorker):
    """Tells how many requests are in its batch where the gateway asks for it, strangers' with them.

    A request stays until `hold` lets it go. One whose connection closes before, or that is reset when `resets` is set,
    stays until `drop` is set, as it is unless a test clears it.
    """

    def __init__(self, name: EngineName = "vllm", *, held: bool = False) -> None:
        super().__init__(self._run, probes=self.probe)
        self.name: EngineName = name
        self.go = asyncio.Event()
        if not held:
            self.go.set()
        self.drop = asyncio.Event()
        self.drop.set()
        self.hold: Callable[[Seen], Awaitable[object]] = lambda seen: self.go.wait()
        self.begin: Callable[[Reply], None] = lambda reply: None
        self.finish: Callable[[Seen, Reply], None] = self.answer
        self.resets = False
        self.inside = 0
        self.most = 0
        self.strangers = 0
        self.abandoned = 0
        self.aborted: list[str] = []
        self.prefix_cache: bool | None = None
        self._arrived = asyncio.Condition()

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        return self

    def pool(self, name: str = "reward", **settings: Any) -> dict[str, Any]:
        """A pool of this engine alone; of role reward unless told otherwise."""
        return pool(name, self.url, engine=self.name, **({"role": "reward"} | settings))

    def text(self, text: str | list[str]) -> dict[str, Any]:
        """A request to /classify."""
        return {"model": MODEL, "input": text} if self.name == "vllm" else {"text": text}

    async def has_seen(self, count: int) -> None:
        """Wait until so many requests have reached it, since its start."""
        async with self._arrived, asyncio.timeout(5):
            await self._arrived.wait_for(lambda: len(self.seen) >= count)

    def answer(self, seen: Seen, reply: Reply) -> None:
        """The whole answer."""
        reply.json(SCORES[self.name] if seen.target == "/classify" else completion())

    def stream(self) -> None:
        """From now on, answers are streams that begin at once."""

        def begin(reply: Reply) -> None:
            reply.sse()
            reply.chunk(delta("h"))

        def finish(seen: Seen, reply: Reply) -> None:
            reply.chunk(delta("", "stop"))
            reply.chunk(DONE)
            reply.end()

        self.begin, self.finish = begin, finish

    async def _run(self, seen: Seen, reply: Reply) -> None:
        if seen.target == "/abort_request":
            self.seen.remove(seen)
            self.aborted.append(seen.json["rid"])
            reply.json({})
            return
        if seen.target == "/tokenize":
            reply.json({"tokens": [1]})
            return
        self.inside += 1
        self.most = max(self.most, self.inside)
        async with self._arrived:
            self._arrived.notify_all()
        try:
            self.begin(reply)
            if not await self._let_go(seen, reply):
                self.abandoned += 1
                await self.drop.wait()
                return
            if self.resets:
                reply.reset()
                await self.drop.wait()
                return
        finally:
            self.inside -= 1
        self.finish(seen, reply)

    async def _let_go(self, seen: Seen, reply: Reply) -> bool:
        """Wait until a request may go on. False: its connection closed before."""
        going = asyncio.ensure_future(self.hold(seen))
        gone = asyncio.create_task(reply.gone())
        try:
            await asyncio.wait((going, gone), return_when=asyncio.FIRST_COMPLETED)
            return going.done()
        finally:
            for task in (going, gone):
                task.cancel()
            await asyncio.gather(going, gone, return_exceptions=True)

    async def probe(self, seen: Seen, reply: Reply) -> None:
        """Answers what the gateway asks."""
        count = self.inside + self.strangers
        if seen.target == "/metrics" and self.name == "vllm":
            lines = [f'vllm:num_requests_running{{engine="0"}} {count}.0', 'vllm:num_requests_waiting{engine="0"} 0.0']
            if self.prefix_cache is not None:
                lines.append(f'vllm:cache_config_info{{enable_prefix_caching="{self.prefix_cache}",engine="0"}} 1.0')
            reply.text("\n".join(lines))
        elif seen.target == "/v1/loads" and self.name == "sglang":
            reply.json({"loads": [{"dp_rank": 0, "num_running_reqs": count, "num_waiting_reqs": 0}]})
        elif seen.target == "/server_info" and self.prefix_cache is not None:
            reply.json({"disable_radix_cache": not self.prefix_cache})
        elif seen.target == "/v1/models":
            reply.json({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        else:
            reply.json({})
