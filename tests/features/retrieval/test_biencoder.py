"""Biencoders against two BERTs of transformers with the same weights, in float64: losses and
gradients by the definition."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bert_pairs import (
    CLASSIC,
    LAYERS,
    LENGTH,
    PAD,
    SIZES,
    VOCAB,
    WIDTH,
    classic,
    names_in,
    table_of,
)
from configs import with_flags
from torch import nn

from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, resolve
from megatron.engine.pipeline_module import layer_bounds
from megatron.families import build_model, spec_of
from megatron.features.retrieval.layers import places
from megatron.features.retrieval.samples import PairCollator
from megatron.model.layer_list import initialise
from megatron.parallel.shard import Init
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.run.run import parse_run

transformers = pytest.importorskip("transformers")

QUERIES, CONTEXTS, LABELS, MISSING = 3, 5, (0, 2, 4), 3


def batch(together):
    draw = np.random.default_rng(3)
    lengths = (4, 9, 6), (LENGTH, 5, 7, 3, 8)
    query, context = ([draw.integers(3, VOCAB, n) for n in each] for each in lengths)
    rows = [(ids, n != MISSING) for n, ids in enumerate(context)]
    return PairCollator(PAD, 1, None, together).batch(query, rows, LABELS)


class Towers(nn.Module):
    """Two BERTs, or one, and the projections of their first tokens."""

    def __init__(self, names, width):
        super().__init__()
        self.bert = nn.ModuleDict(
            {
                name: transformers.BertForPreTraining(
                    transformers.BertConfig(**SIZES | CLASSIC, hidden_act="gelu")
                )
                for name in names
            }
        )
        self.head = nn.ModuleDict({n: nn.Linear(WIDTH, width) for n in names} if width else {})

    def vectors(self, name, rows):
        name = name if name in self.bert else "shared_model"
        hidden = self.bert[name].bert(
            rows.tokens_BS, rows.padding_mask_BS, token_type_ids=rows.types_BS
        )
        first = hidden.last_hidden_state[:, 0]
        return self.head[name](first) if self.head else first

    def weight(self, ours):
        tower, _, name = ours.partition(".")
        if name.startswith("head.projection."):
            return [self.head[tower].get_parameter(name.rpartition(".")[2])]
        return [self.bert[tower].get_parameter(other) for other in names_in(table_of(True), name)]


@pytest.mark.parametrize(
    "flags",
    [
        {"retriever_report_topk_accuracies": (1, 2)},
        {"biencoder_projection_dim": 6, "retriever_score_scaling": True},
        {"biencoder_shared_query_context_model": True, "biencoder_projection_dim": 6},
    ],
    ids=["towers", "projected", "shared"],
)
def test_losses_and_gradients_against_transformers(flags):
    config = with_flags(classic(True), family="biencoder", bert_binary_head=True, **flags)
    config = config.with_vocabulary(VOCAB)
    shared, width = (
        flags.get(name, 0)
        for name in ("biencoder_shared_query_context_model", "biencoder_projection_dim")
    )
    ours = build_model(config).double()
    theirs = Towers(["shared_model"] if shared else ["query_model", "context_model"], width)
    theirs = theirs.double().eval()
    for name, param in ours.canonical_parameters():
        param.init = Init(std=0.3)
        initialise(name, param, 1234)
        whole, actual = param.shard.join([param.detach()]), theirs.weight(name)
        for weight, part in zip(actual, whole.split([len(w) for w in actual]), strict=True):
            weight.data.copy_(part)
    rows = batch(bool(shared))
    losses = ours(spec_of(config).begin(rows)).losses
    query, context = (
        theirs.vectors(name, each)
        for name, each in zip(("query_model", "context_model"), rows, strict=True)
    )
    scores = query @ context.t()
    scores = scores / WIDTH**0.5 if flags.get("retriever_score_scaling") else scores
    scores[:, MISSING] = -torch.inf
    expected = F.cross_entropy(scores, torch.tensor(LABELS))
    torch.testing.assert_close(losses["retrieval loss"], expected, rtol=1e-12, atol=0)
    for k in flags.get("retriever_report_topk_accuracies", ()):
        best = scores.topk(k).indices.tolist()
        right = [label in row for label, row in zip(LABELS, best, strict=True)]
        assert float(losses[f"top{k}_acc"]) == pytest.approx(100 * np.mean(right))
    losses["retrieval loss"].backward()
    expected.backward()
    for name, param in ours.canonical_parameters():
        actual, grad = theirs.weight(name), param.shard.join([param.grad])
        for weight, part in zip(actual, grad.split([len(w) for w in actual]), strict=True):
            torch.testing.assert_close(part, weight.grad, rtol=1e-10, atol=1e-12, msg=name)
    assert len({name.partition(".")[0] for name, _ in ours.canonical_parameters()}) == 2 - shared
    assert sum(".layers." in name for name, _ in ours.canonical_parameters()) % LAYERS == 0


def test_place_is_that_of_a_stable_sort():
    """Vectors that are all equal must not look right."""
    scores = torch.randint(0, 3, (40, 9), generator=torch.Generator().manual_seed(0)).double()
    labels = torch.arange(40) % 9
    order = scores.sort(dim=1, descending=True, stable=True).indices
    assert torch.equal(places(scores, labels), (order == labels[:, None]).int().argmax(1))
    assert places(torch.zeros(4, 4), torch.arange(4)).tolist() == [0, 1, 2, 3]


ARGV = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --mock-data "
    "--max-position-embeddings 16 --micro-batch-size 1 --train-iters 1 --lr 1"
)


def test_a_norm_that_encoders_have_is_not_left_out():
    with pytest.raises(ConfigError, match="--no-first-norm would change nothing"):
        parse_run(None, [*ARGV.split(), "--no-first-norm"], family="biencoder")


@pytest.mark.parametrize("shared", [False, True], ids=["towers", "shared"])
def test_pipelines_divide_the_blocks_of_both_encoders(shared):
    flags = f"{ARGV} --model-family biencoder --tokenizer-type NullTokenizer --vocab-size 99"
    flags += " --biencoder-shared-query-context-model" * shared
    flags += " --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
    flags += " --global-batch-size 2"
    config = resolve(FlagParser(*FLAG_CLASSES).settings(flags.split()), 2).config
    layers = spec_of(config.model, config.parallel).layers(TensorParallel())
    bounds = pairwise(layer_bounds(layers, config.parallel))
    blocks = [sum(layer.block for layer in layers[a:b]) for a, b in bounds]
    assert blocks == [1] * (4 if shared else 8)
