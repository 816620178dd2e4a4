"""Flags of context parallelism, and the resolution of its size and communication schemes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.features import FlagPart
from megatron.config.flags import POSITIVE, ConfigResolver, option
from megatron.config.layouts import COMMUNICATIONS


@dataclass(frozen=True, kw_only=True)
class ContextFlags(FlagPart):
    """Context parallelism."""

    before: ClassVar[str] = "no_pipeline_parallel"

    context_parallel_size: int | None = option(
        None, derived="ds-sequence-parallel-size, or 1", bounds=POSITIVE, role="layout"
    )
    """Context-parallel size: number of ranks that share each sequence, in all layers."""
    cp_comm_type: tuple[str, ...] = option(
        (),
        choices=COMMUNICATIONS,
        spellings={"all_gather": "allgather"},
        derived="p2p; a2a with --ds-sequence-parallel-size",
        role="layout",
    )
    """Communication scheme of context-parallel attention. p2p passes keys and values around a ring.
    a2a exchanges heads for whole sequences (Ulysses). allgather gathers keys and values. a2a+p2p
    exchanges heads between neighbouring ranks, and keys between groups of neighbours in a ring.
    Give one value, or one per block."""
    hierarchical_context_parallel_sizes: tuple[int, ...] = option((), role="layout")
    """With --cp-comm-type a2a+p2p: number of neighbouring ranks that exchange heads, and number of
    ranks in a ring. Their product is the context-parallel size."""
    ds_sequence_parallel_size: int = option(1, bounds=POSITIVE, role="layout")
    """DeepSpeed's sequence parallelism (Ulysses): sets the context-parallel size, with
    --cp-comm-type a2a unless that flag is given."""
    force_ds_sequence_parallel: bool = option(False, role="layout")
    """Same as --cp-comm-type a2a."""

    def context_size(self, resolver: ConfigResolver) -> int:
        """Return the context-parallel size."""
        return _context_size(self, resolver)

    def communication(
        self, model: Any, context: int, resolver: ConfigResolver
    ) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return the communication scheme (one for all blocks, or one per block), and the sizes of
        the two levels of a2a+p2p."""
        return _communication(self, model, context, resolver)


def _context_size(flags: ContextFlags, resolver: ConfigResolver) -> int:
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


def _communication(
    flags: ContextFlags, model: Any, context: int, resolver: ConfigResolver
) -> tuple[tuple[str, ...], tuple[int, ...]]:
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
    flags: Any,
    model: Any,
    context: int,
    kinds: set[str],
    levels: tuple[int, ...],
    resolver: ConfigResolver,
) -> None:
    """Raise ConfigError if context-parallel ranks cannot divide the sequence lengths or heads
    evenly."""
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
