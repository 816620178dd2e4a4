"""Rewards of all kinds in one table: weights and sums against trl's rule, failures, cache."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import megatron.config  # noqa: F401
from megatron.apps.reinforcement.flags import ReinforcementConfig
from megatron.apps.reinforcement.rewards import keepers as keepers_module
from megatron.apps.reinforcement.rewards import scoring
from megatron.apps.reinforcement.rewards.confinement import LIMITS
from megatron.apps.reinforcement.rewards.scoring import (
    Rewards,
    RewardsFailedError,
    RewardTable,
    check_failures,
    combined,
    described,
    merged,
    with_model,
)
from megatron.config import ConfigError

from .episodes_of import Config, episode

FUNCTIONS = """
import asyncio
calls = 0
def length(prompts, completions, completion_ids, **columns):
    return [len(ids) / 10 for ids in completion_ids]
def seen(prompts, completions, completion_ids, answer, trainer_state, **columns):
    global calls
    calls += 1
    return [float(f"{calls}.{trainer_state.global_step}") for _ in completions]
def half(completions):
    return [None if "none" in text else 0.5 for text in completions]
async def later(completions, **_):
    await asyncio.sleep(0)
    return [True for _ in completions]
def messages(prompts, completions, **_):
    return [float(p[-1]["role"] == "user" and c[0]["content"] == "yes")
            for p, c in zip(prompts, completions)]
def some(completions, **_):
    return [1.0 if text == "good" else float("nan") if text == "bad" else text
            for text in completions]
"""
COMMAND = """
import json, sys
task = json.load(sys.stdin)
print(json.dumps({"reward": task["answer"] + len(task["completion"])}))
"""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "command.py").write_text(COMMAND)
    return {"functions": f"{tmp_path}/functions.py", "command": f"{tmp_path}/command.py"}


@pytest.fixture
def rewards():
    made = []

    def make(*sources: str, **flags) -> Rewards:
        flags = {"reward_workers": 1, **flags}
        options = ReinforcementConfig(rl="grpo", reward_funcs=sources, **flags)
        made.append(Rewards.of(Config(options)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_one_table_of_all_kinds(files, rewards) -> None:
    python = files["functions"]
    own = rewards(
        "number", "exact", "code", f"{python}:length", f"{python}:half", f"{python}:later",
        f"command:python {files['command']}", reward_weights=(1.0, 2.0, 0.5, 10.0, 1.0, 0.0, -1.0),
        reward_workers=2,
    )  # fmt: skip
    tests = ["assert x == 7", "assert x > 0"]
    episodes = [
        episode("x = 7", answer=7, tests=tests),
        episode("x = 1 none", answer=7, tests=tests),
        episode("7", answer=7, tests=[{"input": "", "output": ""}]),
        episode("import os\nos._exit(0)", answer=7, tests=tests),
        episode("x = int(input())\nprint(x + 1)", answer=2, tests=[
            {"input": "3", "output": "4\n"}, {"input": "3", "output": "5"},
        ]),
    ]  # fmt: skip
    table = own.score(episodes)
    assert table.names == ("number", "exact", "code", "length", "half", "later", "python")
    nan = np.nan
    expected = [
        [1.0, 0.0, 1.0, 0.5, 0.5, 1.0, 12.0],
        [0.0, 0.0, 0.0, 1.0, nan, 1.0, 17.0],
        [1.0, 1.0, 1.0, 0.1, 0.5, 1.0, 8.0],
        [0.0, 0.0, 0.0, 2.1, 0.5, 1.0, 28.0],
        [0.0, 0.0, 0.5, 2.9, 0.5, 1.0, 31.0],
    ]
    np.testing.assert_allclose(table.values_ER, expected)
    assert table.failures == {}
    # trl (1.16): (rewards_per_func * weights).nansum(dim=1)
    sums = (torch.tensor(expected, dtype=torch.float64) * torch.tensor(table.weights_R)).nansum(1)
    np.testing.assert_allclose(combined(table), sums.numpy())


def test_rewards_of_messages(files, rewards) -> None:
    own = rewards(f"{files['functions']}:messages")
    prompt = ({"role": "user", "content": "?"},)
    table = own.score([episode("yes", prompt), episode("no", prompt)])
    assert table.values_ER[:, 0].tolist() == [1.0, 0.0]


def test_failures_are_never_zero(files, rewards) -> None:
    own = rewards(f"{files['functions']}:some", "number")
    texts = ["good", "bad", "other", "good"]
    table = own.score([episode(text, answer=1) for text in texts[:3]] + [episode("good")])
    np.testing.assert_array_equal(table.values_ER[:, 0], [1.0, np.nan, np.nan, 1.0])
    np.testing.assert_array_equal(table.values_ER[:, 1], [0.0, 0.0, 0.0, np.nan])
    assert described(table.failures) == (
        "some: 2 x, the first returned nan instead of a number; number: 1 x, the first record 1 "
        "has no column answer or solution or ground_truth or target (its columns: none); "
        "--answer-column names another"
    )
    both = merged([table, table])
    assert both.values_ER.shape == (8, 2) and both.failures["some"].texts == 4
    check_failures(both, 0.375)
    with pytest.raises(RewardsFailedError, match="6 of 16 rewards failed, more than --reward-fail"):
        check_failures(both, 0.374)


def test_all_failed_has_no_sum() -> None:
    values = np.array([[np.nan, np.nan], [np.nan, 2.0]])
    sums = combined(RewardTable(("a", "b"), np.array([1.0, 0.5]), values, {}))
    np.testing.assert_array_equal(sums, [np.nan, 1.0])


def test_equal_texts_are_scored_once(files, rewards) -> None:
    seen = f"{files['functions']}:seen"
    own, again = rewards(seen), rewards(seen, reward_cache=False)
    texts = [episode("a", answer=1), episode("a", answer=1), episode("a", answer=2)]
    own.state = again.state = {"global_step": 5}
    first = own.score(texts).values_ER[:, 0]
    assert first.tolist() == [1.5, 1.5, 1.5]
    assert own.score(texts).values_ER[:, 0].tolist() == [1.5] * 3
    assert [again.score(texts).values_ER[0, 0] for _ in range(2)] == [1.5, 2.5]


def test_changed_code_is_scored_again(files, rewards, tmp_path) -> None:
    path = tmp_path / "mine.py"
    keys = []
    for number in (1, 2):
        path.write_text(f"def f(completions, **_): return [{number}.0] * len(completions)\n")
        own = rewards(f"{path}:f")
        keys.append(own.sources[0].identity)
        assert own.score([episode("a")]).values_ER.tolist() == [[number]]
    assert keys[0] != keys[1]


def test_environments_and_models_have_columns(files, rewards) -> None:
    own = rewards("number", reward_model="model", environment="e.py:E", reward_weights=(1.0, 3.0))
    texts = [episode("1", answer=1, reward=0.25), episode("2", answer=1, reward=float("nan"))]
    table = with_model(own.score(texts), np.array([0.5, -0.5]))
    assert table.names == ("number", "reward model", "environment")
    assert table.weights_R.tolist() == [1.0, 3.0, 1.0]
    np.testing.assert_array_equal(table.values_ER, [[1.0, 0.5, 0.25], [0.0, -0.5, np.nan]])
    assert described(table.failures) == "environment: 1 x, the first failed"
    bad = with_model(table, np.array([np.inf, 1.0]))
    np.testing.assert_array_equal(bad.values_ER[:, 1], [np.nan, 1.0])
    assert bad.failures["reward model"] == (1, "gave inf instead of a number")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nothing.py:f", "nothing.py is not a file"),
        ("accuracy", "must be FILE.py:FUNCTION, command:WORDS, or one of number, exact"),
        ("command:", "name a program"),
        ("command:'a", "No closing quotation"),
        ("command:no-such-program x", "no-such-program is not a program"),
        ("{functions}:missing", "cannot be loaded: raised ImportError: .* has no function missing"),
        ("{broken}:f", "cannot be loaded: raised SyntaxError"),
    ],
)
def test_wrong_sources_are_named(source: str, message: str, files, rewards, tmp_path) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises(ConfigError, match=f"--reward-funcs .*{message}"):
        rewards(source.format(**files, broken=tmp_path / "broken.py"))
    with pytest.raises(ConfigError, match="number comes twice"):
        rewards("number", "number")


def test_a_lost_keeper_is_replaced(files, rewards) -> None:
    own = rewards("exact", reward_cache=False, reward_workers=1)
    (keeper,) = own.keepers._all
    texts = [episode("a", answer="a")]
    assert own.score(texts).values_ER.tolist() == [[1.0]]
    keeper._process.kill()
    assert own.score(texts).values_ER.tolist() == [[1.0]]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.proof] if n != "network" else []) for n in LIMITS],
)
def test_a_limit_that_does_not_hold_is_refused(name: str, files, rewards, monkeypatch) -> None:
    """As on a node whose kernel lacks it: a probe then finds that a process could."""
    ask = keepers_module.Keepers.ask

    def without(keepers, request, texts=1):
        if request["kind"] != "probe":
            return ask(keepers, request, texts)
        limits = keepers.limits
        keepers.limits = replace(limits, allowed=(name,), unshares=False)
        try:
            return ask(keepers, request, texts)
        finally:
            keepers.limits = limits

    monkeypatch.setattr(keepers_module.Keepers, "ask", without)
    monkeypatch.setattr(scoring, "_PROBED", {})
    with pytest.raises(ConfigError, match=f"does not limit the {name} of .*--reward-allow {name}"):
        rewards("exact")
    monkeypatch.undo()
    assert rewards("exact", reward_allow=(name,)).names == ("exact",)
