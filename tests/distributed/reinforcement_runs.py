"""What workers of the pool do in tests of runs with ``--rl``: a model learns to write bytes of one
kind."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from megatron.apps.parity.runs import watched_trainer
from megatron.apps.reinforcement import start
from megatron.apps.reinforcement.episodes import Episode
from megatron.apps.reinforcement.exact.cache import EpisodeCache
from megatron.apps.reinforcement.losses import ENTROPY, SAMPLING
from megatron.apps.reinforcement.rewards.scoring import RewardTable
from megatron.engine.environment import deterministic_kernels, distributed
from megatron.engine.state import owned_slices
from megatron.features.resilience.steps.spikes import Spike, SpikeRule
from megatron.parallel.shard import shard_of
from megatron.run.run import parse_run

SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --swiglu "
    "--use-rotary-position-embeddings --normalization RMSNorm --disable-bias-linear "
    "--ffn-hidden-size 44 --seq-length 48 --max-position-embeddings 48 --micro-batch-size 4 "
    "--global-batch-size 8 --lr 1e-2 --tokenizer-type ByteLevelTokenizer --num-workers 0 "
    "--attention-dropout 0 --hidden-dropout 0 --split 100,0,0 --eval-iters 0 --peak-tflops 1 "
    "--log-interval 1000 --rl grpo --num-generations 4 --max-completion-length 12 --beta 0 "
    "--reward-funcs replaced.py:replaced"
).split()


class Steps(NamedTuple):
    """A run: the divergence and difference of sampling of every step, the sum of loss and entropy
    (the loss alone is nearly 0 on texts of the weights in training), the prompt and text of every
    episode that was written, the state at the end, and the reward in the log of every step."""

    sampling: list[tuple[float, float]]
    losses: list[float]
    written: list[tuple[bytes, bytes]]
    state: dict[str, np.ndarray]
    rewards: list[float]


def reward(tokens_L: np.ndarray) -> float:
    """More for tokens below 128, and for every fifth."""
    return float(np.mean((tokens_L < 128) + (tokens_L % 5 == 0)))


class Vowels:
    """A reward for bytes below 128, and more for some."""

    def __init__(self) -> None:
        self.environments: Any = None

    def score(self, episodes: Sequence[Episode]) -> RewardTable:
        values = [reward(each.tokens_L) for each in episodes]
        return RewardTable(("vowels",), np.ones(1), np.array(values).reshape(-1, 1), {})

    def close(self) -> None:
        """Nothing is open."""


def prompts(folder: Path) -> list[str]:
    """The flag of a file of prompts."""
    draw, path = random.Random(0), folder / "prompts.jsonl"
    lines = [{"prompt": "".join(draw.choices("abcdef", k=draw.randint(1, 20)))} for _ in range(24)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return ["--data-path", str(path)]


def train(argv: list[str], planted: bool = False, spike: int | None = None) -> Steps:
    """Train with these flags; with ``planted`` another kernel computes attention in training; the
    first time that the step ``spike`` ends, it is taken for a spike."""
    steps = Steps([], [], [], {}, [])

    def watch(result: Any) -> None:
        steps.sampling.append(tuple(float(result.losses[name]) for name in SAMPLING))
        steps.losses.append(float(result.loss) + float(result.losses[ENTROPY]))

    paged, generated = EpisodeCache.paged, start.CompletionLog.generated

    def off(self: Any, *args: Any) -> Any:
        return paged(self, *args) * 1.001

    def seen(self: Any, episodes: Sequence[Episode], *args: Any) -> None:
        steps.written.extend((e.prompt.tokens.tobytes(), e.tokens_L.tobytes()) for e in episodes)
        generated(self, episodes, *args)

    def logged(self: Any, trainer: Any, step: Any) -> None:
        steps.rewards.append(self._loop.numbers["reward"])

    judged = []

    def add(rule: SpikeRule, *numbers: float) -> Spike | None:
        judged.append(numbers)
        return Spike("loss", 9.0, 0.0, 1.0) if len(judged) == spike else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpikeRule, "add", add)
        patch.setattr(start.Records, "after_step", logged)
        patch.setattr(start, "scorer_of", lambda context: Vowels())
        patch.setattr(start.CompletionLog, "generated", seen)
        if planted:
            patch.setattr(EpisodeCache, "paged", off)
        run = parse_run(None, [*SMALL, *argv], family="gpt")
        with deterministic_kernels(run.config), distributed(run.config.parallel) as mesh:
            trainer = watched_trainer(run, mesh, watch)
            trainer.fit()
            for owned in owned_slices(trainer.engine):
                name = f"{owned.name}{shard_of(owned.param).part}"
                for kind in owned.kinds:
                    values = owned.get(kind).detach().cpu().float().numpy().copy()
                    steps.state[f"{name}/{kind}/{owned.slice.start}"] = values
    return steps


def same(one: Steps, other: Steps) -> bool:
    """True if both end with the same bits."""
    assert one.state.keys() == other.state.keys()
    return all(
        torch.equal(torch.from_numpy(values), torch.from_numpy(other.state[name]))
        for name, values in one.state.items()
    )
