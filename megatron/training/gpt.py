"""How a GPT is trained: its program for the engine, and its data."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from megatron.config import RunConfig
from megatron.data.batch import GPTBatch, GPTCollator
from megatron.data.build import Datasets
from megatron.data.gpt_data import GPTData
from megatron.engine.program import ModelInputs, ModelProgram
from megatron.model.gpt import gpt_layers, gpt_loss
from megatron.parallel.groups import Group
from megatron.training.data import run_datasets
from megatron.training.plan import TrainingPlan
from megatron.training.run import Run


def gpt_program(config: RunConfig) -> ModelProgram:
    """The model, its inputs and its loss."""
    vocab_size = config.model.unpadded_vocab_size
    assert vocab_size is not None

    def inputs(batch: GPTBatch) -> ModelInputs:
        return ModelInputs(batch.tokens_BS, batch.position_ids_BS, batch.document_ids_BS)

    def loss(logits_BSV: Tensor, batch: GPTBatch, group: Group) -> Tensor:
        return gpt_loss(logits_BSV, batch.labels_BS, batch.loss_mask_BS, vocab_size, group)

    return ModelProgram(partial(gpt_layers, config.model, config.parallel), inputs, loss)


def gpt_data(run: Run) -> tuple[Datasets, GPTCollator]:
    """Datasets of all parts, and what makes batches of their samples.

    Raises:
        ValueError, OSError: data that cannot be used; the message names flag and file.
    """
    data = GPTData(run.config, run.tokenizer)
    return run_datasets(data, TrainingPlan(run.config)), data.collator()
