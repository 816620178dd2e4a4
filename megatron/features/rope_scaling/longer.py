"""Checkpoints that are continued with other RoPE scaling or longer sequences: what cannot be right
is refused, the rest is said."""

from __future__ import annotations

from megatron.config import ConfigError, ModelConfig
from megatron.config.positions import PositionsConfig


def check_scaling(before: ModelConfig, now: ModelConfig, where: str) -> None:
    """Raises ConfigError, which names flag, value and remedy, if a model of RoPE ``now`` scales
    positions otherwise than ``before``, in the checkpoint ``where``, and not as far as its
    sequences need, or from another length than the checkpoint's."""
    old, new = before.positions, now.positions
    scaling, length = new.rope_scaling, now.seq_length
    same = (
        scaling == old.rope_scaling and new.max_position_embeddings <= old.max_position_embeddings
    )
    if new.position_embedding_type != "rope" or scaling.is_default or same:
        return
    trained, flag = trained_length(old), f"--rope-scaling {scaling.to_json()}"
    original = scaling.original_max_position_embeddings
    if scaling.rope_type == "dynamic":
        if length <= (original or trained):
            return
        base = dynamic_base(now, original or trained)
        raise ConfigError(
            f"{flag} scales sequences longer than --max-position-embeddings "
            f"{new.max_position_embeddings} only, which no run has; at --seq-length {length} its "
            f"frequencies, from the {original or trained} positions of {where}, are those of "
            f"--rotary-base {base:.10g} without --rope-scaling"
        )
    if original is not None and original > max(trained, old.max_position_embeddings):
        raise ConfigError(
            f"{flag}: original_max_position_embeddings {original} is the length before the "
            f"scaling, and {where} was trained at {trained}; give {trained}"
        )
    if scaling.rope_type in ("linear", "yarn"):
        assert scaling.factor is not None
        reach = int(scaling.factor * (original or trained))
        if length > reach:
            raise ConfigError(
                f"{flag} reaches {scaling.factor:g} x {original or trained} = {reach} positions, "
                f"and --seq-length is {length}; give factor {length / (original or trained):g}"
            )


def trained_length(positions: PositionsConfig) -> int:
    """The length of a model's sequences before any scaling."""
    scaling = positions.rope_scaling
    if scaling.original_max_position_embeddings is not None:
        return scaling.original_max_position_embeddings
    factor = scaling.factor if scaling.rope_type == "linear" else None
    return int(positions.max_position_embeddings / (factor or 1.0))


def dynamic_base(model: ModelConfig, trained: int) -> float:
    """Return the RoPE base that gives the frequencies of dynamic scaling for sequences of
    ``model.seq_length``: base (F n / M - (F - 1))^(D / (D - 2)) of n positions, M ``trained`` ones
    and D rotated channels (transformers' ``_compute_dynamic_ntk_parameters``)."""
    positions = model.positions
    rotated = model.rotated
    factor = positions.rope_scaling.factor
    assert factor is not None
    growth = factor * model.seq_length / trained - (factor - 1)
    return float(positions.rotary_base * growth ** (rotated / (rotated - 2)))


def unscaled_note(before: ModelConfig, now: ModelConfig) -> tuple[str, ...]:
    """A line if sequences are longer than the checkpoint's and the rotation is the same."""
    old, new = before.positions, now.positions
    same = (new.rope_scaling, new.rotary_base) == (old.rope_scaling, old.rotary_base)
    if new.position_embedding_type != "rope" or not same:
        return ()
    longest = old.max_position_embeddings
    if now.seq_length <= longest:
        return ()
    return (
        f"--seq-length {now.seq_length} has positions that the checkpoint, of "
        f"--max-position-embeddings {longest}, has not seen, with the same RoPE; --rope-scaling "
        "or a higher --rotary-base adapts it",
    )
