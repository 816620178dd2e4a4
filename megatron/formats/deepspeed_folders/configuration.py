"""The network and the run's counters of a DeepSpeed folder: from this project's files beside
DeepSpeed's own, or from what Megatron-DeepSpeed or GPT-NeoX saved with them."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron.checkpoint.files import CheckpointError, read_json
from megatron.checkpoint.manifest import CONFIG, STATE
from megatron.config import ConfigError, ModelConfig, RunConfig, TokenizerConfig, Vocabulary
from megatron.engine.universal_info import COUNTERS, RUN
from megatron.formats.deepspeed_folders import neox
from megatron.formats.deepspeed_folders.naming import ForeignNaming
from megatron.formats.legacy_megatron.arguments import model_of_arguments
from megatron.formats.legacy_megatron.vocabulary import tokenizer_of_arguments, unpadded_vocabulary
from megatron.formats.unpickle import Inert

_POSITIONS = {1: "rope", 2: "learned_absolute", 3: "alibi"}
"""BigScience's enumeration of position embeddings."""


class Description(NamedTuple):
    """Facts about a checkpoint apart from its tensors. When another trainer wrote it, ``run`` is
    None, the optimizer's step is unknown, and ``foreign`` are its names."""

    run: RunConfig | None
    model: ModelConfig
    tokenizer: TokenizerConfig | None
    state: dict[str, Any]
    foreign: type[ForeignNaming] | None = None


def own_run(folder: Path, states: Mapping[str, Any]) -> RunConfig | None:
    """The run of this project that saved a checkpoint, None if it was another trainer. Raises
    CheckpointError if what says it is malformed."""
    own = folder / CONFIG
    parts = read_json(own, non_finite=True) if own.is_file() else states.get(RUN)
    if parts is None:
        return None
    try:
        run = RunConfig.from_dict(parts)
        hash(run.model)  # its values are numbers and texts, by which shapes are looked up
        return run
    except (TypeError, AttributeError, ConfigError) as error:
        raise CheckpointError(f"{own}: not a configuration: {error}") from None


def describe(folder: Path, states: Mapping[str, Any], tensors: neox.StoredTensors) -> Description:
    """Finds configuration and counters in a checkpoint with these model states and tensors. Raises
    CheckpointError if the network is not described, or has features that cannot be represented."""
    run = own_run(folder, states)
    if run is not None:
        file = folder / STATE
        state = read_json(file) if file.is_file() else states.get(COUNTERS, {})
        if not isinstance(state, Mapping):
            raise CheckpointError(f"{file} is {state!r:.60}; expected an object of counters")
        tokenizer = run.tokenizer if run.tokenizer.tokenizer_type else None
        return Description(run, run.model, tokenizer, dict(state))
    args = states.get("args")
    arguments = vars(args) if isinstance(args, Namespace) else {}
    settings, naming = neox.find_settings(folder), ForeignNaming
    if settings is not None:
        model, naming = neox.model_of(settings, args, folder, tensors), neox.NeoXNaming
    elif isinstance(args, Namespace):
        model = _megatron_deepspeed(arguments, folder)
    elif isinstance(args, Mapping):
        raise CheckpointError(
            f"{folder} is of GPT-NeoX, whose configuration files are missing: put the *.yml files "
            f"of the run into {folder / 'configs'}"
        )
    else:
        raise CheckpointError(
            f"{folder} does not describe the network: it has no {CONFIG}, and its model states "
            "have neither the args of a Megatron-DeepSpeed run nor a configuration of this project"
        )
    tokenizer = tokenizer_of_arguments(arguments)
    samples = arguments.get("consumed_train_samples")
    counters = {
        "iteration": int(states.get("iteration", states.get("global_steps", 0))),
        "consumed_samples": int(states.get("global_samples", 0) if samples is None else samples),
        "loss_scaler": {},
    }
    return Description(None, model, tokenizer, counters, naming)


def _megatron_deepspeed(arguments: Mapping[str, Any], folder: Path) -> ModelConfig:
    """The network that a run's arguments describe. Without an unpadded size, as in BLOOM's
    published models, all rows of the embedding are tokens. Raises CheckpointError if an argument is
    missing, or cannot be represented."""
    known = dict(arguments)
    positions = known.get("position_embedding_type")
    if isinstance(positions, Inert):
        number = (vars(positions).get("args") or (0,))[0]
        known["position_embedding_type"] = _POSITIONS.get(number, str(number))
    if known.get("window_size") == 7:
        del known["window_size"]  # the default of its vision models
    model = model_of_arguments(known, folder)
    rows = known.get("padded_vocab_size")
    if not isinstance(rows, int):
        raise CheckpointError(f"{folder}: the run's arguments have no padded_vocab_size")
    vocabulary = Vocabulary(unpadded_vocabulary(known, rows) or rows, rows)
    return dataclasses.replace(model, vocabulary=vocabulary)
