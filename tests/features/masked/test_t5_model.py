"""T5 against transformers, its buckets, and what the blocks of a stack share."""

import itertools
from functools import cache

import pytest
import torch
from configs import model_config
from random_stacks import random_stack
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Attention, T5LayerNorm

from megatron.config import ConfigError, ModelConfig, ParallelConfig
from megatron.engine.pipeline_module import layer_bounds
from megatron.families import build_model, spec_of
from megatron.features.masked.batch import NO_LABEL, T5Batch
from megatron.features.masked.layers import RelativeBias, distance_buckets, relative_bucket
from megatron.model.layer_list import LayerStack, canonical_parameters, layer_sequence
from megatron.parallel.context import Context
from megatron.parallel.mesh import Group
from megatron.parallel.shard import shard_of
from megatron.parallel.tensor_parallel import TensorParallel

VOCAB, ENCODED, DECODED, SAMPLES = 48, 14, 9, 3
ENCODER, DECODER = 2, 3
WIDTH, HEADS, CHANNELS, INNER, BUCKETS, FURTHEST = 24, 4, 5, 40, 8, 11

V1_0 = {"relu": True, "scale_head_input": True}
V1_1 = {"glu_activation": "geglu", "untie_embeddings_and_output_weights": True}
RELATIVE = {
    "position_embedding_type": "relative", "relative_attention_num_buckets": BUCKETS,
    "relative_attention_max_distance": FURTHEST, "query_pre_attn_scalar": 1.0,
    "normalization": "RMSNorm", "norm_epsilon": 1e-6, "add_bias_linear": False,
}  # fmt: skip


def config(**changes) -> ModelConfig:
    shape = {
        "family": "t5", "encoder_decoder": True, "num_layers": ENCODER,
        "decoder_num_layers": DECODER, "hidden_size": WIDTH, "num_attention_heads": HEADS,
        "kv_channels": CHANNELS, "ffn_hidden_size": INNER, "seq_length": ENCODED,
        "decoder_seq_length": DECODED, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    }  # fmt: skip
    return model_config(**shape | changes).with_vocabulary(VOCAB)


@cache
def batch() -> T5Batch:
    draw = torch.Generator().manual_seed(4)
    encoder, decoder, labels = (
        torch.randint(VOCAB, (SAMPLES, length), generator=draw)
        for length in (ENCODED, DECODED, DECODED)
    )
    of_encoder = (torch.arange(ENCODED) < torch.tensor([[ENCODED], [9], [4]])).long()
    of_decoder = (torch.arange(DECODED) < torch.tensor([[5], [DECODED], [2]])).long()
    labels = labels.masked_fill(of_decoder == 0, NO_LABEL)
    return T5Batch(encoder, decoder, labels, of_decoder.float(), of_encoder, of_decoder)


def loss_of(stack: LayerStack, model: ModelConfig, given: T5Batch) -> Tensor:
    spec = spec_of(model)
    return spec.total(stack(spec.begin(given)).losses)


def step(stack: LayerStack, model: ModelConfig) -> tuple[Tensor, dict[str, Tensor]]:
    loss = loss_of(stack, model, batch())
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in stack.canonical_parameters()}


def theirs(version: dict) -> T5ForConditionalGeneration:
    gated = "glu_activation" in version
    made = T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB, d_model=WIDTH, d_kv=CHANNELS, d_ff=INNER, num_heads=HEADS,
            num_layers=ENCODER, num_decoder_layers=DECODER, dropout_rate=0.0,
            relative_attention_num_buckets=BUCKETS, relative_attention_max_distance=FURTHEST,
            feed_forward_proj="gated-gelu" if gated else "relu", tie_word_embeddings=not gated,
            decoder_start_token_id=0,
        )
    )  # fmt: skip
    if gated:  # which transformers 5 ties first, and unties when it reads such a file
        made.lm_head.weight = torch.nn.Parameter(torch.empty(VOCAB, WIDTH))
    return made.double().eval()


def in_float64(norm: T5LayerNorm, x: Tensor) -> Tensor:
    """The norm of transformers computes variances in float32."""
    squares = x.pow(2).mean(-1, keepdim=True)
    return norm.weight * x * torch.rsqrt(squares + norm.variance_epsilon)


def their_names(version: dict) -> dict[str, list[str]]:
    """Of each parameter of ours the parameters of transformers that are its rows."""
    gated = "glu_activation" in version
    found = {"embedding.word_embeddings.weight": ["shared.weight"]}
    if gated:
        found["output_layer.weight"] = ["lm_head.weight"]
    for stack, blocks in (("encoder", ENCODER), ("decoder", DECODER)):
        first = f"{stack}.block.0.layer.0.SelfAttention"
        found[f"{stack}.relative_bias.weight"] = [f"{first}.relative_attention_bias.weight"]
        found[f"{stack}.final_norm.norm.weight"] = [f"{stack}.final_layer_norm.weight"]
        for n in range(blocks):
            ours, parts = f"{stack}.layers.{n}", f"{stack}.block.{n}.layer"
            last = 2 if stack == "decoder" else 1
            own, mlp = f"{parts}.0.SelfAttention", f"{parts}.{last}.DenseReluDense"
            up = ["wi_0", "wi_1"] if gated else ["wi"]
            found |= {
                f"{ours}.attention_norm.weight": [f"{parts}.0.layer_norm.weight"],
                f"{ours}.attention.qkv.weight": [f"{own}.{part}.weight" for part in "qkv"],
                f"{ours}.attention.proj.weight": [f"{own}.o.weight"],
                f"{ours}.mlp_norm.weight": [f"{parts}.{last}.layer_norm.weight"],
                f"{ours}.mlp.up.weight": [f"{mlp}.{part}.weight" for part in up],
                f"{ours}.mlp.down.weight": [f"{mlp}.wo.weight"],
            }
            if stack == "decoder":
                cross = f"{parts}.1.EncDecAttention"
                found |= {
                    f"{ours}.cross_attention_norm.weight": [f"{parts}.1.layer_norm.weight"],
                    f"{ours}.cross_attention.q.weight": [f"{cross}.q.weight"],
                    f"{ours}.cross_attention.kv.weight": [f"{cross}.{x}.weight" for x in "kv"],
                    f"{ours}.cross_attention.proj.weight": [f"{cross}.o.weight"],
                }
    return found


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("version", [V1_0, V1_1], ids=["v1.0", "v1.1"])
def test_against_transformers(version, backend, monkeypatch):
    """Loss, logits and all gradients, with padding on both sides."""
    monkeypatch.setattr(T5LayerNorm, "forward", in_float64)
    model = config(**RELATIVE, **version, attention_backend=backend)
    stack, other, names = random_stack(model), theirs(version), their_names(version)
    params, their_params = dict(stack.canonical_parameters()), dict(other.named_parameters())
    assert params.keys() == names.keys()
    with torch.no_grad():
        for name, parts in names.items():
            rows = params[name][: shard_of(params[name]).canonical_shape[0]]
            for part, values in zip(parts, rows.chunk(len(parts)), strict=True):
                their_params[part].copy_(values)
    given = batch()
    expected = other(
        input_ids=given.encoder_tokens_BE,
        attention_mask=given.encoder_padding_mask_BE,
        decoder_input_ids=given.decoder_tokens_BD,
        decoder_attention_mask=given.decoder_padding_mask_BD,
        labels=given.labels_BD.masked_fill(given.labels_BD == NO_LABEL, -100),
    )
    expected.loss.backward()
    loss, gradients = step(stack, model)
    torch.testing.assert_close(loss, expected.loss.detach(), rtol=1e-12, atol=0)
    state = spec_of(model).begin(given).changed(targets=None)
    seen = given.decoder_padding_mask_BD.bool()
    logits = stack(state).hidden[seen][:, :VOCAB]
    torch.testing.assert_close(logits, expected.logits[seen], rtol=1e-10, atol=1e-10)
    for name, parts in names.items():
        theirs_whole = torch.cat([their_params[part].grad for part in parts])
        ours = gradients[name][: len(theirs_whole)]
        assert (ours - theirs_whole).abs().max() <= 1e-10 * theirs_whole.abs().max(), name


@pytest.mark.parametrize(
    "buckets, furthest", [(32, 128), (8, 11), (17, 40), (6, 300), (4, 3)], ids=str
)
@pytest.mark.parametrize("causal", [False, True])
def test_buckets_of_distances(buckets, furthest, causal):
    distances = torch.arange(-700, 701)
    expected = T5Attention._relative_position_bucket(distances, not causal, buckets, furthest)
    assert torch.equal(relative_bucket(distances, buckets, furthest, causal), expected)
    found = distance_buckets(5, buckets, furthest, causal, torch.device("cpu"))
    assert torch.equal(found, expected[700 - 4 : 700 + 5])


def test_every_query_has_the_bias_of_its_distances():
    """Of a rank those of its heads: the columns that it has of the table."""
    model = config(**RELATIVE)
    whole = torch.randn(BUCKETS, HEADS, dtype=torch.float64)
    state = spec_of(model).begin(batch())
    state = state.with_hidden(torch.zeros(SAMPLES, ENCODED, WIDTH, dtype=torch.float64))
    queries, keys = torch.arange(ENCODED)[:, None], torch.arange(ENCODED)
    for rank, causal in itertools.product((0, 1), (False, True)):
        layer = RelativeBias(model, TensorParallel(Group((0, 1), rank)), causal).double()
        shard = shard_of(layer.weight)
        layer.weight.data.copy_(shard.cut(whole, {"tensor": (rank, 2)}))
        found = layer(state).bias
        places = relative_bucket(keys - queries, BUCKETS, FURTHEST, causal)
        expected = whole[places].permute(2, 0, 1)[2 * rank : 2 * rank + 2]
        visible = keys <= queries if causal else batch().encoder_padding_mask_BE[:, None, None] > 0
        expected = expected[None].masked_fill(~visible, -torch.inf)
        assert torch.equal(found, expected)


def test_ranks_that_divide_a_sequence_have_the_bias_of_their_queries():
    """Together they have the bias of one process and the gradient of its table."""
    model, ranks = config(**RELATIVE), ENCODED // 2
    whole = torch.randn(BUCKETS, HEADS, dtype=torch.float64)

    def bias(context: Context, causal: bool) -> tuple[Tensor, Tensor]:
        hidden = torch.zeros(SAMPLES, ENCODED // context.size, WIDTH, dtype=torch.float64)
        layer = RelativeBias(model, TensorParallel(context=context), causal).double()
        layer.weight.data.copy_(whole)
        rows = layer(spec_of(model).begin(batch()).with_hidden(hidden)).bias
        weights = context.take(torch.arange(ENCODED).double()[:, None].cos(), 0)
        rows.masked_fill(rows.isinf(), 0).mul(weights).sum().backward()
        return rows.detach(), layer.weight.grad

    for causal in (False, True):
        expected, gradient = bias(Context(), causal)
        contexts = [Context(Group(tuple(range(ranks)), rank)) for rank in range(ranks)]
        parts = [bias(context, causal) for context in contexts]
        for context, (rows, _) in zip(contexts, parts, strict=True):
            assert torch.equal(rows, context.take(expected, 2))
        total = torch.stack([part for _, part in parts]).sum(0)
        torch.testing.assert_close(total, gradient, rtol=1e-12, atol=1e-12)


MODELS = {
    "learned": {},
    "v1.1": RELATIVE | V1_1,
    "rope": {"position_embedding_type": "rope", "num_query_groups": 2, "kv_channels": 6},
}


@pytest.mark.parametrize("name", MODELS)
def test_padding_changes_nothing(name):
    """Other tokens there, or a rest of the sequence that is cut off."""
    model, given = config(**MODELS[name]), batch()
    stack = random_stack(model).eval()
    short = T5Batch(*(values[2:] for values in given))
    cut = T5Batch(*(values[:, : 4 if values.shape[1] == ENCODED else 2] for values in short))
    other = short._replace(
        encoder_tokens_BE=short.encoder_tokens_BE.clone().index_fill_(1, torch.arange(4, 14), 7),
        decoder_tokens_BD=short.decoder_tokens_BD.clone().index_fill_(1, torch.arange(2, 9), 7),
    )
    losses = [float(loss_of(stack, model, each).detach()) for each in (short, cut, other)]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-12)


RECOMPUTED = (
    {"recompute_granularity": "selective"},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
)


@pytest.mark.parametrize("how", RECOMPUTED, ids=lambda how: "-".join(map(str, how.values())))
def test_recomputation_gives_the_same_gradients(how):
    model = config(**MODELS["v1.1"])
    loss, expected = step(random_stack(model), model)
    again, gradients = step(random_stack(model, ParallelConfig(**how)), model)
    assert loss == again
    torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("partition, expected_runs", [("1,2,1,1", [2, 3]), ("2,1,1,1", [1, 3])])
def test_each_stage_computes_a_shared_bias_once(partition, expected_runs, monkeypatch):
    """Stages of one process, between which travels what the family says."""
    model, runs = config(**MODELS["v1.1"]), []
    forward = RelativeBias.forward
    monkeypatch.setattr(
        RelativeBias, "forward", lambda self, state: (runs.append(self), forward(self, state))[1]
    )
    expected_loss, expected = step(random_stack(model), model)
    assert len(runs) == 2
    stages = 4
    parallel = ParallelConfig(pipeline_model_parallel_size=stages, pipeline_partition=partition)
    spec, stack = spec_of(model, parallel), random_stack(model)
    layers = spec.layers(TensorParallel())
    bounds, modules = layer_bounds(layers, parallel), [
        stack.tied_modules[layer.tied_key] if layer.tied_key else stack.get_submodule(str(place))
        for place, layer in enumerate(layers)
    ]  # fmt: skip
    runs.clear()
    state = spec.begin(batch())
    for begin, end in itertools.pairwise(bounds):
        travelling = spec.travels(spec.begin(batch()), TensorParallel(), begin) if begin else {}
        assert {name: tuple(getattr(state, name).shape) for name in travelling} == travelling
        kept = {name: getattr(state, name) for name in travelling}
        start = spec.begin(batch()).changed(**kept)
        state = layer_sequence(layers[begin:end], begin, modules[begin:end], parallel)(start)
    loss = spec.total(state.losses)
    loss.backward()
    assert [runs.count(module) for module in dict.fromkeys(runs)] == expected_runs
    assert loss == expected_loss
    gradients = {name: p.grad for name, p in canonical_parameters(stack, layers)}
    torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-14)


def test_one_table_and_one_bias_for_each_stack():
    model = config(**RELATIVE, **V1_0)
    names = [name for name, _ in build_model(model).canonical_parameters()]
    once = [name for name in names if "layers" not in name and "norm" not in name]
    assert sorted(once) == [
        "decoder.relative_bias.weight", "embedding.word_embeddings.weight",
        "encoder.relative_bias.weight",
    ]  # fmt: skip
    assert len(set(names)) == len(names)


def test_the_head_of_megatrons_has_a_bias():
    """With learned positions and biases in all linear layers; both stacks share the positions."""
    names = [name for name, _ in build_model(config()).canonical_parameters()]
    assert [name for name in names if name.startswith("embedding")] == [
        "embedding.word_embeddings.weight", "embedding.word_embeddings.bias",
        "embedding.position_embeddings.weight",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"relative_attention_max_distance": 4}, "must be more than half"),
        ({"relative_attention_num_buckets": 3}, "must be at least 4"),
        ({"position_embedding_type": "rope"}, "needs --position-embedding-type relative"),
        ({"encoder_decoder": False}, "--decoder-num-layers 3 has an effect with a model that"),
        (
            {"encoder_decoder": False, "decoder_num_layers": None, "decoder_seq_length": None},
            "relative is for models with an encoder and a decoder",
        ),
        ({"sliding_window": 4}, "--sliding-window 4: a decoder attends to all"),
        ({"encoder_num_layers": 5}, "--encoder-num-layers 5 contradicts --num-layers 2"),
    ],
)
def test_flags_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        config(**RELATIVE | changes)


def test_a_decoder_longer_than_its_positions():
    assert config(decoder_seq_length=64).positions.max_position_embeddings == 64
    with pytest.raises(ConfigError, match="--decoder-seq-length 64 is longer than --max-position"):
        config(decoder_seq_length=64, max_position_embeddings=32)
    assert config(**RELATIVE, decoder_seq_length=64, max_position_embeddings=32)
