"""Requests of an event loop to an engine in its thread."""

import asyncio
import contextlib
import threading
import time

import pytest
from fake_runner import FakeRunner

from megatron.apps.generation.request import GenerationRequest, Sampling, StopRules
from megatron.apps.generation.scheduling.engine import GenerationEngine, QueueFull
from megatron.apps.generation.scheduling.engine_thread import EngineStopped, EngineThread
from megatron.apps.generation.scheduling.schedule import EngineLimits
from megatron.tokenizer.plain import NullTokenizer

VOCAB = 61


def request(first, new=5):
    return GenerationRequest((first,), StopRules(new), Sampling(greedy=True))


def engine_of(limits=None, **settings):
    limits = limits or EngineLimits(4, 16, 50)
    return GenerationEngine(FakeRunner(VOCAB, **settings), NullTokenizer(VOCAB - 1), limits)


@contextlib.contextmanager
def thread_of(limits=None, **settings):
    thread = EngineThread(engine_of(limits, **settings))
    thread.start()
    try:
        yield thread
    finally:
        thread.close()


async def tokens(thread, asked, at_most=None):
    """Those of a stream, which is left early after some."""
    found = []
    async with asyncio.timeout(30), contextlib.aclosing(thread.stream(asked)) as updates:
        async for update in updates:
            found += update.tokens
            if at_most is not None and len(found) >= at_most:
                break
    return found


async def until(condition):
    """Waits for something that takes a step or two; the longest texts here take twice as long."""
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it does not become true")


def test_streams():
    expected = engine_of().complete([request(n) for n in range(20)])

    async def main(thread):
        return await asyncio.gather(*(tokens(thread, request(n)) for n in range(20)))

    with thread_of() as thread:
        for _ in range(2):  # two event loops
            found = asyncio.run(main(thread))
            assert [tuple(each) for each in found] == [each.tokens for each in expected]


def test_who_leaves_cancels():
    async def main(thread):
        assert len(await tokens(thread, request(1, 900), at_most=3)) == 3
        task = asyncio.create_task(tokens(thread, request(2, 900)))
        await until(lambda: thread.stats.running == 1)
        task.cancel()
        await until(lambda: thread.stats.running == 0)
        waiting = thread.stream(request(3, 900))
        await anext(waiting)
        await waiting.aclose()
        await until(lambda: thread.stats.running == 0)
        assert thread.stats.pages_used == 0
        assert await tokens(thread, request(4)) == await tokens(thread, request(4))

    with thread_of(delay=0.01) as thread:
        asyncio.run(main(thread))


def test_refusals_come_first():
    async def main(thread):
        with pytest.raises(ValueError, match="token id 61"):
            await tokens(thread, request(61))
        tasks = [asyncio.create_task(tokens(thread, request(n, 200))) for n in range(2)]
        await until(lambda: thread.stats.running == thread.stats.waiting == 1)
        with pytest.raises(QueueFull, match="1 requests wait already"):
            await tokens(thread, request(3))
        for task in tasks:
            task.cancel()

    with thread_of(EngineLimits(1, 16, 1), delay=0.005) as thread:
        asyncio.run(main(thread))


def test_requests_and_clients_take_turns():
    """The many texts of one request do not delay another, nor those of one client."""
    ended = []

    async def main(thread):
        async def text(source):
            async with contextlib.aclosing(thread.stream(request(1, 4), source)) as stream:
                async for _ in stream:
                    pass
            ended.append(source)

        many = [("a", 1)] * 9 + [("a", 2)] * 5
        tasks = [asyncio.create_task(text(source)) for source in many]
        await until(lambda: thread.stats.waiting > 5)
        await asyncio.gather(*tasks, text(("a", 3)), text(("b", 4)))

    with thread_of(EngineLimits(1, 16, 100), delay=0.002) as thread:
        asyncio.run(main(thread))
        assert thread.stats.waiting == 0
    assert len(ended) == 16 and ended[-1] == ("a", 1)
    assert ended.index(("b", 4)) < 5 and ended.index(("a", 3)) < 10


def test_burst():
    """Each of many that come at once is answered or refused, while others leave."""

    async def main(thread):
        asked = [tokens(thread, request(n % 60, 6), at_most=n % 9 or None) for n in range(300)]
        return await asyncio.gather(*asked, return_exceptions=True)

    with thread_of(EngineLimits(3, 16, 20)) as thread:
        found = asyncio.run(main(thread))
        assert {type(each) for each in found} == {list, QueueFull}
        assert sum(isinstance(each, list) for each in found) >= 23
        asyncio.run(until(lambda: thread.stats.running == thread.stats.waiting == 0))
        assert thread.failed is None


def test_all_are_told_when_the_model_fails():
    async def main(thread):
        asked = [tokens(thread, request(n, 50)) for n in range(7)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(each) for each in found] == [EngineStopped] * 7
        assert all("step 3 fails" in str(each) for each in found)
        with pytest.raises(EngineStopped, match="step 3 fails"):
            await tokens(thread, request(1))
        assert "step 3 fails" in str(thread.failed)
        assert not await thread.drain(1)

    with thread_of(fail_at=3) as thread:
        assert thread.failed is None
        asyncio.run(main(thread))


def test_drained():
    async def main(thread):
        tasks = [asyncio.create_task(tokens(thread, request(n, 10))) for n in range(9)]
        await until(lambda: thread.stats.running == 4)
        draining = asyncio.create_task(thread.drain(60))
        await asyncio.sleep(0)
        with pytest.raises(EngineStopped, match="takes no more requests"):
            await tokens(thread, request(1))
        assert await draining
        assert [len(each) for each in await asyncio.gather(*tasks)] == [10] * 9

    with thread_of(delay=0.002) as thread:
        asyncio.run(main(thread))
    assert thread.failed is None


def test_drained_no_longer_than_it_may_take():
    async def updates(thread, number):
        return [update async for update in thread.stream(request(number, 900))]

    async def main(thread):
        tasks = [asyncio.create_task(updates(thread, n)) for n in range(6)]
        await until(lambda: thread.stats.running == 4)
        started = time.monotonic()
        assert not await thread.drain(0.02)
        assert time.monotonic() - started < 3
        assert [each[-1].finish for each in await asyncio.gather(*tasks)] == ["cancelled"] * 6

    with thread_of(delay=0.005) as thread:
        asyncio.run(main(thread))
    assert thread.stats.pages_used == 0


def test_event_loop_that_goes_away():
    async def leave(thread):
        updates = thread.stream(request(1, 900))
        await anext(updates)
        return updates  # so that it is not closed with the loop

    with thread_of(delay=0.01) as thread:
        loop = asyncio.new_event_loop()
        updates = loop.run_until_complete(leave(thread))
        loop.close()
        asyncio.run(until(lambda: thread.stats.running == 0))
        assert asyncio.run(tokens(thread, request(2)))
        del updates


def test_thread_that_never_started_closes():
    thread = EngineThread(engine_of())
    assert asyncio.run(thread.drain(1))
    thread.close()
    assert "generation" not in {each.name for each in threading.enumerate()}
