"""Checks for checkpoints that are continued with other RoPE scaling or longer sequences. Wrong
settings are refused; questionable ones are reported."""

from __future__ import annotations

from megatron.config import ConfigError, ModelConfig
from megatron.config.positions import PositionsConfig


def check_scaling(before: ModelConfig, now: ModelConfig, where: str) -> None:
    """Check a RoPE model ``now`` that scales positions differently from ``before``, the model of
    the checkpoint ``where``. Raises ConfigError, with flag, value and remedy, if the scaling does
    not reach the run's sequence length, or assumes another original length."""
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
    """Return the sequence length that a model was trained with before any scaling."""
    scaling = positions.rope_scaling
    if scaling.original_max_position_embeddings is not None:
        return scaling.original_max_position_embeddings
    factor = scaling.factor if scaling.rope_type == "linear" else None
    return int(positions.max_position_embeddings / (factor or 1.0))


def dynamic_base(model: ModelConfig, trained: int) -> float:
    """Return the RoPE base with the frequencies of dynamic scaling at ``model.seq_length``: base
    (F n / M - (F - 1))^(D / (D - 2)) for n positions, factor F, M = ``trained`` positions and D
    rotated channels (transformers' ``_compute_dynamic_ntk_parameters``)."""
    positions = model.positions
    rotated = model.rotated
    factor = positions.rope_scaling.factor
    assert factor is not None
    growth = factor * model.seq_length / trained - (factor - 1)
    return float(positions.rotary_base * growth ** (rotated / (rotated - 2)))


def unscaled_note(before: ModelConfig, now: ModelConfig) -> tuple[str, ...]:
    """Return a note if sequences are longer than those of the checkpoint and RoPE is not
    rescaled."""
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
