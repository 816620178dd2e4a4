"""Warnings about the examples of a run, before its first step."""

from __future__ import annotations

import logging

from megatron.checkpoint.files import CheckpointError
from megatron.data.loader import TrainingData
from megatron.families import family_of
from megatron.features.instruction.example_checks import (
    Base,
    check_examples,
    template_in,
)
from megatron.run.run import Run
from megatron.training.resume import find_origin
from megatron.util.processes import is_main_process

logger = logging.getLogger(__name__)


def warn_of_examples(run: Run, data: TrainingData) -> None:
    """Warns of what is probably wrong with the examples, with a sample; on the main process."""
    train = data.datasets.train
    if train is None or not is_main_process():
        return
    pipeline = family_of(run.config.model.family).data(run.config, run.tokenizer)
    for finding in check_examples(pipeline, train, base_of(run)):
        logger.warning("%s", finding)


def base_of(run: Run) -> Base:
    """The model that training starts from, if it does not continue a run."""
    try:
        origin = find_origin(run.config.checkpoint)
        if origin is None or origin.continues:
            return Base()
        source = origin.found.open(verify=False)
        return Base(source.model.vocabulary.size, template_in(source.folder))
    except (CheckpointError, ValueError, OSError):
        return Base()  # loading it says what is wrong
