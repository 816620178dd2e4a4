"""GPT as a layer list: recomputation, packed documents, generation's cache, names."""

import pytest
import torch
from configs import model_config, run_config
from gpt_forward import forward
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from megatron.config import ModelConfig, ParallelConfig
from megatron.families import build_model
from megatron.families.gpt import gpt_layers
from megatron.model.attention_backends import attention_backend
from megatron.model.attention_masks import AttentionMasks
from megatron.model.embedding import InputEmbedding
from megatron.model.layer_list import (
    LayerStack,
    LayerState,
    canonical_name,
    canonical_prefixes,
    initialise,
    recomputed_chunks,
)
from megatron.parallel.loss_head import Targets
from megatron.parallel.shard import Init, init_of, shard_of
from megatron.parallel.tensor_parallel import TensorParallel

VOCAB, LENGTH = 40, 12

LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}
BLOOM = {"position_embedding_type": "alibi", "embed_layernorm": True, "parallel_residual": True}
GEMMA = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "apply_layernorm_1p": True,
    "post_norm": True, "scale_embeddings": True, "glu_activation": "geglu", "num_query_groups": 2,
    "add_bias_linear": False, "sliding_window": 3, "window_attn_skip_freq": 2,
    "query_pre_attn_scalar": 6.0, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
    "rotary_base_local": 100.0, "rope_scaling": '{"rope_type": "linear", "factor": 2.0}',
}  # fmt: skip
NEOX = {
    "position_embedding_type": "rope", "rotary_percent": 0.5, "parallel_residual": True,
    "shared_parallel_norm": True, "qk_layernorm": True, "num_query_groups": 1,
}  # fmt: skip
SCALED = {"position_embedding_type": "none", "scale_embeddings": True}
OPT = {"position_embedding_offset": 2, "relu": True, "sliding_window": 4}
NONE = {"position_embedding_type": "none", "qk_layernorm": True, "sliding_window": 5}
ALIBI_WINDOW = {"position_embedding_type": "alibi", "sliding_window": 4, "num_query_groups": 2}
MODELS = {
    "gpt2": {}, "llama": LLAMA, "bloom": BLOOM, "gemma": GEMMA, "neox": NEOX, "opt": OPT,
    "none": NONE, "alibi-window": ALIBI_WINDOW,
}  # fmt: skip


def config(**changes) -> ModelConfig:
    shape = {
        "num_layers": 4, "hidden_size": 16, "ffn_hidden_size": 32, "num_attention_heads": 4,
        "num_query_groups": 4, "kv_channels": 4, "seq_length": LENGTH,
        "max_position_embeddings": LENGTH, "make_vocab_size_divisible_by": 16,
        "attention_dropout": 0.0, "hidden_dropout": 0.0,
    }  # fmt: skip
    return run_config(model=model_config(**(shape | changes))).with_vocabulary(VOCAB).model


def gpt(model: ModelConfig, parallel: ParallelConfig | None = None, std=0.3) -> LayerStack:
    """A GPT in float64 with wide random weights, biases too."""
    stack = build_model(model, parallel).double()
    for name, param in stack.canonical_parameters():
        param.init = Init(std=std) if std else init_of(param)
        initialise(name, param, 1)
    return stack


def tokens(rows=2, length=LENGTH) -> Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(0))


def step(stack: LayerStack) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of a training step, dropout seeded."""
    ids = tokens(length=LENGTH + 1)
    torch.manual_seed(3)
    targets = Targets(ids[:, 1:], torch.ones(ids[:, 1:].shape))
    loss = forward(stack.train(), ids[:, :-1], targets=targets)
    return loss.detach(), list(torch.autograd.grad(loss, list(stack.parameters())))


RECOMPUTE = [
    ("selective", None, 1, "sdpa"),
    ("selective", None, 1, "eager"),
    ("selective", "mlp_act", 1, "sdpa"),
    ("full", "uniform", 1, "eager"),
    ("full", "uniform", 3, "sdpa"),
    ("full", "uniform", 9, "sdpa"),
    ("full", "block", 2, "sdpa"),
    ("full", "block", 9, "sdpa"),
]


def cells(values, sample):
    """Every value with every model; GPT-2 and Llama have all in the normal run, others a sample."""

    def marks(model, value):
        return () if model in ("gpt2", "llama") or value in sample else (pytest.mark.proof,)

    return [pytest.param(m, value, marks=marks(m, value)) for m in MODELS for value in values]


@pytest.mark.parametrize(
    "model, recompute", cells(RECOMPUTE, [RECOMPUTE[0], RECOMPUTE[2], RECOMPUTE[6]])
)
def test_recomputation_changes_nothing(model, recompute):
    granularity, method, layers, backend = recompute
    model_config = config(
        **MODELS[model], attention_dropout=0.2, hidden_dropout=0.2, attention_backend=backend
    )
    how = {"recompute_granularity": granularity, "recompute_num_layers": layers}
    how |= {"recompute_modules": (method,)} if method == "mlp_act" else {"recompute_method": method}
    parallel = ParallelConfig(**how)
    loss, gradients = step(gpt(model_config))
    loss_again, gradients_again = step(gpt(model_config, parallel))
    assert torch.equal(loss, loss_again)
    assert all(torch.equal(*pair) for pair in zip(gradients, gradients_again, strict=True))


ONE_BY_ONE = [(place, place + 1, True) for place in range(2, 6)]


@pytest.mark.parametrize(
    "granularity, method, layers, expected",
    [
        (None, None, 1, [(0, 8, False)]),
        ("selective", None, 1, [(0, 8, False)]),
        ("full", "uniform", 1, [(0, 2, False), *ONE_BY_ONE, (6, 8, False)]),
        ("full", "uniform", 3, [(0, 2, False), (2, 5, True), (5, 6, True), (6, 8, False)]),
        ("full", "block", 2, [(0, 2, False), (2, 3, True), (3, 4, True), (4, 8, False)]),
        ("full", "block", 9, [(0, 2, False), *ONE_BY_ONE, (6, 8, False)]),
    ],
)
def test_recomputed_chunks(granularity, method, layers, expected):
    parallel = ParallelConfig(
        recompute_granularity=granularity, recompute_method=method, recompute_num_layers=layers
    )
    assert recomputed_chunks(gpt_layers(config(), parallel), parallel) == expected


def test_full_recomputation_runs_the_blocks_twice():
    parallel = ParallelConfig(recompute_granularity="full", recompute_method="block",
                              recompute_num_layers=3)  # fmt: skip
    stack, runs = gpt(config(), parallel), []
    for place in range(2, 6):
        stack.get_submodule(str(place)).register_forward_pre_hook(
            lambda *_, p=place: runs.append(p)
        )
    step(stack)
    assert [runs.count(place) for place in range(2, 6)] == [2, 2, 2, 1]


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("model", MODELS)
def test_packed_documents_equal_separate_documents(model, backend):
    stack = gpt(config(**MODELS[model], attention_backend=backend)).eval()
    ids, lengths = tokens(rows=1), [5, 1, 6]
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).unsqueeze(0)
    packed = forward(stack, ids, positions, documents)
    separate = torch.cat([forward(stack, part) for part in ids.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, separate, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(forward(stack, ids), separate)


@pytest.mark.parametrize("model", MODELS)
def test_positions_are_counted_from_zero_by_default(model):
    stack, ids = gpt(config(**MODELS[model])).eval(), tokens()
    positions = torch.arange(LENGTH).expand(2, -1)
    torch.testing.assert_close(
        forward(stack, ids), forward(stack, ids, positions), rtol=1e-13, atol=1e-13
    )


class Cache:
    """Keeps all keys and values of sequences of equal length."""

    def __init__(self, backend: str) -> None:
        self.kernel = attention_backend(backend)
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.lengths_BS = torch.empty(0)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scores, bias, sinks) -> Tensor:
        if layer in self.layers:
            earlier = self.layers[layer]
            k, v = torch.cat([earlier[0], k], 1), torch.cat([earlier[1], v], 1)
        self.layers[layer] = k, v
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return self.kernel(q, k, v, scores, AttentionMasks(), 0.0, bias, sinks).transpose(1, 2)


PIECES = [[LENGTH], [1] * LENGTH, [4, 3, 1, 4]]


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("model, pieces", cells(PIECES, [PIECES[2]]), ids=str)
def test_generation_with_a_cache_gives_the_same_logits(pieces, model, backend):
    stack, ids = gpt(config(**MODELS[model], attention_backend=backend)).eval(), tokens()
    cache, logits, start = Cache(backend), [], 0
    for length in pieces:
        positions = torch.arange(start, start + length).expand(2, -1)
        logits.append(forward(stack, ids[:, start : start + length], positions, cache=cache))
        start += length
    torch.testing.assert_close(torch.cat(logits, 1), forward(stack, ids), rtol=1e-12, atol=1e-12)
    assert sorted(cache.layers) == [0, 1, 2, 3]


@pytest.mark.parametrize("model", MODELS)
def test_no_token_sees_a_later_one(model):
    stack, ids = gpt(config(**MODELS[model])).eval(), tokens()
    changed = ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % VOCAB
    before, after = forward(stack, ids), forward(stack, changed)
    assert torch.equal(before[:, :7], after[:, :7]) and not torch.allclose(before, after)


GPT2_NAMES = """
embedding.word_embeddings.weight embedding.position_embeddings.weight
layers.0.attention_norm.weight layers.0.attention_norm.bias
layers.0.attention.qkv.weight layers.0.attention.qkv.bias
layers.0.attention.proj.weight layers.0.attention.proj.bias
layers.0.mlp_norm.weight layers.0.mlp_norm.bias
layers.0.mlp.up.weight layers.0.mlp.up.bias layers.0.mlp.down.weight layers.0.mlp.down.bias
final_norm.norm.weight final_norm.norm.bias
""".split()

LLAMA_NAMES = """
embedding.word_embeddings.weight
layers.0.attention_norm.weight layers.0.attention.qkv.weight layers.0.attention.proj.weight
layers.0.mlp_norm.weight layers.0.mlp.up.weight layers.0.mlp.down.weight
final_norm.norm.weight output_layer.weight
""".split()


GEMMA_NAMES = """
embedding.word_embeddings.weight
layers.0.attention_norm.weight layers.0.attention.qkv.weight layers.0.attention.proj.weight
layers.0.attention_post_norm.weight layers.0.mlp_norm.weight layers.0.mlp.up.weight
layers.0.mlp.down.weight layers.0.mlp_post_norm.weight final_norm.norm.weight
""".split()

NEOX_NAMES = """
embedding.word_embeddings.weight
layers.0.attention_norm.weight layers.0.attention_norm.bias
layers.0.attention.qkv.weight layers.0.attention.qkv.bias
layers.0.attention.q_norm.weight layers.0.attention.q_norm.bias
layers.0.attention.k_norm.weight layers.0.attention.k_norm.bias
layers.0.attention.proj.weight layers.0.attention.proj.bias
layers.0.mlp.up.weight layers.0.mlp.up.bias layers.0.mlp.down.weight layers.0.mlp.down.bias
final_norm.norm.weight final_norm.norm.bias
""".split()

BLOOM_NAMES = [
    GPT2_NAMES[0], "embedding.norm.weight", "embedding.norm.bias", *GPT2_NAMES[2:],
]  # fmt: skip

NAMES = {
    "gpt2": GPT2_NAMES, "llama": LLAMA_NAMES, "gemma": GEMMA_NAMES, "neox": NEOX_NAMES,
    "bloom": BLOOM_NAMES, "opt": GPT2_NAMES,
}  # fmt: skip


@pytest.mark.parametrize("model, expected", NAMES.items(), ids=NAMES)
def test_canonical_names(model, expected):
    stack = build_model(config(**MODELS[model], num_layers=1))
    names = [name for name, _ in stack.canonical_parameters()]
    assert names == expected and len(set(names)) == len(names)


@pytest.mark.parametrize("model", MODELS)
def test_canonical_names_are_a_bijection_of_the_registered_ones(model):
    stack = build_model(config(**MODELS[model], num_layers=12))
    prefixes = canonical_prefixes(stack.layers)
    registered = [name for name, _ in stack.named_parameters()]
    names = {canonical_name(name, prefixes) for name in registered}
    assert len(names) == len(registered) == len(list(stack.parameters()))
    assert canonical_name("13.mlp.up.weight", prefixes) == "layers.11.mlp.up.weight"


@pytest.mark.parametrize("model", MODELS)
def test_initial_weights_are_megatrons(model):
    """Normal with 0.02; divided by sqrt(2 layers) where a block writes to the residual stream."""
    stack = gpt(config(**MODELS[model], hidden_size=128, ffn_hidden_size=256), std=None)
    for name, param in stack.canonical_parameters():
        whole = shard_of(param).join([param.detach()])
        if name.endswith("norm.weight"):
            assert (whole == (0 if model == "gemma" else 1)).all(), name
        elif name.endswith("bias"):
            assert (whole == 0).all(), name
        else:
            std = 0.02 / 8**0.5 if name.split(".")[-2] in ("proj", "down") else 0.02
            assert 0.9 * std < float(whole.std()) < 1.1 * std, name


def test_padding_of_the_vocabulary_does_not_change_the_loss():
    losses = []
    for multiple in (1, 16, 64):
        model = config(make_vocab_size_divisible_by=multiple)
        padded = run_config(model=model).with_vocabulary(VOCAB).model
        losses.append(step(gpt(padded))[0].item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-14) == pytest.approx(losses[2], rel=1e-14)


def test_parameters_have_the_shape_that_their_shard_says():
    for changes in MODELS.values():
        for name, param in build_model(config(**changes)).canonical_parameters():
            assert tuple(param.shape) == shard_of(param).full_shape, name


def test_positions_start_at_the_offset_of_the_table():
    """Rows 0 and 1 of OPT's table belong to no position."""
    stack = gpt(config(**OPT))
    table = dict(stack.canonical_parameters())["embedding.position_embeddings.weight"]
    assert table.shape == (LENGTH + 2, 16)
    forward(stack, tokens()).sum().backward()
    used = (table.grad != 0).any(1)
    assert not used[:2].any() and used[2:].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scale_of_embeddings_is_rounded_to_their_dtype(dtype):
    """As transformers' Gemma: sqrt(3072) is 55.5 in bfloat16."""
    positions = InputEmbedding(config(hidden_size=3072, **SCALED), TensorParallel())
    x = torch.randn(1, 2, 3072).to(dtype)
    theirs = Gemma3TextScaledWordEmbedding(2, 3072, 0, embed_scale=3072**0.5)
    theirs.weight.data = x[0]
    found = positions(LayerState(x)).hidden
    assert torch.equal(found[0], theirs(torch.arange(2)))
    assert torch.equal(found, x * 3072**0.5) == (dtype == torch.float32)


@pytest.mark.parametrize("bound", [None, 0.5])
def test_logits_are_bounded(bound):
    stack = gpt(config(final_logit_softcapping=bound)).eval()
    free = forward(gpt(config()).eval(), tokens())
    expected = free if bound is None else bound * torch.tanh(free / bound)
    assert free.abs().max() > 1.0
    assert torch.equal(forward(stack, tokens()), expected)


@pytest.mark.parametrize(
    "model",
    ["alibi-window", *(pytest.param(m, marks=pytest.mark.proof) for m in ("gemma", "bloom"))],
)
def test_compiled_blocks_share_masks(model):
    """torch.compile follows masks from block to block; its own kernels are not at stake."""
    shape = MODELS[model] | {"num_layers": 2}
    plain, compiled = gpt(config(**shape)), gpt(config(**shape))
    for block in compiled.blocks():
        block.compile(backend="eager", fullgraph=True)
    (loss, gradients), (again, others) = step(plain), step(compiled)
    torch.testing.assert_close(again, loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(others, gradients, rtol=1e-10, atol=1e-12)
