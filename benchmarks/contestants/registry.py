"""The contestants by name."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any, Protocol

from contestants.setting import Setting


class AfterStep(Protocol):
    """Called after every step with its loss and the norm of its gradients, scalar tensors on the
    device; None without one. Raises :class:`NoMoreSteps` after the last one."""

    def __call__(self, loss: Any, grad_norm: Any = None, /) -> None: ...


class NoMoreSteps(BaseException):
    """Nobody wants another step of this contestant."""


MAIN_WEIGHTS = "bf16 weights, fp32 main weights"
AUTOCAST = "bf16 autocast, fp32 weights"


@dataclass(frozen=True)
class Contestant:
    """A way to train the model.

    Attributes:
        module: of this package; its ``run(contestant, setting, after_step)`` trains without end.
        numerics: dtypes with ``--dtype bf16``.
        needs: modules without which it is skipped.
        stage: ZeRO stage.
        compiled: whether torch.compile is used.
        flags: flags of the trainer next to those of the setting.
        reference: of dpo, whether the reference runs in every step.
        experts: how transformers computes experts; empty for as it chooses.
        adam: which Adam updates states in main memory at ZeRO 3, torch's or DeepSpeed's own, which
            is compiled; empty where nothing is offloaded.
    """

    module: str
    numerics: str
    needs: tuple[str, ...] = ()
    stage: int = 0
    compiled: bool = False
    flags: tuple[str, ...] = ()
    reference: bool = False
    experts: str = ""
    adam: str = ""

    def missing(self) -> list[str]:
        """Name the packages that it needs and that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]

    def numerics_in(self, dtype: str) -> str:
        """Its dtypes, for people."""
        return self.numerics if dtype == "bf16" else "fp32"

    def run(self, setting: Setting, after_step: AfterStep) -> None:
        """Trains until ``after_step`` raises :class:`NoMoreSteps`, or ends the process."""
        module = importlib.import_module(f"contestants.{self.module}")
        with contextlib.suppress(NoMoreSteps):
            module.run(self, setting, after_step)


OURS = "ours-zero"
FLOOR = "matmuls"

CONTESTANTS: dict[str, Contestant] = {
    "ours-zero0": Contestant("ours", AUTOCAST, stage=0),
    "ours-zero1": Contestant("ours", MAIN_WEIGHTS, stage=1),
    "ours-zero2": Contestant("ours", MAIN_WEIGHTS, stage=2),
    "ours-zero3": Contestant("ours", MAIN_WEIGHTS, stage=3),
    "hf-deepspeed": Contestant(
        "hf_deepspeed", MAIN_WEIGHTS, needs=("transformers", "deepspeed"), stage=1
    ),
    **{
        f"hf-deepspeed-{kind}": Contestant(
            "hf_deepspeed", MAIN_WEIGHTS, ("transformers", "deepspeed"), stage=1, experts=kind
        )
        for kind in ("eager", "batched_mm", "grouped_mm")
    },
    **{
        f"hf-deepspeed-offload-{adam}": Contestant(
            "hf_deepspeed", MAIN_WEIGHTS, ("transformers", "deepspeed"), stage=3, adam=adam
        )
        for adam in ("torch", "cpuadam")
    },
    "hf-trainer": Contestant("hf_trainer", AUTOCAST, needs=("transformers", "accelerate")),
    "trl": Contestant("trl_dpo", AUTOCAST, needs=("trl", "datasets")),
    "trl-reference": Contestant("trl_dpo", AUTOCAST, needs=("trl", "datasets"), reference=True),
    "plain": Contestant("plain", MAIN_WEIGHTS),
    "plain-compiled": Contestant("plain", MAIN_WEIGHTS, compiled=True),
    FLOOR: Contestant("matmuls", "bf16 products alone"),
}

DEFAULT = (
    "ours-zero0",
    "ours-zero1",
    "ours-zero1+torch-compile",
    "ours-zero2",
    "ours-zero3",
    "hf-deepspeed",
    "hf-trainer",
    "plain",
    "plain-compiled",
    FLOOR,
)


def contestant(name: str) -> Contestant:
    """The contestant of a name; ``ours-zero1+torch-compile+lr=1`` adds flags to this trainer's.

    Raises:
        ValueError: no contestant has that name.
    """
    base, *extras = name.split("+")
    found = CONTESTANTS.get(base)
    if found is None:
        raise ValueError(f"no contestant {base!r}; there are {', '.join(CONTESTANTS)}")
    if not extras:
        return found
    if not base.startswith(OURS):
        raise ValueError(f"{name}: flags can be added to {OURS}N only, {base} has none")
    flags: list[str] = []
    for extra in extras:
        flag, equals, value = extra.partition("=")
        flags += [f"--{flag}", value] if equals else [f"--{flag}"]
    return Contestant(found.module, found.numerics, found.needs, found.stage, flags=tuple(flags))


def is_ours(name: str) -> bool:
    """True for a variant of this trainer."""
    return name.startswith(OURS)


def is_peer(name: str) -> bool:
    """True for something that this trainer is compared with."""
    return not is_ours(name) and name != FLOOR
