"""The order of prompts by success: on a made-up learner, and after a stop."""

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

import megatron.config  # noqa: F401
from megatron.apps.reinforcement.data.curriculum import SuccessCurriculum, repeated_prompts
from megatron.apps.reinforcement.data.prompts import RepeatedPrompts
from megatron.apps.reinforcement.episodes import Prompt
from megatron.apps.reinforcement.flags import ReinforcementConfig

from .episodes_of import episode

RECORDS, GROUP = 40, 4


class Records:
    """Prompts in their order, again and again."""

    def __init__(self):
        self.examples = SimpleNamespace(prefix="data", __len__=lambda: RECORDS)
        self.examples = type("Examples", (), {"prefix": "data", "__len__": lambda s: RECORDS})()

    def __len__(self):
        return 10**6

    def prompt(self, number):
        return Prompt(number, np.array([1], np.int64), f"{number}")

    def __getitem__(self, index):
        return SimpleNamespace(prompt=self.prompt(index % RECORDS))

    def origin(self, index):
        return [SimpleNamespace(source="data")]


def curriculum(**flags) -> SuccessCurriculum:
    options = ReinforcementConfig(
        rl="grpo", num_generations=GROUP, rl_curriculum="success", **flags
    )
    return SuccessCurriculum(options, RepeatedPrompts(Records(), GROUP), 7)


def run(learner: SuccessCurriculum, groups: range, chosen: list[int]) -> None:
    """Steps of four groups; the chance of a good text after prompt n is n / RECORDS."""
    for start in groups[::4]:
        prompts = []
        for group in range(start, start + 4):
            prompt = learner.prompt(group, learner._prompts[group * GROUP].prompt)
            prompts.append(prompt)
        chosen += [prompt.number for prompt in prompts]
        episodes, rewards = [], []
        for place, prompt in enumerate(prompts):
            rng = np.random.default_rng([start, place])
            episodes += [episode("x", number=prompt.number) for _ in range(GROUP)]
            rewards += (rng.random(GROUP) < prompt.number / RECORDS).astype(float).tolist()
        learner.generated(episodes, None, np.array(rewards))


def test_prompts_of_half_success_come_more_often() -> None:
    chosen: list[int] = []
    learner = curriculum()
    run(learner, range(1200), chosen)
    counts = Counter(chosen[200:])
    middle, ends = (
        sum(counts[n] for n in numbers) / len(numbers)
        for numbers in (range(15, 25), [*range(3), *range(37, 40)])
    )
    assert middle > 2 * ends and min(counts.values()) >= 10 and len(counts) == RECORDS
    hard = curriculum(curriculum_target=0.1)
    chosen = []
    run(hard, range(1200), chosen)
    counts = Counter(chosen[200:])
    assert sum(counts[n] for n in range(10)) > 1.6 * sum(counts[n] for n in range(30, 40))


def test_resume_is_exact() -> None:
    whole: list[int] = []
    run(curriculum(curriculum_decay=0.3), range(400), whole)
    parts: list[int] = []
    first = curriculum(curriculum_decay=0.3)
    run(first, range(200), parts)
    state = json.loads(json.dumps(first.state()))
    second = curriculum(curriculum_decay=0.3)
    second.load(state)
    np.testing.assert_array_equal(second.shares_N, first.shares_N)
    run(second, range(200, 400), parts)
    assert parts == whole
    with pytest.raises(ValueError, match="the shares of 39 records, and the data have 40"):
        second.load({**state, "records": 39})


def test_weights_are_the_variance_of_success() -> None:
    shares = np.linspace(0, 1, 11)
    np.testing.assert_allclose(curriculum().weights(shares), 4 * shares * (1 - shares), atol=1e-15)
    assert curriculum(curriculum_target=0.2).weights(np.array([0.2, 1.0])).tolist() == [1.0, 0.0]


def test_failed_rewards_say_nothing_of_a_prompt() -> None:
    learner = curriculum(curriculum_decay=0.5)
    texts = [episode("x", number=3)] * GROUP
    learner.generated(texts, None, np.array([np.nan] * GROUP))
    assert np.isnan(learner.shares_N).all()
    learner.generated(texts, None, np.array([np.nan, 1.0, 0.2, np.nan]))
    assert learner.shares_N[3] == 0.5
    learner.generated(texts, None, np.ones(GROUP))
    assert learner.shares_N[3] == 0.75


def test_the_prompts_of_other_orders_are_the_same() -> None:
    prompts = RepeatedPrompts(Records(), GROUP)
    assert repeated_prompts(SimpleNamespace(dataset=SimpleNamespace(dataset=prompts))) is prompts
