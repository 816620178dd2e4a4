"""What of a run is profiled."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.config.flags import NOT_NEGATIVE, option
from megatron.config.resolver import ConfigResolver


@dataclass(frozen=True)
class ProfilingConfig:
    """Profiling: which steps, on which ranks, written where."""

    profile: bool = option(False)
    """Record some steps and print where their time goes: with torch's profiler, a trace for
    Perfetto, and a table; under NVIDIA's nsys its capture range and NVTX ranges."""
    profile_step_start: int = option(10, bounds=NOT_NEGATIVE)
    """Iterations before the first one that is recorded."""
    profile_step_end: int = option(12)
    """The last iteration that is recorded; with another --profile-step-start, two after that."""
    profile_ranks: tuple[int, ...] = option((0,))
    """Ranks that record; the first of them prints the table."""
    use_pytorch_profiler: bool = option(False)
    """Record with torch's profiler under nsys, too; elsewhere it is what --profile takes."""
    profile_dir: str | None = option(None, derived="profile in --save, else in this folder")
    """Folder for the traces, rank0-step10-12.json.gz."""
    record_memory_history: bool = option(False)
    """Record every allocation of the GPU from the start to --profile-step-end, or to an error such
    as running out of memory, on --profile-ranks."""
    memory_snapshot_path: str = option("snapshot.pickle")
    """File for these allocations, for https://pytorch.org/memory_viz; ranks other than the first of
    --profile-ranks put their number behind its name."""


def resolve_profiling(
    flags: ProfilingConfig,
    world_size: int,
    iterations: int | None,
    save: str | None,
    resolver: ConfigResolver,
) -> ProfilingConfig:
    """What flags ask to profile.

    Args:
        flags: the flags.
        world_size: number of processes.
        iterations: length of the run, where it is counted in these.
        save: folder of the run's checkpoints.
        draft: where the values came from.

    Raises:
        ConfigError: naming flags, values and what would be right.
    """
    start, end, ranks = "profile_step_start", "profile_step_end", "profile_ranks"
    first, last = flags.profile_step_start, flags.profile_step_end
    if resolver.given(start) and not resolver.given(end):
        last = resolver.put(end, first + 2, "profile-step-start + 2")
    resolver.check(
        last > first,
        f"{resolver.show(end)} must be above {resolver.show(start)}: iterations {first + 1} to "
        f"{last} are recorded",
    )
    wanted = flags.profile_ranks
    shown = f"{resolver.flag(ranks)} {' '.join(map(str, wanted))}"
    resolver.check(
        bool(wanted) and all(0 <= rank < world_size for rank in wanted),
        f"{shown} must be ranks from 0 to {world_size - 1}, the processes of this run",
    )
    resolver.check(len(set(wanted)) == len(wanted), f"{shown} names a rank twice")
    resolver.check(
        not flags.use_pytorch_profiler or flags.profile,
        "--use-pytorch-profiler chooses what --profile records with and needs it",
    )
    flags = replace(flags, profile_step_end=last)
    if not (flags.profile or flags.record_memory_history):
        for name in (start, end, ranks, "profile_dir", "memory_snapshot_path"):
            if resolver.given(name):
                resolver.notes.append(f"{resolver.flag(name)} has no effect without --profile")
        return flags
    resolver.check(
        iterations is None or first < iterations,
        f"{resolver.show(start)} leaves nothing to record: the run ends at iteration {iterations} "
        f"({resolver.flag('train_iters')})",
    )
    folder = f"{save.rstrip('/')}/profile" if save else "profile"
    how = "profile in --save, else in this folder"
    return replace(flags, profile_dir=resolver.fill("profile_dir", flags.profile_dir, folder, how))
