"""Reconciliation of a translated command: removes flags that a run refuses together, and converts
units that depend on other flags."""

from __future__ import annotations

from megatron.apps.migration.translation import KeyOutcome, Translation

_STEPS = ("--lr-warmup-iters", "--lr-wsd-decay-iters", "--lr-decay-iters")
_EIGHT_BITS = "moments in 8 bits need ZeRO 1 or 2; they are in float32"
_LEFT_OUT = (
    (
        "--use-dora",
        "--qlora",
        "DoRA needs the lengths of the base's rows, which --qlora keeps in 4 bits",
    ),
    ("--exp-avg-dtype", "--zero-stage 3", _EIGHT_BITS),
    ("--exp-avg-sq-dtype", "--zero-stage 3", _EIGHT_BITS),
    ("--use-precision-aware-optimizer", "--zero-stage 3", _EIGHT_BITS),
)
"""Flags to leave out, each with the flag with which it cannot be combined, and the reason."""


def reconcile(t: Translation) -> None:
    """Change a command so that a run accepts it. Record each change in its key's outcome."""
    for flag, other, why in _LEFT_OUT:
        name, *values = other.split()
        if t.words.get(flag) and t.words.get(name) == (name, *values):
            del t.words[flag]
            t.outcomes[t.origins[flag]] = KeyOutcome("lost", why)
    if _value(t, "--tensor-model-parallel-size") == 1 and t.words.pop("--sequence-parallel", ()):
        t.outcomes[t.origins["--sequence-parallel"]] = KeyOutcome(
            "harmless", "there is one tensor-parallel rank"
        )
    if (
        _value(t, "--pipeline-model-parallel-size") > 1
        and t.words.get("--zero-stage", ("", ""))[1] == "3"
    ):
        t.words["--zero-stage"] = ("--zero-stage", "1")
        t.outcomes[t.origins["--zero-stage"]] = KeyOutcome(
            "lost",
            "pipelines have ZeRO 0 to 2: --zero-stage 1, weights are not divided over replicas",
        )
    if t.has("--epochs"):
        for flag in _STEPS:
            _in_samples(t, flag)


def _in_samples(t: Translation, flag: str) -> None:
    """Convert a flag from steps to samples, the unit of runs with --epochs."""
    words = t.words.pop(flag, None)
    if not words:
        return
    samples, replicas = int(words[1]), _replicas(t)
    if t.words.get("--global-batch-size"):
        samples *= int(t.words["--global-batch-size"][1])
    else:
        samples *= (
            _value(t, "--micro-batch-size") * _value(t, "--num-accumulation-steps") * replicas
        )
    where = "" if t.processes else " on one process: give --processes"
    key = t.origins[flag]
    t.outcomes.pop(key, None)
    t.put(key, flag.replace("iters", "samples"), samples, note=f"{words[1]} steps{where}")


def _value(t: Translation, flag: str) -> int:
    words = t.words.get(flag)
    return int(words[1]) if words else 1


def _replicas(t: Translation) -> int:
    model = _value(t, "--tensor-model-parallel-size") * _value(t, "--pipeline-model-parallel-size")
    return max(1, (t.processes or 1) // (model * _value(t, "--context-parallel-size")))
