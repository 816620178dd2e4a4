"""What a DeepSpeed folder says of the network and of the run's counters.

DeepSpeed itself keeps neither; they are in this project's files beside its own, or in what the
training script saved with them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron.checkpoint.files import CheckpointError, read_json
from megatron.checkpoint.manifest import CONFIG, STATE
from megatron.config import ConfigError, ModelConfig, RunConfig, TokenizerConfig
from megatron.engine.universal_info import COUNTERS, RUN
from megatron.formats.deepspeed_folders import megatron_deepspeed, neox
from megatron.formats.legacy_megatron.arguments import tokenizer_of_arguments


class Description(NamedTuple):
    """What is known of a checkpoint besides its tensors.

    Attributes:
        run: configuration of the run; None when another trainer wrote it.
        model: the network.
        tokenizer: how to get its tokenizer, if that is known.
        state: see :class:`megatron.checkpoint.source.Source`; without the optimizer's step where
            another trainer wrote it.
        foreign: whether another trainer wrote it.
        split_biases: see :class:`megatron.formats.deepspeed_folders.foreign.ForeignNaming`.
    """

    run: RunConfig | None
    model: ModelConfig
    tokenizer: TokenizerConfig | None
    state: dict[str, Any]
    foreign: bool
    split_biases: bool = False


def describe(folder: Path, states: Mapping[str, Any]) -> Description:
    """Finds configuration and counters.

    Args:
        folder: the checkpoint.
        states: its model states.

    Raises:
        CheckpointError: the network is nowhere described, or has features that there are none of
            here.
    """
    own = folder / CONFIG
    parts = read_json(own) if own.is_file() else states.get(RUN)
    if parts is not None:
        try:
            run = RunConfig.from_dict(parts)
        except (TypeError, AttributeError, ConfigError) as error:
            raise CheckpointError(f"{own}: this is no configuration: {error}") from None
        file = folder / STATE
        state = read_json(file) if file.is_file() else states.get(COUNTERS, {})
        tokenizer = run.tokenizer if run.tokenizer.tokenizer_type else None
        return Description(run, run.model, tokenizer, dict(state), foreign=False)
    args = states.get("args")
    settings = neox.find_settings(folder)
    if settings is not None:
        model = neox.model_of(settings, args, folder)
    elif isinstance(args, Namespace):
        model = megatron_deepspeed.model_of(vars(args), folder)
    elif isinstance(args, Mapping):
        raise CheckpointError(
            f"{folder} is of GPT-NeoX, whose configuration files are missing: put the *.yml files "
            f"of the run into {folder / 'configs'}"
        )
    else:
        raise CheckpointError(
            f"{folder} does not describe the network: it has no {CONFIG}, and its model states "
            "neither the args of a Megatron-DeepSpeed run nor a configuration of this project"
        )
    tokenizer = tokenizer_of_arguments(vars(args)) if isinstance(args, Namespace) else None
    counters = _counters(states, args)
    return Description(None, model, tokenizer, counters, True, settings is not None)


def _counters(states: Mapping[str, Any], args: Any) -> dict[str, Any]:
    values = vars(args) if isinstance(args, Namespace) else {}
    iteration = states.get("iteration", states.get("global_steps", 0))
    samples = values.get("consumed_train_samples")
    if samples is None:
        samples = states.get("global_samples", 0)
    return {"iteration": int(iteration), "consumed_samples": int(samples), "loss_scaler": {}}
