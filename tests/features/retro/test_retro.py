"""Retro against a slow reference, what each token depends on, and its layers on stages.

The reference is written from Borgeaud et al. 2022 (arXiv:2112.04426), algorithm 1 and section 2.4,
with the order of norms and residual sums of Megatron: one sample, one chunk, one neighbour and one
token at a time. Shapes: S tokens of a sample, M of a chunk, R of a neighbour, H hidden, D a head.
"""

import itertools
import os
from functools import cache
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from configs import model_config
from random_stacks import random_stack
from torch import Tensor

from megatron.config import ConfigError, ModelConfig, ParallelConfig, Setting
from megatron.data.gpt_batch import GPTBatch
from megatron.engine.pipeline_module import layer_bounds
from megatron.families import build_model, family_of, refuse_unused, spec_of
from megatron.features.retro.flags import RetrievalConfig
from megatron.features.retro.samples import RetroBatch
from megatron.formats.huggingface import architecture_of
from megatron.formats.legacy_megatron.arguments import arguments_of_model
from megatron.model.layer_list import LayerStack, canonical_parameters, layer_sequence
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.run.run import parse_run

VOCAB, LENGTH, CHUNK, SAMPLES, LAYERS = 40, 12, 4, 2, 4
WIDTH, HEADS, CHANNELS = 16, 4, 4


def config(**changes) -> ModelConfig:
    shape = {
        "family": "retro", "retro_add_retriever": True, "retro_gpt_chunk_length": CHUNK,
        "retro_cross_attention_layers": (2, 4), "num_layers": LAYERS, "hidden_size": WIDTH,
        "num_attention_heads": HEADS, "kv_channels": CHANNELS, "ffn_hidden_size": 24,
        "seq_length": LENGTH, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "retro_encoder_hidden_dropout": 0.0, "retro_encoder_attention_dropout": 0.0,
    }  # fmt: skip
    return model_config(**shape | changes).with_vocabulary(VOCAB)


@cache
def batch(model: ModelConfig, length: int = LENGTH) -> RetroBatch:
    draw, retrieval = torch.Generator().manual_seed(4), model.part(RetrievalConfig)
    tokens, labels = torch.randint(VOCAB, (2, SAMPLES, length), generator=draw)
    neighbors = torch.randint(
        VOCAB,
        (SAMPLES, length // CHUNK, retrieval.retro_num_neighbors, retrieval.retrieved_length),
        generator=draw,
    )
    text = GPTBatch(tokens, labels, torch.ones(SAMPLES, length), None, None)
    return RetroBatch(text, neighbors)


def loss_of(stack: LayerStack, model: ModelConfig, given: RetroBatch) -> Tensor:
    spec = spec_of(model)
    return spec.total(stack(spec.begin(given)).losses)


def logits_of(stack: LayerStack, model: ModelConfig, given: RetroBatch) -> Tensor:
    with torch.no_grad():
        return stack(spec_of(model).begin(given).changed(targets=None)).hidden[..., :VOCAB]


def gradients(stack: LayerStack) -> dict[str, Tensor]:
    return {name: p.grad for name, p in stack.canonical_parameters()}


class Reference:
    """The definition, from parameters by their canonical names."""

    def __init__(self, model: ModelConfig, params: dict[str, Tensor]) -> None:
        self.model, self.params, self.retrieval = model, params, model.part(RetrievalConfig)

    def linear(self, x_SI: Tensor, name: str) -> Tensor:
        y_SO = x_SI @ self.params[f"{name}.weight"].T
        bias_O = self.params.get(f"{name}.bias")
        return y_SO if bias_O is None else y_SO + bias_O

    def norm(self, x_SH: Tensor, name: str) -> Tensor:
        epsilon, bias = self.model.norm.norm_epsilon, self.params.get(f"{name}.bias")
        if bias is None:
            x_SH = x_SH / (x_SH.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()
            return x_SH * self.params[f"{name}.weight"]
        x_SH = x_SH - x_SH.mean(-1, keepdim=True)
        x_SH = x_SH / (x_SH.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()
        return x_SH * self.params[f"{name}.weight"] + bias

    def rotated(self, x_D: Tensor, position: int) -> Tensor:
        if self.model.positions.position_embedding_type != "rope":
            return x_D
        half = CHANNELS // 2
        places = torch.arange(half, dtype=torch.float64)
        frequencies = 1.0 / (self.model.positions.rotary_base ** (2 * places / CHANNELS))
        angles = position * frequencies
        turn = torch.complex(angles.cos(), angles.sin())
        turned = torch.complex(x_D[:half], x_D[half:]) * turn
        return torch.cat([turned.real, turned.imag])

    def attend(
        self, q_H: Tensor, keys: Tensor, values: Tensor, name: str, place: int | None = None
    ) -> Tensor:
        """One token's queries [N x D] to keys and values [T, groups x D] by the attention ``name``;
        ``place`` is the token's among those of the keys, None where they are another
        sequence's."""
        groups = self.model.attention.num_query_groups
        found = []
        for head in range(HEADS):
            own = slice(head * CHANNELS, (head + 1) * CHANNELS)
            group = head // (HEADS // groups)
            kv = slice(group * CHANNELS, (group + 1) * CHANNELS)
            scores_T = keys[:, kv] @ q_H[own] / CHANNELS**0.5
            if place is not None and self.model.positions.position_embedding_type == "alibi":
                distances_T = (torch.arange(len(keys)) - place).abs()
                scores_T = scores_T - 2.0 ** (-8 * (head + 1) / HEADS) * distances_T
            weights_T, sinks = scores_T.exp(), self.params.get(f"{name}.sinks")
            total = weights_T.sum() + (0.0 if sinks is None else sinks[head].exp())
            found.append(weights_T / total @ values[:, kv])
        return torch.cat(found)

    def self_attention(self, x_SH: Tensor, name: str, causal: bool) -> Tensor:
        width = self.model.attention.num_query_groups * CHANNELS
        q, k, v = self.linear(x_SH, f"{name}.qkv").split([WIDTH, width, width], dim=-1)
        q, k = (
            torch.stack([
                torch.cat([self.rotated(head, at) for head in row.split(CHANNELS)])
                for at, row in enumerate(x)
            ])
            for x in (q, k)
        )  # fmt: skip
        window, rows = self.model.attention.sliding_window if causal else None, []
        for at in range(len(x_SH)):
            end = at + 1 if causal else len(x_SH)
            start = max(0, end - window) if window else 0
            rows.append(self.attend(q[at], k[start:end], v[start:end], name, at - start))
        return self.linear(torch.stack(rows), f"{name}.proj")

    def cross_attention(self, x_SH: Tensor, other_TH: Tensor, name: str) -> Tensor:
        q, kv = self.linear(x_SH, f"{name}.q"), self.linear(other_TH, f"{name}.kv")
        k, v = kv.chunk(2, dim=-1)
        return self.linear(torch.stack([self.attend(row, k, v, name) for row in q]), f"{name}.proj")

    def mlp(self, x_SH: Tensor, name: str) -> Tensor:
        y = self.linear(self.norm(x_SH, f"{name}.mlp_norm"), f"{name}.mlp.up")
        if self.model.mlp.gated:
            gate, up = y.chunk(2, dim=-1)
            y = gate * torch.sigmoid(gate) * up
        else:
            y = F.gelu(y, approximate="tanh")
        return x_SH + self.linear(y, f"{name}.mlp.down")

    def embedded(self, tokens_S: Tensor) -> Tensor:
        found = self.params["embedding.word_embeddings.weight"][tokens_S]
        table = self.params.get("embedding.position_embeddings.weight")
        if self.model.embedding.scale_embeddings:
            found = found * WIDTH**0.5
        if table is not None:
            found = found + table[: len(tokens_S)]
        return found

    def encoder(self, neighbor_R: Tensor, chunk_MH: Tensor, name: str) -> Tensor:
        """ENCODER of algorithm 1, for one neighbour and the states of its chunk."""
        e = self.embedded(neighbor_R)
        for n in range(self.retrieval.retro_encoder_layers):
            layer = f"{name}.encoder.layers.{n}"
            normed = self.norm(e, f"{layer}.attention_norm")
            e = e + self.self_attention(normed, f"{layer}.attention", causal=False)
            if n == 0:
                normed = self.norm(e, f"{layer}.cross_attention_norm")
                e = e + self.cross_attention(normed, chunk_MH, f"{layer}.cross_attention")
            e = self.mlp(e, layer)
        return e

    def __call__(self, tokens_S: Tensor, neighbors_LKR: Tensor) -> Tensor:
        """Logits [S, V] of one sample."""
        h, read = self.embedded(tokens_S), []
        attending = self.retrieval.retro_cross_attention_layers
        for number in range(1, self.model.num_layers + 1):
            layer = f"layers.{number - 1}"
            normed = self.norm(h, f"{layer}.attention_norm")
            h = h + self.self_attention(normed, f"{layer}.attention", causal=True)
            if number in attending:
                normed = self.norm(h, f"{layer}.cross_attention_norm")
                if number == min(attending):
                    for u, neighbors_KR in enumerate(neighbors_LKR):
                        chunk = normed[u * CHUNK : (u + 1) * CHUNK]
                        read.append(
                            torch.cat([self.encoder(r, chunk, layer) for r in neighbors_KR])
                        )
                rows = []
                for at in range(len(tokens_S)):
                    # Of 0, 1, ...: token um + m - 1 is the first that sees the neighbours of u.
                    u = (at + 1) // CHUNK - 1
                    if u < 0:
                        rows.append(h[at])
                        continue
                    name = f"{layer}.cross_attention"
                    seen = self.cross_attention(normed[at][None], read[u], name)[0]
                    rows.append(h[at] + self.retrieval.retro_attention_gate * seen)
                h = torch.stack(rows)
            h = self.mlp(h, layer)
        head = self.params.get(
            "output_layer.weight", self.params["embedding.word_embeddings.weight"]
        )
        return self.norm(h, "final_norm.norm") @ head[:VOCAB].T


MODELS = {
    "learned": {},
    "modern": {
        "position_embedding_type": "rope", "num_query_groups": 2, "normalization": "RMSNorm",
        "swiglu": True, "add_bias_linear": False, "untie_embeddings_and_output_weights": True,
        "retro_attention_gate": 0.3, "retro_cross_attention_layers": (1, 3, 4),
        "softmax_type": "learnable",
    },
    "alibi": {"position_embedding_type": "alibi", "sliding_window": 5, "scale_embeddings": True},
    "one": {
        "retro_num_neighbors": 1, "retro_num_retrieved_chunks": 3, "retro_encoder_layers": 1,
        "retro_cross_attention_layers": (3,),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "name, length, backend",
    [
        ("learned", 12, "sdpa"), ("modern", 12, "eager"),
        ("alibi", 12, "sdpa"), ("one", 11, "eager"),
        *(
            pytest.param(*other, marks=pytest.mark.proof)
            for other in [
                ("learned", 12, "eager"), ("modern", 12, "sdpa"),
                ("alibi", 12, "eager"), ("one", 11, "sdpa"),
            ]
        ),
    ],
)  # fmt: skip
def test_against_the_reference(name, length, backend):
    """Loss, logits and all gradients; 11 tokens are two chunks and a part of one."""
    model = config(**MODELS[name], attention_backend=backend)
    stack, given = random_stack(model), batch(model, length)
    params = {name: p.detach().clone().requires_grad_() for name, p in stack.canonical_parameters()}
    reference = Reference(model, params)
    expected = torch.stack(
        [reference(*sample) for sample in zip(given.tokens_BS, given.neighbors_BLKR, strict=True)]
    )
    loss = F.cross_entropy(expected.flatten(0, 1), given.text.labels_BS.flatten())
    loss.backward()
    found = loss_of(stack, model, given)
    found.backward()
    torch.testing.assert_close(found, loss, rtol=1e-12, atol=0)
    logits = logits_of(stack, model, given)
    assert (logits - expected).abs().max() <= 1e-12 * expected.abs().max()
    top = max(float(p.grad.abs().max()) for p in params.values())
    for name, gradient in gradients(stack).items():
        theirs = params[name].grad
        scale = max(float(theirs.abs().max()), 1e-3 * top)
        assert (gradient - theirs).abs().max() <= 1e-12 * scale, name


def changed(stack: LayerStack, model: ModelConfig, other: RetroBatch) -> Tensor:
    """bool [samples, S]: where logits differ from those of the first sample."""
    logits = logits_of(stack, model, other)
    return (logits - logits[:1]).abs().amax(-1) > 1e-12


def test_what_each_token_depends_on():
    """Every token, and every token of every neighbour, is changed by itself. A token depends on
    those up to itself; and on the neighbours, the continuation included, of the chunks that end
    with it or before it."""
    model = config()
    stack, given = random_stack(model), batch(config())
    tokens_S, neighbors_LKR = given.tokens_BS[0], given.neighbors_BLKR[0]
    count = LENGTH + neighbors_LKR.numel()
    tokens = tokens_S.repeat(1 + count, 1)
    neighbors = neighbors_LKR.repeat(1 + count, 1, 1, 1)
    first = []  # that may depend on what is changed
    for row in range(LENGTH):
        tokens[1 + row, row] += 1 - VOCAB * (tokens_S[row] == VOCAB - 1)
        first.append(row)
    for row in range(neighbors_LKR.numel()):
        flat = neighbors[1 + LENGTH + row].view(-1)
        flat[row] = (flat[row] + 1) % VOCAB
        chunk = row // neighbors_LKR[0].numel()
        first.append((chunk + 1) * CHUNK - 1)
    text = GPTBatch(tokens, tokens, torch.ones(tokens.shape), None, None)
    found = changed(stack, model, RetroBatch(text, neighbors))
    expected = torch.arange(LENGTH) >= torch.tensor(first)[:, None]
    assert not found[0].any()
    assert torch.equal(found[1:], expected)


def test_without_neighbors():
    """No neighbour: as if there were no attention to them; the first tokens see none anyway."""
    model = config()
    stack, given = random_stack(model), batch(config())
    none = given._replace(neighbors_BLKR=given.neighbors_BLKR[:, :, :0])
    found, logits = logits_of(stack, model, none), logits_of(stack, model, given)
    assert torch.equal(found[:, : CHUNK - 1], logits[:, : CHUNK - 1])
    assert (found[:, CHUNK - 1] != logits[:, CHUNK - 1]).any()
    closed = config(retro_attention_gate=0.0)
    torch.testing.assert_close(
        found, logits_of(random_stack(closed), closed, given), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("where", ["hidden", "attention"])
def test_the_encoder_has_its_own_dropout(where):
    """With dropout in the encoder only, only what depends on neighbours is random."""
    model = config(**{f"retro_encoder_{where}_dropout": 0.3})
    stack, given = random_stack(model), batch(config())
    begin = spec_of(model).begin(given).changed(targets=None)
    first, again, other = (
        stack(begin.changed(dropout_seed=seed)).hidden.detach() for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert torch.equal(first[:, : CHUNK - 1], other[:, : CHUNK - 1])
    assert (first[:, CHUNK - 1 :] != other[:, CHUNK - 1 :]).any(-1).all()
    stack.eval()
    assert torch.equal(
        logits_of(stack, model, given), logits_of(random_stack(config()), config(), given)
    )


RECOMPUTED = (
    {"recompute_granularity": "selective"},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
)


@pytest.mark.parametrize("how", RECOMPUTED, ids=lambda how: "-".join(map(str, how.values())))
def test_recomputation_gives_the_same_gradients(how):
    model = config()
    found = []
    for parallel in (None, ParallelConfig(**how)):
        stack = random_stack(model, parallel)
        loss = loss_of(stack, model, batch(model))
        loss.backward()
        found.append((loss, gradients(stack)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("partition", ["1,1,1,1", "2,2", "1,3"])
def test_what_travels_between_stages(partition):
    """Stages of one process, between which travels what the family says: the encoder's output from
    its block to the last one that reads it."""
    model = config(retro_cross_attention_layers=(2, 3))
    stack = random_stack(model)
    expected = loss_of(stack, model, batch(model))
    expected.backward()
    wanted = gradients(stack)
    stages = len(partition.split(","))
    parallel = ParallelConfig(pipeline_model_parallel_size=stages, pipeline_partition=partition)
    spec, stack = spec_of(model, parallel), random_stack(model)
    layers = spec.layers(TensorParallel())
    bounds, modules = layer_bounds(layers, parallel), [
        stack.tied_modules[layer.tied_key] if layer.tied_key else stack.get_submodule(str(place))
        for place, layer in enumerate(layers)
    ]  # fmt: skip
    state, crossed = spec.begin(batch(model)), []
    for begin, end in itertools.pairwise(bounds):
        travelling = (
            spec.travels(spec.begin(batch(model)), TensorParallel(), begin) if begin else {}
        )
        crossed.append(set(travelling))
        assert {name: tuple(getattr(state, name).shape) for name in travelling} == travelling
        kept = {name: getattr(state, name) for name in travelling}
        start = spec.begin(batch(model)).changed(**kept)
        state = layer_sequence(layers[begin:end], begin, modules[begin:end], parallel)(start)
    both = {"hidden", "encoder"}
    assert crossed[1:] == {
        "1,1,1,1": [{"hidden"}, both, {"hidden"}], "2,2": [both], "1,3": [{"hidden"}],
    }[partition]  # fmt: skip
    loss = spec.total(state.losses)
    loss.backward()
    assert loss == expected
    found = {name: p.grad for name, p in canonical_parameters(stack, layers)}
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


def test_other_families_refuse_its_flags():
    given = {"retro_add_retriever": Setting(True, "flag --retro-add-retriever")}
    for name in ("gpt", "bert", "t5"):
        with pytest.raises(ConfigError, match="the family retro has it: pretrain_retro.py"):
            refuse_unused(given, family_of(name))
    refuse_unused(given, family_of("retro"))


def test_formats_of_other_programs_refuse_it():
    """By the flag, wherever they would lose the retriever."""
    with pytest.raises(ValueError, match="--retro-add-retriever reads neighbours, which no"):
        architecture_of(config())
    with pytest.raises(
        ValueError, match="checkpoint of Megatron requires .*, no --retro-add-retriever"
    ):
        arguments_of_model(config())


def test_flags_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="--parallel-residual"):
        build_model(config(parallel_residual=True))
    with pytest.raises(ConfigError, match="give --max-position-embeddings 16 or more"):
        config(retro_num_retrieved_chunks=4)
    assert config(retro_num_retrieved_chunks=4, position_embedding_type="alibi")


def test_a_context_is_refused():
    argv = (
        "--model-family retro --num-layers 6 --hidden-size 32 --num-attention-heads 4 --lr 1 "
        "--seq-length 64 --max-position-embeddings 128 --micro-batch-size 1 --train-iters 1 "
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 99 --context-parallel-size 2"
    ).split()
    message = "size 2: the chunks of a Retro .*--sequence-parallel"
    with mock.patch.dict(os.environ, WORLD_SIZE="2"), pytest.raises(ConfigError, match=message):
        parse_run(None, argv)
