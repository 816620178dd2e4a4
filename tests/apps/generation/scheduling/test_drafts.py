"""Texts with drafts are those without, whatever is drafted; the reference is the engine without."""

import dataclasses
import random

import pytest
import torch
from fake_runner import FakeRunner

from megatron.apps.generation.decoding.drafts import PromptLookup
from megatron.apps.generation.request import (
    Beams,
    Constraint,
    GenerationRequest,
    Sampling,
    StopRules,
)
from megatron.apps.generation.scheduling.engine import GenerationEngine
from megatron.apps.generation.scheduling.schedule import EngineLimits
from megatron.features.tokenizers.byte_level import ByteLevelTokenizer
from megatron.tokenizer.plain import NullTokenizer

VOCAB, LONGEST = 6, 64


class DraftingRunner(FakeRunner):
    """Drafts by itself, with the most probable tokens or random ones, and checks that what it is
    told of the drafts before is in its memory."""

    def __init__(self, drafts, **settings):
        super().__init__(VOCAB, **settings)
        self.drafts, self._draw = drafts, random.Random(4)

    def run(self, step):
        parts, drafts = [], []
        for part in step.parts:
            tokens = list(part.tokens)
            if part.drafts:
                assert part.decoding and len(tokens) == 1 and part.drafts <= self.drafts
                before = self._memory[list(part.pages)].reshape(-1)[: part.start] % 2**32
                count = len(part.before)
                assert tuple(before[part.start - count :]) == part.before
                for _ in range(part.drafts):
                    logits = self.logits_after((*before.tolist(), *tokens), None)
                    right = self._draw.random() < 0.7
                    tokens.append(int(logits.argmax()) if right else self._draw.randrange(VOCAB))
                drafts.append(tuple(tokens[1:]))
            parts.append(dataclasses.replace(part, tokens=tuple(tokens), drafts=0))
        result = super().run(dataclasses.replace(step, parts=tuple(parts)))
        return dataclasses.replace(result, drafts=tuple(drafts))


def engine_of(drafts, by_runner=False, tokenizer=None, **settings):
    settings = {"page_size": 4, "pages": 60, "max_positions": LONGEST} | settings
    runner = DraftingRunner(drafts, **settings) if by_runner else FakeRunner(**settings)
    limits = EngineLimits(4, 4 * (1 + drafts) + 1, 100, drafts)
    return GenerationEngine(runner, tokenizer or NullTokenizer(VOCAB - 1), limits)


def some_request(draw):
    prompt = [draw.randrange(VOCAB) for _ in range(draw.randrange(1, 15))]
    if draw.random() < 0.3:  # several of one prompt
        prompt = [1, 2, 3, 1, 2, 4, 1, 2][: draw.choice([5, 8])]
    sampling = Sampling(greedy=True, repetition_penalty=draw.choice([1.0, 1.3]))
    if draw.random() < 0.6:
        sampling = Sampling(
            seed=draw.randrange(3),
            temperature=draw.choice([0.3, 1.0]),
            top_k=draw.choice([0, 3]),
            top_p=draw.choice([0.7, 1.0]),
            top_p_decay=draw.choice([0.0, 0.9]),
            frequency_penalty=draw.choice([0.0, 0.5]),
            bias=draw.choice([{}, {2: 1.5}]),
        )
    stops = frozenset([draw.randrange(VOCAB)] * draw.randrange(2))
    return GenerationRequest(
        tuple(prompt),
        StopRules(draw.randrange(1, 40), stops, draw.choice([(), ("3 3", "5 1")])),
        sampling,
        Beams(2) if draw.random() < 0.1 else None,
        logprobs=draw.choice([None, 0, 3]),
        prompt_logprobs=draw.choice([None, None, None, 0, 2]),
    )


def without_cached(completions):
    return [dataclasses.replace(each, cached=0) for each in completions]


@pytest.mark.parametrize("by_runner", [False, True])
@pytest.mark.parametrize("seeds", [range(1, 3), pytest.param(range(200), marks=pytest.mark.proof)])
def test_texts_are_those_without(by_runner, seeds):
    """Any sampling, with scores, stops, beams, several of one prompt and little memory."""
    accepted = wrong = 0
    for seed in seeds:
        draw = random.Random(seed)
        asked = [some_request(draw) for _ in range(12)]
        settings = {"reach": draw.choice([1, 2]), "vocab_size": VOCAB, "pages": 30}
        long_after = draw.choice([None, 17, 20])
        if any(each.beams for each in asked):
            long_after = None
        settings |= {"long_after": long_after}
        alone = [engine_of(0, **settings).complete([each])[0] for each in asked]
        if by_runner:
            settings.pop("vocab_size")
        for drafts in (1, 3, 5):
            engine = engine_of(drafts, by_runner, **settings)
            assert without_cached(engine.complete(asked)) == without_cached(alone)
            stats = engine.stats
            accepted += stats.accepted_tokens
            wrong += stats.draft_tokens - stats.accepted_tokens
            assert stats.new_tokens == sum(len(each.tokens) for each in alone)
            assert stats.pages_used == 0
    assert min(accepted, wrong) > 40 * len(seeds)


def test_fewer_steps_and_one_update_for_each_token():
    """A text that repeats itself: each step has all its drafts right."""
    runner = FakeRunner(VOCAB, reach=1, page_size=4, pages=60, max_positions=LONGEST)
    asked = GenerationRequest((0,), StopRules(40), Sampling(greedy=True), logprobs=1)
    engine = GenerationEngine(runner, NullTokenizer(VOCAB - 1), EngineLimits(1, 9, 1, 4))
    engine.submit(asked)
    updates = []
    while engine.busy:
        updates += engine.step()
    assert [len(update.tokens) for update in updates] == [1] * 40
    assert all(len(update.scores) == 1 for update in updates)
    plain = engine_of(0, vocab_size=VOCAB, reach=1)
    assert [u.tokens[0] for u in updates] == list(plain.complete([asked])[0].tokens)
    assert engine.stats.steps < 20 and plain.stats.steps == 40
    assert engine.stats.accepted_tokens == 40 - engine.stats.steps


def test_constrained_texts():
    pytest.importorskip("llguidance", reason="constraints need the extra serve")
    tokenizer = ByteLevelTokenizer(0, {"pad": 256, "bos": 257, "eos": 258})
    stopping = StopRules(30, frozenset([258]))
    asked = [
        GenerationRequest(
            tuple(b"cdcdcdcd-"),
            stopping,
            Sampling(seed=seed, temperature=0.5),
            constraint=Constraint("regex", pattern),
        )
        for seed, pattern in enumerate(["(cd|e){4,9}-(01){2,6}", "a{9}", "(ab)*c"])
    ]
    settings = {"tokenizer": tokenizer, "vocab_size": 259}
    plain = engine_of(0, **settings).complete(asked)
    engine = engine_of(3, **settings)
    assert without_cached(engine.complete(asked)) == without_cached(plain)
    assert 0 < engine.stats.accepted_tokens < engine.stats.draft_tokens


def test_token_before_a_failure_is_written():
    """A sampler that fails at a later row of a step: what came before it stays."""
    runner = FakeRunner(VOCAB, reach=1, page_size=4, pages=60, max_positions=LONGEST)
    after = runner.logits_after
    runner.logits_after = lambda tokens, encoded: (
        torch.full((VOCAB,), torch.nan) if len(tokens) == 21 else after(tokens, encoded)
    )
    engine = GenerationEngine(runner, NullTokenizer(VOCAB - 1), EngineLimits(1, 9, 1, 4))
    engine.submit(GenerationRequest((0,), StopRules(40), Sampling(greedy=True)))
    updates = []
    while engine.busy:
        updates += engine.step()
    assert [len(update.tokens) for update in updates] == [1] * 20 + [0]
    assert updates[-1].finish == "failed" and engine.stats.failed == 1


def test_lookup_against_a_search():
    draw = random.Random(3)
    for _ in range(200):
        tokens = [draw.randrange(3) for _ in range(draw.randrange(1, 40))]
        cut, count = draw.randrange(len(tokens) + 1), draw.randrange(6)
        lookup = PromptLookup(tokens[:cut])
        for token in tokens[cut:]:
            lookup.add(token)
        assert lookup.draft(count) == searched(tokens, count)


def searched(tokens, count):
    """Tokens after the latest earlier place of the longest n-gram at the end, with itself."""
    for length in (4, 3, 2):
        last = tokens[-length:]
        for place in range(len(tokens) - 1, length - 1, -1):
            if len(last) == length and tokens[place - length : place] == last:
                longer = list(tokens)
                for _ in range(count):
                    longer.append(longer[place + len(longer) - len(tokens)])
                return tuple(longer[len(tokens) :])
    return ()


def test_room_for_drafts_in_a_step():
    with pytest.raises(ValueError, match=r"step_tokens 64 .* running 16 x \(1 \+ drafts 3\)"):
        EngineLimits(16, 64, drafts=3)
    engine = engine_of(3, by_runner=True)  # 4 texts, 17 tokens
    sizes, run = [], engine.runner.run
    count = lambda step: sum(len(part.tokens) + part.drafts for part in step.parts)  # noqa: E731
    engine.runner.run = lambda step: sizes.append(count(step)) or run(step)
    asked = [((0,), 20), ((1, 2), 20), (tuple(range(5)) * 10, 1), ((3,) * 40, 1)]
    engine.complete([GenerationRequest(prompt, StopRules(new)) for prompt, new in asked])
    assert max(sizes) == 17
