"""Profiling flags."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.config.features import FlagSection
from megatron.config.flags import NOT_NEGATIVE, ConfigResolver, option


@dataclass(frozen=True)
class ProfilingConfig(FlagSection):
    """Profiling: steps and ranks to record, and output files."""

    after = "logging"

    profile: str | None = option(None, choices=("auto", "pt", "pt-full"), bare="auto")
    """Profile some iterations. torch's profiler prints how their time is spent and writes a trace
    for Perfetto. Under NVIDIA's nsys, its capture range and NVTX ranges are marked instead. pt uses
    torch's profiler under nsys as well; pt-full also records call stacks."""
    profile_steps: str | None = option(None, flag="--profile_steps", aliases=("--profile-steps",))
    """FIRST,LAST: the iterations to profile, such as 2,3."""
    profile_step_start: int = option(10, bounds=NOT_NEGATIVE)
    """Iteration after which profiling starts."""
    profile_step_end: int = option(12)
    """Last iteration to profile. 2 after --profile-step-start if only that flag is given."""
    profile_ranks: tuple[int, ...] = option((0,))
    """Ranks to profile. The first of them prints the table."""
    use_pytorch_profiler: bool = option(False)
    """Use torch's profiler under nsys as well. Without nsys, --profile always uses it."""
    profile_dir: str | None = option(None, derived="profile in --save, else in this folder")
    """Folder for traces, with file names such as rank0-step10-12.json.gz."""
    record_memory_history: bool = option(False)
    """Record all GPU memory allocations of --profile-ranks, from the start of the run to
    --profile-step-end or an error, such as out of memory."""
    memory_snapshot_path: str = option("snapshot.pickle")
    """File for --record-memory-history, which https://pytorch.org/memory_viz displays. All
    --profile-ranks except the first append their rank to its name."""

    def __post_init__(self) -> None:
        if isinstance(self.profile, bool):  # from a configuration saved by an earlier version
            object.__setattr__(self, "profile", "auto" if self.profile else None)


def resolve_profiling(
    flags: ProfilingConfig,
    world_size: int,
    iterations: int | None,
    save: str | None,
    resolver: ConfigResolver,
) -> ProfilingConfig:
    """Return the flags with derived values. ``iterations`` is the run's length, None if unknown."""
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
    """Return the --profile-step-start and --profile-step-end that --profile_steps implies."""
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
