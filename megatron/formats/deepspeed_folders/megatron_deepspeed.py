"""Megatron-DeepSpeed's saved arguments (Microsoft's, and BigScience's for BLOOM), and our
configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import CheckpointError
from megatron.config import ModelConfig, Vocabulary
from megatron.formats.legacy_megatron.arguments import model_of_arguments, unpadded_vocabulary
from megatron.formats.unpickle import Inert

_POSITIONS = {1: "rope", 2: "learned_absolute", 3: "alibi"}
"""BigScience's enumeration of position embeddings."""


def model_of(arguments: Mapping[str, Any], folder: Path) -> ModelConfig:
    """The network that a run's arguments describe.

    Args:
        arguments: the saved namespace as a dictionary.
        folder: the checkpoint, for messages.

    Raises:
        CheckpointError: an argument is missing, or describes what is not ours.
    """
    known = dict(arguments)
    positions = known.get("position_embedding_type")
    if isinstance(positions, Inert):
        numbers = vars(positions).get("args") or (0,)
        known["position_embedding_type"] = _POSITIONS.get(numbers[0], str(numbers[0]))
    known.pop("window_size", None)
    model = model_of_arguments(known, folder)
    rows, tokens = vocabulary(known, folder)
    return dataclasses.replace(model, vocabulary=Vocabulary(tokens, rows))


def vocabulary(arguments: Mapping[str, Any], folder: Path) -> tuple[int, int]:
    """Rows of the token table, and how many of them are tokens: all, where nothing says how many
    are padding (BLOOM's models are published so).

    Raises:
        CheckpointError: ``padded_vocab_size`` is missing.
    """
    rows = arguments.get("padded_vocab_size")
    if not isinstance(rows, int):
        raise CheckpointError(f"{folder}: the run's arguments have no padded_vocab_size")
    return rows, unpadded_vocabulary(arguments, rows) or rows
