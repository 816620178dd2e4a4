"""Requests whose texts must match something, next to others."""

import asyncio
import re

import pytest
from fake_runner import FakeRunner

from megatron.apps.generation.request import Constraint, GenerationRequest, Sampling, StopRules
from megatron.apps.generation.scheduling.engine import GenerationEngine
from megatron.apps.generation.scheduling.engine_thread import EngineThread
from megatron.apps.generation.scheduling.schedule import EngineLimits
from megatron.features.tokenizers.byte_level import ByteLevelTokenizer

pytest.importorskip("llguidance", reason="constraints need the extra serve")

TOKENIZER = ByteLevelTokenizer(0, {"pad": 256, "bos": 257, "eos": 258})
PATTERN = "[a-f]{3}-(0|1){2,4}"


def request(pattern, new=30, seed=1, stops=(258,)):
    constraint = None if pattern is None else Constraint("regex", pattern)
    stopping = StopRules(new, frozenset(stops))
    return GenerationRequest((65, 66), stopping, Sampling(seed=seed), constraint=constraint)


def engine_of():
    return GenerationEngine(FakeRunner(259, page_size=4), TOKENIZER, EngineLimits(8, 20, 20))


def text(completion):
    return TOKENIZER.detokenize([token for token in completion.tokens if token != 258])


def test_constrained_texts_next_to_free_ones():
    asked = [request(PATTERN if seed % 2 else None, seed=seed) for seed in range(10)]
    found = engine_of().complete(asked)
    for each, completion in zip(asked, found, strict=True):
        assert completion.tokens == engine_of().complete([each])[0].tokens
        if each.constraint is not None:
            assert re.fullmatch(PATTERN, text(completion)) and completion.finish == "stop"
    assert len({text(completion) for completion in found}) > 5


def test_text_that_nothing_may_follow_ends_without_a_stop_token():
    (found,) = engine_of().complete([request("abc", stops=())])
    assert (text(found), found.finish) == ("abc", "stop")
    (found,) = engine_of().complete([request("a{9}", new=4)])
    assert (text(found), found.finish) == ("aaaa", "length")


def test_bad_constraint_is_refused():
    engine = engine_of()
    with pytest.raises(ValueError, match="regular expression"):
        engine.submit(request("(a"))
    assert not engine.busy


def test_constraints_of_an_event_loop():
    async def main(thread):
        found = []
        async for update in thread.stream(request("xyz?")):
            found += update.tokens
        with pytest.raises(ValueError, match="regular expression"):
            await anext(thread.stream(request("(a")))
        return TOKENIZER.detokenize([token for token in found if token != 258])

    thread = EngineThread(engine_of())
    thread.start()
    assert asyncio.run(main(thread)) in ("xy", "xyz")
    thread.close()
