"""A whole GPT cut over 2 and 4 ranks, with and without sequence parallelism, against one process,
float64: loss, every gradient and their norm."""

from dataclasses import dataclass
from functools import cache
from itertools import product

import pytest
import torch
import torch.distributed as dist
from configs import model_config, run_config
from gpt_forward import forward
from pool import tensor_group
from samples import sampled
from torch import Tensor

from megatron.config import ParallelConfig
from megatron.engine.update.optimizer import gradient_norm
from megatron.families import build_model
from megatron.model.layer_list import LayerStack, initialise
from megatron.parallel.loss_head import Targets
from megatron.parallel.mesh import Mesh
from megatron.parallel.shard import Init, shard_of
from megatron.parallel.tensor_parallel import TensorParallel

VOCAB, BATCH, LENGTH = 50, 3, 16

LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
MODELS: dict[str, dict] = {
    "gpt2": {},
    "llama": LLAMA,
    "gpt2-untied": {"untie_embeddings_and_output_weights": True},
    "gpt2-erf": {"bias_gelu_fusion": False},
    "gpt2-squared-relu": {"squared_relu": True},
    "llama-tied": LLAMA | {"untie_embeddings_and_output_weights": False},
    "bloom": {
        "position_embedding_type": "alibi", "embed_layernorm": True, "parallel_residual": True,
        "relu": True,
    },
    "gemma2": {
        "position_embedding_type": "rope", "normalization": "RMSNorm", "apply_layernorm_1p": True,
        "post_norm": True, "scale_embeddings": True, "glu_activation": "geglu",
        "add_bias_linear": False, "sliding_window": 5, "window_attn_skip_freq": 2,
        "query_pre_attn_scalar": 6.0, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "neox": {
        "position_embedding_type": "rope", "rotary_percent": 0.5, "parallel_residual": True,
        "shared_parallel_norm": True, "qk_layernorm": True,
        "untie_embeddings_and_output_weights": True,
    },
    "qwen3": LLAMA | {"qk_layernorm": True, "sliding_window": 4},
    "llama-half-rotary-qkv-bias": LLAMA | {"rotary_percent": 0.5, "add_qkv_bias": True},
    "hunyuan-head-bias": LLAMA | {
        "qk_layernorm": True, "qk_layernorm_after_rope": True, "lm_head_bias": True,
    },
    "llama-attention-bias": LLAMA | {"add_attention_bias": True},
    "gptj": {
        "position_embedding_type": "rope", "rotary_percent": 0.5, "rotary_interleaved": True,
        "parallel_residual": True, "shared_parallel_norm": True, "add_bias_linear": False,
        "add_mlp_bias": True, "lm_head_bias": True,
    },
    "gpt-neo": {
        "add_bias_linear": False, "add_mlp_bias": True, "add_proj_bias": True,
        "query_pre_attn_scalar": 1.0, "sliding_window": 4, "window_attn_skip_freq": "[0,1]",
    },
    "xglm": {
        "position_embedding_type": "sinusoidal", "position_embedding_offset": 2,
        "scale_embeddings": True,
    },
    "olmo": LLAMA | {
        "qk_layernorm": True, "qk_layernorm_whole": True, "clip_qkv": 1.0, "pre_norm": False,
        "post_norm": True,
    },
    "granite": LLAMA | {
        "embedding_multiplier": 3.0, "logits_scaling": 2.5, "residual_multiplier": 0.3,
        "query_pre_attn_scalar": 7.0,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A cell of the table."""

    model: str
    size: int = 1
    sequence: bool = False
    kv_heads: int = 8
    recompute: str | None = None
    documents: bool = False
    dropout: float = 0.0

    def __str__(self) -> str:
        words = [self.model, f"tensor{self.size}", f"kv{self.kv_heads}"]
        words += ["sequence"] * self.sequence + ["documents"] * self.documents
        return "-".join(words + [self.recompute] * bool(self.recompute))


@dataclass
class Result:
    """Loss, gradients by canonical name, joined from all ranks, and their norm."""

    loss: float
    gradients: dict[str, Tensor]
    norm: float


def build(case: Case, tp: TensorParallel) -> LayerStack:
    """The model, all of its values wide and random, biases and norms too, so that every gradient
    is large."""
    shape = {
        "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 8,
        "num_query_groups": case.kv_heads, "kv_channels": 4, "seq_length": LENGTH,
        "max_position_embeddings": LENGTH, "make_vocab_size_divisible_by": 8,
        "attention_dropout": case.dropout, "hidden_dropout": case.dropout,
        "attention_backend": "eager",
    }  # fmt: skip
    parallel = ParallelConfig(
        tensor_model_parallel_size=case.size,
        sequence_parallel=case.sequence,
        recompute_granularity=case.recompute,
        recompute_method="uniform" if case.recompute == "full" else None,
    )
    run = run_config(model=model_config(**(shape | MODELS[case.model])), parallel=parallel)
    model = build_model(run.with_vocabulary(VOCAB).model, parallel, tp).double()
    for name, param in model.canonical_parameters():
        param.init = Init(std=0.3)
        initialise(name, param, 1234, tp.coordinates)
    return model


def backward(case: Case, model: LayerStack, tp: TensorParallel) -> Tensor:
    """The loss of a batch, after its backward pass."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=draw)
    mask = (torch.rand(BATCH, LENGTH, generator=draw) < 0.8).double()
    inputs = [tokens[:, :-1]]
    if case.documents:
        ids = (torch.rand(BATCH, LENGTH, generator=draw) < 0.2).long().cumsum(1)
        places = torch.arange(LENGTH).expand(BATCH, -1)
        starts = torch.where(ids.diff(dim=1, prepend=ids[:, :1] - 1) != 0, places, 0)
        inputs += [places - starts.cummax(1).values, ids]
    targets = Targets(tokens[:, 1:], mask)
    loss = forward(model, *inputs, dropout_seed=5 if case.dropout else None, targets=targets)
    loss.backward()
    return loss.detach()


def join_gradients(model: LayerStack, tp: TensorParallel) -> dict[str, Tensor]:
    """Whole gradients by canonical name, from the copies that count. Every other copy must be the
    same: bit by bit where a collective made it, else nearly, for ranks compute it each."""
    group, joined = tp.group, {}
    for name, param in model.canonical_parameters():
        shard = shard_of(param)
        shares = [param.grad.contiguous()]
        if group.size > 1:
            shares = [torch.empty_like(shares[0]) for _ in range(group.size)]
            dist.all_gather(shares, param.grad.contiguous(), group=group.handle)
        if name not in joined:
            joined[name] = torch.full(shard.canonical_shape, torch.nan, dtype=torch.float64)
        cut = shard.over("tensor")
        for rank, share in enumerate(shares):
            place = {"tensor": (rank, group.size)}
            if shard.counted(place):
                shard.place(joined[name], share, place)
                first = share
            elif cut is not None or tp.split:
                assert torch.equal(share, first), name
            else:
                assert torch.allclose(share, first, rtol=1e-13, atol=0), name
    return joined


def compute(case: Case, tp: TensorParallel) -> Result:
    model = build(case, tp)
    loss = backward(case, model, tp)
    group = tp.group
    mesh = Mesh(group, {"tensor": group.size}, {("tensor",): group})
    norm = gradient_norm(list(model.parameters()), mesh)
    return Result(float(loss), join_gradients(model, tp), float(norm))


def on_ranks(cases: list[Case]) -> list[Result]:
    group = tensor_group()
    return [compute(case, TensorParallel(group, case.sequence)) for case in cases]


@cache
def reference(model: str, kv_heads: int, documents: bool) -> Result:
    case = Case(model, kv_heads=kv_heads, documents=documents)
    return compute(case, TensorParallel())


def check(case: Case, found: Result) -> None:
    """DESIGN: each gradient to 1e-12 of the larger of its maximum and 1e-3 x the model's largest
    (a key bias has a gradient of exactly zero in theory)."""
    expected = reference(case.model, case.kv_heads, case.documents)
    largest = max(float(grad.abs().max()) for grad in expected.gradients.values())
    assert abs(found.loss - expected.loss) <= 1e-12 * expected.loss
    assert abs(found.norm - expected.norm) <= 1e-12 * expected.norm
    assert list(found.gradients) == list(expected.gradients)
    for name, grad in expected.gradients.items():
        bound = 1e-12 * max(float(grad.abs().max()), 1e-3 * largest)
        assert float((found.gradients[name] - grad).abs().max()) <= bound, name


SAMPLE = [
    Case("gpt2", 2, False, 8),
    Case("gpt2", 2, True, 1, None, True),
    Case("gpt2", 4, True, 8),
    Case("gpt2", 4, True, 2, "full", True),
    Case("gpt2", 4, False, 1, "selective"),
    Case("gpt2-untied", 2, True, 8),
    Case("gpt2-erf", 4, True, 4),
    Case("gpt2-squared-relu", 2, False, 2),
    Case("llama", 2, False, 1, "full"),
    Case("llama", 2, True, 2, None, True),
    Case("llama", 4, False, 2, None, True),
    Case("llama", 4, True, 1, "selective"),
    Case("llama-tied", 2, True, 8, "full"),
    Case("llama-tied", 4, True, 2),
    Case("bloom", 2, True, 8, None, True),
    Case("bloom", 4, False, 2, "selective"),
    Case("gemma2", 2, False, 4, "full", True),
    Case("gemma2", 4, True, 1),
    Case("neox", 2, False, 1, "selective", True),
    Case("neox", 4, False, 2),
    Case("neox", 4, True, 8, "full"),
    Case("qwen3", 2, True, 1, None, True),
    Case("qwen3", 4, True, 2, "selective"),
    Case("qwen3", 4, False, 1),
    Case("llama-half-rotary-qkv-bias", 2, True, 1, "selective"),
    Case("llama-half-rotary-qkv-bias", 4, True, 4, None, True),
    Case("llama-attention-bias", 2, True, 1),
    Case("granite", 2, True, 4),
    Case("olmo", 4, True, 2),
    Case("olmo", 2, False, 8, "full"),
    Case("gptj", 2, True, 4, None, True),
    Case("gpt-neo", 4, True, 8),
    Case("xglm", 4, True, 8, None, True),
    Case("xglm", 2, False, 2),
]
"""Every value of every column, and the pairs that have collectives in common."""


@pytest.mark.parametrize("case", sampled(SAMPLE, SAMPLE[::2].__contains__), ids=str)
def test_against_one_process(pool, case):
    for (found,) in pool.run(case.size, on_ranks, [case]):
        check(case, found)


COLUMNS = [(False, True), (8, 4, 2, 1), (None, "selective", "full"), (False, True)]


@pytest.mark.proof
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_whole_table_against_one_process(pool, model, size):
    """All combinations of sequence parallelism, key and value heads, recomputation, documents."""
    cases = [Case(model, size, *values) for values in product(*COLUMNS)]
    for results in pool.run(size, on_ranks, cases, timeout=600):
        for case, found in zip(cases, results, strict=True):
            check(case, found)


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_recomputation_repeats_dropout(pool, sequence):
    """Bit by bit the same with masks that differ between ranks, and repeatable."""
    plain = Case("gpt2", 2, sequence, 1, dropout=0.2)
    cases = [
        plain,
        plain,
        *(Case("gpt2", 2, sequence, 1, r, dropout=0.2) for r in ("selective", "full")),
    ]
    for first, *others in pool.run(2, on_ranks, cases):
        assert abs(first.loss - reference("gpt2", 1, False).loss) > 1e-3
        for other in others:
            assert other.loss == first.loss
            for name, grad in first.gradients.items():
                assert torch.equal(other.gradients[name], grad), name


def with_precision(dtype: torch.dtype, autocast: bool, case: Case) -> tuple[float, list[float]]:
    """Loss, and the cosine between each gradient and that in float64."""
    tp = TensorParallel(tensor_group(), case.sequence)
    exact, model = build(case, tp), build(case, tp)
    backward(case, exact, tp)
    model = model.float() if autocast else model.to(dtype)
    with torch.autocast("cpu", dtype, enabled=autocast):
        loss = backward(case, model, tp)
    expected, found = join_gradients(exact, tp), join_gradients(model, tp)
    return float(loss), [
        float(torch.cosine_similarity(found[name].flatten(), grad.flatten(), dim=0))
        for name, grad in expected.items()
    ]


@pytest.mark.parametrize("model, kv_heads", [("gpt2", 2), ("llama", 1), ("gemma2", 2), ("neox", 1)])
@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "bf16-autocast"])
def test_low_precision_against_float64(pool, autocast, model, kv_heads):
    case = Case(model, 2, True, kv_heads)
    for loss, cosines in pool.run(2, with_precision, torch.bfloat16, autocast, case):
        assert loss == pytest.approx(reference(model, kv_heads, False).loss, rel=0.02)
        assert min(cosines) > 0.9
