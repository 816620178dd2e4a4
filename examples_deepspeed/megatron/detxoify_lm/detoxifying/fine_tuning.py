"""Continues the training of a GPT on other data than it is evaluated on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config import ConfigError, RunConfig, Setting
from megatron.config.flags import option
from megatron.data.loader import TrainingData
from megatron.families import family_of
from megatron.run.process import connected
from megatron.run.run import (
    Run,
    RunToolParser,
    run_data,
    run_of,
    show_configuration,
    start_processes,
)
from megatron.training.build import build_trainer
from megatron.training.plan import TrainingPlan


@dataclass(frozen=True)
class FineTuneConfig:
    """Validation: what the fine-tuned model must not forget."""

    data_path2: tuple[str, ...] = option(())
    """Data to evaluate on instead of a part of --data-path, such as what the model was trained on
    before, as PREFIX or WEIGHT PREFIX WEIGHT PREFIX ...; used are 2 % of it, the documents after
    the first 98 %."""
    eval_ppl: bool = option(False)
    """Accepted: every evaluation prints its perplexity."""


def fine_tune(description: str | None, argv: Sequence[str] | None = None) -> None:
    """Trains the GPT of a command line. Raises ValueError or OSError if a flag, data or a
    checkpoint cannot be used; the message names it."""
    config, settings = RunToolParser(FineTuneConfig, description).parse(argv)
    settings.setdefault("family", Setting("gpt", "this program"))
    run = run_of(settings, start_processes(settings, argv))
    show_configuration(run)
    with connected(run, config) as mesh:
        build_trainer(run, mesh, data=fine_tuning_data(run, config)).fit()


def fine_tuning_data(run: Run, config: FineTuneConfig) -> TrainingData:
    """The data of a run, with the validation samples of ``--data-path2`` if that is given. Raises
    ConfigError if the run has other validation data too."""
    if not config.data_path2:
        return run_data(run)
    for name in ("valid_data_path", "valid_data", "valid_weighted_split_paths"):
        if getattr(run.config.data, name):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"--data-path2 and {flag} both name validation data: give one")
    plan = TrainingPlan(run.config)
    train, valid, test = plan.sample_counts
    pipeline = family_of(run.config.model.family).data
    own = pipeline(run.config, run.tokenizer).training_data((train, 0, test), plan.batch_sizes)
    before = pipeline(evaluated_on(run.config, config.data_path2), run.tokenizer)
    try:
        valid_sets = before.datasets((0, valid, 0)).valid
    except (ValueError, OSError) as error:
        # This part of the data is named by --data-path2 alone.
        text = str(error).replace("--data-path", "--data-path2")
        raise ConfigError(text) from None
    return own._replace(datasets=own.datasets._replace(valid=valid_sets))


def evaluated_on(config: RunConfig, paths: tuple[str, ...]) -> RunConfig:
    """The configuration of a run on the data of ``--data-path2``, divided and drawn as by
    Megatron-LM."""
    data = dataclasses.replace(
        config.data,
        data_path=paths, split="98,2,0", data_args_path=None, train_data_path=(), test_data_path=(),
        per_split_data_args_path=None, train_data=(), test_data=(), mock_data=False,
        train_weighted_split_paths=(), test_weighted_split_paths=(),
        train_weighted_split_paths_path=None, test_weighted_split_paths_path=None,
    )  # fmt: skip
    training = dataclasses.replace(config.training, seed=1234)
    return dataclasses.replace(config, data=data, training=training)
