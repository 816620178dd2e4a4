#!/usr/bin/env python
"""Time of the experts of a layer on a CPU, forward and backward, next to their matrix
products alone and to transformers.

    python benchmarks/experts.py
    python benchmarks/experts.py --shapes fine --threads 2 --dtype bfloat16 --rounds 9

Choices and weights are drawn; the router and its losses are not part of it. ``products`` are
F.linear and its gradients for every expert on rows that are ready, ``ours`` and ``separate`` what
a layer runs on one rank and on several, the others transformers' experts by the name of its
``experts_implementation``. All take turns within every round and keep freed memory as the trainer
does; shown is the median of CPU milliseconds, and the median of the ratios to ``products`` of the
same round. An implementation that copies the weights of every row is left out where they take more
than 4 GiB.

Shapes: T tokens, E experts, K choices, R rows, H hidden, F inner width.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from megatron.config.blocks import MLPConfig
from megatron.engine import environment
from megatron.features.experts.compute import combine, dispatch, expert_mlp, order
from megatron.features.experts.linear import ExpertLinear
from megatron.model.activations import activation_of
from megatron.parallel.shard import Init
from megatron.parallel.tensor_parallel import TensorParallel

MOST_COPIED = 2**32
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
SWIGLU = activation_of(MLPConfig(ffn_hidden_size=1, activation="swiglu", bias=False))


class Sizes(NamedTuple):
    experts: int
    choices: int
    hidden: int
    inner: int
    tokens: int


SHAPES = {
    "mixtral": Sizes(8, 2, 512, 1792, 1024),
    "qwen3-moe": Sizes(128, 8, 512, 192, 1024),
    "fine": Sizes(64, 8, 384, 192, 2048),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measures layers of experts on a CPU.")
    add = parser.add_argument
    add("--shapes", type=lambda text: text.split(","), default=list(SHAPES))
    add("--threads", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2])
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    environment.keep_freed_memory()
    print(f"torch {torch.__version__}, {options.dtype}, CPU ms (ratio to products)")
    for name in options.shapes:
        print(name, *(f"{field} {size}" for field, size in SHAPES[name]._asdict().items()))
        steps = contestants(SHAPES[name], getattr(torch, options.dtype), "qwen3" in name)
        for threads in options.threads:
            torch.set_num_threads(threads)
            times = measure(steps, options.rounds)
            for contestant, seconds in times.items():
                ratios = [s / p for s, p in zip(seconds, times["products"], strict=True)]
                ratio, ms = statistics.median(ratios), statistics.median(seconds) * 1e3
                print(f"  {threads} threads  {contestant:24} {ms:8.1f}  {ratio:5.2f}", flush=True)


def measure(steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each in every round but the first."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            start = time.process_time()
            step()
            if number:
                times[name].append(time.process_time() - start)
    return times


def contestants(sizes: Sizes, dtype: torch.dtype, qwen: bool) -> dict[str, Callable[[], Any]]:
    """A forward and a backward pass of each; raises AssertionError if results differ."""
    torch.manual_seed(0)
    count, hidden, inner = sizes.experts, sizes.hidden, sizes.inner
    how = dict(bias=False, init=Init(), tp=TensorParallel())
    up = ExpertLinear(count, (inner, inner), hidden, **how)
    down = ExpertLinear(count, (hidden,), inner, **how)
    for param in (up.weight, down.weight):
        param.data = (torch.randn(param.shape) * 0.02).to(dtype)
    x_TH = torch.randn(sizes.tokens, hidden, dtype=dtype, requires_grad=True)
    scores_TE = torch.rand(sizes.tokens, count).softmax(-1)
    weights_TK, experts_TK = scores_TE.topk(sizes.choices)
    weights_TK = weights_TK.requires_grad_()
    grad_TH = torch.randn_like(x_TH)

    def trained(y_TH: Tensor, *params: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y_TH.to(dtype), (x_TH, weights_TK, *params), grad_TH)

    def ours() -> tuple[Tensor, ...]:
        y_TH = expert_mlp(x_TH, weights_TK, order(experts_TK, count), up, down, SWIGLU)
        return trained(y_TH, up.weight, down.weight)

    def separate() -> tuple[Tensor, ...]:
        rows = order(experts_TK, count)
        assert rows.sizes is not None
        y_RH = down(SWIGLU(up(dispatch(x_TH, rows), rows.sizes)), rows.sizes)
        return trained(combine(y_RH, weights_TK, rows), up.weight, down.weight)

    rows = order(experts_TK, count)
    assert rows.sizes is not None
    steps: dict[str, Callable[[], Any]] = {
        "products": products(dispatch(x_TH.detach(), rows).split(rows.sizes), up, down),
        "ours": ours,
        "separate": separate,
    }
    copied = x_TH.element_size() * sizes.tokens * sizes.choices * 2 * inner * hidden
    for name in IMPLEMENTATIONS:
        if name == "batched_mm" and copied > MOST_COPIED:
            print(f"  transformers {name}: left out, copies {copied / 2**30:.0f} GiB")
            continue
        if qwen:
            config: Any = Qwen3MoeConfig(
                hidden_size=hidden, moe_intermediate_size=inner, num_experts=count
            )
        else:
            config = MixtralConfig(
                hidden_size=hidden, intermediate_size=inner, num_local_experts=count
            )
        config._experts_implementation = name
        theirs = (Qwen3MoeExperts if qwen else MixtralExperts)(config)
        theirs.gate_up_proj.data, theirs.down_proj.data = up.weight.data, down.weight.data

        def step(theirs: Any = theirs) -> tuple[Tensor, ...]:
            y_TH = theirs(x_TH, experts_TK, weights_TK)
            return trained(y_TH, theirs.gate_up_proj, theirs.down_proj)

        steps[f"transformers {name}"] = step
        for one, other in zip(step(), ours(), strict=True):
            error = (one - other).float().norm() / one.float().norm()
            assert error < (1e-5 if dtype == torch.float32 else 0.02), (name, error)
    return steps


def products(
    rows: Sequence[Tensor], up: ExpertLinear, down: ExpertLinear
) -> Callable[[], tuple[Tensor, ...]]:
    """F.linear of each expert's rows by both matrices, and all gradients of them."""
    x = [each.clone().requires_grad_() for each in rows]
    a = [torch.randn(len(each), down.weight.shape[2], dtype=each.dtype) for each in rows]
    pairs = [
        *zip(x, (each.detach().requires_grad_() for each in up.weight), strict=True),
        *zip(
            (each.requires_grad_() for each in a),
            (each.detach().requires_grad_() for each in down.weight),
            strict=True,
        ),
    ]
    leaves = [leaf for pair in pairs for leaf in pair]
    grads = [torch.randn(len(x), len(weight), dtype=x.dtype) for x, weight in pairs]

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad([F.linear(*pair) for pair in pairs], leaves, grads)

    return step


if __name__ == "__main__":
    main()
