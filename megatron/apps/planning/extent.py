"""Size of a training run: parameters, tokens, and epochs over the data."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.apps.planning.parameters import RankShare, model_parameters, rank_shares
from megatron.config import RunConfig
from megatron.config.layouts import Layout
from megatron.data.build import PortionSize
from megatron.features.experts.costs import active_parameters
from megatron.training.plan import TrainingPlan

_OFTEN = 50
"""Number of epochs from which a run warns that they are probably unintended."""


def extent(config: RunConfig, plan: TrainingPlan, files: Sequence[PortionSize]) -> list[str]:
    """Return lines of text about a run's size: parameters, tokens, and epochs over its files."""
    if any(kind.acts and kind.samples == "prompts" for kind in config.kinds):
        texts = plan.batch_size.samples(plan.train_iters)
        length = f"each of at most {plan.seq_length:,} tokens with its prompt"
        return [f"model: {_parameters(config)}; {texts:,} texts to train on, {length}"]
    per_step = plan.global_batch_size * plan.seq_length
    tokens = plan.lengths.tokens(plan.batch_size.samples(plan.train_iters))
    length = f"{per_step:,} tokens a step, {tokens:,} in all"
    passes = [tokens * file.weight / max(1, file.tokens) for file in files]
    if plan.epochs is not None:
        epochs = f"{plan.epochs.count} epoch{'s' * (plan.epochs.count > 1)}"
        length += f" ({epochs} of {plan.epochs.samples:,} samples)"
    elif passes:
        ends = dict.fromkeys(f"{count:,.3g}" for count in (min(passes), max(passes)))
        total, several = sum(file.tokens for file in files), len(files) > 1
        length += f": {' to '.join(ends)} epochs over the {total:,} tokens of data"
        length += f" in {len(files)} files" if several else ""
    lines = [f"model: {_parameters(config)}; {length}"]
    if plan.epochs is None and passes and max(passes) >= _OFTEN:
        where = f" in file {passes.index(max(passes)) + 1}" if several else ""
        lines.append(
            f"note: each token of the data{where} is read about {max(passes):,.0f} times; more "
            "text or a shorter run is usually better than many epochs over little"
        )
    return lines


def _parameters(config: RunConfig) -> str:
    """Return the number of parameters as text. If ranks divide them, include the largest share."""
    layout, total = config.layout(), model_parameters(config.model)
    text, active = f"{total:,} parameters", active_parameters(config.model, total)
    if active < total:
        text += f", {active:,} of them active for a token"
    if layout.tensor * layout.pipeline * layout.expert == 1 and layout.zero < 3:
        return text
    shares = rank_shares(config.model, layout, config.parallel.pipeline_partition)
    most = max(_on_rank(layout, share) for share in shares)
    return f"{text}, {most:,} on a rank"


def _on_rank(layout: Layout, share: RankShare) -> int:
    """Return the number of parameters that a rank stores. ZeRO 3 partitions them over replicas."""
    if layout.zero < 3:
        return share.parameters
    dense = (share.parameters - share.experts) // layout.replicas
    return dense + share.experts // (layout.replicas // layout.expert_axis)
