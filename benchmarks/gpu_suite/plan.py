"""Which measurements there are, in the order in which they are made."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]
PARTS = ("sizes", "optimisations", "tests", "sequences")
BASE = "ours-zero1+torch-compile"
FLOOR = "matmuls"
PEERS = ("plain-compiled", "hf-deepspeed", "hf-trainer", FLOOR)


@dataclass(frozen=True)
class Model:
    """A size and how it is trained.

    Attributes:
        name: as in the tables.
        shape: flags of `train.py`.
        seq_length: its own sequence length.
        tokens: of a micro batch.
        micro_batches: of a step.
        offload: whether weights, gradients and moments, 16 bytes a parameter, do not fit one GPU
            of 80 GB: it is measured with the trainer's optimizer on the CPU as well, at its own
            length, and of the peers the matrix products alone take part.
        steps: flags of `train.py` in place of the scale's, where a step is long.
    """

    name: str
    shape: str
    seq_length: int
    tokens: int
    micro_batches: int
    offload: bool = False
    steps: str = ""


LLAMA = "--architecture llama --vocab-size 32000 "
GPU_MODELS = (
    Model("124M", "--layers 12 --hidden-size 768 --heads 12", 1024, 32768, 2),
    Model("350M", "--layers 24 --hidden-size 1024 --heads 16", 1024, 16384, 4),
    Model("1.3B", LLAMA + "--layers 24 --hidden-size 2048 --heads 16", 2048, 16384, 4),
    Model(
        "3B",
        LLAMA + "--layers 28 --hidden-size 3072 --heads 24 --kv-heads 8 --ffn-hidden-size 8192",
        2048,
        8192,
        8,
    ),
    Model(
        "7B",
        LLAMA + "--layers 32 --hidden-size 4096 --heads 32 --ffn-hidden-size 11008",
        2048,
        # By count an H200 has room for this with the optimizer's state, not for twice as many.
        4096,
        32,
        offload=True,
        steps="--warmup 2 --rounds 2 --steps 3",
    ),
)
TINY_MODELS = (
    Model("tiny", "--layers 1 --hidden-size 32 --heads 2 --vocab-size 128", 16, 32, 1),
    Model(
        "tiny offload",
        "--architecture llama --layers 1 --hidden-size 32 --heads 2 --vocab-size 128",
        16,
        32,
        2,
        offload=True,
    ),
)


@dataclass(frozen=True)
class Scale:
    """How large everything is.

    Attributes:
        models: the sizes.
        sequences: sequence lengths that each size is measured at.
        studied: the size whose optimisations are turned off one by one.
        steps: flags of `train.py` that say how many steps are measured.
        base: what the optimisations are taken from.
        timeout: seconds for a measurement, start and compilation included.
    """

    models: Sequence[Model]
    sequences: Sequence[int]
    studied: str
    steps: str
    base: str
    timeout: float


SCALES = {
    "full": Scale(
        GPU_MODELS, (1024, 2048, 4096, 8192), "1.3B", "--warmup 5 --rounds 3 --steps 10", BASE, 900
    ),
    # For a trial on a CPU, where nothing is compiled.
    "tiny": Scale(
        TINY_MODELS,
        (16, 32),
        "tiny",
        "--warmup 1 --rounds 1 --steps 1 --peak-tflops 1",
        "ours-zero1",
        300,
    ),
}


def turned_off(base: str) -> list[tuple[str, str]]:
    """(what is different, contestant): everything that makes a step fast, one at a time.

    Args:
        base: the contestant with all of it; it accumulates gradients in bf16.
    """
    return [
        ("all of it", base),
        ("no torch.compile", base.replace("+torch-compile", "")),
        (
            "compile mode reduce-overhead (CUDA graphs)",
            f"{base}+torch-compile-mode=reduce-overhead",
        ),
        ("compile mode max-autotune (graphs too)", f"{base}+torch-compile-mode=max-autotune"),
        (
            "compile mode max-autotune-no-cudagraphs",
            f"{base}+torch-compile-mode=max-autotune-no-cudagraphs",
        ),
        ("attention eager", f"{base}+attention-backend=eager"),
        ("attention flash-attn", f"{base}+attention-backend=flash"),
        ("attention cuDNN", f"{base}+attention-backend=cudnn"),
        ("logits by 64 MiB", f"{base}+logits-chunk-mib=64"),
        ("logits by 1024 MiB", f"{base}+logits-chunk-mib=1024"),
        ("logits whole", f"{base}+logits-chunk-mib=0"),
        ("gradients accumulated in fp32", f"{base}+accumulate-allreduce-grads-in-fp32"),
        ("recompute attention", f"{base}+recompute-granularity=selective"),
        ("recompute blocks", f"{base}+recompute-granularity=full+recompute-method=uniform"),
        ("ZeRO 0 (autocast)", base.replace("zero1", "zero0")),
        ("ZeRO 2", base.replace("zero1", "zero2")),
        ("ZeRO 3", base.replace("zero1", "zero3")),
    ]


CONFIGS: dict[str, dict[str, object]] = {
    "offload": {
        "zero_optimization": {
            "stage": 1,
            # Page-locked: gradients travel several times as fast.
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        }
    },
}
"""DeepSpeed JSONs of the variants that have no flag."""


@dataclass(frozen=True)
class Job:
    """One measurement: a process of its own, and a file of results.

    Attributes:
        part: of :data:`PARTS`.
        model: size, empty for the tests.
        seq_length: tokens of a sample.
        variant: what is different from the size's own run, for people.
        contestant: of `train.py`, empty for the tests.
        command: what is run, less ``--json FILE``.
        timeout: seconds.
    """

    part: str
    model: str
    seq_length: int
    variant: str
    contestant: str
    command: tuple[str, ...]
    timeout: float

    @property
    def name(self) -> str:
        """Of its file."""
        words = [self.part, self.model, str(self.seq_length), self.variant]
        text = "-".join(words if self.model else words[:1])
        return re.sub(r"[^\w.]+", "-", text).strip("-")


def jobs(scale: Scale, parts: Sequence[str], config: Callable[[str], str]) -> list[Job]:
    """All measurements of these parts, in the order of the parts."""
    makers: dict[str, Callable[[], Iterator[Job]]] = {
        "sizes": lambda: _sizes(scale, config),
        "optimisations": lambda: _optimisations(scale),
        "tests": lambda: _tests(scale),
        "sequences": lambda: _sequences(scale, config),
    }
    return [job for part in parts for job in makers[part]()]


def _sizes(scale: Scale, config: Callable[[str], str]) -> Iterator[Job]:
    """Every size at its own length: ours in bf16 and fp8, and the peers."""
    for model in scale.models:
        for variant, contestant in _ours(scale):
            yield _train(scale, "sizes", model, model.seq_length, variant, contestant)
        if model.offload:
            yield from _offloaded(scale, "sizes", model, model.seq_length, config("offload"))
    for model in scale.models:
        for peer in (FLOOR,) if model.offload else PEERS:
            yield _train(scale, "sizes", model, model.seq_length, peer, peer)


def _optimisations(scale: Scale) -> Iterator[Job]:
    (model,) = (model for model in scale.models if model.name == scale.studied)
    for variant, contestant in turned_off(scale.base):
        yield _train(scale, "optimisations", model, model.seq_length, variant, contestant)


def _sequences(scale: Scale, config: Callable[[str], str]) -> Iterator[Job]:
    """Every size at the other lengths."""
    for model in scale.models:
        for length in scale.sequences:
            if model.offload and length > model.tokens:  # no room for one sample beside the state
                yield from _offloaded(scale, "sequences", model, length, config("offload"))
            elif length != model.seq_length:
                for variant, contestant in _ours(scale):
                    yield _train(scale, "sequences", model, length, variant, contestant)


def _ours(scale: Scale) -> list[tuple[str, str]]:
    return [("bf16", scale.base), ("fp8", f"{scale.base}+fp8-format=hybrid")]


def _offloaded(scale: Scale, part: str, model: Model, length: int, settings: str) -> Iterator[Job]:
    """The same batch in half as many micro batches, since the gradients of each go to the host and
    the memory that the optimizer leaves is there; all cores work on the update."""
    halves = replace(
        model,
        tokens=2 * model.tokens,
        micro_batches=max(1, model.micro_batches // 2),
        steps=model.steps and "--warmup 1 --rounds 2 --steps 1",
    )
    for variant, contestant in _ours(scale):
        yield _train(
            scale,
            part,
            halves,
            length,
            f"{variant}, optimizer on the CPU",
            f"{contestant}+deepspeed_config={settings}",
            threads=len(os.sched_getaffinity(0)),
        )


def _tests(scale: Scale) -> Iterator[Job]:
    command = (sys.executable, "-m", "pytest", "-q", "-m", "not proof", "--dist", "loadfile")
    yield Job("tests", "", 0, "", "", (*command, "--numprocesses", "4"), 6 * scale.timeout)


def _train(
    scale: Scale,
    part: str,
    model: Model,
    length: int,
    variant: str,
    contestant: str,
    threads: int = 1,
) -> Job:
    command = (
        f"{model.shape} --seq-length {length} --micro-batch {max(1, model.tokens // length)} "
        f"--micro-batches {model.micro_batches} {model.steps or scale.steps} "
        f"--threads {threads} --own-weights --one-at-a-time"
    )
    return Job(
        part,
        model.name,
        length,
        variant,
        contestant,
        (
            sys.executable,
            str(BENCHMARKS / "train.py"),
            *command.split(),
            "--contestants",
            contestant,
        ),
        scale.timeout,
    )
