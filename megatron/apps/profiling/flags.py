"""Flags of the recording of steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.config.features import FlagSection
from megatron.config.flags import NOT_NEGATIVE, ConfigResolver, option


@dataclass(frozen=True)
class ProfilingConfig(FlagSection):
    """Profiling: which steps, on which ranks, written where."""

    after = "logging"

    profile: str | None = option(None, choices=("auto", "pt", "pt-full"), bare="auto")
    """Profile some iterations: print where their time goes and write a trace for Perfetto with
    torch's profiler; under NVIDIA's nsys mark its capture range and NVTX ranges. pt uses torch's
    profiler under nsys as well, pt-full records call stacks too."""
    profile_steps: str | None = option(None, flag="--profile_steps", aliases=("--profile-steps",))
    """FIRST,LAST: the iterations that are profiled, such as 2,3."""
    profile_step_start: int = option(10, bounds=NOT_NEGATIVE)
    """Profiling starts after this iteration."""
    profile_step_end: int = option(12)
    """Last iteration that is profiled; if only --profile-step-start is given, that
    iteration + 2."""
    profile_ranks: tuple[int, ...] = option((0,))
    """Ranks that are profiled; the first one prints the table."""
    use_pytorch_profiler: bool = option(False)
    """Use torch's profiler under nsys as well; elsewhere --profile uses it anyway."""
    profile_dir: str | None = option(None, derived="profile in --save, else in this folder")
    """Folder for the traces, rank0-step10-12.json.gz."""
    record_memory_history: bool = option(False)
    """Record all GPU memory allocations of --profile-ranks, from the start to --profile-step-end or
    an error such as out of memory."""
    memory_snapshot_path: str = option("snapshot.pickle")
    """File for --record-memory-history, shown by https://pytorch.org/memory_viz; the other
    --profile-ranks append their number to its name."""

    def __post_init__(self) -> None:
        if isinstance(self.profile, bool):  # saved by an earlier version
            object.__setattr__(self, "profile", "auto" if self.profile else None)


def resolve_profiling(
    flags: ProfilingConfig,
    world_size: int,
    iterations: int | None,
    save: str | None,
    resolver: ConfigResolver,
) -> ProfilingConfig:
    """Completes the profiling of a run of ``iterations`` iterations (None: not known)."""
    start, end, ranks = "profile_step_start", "profile_step_end", "profile_ranks"
    first, last = flags.profile_step_start, flags.profile_step_end
    if flags.profile_steps is not None:
        first, last = _profiled_steps(flags.profile_steps, resolver)
    elif resolver.given(start) and not resolver.given(end):
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
        not flags.use_pytorch_profiler or flags.profile is not None,
        "--use-pytorch-profiler chooses what --profile records with and needs it",
    )
    flags = replace(flags, profile_step_start=first, profile_step_end=last)
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


def _profiled_steps(steps: str, resolver: ConfigResolver) -> tuple[int, int]:
    """The values of --profile-step-start and --profile-step-end that --profile_steps means."""
    shown, start, end = resolver.show("profile_steps"), "profile_step_start", "profile_step_end"
    words = steps.split(",")
    resolver.check(
        len(words) == 2 and all(word.strip().isdecimal() for word in words) and int(words[0]) > 0,
        f"{shown} must be the first and the last iteration, such as 2,3",
    )
    for name in (start, end):
        resolver.check(not resolver.given(name), f"{shown} contradicts {resolver.show(name)}")
    first, last = int(words[0]) - 1, int(words[1])
    return resolver.put(start, first, "profile_steps"), resolver.put(end, last, "profile_steps")
