"""Compositions drawn from what the configuration accepts."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron.apps.parity.layouts import flags_for, parse_layout
from megatron.apps.parity.ranks import environment
from megatron.config import ConfigError
from megatron.config.layouts import Layout
from megatron.run.run import parse_run

BASE = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr-decay-style constant "
    "--tokenizer-type NullTokenizer --vocab-size 99 --mock-data --num-workers 0 --eval-iters 0 "
    "--peak-tflops 1 --log-interval 1000 --hidden-dropout 0 --attention-dropout 0"
).split()
STEPS = 4

LAYOUTS = (
    "dp1 dp2 dp4 tp2 tp4 tp2-sp tp4-sp tp2-dp2 tp2-sp-dp2 pp2 pp4 pp2-dp2 tp2-pp2 tp2-sp-pp2 "
    "pp2-interleaved pp2-interleaved-dp2 tp2-sp-pp2-interleaved pp2-dualpipev pp2-dualpipev-dp2 "
    "tp2-sp-pp2-dualpipev pp4-zbh1 tp2-sp-pp2-zbh1 pp2-dualpipev_zb cp2 cp2-a2a cp2-allgather cp4 "
    "cp4-a2a+p2p cp2-dp2 cp2-tp2-sp cp2-a2a-tp2-sp cp2-pp2 ep2-dp2 ep2-dp4 ep4-dp4 ep2-dp2-tp2 "
    "ep2-dp2-pp2 ep2-etp1-tp2"
).split()
PRECISIONS = {
    "fp32": (6, ""),
    "bf16": (3, "--bf16"),
    "bf16-sums": (1, "--bf16 --accumulate-allreduce-grads-in-fp32"),
    "bf16-states": (1, "--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16"),
    "fp16": (1, "--fp16 --initial-loss-scale 1024"),
}
_LENGTHS = {
    "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 16,
    "schedule_type": "fixed_discrete", "enabled": True,
    "schedule_config": {"difficulty": [8, 16], "max_step": [2]},
}  # fmt: skip

OPTIONS: dict[str, Sequence[tuple[int, str]]] = {
    "attention": [
        (8, ""),
        (3, "--num-query-groups 2"),
        (2, "--num-query-groups 1"),
        (
            2,
            "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 6 --qk-pos-emb-head-dim 4 "
            "--v-head-dim 8 --position-embedding-type rope --normalization RMSNorm",
        ),
        (
            1,
            "--multi-latent-attention --kv-lora-rank 16 --q-lora-rank 24 --qk-head-dim 6 "
            "--qk-pos-emb-head-dim 4 --v-head-dim 8 --position-embedding-type rope --qk-layernorm "
            "--normalization RMSNorm --rotary-scaling-factor 2.5 --mscale 0.8 --mscale-all-dim 0.7",
        ),
        (
            1,
            "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
            "--linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 8 "
            "--linear-value-head-dim 6",
        ),
    ],
    "positions": [
        (4, ""),
        (6, "--position-embedding-type rope"),
        (1, "--position-embedding-type alibi"),
        (1, "--position-embedding-type none"),
        (1, "--position-embedding-type sinusoidal"),
        (1, "--position-embedding-type rope --rotary-percent 0.5 --rotary-interleaved"),
        (1, "--position-embedding-type rope --use-rope-scaling"),
    ],
    "norm": [
        (4, ""),
        (5, "--normalization RMSNorm"),
        (1, "--apply-layernorm-1p"),
        (1, "--normalization RMSNorm --apply-layernorm-1p --post-norm"),
    ],
    "qk_norm": [(5, ""), (2, "--qk-layernorm"), (1, "--qk-layernorm-whole"), (1, "--qk-l2-norm")],
    "mlp": [
        (4, ""),
        (4, "--swiglu"),
        (1, "--relu"),
        (1, "--squared-relu"),
        (1, "--xielu"),
        (1, "--glu-activation geglu"),
        (1, "--swiglu --sub-norm"),
        (1, "--quick-geglu --glu-linear-offset 1 --activation-func-clamp-value 0.02"),
    ],
    "experts": [
        (7, ""),
        (2, "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16"),
        (
            1,
            "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.05 --moe-z-loss-coeff 0.01",
        ),
        (
            1,
            "--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid "
            "--moe-router-enable-expert-bias --moe-shared-expert-intermediate-size 32",
        ),
        (1, "--num-experts 4 --moe-router-topk 1 --moe-layer-freq 2"),
    ],
    "bias": [(4, ""), (3, "--disable-bias-linear"), (1, "--disable-bias-linear --add-qkv-bias")],
    "residual": [
        (6, ""),
        (1, "--parallel-residual"),
        (1, "--parallel-residual --shared-parallel-norm"),
        (1, "--residual-multiplier 0.5"),
        (1, "--fp32-residual-connection"),
    ],
    "window": [
        (6, ""),
        (1, "--sliding-window 5"),
        (1, "--sliding-window 5 --window-attn-skip-freq 2"),
        (1, "--attention-chunk-size 5"),
    ],
    "scores": [
        (7, ""),
        (1, "--attn-logit-softcapping 5"),
        (1, "--softmax-type learnable"),
        (1, "--attention-output-gate"),
        (1, "--query-pre-attn-scalar 6"),
    ],
    "embedding": [
        (4, ""),
        (4, "--untie-embeddings-and-output-weights"),
        (1, "--scale-embeddings"),
        (1, "--embed-layernorm"),
        (1, "--lm-head-bias --untie-embeddings-and-output-weights"),
    ],
    "logits": [
        (6, ""),
        (1, "--final-logit-softcapping 3"),
        (1, "--logits-scaling 2"),
        (1, "--z-loss-coeff 0.01"),
        (1, "--logits-chunk-mib 1"),
    ],
    "ahead": [
        (7, ""),
        (1, "--mtp-num-layers 1"),
        (1, "--mtp-num-layers 2 --mtp-use-repeated-layer --mtp-loss-scaling-factor 0.7"),
    ],
    "documents": [
        (5, ""),
        (2, "--reset-position-ids --reset-attention-mask --eod-mask-loss"),
        (1, "--eod-mask-loss"),
    ],
    "order": [(7, ""), (1, f"--curriculum-learning {json.dumps(_LENGTHS, separators=(',', ':'))}")],
    "recompute": [
        (6, ""),
        (1, "--recompute-activations"),
        (1, "--recompute-granularity full"),
        (1, "--recompute-granularity full --recompute-method block --recompute-num-layers 1"),
    ],
    "adapters": [(8, ""), (1, "--lora --lora-rank 4"), (1, "--lora --lora-rank 4 --use-dora")],
    "optimizer": [
        (7, ""),
        (1, "--optimizer sgd"),
        (1, "--optimizer muon --muon-fp32-matmul-prec highest"),
        (1, "--optimizer lion"),
        (1, "--optimizer soap"),
        (1, "--optimizer adaptive_muon --muon-fp32-matmul-prec highest"),
        (1, "--optimizer ademamix"),
        (1, "--cautious-update"),
    ],
    "decay": [(4, "--weight-decay 0.1"), (1, "--weight-decay 0")],
    "clip": [(4, ""), (1, "--clip-grad 0"), (1, "--clip-grad 0.1")],
    "averages": [(6, ""), (1, "--ema-decay 0.8"), (1, "--swa-start-iter 1 --swa-interval 1")],
    "qk_clip": [(7, ""), (1, "--qk-clip --qk-clip-threshold 1")],
    "width": [(7, ""), (1, "--use-mup --mup-base-hidden-size 16")],
    "partition": [(7, ""), (1, "--pipeline-partition parameters")],
}
"""Weights and flags of each option. The first is what is left out when a failure is made smaller,
where its flags are none."""


@dataclass(frozen=True)
class Composition:
    """A run to compare with one process.

    Attributes:
        seed: what it was drawn from.
        layout: its name, with ZeRO's stage.
        precision: a key of ``PRECISIONS``.
        options: the flags chosen of each option that adds some.
        micro_batch: samples of a micro batch; ``times`` the fewest micro batches of the schedule.
        layers: blocks of the model.
        resume: steps before the run is stopped and continued.
    """

    seed: int
    layout: str
    precision: str
    options: tuple[tuple[str, str], ...]
    micro_batch: int
    times: int
    layers: int
    resume: int

    @property
    def parsed(self) -> Layout:
        return parse_layout(self.layout)

    def model_flags(self) -> list[str]:
        """Flags of the model, the data and the batch, the same for every layout."""
        layout, flags = self.parsed, [*BASE, "--num-layers", str(self.layers)]
        batch = self.micro_batch * self.times * layout.fewest_micro_batches * layout.data
        flags += ["--micro-batch-size", str(self.micro_batch), "--global-batch-size", str(batch)]
        flags += ["--train-iters", str(STEPS), "--lr", "1e-3"]
        return flags + [word for _, text in self.options for word in text.split(" ")]

    def flags(self) -> list[str]:
        """All flags of the run."""
        return [*self.model_flags(), *self.precision_flags(), *flags_for(self.parsed)]

    def precision_flags(self) -> list[str]:
        return PRECISIONS[self.precision][1].split()

    def without(self, option: str) -> Composition:
        """Return the composition without the flags of an option."""
        kept = tuple(each for each in self.options if each[0] != option)
        return replace(self, options=kept)

    def smaller(self) -> Iterator[Composition]:
        """Compositions with one thing less, to find what a failure needs."""
        yield from (self.without(option) for option, _ in self.options)
        if self.precision != "fp32":
            yield replace(self, precision="fp32")
        if self.times > 1:
            yield replace(self, times=1)
        if self.micro_batch > 1:
            yield replace(self, micro_batch=1)
        tokens = self.layout.split("-")
        for at in range(len(tokens)):
            if len(tokens) > 1:
                yield replace(self, layout="-".join(tokens[:at] + tokens[at + 1 :]))

    def __str__(self) -> str:
        words = [f"seed {self.seed}", self.layout, self.precision, *(t for _, t in self.options)]
        return ", ".join(words)


def drawn(seed: int) -> Composition:
    """Draw a composition that the configuration accepts; the same for the same seed."""
    attempts = (_drawn(seed, attempt) for attempt in itertools.count())
    return next(each for each in attempts if refusal(each) is None)


def _drawn(seed: int, attempt: int) -> Composition:
    draw = random.Random(f"{seed}/{attempt}")
    name = draw.choice(LAYOUTS)
    parsed = parse_layout(name)
    stage = draw.choice((0, 1) if parsed.pipeline > 1 else (0, 1, 2, 3))
    choices = {
        option: draw.choices([text for _, text in values], [weight for weight, _ in values])[0]
        for option, values in OPTIONS.items()
    }
    if parsed.expert > 1 and not choices["experts"]:
        choices["experts"] = OPTIONS["experts"][1 + draw.randrange(len(OPTIONS["experts"]) - 1)][1]
    precision = draw.choices(list(PRECISIONS), [weight for weight, _ in PRECISIONS.values()])[0]
    stages = parsed.pipeline * parsed.chunks
    return Composition(
        seed,
        f"{name}-zero{stage}" if stage else name,
        precision,
        tuple((option, text) for option, text in choices.items() if text),
        draw.choice((1, 2)),
        draw.choice((1, 1, 2)) if stages > 1 else draw.choice((1, 2, 3)),
        max(2, stages) * draw.choice((1, 2)) if stages <= 2 else 2 * stages,
        draw.randrange(1, STEPS),
    )


def refusal(composition: Composition) -> str | None:
    """Return the reason for which the configuration refuses a composition, or its model on one
    process; None if both are accepted."""
    try:
        with environment({"WORLD_SIZE": str(composition.parsed.processes)}):
            parse_run(None, composition.flags())
        with environment({"WORLD_SIZE": "1"}):
            parse_run(None, composition.model_flags())
    except ConfigError as error:
        return str(error)
    return None
