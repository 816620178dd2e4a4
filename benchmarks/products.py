"""The matrix products of a GPT's training step, timed by themselves.

What a step cannot be faster than, short of leaving products out: forward, and the gradients of
inputs and weights, of every linear map and of attention, at the shapes that they have in the step
and each on tensors of its own, with nothing around them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megatron.config import ModelConfig


def linear_shapes(model: ModelConfig) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """Inputs and outputs of a block's linear maps, and of the head."""
    assert model.hidden_size and model.ffn_hidden_size and model.padded_vocab_size
    assert model.num_attention_heads and model.kv_channels and model.num_query_groups
    hidden, query = model.hidden_size, model.num_attention_heads * model.kv_channels
    kv = model.num_query_groups * model.kv_channels
    inner = model.ffn_hidden_size
    block = [
        (hidden, query + 2 * kv),
        (query, hidden),
        (hidden, inner * (2 if model.gated else 1)),
        (inner, hidden),
    ]
    return block, (hidden, model.padded_vocab_size)


def product_flops(model: ModelConfig, samples: int) -> float:
    """FLOPs of those products: two per multiply-add, attention over the keys that a query sees,
    half of the sequence (Dao 2023, arXiv:2307.08691, section 4.1)."""
    assert model.num_layers and model.seq_length and model.num_attention_heads
    assert model.kv_channels
    block, head = linear_shapes(model)
    weights = model.num_layers * sum(a * b for a, b in block) + head[0] * head[1]
    query = model.num_attention_heads * model.kv_channels
    attention = model.num_layers * query * model.seq_length  # two products, half of the keys
    return 3 * 2.0 * samples * model.seq_length * (weights + attention)


def product_seconds(model: ModelConfig, samples: int, half: bool) -> float:
    """CPU seconds that those products take for one micro batch, on this process's threads.

    Attention is timed as plain batched products over all keys and counted by half, since a causal
    kernel leaves the other half out.

    Args:
        model: the complete model.
        samples: samples of the micro batch.
        half: whether in bfloat16; float32 otherwise.
    """
    dtype = torch.bfloat16 if half else torch.float32
    assert model.num_layers and model.seq_length and model.num_attention_heads
    tokens = samples * model.seq_length
    block, head = linear_shapes(model)

    def linear(inputs: int, outputs: int) -> float:
        x_TI, y_TO = (
            torch.ones(tokens, inputs, dtype=dtype),
            torch.ones(tokens, outputs, dtype=dtype),
        )
        weight_OI = torch.ones(outputs, inputs, dtype=dtype)
        return sum(
            map(
                cpu_seconds,
                (
                    lambda: x_TI @ weight_OI.t(),
                    lambda: y_TO @ weight_OI,
                    lambda: y_TO.t() @ x_TI,
                ),
            )
        )

    heads, length, width = model.num_attention_heads, model.seq_length, model.kv_channels
    q_NSD = torch.ones(samples * heads, length, width, dtype=dtype)  # type: ignore[arg-type]
    scores_NSS = torch.ones(samples * heads, length, length, dtype=dtype)
    scores, mix = (lambda: q_NSD @ q_NSD.mT), (lambda: scores_NSS @ q_NSD)
    # Of each kind three: forward; gradients of the scores and of their inputs.
    attention = (2 * cpu_seconds(scores) + 4 * cpu_seconds(mix)) / 2
    return model.num_layers * (sum(linear(*shape) for shape in block) + attention) + linear(*head)


def cpu_seconds(work: Callable[[], Tensor]) -> float:
    """CPU seconds of a product, the second time that it is done."""
    return list(_timed(work))[1]


def _timed(work: Callable[[], Tensor]) -> Iterator[float]:
    for _ in range(2):
        start = time.process_time()
        work()
        yield time.process_time() - start
