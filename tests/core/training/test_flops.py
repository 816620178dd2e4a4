"""FLOP counts against torch's own counter and against published formulas."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from configs import model_config
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from megatron.config.blocks import Chunk
from megatron.data.gpt_batch import share_within_documents
from megatron.families import build_model, family_names, family_of, spec_of
from megatron.features.adapters.model import with_adapters
from megatron.features.adapters.report import with_additions
from megatron.features.masked.batch import MockTokenizer, collate_bert
from megatron.features.masked.bert import BertRecipe
from megatron.features.masked.flags import MaskedDataConfig
from megatron.model.flops import TransformerShape
from megatron.model.layer_list import LayerStack, initialise
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.run.run import parse_run, run_data
from megatron.tokenizer import build_tokenizer

SHAPES = {
    "gpt2": TransformerShape(2, 32, 128, 4, 4, 8, 16, 64),
    "grouped": TransformerShape(3, 32, 96, 4, 2, 8, 24, 80),
    "gated": TransformerShape(1, 48, 80, 6, 1, 16, 20, 128, gated=True),
}


class PlainBlock(nn.Module):
    """A block in plain torch whose attention multiplies the whole score matrix."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.shape = shape
        query, kv = (
            n * shape.kv_channels for n in (shape.num_attention_heads, shape.num_query_groups)
        )
        self.query = nn.Linear(shape.hidden_size, query)
        self.key = nn.Linear(shape.hidden_size, kv)
        self.value = nn.Linear(shape.hidden_size, kv)
        self.out = nn.Linear(query, shape.hidden_size)
        self.up = nn.Linear(shape.hidden_size, shape.ffn_hidden_size)
        self.gate = nn.Linear(shape.hidden_size, shape.ffn_hidden_size) if shape.gated else None
        self.down = nn.Linear(shape.ffn_hidden_size, shape.hidden_size)

    def forward(self, hidden_BSH: torch.Tensor) -> torch.Tensor:
        def heads(tensor, count):
            return tensor.unflatten(-1, (count, -1)).transpose(1, 2)

        shape = self.shape
        repeats = shape.num_attention_heads // shape.num_query_groups
        query = heads(self.query(hidden_BSH), shape.num_attention_heads)
        key = heads(self.key(hidden_BSH), shape.num_query_groups).repeat_interleave(repeats, 1)
        value = heads(self.value(hidden_BSH), shape.num_query_groups).repeat_interleave(repeats, 1)
        mixed = (query @ key.transpose(-1, -2)).softmax(-1) @ value
        hidden_BSH = hidden_BSH + self.out(mixed.transpose(1, 2).flatten(2))
        inner = F.gelu(self.up(hidden_BSH))
        if self.gate is not None:
            inner = inner * self.gate(hidden_BSH)
        return hidden_BSH + self.down(inner)


@pytest.mark.parametrize("name", SHAPES)
def test_against_torch_flop_counter(name):
    shape, samples = SHAPES[name], 3
    embedding = nn.Embedding(shape.padded_vocab_size, shape.hidden_size)
    blocks = nn.Sequential(*(PlainBlock(shape) for _ in range(shape.num_layers)))
    tokens_BS = torch.randint(shape.padded_vocab_size, (samples, shape.seq_length))
    with FlopCounterMode(display=False) as counter:
        logits = F.linear(blocks(embedding(tokens_BS)), embedding.weight)
        logits.sum().backward()
    assert shape.flops_per_step(samples, causal=False) == counter.get_total_flops()


@pytest.mark.parametrize("name", SHAPES)
def test_recomputed_blocks_against_torch_flop_counter(name):
    """Of which "selective" leaves the linear layers out, and "block" the last blocks."""
    shape, samples = SHAPES[name], 3
    blocks = nn.Sequential(*(PlainBlock(shape) for _ in range(shape.num_layers)))
    with FlopCounterMode(display=False) as counter:
        blocks(torch.randn(samples, shape.seq_length, shape.hidden_size))
    tokens, found = samples * shape.seq_length, counter.get_flop_counts()["Global"]
    again = partial(shape.recomputed_flops_per_token, causal=False)
    assert tokens * again("uniform") == counter.get_total_flops()
    assert tokens * again("selective") == found[torch.ops.aten.bmm]
    assert again("block", blocks=1) == again("uniform") / shape.num_layers
    assert again("block", blocks=9) == again("uniform") and again(None) == 0


def test_against_narayanan_2021():
    """72 B s L h^2 (1 + s / 6h + V / 12 h L), the formula of GPT with an MLP four times as wide."""
    layers, hidden, seq, vocab, samples = 24, 2048, 1024, 51200, 7
    shape = TransformerShape(layers, hidden, 4 * hidden, 16, 16, hidden // 16, seq, vocab)
    published = (
        72
        * samples
        * seq
        * layers
        * hidden**2
        * (1 + seq / (6 * hidden) + vocab / (12 * hidden * layers))
    )
    assert shape.flops_per_step(samples, causal=False) == pytest.approx(published, rel=1e-12)


@pytest.mark.parametrize("name", SHAPES)
def test_causal_halves_attention_and_nothing_else(name):
    shape = SHAPES[name]
    whole, half = (shape.flops_per_token(causal=causal) for causal in (False, True))
    # Two products, forward and twice backward, of 2 x sequence x query width operations.
    attention = (
        3
        * 2
        * 2
        * shape.seq_length
        * shape.num_attention_heads
        * shape.kv_channels
        * shape.num_layers
    )
    assert whole - half == attention / 2


def test_windows_against_counted_keys():
    """Queries of a block with a window see fewer keys, the first ones fewer still."""
    length, windows = 4096, (512, None, 4096, 9000)
    shape = TransformerShape(4, 64, 256, 4, 4, 16, length, 64, windows=windows)
    counted = sum(min(n + 1, w or length, length) for w in windows for n in range(length)) / length
    whole = TransformerShape(4, 64, 256, 4, 4, 16, length, 64)
    per_key = 3 * 2 * 2 * 4 * 16  # two products, forward and twice backward
    rest = whole.flops_per_token(causal=False) - per_key * 4 * length
    found = (shape.flops_per_token(causal=True) - rest) / per_key
    assert found == pytest.approx(counted, rel=1e-3)
    assert (shape.flops_per_token(causal=False) - rest) / per_key == 512 + 3 * length


def test_chunks_and_gates_against_counted_products():
    """Queries see the keys of their chunk, of which the last is not full; a gate is one more row of
    the projection for each channel."""
    length, windows = 4000, (Chunk(512), None)
    shape = TransformerShape(2, 64, 256, 4, 4, 16, length, 64, windows=windows)
    counted = sum(n % 512 + 1 + n + 1 for n in range(length)) / length
    whole = TransformerShape(2, 64, 256, 4, 4, 16, length, 64)
    per_key = 3 * 2 * 2 * 4 * 16
    rest = whole.flops_per_token(causal=False) - per_key * 2 * length
    found = (shape.flops_per_token(causal=True) - rest) / per_key
    assert found == pytest.approx(counted, rel=1e-3)
    gated = model_config(attention_output_gate=True).with_vocabulary(60)
    plain = model_config().with_vocabulary(60)
    more, less = (family_of("gpt").shape(each).flops_per_token(causal=True)
                  for each in (gated, plain))  # fmt: skip
    assert more - less == 3 * 2 * 2 * 8 * 8  # of 2 blocks with 2 heads of 4 channels, width 8


SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 3 "
    "--global-batch-size 3 --train-iters 1 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size "
    "127 --mock-data --attention-backend eager --hidden-dropout 0 --attention-dropout 0"
).split()
RETRO = ["--retro-encoder-hidden-dropout", "0", "--retro-encoder-attention-dropout", "0"]
FAMILIES = {
    "bert": [],
    "bert without a second head": [
        "--bert-no-binary-head",
        "--untie-embeddings-and-output-weights",
    ],
    "bert with grouped keys": [
        *("--bert-no-binary-head", "--swiglu", "--num-query-groups", "2"),
        *("--position-embedding-type", "rope"),
    ],
    "retro": [
        *("--num-layers", "4", "--retro-cross-attention-layers", "2", "3"),
        *("--retro-gpt-chunk-length", "8", "--retro-num-neighbors", "3", *RETRO),
    ],
    "t5": ["--decoder-seq-length", "16", "--decoder-num-layers", "3"],
    "t5 with relative positions": [
        *("--decoder-seq-length", "24", "--position-embedding-type", "relative"),
        *("--glu-activation", "geglu", "--num-query-groups", "2", "--kv-channels", "16"),
    ],
}
FAMILIES = {name: words for name, words in FAMILIES.items() if name.split()[0] in family_names()}


def built(name: str, *more: str):
    """Model, spec and batch of a family, and its shape with as many predictions as the batch."""
    family = name.split()[0]
    run = parse_run(None, ["--model-family", family, *SMALL, *FAMILIES[name], *more])
    config = run.config
    model, spec = build_model(config.model, config.parallel), spec_of(config.model)
    for each, param in model.canonical_parameters():
        initialise(each, param, 1)
    data = run_data(run)
    batch = data.collate([data.datasets.train[n] for n in range(3)])
    shape = family_of(family).shape(config.model, config)
    if shape.predictions is not None:
        found = batch.positions_BP.shape[1]
        assert found <= shape.predictions
        shape = dataclasses.replace(shape, predictions=found, other=_other(shape, found))
    return model, spec, batch, shape


def _other(shape: TransformerShape, found: int) -> float:
    assert shape.predictions is not None
    return shape.other - 2.0 * shape.hidden_size**2 * (shape.predictions - found)


@pytest.mark.parametrize("name", FAMILIES)
def test_families_against_torch_flop_counter(name):
    """Forward and backward of the model as it is built."""
    model, spec, batch, shape = built(name)
    with FlopCounterMode(display=False) as counter:
        spec.total(model(spec.begin(batch)).losses).backward()
    head = shape.last
    predictions = head.predictions or head.seq_length
    # The gradient of the head's bias is a sum that a CPU computes as a product with the mask.
    biased = any(
        each.endswith("word_embeddings.bias") or each == "output_layer.bias"
        for each, _ in model.canonical_parameters()
    )
    sums = 2 * 3 * predictions * shape.padded_vocab_size if biased else 0
    assert shape.flops_per_step(3, causal=False) + sums == counter.get_total_flops()


IN_PLACE = {torch.ops.aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1]}
"""Products that torch's counter does not know."""


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("gpt", ["all-linear"]),
        ("gpt", ["attention.qkv"]),
        ("t5", ["all-linear"]),
        ("t5", ["attention.qkv", "cross_attention.kv"]),
    ],
)
def test_adapters_against_torch_flop_counter(name, targets):
    """Frozen weights have no gradients, which are a third of the products."""
    sizes = ["--decoder-seq-length", "16"] if name == "t5" else []
    flags = [*SMALL, *sizes, "--lora", "--lora-rank", "5", "--lora-targets", *targets]
    run = parse_run(None, ["--model-family", name, *flags])
    config = run.config
    spec = with_adapters(spec_of(config.model), config)
    model = LayerStack(spec.layers(TensorParallel()), config.parallel)
    held = dict(model.canonical_parameters())
    for each, param in held.items():
        initialise(each, param, 1)
    data = run_data(run)
    with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
        batch = data.collate([data.datasets.train[n] for n in range(3)])
        spec.total(model(spec.begin(batch)).losses).backward()
    shape = with_additions(family_of(name).shape(config.model, config), config)
    # Counted, although nothing needs it: the gradient of the first blocks' inputs.
    first = 0
    for stack, length in (("layers", 32), ("encoder.layers", 32), ("decoder.layers", 16)):
        qkv = f"{stack}.0.attention.qkv."
        needless = sum(
            param.numel()
            for each, param in held.items()
            if each.startswith(qkv) and (each.endswith("_a") or each == f"{qkv}weight")
        )
        first += 2 * 3 * length * needless
    assert shape.flops_per_step(3, causal=False) - first == counter.get_total_flops()
    assert shape.flops_per_token(causal=True) < shape.flops_per_token(causal=False)


@pytest.mark.parametrize("name", [name for name in ("bert", "t5", "retro") if name in FAMILIES])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_what_families_recompute_against_torch_flop_counter(name, recompute):
    flags = ["--recompute-granularity", recompute]
    counted = []
    for more in ([], flags):
        model, spec, batch, shape = built(name, *more)
        with FlopCounterMode(display=False) as counter:
            spec.total(model(spec.begin(batch)).losses).backward()
        counted.append(counter.get_total_flops())
    again = {"selective": "selective", "full": "uniform"}[recompute]
    expected = 3 * 32 * shape.recomputed_flops_per_token(again, causal=False)
    # torch stops a recomputation at the last tensor that is needed, before the last product.
    assert 0.5 * expected <= counted[1] - counted[0] <= expected


def test_a_full_sample_has_as_many_predictions_as_are_counted():
    config = parse_run(None, ["--model-family", "bert", *SMALL, "--seq-length", "256"]).config
    recipe = BertRecipe.from_config(
        MaskedDataConfig(), MockTokenizer(build_tokenizer(config.tokenizer)), 256, 1
    )
    text = np.arange(60, 60 + 253) % 90
    rng = np.random.default_rng(0)
    samples = [recipe.sample([text[:100] % 90, text[100:]], False, rng) for _ in range(8)]
    shape = family_of("bert").shape(config.model, config)
    assert collate_bert(samples).positions_BP.shape[1] == shape.predictions == 40


def test_tokens_that_see_later_ones_count_all_keys():
    """Causally or not; a window has keys on both sides."""
    shape = TransformerShape(2, 64, 256, 4, 4, 16, 512, 64, windows=(None, 64), sees_later=True)
    assert shape.flops_per_token(causal=True) == shape.flops_per_token(causal=False)
    narrow = dataclasses.replace(shape, windows=(64, 64)).flops_per_token(causal=True)
    per_key = 3 * 2 * 2 * 64
    assert shape.flops_per_token(causal=True) - narrow == per_key * (512 - 65)


@pytest.mark.parametrize(("name", "causal"), [("gpt", True), ("bert", False), ("t5", True)])
def test_which_families_have_causal_attention(name, causal):
    """What the line about utilisation says of FLOPs."""
    decoder = {"encoder_decoder": True, "decoder_seq_length": 8} if name == "t5" else {}
    model = model_config(family=name, **decoder).with_vocabulary(60)
    assert family_of(name).shape(model).causal is causal


@pytest.mark.parametrize("lengths", [[4096], [1, 1000, 3000, 95], [512] * 8])
def test_documents_against_counted_pairs(lengths):
    """Pairs of a query and a key of its own document, where a block has no window."""
    length, windows = 4096, (None, 64, None)
    shape = TransformerShape(3, 64, 256, 4, 2, 16, length, 64, windows=windows)
    ids_BS = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    share = share_within_documents(ids_BS.expand(2, -1), length)
    # Half of a query's own key counts, as of a sequence.
    pairs = sum(n * (n + 1) / 2 - n / 2 for n in lengths)
    expected = 2 * 2 * 64 * 2 * pairs
    assert length * shape.scores_per_token() * float(share) == pytest.approx(expected)


def test_a_long_llama_against_published_terms():
    """6 N of the weights in products and 6 L S a d of causal scores for each token of Llama 3 8B:
    at 131,072 tokens more than half of the work is attention."""
    length, layers, hidden, ffn = 131_072, 32, 4096, 14_336
    shape = TransformerShape(layers, hidden, ffn, 32, 8, 128, length, 128_256, gated=True)
    weights = layers * hidden * (2 * hidden + 2 * 1024 + 3 * ffn) + 128_256 * hidden
    scores = 6 * layers * length * hidden
    assert shape.flops_per_token(causal=True) == 6 * weights + scores
    assert 0.65 < scores / shape.flops_per_token(causal=True) < 0.7
    assert shape.scores_per_token() == scores / 3
