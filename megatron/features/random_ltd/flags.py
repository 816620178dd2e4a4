"""Flags for random layerwise token dropping, its section in DeepSpeed's JSON, and its schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.config.features import KindConfig
from megatron.config.flags import ConfigError, ConfigResolver, option
from megatron.config.sections import States, memory_of
from megatron.features.curriculum.flags import CurriculumConfig, Section, token_dropping

_KEYS = (
    "enabled", "total_layer_num", "random_ltd_layer_num", "random_ltd_layer_id", "model_mask_name",
    "model_type", "hidden_state_order", "random_ltd_schedule", "layer_token_lr_schedule",
)  # fmt: skip
MODEL_TYPES = {"gpt": "decoder", "bert": "encoder"}
"""Required ``model_type`` in the JSON for each family whose layers can drop tokens."""


@dataclass(frozen=True)
class RandomLTDConfig(KindConfig):
    """Random layerwise token dropping."""

    random_ltd: bool = option(False)
    """Drop random tokens in some layers during training (random-LTD). The section
    data_routing.random_ltd of "data_efficiency" in DeepSpeed's JSON specifies the details."""

    @property
    def acts(self) -> bool:
        return self.random_ltd


@dataclass(frozen=True)
class TokenDropping:
    """Schedule of token dropping. ``layers`` are the indices of the layers that drop tokens,
    ascending, out of ``total`` layers. They keep ``lowest`` tokens per sample at first, and
    ``highest`` after ``steps`` steps, in multiples of ``increment``. ``name`` is the schedule's
    path in the JSON."""

    name: str
    total: int
    layers: tuple[int, ...]
    lowest: int
    highest: int
    steps: int
    increment: int
    model_type: str | None = None

    def reserved(self, iteration: int) -> int:
        """Return the number of tokens per sample that a layer keeps after ``iteration`` completed
        steps. This is DeepSpeed's ``fixed_linear`` schedule, in floating point as in DeepSpeed."""
        if self.lowest == self.highest:
            return self.highest
        share = float(iteration) / self.steps
        length = math.floor(share * (self.highest - self.lowest) + self.lowest)
        return min(length - length % self.increment, self.highest)

    @property
    def last(self) -> int:
        """Number of steps after which the number of kept tokens is constant."""
        if self.highest == self.lowest:
            return 1
        span = self.highest - self.lowest
        return math.ceil(self.steps * (span + self.increment) / span) + 1

    def mean_length(self, length: int, reserved: int) -> int:
        """Return the number of tokens per sample that count as consumed: the mean over all layers,
        if a sample has ``length`` tokens, of which layers keep ``reserved``."""
        dropping = len(self.layers)
        if reserved >= length:
            return length
        return (length * (self.total - dropping) + reserved * dropping) // self.total

    def changes(self) -> Iterator[tuple[int, int]]:
        """Yield (completed steps, number of kept tokens) for step 0 and for each change."""
        from megatron.features.curriculum.order import changes

        return changes(self.reserved, 0, self.last)

    def check(self, config: Any, resolver: ConfigResolver) -> None:
        """Report models and layouts in which layers cannot drop tokens."""
        model, parallel = config.model, config.parallel
        kind, layers = MODEL_TYPES.get(model.family), model.num_layers
        resolver.check(
            kind is not None,
            f"--random-ltd is for the families {' and '.join(MODEL_TYPES)}; in the family "
            f"{model.family} other layers read the tokens that one would drop",
        )
        resolver.check(
            self.model_type in (None, kind),
            f"{self.name}.model_type is {self.model_type}, and the family {model.family} is {kind}",
        )
        resolver.check(
            self.total == layers,
            f"{self.name}.total_layer_num is {self.total}, and --num-layers {layers}: give the "
            "same number",
        )
        for layer in self.layers:
            self._check_layer(model, layer, resolver)
        if self.reserved(0) >= model.seq_length:
            resolver.notes.append(
                f"{self.name}: layers keep {self.reserved(0)} tokens or more, and --seq-length is "
                f"{model.seq_length}: none is dropped"
            )
        positions = model.positions
        scaling = positions.rope_scaling.rope_type
        for flag, clash in (
            (f"--position-embedding-type {positions.position_embedding_type}",
             positions.position_embedding_type in ("alibi", "relative")),
            (f"--rope-scaling with rope_type {scaling}", scaling == "longrope"),
        ):  # fmt: skip
            resolver.check(
                not clash,
                f"--random-ltd contradicts {flag}: it counts the tokens that a layer reads, not "
                "their distances in the text",
            )
        resolver.check(
            parallel.context_parallel_size == 1,
            f"--random-ltd contradicts --context-parallel-size {parallel.context_parallel_size}: "
            "each rank has fixed pieces of a sequence, of which random tokens would be kept in "
            "unequal numbers",
        )
        tensor = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
        for _, kept in self.changes():
            resolver.check(
                kept % tensor == 0 or kept >= model.seq_length,
                f"{self.name} keeps {kept} tokens at a time, which --sequence-parallel splits over "
                f"--tensor-model-parallel-size {tensor}: make min_value, max_value and "
                f"seq_per_step multiples of {tensor}",
            )

    def _check_layer(self, model: Any, layer: int, resolver: ConfigResolver) -> None:
        place = f"{self.name}.random_ltd_layer_id has layer {layer}"
        resolver.check(layer < self.total, f"{place}; the last of {self.total} is {self.total - 1}")
        memory = memory_of(model, layer)
        resolver.check(
            memory is not None and not isinstance(memory, States),
            f"{place}, which has no attention: its state is of all tokens in their order",
        )
        resolver.check(
            model.attention.window(layer) is None,
            f"{place}, which attends to a window: without dropped tokens it would reach further",
        )


def dropping_of(config: Any) -> TokenDropping | None:
    """Return the token dropping that a :class:`~megatron.config.run.RunConfig` describes, or None
    if it is disabled. Raises ConfigError if its JSON section is invalid."""
    section = token_dropping(config.section(CurriculumConfig))
    if section is None or not config.section(RandomLTDConfig).random_ltd:
        return None
    return read_dropping(section)


def read_dropping(section: Section) -> TokenDropping:
    """Parse the JSON section of enabled token dropping. Raises ConfigError if it is invalid."""
    section.only(*_KEYS)
    if section.section("layer_token_lr_schedule").enabled:
        raise ConfigError(
            f"{section.path}.layer_token_lr_schedule was never part of DeepSpeed: the learning "
            "rate follows --lr-decay-tokens, for which dropped tokens do not count"
        )
    given = section.values.get("random_ltd_layer_id")
    if not isinstance(given, list) or any(type(n) is not int or n < 0 for n in given) or not given:
        raise section.wrong("random_ltd_layer_id", "a list of numbers of layers, from 0")
    layers = tuple(sorted(set(given)))
    if section.whole("random_ltd_layer_num") != len(layers):
        raise section.wrong(
            "random_ltd_layer_num", f"{len(layers)}, the layers of random_ltd_layer_id"
        )
    if section.values.get("hidden_state_order") is not None:
        section.choice("hidden_state_order", "seq_batch_dim", "batch_seq_dim")
    kind = None
    if section.values.get("model_type") is not None:
        kind = section.choice("model_type", *MODEL_TYPES.values())
    schedule = section.section("random_ltd_schedule")
    schedule.only("min_value", "max_value", "schedule_type", "schedule_config")
    schedule.choice("schedule_type", "fixed_linear")
    lowest, highest = schedule.whole("min_value"), schedule.whole("max_value")
    if lowest > highest:
        raise schedule.wrong("min_value", f"at most max_value {highest}")
    growth = schedule.section("schedule_config")
    growth.only("require_steps", "seq_per_step")
    increment = growth.whole("seq_per_step")
    if lowest < increment:
        raise schedule.wrong("min_value", f"at least seq_per_step {increment}")
    steps = growth.whole("require_steps")
    total = section.whole("total_layer_num")
    return TokenDropping(section.path, total, layers, lowest, highest, steps, increment, kind)
