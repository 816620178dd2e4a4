"""Rewards from a model that was trained by ``--preference reward``, in the layout of the run.

It is a second model in memory, in the training dtype. Its input is the tokens of prompt and
completion, so it needs the policy's tokenizer. The reward is its output at the last token, as in
the reward model's training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from megatron.apps.reinforcement.episodes import Episode
from megatron.apps.reinforcement.flags import ReinforcementConfig
from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import FoundCheckpoint, locate_checkpoint, nothing_at
from megatron.config import CheckpointConfig, ConfigError, RunConfig
from megatron.config.engine import FastPathsConfig
from megatron.data.gpt_batch import GPTBatch
from megatron.engine.environment import training_device
from megatron.engine.loading import load_checkpoint
from megatron.families import spec_of
from megatron.features.evaluation.checkpoints import measure_samples
from megatron.features.evaluation.evaluator import Evaluator, build_evaluator
from megatron.model.layer_list import LayerState
from megatron.model.spec import Measure
from megatron.parallel.mesh import Mesh
from megatron.util.processes import return_freed_memory


def _of_last_tokens(state: LayerState, batch: GPTBatch) -> dict[str, Tensor]:
    assert batch.positions_BP is not None
    return {"reward": state.hidden[..., 0].gather(1, batch.positions_BP)[:, 0]}


REWARD = Measure(("reward",), _of_last_tokens, ends="logits", per_sample=True)


class RewardModel:
    """Reward model of a run. Collective: every rank must create and call it."""

    def __init__(self, engine: Evaluator, batch_size: int) -> None:
        self.engine, self._batch_size = engine, batch_size

    @classmethod
    def start(cls, config: RunConfig, mesh: Mesh) -> RewardModel:
        """Load the reward model. Raises CheckpointError if the checkpoint does not exist, and
        ConfigError if it is not a reward model, or if its vocabulary size or number of positions
        does not fit the policy."""
        checkpoint, own = find_reward_model(config)
        spec = spec_of(own.model, own.parallel)
        engine = build_evaluator(own, spec, mesh, training_device())
        load_checkpoint(engine, checkpoint, weights_only=True)
        return_freed_memory()
        return cls(engine, config.section(ReinforcementConfig).reward_batch_size)

    def scores(self, episodes: Sequence[Episode]) -> npt.NDArray[np.float64]:
        """Return rewards [E] on every rank, given the same episodes on every rank. Each replica
        computes a share of them."""
        rows = [np.concatenate((each.prompt.tokens, each.tokens_L)) for each in episodes]
        lengths = np.array([len(row) for row in rows], np.int64)
        size = min(self._batch_size, max(1, len(rows)))
        measured = measure_samples(self.engine, rows, GPTBatch.ended, REWARD, size, lengths)
        return measured["reward"]


def find_reward_model(config: RunConfig) -> tuple[FoundCheckpoint, RunConfig]:
    """Return the checkpoint of ``--reward-model``, and a run configuration for its model in the
    policy's layout. This does not load weights, and raises the same errors as
    :meth:`RewardModel.start`."""
    path = config.section(ReinforcementConfig).reward_model
    assert path is not None
    shown, policy = f"--reward-model {path}", config.model
    checkpoint = locate_checkpoint(path)
    if checkpoint is None:
        raise CheckpointError(f"{shown}: {nothing_at(path)}")
    source = checkpoint.open(verify=False)
    source.require_model()
    model = source.model
    if model.head != "reward":
        raise ConfigError(
            f"{shown} has {model.head_shown}, and not a number for a text: name a model that was "
            "trained by --preference reward"
        )
    if model.vocabulary.size != policy.vocabulary.size:
        raise ConfigError(
            f"{shown} has {model.vocabulary.size:,} tokens and the policy "
            f"{policy.vocabulary.size:,}: both need the same tokenizer"
        )
    longest = model.positions.longest
    if longest is not None and longest < policy.seq_length:
        raise ConfigError(
            f"{shown} has {longest} positions, fewer than --seq-length {policy.seq_length}: give a "
            "smaller length"
        )
    parallel = config.parallel
    model = dataclasses.replace(
        model, seq_length=policy.seq_length, decoder_seq_length=policy.decoder_seq_length
    ).with_vocabulary(model.vocabulary.size, parallel.tensor_model_parallel_size)
    trained = [type(section)() for section in config.sections if section.trains]
    own = dataclasses.replace(
        config.with_sections(*trained, ReinforcementConfig()),
        model=model,
        checkpoint=CheckpointConfig(load=path),
        # Disable CUDA graphs, which would share memory with the policy's graphs.
        fast_paths=FastPathsConfig(torch_compile="off"),
        engine=dataclasses.replace(config.engine, zero_stage=min(1, config.engine.zero_stage)),
    )
    return checkpoint, own
