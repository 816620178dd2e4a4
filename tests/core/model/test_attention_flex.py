"""FlexAttention: its block masks against the masks as they are defined, what it computes against
plain products, and what it is chosen for.

For a CPU torch generates code of the forward pass only; here its gradient runs by operators.
"""

from itertools import product

import pytest
import torch
from samples import sampled
from small_gpts import KINDS, LENGTH, small_config
from torch import Tensor
from torch.nn.attention import flex_attention

from megatron.config.blocks import Chunk
from megatron.data.gpt_batch import GPTBatch
from megatron.families.gpt import begin
from megatron.model import attention_backends, attention_flex
from megatron.model.attention_backends import eager, sdpa
from megatron.model.attention_flex import BLOCK, block_mask, flex_windows, why_not_flex
from megatron.model.attention_masks import AttentionMasks, AttentionScoring, alibi_slopes

CPU = torch.device("cpu")
HEADS, WIDTH = 4, 16


TABLES = [
    f"{full}{kind}_{what}"
    for full in ("", "full_")
    for kind in ("kv", "q")
    for what in ("num_blocks", "indices")
]
"""Of a block mask."""


def documents(length: int, kind: str) -> Tensor | None:
    """Two samples: documents of many lengths, one of a block's, or numbers in any order."""
    draw = torch.Generator().manual_seed(length)
    if kind == "none":
        return None
    if kind == "blocks":
        return torch.arange(length).div(BLOCK, rounding_mode="floor").repeat(2, 1)
    ids = torch.randint(5, (2, length), generator=draw)
    return ids if kind == "mixed" else ids.sort().values


WINDOWS = [None, 1, 100, 128, 129, 260, Chunk(90), Chunk(128), Chunk(260)]


@pytest.mark.parametrize(
    "causal, length, window, kind",
    sampled(
        product([True, False], [1, 100, 256, 400], WINDOWS, ["none", "many", "blocks", "mixed"]),
        lambda case: case[1] == 400 and (case[0] or case[2] == 129) or case[:3] == (True, 100, 100),
    ),
)
def test_block_masks_against_masks(causal, length, window, kind):
    """A block that is not looked at has no key that is seen, and one taken whole only such."""
    ids = documents(length, kind)
    found = block_mask(length, window, ids, CPU, causal)
    expected = AttentionMasks(ids, causal=causal).visible(length, length, window, CPU, causal)
    if expected is None:
        expected = torch.ones(length, length, dtype=torch.bool)
        expected = expected.tril() if causal else expected
    expected = expected.expand(1 if ids is None else 2, 1, length, length)
    count = -(-length // BLOCK)
    padded = torch.zeros(*expected.shape[:2], count * BLOCK, count * BLOCK, dtype=torch.bool)
    padded[..., :length, :length] = expected
    blocks = padded.unflatten(3, (count, BLOCK)).unflatten(2, (count, BLOCK))
    some, whole = blocks.any(5).any(3), blocks.all(5).all(3)
    in_part = dense(found.kv_num_blocks, found.kv_indices)
    in_whole = dense(found.full_kv_num_blocks, found.full_kv_indices)
    assert not (in_part & in_whole).any()
    if kind != "mixed":
        assert in_whole.equal(whole)
        assert in_part.equal(some & ~whole)
    assert (in_whole <= whole).all() and (some <= (in_part | in_whole)).all()
    assert dense(found.q_num_blocks, found.q_indices).equal(in_part.mT)
    assert dense(found.full_q_num_blocks, found.full_q_indices).equal(in_whole.mT)
    # Kernels step through a row by one element, whatever its stride.
    assert all(getattr(found, name).is_contiguous() for name in TABLES)
    places = torch.arange(length)
    visible = torch.stack(
        [found.mask_mod(b, 0, places[:, None], places) for b in range(len(expected))]
    )
    assert visible.equal(expected[:, 0])


def dense(count: Tensor, order: Tensor) -> Tensor:
    """The blocks of a table, bool [B, 1, Q, Q]."""
    chosen = torch.arange(order.shape[-1]) < count[..., None]
    return torch.zeros_like(order, dtype=torch.bool).scatter(-1, order.long(), chosen)


@pytest.mark.parametrize("window", [None, 100, 300])
def test_block_masks_are_those_of_torch(window):
    """Which it makes from a dense mask."""
    ours = block_mask(400, window, None, CPU)
    theirs = flex_attention.create_block_mask(ours.mask_mod, 1, 1, 400, 400, device="cpu")
    for name in TABLES:
        mine, its = getattr(ours, name), getattr(theirs, name)
        if name.endswith("indices"):
            counts = name.replace("indices", "num_blocks")
            mine, its = dense(getattr(ours, counts), mine), dense(getattr(theirs, counts), its)
        assert mine.equal(its), name
    assert ours.shape == theirs.shape


def test_block_masks_have_no_tensor_of_the_square_of_the_length():
    """0.4 MiB for 8192 tokens of 4 samples, where dense masks have 768."""
    length, sizes = 8192, []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            leaves = torch.utils._pytree.tree_leaves(result)
            sizes.extend(x.numel() for x in leaves if isinstance(x, Tensor))
            assert all(x.device.type == "meta" for x in leaves if isinstance(x, Tensor))
            return result

    ids = torch.zeros(4, length, dtype=torch.int64, device="meta")
    with Watch():
        made = block_mask(length, 4096, ids, ids.device)
    assert max(sizes) == 4 * length  # the ids
    names = made._TENSOR_ATTRS[:8]
    kept = sum(getattr(made, name).nbytes for name in names) + ids.numel() * 4
    assert kept < 0.5 * 2**20


@pytest.fixture
def operator_by_operator(monkeypatch):
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    compiled = torch.compile(flex_attention.flex_attention, backend="aot_eager", dynamic=False)
    monkeypatch.setattr(attention_flex, "_compiled", lambda: compiled)
    monkeypatch.setattr(attention_backends, "FLEX_DTYPES", (torch.float64,))
    torch.compiler.reset()
    yield
    torch.compiler.reset()


SOFTCAP, SLOPES = {"softcap": 0.7, "scale": 0.4}, {"slopes": alibi_slopes(HEADS)}
SCORES = [
    ("none", {"window": 100}, 4), ("many", {}, 2), ("many", {"window": 100}, 1),
    ("many", {"window": Chunk(90)}, 2), ("many", SOFTCAP, 4),
    ("many", {"window": 100} | SOFTCAP | SLOPES, 2), ("none", SLOPES, 2),
    ("none", SOFTCAP, 1), ("mixed", {"window": 30} | SOFTCAP, 2),
    ("many", {"window": 30, "causal": False} | SLOPES, 2),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "more", "kv_heads"),
    [
        pytest.param(*scores, marks=() if n in (2, 4, 8) else pytest.mark.proof)
        for n, scores in enumerate(SCORES)
    ],
)
@pytest.mark.usefixtures("operator_by_operator")
def test_against_plain_products(kind, more, kv_heads):
    length, scores = 200, AttentionScoring(**more)
    ids, draw = documents(length, kind), torch.Generator().manual_seed(0)
    inputs, reference = [], []
    for heads in (HEADS, kv_heads, kv_heads):
        x = torch.randn(2, heads, length, WIDTH, generator=draw, dtype=torch.float64)
        inputs.append(x.requires_grad_())
        reference.append(x.detach().clone().requires_grad_())
    blocks = {scores.window: block_mask(length, scores.window, ids, CPU, scores.causal)}
    found = sdpa(*inputs, scores, AttentionMasks(ids, blocks=blocks, causal=scores.causal), 0.0)
    expected = eager(*reference, scores, AttentionMasks(ids, causal=scores.causal), 0.0)
    # ALiBi's slopes are float32; FlexAttention's statistics on a CPU as well.
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    weights = torch.randn(found.shape, generator=draw, dtype=torch.float64)
    gradients = torch.autograd.grad((found * weights).sum(), inputs)
    others = torch.autograd.grad((expected * weights).sum(), reference)
    for gradient, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("scores", [AttentionScoring(window=100), AttentionScoring(**SOFTCAP)])
@pytest.mark.usefixtures("operator_by_operator")
def test_sinks_against_plain_products(scores):
    """Their gradient too, and with them a model's causal attention uses it without documents."""
    length, draw = 200, torch.Generator().manual_seed(0)
    shapes = [(2, HEADS, length, WIDTH), *[(2, 2, length, WIDTH)] * 2, (HEADS,)]
    values = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    values[-1] *= 4
    blocks, results = {scores.window: block_mask(length, scores.window, None, CPU)}, []
    for attend, masks in ((sdpa, AttentionMasks(blocks=blocks)), (eager, AttentionMasks())):
        *inputs, sinks = leaves = [x.clone().requires_grad_() for x in values]
        y = attend(*inputs, scores, masks, 0.0, None, sinks)
        results.append([y.detach(), *torch.autograd.grad((y * y.detach()).sum(), leaves)])
    # FlexAttention's statistics are float32.
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.proof
@pytest.mark.parametrize(("kind", "more", "kv_heads"), SCORES[3:7:2])
def test_generated_code_against_plain_products(kind, more, kv_heads):
    """The forward pass, in C++."""
    length, scores = 200, AttentionScoring(**more)
    ids, draw = documents(length, kind), torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(2, heads, length, WIDTH, generator=draw)
        for heads in (HEADS, kv_heads, kv_heads)
    ]
    blocks = {scores.window: block_mask(length, scores.window, ids, CPU, scores.causal)}
    found = sdpa(*inputs, scores, AttentionMasks(ids, blocks=blocks), 0.0)
    expected = eager(*inputs, scores, AttentionMasks(ids), 0.0)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


def test_dropout_and_a_cache_do_without(monkeypatch):
    """Although there are block masks; their dense masks are then made in the first layer."""
    monkeypatch.setattr("megatron.model.attention_backends.flex", None)
    ids = documents(100, "many")
    masks = AttentionMasks(ids, blocks={None: block_mask(100, None, ids, CPU)})
    q, k, v = torch.randn(3, 2, HEADS, 100, WIDTH)
    assert not masks._made
    sdpa(q, k, v, AttentionScoring(), masks, 0.1)
    assert masks.documents is masks.documents
    assert masks.documents.equal(AttentionMasks(ids).documents)
    one = AttentionMasks(blocks={None: block_mask(100, None, None, CPU)})
    sdpa(q[:, :, :1], k, v, AttentionScoring(), one, 0.0)
    sdpa(q, k, v, AttentionScoring(causal=False), one, 0.0)


@pytest.mark.parametrize(
    ("kind", "ids", "length", "expected"),
    [
        ("llama", False, 32, set()), ("llama", True, 32, {None}), ("window", False, 32, {8}),
        ("window", False, 8, set()), ("window", True, 8, {8}), ("bloom", False, 32, {None}),
        ("gemma2", False, 32, {8, None}),
    ],
)  # fmt: skip
def test_windows_that_need_more_than_causal_attention(kind, ids, length, expected):
    assert flex_windows(small_config(**KINDS[kind]), length, ids) == expected


def test_windows_in_both_directions_have_half_on_either_side():
    model = small_config(**KINDS["window"])
    assert [flex_windows(model, length, False, causal=False) for length in (5, 6)] == [set(), {8}]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None), ({"attention_backend": "eager"}, "--attention-backend eager"),
        ({"attention_dropout": 0.1}, "FlexAttention has no --attention-dropout (0.1)"),
        ({"kv_channels": 8}, "FlexAttention needs --kv-channels 16 or more"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_said(monkeypatch, change, said):
    monkeypatch.setattr(attention_flex, "missing_compiler", lambda _: None)
    found = why_not_flex(small_config(**change), "cuda")
    assert found == said
    monkeypatch.setattr(attention_flex, "missing_compiler", lambda _: "no C compiler found")
    assert why_not_flex(small_config(), "cuda") == (
        "FlexAttention needs a compiler: no C compiler found"
    )


@pytest.mark.parametrize("kind", ["gemma2", "gpt-oss"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_micro_batch_has_its_masks_where_a_gpu_uses_them(monkeypatch, device, kind):
    """ "meta" stands for the GPU."""
    monkeypatch.setattr(attention_flex, "DEVICES", ("meta",))
    monkeypatch.setattr(attention_flex, "missing_compiler", lambda _: None)
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64, device=device)
    batch = GPTBatch(tokens, tokens, tokens.float(), None, tokens)
    masks = begin(small_config(**KINDS[kind]), batch).masks
    assert set(masks.blocks) == ({8, None} if device == "meta" else set())
    assert (masks._documents is None) == (device == "meta")
