"""Published scaling rules for the tokens, learning rate and batch size of training with AdamW.

They were fitted to dense models with the authors' data and schedules. Each rule states its range,
and comparing them shows how much such rules differ. The constants were entered from memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import NamedTuple

from megatron.apps.planning.parameters import model_parameters
from megatron.config import ModelConfig
from megatron.features.experts.costs import active_parameters

TOKENS_PER_PARAMETER = 20
"""Hoffmann et al. 2022 (arXiv:2203.15556), table 3: about 20 for 4e8 to 1e13 parameters, fitted to
models with 7e7 to 1.6e10 parameters."""


class PublishedRule(NamedTuple):
    """A published rule and its proposal.

    Attributes:
        rate: peak learning rate. None if the rule proposes none.
        batch: batch size in tokens. None if the rule proposes none.
        fitted: models to which the rule was fitted, and how close its proposals are to the
          authors' best loss.
    """

    source: str
    rate: float | None
    batch: float | None
    fitted: str


@dataclass(frozen=True)
class TrainingSizes:
    """Number of parameters that each token uses, without embeddings (``inner``) and with them
    (``whole``), and number of training tokens."""

    inner: int
    whole: int
    tokens: int

    @classmethod
    def of(cls, model: ModelConfig, tokens: int | None) -> TrainingSizes:
        """Return the sizes of a training run. ``tokens`` is compute-optimal by default."""
        whole = active_parameters(model, model_parameters(model))
        tables = 1 + (not model.embedding.tied)
        inner = whole - tables * model.vocabulary.size * model.hidden_size
        return cls(inner, whole, tokens or TOKENS_PER_PARAMETER * whole)

    @property
    def compute(self) -> float:
        """Training FLOPs without embeddings and attention scores: 6 x ``inner`` x ``tokens``."""
        return 6.0 * self.inner * self.tokens


def rules(sizes: TrainingSizes) -> list[PublishedRule]:
    """Return the proposal of each rule."""
    inner, tokens, compute = sizes.inner, sizes.tokens, sizes.compute
    kaplan = 0.003239 - 0.0001395 * log(inner)
    return [
        PublishedRule(
            "Kaplan et al. 2020, arXiv:2001.08361, equation D.1",
            kaplan if kaplan > 0 else None,
            None,
            "768 to 1.5e9 parameters, cosine to 0, batch 0.5 million tokens; a rule of thumb",
        ),
        PublishedRule(
            "DeepSeek 2024, arXiv:2401.02954, equation 1",
            0.3118 * compute**-0.125,
            0.2920 * compute**0.3271,
            "1e17 to 2e19 FLOPs, to which attention scores add, multi-step schedule; within 0.25 %",
        ),
        PublishedRule(
            "Li et al. 2025 (Step Law), arXiv:2503.04715, table 1",
            1.79 * inner**-0.713 * tokens**0.307,
            0.58 * tokens**0.571,
            "6e7 to 1e9 parameters, 2e9 to 1e11 tokens, cosine to 1e-5; within 0.1 %",
        ),
    ]


def proposal_rows(model: ModelConfig, tokens: int | None) -> tuple[list[str], list[Sequence[str]]]:
    """Return lines of text about the training, and a table of the rules, with its header first."""
    sizes = TrainingSizes.of(model, tokens)
    per = sizes.tokens / sizes.whole
    source = (
        ", Hoffmann et al. 2022, arXiv:2203.15556, table 3: the least loss of a budget of FLOPs, "
        "fitted to 7e7 to 1.6e10 parameters"
    )
    where = "" if tokens else source
    lines = [
        f"{sizes.whole:,} parameters that a token uses, {sizes.inner:,} without embeddings; "
        f"{sizes.compute:.2g} FLOPs (6 N D)",
        f"{sizes.tokens:,} tokens, {per:.3g} for each parameter{where}",
    ]
    table: list[Sequence[str]] = [("peak rate", "batch, tokens", "samples", "source", "fitted to")]
    proposed = rules(sizes)
    for rule in proposed:
        samples = "" if rule.batch is None else f"{max(1, round(rule.batch / model.seq_length)):,}"
        table.append(
            (
                "" if rule.rate is None else f"{rule.rate:.2e}",
                "" if rule.batch is None else f"{rule.batch:,.0f}",
                samples,
                rule.source,
                rule.fitted,
            )
        )
    rates = [rule.rate for rule in proposed if rule.rate is not None]
    batches = [rule.batch for rule in proposed if rule.batch is not None]
    lines.append(
        f"the rules differ by a factor of {max(rates) / min(rates):.1f} in the rate and of "
        f"{max(batches) / min(batches):.1f} in the batch: sweep around them; "
        "--gradient-noise-interval measures up to which batch more samples help"
    )
    return lines, table
