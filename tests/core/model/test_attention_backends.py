"""Attention kernels against the definition, one query at a time; masks of small sequences as they
are written down, and ALiBi against transformers' BLOOM."""

import importlib.machinery
import math
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from configs import model_config
from torch.nn.attention import SDPBackend
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from megatron.features.gpu_attention.kernels import cudnn, flash
from megatron.model.attention_backends import attention_backend, eager, sdpa
from megatron.model.attention_masks import (
    PLAIN,
    AttentionMasks,
    AttentionScoring,
    alibi_slopes,
    causal_mask,
    distance_biases,
    document_mask,
    window_mask,
)
from megatron.parallel.mesh import Group

CPU = torch.device("cpu")
HEADS, WIDTH = 4, 8
SLOPES = (0.5, 0.125, 0.3, 0.01)
SCORES = {
    "plain": PLAIN,
    "scale": AttentionScoring(scale=0.2),
    "softcap": AttentionScoring(softcap=0.7),
    "window": AttentionScoring(window=3),
    "window-of-one": AttentionScoring(window=1),
    "wide-window": AttentionScoring(window=6),
    "alibi": AttentionScoring(slopes=SLOPES),
    "all": AttentionScoring(scale=0.5, softcap=0.7, window=2, slopes=SLOPES),
}
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
SHAPES = {
    "causal": (6, 6, None),
    "documents": (6, 6, DOCUMENTS),
    "one-query": (1, 6, None),
    "cache-offset": (3, 6, None),
    "single": (1, 1, None),
}


def tensors(queries, keys, kv_heads):
    draw = torch.Generator().manual_seed(0)

    def random(heads, length):
        values = torch.randn(2, heads, length, WIDTH, generator=draw, dtype=torch.float64)
        return values.requires_grad_()

    return random(HEADS, queries), random(kv_heads, keys), random(kv_heads, keys)


def definition(q, k, v, scores, documents):
    """One query, head and sample at a time."""
    out, distance = torch.empty_like(q), k.shape[2] - q.shape[2]
    scale = scores.scale or 1 / math.sqrt(WIDTH)
    for b, n, s in torch.cartesian_prod(*(torch.arange(d) for d in q.shape[:3])).tolist():
        head, own = n // (q.shape[1] // k.shape[1]), s + distance
        first = 0 if scores.window is None else max(0, own - scores.window + 1)
        seen = [
            t
            for t in range(first, own + 1)
            if documents is None or documents[b, t] == documents[b, own]
        ]
        found = scale * k[b, head, seen] @ q[b, n, s]
        if scores.softcap:
            found = scores.softcap * torch.tanh(found / scores.softcap)
        if scores.slopes:
            found = found - scores.slopes[n] * (own - torch.tensor(seen))
        out[b, n, s] = found.softmax(0) @ v[b, head, seen]
    return out


KINDS = [("plain", heads) for heads in (4, 2, 1)] + [(kind, 2) for kind in [*SCORES][1:]]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kind", "kv_heads"), KINDS)
@pytest.mark.parametrize("backend", [sdpa, eager])
def test_against_definition(backend, kind, shape, kv_heads):
    (queries, keys, documents), scores = SHAPES[shape], SCORES[kind]
    masks = AttentionMasks(documents)
    inputs, reference = (tensors(queries, keys, kv_heads) for _ in range(2))
    expected = definition(*reference, scores, documents)
    found = backend(*inputs, scores, masks, 0.0)
    # ALiBi's distances and slopes are float32.
    close = {"rtol": 1e-6, "atol": 1e-7} if scores.slopes else {"rtol": 1e-11, "atol": 1e-12}
    torch.testing.assert_close(found, expected, **close)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).double()
    gradients = torch.autograd.grad((found * weights).sum(), inputs)
    others = torch.autograd.grad((expected * weights).sum(), reference)
    for gradient, expected in zip(gradients, others, strict=True):
        torch.testing.assert_close(gradient, expected, **close)


@pytest.mark.parametrize("kind", ["plain", "all"])
def test_gradient_of_the_definition_by_differences(kind):
    inputs, scores = tensors(3, 3, 2), SCORES[kind]
    assert torch.autograd.gradcheck(
        lambda q, k, v: eager(q, k, v, scores, AttentionMasks(), 0.0), inputs
    )


@pytest.mark.parametrize("kind", ["plain", "window", "alibi", "softcap"])
@pytest.mark.parametrize("backend", [sdpa, eager])
def test_dropout_acts_and_keeps_the_mean(backend, kind):
    torch.manual_seed(0)
    q, k, v = (t.detach() for t in tensors(6, 6, 4))
    scores = SCORES[kind]
    plain = backend(q, k, v, scores, AttentionMasks(), 0.0)
    dropped = torch.stack([backend(q, k, v, scores, AttentionMasks(), 0.3) for _ in range(200)])
    assert not torch.equal(dropped[0], dropped[1])
    assert (dropped.mean(0) - plain).abs().max() < 0.4


@pytest.fixture
def kernel(monkeypatch):
    """What torch's kernel is called with."""
    calls, real = [], F.scaled_dot_product_attention

    def spy(q, k, v, **options):
        calls.append({"keys": k.shape[2], **options})
        return real(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return calls


@pytest.mark.parametrize("window", [None, 6, 7])
def test_no_mask_where_the_window_is_as_long_as_the_sequence(kernel, window):
    sdpa(*tensors(6, 6, 2), AttentionScoring(window=window), AttentionMasks(), 0.0)
    assert kernel[0]["attn_mask"] is None and kernel[0]["is_causal"]


def test_keys_in_front_of_the_window_are_left_out(kernel):
    for queries in (1, 3):
        sdpa(*tensors(queries, 6, 2), AttentionScoring(window=2), AttentionMasks(), 0.0)
    assert [call["keys"] for call in kernel] == [2, 4]
    assert kernel[0]["attn_mask"] is None, "one query sees all that is left"


def test_layers_share_masks(kernel):
    """One for each kind of layer, also where a window and documents come together."""
    masks = AttentionMasks(DOCUMENTS)
    for _ in range(2):
        for kind in ("plain", "window", "alibi"):
            sdpa(*tensors(6, 6, 2), SCORES[kind], masks, 0.0)
    first, second = kernel[:3], kernel[3:]
    for one, other in zip(first, second, strict=True):
        assert one["attn_mask"] is other["attn_mask"]
    assert len({id(call["attn_mask"]) for call in kernel}) == 3


def test_bounded_scores_do_not_reach_a_kernel_that_would_ignore_the_bound(kernel):
    sdpa(*tensors(6, 6, 2), SCORES["softcap"], AttentionMasks(), 0.0)
    assert kernel == []


@pytest.fixture
def flash_attn(monkeypatch):
    """A module in the place of the flash-attn package: what its documentation says of the
    arguments, computed by the definition."""
    calls = []

    def flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, deterministic):
        calls.append(window_size)
        assert causal and dropout_p == 0 and window_size[1] in (-1, 0)
        window = None if window_size[0] == -1 else window_size[0] + 1
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return definition(q, k, v, AttentionScoring(softmax_scale, window=window), None).transpose(
            1, 2
        )

    module = types.ModuleType("flash_attn")
    module.flash_attn_func = flash_attn_func
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return calls


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", SCORES)
def test_flash_against_definition(flash_attn, kind, shape):
    """What the package is called for, and what goes to torch's kernel instead."""
    (queries, keys, documents), scores = SHAPES[shape], SCORES[kind]
    inputs = tensors(queries, keys, 2)
    assert attention_backend("flash") is flash
    found = flash(*inputs, scores, AttentionMasks(documents), 0.0)
    torch.testing.assert_close(found, definition(*inputs, scores, documents), rtol=1e-6, atol=1e-7)
    elsewhere = documents is not None or scores.slopes or scores.softcap
    assert len(flash_attn) == (not elsewhere)


def test_a_kernel_that_is_not_installed_is_refused_by_its_flag():
    with pytest.raises(ValueError, match="--attention-backend flash needs the flash-attn package"):
        attention_backend("flash")


def test_cudnn_without_a_gpu_is_refused_by_its_flag(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--attention-backend cudnn needs an NVIDIA GPU"):
        attention_backend("cudnn")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", SCORES)
def test_cudnn_first_against_definition(kind, shape):
    """Where its kernel cannot, as on a CPU, torch's others do it."""
    (queries, keys, documents), scores = SHAPES[shape], SCORES[kind]
    inputs = tensors(queries, keys, 2)
    found = cudnn(*inputs, scores, AttentionMasks(documents), 0.0)
    torch.testing.assert_close(found, definition(*inputs, scores, documents), rtol=1e-6, atol=1e-7)


def test_cudnn_comes_first_inside_only(monkeypatch):
    before = torch._C._get_sdp_priority_order()
    seen, real = [], F.scaled_dot_product_attention

    def watch(*args, **options):
        seen.append(torch._C._get_sdp_priority_order()[0])
        return real(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
    cudnn(*tensors(4, 4, 2), PLAIN, AttentionMasks(), 0.0)
    assert seen == [int(SDPBackend.CUDNN_ATTENTION)]
    assert torch._C._get_sdp_priority_order() == before


def test_causal_mask_puts_the_last_query_at_the_last_key():
    assert causal_mask(2, 4, CPU).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_window_counts_the_query_itself():
    assert window_mask(4, 4, 2, CPU).int().tolist() == [
        [1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1],
    ]  # fmt: skip
    assert window_mask(2, 4, 2, CPU).int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]


def test_document_mask():
    mask = document_mask(torch.tensor([[0, 0, 1]]))
    assert mask.shape == (1, 1, 3, 3)
    assert mask[0, 0].int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]


def test_window_within_documents():
    mask = AttentionMasks(torch.tensor([[0, 0, 0, 1]])).visible(4, 4, 2, CPU)
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1],
    ]  # fmt: skip


def test_distances_end_at_the_query():
    found = distance_biases(2, 3, (1.0, 0.5), CPU)
    assert found.tolist() == [
        [[-1.0, 0.0, 1.0], [-2.0, -1.0, 0.0]],
        [[-0.5, 0.0, 0.5], [-1.0, -0.5, 0.0]],
    ]


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 16, 20, 32, 112])
def test_slopes_against_transformers(heads):
    """Its biases differ from ours by the same for all keys of a query, which a softmax ignores."""
    theirs_NT = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32).view(heads, 2)
    slopes = torch.tensor(alibi_slopes(heads))
    torch.testing.assert_close(slopes, theirs_NT[:, 1] - theirs_NT[:, 0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("heads", [4, 12])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_the_slopes_of_their_heads(heads, size):
    config = model_config(num_attention_heads=heads, position_embedding_type="alibi")
    found = [
        AttentionScoring.of(config, 0, Group(tuple(range(size)), rank)) for rank in range(size)
    ]
    assert tuple(slope for scores in found for slope in scores.slopes) == alibi_slopes(heads)


def test_scores_of_a_configuration():
    config = model_config(
        num_layers=4, num_attention_heads=4, query_pre_attn_scalar=16.0, sliding_window=5,
        window_attn_skip_freq=3, attn_logit_softcapping=50.0,
    )  # fmt: skip
    found = [AttentionScoring.of(config, layer) for layer in range(4)]
    assert found[0] == AttentionScoring(scale=1 / math.sqrt(16), softcap=50.0, window=5)
    assert [scores.window for scores in found] == [5, 5, None, 5]
    assert config.windows == (5, 5, None, 5)
    assert AttentionScoring.of(model_config(), 0) == AttentionScoring()
