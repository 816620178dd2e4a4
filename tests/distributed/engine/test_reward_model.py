"""Rewards by a model, in layouts, against transformers."""

from pathlib import Path

import numpy as np
import pytest
import torch

import megatron.config  # noqa: F401
from megatron.apps.parity.layouts import flags_for, parse_layout
from megatron.apps.reinforcement.episodes import Episode, Prompt
from megatron.engine.environment import distributed
from megatron.run.run import parse_run

WORDS = 60
FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 32 "
    "--seq-length 32 --micro-batch-size 1 --global-batch-size 16 --lr 1e-3 --train-iters 2 "
    "--tokenizer-type NullTokenizer --vocab-size 60 --rl grpo --max-completion-length 12 "
    "--data-path nothing.jsonl --reward-batch-size 3"
).split()
LAYOUTS = [
    "single",
    "tp2",
    *(pytest.param(name, marks=pytest.mark.proof) for name in ("pp2", "dp2-zero3", "tp2-sp")),
]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> str:
    """A reward model of transformers, larger than the policy."""
    import transformers

    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=WORDS + 1, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, num_labels=1,
        initializer_range=0.2, bos_token_id=None, eos_token_id=WORDS, pad_token_id=0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("theirs")
    transformers.LlamaForSequenceClassification(config).save_pretrained(folder)
    return str(folder)


def episodes() -> list[Episode]:
    rng = np.random.default_rng(3)
    made = []
    for number in range(10):
        prompt, text = (rng.integers(1, WORDS, rng.integers(1, 12)) for _ in range(2))
        made.append(
            Episode(
                Prompt(number, prompt, "", {}),
                text,
                np.ones(len(text), np.bool_),
                np.zeros(len(text), np.float32),
                "",
                True,
            )  # fmt: skip
        )
    return made


def scores(flags: list[str]) -> np.ndarray:
    from megatron.apps.reinforcement.rewards.reward_model import RewardModel

    run = parse_run(None, flags, "gpt")
    with distributed(run.config.parallel) as mesh:
        return RewardModel.start(run.config, mesh).scores(episodes())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rewards_against_transformers(layout: str, theirs: str, pool) -> None:
    import transformers

    processes, more = 1, []
    if layout != "single":
        parsed = parse_layout(layout)
        processes, more = parsed.processes, flags_for(parsed)
    of_ranks = pool.run(processes, scores, [*FLAGS, "--reward-model", theirs, *more])
    model = transformers.AutoModelForSequenceClassification.from_pretrained(theirs).eval()
    with torch.no_grad():
        expected = [
            float(model(torch.tensor(np.concatenate((e.prompt.tokens, e.tokens_L)))[None]).logits)
            for e in episodes()
        ]
    for found in of_ranks:
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


def test_other_models_are_refused(theirs: str, tmp_path: Path, pool) -> None:
    from megatron.apps.reinforcement.rewards.reward_model import find_reward_model
    from megatron.checkpoint.files import CheckpointError
    from megatron.config import ConfigError

    def found(*more: str) -> None:
        find_reward_model(parse_run(None, [*FLAGS, *more], "gpt").config)

    with pytest.raises(CheckpointError, match=f"--reward-model {tmp_path}/none: "):
        found("--reward-model", f"{tmp_path}/none")
    with pytest.raises(ConfigError, match="has 61 tokens and the policy 33: both need the same"):
        found("--reward-model", theirs, "--vocab-size", "32")
