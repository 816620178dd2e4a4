"""Conversion of ``--epochs`` to a length of the run in iterations, samples or tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megatron.config import ConfigError, Setting, Settings
from megatron.config.features import DOCUMENTS
from megatron.config.training import LENGTHS
from megatron.families import family_of
from megatron.run.run import Run
from megatron.training.plan import TrainingPlan

ORIGIN = "--epochs"
PROVISIONAL = 10**6
"""Length of the run while the number of samples is unknown."""
EVEN = 0.01
"""Relative difference up to which the numbers of passes over two files count as equal."""


class FileSamples(NamedTuple):
    """Number of samples in all passes over a file, and the file's weight in the blend."""

    path: str
    weight: float
    samples: int


def with_epochs(settings: Settings, complete: Callable[[Settings], Run]) -> Settings:
    """Replace ``--epochs``, the number of passes over the training data, by a length of the run.
    ``complete`` builds a run from settings. Samples that do not fill the last batch are left out.
    Raises ConfigError if the data has no defined number of samples."""
    rest = {name: setting for name, setting in settings.items() if name != "epochs"}
    epochs, unit = settings["epochs"].value, _unit(settings)
    shown = f"--epochs {epochs}"
    run = complete(rest | {f"train_{unit}": Setting(PROVISIONAL, ORIGIN)})
    if run.config.data.mock_data:
        raise ConfigError(f"{shown}: --mock-data have no end; give --train-iters")
    files = _files(run, epochs, shown)
    samples = sum(file.samples for file in files)
    for file in files:
        share = samples * file.weight / max(1, file.samples)
        if abs(share - 1) > EVEN:
            raise ConfigError(
                f"{shown}: by the weights of the data {file.path}, which has {file.samples:,} "
                f"samples in {epochs} passes, would be read {epochs * share:.3g} times; make the "
                "weights proportional to the tokens of the files, or give --train-samples"
            )
    plan = TrainingPlan(run.config)
    iterations = plan.batch_size.iterations(samples)
    if not iterations:
        raise ConfigError(
            f"{shown}: the data have {samples:,} samples of {plan.seq_length} tokens in so many "
            f"passes, fewer than a batch of {plan.batch_size.batch_size(0)}; give more passes, "
            "or a smaller --global-batch-size"
        )
    length = {
        "iters": iterations,
        "samples": plan.batch_size.samples(iterations),
        "tokens": plan.batch_size.samples(iterations) * plan.seq_length,
    }
    how = f"derived: {epochs} passes over {samples // epochs:,} samples"
    return rest | {f"train_{unit}": Setting(length[unit], how)}


def _unit(settings: Settings) -> str:
    """Return the unit of the run's schedules: iterations, samples (the default) or tokens."""
    names = {
        unit: (f"lr_decay_{unit}", f"lr_warmup_{unit}", f"lr_wsd_decay_{unit}") for unit in LENGTHS
    }
    units = [unit for unit in LENGTHS if set(names[unit]) & settings.keys()]
    return units[0] if units else "samples"


def _files(run: Run, epochs: int, shown: str) -> list[FileSamples]:
    data = family_of(run.config.model.family).data(run.config, run.tokenizer)
    of_examples = data.reads_examples or any(kind.weighs(run.config) for kind in data.acting)
    of_examples |= any(kind.acts and kind.samples != DOCUMENTS for kind in run.config.kinds)
    if not of_examples and data.samples_of(0) is None:
        raise ConfigError(
            f"{shown}: samples of {run.config.model.family} are drawn again in every pass, and "
            "their number differs; give --train-samples"
        )
    portions = data.training_portions()
    if not of_examples:
        samples = [data.samples_of(epochs * each.tokens) or 0 for each in portions]
    else:
        # Even if only one sample is requested, a dataset provides all samples of a whole pass.
        train = data.training_data((1, 0, 0), list).datasets.train
        samples = [epochs * len(part) for part in getattr(train, "parts", [train])]
    return [
        FileSamples(portion.path, portion.weight, count)
        for portion, count in zip(portions, samples, strict=True)
    ]
