"""QK-clip scales what its definition says, in every layout, and logits obey afterwards."""

import contextlib
import math
import re

import numpy as np
import pytest
import torch
from training_jobs import TINY, run

from megatron.apps.parity.layouts import flags_for, parse_layout
from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, resolve
from megatron.engine.environment import distributed
from megatron.engine.state import owned_slices, set_trained_weights
from megatron.features.latent.attention import LatentAttention
from megatron.features.qk_clip.callback import factors_of
from megatron.model.attention import Attention
from megatron.parallel.shard import shard_of
from megatron.run.run import parse_run
from megatron.training.build import build_trainer
from megatron.training.trainer import Callback

THRESHOLD, ALPHA = 0.02, 0.3
FLAGS = [
    *TINY,
    *(
        "--hidden-dropout 0 --attention-dropout 0 --train-iters 4 --normalization RMSNorm "
        "--position-embedding-type rope --init-method-std 0.1 --optimizer sgd --lr 0.05"
    ).split(),
]
CLIP = f"--qk-clip --qk-clip-alpha {ALPHA} --qk-clip-threshold {THRESHOLD}".split()
KINDS = {
    "heads": [],
    "groups": "--num-query-groups 2".split(),
    "one-group": "--num-query-groups 1 --add-qkv-bias".split(),
    "gated": "--num-query-groups 2 --attention-output-gate --disable-bias-linear".split(),
    "window": "--sliding-window 5 --recompute-granularity selective".split(),
    "latent": (
        "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 6 "
        "--qk-pos-emb-head-dim 4 --v-head-dim 8 --qk-layernorm --disable-bias-linear"
    ).split(),
    "hybrid": (
        "--experimental-attention-variant gated_delta_net --linear-attention-freq [1,0] "
        "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 "
        "--linear-value-head-dim 6 --disable-bias-linear"
    ).split(),
}
LAYOUTS = ("dp2-zero0", "tp2", "tp4", "tp2-sp", "pp2", "cp2", "cp2-a2a", "dp2-zero1", "dp2-zero2",
           "dp2-zero3", "tp2-dp2-zero3", "pp2-dp2-zero1")  # fmt: skip


class Definition(Callback):
    """QK-clip by its definition, on one process at ZeRO 0: whole matrices of logits, and rows of
    weights one head after another."""

    def __init__(self) -> None:
        self.largest: dict[torch.nn.Module, torch.Tensor] = {}

    def watch(self, trainer) -> None:
        for module in trainer.engine.model.modules():
            if isinstance(module, Attention | LatentAttention):
                module.attend = self._watching(module, module.attend)

    def _watching(self, module, attend):
        def watched(q, k, v, scores, *rest):
            if torch.is_grad_enabled():
                width = module.width if isinstance(module, LatentAttention) else module.head_dim
                k_all = k.detach().double().repeat_interleave(q.shape[1] // k.shape[1], 1)
                logits = q.detach().double() @ k_all.transpose(2, 3)
                logits *= scores.scale or 1 / math.sqrt(width)
                distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
                hidden = (distance < 0) | (distance >= (scores.window or 10**6))
                of_heads = logits.masked_fill(hidden, -math.inf).amax((0, 2, 3))
                before = self.largest.get(module)
                self.largest[module] = of_heads if before is None else before.maximum(of_heads)
            return attend(q, k, v, scores, *rest)

        return watched

    @torch.no_grad()
    def after_step(self, trainer, step) -> None:
        for module, of_heads in self.largest.items():
            factors = [min(1.0, THRESHOLD / float(s)) if s > 0 else 1.0 for s in of_heads]
            if isinstance(module, LatentAttention):
                clip_latent(module, factors)
            else:
                clip(module, factors)
        self.largest.clear()


def clip(module, factors: list[float]) -> None:
    width, heads = module.head_dim, len(factors)
    rows = module.qkv.weight.shape[0]
    each = 2 * width if module.gated else width
    groups = (rows - heads * each) // (2 * width)
    tensors = [module.qkv.weight] + ([] if module.qkv.bias is None else [module.qkv.bias])
    for head in range(heads):
        group = head * groups // heads
        factor = min(f for n, f in enumerate(factors) if n * groups // heads == group)
        for tensor in tensors:
            tensor[head * each : head * each + width] *= factor**ALPHA
            if head * groups % heads == 0:
                first = heads * each + group * width
                tensor[first : first + width] *= factor ** (1 - ALPHA)


def clip_latent(module, factors: list[float]) -> None:
    plain, rotated, value = 6, 4, 8
    for head, factor in enumerate(factors):
        first = head * (plain + rotated)
        module.q_up.weight[first : first + plain] *= factor**ALPHA
        module.q_up.weight[first + plain : first + plain + rotated] *= factor
        first = head * (plain + value)
        module.kv_up.weight[first : first + plain] *= factor ** (1 - ALPHA)


def trained(argv: list[str], define: bool = False) -> dict[str, np.ndarray]:
    """Main weights of this rank after training, by name, as a row of each element's place in the
    whole parameter and one of its values; for the pool. Working weights must be their rounding."""
    run_, definition = parse_run(None, argv), Definition()
    with distributed(run_.config.parallel) as mesh:
        trainer = build_trainer(run_, mesh, [definition] if define else [])
        if define:
            definition.watch(trainer)
        trainer.fit()
        engine, weights = trainer.engine, {}
        for own in owned_slices(engine):
            shard = shard_of(own.param)
            numbers = torch.arange(math.prod(shard.canonical_shape)).view(shard.canonical_shape)
            places = shard.cut(numbers, mesh.coordinates).flatten()
            places = places[own.slice.start : own.slice.start + own.slice.numel]
            values = own.get("weight")[: own.slice.numel].detach().double()
            weights[f"{own.name}{shard.part}"] = torch.stack([places.double(), values]).numpy()
        if engine.stage < 3:
            before = {param: param.detach().clone() for param in engine.trained}
            set_trained_weights(engine, lambda own: own.get("weight"))
            assert all(torch.equal(param, values) for param, values in before.items())
        return weights


def whole(parts: list[dict[str, np.ndarray]]) -> dict[str, dict[int, float]]:
    weights: dict[str, dict[int, float]] = {}
    for of_rank in parts:
        for name, (places, values) in of_rank.items():
            name = name.partition("parts")[0]
            weights.setdefault(name, {}).update(zip(places.astype(int), values, strict=True))
    return weights


SAMPLE = {("groups", "tp2")}


@pytest.mark.parametrize("kind, layout", [
    pytest.param(kind, layout, marks=[] if (kind, layout) in SAMPLE else pytest.mark.proof)
    for kind in KINDS for layout in LAYOUTS
    if not (kind == "hybrid" and layout.startswith(("cp", "pp", "tp4")))
    and not (kind == "latent" and "a2a" in layout)
])  # fmt: skip
def test_weights_are_those_of_the_definition(pool, kind, layout):
    """Against one process that clips by the definition; and the clip is not without effect."""
    parsed, argv = parse_layout(layout), [*FLAGS, *KINDS[kind]]
    parts = pool.run(parsed.processes, trained, [*argv, *CLIP, *flags_for(parsed)], timeout=300)
    clipped = whole(parts)
    alone = [*argv, "--zero-stage", "0"]
    expected = whole(pool.run(1, trained, alone, True, timeout=300))
    plain = whole(pool.run(1, trained, alone, timeout=300))
    assert clipped.keys() == expected.keys()
    moved = 0.0
    for name, values in expected.items():
        ours = clipped[name]
        assert ours.keys() == values.keys(), name
        for place, value in values.items():
            assert ours[place] == pytest.approx(value, rel=2e-4, abs=2e-6), (name, place)
            moved = max(moved, abs(plain[name][place] - value))
    assert moved > 1e-2


PRECISIONS = {
    "fp32": (["--zero-stage", "0"], 1, 1e-4),
    "bf16": (["--zero-stage", "1", "--bf16", "--optimizer", "adam"], 2, 2e-2),
    "fp16": (["--zero-stage", "0", "--fp16", "--optimizer", "adam",
             "--initial-loss-scale", "1024"], 1, 2e-2),
    "stored": ("--zero-stage 2 --bf16 --optimizer adam --use-precision-aware-optimizer "
               "--main-params-dtype bf16 --exp-avg-dtype bf16".split(), 2, 2e-2),
}  # fmt: skip


def largest_after(argv: list[str]) -> list[float]:
    """The largest logit of the first layer with attention, whose inputs the clip does not change,
    on the samples of the first step, before it and after it; for the pool."""
    run_ = parse_run(None, [*argv, "--train-iters", "1", "--lr", "1e-30", "--weight-decay", "0"])
    with distributed(run_.config.parallel) as mesh:
        trainer = build_trainer(run_, mesh)
        engine, largest = trainer.engine, []
        definition = Definition()
        definition.watch(trainer)

        def of_first() -> float:
            return float(next(iter(definition.largest.values())).max())

        class Largest(Callback):
            def after_step(self, trainer, step) -> None:
                largest.append(of_first())

        trainer.callbacks = (Largest(), *trainer.callbacks)
        trainer.fit()
        definition.largest.clear()
        trainer.iteration = trainer.consumed_samples = 0
        engine.prepare(1)
        with contextlib.closing(trainer._training_batches()) as batches:
            for _ in range(4 // mesh.samples.size):
                engine.model(engine.spec.begin(next(batches)))
        return [*largest, of_first()]


@pytest.mark.parametrize("kind, precision", [
    pytest.param(*case, marks=[] if case == ("latent", "bf16") else pytest.mark.proof)
    for case in (*((kind, "fp32") for kind in KINDS), ("latent", "bf16"), ("groups", "bf16"),
                 ("heads", "fp16"), ("heads", "stored"))
])  # fmt: skip
def test_logits_obey_after_the_clip(pool, kind, precision):
    """Logits of the same samples, from weights that nothing but the clip has changed."""
    flags, processes, error = PRECISIONS[precision]
    argv = [*FLAGS, *KINDS[kind], *CLIP, *flags]
    results = pool.run(processes, largest_after, argv, timeout=300)
    before, after = (max(values) for values in zip(*results, strict=True))
    assert before > 2 * THRESHOLD
    assert after == pytest.approx(THRESHOLD, rel=error)


@pytest.mark.parametrize("logits", [[-2.0, -0.5], [0.0, -math.inf], [math.nan, math.inf], [9, 100]])
def test_factors_follow_from_large_finite_logits_only(logits):
    """A factor below 1 only above the threshold: logits below 0 would give a negative one."""
    (largest_LA,) = torch.tensor([[logits]])
    factors = factors_of(largest_LA, 10.0)
    assert factors[0].tolist() == pytest.approx([0.1 if v == 100 else 1.0 for v in logits])


KEYS_AS_VALUES = "--global-keys-as-values --sliding-window 5 --window-attn-skip-freq 2".split()


@pytest.mark.parametrize("words", [[], KEYS_AS_VALUES], ids=["heads", "keys-as-values"])
def test_log_lines_have_the_largest_logit(words):
    """A run that measures and does not clip trains as without."""
    argv = [*FLAGS, "--zero-stage", "0", "--log-interval", "1", *words]
    text, error = run([*argv, "--log-max-attention-logit"])
    assert error is None
    shown = [float(number) for number in re.findall(r"max attention logit: (\S+)", text)]
    assert len(shown) == 4 and min(shown) > 0.02
    plain, _ = run(argv)
    losses = [re.findall(r"lm loss: (\S+)", each) for each in (text, plain)]
    assert losses[0] == losses[1] and "max attention logit" not in plain


@pytest.mark.parametrize("words, told", [
    (["--qk-layernorm"], "--qk-clip contradicts --qk-layernorm"),
    (["--attn-logit-softcapping", "50"], "--qk-clip contradicts --attn-logit-softcapping"),
    (["--optimizer", "schedule_free"], "--qk-clip contradicts --optimizer schedule_free"),
    (KEYS_AS_VALUES, "--qk-clip contradicts --global-keys-as-values"),
])  # fmt: skip
def test_bad_input(words, told):
    with pytest.raises(ConfigError, match=told):
        resolve(FlagParser(*FLAG_CLASSES).settings([*FLAGS, *CLIP, *words]), 1)
