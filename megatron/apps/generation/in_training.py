"""Generation with a model that is being trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron.apps.generation.execution.runner import PAGE_SIZE, PagedRunner
from megatron.apps.generation.execution.stages import StagedLayers
from megatron.engine.train_engine import ModelEngine
from megatron.families import family_of
from megatron.tokenizer import Tokenizer


@contextmanager
def training_runner(
    engine: ModelEngine,
    tokenizer: Tokenizer,
    sequences: int,
    positions: int,
    steps: dist.ProcessGroup | None = None,
) -> Iterator[PagedRunner]:
    """The runner of a model in training, with its current weights and without a copy of them, in
    every layout; a rank's part of it, for the block, after which training continues. All ranks must
    call it, and compute nothing else of the model in the block.

    Args:
        sequences: how many texts have room for their keys and values at a time, of at most
            ``positions`` tokens each.
        steps: :func:`megatron.apps.generation.execution.runner.step_group` of the run.
    """
    config = engine.config
    generation = family_of(config.model.family).generation(config, tokenizer)
    most = min(generation.max_positions, positions)
    generation = generation._replace(max_positions=most, neighbors=None)
    pages = sequences * -(-most // PAGE_SIZE)
    engine.prepare_evaluation()
    engine.kernels.refresh()
    stages = StagedLayers.of(engine)
    # Blocks are compiled for the one shape of training; steps of generation have many.
    with engine.backend.tensor_parallel.unsplit(), torch.compiler.set_stance("force_eager"):
        yield PagedRunner(stages, config.model, generation, pages, in_training=True, steps=steps)
