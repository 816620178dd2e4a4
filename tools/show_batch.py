#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""Prints the batch of a step of a run.

For each rank it prints the samples, the files, documents and tokens that they come from, their
text, and which tokens count in the loss:

    python tools/show_batch.py --iteration 1200 --world-size 8 [the flags of pretrain_gpt.py]

On a terminal, text that counts in the loss is green and other text grey. Elsewhere, text that does
not count is in [[double brackets]]. In BERT's samples, "a -> b" means that the model reads a and
must predict b. Of preferences both answers are shown, after the prompt as the model reads it. A
Retro's samples (--model-family retro) are followed by the neighbours of their chunks. The batch
depends only on the flags and on the number of processes: give those that the run has had since its
first step.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from megatron.config import ConfigError, ParallelConfig
from megatron.config.flags import option
from megatron.data.pipeline import DataPipeline
from megatron.data.sampler import micro_batch_samples
from megatron.data.samples import Piece, SampleDataset, SampleView
from megatron.families import family_names, family_of
from megatron.parallel.mesh import MODEL, memberships
from megatron.run.run import Run, RunToolParser, run_of
from megatron.training.plan import TrainingPlan
from megatron.util.errors import one_line


@dataclass(frozen=True)
class ShowConfig:
    """Show: output; all flags of pretrain_gpt.py describe the run."""

    iteration: int = option(1)
    """Step to show, counted from 1."""
    world_size: int = option(1)
    """Number of processes of the run."""
    rank: int | None = option(None, derived="all")
    """Print only the samples of this rank."""
    max_characters: int = option(400)
    """Maximum number of characters of a sample's text to print; 0 prints all."""
    color: str = option("auto", choices=("auto", "always", "never"))
    """Show in colour what counts in the loss; auto: on a terminal, unless NO_COLOR is set."""
    samples: str | None = option(None, derived="--model-family", choices=family_names())
    """Model family of the samples."""
    json: bool = option(False)
    """Print one JSON object per sample, with all tokens, loss mask and text."""

    def check(self) -> None:
        if self.iteration < 1 or self.world_size < 1 or self.max_characters < 0:
            raise ConfigError("--iteration and --world-size start at 1, --max-characters at 0")
        if self.rank is not None and not 0 <= self.rank < self.world_size:
            raise ConfigError(f"--rank {self.rank} must be below --world-size {self.world_size}")

    @property
    def colored(self) -> bool:
        if self.color == "auto":
            return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        return self.color == "always"


@dataclass(frozen=True)
class SeenSample:
    """One sample of a step."""

    number: int
    """Training samples consumed before it."""
    data_rank: int
    micro_batch: int
    """Number of the micro batch in the step, from 0."""
    pieces: Sequence[Piece]
    """Sources of its tokens."""
    views: Sequence[SampleView]
    """Its rows."""

    def to_dict(self) -> dict[str, Any]:
        """The sample as JSON values."""
        return {
            "sample": self.number,
            "data_rank": self.data_rank,
            "micro_batch": self.micro_batch,
            "pieces": [piece._asdict() for piece in self.pieces],
            **(_values(self.views[0]) if len(self.views) == 1 else {"rows": self._rows()}),
        }

    def _rows(self) -> list[dict[str, Any]]:
        return [{"name": view.name, **_values(view)} for view in self.views]


def _values(view: SampleView) -> dict[str, Any]:
    values = {
        "tokens": view.tokens_S.tolist(),
        "loss_mask": view.loss_mask_S.tolist(),
        "text": view.text,
    }
    if view.neighbors:
        values["neighbors"] = [
            neighbor._asdict() | {"piece": neighbor.piece._asdict()} for neighbor in view.neighbors
        ]
    return values


def main(argv: Sequence[str] | None = None) -> None:
    config, settings = RunToolParser(ShowConfig, __doc__).parse(argv)
    try:
        config.check()
        run = run_of(settings, config.world_size, config.samples)
        for line in show(config, run):
            print(line)
    except (ValueError, OSError) as error:
        sys.exit(f"show_batch.py: error: {one_line(error)}")


def show(config: ShowConfig, run: Run) -> Iterator[str]:
    plan = TrainingPlan(run.config)
    if not 1 <= config.iteration <= plan.train_iters:
        raise ConfigError(
            f"--iteration {config.iteration}: the run has steps 1 to {plan.train_iters}"
        )
    data = family_of(config.samples or run.config.model.family).data(run.config, run.tokenizer)
    train = data.datasets(plan.sample_counts, plan.batch_sizes).train
    if train is None:
        raise ConfigError("the flags give no training data")
    parallel = run.config.parallel
    samples = seen_samples(train, data, plan, parallel.data_parallel_size, config.iteration)
    ranks = ranks_by_data_rank(parallel)
    wanted = (s for s in samples if config.rank is None or config.rank in ranks[s.data_rank])
    if config.json:
        yield from (json.dumps(sample.to_dict()) for sample in wanted)
        return
    first = plan.batch_size.samples(config.iteration - 1)
    count = plan.batch_size.batch_size(first)
    length = plan.lengths.at(config.iteration - 1)
    yield (
        f"iteration {config.iteration} of {plan.train_iters}: samples {first} to "
        f"{first + count - 1}, {length} tokens each"
    )
    for (data_rank, micro_batch), group in groupby(
        wanted, key=lambda s: (s.data_rank, s.micro_batch)
    ):
        yield (
            f"\nrank {', '.join(map(str, ranks[data_rank]))}: micro batch {micro_batch + 1} of "
            f"{plan.batch_size.micro_batches(first)}"
        )
        for sample in group:
            yield from described(sample, data.unit, config.max_characters, config.colored)


def seen_samples(
    dataset: SampleDataset[Any],
    data: DataPipeline,
    plan: TrainingPlan,
    data_size: int,
    iteration: int,
) -> Iterator[SeenSample]:
    """The training samples of a step (counted from 1), rank by rank."""
    consumed = plan.batch_size.samples(iteration - 1)
    length = plan.lengths.at(iteration - 1)
    for data_rank in range(data_size):
        for micro_batch in range(plan.batch_size.micro_batches(consumed)):
            before = consumed + micro_batch * plan.micro_batch_size * data_size
            for number in micro_batch_samples(before, plan.micro_batch_size, data_rank, data_size):
                views = data.views(dataset[number], length)
                origin = dataset.origin(number)
                yield SeenSample(number, data_rank, micro_batch, origin, views)


def ranks_by_data_rank(parallel: ParallelConfig) -> list[tuple[int, ...]]:
    """The ranks that read the same samples, for each data-parallel rank."""
    sizes = {
        "pipeline": parallel.pipeline_model_parallel_size,
        "data": parallel.data_parallel_size,
        "tensor": parallel.tensor_model_parallel_size,
    }
    return memberships(sizes, MODEL)


GREEN, GREY, BOLD, PLAIN = "\x1b[32m", "\x1b[90m", "\x1b[1m", "\x1b[0m"


def described(sample: SeenSample, unit: str, max_characters: int, colored: bool) -> Iterator[str]:
    """Lines about a sample: where it is from, how much of it counts, and its text."""
    several = len(sample.views) > 1
    yield f"  sample {sample.number}" + ("" if several else f", {_counts(sample.views[0])}")
    for number, piece in enumerate(sample.pieces):
        row = f" ({sample.views[number].name})" if several else ""
        yield f"    {_place(piece, unit)}{row}"
    for view in sample.views:
        if several:
            name = f"{BOLD}{view.name}{PLAIN}" if colored else view.name
            yield f"    {name}, {_counts(view)}"
        yield from (f"    | {line}" for line in _text(view, max_characters, colored).splitlines())
        for neighbor in view.neighbors:
            text = _shortened(neighbor.text, max_characters or len(neighbor.text))
            yield f"    {neighbor.name}: {_place(neighbor.piece, unit)}"
            yield from (f"      | {line}" for line in text.splitlines())


def _place(piece: Piece, unit: str) -> str:
    return f"{piece.source}: {unit} {piece.sequence}, tokens {piece.start} to {piece.stop - 1}"


def _counts(view: SampleView) -> str:
    counted = int((view.loss_mask_S > 0).sum())
    return f"loss on {counted} of {len(view.tokens_S)} tokens"


def _text(view: SampleView, max_characters: int, colored: bool) -> str:
    """The text of a row, at most so many characters of it unless that is 0."""
    if not colored or not view.segments:
        return view.text if not max_characters else _shortened(view.text, max_characters)
    parts, left = [], max_characters or sum(len(segment.text) for segment in view.segments)
    for text, counted in view.segments:
        # Each line by itself: what is before it in a terminal has no colour.
        color = GREEN if counted else GREY
        lines = text[:left].split("\n")
        parts.append("\n".join(f"{color}{line}{PLAIN}" if line else "" for line in lines))
        left -= min(left, len(text))
    more = sum(len(segment.text) for segment in view.segments) - (max_characters or 1 << 62)
    return "".join(parts) + (f"... ({more} characters more)" if more > 0 else "")


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}... ({len(text) - most} characters more)"


if __name__ == "__main__":
    main()
