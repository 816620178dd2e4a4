"""What a request gets does not depend on others, and nothing is lost or kept."""

import dataclasses
import random
from collections import defaultdict

import pytest
import torch
from fake_runner import FakeRunner, NaiveRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.apps.generation.decoding.beams import BeamSearch
from megatron.apps.generation.request import (
    Beams,
    Constraint,
    GenerationRequest,
    Sampling,
    StopRules,
)
from megatron.apps.generation.scheduling.engine import GenerationEngine, QueueFull
from megatron.apps.generation.scheduling.schedule import EngineLimits
from megatron.tokenizer.plain import NullTokenizer

VOCAB = 61
GREEDY = Sampling(greedy=True)
SMALL = EngineLimits(running=4, step_tokens=9, waiting=100)


def engine_of(runner=None, limits=SMALL, **settings):
    settings = {"reach": None, "page_size": 4, "pages": 24, "max_positions": 32} | settings
    runner = runner or FakeRunner(VOCAB, **settings)
    return GenerationEngine(runner, NullTokenizer(VOCAB - 1), limits)


def request(prompt, new=4, stops=(), sampling=GREEDY, **fields):
    return GenerationRequest(
        tuple(prompt), StopRules(new, frozenset(stops)), sampling=sampling, **fields
    )


def alone(asked, runner=None):
    """What a request gets from an engine that does nothing else, whole prompts at once."""
    return engine_of(runner, EngineLimits(4, 100, 1)).complete([asked])[0]


def without_cached(completion):
    return dataclasses.replace(completion, cached=0)


def random_request(draw):
    """``draw`` is a random.Random. Prompts have the same starts and short alphabets."""
    prompt = [draw.randrange(2) for _ in range(draw.randrange(1, 15))]
    if draw.random() < 0.5:  # one of a few, so that several wait for the same
        prompt = [[0], [0, 1, 1], [1] * 11][draw.randrange(3)]
    common = [1, 0, 1, 1, 0, 0, 1, 0, 1][: draw.choice([0, 0, 4, 7, 9])]
    beams = Beams(draw.randrange(1, 4)) if draw.random() < 0.2 else None
    return request(
        common + prompt,
        draw.randrange(0 if beams is None else 1, 8),
        stops=(draw.randrange(VOCAB),) * draw.randrange(2),
        sampling=GREEDY if draw.random() < 0.5 else Sampling(seed=draw.randrange(3)),
        logprobs=draw.choice([None, 0, 3]),
        prompt_logprobs=draw.choice([None, None, None, 0, 2]),
        beams=beams,
    )


class Crowd:
    """Requests that come and go while an engine runs, and what each has got."""

    def __init__(self, engine):
        self.engine = engine
        self.asked, self.got = {}, defaultdict(list)

    def submit(self, asked):
        number = self.engine.submit(asked)
        self.asked[number] = asked
        return number

    def step(self):
        for update in self.engine.step():
            assert not self.ended(update.number), "something came after the end"
            self.got[update.number].append(update)

    def ended(self, number):
        return bool(self.got[number]) and self.got[number][-1].finish is not None

    def finish(self):
        steps = 0
        while self.engine.busy:
            self.step()
            steps += 1
            assert steps < 10_000
        assert all(self.ended(number) for number in self.asked)

    def tokens(self, number):
        return [token for update in self.got[number] for token in update.tokens]

    def scores(self, number):
        return [score for update in self.got[number] for score in update.scores]

    def prompt_scores(self, number):
        return [score for update in self.got[number] for score in update.prompt_scores]

    def finish_of(self, number):
        return self.got[number][-1].finish

    def check(self, runner=None):
        """All that was not cancelled is as it is alone; the rest is its beginning."""
        for number, asked in self.asked.items():
            expected = alone(asked, runner)
            length = len(self.tokens(number))
            if self.finish_of(number) != "cancelled":
                assert self.finish_of(number) == expected.finish
                assert length == len(expected.tokens)
                assert tuple(self.prompt_scores(number)) == expected.prompt_scores
            assert tuple(self.tokens(number)) == expected.tokens[:length]
            assert tuple(self.scores(number)) == expected.scores[:length]


@pytest.fixture
def naive(gpt_config, random_gpt):
    return NaiveRunner(random_gpt(gpt_config()), VOCAB, page_size=4, pages=24, max_positions=24)


def test_greedy_text_of_a_model(naive):
    prompt = (5, 7, 9, 11, 2)
    found = engine_of(naive).complete([request(prompt, 8, logprobs=2, prompt_logprobs=1)])[0]
    tokens = list(prompt)
    logits = []
    for _ in range(12):
        logits.append(naive.logits_after(tuple(tokens), None))
        tokens.append(int(logits[-1].argmax()))
    assert list(found.tokens) == tokens[5:13]
    assert (found.finish, found.cached) == ("length", 0)
    for token, score, row in zip(found.tokens, found.scores, logits, strict=False):
        log_probs = row.double().log_softmax(-1)
        assert score.token == token
        assert score.logprob == pytest.approx(float(log_probs[token]), abs=1e-6)
        assert [each for each, _ in score.top] == log_probs.topk(2).indices.tolist()
    assert [score.token for score in found.prompt_scores] == list(prompt[1:])
    for place, score in enumerate(found.prompt_scores, 1):
        row = naive.logits_after(prompt[:place], None).double().log_softmax(-1)
        assert score.logprob == pytest.approx(float(row[prompt[place]]), abs=1e-6)
        assert len(score.top) == 1


@pytest.mark.parametrize("seed", range(3))
def test_nothing_depends_on_others(naive, seed):
    """Of a model, to the last bit: tokens and log-probabilities do not depend on when a request
    comes, what else runs, whose pages it uses, or how its prompt is cut."""
    draw = random.Random(seed)
    crowd = Crowd(engine_of(naive, EngineLimits(draw.choice([3, 4, 8]), draw.choice([9, 20]))))
    for _ in range(12):
        asked = random_request(draw)
        crowd.submit(dataclasses.replace(asked, prompt=asked.prompt[:16]))
        for _ in range(draw.randrange(4)):
            crowd.step()
    crowd.finish()
    assert crowd.engine.stats.prefix_hit_tokens > 0
    crowd.check(naive)


@settings(max_examples=20, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(16, 40), st.sampled_from([None, 3, 4]))
def test_no_page_leaks(draw, pages, slots):
    """Requests come, run, end and are cancelled in any order; also of a model with states, of which
    a slot's are those of its own text, and whose prompts are cut at pieces."""
    crowd = Crowd(engine_of(pages=pages, slots=slots, piece=1 if slots is None else 2))
    for _ in range(draw.randrange(1, 25)):
        crowd.submit(random_request(draw))
        for _ in range(draw.randrange(3)):
            crowd.step()
        if draw.random() < 0.4:
            crowd.engine.cancel(draw.choice(list(crowd.asked)))
    crowd.finish()
    stats = crowd.engine.stats
    assert (stats.running, stats.waiting, stats.pages_used, stats.slots_used) == (0, 0, 0, 0)
    assert stats.slots == (slots or 0)
    assert stats.pages_cached + stats.pages_free == stats.pages == pages
    assert stats.finished == len(crowd.asked) and stats.failed == 0
    pool = crowd.engine._pool
    assert not pool._claims and set(pool._digests) == set(pool._idle) == pool._filled
    crowd.check()


def test_new_tokens_next_to_a_long_prompt():
    crowd = Crowd(engine_of(max_positions=200, pages=100))
    first = crowd.submit(request([1], 30))
    crowd.step()
    long = crowd.submit(request([2] * 150, 1))
    crowd.step()
    while not crowd.ended(long):
        before = len(crowd.tokens(first))
        crowd.step()
        assert len(crowd.tokens(first)) == before + 1
    # One of the nine tokens of a step is the text's.
    assert crowd.engine.stats.steps == 1 + -(-150 // 8)
    assert all(len(part.tokens) <= 8 for step in crowd.engine.runner.steps for part in step.parts)


def test_first_come_first_served():
    """A request that does not fit yet is not overtaken by smaller ones behind it."""
    crowd = Crowd(engine_of(pages=8))
    first = crowd.submit(request([1] * 8, 9))
    large = crowd.submit(request([2] * 16, 13))
    small = crowd.submit(request([3], 1))
    order = []
    while crowd.engine.busy:
        crowd.step()
        order += [n for n in (first, large, small) if crowd.ended(n) and n not in order]
        assert not (crowd.ended(small) and not crowd.got[large])
    assert set(order) == {first, large, small}


def test_prompts_are_shared_while_they_are_computed():
    engine = engine_of(limits=EngineLimits(8, 100, 8))
    asked = [request([1, 2, 3, 4, 5, 6, 7, 8, 9], 2, sampling=Sampling(seed=n)) for n in range(4)]
    found = engine.complete(asked)
    # The first computes it; the others share its full pages, and copy the third.
    assert [len(part.tokens) for part in engine.runner.steps[0].parts] == [9]
    assert [len(step.copies) for step in engine.runner.steps] == [0, 3]
    assert [completion.cached for completion in found] == [0, 9, 9, 9]
    assert engine.stats.prefix_hit_tokens == 27 and engine.stats.prompt_tokens == 36
    assert [without_cached(each) for each in found] == [alone(each) for each in asked]


@pytest.mark.parametrize("length", [1, 3, 4, 8, 13])
def test_texts_and_beams_of_one_prompt(length):
    """They wait for the first, which may have ended before they copy its last page, or may be
    cancelled."""
    prompt, crowd = list(range(20, 20 + length)), Crowd(engine_of(limits=EngineLimits(10, 11, 9)))
    numbers = [
        crowd.submit(request(prompt, new, sampling=Sampling(seed=new), beams=beams))
        for new, beams in [(5, None), (1, None), (9, Beams(2)), (9, None), (2, None), (3, Beams(3))]
    ]
    crowd.step()
    crowd.engine.cancel(numbers[0])
    # Takes the pages of those that have ended.
    crowd.submit(request([6] * 12, 5))
    crowd.finish()
    crowd.check()
    parts = [part for step in crowd.engine.runner.steps for part in step.parts]
    assert sum(part.start == 0 and part.tokens[0] == 20 for part in parts) == 1


def test_pages_that_others_use_are_not_copied_to():
    engine = engine_of(limits=EngineLimits(4, 30, 9))
    asked = request([1, 2, 3, 4, 5, 6, 7, 8, 9], 2)
    engine.complete([asked])
    scored = dataclasses.replace(asked, prompt_logprobs=0)
    assert [each.cached for each in engine.complete([scored, asked])] == [0, 8]
    assert not any(step.copies for step in engine.runner.steps)


def test_prompt_that_is_known_whole_computes_its_last_page():
    engine = engine_of()
    asked = request([1, 2, 3, 4, 5, 6, 7, 8], 3)
    first, second = engine.complete([asked])[0], engine.complete([asked])[0]
    assert (first.cached, second.cached) == (0, 4)
    assert first.tokens == second.tokens


def test_pages_to_share_do_not_make_room():
    """A known prompt does not run on pages that only its own start would free."""
    crowd = Crowd(engine_of(pages=8))
    crowd.submit(request([1, 2, 3, 4, 5, 6, 7, 8, 9], 1))
    crowd.finish()
    crowd.submit(request([9], 20))
    crowd.step()
    # Three pages are left, two of them with what this one shares; it needs two others.
    known = crowd.submit(request([1, 2, 3, 4, 5, 6, 7, 8, 9], 8))
    crowd.step()
    assert crowd.engine.stats.waiting == 1
    crowd.finish()
    assert crowd.got[known][0].cached == 8
    crowd.check()


def test_what_was_generated_is_not_shared():
    """Only prompts are: results of single tokens may be rounded in another way."""
    engine = engine_of()
    (first,) = engine.complete([request([1, 2, 3, 4], 8)])
    (second,) = engine.complete([request([1, 2, 3, 4, *first.tokens], 1)])
    assert second.cached == 4


def test_another_takes_over_a_prompt_that_is_cancelled():
    crowd = Crowd(engine_of(max_positions=64))
    first, second = (crowd.submit(request([7] * 30, 2)) for _ in range(2))
    crowd.step()
    crowd.engine.cancel(first)
    crowd.finish()
    assert crowd.finish_of(first) == "cancelled"
    assert (
        tuple(crowd.tokens(second))
        == engine_of(max_positions=64).complete([request([7] * 30, 2)])[0].tokens
    )


def test_cancelled_requests():
    crowd = Crowd(engine_of())
    running, waiting = (
        [crowd.submit(request([n], 20)) for n in range(4)],
        crowd.submit(request([9])),
    )
    crowd.step()
    crowd.engine.cancel(running[1])
    crowd.engine.cancel(waiting)
    crowd.engine.cancel(waiting)
    crowd.step()
    assert crowd.finish_of(running[1]) == crowd.finish_of(waiting) == "cancelled"
    assert crowd.tokens(waiting) == []
    crowd.engine.cancel(waiting)
    crowd.engine.cancel(12345)
    crowd.finish()
    assert crowd.engine.stats.pages_used == 0


class NanAfterThirteen(FakeRunner):
    def logits_after(self, sequence_L, encoded):
        logits_V = super().logits_after(sequence_L, encoded)
        return logits_V * float("nan") if sequence_L[0] == 13 else logits_V


def test_failing_request_ends_alone():
    crowd = Crowd(engine_of(NanAfterThirteen(VOCAB, reach=None)))
    bad, good = crowd.submit(request([13])), crowd.submit(request([1]))
    crowd.finish()
    assert crowd.finish_of(bad) == "failed"
    assert "NaN" in str(crowd.got[bad][-1].error)
    assert tuple(crowd.tokens(good)) == alone(request([1])).tokens
    stats = crowd.engine.stats
    assert (stats.failed, stats.finished, stats.pages_used) == (1, 2, 0)
    with pytest.raises(ValueError, match="NaN"):
        crowd.engine.complete([request([2]), request([13]), request([3])])
    assert not crowd.engine.busy


def test_scoring():
    found = alone(request([3, 1, 4], 0, prompt_logprobs=0))
    assert (found.tokens, found.finish, len(found.prompt_scores)) == ((), "length", 2)
    assert alone(request([3], 0, prompt_logprobs=5)).prompt_scores == ()


def test_stop_token_is_part_of_the_text():
    tokens = alone(request([3, 1], 8)).tokens
    found = alone(request([3, 1], 8, stops=(tokens[2],)))
    assert (found.tokens, found.finish) == (tokens[: tokens.index(tokens[2]) + 1], "stop")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (request([]), "the prompt is empty"),
        (request([3, 61]), "token id 61, outside the model's vocabulary of 61"),
        (request([3, -1]), "token id -1"),
        (request([3] * 30, 3), "a prompt of 30 tokens and 3 new ones .* 32 positions"),
        (request([3], 2, logprobs=62), "logprobs 62 must be from 0 to 61"),
        (request([3], 2, prompt_logprobs=-1), "prompt_logprobs -1 must"),
        (request([3] * 20, 12), "20 tokens and 12 new ones need 8 pages of 4 .* memory for 7"),
        (
            request([3], sampling=Sampling(bias={61: 1.0})),
            "the bias has token id 61, outside",
        ),
    ],
)
def test_what_can_never_run(asked, message):
    engine = engine_of(pages=7)
    with pytest.raises(ValueError, match=message):
        engine.submit(asked)
    assert not engine.busy


def test_full_queue():
    engine = engine_of(limits=EngineLimits(1, 9, 2))
    for _ in range(3):  # one will run
        engine.submit(request([1]))
    for _ in range(2):
        with pytest.raises(QueueFull, match="2 requests wait already"):
            engine.submit(request([1]))
        engine.step()
    while engine.stats.finished == 0:
        engine.step()
    engine.submit(request([1]))
    with pytest.raises(ValueError, match="step_tokens 64 must be more than running 64"):
        EngineLimits(64, 64)


def test_completions_come_lazily_and_in_order():
    engine = engine_of(limits=EngineLimits(2, 9, 2))
    taken = []

    def requests():
        for number in range(9):
            taken.append(number)
            yield request([number], 9 - number)

    found = engine.completions(requests())
    first = next(found)
    assert len(taken) < 9
    assert [len(each.tokens) for each in (first, *found)] == list(range(9, 0, -1))
    found = engine.completions(requests())
    next(found)
    found.close()
    assert not engine.busy and engine.stats.pages_used == 0


def test_failing_model():
    engine = engine_of(fail_at=1)
    engine.submit(request([1]))
    engine.step()
    with pytest.raises(RuntimeError, match="as it was told to"):
        engine.step()


def test_encoder_and_decoder():
    """The decoder begins with its start token; requests of one prompt share what the encoder
    makes of it, which is forgotten when the last of them has ended."""
    runner = FakeRunner(
        VOCAB, reach=None, page_size=4, pages=24, max_positions=12, max_prompt=40, start_token=3
    )
    engine = engine_of(runner)
    asked = [request([5] * 30, 6), request([5] * 30, 9), request([6] * 30, 3), request([7], 2)]
    found = engine.complete(asked)
    for each, completion in zip(asked, found, strict=True):
        tokens = [3]
        for _ in completion.tokens:
            tokens.append(int(runner.logits_after(tuple(tokens), each.prompt).argmax()))
        assert list(completion.tokens) == tokens[1:]
    assert sum(len(step.encode) for step in runner.steps) == 3
    assert runner.steps[0].encode == ((0, (5,) * 30),)
    engine.complete([request([7], 1)])
    assert len(runner.encoded) == 1
    for bad, message in [
        (request([5] * 41), "41 tokens is longer than the 40 that the model's encoder takes"),
        (request([5], 12), "a start token and 12 new ones are more than the 12 positions"),
        (request([5], prompt_logprobs=1), "an encoder reads the prompt"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.submit(bad)


def test_stop_text():
    tokens = alone(request([3, 1], 8)).tokens
    stopping = StopRules(8, texts=(f" {tokens[3]} ", f" {tokens[4]}"))
    found = alone(dataclasses.replace(request([3, 1]), stopping=stopping))
    # The space behind a number comes with the next one.
    assert (found.tokens, found.finish) == (tokens[:5], "stop")


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("seed", range(2))
def test_beams_without_a_cache(naive, length, seed):
    """Beams whose pages are shared and copied have the logits of whole sequences."""
    draw = random.Random(100 * length + seed)
    prompt = [draw.randrange(VOCAB) for _ in range(length)]
    stops = [draw.randrange(VOCAB) for _ in range(2)]
    width, new = draw.choice([2, 3, 5]), draw.randrange(1, 10)
    asked = request(prompt, new, stops, beams=Beams(width, draw.choice([0.5, 1.0])), logprobs=1)
    engine = engine_of(naive, EngineLimits(8, 12, 8))
    others = [dataclasses.replace(random_request(draw), prompt=(1, 0, 1, 1, 0)) for _ in range(3)]
    found = engine.complete([others[0], asked, *others[1:], asked])
    assert engine.stats.pages_used == 0
    expected = searched(naive, asked)
    for completion in (found[1], found[4]):
        assert completion.beams == expected
        assert completion.tokens == expected[0].tokens
        assert completion.scores == expected[0].scores
    for other, completion in zip(others, [found[0], *found[2:4]], strict=True):
        assert without_cached(completion) == alone(other, naive)


def searched(runner, asked):
    """The results of a beam search over whole sequences."""
    search = BeamSearch(asked.beams, asked.stopping, logprobs=asked.logprobs)
    texts = [asked.prompt]
    while not search.done:
        logits_WV = torch.stack([runner.logits_after(text, None) for text in texts])
        texts = [(*texts[row], token) for row, token in search.step(logits_WV)]
    return search.results()


def test_beams_take_no_more_pages_than_are_needed():
    """The most that they can need is enough, also where every page is."""
    for new in range(1, 12):
        asked = request([1, 2, 3, 4, 5], new, beams=Beams(3))
        pages = 1 + 3 * (-(-(5 + new - 1) // 4) - 1)
        runner = FakeRunner(VOCAB, reach=None, page_size=4, pages=pages)
        assert engine_of(runner).complete([asked])[0].beams == searched(runner, asked)
        with pytest.raises(ValueError, match=f"need {pages} pages .* memory for {pages - 1}"):
            engine_of(pages=pages - 1).submit(asked)


def test_beams_of_a_decoder_with_an_encoder():
    runner = FakeRunner(VOCAB, page_size=4, max_positions=12, max_prompt=40, start_token=3)
    (found,) = engine_of(runner).complete([request([5] * 30, 6, beams=Beams(3))])
    assert len(found.beams) == 3 and found.tokens == found.beams[0].tokens


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beams": Beams(5)}, "5 beams are more than the 4 texts that may run at once"),
        ({"beams": Beams(2), "stopping": StopRules(0)}, "max_new_tokens of 1 or more"),
        ({"beams": Beams(2), "constraint": Constraint("regex", "a")}, "cannot be constrained"),
    ],
)
def test_beams_that_can_never_run(changes, message):
    with pytest.raises(ValueError, match=message):
        engine_of().submit(dataclasses.replace(request([3]), **changes))


def test_beam_search_that_is_cancelled():
    crowd = Crowd(engine_of())
    number = crowd.submit(request([1, 2, 3], 12, beams=Beams(3)))
    other = crowd.submit(request([4], 12))
    for _ in range(5):
        crowd.step()
    crowd.engine.cancel(number)
    crowd.finish()
    assert crowd.finish_of(number) == "cancelled" and crowd.engine.stats.pages_used == 0
    assert tuple(crowd.tokens(other)) == alone(request([4], 12)).tokens


@pytest.mark.parametrize(("seed", "slots"), [(0, None), (1, None), (1, 4)])
def test_texts_that_become_long(seed, slots):
    """Keys, values and states of a sequence that grows beyond a length are computed again; prompts
    of short and of long ones are not shared."""
    draw = random.Random(seed)
    short, settings = FakeRunner(VOCAB, reach=None), {"max_positions": 60, "long_after": 14}
    settings["slots"] = slots
    crowd = Crowd(engine_of(pages=40, **settings))
    for _ in range(12):
        prompt = [1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1][: draw.randrange(1, 18)]
        crowd.submit(request(prompt, draw.randrange(1, 25), prompt_logprobs=draw.choice([None, 1])))
        crowd.step()
        if draw.random() < 0.3:
            crowd.engine.cancel(draw.choice(list(crowd.asked)))
    crowd.finish()
    crowd.check(short)
    assert (
        crowd.engine.stats.prefix_hit_tokens > 0 or slots
    ) and crowd.engine.stats.pages_used == 0
    for prompt in ([1, 2, 3], [1, 0] * 7):  # the first new token may be the one too many
        ways = [GREEDY, *(Sampling(seed=n) for n in range(3)), GREEDY]
        together = [request(prompt, 20, sampling=each) for each in ways]
        found = crowd.engine.complete(together)
        assert [each.tokens for each in found] == [alone(each, short).tokens for each in together]
    with pytest.raises(ValueError, match="pass the 14 positions .* at most 6 new ones"):
        crowd.engine.submit(request([1] * 9, 7, beams=Beams(2)))
    engine = engine_of(**settings)
    for asked in (request([1] * 9, 6, beams=Beams(2)), request([1] * 15, 6, beams=Beams(2))):
        assert engine.complete([asked])[0].beams == searched(short, asked)
