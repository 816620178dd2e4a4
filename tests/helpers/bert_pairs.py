"""Small BERTs of ours and of transformers with the same weights, in float64."""

import re

import torch
from configs import model_config

from megatron.families import build_model
from megatron.model.layer_list import initialise
from megatron.parallel.shard import Init

VOCAB, LENGTH, WIDTH, HEADS, LAYERS, PAD = 60, 12, 16, 2, 3, 0
SIZES = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 24, "pad_token_id": PAD,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "max_position_embeddings": LENGTH,
}  # fmt: skip
CLASSIC = {
    "layer_norm_eps": 1e-5, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
LAST = LAYERS - 1
BLOCKS = [
    (r"layers\.(\d+)\.attention\.proj\.", r"bert.encoder.layer.\1.attention.output.dense."),
    (r"layers\.(\d+)\.mlp\.up\.", r"bert.encoder.layer.\1.intermediate.dense."),
    (r"layers\.(\d+)\.mlp\.down\.", r"bert.encoder.layer.\1.output.dense."),
    (r"embedding\.word_embeddings\.bias", "cls.predictions.bias"),
    (r"embedding\.tokentype_embeddings\.", "bert.embeddings.token_type_embeddings."),
    (r"embedding\.", "bert.embeddings."),
    (r"pooler\.", "bert.pooler."),
    (r"binary_head\.", "cls.seq_relationship."),
    (r"(classification|multichoice)_head\.", "classifier."),
    (r"span_head\.", "qa_outputs."),
    (r"lm_head\.dense\.", "cls.predictions.transform.dense."),
    (r"lm_head\.norm\.", "cls.predictions.transform.LayerNorm."),
]
POST_NORM = [
    (r"layers\.0\.attention_norm\.", "bert.embeddings.LayerNorm."),
    (
        r"layers\.(\d+)\.attention_norm\.",
        lambda found: f"bert.encoder.layer.{int(found[1]) - 1}.output.LayerNorm.",
    ),
    (r"layers\.(\d+)\.mlp_norm\.", r"bert.encoder.layer.\1.attention.output.LayerNorm."),
    (r"final_norm\.norm\.", f"bert.encoder.layer.{LAST}.output.LayerNorm."),
]
PRE_NORM = [
    (r"layers\.(\d+)\.attention_norm\.", r"bert.encoder.layer.\1.attention.ln."),
    (r"layers\.(\d+)\.mlp_norm\.", r"bert.encoder.layer.\1.ln."),
    (r"final_norm\.norm\.", "bert.encoder.ln."),
]


def classic(post_norm, **flags):
    """A BERT of these sizes: the original's norms, or Megatron's."""
    return model_config(
        family="bert", num_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS,
        kv_channels=WIDTH // HEADS, seq_length=LENGTH, ffn_hidden_size=24,
        apply_residual_connection_post_layernorm=post_norm, bias_gelu_fusion=False,
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0} | flags,
    ).with_vocabulary(VOCAB)  # fmt: skip


def table_of(post_norm):
    """Their names of the parameters of such a model."""
    return (POST_NORM if post_norm else PRE_NORM) + BLOCKS


def names_in(table, ours):
    """The names of their parameters that are one of ours."""
    for pattern, replacement in table:
        found, count = re.subn(f"^{pattern}", replacement, ours)
        if count:
            return [found]
    layer, kind = re.fullmatch(r"layers\.(\d+)\.attention\.qkv\.(weight|bias)", ours).groups()
    here = f"bert.encoder.layer.{layer}.attention.self"
    return [f"{here}.{name}.{kind}" for name in ("query", "key", "value")]


def ours_and_theirs(config, theirs, table):
    """Our model with wide weights, in float64, and theirs with a copy of them."""
    torch.manual_seed(0)
    ours, theirs = build_model(config).double(), theirs.double().eval()
    weights = dict(theirs.named_parameters())
    seen = set()
    for name, param in ours.canonical_parameters():
        param.init = Init(std=0.3)
        initialise(name, param, 1234)
        whole = param.shard.join([param.detach()])
        found = [weights[other] for other in names_in(table, name)]
        seen.update(names_in(table, name))
        for weight, part in zip(found, whole.split([len(weight) for weight in found]), strict=True):
            weight.data.copy_(part)
    assert seen == weights.keys()
    return ours, theirs


def check_gradients(ours, theirs, table, rtol=1e-10):
    weights = dict(theirs.named_parameters())
    for name, param in ours.canonical_parameters():
        expected = torch.cat([weights[other].grad for other in names_in(table, name)])
        found = param.shard.join([param.grad])
        torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-13, msg=name)
        rows = param.grad[len(found) :] if param.dim() < 3 else param.grad[:0]
        assert not rows.any(), f"padding of {name}"
