"""How a GPT is trained: its program for the engine, and its data."""

from __future__ import annotations

from functools import partial

from megatron.config import RunConfig
from megatron.data.batch import GPTBatch, GPTCollator
from megatron.data.build import Datasets
from megatron.data.gpt_data import GPTData
from megatron.engine.program import ModelInputs, ModelSpec
from megatron.model.gpt import gpt_layers
from megatron.parallel.cross_entropy import Targets
from megatron.training.data import run_datasets
from megatron.training.plan import TrainingPlan
from megatron.training.run import Run


def gpt_program(config: RunConfig) -> ModelSpec:
    """The model and its inputs."""

    def inputs(batch: GPTBatch) -> ModelInputs:
        targets = Targets(batch.labels_BS, batch.loss_mask_BS)
        return ModelInputs(batch.tokens_BS, targets, batch.position_ids_BS, batch.document_ids_BS)

    return ModelSpec(partial(gpt_layers, config.model, config.parallel), inputs)


def gpt_data(run: Run) -> tuple[Datasets, GPTCollator]:
    """Datasets of all parts, and what makes batches of their samples.

    Raises:
        ValueError, OSError: data that cannot be used; the message names flag and file.
    """
    data = GPTData(run.config, run.tokenizer)
    return run_datasets(data, TrainingPlan(run.config)), data.collator()
