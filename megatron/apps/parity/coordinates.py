"""The coordinate check of muP: the size of a model's activations as a function of its width, while
it learns from one batch (Yang et al. 2022, arXiv:2203.03466, appendix D.1).

With muP, the change of every activation after some steps does not depend on the width. Shapes: B
batch, S sequence, H any width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron.apps.parity.runs import watched_trainer
from megatron.apps.pictures.plots import save_picture
from megatron.config import ConfigError, Setting, Settings
from megatron.config.flags import option
from megatron.config.training import LENGTHS
from megatron.data.loader import MicroBatches
from megatron.engine.environment import deterministic_kernels, distributed
from megatron.engine.train_engine import StepResult, TrainEngine
from megatron.run.run import Run, run_data, run_of

LOGITS = "logits"
_WIDENED = ("hidden_size", "ffn_hidden_size", "moe_ffn_hidden_size", "num_attention_heads",
            "num_query_groups", "moe_shared_expert_intermediate_size")  # fmt: skip
_FLAT = 0.1
"""Largest slope, with respect to log width, at which an activation's change counts as flat."""


@dataclass(frozen=True)
class CoordinateFlags:
    """Options for the coordinate check."""

    widths: tuple[int, ...] = option((1, 2, 4, 8, 16))
    """Widths to compare, as multiples of the width of the model that the other flags describe."""
    check_steps: int = option(4)
    """Number of optimizer steps to take at each width."""
    picture: str | None = option(None)
    """Image file for a plot of all activations over the width."""
    json: str | None = option(None)
    """JSON file for all measurements."""


@dataclass
class ActivationSizes:
    """Mean absolute values of activations by name: ``first`` before the first step, and ``changes``
    since then, after each step."""

    first: dict[str, float] = field(default_factory=dict)
    changes: list[dict[str, float]] = field(default_factory=list)


def settings_of(base: Settings, factor: int, steps: int, mup: bool) -> Settings:
    """Return the settings of a model ``factor`` times as wide as the base, with equal head size."""
    for name in ("use_mup", "mup_base_hidden_size"):
        if name in base:
            raise ConfigError(
                f"{base[name].origin.removeprefix('flag ')}: the check compares models with and "
                "without it; leave it out"
            )
    for name in ("hidden_size", "num_attention_heads"):
        if name not in base:
            raise ConfigError(f"missing --{name.replace('_', '-')}, that of the base")

    def derived(**values: Any) -> Settings:
        return {name: Setting(value, "coordinate check") for name, value in values.items()}

    lengths = {f"train_{unit}" for unit in (*LENGTHS, "tokens")}
    kept = {name: setting for name, setting in base.items() if name not in lengths}
    wide = {name: base[name].value * factor for name in _WIDENED if name in base}
    settings = kept | derived(**wide, train_iters=steps, eval_iters=0, log_interval=steps + 1)
    defaults = {"lr_decay_style": "constant", "hidden_dropout": 0.0, "attention_dropout": 0.0}
    settings = derived(**defaults) | settings
    if mup:
        head = base["hidden_size"].value // base["num_attention_heads"].value
        head = base["kv_channels"].value if "kv_channels" in base else head
        settings |= derived(use_mup=True, mup_base_hidden_size=base["hidden_size"].value)
        settings = derived(mup_base_head_dim=head) | settings
    return settings


def measure(settings: Settings) -> ActivationSizes:
    """Train on this process, and measure one batch's activations before and after every step."""
    run = run_of(settings, 1)
    sizes = ActivationSizes()
    with deterministic_kernels(run.config), distributed(run.config.parallel) as mesh:
        before: dict[str, Tensor] = {}

        def watch(_: StepResult) -> None:
            now = activations(trainer.engine, batch)
            sizes.changes.append({name: _size(x - before[name]) for name, x in now.items()})

        trainer = watched_trainer(run, mesh, watch)
        batch = _batch(run)
        before |= activations(trainer.engine, batch)
        sizes.first |= {name: _size(x) for name, x in before.items()}
        trainer.fit()
    return sizes


def _size(x: Tensor) -> float:
    return float(x.abs().mean())


def _batch(run: Run) -> Any:
    data = run_data(run)
    assert data.datasets.train is not None
    size = run.config.training.micro_batch_size
    return next(MicroBatches(data.datasets.train, data.collate, micro_batch_size=size))


@torch.no_grad()
def activations(engine: TrainEngine, batch: Any) -> dict[str, Tensor]:
    """Return the outputs of all layers and of the blocks' linear layers, in float64 by canonical
    name, for a model on one process. The last entry is the logits."""
    outputs: dict[str, Tensor] = {}
    state = engine.spec.begin(batch).changed(targets=None)
    engine.prepare_evaluation()
    with _hooks(engine, outputs):
        for sequence in engine.sequences:
            state = sequence(state)
    engine.model.train()
    vocabulary = engine.config.model.vocabulary.size
    return outputs | {LOGITS: state.hidden[..., :vocabulary].double()}


@contextmanager
def _hooks(engine: TrainEngine, outputs: dict[str, Tensor]) -> Iterator[None]:
    """In this context, record the outputs of blocks and of modules with weight matrices."""
    handles = []
    blocks = [block for sequence in engine.sequences for block in sequence.blocks]

    def keep(name: str, module: nn.Module) -> None:
        def hook(_: nn.Module, inputs: Any, output: Any) -> None:
            x = output[0] if isinstance(output, tuple) and not hasattr(output, "total") else output
            x = x.total if hasattr(x, "total") else x
            if isinstance(x, Tensor) and x.is_floating_point() and name not in outputs:
                outputs[name] = x.double()

        handles.append(module.register_forward_hook(hook))

    for module in engine.model.modules():
        own = [engine.names[p] for p in module.parameters(recurse=False) if p in engine.names]
        if own and "norm" not in own[0]:
            keep(own[0].rpartition(".")[0], module)
    for number, block in enumerate(blocks):
        keep(f"layers.{number}", block)
    yield
    for handle in handles:
        handle.remove()


def slopes(sizes: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Return the exponent with which each activation's size grows with the width, by least squares
    on logarithms. ``sizes`` has the activation sizes by width."""
    widths = np.log2(list(sizes))
    names = next(iter(sizes.values()))
    result = {}
    for name in names:
        values = np.array([of[name] for of in sizes.values()])
        positive = bool((values > 0).all() and np.isfinite(values).all())
        result[name] = float(np.polyfit(widths, np.log2(values), 1)[0]) if positive else math.nan
    return result


@dataclass(frozen=True)
class CoordinateReport:
    """Activation sizes by width, with and without muP."""

    mup: Mapping[int, ActivationSizes]
    plain: Mapping[int, ActivationSizes]

    def rows(self) -> list[tuple[str, float, float, float]]:
        """Return the slopes of each activation: (name, change after the last step with muP, change
        without muP, initial size with muP)."""
        last, other, first = (
            slopes({width: choose(each) for width, each in sizes.items()})
            for sizes, choose in (
                (self.mup, lambda s: s.changes[-1]),
                (self.plain, lambda s: s.changes[-1]),
                (self.mup, lambda s: s.first),
            )
        )
        return [(name, last[name], other[name], first[name]) for name in last]

    def worst(self) -> float:
        """Return the largest absolute slope of a change with muP, infinite if one is not finite."""
        values = [abs(row[1]) for row in self.rows()]
        return max(math.inf if math.isnan(value) else value for value in values)

    @property
    def flat(self) -> bool:
        return self.worst() <= _FLAT

    def table(self) -> str:
        """Return the slopes as a Markdown table with a row for each activation."""
        lines = [
            "| activation | change, muP | change, without | at first, muP |",
            "|---|---|---|---|",
        ]
        for name, *numbers in self.rows():
            lines.append(f"| {name} | {' | '.join(f'{each:+.2f}' for each in numbers)} |")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {
            kind: {width: {"first": of.first, "changes": of.changes} for width, of in each.items()}
            for kind, each in (("mup", self.mup), ("plain", self.plain))
        }

    def draw(self, path: Path) -> None:
        """Plot the changes after the last step over the width, with one line per activation."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 4.5), dpi=150, layout="constrained")
        for axes, title, sizes in zip(
            figure.subplots(1, 2, sharey=True), ("without muP", "muP"), (self.plain, self.mup),
            strict=True,
        ):  # fmt: skip
            for name in next(iter(sizes.values())).changes[-1]:
                values = [of.changes[-1][name] for of in sizes.values()]
                strong = {"linewidth": 2.5} if name == LOGITS else {"alpha": 0.6}
                axes.plot(list(sizes), values, marker="o", markersize=3, label=name, **strong)
            axes.set(xscale="log", yscale="log", title=title, xlabel="width / base")
            axes.set_xticks(list(sizes), [str(width) for width in sizes])
            axes.grid(alpha=0.3)
        figure.axes[0].set_ylabel("mean absolute change of activations")
        figure.axes[1].legend(fontsize=5, ncols=2)
        save_picture(figure, path)


def compare(base: Settings, flags: CoordinateFlags) -> CoordinateReport:
    """Measure models of all widths with and without muP. Raises ConfigError if fewer than two
    widths are given, or if the base model's flags contradict the check."""
    widths: Sequence[int] = sorted(set(flags.widths))
    if len(widths) < 2 or widths[0] < 1 or flags.check_steps < 1:
        raise ConfigError(
            f"--widths {' '.join(map(str, flags.widths))}, --check-steps {flags.check_steps}: give "
            "two or more multiples of the base, and at least one step"
        )
    mup, plain = (
        {width: measure(settings_of(base, width, flags.check_steps, use)) for width in widths}
        for use in (True, False)
    )
    return CoordinateReport(mup, plain)
