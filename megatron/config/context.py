"""Flags of the axis that divides sequences: its size, and the communication of blocks."""

from __future__ import annotations

from megatron.config.flags import ConfigResolver
from megatron.config.model import ModelConfig
from megatron.config.parallel_flags import ParallelFlags


def context_size(flags: ParallelFlags, resolver: ConfigResolver) -> int:
    """Ranks that divide a sequence."""
    name, ulysses = "context_parallel_size", flags.ds_sequence_parallel_size
    given = flags.context_parallel_size
    resolver.check(
        given is None or ulysses in (1, given),
        f"{resolver.show(name)} contradicts {resolver.show('ds_sequence_parallel_size')}: both are "
        "the number of ranks that divide a sequence; give one of them",
    )
    if given is None or ulysses > 1:
        return resolver.put(name, ulysses, "ds-sequence-parallel-size" if ulysses > 1 else "1")
    return given


def communication(
    flags: ParallelFlags, model: ModelConfig, context: int, resolver: ConfigResolver
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Communication of all blocks or of each over the context, and the two levels of it."""
    name, levels = "cp_comm_type", flags.hierarchical_context_parallel_sizes
    kinds, two_levels = flags.cp_comm_type, "hierarchical_context_parallel_sizes"
    forced = flags.force_ds_sequence_parallel
    if context == 1:
        unused = [name] * bool(kinds) + [two_levels] * bool(levels)
        for idle in [*unused, *(["force_ds_sequence_parallel"] if forced else [])]:
            resolver.notes.append(
                f"{resolver.show(idle)} changes nothing: every process has whole sequences, with "
                "--context-parallel-size 1"
            )
        return (), ()
    resolver.check(
        not forced or kinds in ((), ("a2a",)),
        f"--force-ds-sequence-parallel contradicts {resolver.show(name)}: it asks for a2a; give "
        "one of them",
    )
    if not kinds:
        ulysses = forced or flags.ds_sequence_parallel_size > 1
        how = "--force-ds-sequence-parallel" if forced else "ds-sequence-parallel-size"
        kinds = resolver.put(name, ("a2a",) if ulysses else ("p2p",), how if ulysses else "p2p")
    resolver.check(
        len(kinds) in (1, model.blocks),
        f"{resolver.show(name)} has {len(kinds)} values; give one, or one for each of the "
        f"{model.blocks} blocks",
    )
    if "a2a+p2p" in kinds:
        resolver.check(
            len(levels) == 2 and levels[0] * levels[1] == context and min(levels) > 0,
            f"{resolver.show(name)} exchanges heads between neighbours and connects them by rings: "
            f"--hierarchical-context-parallel-sizes must be two numbers with the product {context} "
            f"(--context-parallel-size), such as 2 {context // 2}"
            + (f", and is {' '.join(map(str, levels))}" if levels else ""),
        )
    elif levels:
        resolver.notes.append(
            f"{resolver.show(two_levels)} changes nothing without --cp-comm-type a2a+p2p"
        )
        levels = ()
    _check_context(flags, model, context, set(kinds), levels, resolver)
    return kinds if len(set(kinds)) > 1 else kinds[:1], levels


def _check_context(
    flags: ParallelFlags,
    model: ModelConfig,
    context: int,
    kinds: set[str],
    levels: tuple[int, ...],
    resolver: ConfigResolver,
) -> None:
    """Refuses lengths and heads that the ranks of a context cannot divide."""
    tensor = flags.tensor_model_parallel_size
    slices = tensor if flags.sequence_parallel else 1
    divisor = 2 * context * slices
    for name in ("seq_length", "decoder_seq_length"):
        length = getattr(model, name)
        resolver.check(
            length is None or length % divisor == 0,
            f"{resolver.show(name)} must be a multiple of {divisor}: each of the "
            f"{resolver.show('context_parallel_size')} ranks has two pieces of a sequence"
            + (f", each in {slices} slices of --sequence-parallel" if slices > 1 else "")
            + f"; the nearest is {max(1, round((length or 0) / divisor)) * divisor}",
        )
    heads = resolver.values["num_attention_heads"] // tensor
    for kind, ranks in (("a2a", context), ("a2a+p2p", levels[0] if levels else 1)):
        resolver.check(
            kind not in kinds or heads % ranks == 0,
            f"--cp-comm-type {kind}: {ranks} ranks exchange heads, and must divide the {heads} "
            f"query heads of a tensor-parallel rank ({resolver.show('num_attention_heads')}); use "
            "p2p or allgather, which divide no heads, or a2a+p2p with fewer ranks that exchange "
            "them",
        )
