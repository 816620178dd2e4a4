"""Logits of small networks by the formulas of Megatron-LM, Megatron-DeepSpeed, BLOOM and GPT-NeoX,
from the weights of each tensor rank in the order in which its program stores them.

Nothing here comes from this project. A rank computes its heads and its part of an MLP, and the
outputs of all ranks are added, as their layers do.
"""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

WIDTH, VOCABULARY, LENGTH = 64, 24, 12


@dataclass(frozen=True)
class Formula:
    """Network of a program.

    Attributes:
        order: of the rows of a rank's queries, keys and values: ``interleaved`` per group of heads,
            ``thirds`` of a rank, ``heads`` [3, heads, width], ``channels`` [heads, width, 3],
            ``shares`` [heads, width + 2 shares], a share being a head's part of the keys.
        gate: which half of a gated MLP is the gate, ``first``, ``last`` or ``apart`` in a matrix of
            its own; None without one.
        biases: output biases that each rank has whole (``once``), or an addend of (``addends``).
        rms: RMSNorm; ``outside`` if its epsilon is added to the root.
        table: standard deviation of the token embedding; a small one makes a norm's epsilon matter.
    """

    heads: int = 8
    groups: int = 8
    order: str = "interleaved"
    positions: str = "rope"
    base: float = 10000.0
    percent: float = 1.0
    scale: float = 1.0
    epsilon: float = 1e-5
    rms: str | None = None
    gate: str | None = None
    activation: str = "tanh"
    parallel: bool = False
    biases: str | None = "once"
    qkv_bias: bool = True
    embedding_norm: bool = False
    tied: bool = True
    window: int | None = None
    drifted: bool = False
    ranks: int = 2
    layers: int = 2
    inner: int = 96
    table: float = 0.3

    @property
    def width(self) -> int:
        return WIDTH // self.heads


@dataclass
class Weights:
    """Tensors of each rank: outside the blocks, and of each block, by module and kind."""

    outer: list[dict[str, torch.Tensor]] = field(default_factory=list)
    blocks: list[list[dict[str, torch.Tensor]]] = field(default_factory=list)


def weights(formula: Formula) -> Weights:
    """Random tensors of each rank; norms that have drifted differ between ranks."""
    generator, size = torch.Generator().manual_seed(11), formula.ranks

    def draw(*shape, around=0.0, spread=0.15):
        return torch.randn(shape, generator=generator) * spread + around

    def norm(name):
        kinds = {"weight": 1.0} if formula.rms else {"weight": 1.0, "bias": 0.0}
        same = {f"{name}.{kind}": draw(WIDTH, around=around) for kind, around in kinds.items()}
        drift = 0.3 if formula.drifted else 0.0
        return [
            {key: values + drift * draw(WIDTH) for key, values in same.items()} if drift else same
            for _ in range(size)
        ]

    def merged(*lists):
        return [
            {k: v for part in parts for k, v in part.items()} for parts in zip(*lists, strict=True)
        ]

    table = [
        {"embedding.weight": draw(VOCABULARY // size, WIDTH, spread=formula.table)}
        for _ in range(size)
    ]
    outer = [table, norm("final")]
    if formula.positions == "learned":
        same = draw(LENGTH, WIDTH)
        outer.append([{"positions.weight": same}] * size)
    if formula.embedding_norm:
        outer.append(norm("embedding_norm"))
    if not formula.tied:
        outer.append([{"head.weight": draw(VOCABULARY // size, WIDTH)} for _ in range(size)])
    stored = Weights(merged(*outer))
    inner, rows = (
        formula.inner // size,
        (formula.heads + 2 * formula.groups) * formula.width // size,
    )
    for _ in range(formula.layers):
        blocks = [norm("norm1"), norm("norm2")]
        parts = []
        for _ in range(size):
            block = {"qkv.weight": draw(rows, WIDTH), "proj.weight": draw(WIDTH, WIDTH // size)}
            block["down.weight"] = draw(WIDTH, inner)
            if formula.gate == "apart":
                block |= {"gate.weight": draw(inner, WIDTH), "up.weight": draw(inner, WIDTH)}
            else:
                block["up.weight"] = draw(inner * (2 if formula.gate else 1), WIDTH)
            if formula.biases:
                block["up.bias"] = draw(len(block["up.weight"]))
            if formula.qkv_bias:
                block["qkv.bias"] = draw(rows)
            parts.append(block)
        if formula.biases:
            same = {"proj.bias": draw(WIDTH), "down.bias": draw(WIDTH)}
            for block in parts:
                apart = formula.biases == "addends"
                block |= {k: draw(WIDTH) for k in same} if apart else same
        stored.blocks.append(merged(*blocks, parts))
    return stored


def _norm(x, formula, ranks, name):
    """By the mean of the ranks' weights, which NeoX's converter takes."""
    weight = torch.stack([rank[f"{name}.weight"] for rank in ranks]).mean(0)
    if formula.rms:
        square = x.pow(2).mean(-1, keepdim=True)
        root = square.sqrt() + formula.epsilon
        return (
            x / (root if formula.rms == "outside" else (square + formula.epsilon).sqrt()) * weight
        )
    bias = torch.stack([rank[f"{name}.bias"] for rank in ranks]).mean(0)
    return F.layer_norm(x, (WIDTH,), weight, bias, formula.epsilon)


def _split(mixed, formula):
    """Queries [S, heads, width], keys and values [S, groups, width] of a rank."""
    length, width = len(mixed), formula.width
    heads, groups = formula.heads // formula.ranks, formula.groups // formula.ranks
    if formula.order == "heads":
        return mixed.view(length, 3, heads, width).unbind(1)
    if formula.order == "channels":
        return mixed.view(length, heads, width, 3).unbind(3)
    if formula.order == "shares":
        share = groups * width // heads
        q, k, v = mixed.view(length, heads, -1).split([width, share, share], 2)
    elif formula.order == "thirds":
        q, k, v = mixed.split([heads * width, groups * width, groups * width], -1)
    else:
        each = heads // groups
        per_group = mixed.view(length, groups, each + 2, width)
        q, k, v = per_group.split([each, 1, 1], 2)
    return q.reshape(length, heads, width), *(t.reshape(length, groups, width) for t in (k, v))


def _rotated(x, formula):
    rotated = int(formula.width * formula.percent)
    inverse = formula.base ** -(torch.arange(0, rotated, 2) / rotated)
    angles = torch.arange(len(x))[:, None] / formula.scale * inverse
    cos, sin = (f(torch.cat([angles, angles], -1))[:, None] for f in (torch.cos, torch.sin))
    turned, rest = x[..., :rotated], x[..., rotated:]
    first, second = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, rest], -1)


def _attention(h, formula, rank, number):
    mixed = F.linear(h, rank["qkv.weight"], rank.get("qkv.bias"))
    q, k, v = _split(mixed, formula)
    if formula.positions == "rope":
        q, k = _rotated(q, formula), _rotated(k, formula)
    each = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(each, 1) for t in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(formula.width)
    places = torch.arange(len(h))
    if formula.positions == "alibi":
        first = number * q.shape[1]
        slopes = 2 ** (-8 / formula.heads * (torch.arange(first, first + q.shape[1]) + 1.0))
        scores = scores + slopes[:, None, None] * places
    distance = places[:, None] - places
    hidden = distance < 0
    if formula.window is not None:
        hidden = hidden | (distance > formula.window)
    scores = scores.masked_fill(hidden, -math.inf)
    context = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
    return F.linear(context, rank["proj.weight"])


def _mlp(h, formula, rank):
    x = F.linear(h, rank["up.weight"], rank.get("up.bias"))
    if formula.gate == "apart":
        x = F.silu(F.linear(h, rank["gate.weight"])) * x
    elif formula.gate:
        halves = x.chunk(2, -1)
        gate, value = halves if formula.gate == "first" else halves[::-1]
        x = F.silu(gate) * value
    elif formula.activation == "relu":
        x = F.relu(x)
    else:
        x = F.gelu(x, approximate="tanh" if formula.activation == "tanh" else "none")
    return F.linear(x, rank["down.weight"])


def _bias(ranks, formula, name):
    if not formula.biases:
        return 0.0
    return sum(rank[name] for rank in ranks) if formula.biases == "addends" else ranks[0][name]


def logits(formula: Formula, stored: Weights, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [S, V] of a text [S]."""
    table = torch.cat([rank["embedding.weight"] for rank in stored.outer])
    x = table[tokens]
    if formula.embedding_norm:
        x = _norm(x, formula, stored.outer, "embedding_norm")
    if formula.positions == "learned":
        x = x + stored.outer[0]["positions.weight"][: len(tokens)]
    for ranks in stored.blocks:
        h = _norm(x, formula, ranks, "norm1")
        attended = sum(_attention(h, formula, rank, n) for n, rank in enumerate(ranks))
        attended = attended + _bias(ranks, formula, "proj.bias")
        h = _norm(x if formula.parallel else x + attended, formula, ranks, "norm2")
        done = sum(_mlp(h, formula, rank) for rank in ranks) + _bias(ranks, formula, "down.bias")
        x = x + attended + done
    x = _norm(x, formula, stored.outer, "final")
    head = table if formula.tied else torch.cat([rank["head.weight"] for rank in stored.outer])
    return x @ head.T
