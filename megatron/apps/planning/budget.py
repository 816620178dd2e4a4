"""Time, GPU hours, energy and cost of a complete training run, and the command that starts it."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from megatron.apps.planning.search import Plan, Workload, changed_flags, flag_words
from megatron.apps.planning.step_time import Hardware
from megatron.config import ConfigError, ModelConfig, ModelFlags

# Maximum tokens per step if no batch size is given. Published runs with 1B to 70B parameters have
# this order of magnitude.
TOKENS_PER_STEP = 4_194_304

TIE = 0.03  # estimates of step times that differ by less than this fraction cannot rank layouts

_KEPT = "\N{NO-BREAK SPACE}"  # replaces spaces where a line must not be broken


def usual_batch(seq_length: int, gpus: int) -> int:
    """Return the largest batch size, in samples, with at most :data:`TOKENS_PER_STEP` tokens that
    is a power of two times the odd part of the number of GPUs."""
    odd = gpus // (gpus & -gpus)
    return odd * int(2 ** max(0, (TOKENS_PER_STEP // seq_length // odd).bit_length() - 1))


def simplest_first(plans: Sequence[Plan]) -> list[Plan]:
    """Return the plans with the simplest one within :data:`TIE` of the best moved to the front."""
    limit = plans[0].time.total * (1 + TIE)
    best = min((plan for plan in plans if plan.time.total <= limit), key=_complexity)
    return [best, *(plan for plan in plans if plan is not best)]


def _complexity(plan: Plan) -> tuple[int, float]:
    layout = plan.layout
    steps = {
        4: layout.pipeline > 1,
        3: layout.tensor > 1,
        2: layout.schedule != "1f1b" or layout.context > 1,
        1: layout.sequence,
    }
    more = sum(weight for weight, used in steps.items() if used)
    more += len(changed_flags(plan.saving)) + 2 * (layout.offload_optimizer is not None)
    more += (layout.recompute is not None) + layout.mlp_act
    return more + max(0, layout.zero - 1), plan.time.total


@dataclass(frozen=True)
class Budget:
    """Planned training run over a number of tokens, and its cost."""

    plan: Plan
    work: Workload
    hardware: Hardware
    tokens: int

    @property
    def steps(self) -> int:
        """Number of optimizer steps, rounded down as in training."""
        return self.tokens // self._step_tokens

    @property
    def _step_tokens(self) -> int:
        return self.work.global_batch_size * self.work.model.seq_length

    @property
    def hours(self) -> float:
        """Hours from the first step to the last."""
        return self.steps * self.plan.time.total / 3600

    def lines(self) -> list[str]:
        """Return lines of text about time, energy and cost."""
        gpus = self.hardware.gpus or 1
        gpu_hours = gpus * self.hours
        energy = gpu_hours * self.hardware.gpu_watts / 1000
        price = self.hardware.gpu_hour_price
        rate = self._step_tokens / self.plan.time.total
        return [
            f"{self.tokens:,} tokens in {self.steps:,} steps of {self.plan.time.total:.2f} s "
            f"({rate:,.0f} tokens/s): {_duration(self.hours)}, {gpu_hours:,.0f} GPU hours",
            f"energy {energy:,.0f} kWh at --gpu-watts {self.hardware.gpu_watts:g} (a GPU with its "
            f"share of the machine), ${gpu_hours * price:,.0f} at --gpu-hour-price {price:g}; "
            "without evaluation, checkpoints and restarts",
        ]


def _duration(hours: float) -> str:
    if hours < 1:
        return f"{hours * 60:.1f} minutes"
    if hours < 48:
        return f"{hours:.1f} hours"
    return f"{hours / 24:.1f} days" if hours < 24 * 730 else f"{hours / 24 / 365.25:.1f} years"


def model_words(model: ModelConfig) -> list[str]:
    """Return a minimal list of flags that describes a model, without its vocabulary."""
    fields = {field.name: field for field in dataclasses.fields(ModelFlags)}
    values = {
        name: value
        for name, value in vars(model.flags()).items()
        if value != fields[name].default and not fields[name].metadata.get("internal")
    }
    for name in list(values):
        fewer = {other: value for other, value in values.items() if other != name}
        with contextlib.suppress(ConfigError, TypeError):
            if ModelFlags(**fewer).resolve() == model:
                values = fewer
    return list(
        chain.from_iterable(flag_words(fields[name], value) for name, value in values.items())
    )


def command(budget: Budget, more: Sequence[str], tokenizer: Sequence[str]) -> str:
    """Return the command that trains according to the plan, broken into lines. The user has to
    replace the placeholders in capitals. ``more`` are additional flags, such as for fast paths, and
    ``tokenizer`` are the tokenizer's flags."""
    hardware, gpus = budget.hardware, budget.hardware.gpus or 1
    nodes, model = -(-gpus // hardware.gpus_per_node), budget.work.model
    start = ["--num_gpus", str(gpus)] if nodes == 1 else ["--hostfile", "HOSTFILE"]
    tokens = str(budget.tokens or "TOKENS")
    parts = [
        ["deepspeed", *start, f"pretrain_{model.family}.py"],
        model_words(model),
        [*budget.plan.flags, *more],
        ["--train-tokens", tokens, "--lr", "3e-4", "--lr-decay-style", "cosine"],
        ["--data-path", "DATA", *tokenizer]
        + ["--save", "checkpoints", "--load", "checkpoints", "--save-interval", "1000"],
    ]
    return " \\\n    ".join(chain.from_iterable(map(_lines, parts)))


def _lines(words: Sequence[str]) -> list[str]:
    """Return shell-quoted arguments in lines of up to 90 characters. A flag and its values are
    never separated."""
    quoted = [shlex.quote(word).replace(" ", _KEPT) for word in words]
    text = "".join((" " if word.startswith("--") else _KEPT) + word for word in quoted)
    lines = textwrap.wrap(text, 90, break_on_hyphens=False, break_long_words=False)
    return [line.replace(_KEPT, " ").strip() for line in lines]
