"""Attention of divided sequences against the definition on one process, ``eager``.

Shapes: B batch, N query heads, K key heads, S queries, T keys, D head width.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from configs import model_config
from pool import tensor_group
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.config import ConfigError
from megatron.config.blocks import Chunk
from megatron.features.context import blocks, exchange, kernels
from megatron.features.context.attention import ContextAttention, context_attention
from megatron.features.context.blocks import BlockRule
from megatron.features.context.documents import DocumentBounds
from megatron.features.context.exchange import spans_of
from megatron.features.context.kernels import Scoring
from megatron.model.attention_backends import eager, sdpa
from megatron.model.attention_masks import (
    AttentionMasks,
    AttentionScoring,
    alibi_slopes,
    causal_mask,
)
from megatron.model.block import Block
from megatron.model.layer_list import LayerState, initialise
from megatron.parallel import collectives
from megatron.parallel.context import Context
from megatron.parallel.mesh import Group
from megatron.parallel.shard import shard_of
from megatron.parallel.tensor_parallel import TensorParallel

B, S, D = 2, 48, 6

CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "grouped": {"K": 2},
    "one key head": {"K": 1},
    "key heads that do not divide": {"N": 12, "K": 3},
    "full": {"causal": False},
    "padding": {"causal": False, "padded": True},
    "cross": {"causal": False, "padded": True, "T": 32},
    "window": {"window": 5},
    "window over borders": {"window": 17, "K": 2},
    "symmetric window": {"window": 6, "causal": False},
    "chunks": {"window": Chunk(7), "K": 2, "sinks": True},
    "chunks in documents": {"window": Chunk(20), "documents": "packed"},
    "symmetric chunks": {"window": Chunk(10), "causal": False},
    "documents": {"documents": "packed"},
    "documents and window": {"documents": "packed", "window": 4},
    "scattered documents": {"documents": "scattered"},
    "full documents": {"documents": "packed", "causal": False},
    "softcap": {"softcap": 2.0, "K": 2},
    "alibi": {"alibi": True},
    "symmetric alibi": {"alibi": True, "causal": False},
    "sinks": {"sinks": True, "K": 2},
    "sinks and window": {"sinks": True, "window": 5},
    "everything": {
        "K": 2, "sinks": True, "window": 6, "documents": "packed", "alibi": True, "softcap": 3.0,
        "scale": 0.3,
    },
    "bias": {"bias": True, "causal": False},
    "causal bias": {"bias": True, "sinks": True},
}  # fmt: skip

WAYS = {
    2: [("p2p", 1), ("a2a", 1), ("allgather", 1)],
    4: [("p2p", 1), ("a2a", 1), ("allgather", 1), ("a2a+p2p", 2)],
}

SAMPLE = {
    2: {
        "p2p": ("causal", "cross", "window over borders", "everything", "scattered documents"),
        "a2a": ("one key head", "everything"),
        "allgather": ("grouped", "documents and window", "causal bias"),
    },
    4: {
        "p2p": ("chunks", "grouped", "symmetric window", "sinks and window", "padding"),
        "a2a": ("key heads that do not divide",),
        "a2a+p2p": ("causal", "alibi", "everything", "cross"),
        "allgather": ("full documents",),
    },
}


class Problem(NamedTuple):
    """The whole inputs of an attention, and what it is to compute."""

    q_BNSD: Tensor
    k_BKTD: Tensor
    v_BKTD: Tensor
    bias_1NST: Tensor | None
    sinks_N: Tensor | None
    grad_BNSD: Tensor
    scores: AttentionScoring
    document_ids_BS: Tensor | None
    padding_BT: Tensor | None

    @property
    def leaves(self) -> list[Tensor]:
        tensors = (self.q_BNSD, self.k_BKTD, self.v_BKTD, self.bias_1NST, self.sinks_N)
        return [x for x in tensors if x is not None]

    def masks(self) -> AttentionMasks:
        return AttentionMasks(self.document_ids_BS, self.padding_BT, causal=self.scores.causal)

    def whole(self, attend: Any = eager, dropout: float = 0.0) -> list[Tensor]:
        """Output and gradients on one process."""
        y = attend(
            self.q_BNSD, self.k_BKTD, self.v_BKTD, self.scores, self.masks(), dropout,
            self.bias_1NST, self.sinks_N,
        )  # fmt: skip
        return [y.detach(), *torch.autograd.grad(y, self.leaves, self.grad_BNSD)]

    def output(self, attend: ContextAttention, dropout: float = 0.0) -> Tensor:
        """This rank's part of the output."""
        take = attend.context.take
        q, k, v = (take(x, 2) for x in (self.q_BNSD, self.k_BKTD, self.v_BKTD))
        bias = None if self.bias_1NST is None else take(self.bias_1NST, 2)
        return attend(q, k, v, self.scores, self.masks(), dropout, bias, self.sinks_N)

    def divided(self, attend: ContextAttention) -> list[Tensor]:
        """This rank's part of the output, and the sums over ranks of the gradients."""
        y = self.output(attend)
        grads = torch.autograd.grad(y, self.leaves, attend.context.take(self.grad_BNSD, 2))
        grads = [x.contiguous() for x in grads]
        for x in grads:
            dist.all_reduce(x)
        return [y.detach(), *grads]


def problem(
    N: int = 8,
    K: int = 4,
    T: int = S,
    length: int = S,
    causal: bool = True,
    padded: bool = False,
    window: int | None = None,
    documents: str | None = None,
    softcap: float | None = None,
    alibi: bool = False,
    sinks: bool = False,
    bias: bool = False,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> Problem:
    torch.manual_seed(5)
    keys = T if T != S else length

    def draw(*shape: int) -> Tensor:
        # As after a projection: tokens before heads.
        return torch.randn(*shape, dtype=torch.float64).to(dtype).transpose(1, 2)

    q, k, v = draw(B, length, N, D), draw(B, keys, K, D), draw(B, keys, K, D)
    ids = None
    if documents == "packed":
        starts = torch.zeros(B, length, dtype=torch.long)
        starts[0, [9, 10, 31]] = starts[1, 17] = 1
        ids = starts.cumsum(1)
    elif documents == "scattered":
        ids = torch.randint(3, (B, length))
    padding = torch.arange(keys) >= torch.tensor([[keys - 5], [keys // 3]]) if padded else None
    added = draw(1, length, N, keys) if bias else None
    if added is not None and causal:
        added = added.masked_fill(~causal_mask(length, keys, q.device), -torch.inf)
    sinks_N = torch.randn(N, dtype=torch.float64).to(dtype) if sinks else None
    leaves = [x if x is None else x.requires_grad_() for x in (q, k, v, added, sinks_N)]
    slopes = alibi_slopes(N) if alibi else ()
    scores = AttentionScoring(scale, softcap, window, slopes, causal)
    return Problem(*leaves, draw(B, length, N, D), scores, ids, padding)


def attention_of(kind: str, inner: int, heads: int = 8) -> ContextAttention:
    group = tensor_group() if not dist.is_initialized() else _world()
    return context_attention(sdpa, Context(group, (), inner), kind, heads)


def _world() -> Group:
    ranks = tuple(range(dist.get_world_size()))
    return Group(ranks, dist.get_rank(), dist.group.WORLD)


def worst_errors(cases: list[tuple[str, int, str]]) -> dict[tuple[str, int, str], float]:
    errors = {}
    for kind, inner, name in cases:
        whole = problem(**CASES[name])
        attend = attention_of(kind, inner, whole.q_BNSD.shape[1])
        expected = whole.whole()
        expected[0] = attend.context.take(expected[0], 2)
        pairs = zip(whole.divided(attend), expected, strict=True)
        errors[kind, inner, name] = max(float((x - y).abs().max()) for x, y in pairs)
    return errors


@pytest.mark.parametrize("ranks", [2, 4])
def test_outputs_and_gradients(pool, ranks):
    cases = [(kind, inner, name) for kind, inner in WAYS[ranks] for name in SAMPLE[ranks][kind]]
    for errors in pool.run(ranks, worst_errors, cases):
        assert errors.keys() == set(cases)
        assert max(errors.values()) < 1e-12, errors


@pytest.mark.proof
@pytest.mark.parametrize("ranks", [2, 4])
def test_outputs_and_gradients_of_every_case(pool, ranks):
    cases = [(kind, inner, name) for kind, inner in WAYS[ranks] for name in CASES]
    for errors in pool.run(ranks, worst_errors, cases):
        assert errors.keys() == set(cases)
        assert max(errors.values()) < 1e-12, errors


def reduced_errors(kind: str, inner: int, name: str, dtype: torch.dtype) -> list[float]:
    """Root mean squares of the errors of output and gradients, of those of one process with its
    kernel, and of the values."""
    reduced = problem(**CASES[name], dtype=dtype)
    exact = problem(**CASES[name])
    for x, y in zip(exact.leaves, reduced.leaves, strict=True):
        x.data.copy_(y)
    exact = exact._replace(grad_BNSD=reduced.grad_BNSD.double())
    attend = attention_of(kind, inner, reduced.q_BNSD.shape[1])
    y, *grads = reduced.divided(attend)
    results = zip(
        [attend.context.whole(y, 2), *grads], reduced.whole(sdpa), exact.whole(), strict=True
    )
    errors = []
    for ours, one, right in results:
        errors.append([float((x.double() - right).square().mean().sqrt()) for x in (ours, one)])
    return errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_errors_in_other_dtypes(pool, dtype):
    """At most half as large again as those of one process with the same kernel."""
    for kind, inner, name in (("p2p", 1, "grouped"), ("allgather", 1, "documents and window")):
        for errors in pool.run(2, reduced_errors, kind, inner, name, dtype):
            for ours, one in errors:
                assert ours < 1.5 * one, errors


class Traffic(NamedTuple):
    """Elements that this rank sends to others, by call."""

    sent: list[int]
    itemsizes: list[int]


@contextmanager
def counted() -> Iterator[Traffic]:
    """Elements that this rank sends to each other by all-to-all, or that it sends to all others by
    gathering and receives less its own by scattering sums."""
    traffic, size, rank = Traffic([], []), dist.get_world_size(), dist.get_rank()

    def note(count: int, x: Tensor) -> None:
        traffic.sent.append(count)
        traffic.itemsizes.append(x.element_size())

    def exchanged(into: Tensor, x: Tensor, output_split_sizes: Any, input_split_sizes: Any, **more):
        note(sum(input_split_sizes) - input_split_sizes[rank], x)
        return plain[0](into, x, output_split_sizes, input_split_sizes, **more)

    def gathered(into: Tensor, x: Tensor, **more: Any):
        note(x.numel() * (size - 1), x)
        return plain[1](into, x, **more)

    def scattered(into: Tensor, x: Tensor, **more: Any):
        note(into.numel() * (size - 1), x)
        return plain[2](into, x, **more)

    gather, scatter = collectives.all_gather_flat, collectives.reduce_scatter_flat
    plain = dist.all_to_all_single, gather, scatter
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", exchanged)
        patch.setattr(collectives, "all_gather_flat", gathered)
        patch.setattr(collectives, "reduce_scatter_flat", scattered)
        yield traffic


def traffic_of(kind: str, inner: int, case: dict[str, Any]) -> tuple[Traffic, Traffic]:
    whole = problem(**case)
    attend = attention_of(kind, inner, whole.q_BNSD.shape[1])
    with counted() as forward:
        y = whole.output(attend)
    with counted() as backward:
        torch.autograd.grad(y, whole.leaves, attend.context.take(whole.grad_BNSD, 2))
    return forward, backward


def test_bytes_of_exchanged_heads(pool):
    """(2 h + 2 g d) B S / P^2 (P - 1) elements in two collectives, and the same backward
    (arXiv:2309.14509, for grouped heads)."""
    N, K, P = 8, 4, 4
    for forward, backward in pool.run(P, traffic_of, "a2a", 1, {"N": N, "K": K}):
        whole = (2 * N + 2 * K) * D * B * S // P**2 * (P - 1)
        assert sum(forward.sent) == sum(backward.sent) == whole
        assert len(forward.sent) == len(backward.sent) == 2
        assert {*forward.itemsizes, *backward.itemsizes} == {8}


def test_bytes_of_gathered_keys(pool):
    """2 B s g d (P - 1) forward; again, and sums of as many gradients, backward."""
    K, P = 2, 4
    for forward, backward in pool.run(P, traffic_of, "allgather", 1, {"K": K}):
        assert forward.sent == [2 * B * S // P * K * D * (P - 1)]
        assert backward.sent == forward.sent * 2


def test_bytes_of_a_ring(pool):
    """2 B s g d (P - 1) forward where all keys are seen; in causal attention ranks before the
    reader send the first half of their keys only: on average three quarters of it."""
    K, P = 2, 4
    keys = 2 * B * S // P * K * D
    float32 = {"K": K, "causal": False, "dtype": torch.float32}
    for forward, backward in pool.run(P, traffic_of, "p2p", 1, float32):
        assert forward.sent == [keys] * (P - 1)
        assert sorted(backward.sent) == [keys] * 2 * (P - 1)
        assert {*forward.itemsizes, *backward.itemsizes} == {4}
    half = {"K": K, "causal": False, "dtype": torch.bfloat16}
    for _, backward in pool.run(P, traffic_of, "p2p", 1, half):
        assert sorted(backward.itemsizes) == [2] * (P - 1) + [4] * (P - 1)
    causal = pool.run(P, traffic_of, "p2p", 1, {"K": K})
    for rank, (forward, _) in enumerate(causal):
        assert sum(forward.sent) == keys * rank + keys // 2 * (P - 1 - rank)
    assert sum(sum(forward.sent) for forward, _ in causal) == keys * P * (P - 1) * 3 // 4
    totals = [sum(sum(each[way].sent) for each in causal) for way in (0, 1)]
    assert totals[1] == 2 * totals[0]


@pytest.mark.parametrize("window, back", [(2, 1), (S // 8 + 2, 2)])
def test_a_window_leaves_out_what_it_hides(pool, window, back):
    """Queries of one of 2 P pieces see keys of so many before it, which are sent once to a rank."""
    P, K = 4, 4
    owners = [*range(P), *reversed(range(P))]
    sent = {
        (seen, owners[piece])
        for piece in range(2 * P)
        for seen in range(max(0, piece - back), piece)
        if owners[seen] != owners[piece]
    }
    traffic = pool.run(P, traffic_of, "p2p", 1, {"window": window, "K": K})
    assert sum(sum(forward.sent) for forward, _ in traffic) == 2 * B * S // 8 * K * D * len(sent)


def order_of_calls() -> tuple[list[str], list[str]]:
    """Events of a forward and of a backward pass of a ring."""
    attend, whole = attention_of("p2p", 1), problem(causal=False)
    events: list[str] = []
    start, forward, backward = exchange.start_exchange, kernels.forward, kernels.backward

    def started(*args: Any) -> Any:
        events.append("start")
        finish = start(*args)
        return lambda: (events.append("wait"), finish())[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "start_exchange", started)
        for name, kernel in (("forward", forward), ("backward", backward)):
            note = functools.partial(events.append, "kernel")
            patch.setattr(kernels, name, lambda *args, _=kernel, note=note: (note(), _(*args))[1])
        y = whole.output(attend)
        first = events.copy()
        events.clear()
        torch.autograd.grad(y, whole.leaves, attend.context.take(whole.grad_BNSD, 2))
    return first, events


def test_keys_travel_while_a_block_is_computed(pool):
    """And gradients of the block before, in the backward pass; nothing waits for what it has just
    started."""
    for forward, backward in pool.run(4, order_of_calls):
        assert forward == ["start", "kernel", *["wait", "start", "kernel"] * 2, "wait", "kernel"]
        keys, gradients = ["wait", "start"], ["wait", "start"]
        assert backward == [
            "start", "kernel", *keys, "kernel", "start", *keys, "kernel", *gradients, "wait",
            "kernel", *gradients, "wait",
        ]  # fmt: skip


DROPOUT = 0.3


def dropout_checks(kind: str, inner: int) -> tuple[float, float, float]:
    """Errors of the gradient of the values, of which the output is a linear map; of that of queries
    and keys, from a difference quotient; and of recomputed gradients."""
    attend, whole = attention_of(kind, inner), problem(K=2, softcap=3.0, window=20)
    take, leaves = attend.context.take, whole.leaves
    grad = take(whole.grad_BNSD, 2)

    def output(tensors: list[Tensor]) -> Tensor:
        torch.manual_seed(9)
        q, k, v = tensors
        return whole._replace(q_BNSD=q, k_BKTD=k, v_BKTD=v).output(attend, DROPOUT)

    def total(x: Tensor) -> float:
        dist.all_reduce(x)
        return float(x)

    y = output(leaves)
    grads = torch.autograd.grad(y, leaves, grad)
    linear = total((grads[2] * leaves[2]).sum()) - total((grad * y.detach()).sum())
    with torch.no_grad():
        step, way = 1e-6, [torch.randn_like(leaf) for leaf in leaves]
        ends = [
            total((grad * output(torch._foreach_add(leaves, way, alpha=along))).sum())
            for along in (step, -step)
        ]
        slope = total(sum((d * g).sum() for d, g in zip(way, grads, strict=True)))
    again = checkpoint(output, leaves, use_reentrant=False)
    recomputed = torch.autograd.grad(again, leaves, grad)
    differences = [float((x - y).abs().max()) for x, y in zip(recomputed, grads, strict=True)]
    return abs(linear), abs((ends[0] - ends[1]) / (2 * step) - slope), max(differences)


@pytest.mark.parametrize("ranks, kind, inner", [(2, "p2p", 1), (4, "a2a+p2p", 2)])
def test_dropout_is_drawn_again_in_the_backward_pass(pool, ranks, kind, inner):
    for linear, quotient, recomputed in pool.run(ranks, dropout_checks, kind, inner):
        assert linear < 1e-10
        assert quotient < 1e-6
        assert recomputed == 0


def kept_keys(kind: str, inner: int) -> Tensor:
    """Return whether each query of this rank keeps each key, [N, s, S]: of keys with equal scores,
    the values of which are the rows of an identity matrix."""
    attend = attention_of(kind, inner)
    torch.manual_seed(3)
    q = torch.zeros(1, 8, S, S, dtype=torch.float64)
    v = torch.eye(S, dtype=torch.float64).expand(1, 8, S, S)
    q, k, v = (attend.context.take(x, 2) for x in (q, q, v))
    scores = AttentionScoring(causal=False)
    return attend(q, k, v, scores, AttentionMasks(causal=False), DROPOUT)[0] > 0


@pytest.mark.parametrize("kind, inner", [("p2p", 1), ("allgather", 1), ("a2a+p2p", 2), ("a2a", 1)])
def test_dropout_differs_everywhere(pool, kind, inner):
    """Between heads, and between pieces of queries and of keys, of all ranks."""
    kept = torch.cat(pool.run(4, kept_keys, kind, inner), 1)
    assert abs(kept.double().mean() - (1 - DROPOUT)) < 0.01
    pieces = kept.unflatten(2, (8, -1)).unflatten(1, (8, -1)).permute(0, 1, 3, 2, 4)
    rows = pieces.flatten(0, 2).flatten(1)
    assert len(rows.unique(dim=0)) == len(rows)


def shown_by_tiles(rule: BlockRule, queries: Any, keys: Any, q: Tensor) -> Tensor:
    """[B, S, T]: how often tiles show a key to a query."""
    rows, columns = (torch.cat([torch.arange(*span) for span in each]) for each in (queries, keys))
    shown = torch.zeros(len(q), len(rows), len(columns), dtype=torch.int)
    for tile in rule.tiles(queries, keys):
        part = shown[:, tile.queries, tile.keys]
        visible = torch.ones(part.shape, dtype=torch.bool)
        if tile.kind == "causal":
            visible = visible.tril()
        elif tile.kind == "masked":
            visible = rule.mask(tile, q)[:, 0].expand(part.shape) > -1e20
        part += visible
    whole = torch.zeros(len(q), S, S, dtype=torch.int)
    whole[:, rows[:, None], columns] = shown
    return whole


@pytest.mark.parametrize("window", [None, 1, 5, 14, 47, Chunk(5), Chunk(16), Chunk(31)], ids=str)
@pytest.mark.parametrize("documents", [None, "packed", "scattered"])
@pytest.mark.parametrize("causal", [True, False])
def test_tiles_show_what_masks_show(monkeypatch, window, documents, causal):
    """Once each, of all blocks of a ring and of gathered keys."""
    monkeypatch.setattr(blocks, "_ROWS", 5)
    whole = problem(documents=documents, window=window, causal=causal)
    masks = whole.masks()
    rule = BlockRule(Scoring(1.0), causal, window, (), DocumentBounds.of(masks))
    visible = masks.visible(S, S, window, torch.device("cpu"), causal)
    if visible is None:
        visible = causal_mask(S, S, torch.device("cpu")) if causal else torch.ones(S, S)
    expected = visible.int().expand(B, 1, S, S)[:, 0]
    ranks = [spans_of(rank, 4, S) for rank in range(4)]
    for keys in (ranks, [((0, S),)]):
        shown = [
            shown_by_tiles(rule, q, k, whole.q_BNSD) for q, k in itertools.product(ranks, keys)
        ]
        assert torch.equal(torch.stack(shown).sum(0), expected)


def test_calls_of_kernels(monkeypatch):
    """One a block in causal attention and in full attention; and a window, or documents, are not
    masked where it makes no difference."""
    ranks = [spans_of(rank, 4, 1 << 16) for rank in range(4)]
    pairs = list(itertools.product(ranks, ranks))
    for causal in (True, False):
        rule = BlockRule(Scoring(1.0), causal)
        counts = [len(rule.tiles(*pair)) for pair in pairs]
        assert counts == [1] * 16
    ids = (torch.arange(1 << 16) >= 1 << 15).long()[None]
    rule = BlockRule(Scoring(1.0), True, None, (), DocumentBounds(ids))
    tiles = [tile for pair in pairs for tile in rule.tiles(*pair)]
    assert {tile.kind for tile in tiles} == {"all", "causal"}
    # A window's masks are no larger than some rows of the keys that these see.
    rule = BlockRule(Scoring(1.0), True, 4096)
    masked = [tile for pair in pairs for tile in rule.tiles(*pair) if tile.kind == "masked"]
    assert masked
    assert max(tile.keys.stop - tile.keys.start for tile in masked) <= 4096 + 512


def refused(kind: str, inner: int, heads: int) -> str:
    with pytest.raises(ConfigError) as error:
        attention_of(kind, inner, heads)
    return str(error.value)


def test_heads_that_do_not_divide_are_refused(pool):
    said = pool.run(2, refused, "a2a", 1, 3)[0]
    assert said.startswith("--cp-comm-type a2a divides the query heads among 2 ranks")
    assert "has 3: a divisor of them, or p2p or allgather" in said


def autocast_outputs() -> list[torch.dtype]:
    whole = problem(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        return [whole.output(attention_of(kind, 1)).dtype for kind, _ in WAYS[2]]


def test_autocast_chooses_the_dtype(pool):
    assert pool.run(2, autocast_outputs)[0] == [torch.bfloat16] * 3


SHAPE = {
    "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4,
    "num_query_groups": 2, "kv_channels": 8, "seq_length": S, "max_position_embeddings": S,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "position_embedding_type": "rope",
    "normalization": "RMSNorm", "swiglu": True, "sliding_window": 20,
}  # fmt: skip


def block_results(kind: str, recompute: bool, compiled: bool) -> list[Tensor]:
    """Output and gradients of a block in float64, whose attention may be recomputed."""
    config = model_config(**SHAPE)
    tp = TensorParallel(context=Context(_world(), (kind,) * 2))
    block = Block(config, 0, tp, recompute).double()
    for name, param in block.named_parameters():
        initialise(shard_of(param).whole or name, param, 1, tp.coordinates)
    if compiled:
        block.compile(backend="aot_eager", dynamic=False)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, S, 32, generator=generator, dtype=torch.float64)
    x = tp.context.take(x, 1).requires_grad_()
    y = block(LayerState(x, position_ids=tp.context.positions(S)[None])).hidden
    leaves = [x, *block.parameters()]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]


def recomputed_difference(kind: str, compiled: bool) -> float:
    """The largest one from a block that is neither recomputed nor compiled."""
    tensor_group()
    torch.compiler.reset()
    expected = block_results(kind, recompute=False, compiled=False)
    results = [block_results(kind, recompute, compiled) for recompute in (True, False)]
    return max(
        float((x - y).abs().max()) for each in results for x, y in zip(each, expected, strict=True)
    )


@pytest.mark.parametrize("kind", ["p2p", "a2a"])
def test_recomputed_attention(pool, kind):
    assert pool.run(2, recomputed_difference, kind, False) == [0.0, 0.0]


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["p2p", "a2a", "allgather"])
def test_compiled_blocks(pool, kind):
    """Attention is not part of their graphs."""
    assert max(pool.run(2, recomputed_difference, kind, True, timeout=600.0)) < 1e-12
