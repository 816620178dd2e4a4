"""Texts to read, and rewards of held-out prompts, without a model."""

import json
from types import SimpleNamespace

import numpy as np

import megatron.config  # noqa: F401
from megatron.apps.reinforcement.completions import CompletionLog
from megatron.apps.reinforcement.flags import ReinforcementConfig
from megatron.apps.reinforcement.held_out import FIRST_DRAW, HeldOutTexts
from megatron.apps.reinforcement.rewards.scoring import Failures, RewardTable

from .episodes_of import episode

TEXTS = [episode("yes", "1+1?", number=4), episode("no\nno", ({"role": "user", "content": "a"},))]
TABLE = RewardTable(
    ("number", "exact"),
    np.array([1.0, 1.0]),
    np.array([[1.0, 0.5], [np.nan, np.nan]]),
    {"number": Failures(1, "raised ValueError")},
)


def test_texts_are_written_with_their_rewards(tmp_path, capsys) -> None:
    options = ReinforcementConfig(rl="grpo", log_completions=True, num_completions_to_print=2)
    scorer = SimpleNamespace(closed=0, state={})
    scorer.close = lambda: setattr(scorer, "closed", 1)
    trainer = SimpleNamespace(iteration=3, plan=SimpleNamespace(train_iters=9))
    with CompletionLog(options, scorer, str(tmp_path / "save"), 2) as log:
        log.before_step(trainer)
        assert scorer.state == {"global_step": 3, "max_steps": 9}
        log.generated(TEXTS, TABLE, np.array([1.5, np.nan]))
        for iteration in (1, 2):
            log.after_step(trainer, SimpleNamespace(iteration=iteration))
    rows = [json.loads(line) for line in (tmp_path / "save/completions.jsonl").open()]
    assert rows == [
        {
            "iteration": 2, "record": 5, "prompt": "1+1?", "completion": "yes", "reward": 1.5,
            "rewards": {"number": 1.0, "exact": 0.5}, "tokens": 3, "ended": True,
        },
        {
            "iteration": 2, "record": 1, "prompt": [{"role": "user", "content": "a"}],
            "completion": "no\nno", "reward": None, "rewards": {"number": None, "exact": None},
            "tokens": 5, "ended": True,
        },
    ]  # fmt: skip
    said = capsys.readouterr().out
    assert "rewards failed since the last line: number: 1 x, the first raised ValueError" in said
    assert r"'a' -> 'no\nno', reward failed (number failed, exact failed)" in said
    assert scorer.closed


def test_every_evaluation_has_the_same_draws() -> None:
    """Each rank answers its share of the prompts; failures count in no mean."""
    drawn, reported = [], []

    def write(own, draws):
        drawn.append((sorted(own), draws))
        return dict(enumerate(TEXTS)), TABLE, np.array([1.5, np.nan])

    prompts = [SimpleNamespace(prompt=n) for n in range(7)]
    mesh = SimpleNamespace(samples=SimpleNamespace(rank=1, size=2))
    texts = HeldOutTexts(write, {"valid": prompts}, {"test": prompts}, 5, 0.5, mesh)
    trainer = SimpleNamespace(
        iteration=2, settle=lambda: None, report=reported.append,
        plan=SimpleNamespace(evaluates_after=lambda iteration: iteration == 2),
    )  # fmt: skip
    texts.evaluate(trainer, last=False)
    texts.evaluate(trainer, last=True)
    trainer.iteration = 3
    texts.evaluate(trainer, last=False)
    assert drawn == [([1, 3], {1: FIRST_DRAW + 1, 3: FIRST_DRAW + 3})] * 2
    assert [each.kind for each in reported] == ["validation", "test"]
    assert reported[0].row() == {
        "reward": 1.5, "success": 1.0, "rewards/number/mean": 1.0, "rewards/exact/mean": 0.5,
        "completions/mean_length": 4.0,
    }  # fmt: skip
    assert (reported[0].minimised, reported[1].minimised) == (-1.5, None)
    assert reported[0].line().startswith("validation rewards at iteration 2 | reward: 1.5")
