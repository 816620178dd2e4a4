"""How a GPT is trained: its program for the engine, and its data."""

from __future__ import annotations

from functools import partial

from megatron.config import RunConfig
from megatron.data.batch import GPTBatch, GPTCollator
from megatron.data.build import Datasets
from megatron.data.gpt_data import GPTData
from megatron.model.attention_masks import AttentionMasks
from megatron.model.gpt import gpt_layers
from megatron.model.spec import ModelSpec, hidden_travels
from megatron.model.state import LayerState
from megatron.parallel.cross_entropy import Targets
from megatron.training.data import run_datasets
from megatron.training.plan import TrainingPlan
from megatron.training.run import Run


def gpt_program(config: RunConfig) -> ModelSpec:
    """The model and its inputs."""

    assert config.model.hidden_size is not None
    layers = partial(gpt_layers, config.model, config.parallel)
    return ModelSpec(layers, gpt_begin, partial(hidden_travels, config.model.hidden_size))


def gpt_begin(batch: GPTBatch) -> LayerState:
    """The state that a micro batch starts with."""
    return LayerState(
        batch.tokens_BS,
        position_ids=batch.position_ids_BS,
        masks=AttentionMasks(batch.document_ids_BS),
        targets=Targets(batch.labels_BS, batch.loss_mask_BS),
    )


def gpt_data(run: Run) -> tuple[Datasets, GPTCollator]:
    """Datasets of all parts, and what makes batches of their samples.

    Raises:
        ValueError, OSError: data that cannot be used; the message names flag and file.
    """
    data = GPTData(run.config, run.tokenizer)
    return run_datasets(data, TrainingPlan(run.config)), data.collator()
