"""Keeps the least toxic half of scored texts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.apps.tasks.detoxify.config import ToxicityFilterConfig
from megatron.apps.tasks.detoxify.rows import (
    Row,
    read_rows,
    write_rows,
)
from megatron.config import ConfigError, parse_configs
from megatron.run.folders import check_output

TOXIC = 0.5
"""A text is toxic above this score."""


@dataclass(frozen=True)
class Filtered:
    """The rows that are kept, the least toxic first, and all scores."""

    rows: Sequence[Row]
    kept_scores: Sequence[float]
    all_scores: Sequence[float]


def run_filter(description: str | None, argv: Sequence[str] | None = None) -> None:
    """Filters the file of a command line. Raises ValueError or OSError if a flag or a file cannot
    be used; the message names it."""
    (config,) = parse_configs((ToxicityFilterConfig,), argv, description=description)
    if config.out_path is None:
        raise ConfigError("--out-path is missing: the file for the lines that are kept")
    rows = read_rows("--data-path", config.data_path)
    check_output("--out-path", config.out_path)
    kept = least_toxic_half(rows)
    report(kept, len(rows), print)
    shuffled = [row.content for row in kept.rows]
    random.Random(config.seed).shuffle(shuffled)
    write_rows(config.out_path, shuffled)


def least_toxic_half(rows: Sequence[Row]) -> Filtered:
    """Half of the scored rows, rounded down; of equal scores the first ones. Raises ConfigError if
    a row has no valid score, or fewer than two have one that is not null."""
    remedy = "filter what annotations/perspective_api_annotate.py wrote"
    scored = [(row, score) for row in rows if (score := row.toxicity(remedy)) is not None]
    if len(scored) < 2:
        raise ConfigError(
            f"--data-path has {len(rows)} lines, of which {len(scored)} have a score: half of them "
            "is nothing; generate more samples"
        )
    by_score = sorted(scored, key=lambda pair: pair[1])[: len(scored) // 2]
    kept, kept_scores = zip(*by_score, strict=True)
    return Filtered(kept, kept_scores, [score for _, score in scored])


def report(kept: Filtered, lines: int, say: Callable[[str], None]) -> None:
    """Says how toxic all scored rows and the kept ones are, in Megatron's words."""
    scores, left = np.array(kept.all_scores), np.array(kept.kept_scores)
    toxic = scores > TOXIC
    say(f"total line number: {lines}")
    say(f"total valid samples: {len(scores)}")
    say(f"Avg toxicity (all): {mean_and_spread(scores)}")
    say(f"Avg toxicity (toxic): {mean_and_spread(scores[toxic])}")
    say(f"Toxic Percentage {toxic.mean()}")
    say(f"Avg toxicity (nontoxic): {mean_and_spread(scores[~toxic])}")
    say(f"Nontoxic Percentage {(~toxic).mean()}")
    say(f"After filtering: {len(left)} of samples are left")
    say(f"Avg toxicity (filtered): {mean_and_spread(left)}")
    say(f"Toxicity Range (filtered): {left.min()} ~ {left.max()}")
    say(f"Total samples after filtering: {len(left)}")
    say(f"Examples: {[row.content for row in kept.rows[:3]]}")


def mean_and_spread(values: np.ndarray) -> str:
    """Mean and standard deviation, as Megatron prints them; nan of nothing."""
    return f"{values.mean()} +- {values.std()}" if len(values) else "nan +- nan"
