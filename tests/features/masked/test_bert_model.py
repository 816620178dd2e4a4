"""BERT against transformers' models with the same weights, in float64: losses and gradients."""

import numpy as np
import pytest
import torch
from bert_pairs import (
    CLASSIC,
    HEADS,
    LAYERS,
    LENGTH,
    PAD,
    SIZES,
    VOCAB,
    WIDTH,
    check_gradients,
    classic,
    names_in,
    ours_and_theirs,
    table_of,
)
from configs import model_config
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from megatron.families import build_model, family_of, spec_of
from megatron.features.masked.batch import BertSample, collate_bert
from megatron.features.masked.layers import order_loss
from megatron.model.layer_list import initialise
from megatron.parallel.shard import Init

transformers = pytest.importorskip("transformers")

MODERN = [
    (r"embedding\.word_embeddings\.bias", "decoder.bias"),
    (r"embedding\.word_embeddings\.", "model.embeddings.tok_embeddings."),
    (r"embedding\.norm\.", "model.embeddings.norm."),
    (r"layers\.(\d+)\.attention_norm\.", r"model.layers.\1.attn_norm."),
    (r"layers\.(\d+)\.attention\.qkv\.", r"model.layers.\1.attn.Wqkv."),
    (r"layers\.(\d+)\.attention\.proj\.", r"model.layers.\1.attn.Wo."),
    (r"layers\.(\d+)\.mlp_norm\.", r"model.layers.\1.mlp_norm."),
    (r"layers\.(\d+)\.mlp\.up\.", r"model.layers.\1.mlp.Wi."),
    (r"layers\.(\d+)\.mlp\.down\.", r"model.layers.\1.mlp.Wo."),
    (r"final_norm\.norm\.", "model.final_norm."),
    (r"lm_head\.", "head."),
]
WINDOW = 4


def sample(length, seed):
    """So many tokens, some of them to be predicted, the rest padding."""
    draw = np.random.default_rng(seed)
    tokens, labels = draw.integers(3, VOCAB, (2, length))
    chosen = np.sort(draw.permutation(np.arange(1, length))[: length // 3])
    types = (np.arange(length) > length // 2).astype(np.int64)
    return BertSample.padded(
        tokens, types, chosen, labels[chosen], seed % 2, seq_length=LENGTH, pad=PAD
    )


SAMPLES = [sample(length, seed) for seed, length in enumerate((LENGTH, 7, 4, 9))]


@pytest.mark.parametrize("post_norm", [True, False], ids=["post-norm", "pre-norm"])
def test_against_transformers(post_norm):
    made = "Bert" if post_norm else "MegatronBert"
    config = getattr(transformers, f"{made}Config")(**SIZES, **CLASSIC, hidden_act="gelu")
    theirs = getattr(transformers, f"{made}ForPreTraining")(config)
    model, table = classic(post_norm), table_of(post_norm)
    ours, theirs = ours_and_theirs(model, theirs, table)
    batch = collate_bert(SAMPLES)
    spec = spec_of(model)
    found = ours(spec.begin(batch)).losses
    spec.total(found).backward()
    expected = theirs(
        input_ids=batch.tokens_BS,
        attention_mask=batch.padding_mask_BS,
        token_type_ids=batch.types_BS,
        labels=batch.labels_BS.where(batch.loss_mask_BS > 0, -100),
        next_sentence_label=batch.is_random_B,
    )
    expected.loss.backward()
    torch.testing.assert_close(spec.total(found), expected.loss, rtol=1e-12, atol=0)
    check_gradients(ours, theirs, table)
    with torch.no_grad():
        logits = ours(spec.begin(batch).changed(targets=None))
    filled = batch.padding_mask_BS > 0
    close = {"rtol": 1e-10, "atol": 1e-12}
    theirs_BSV, theirs_B2 = expected.prediction_logits, expected.seq_relationship_logits
    torch.testing.assert_close(logits.hidden[..., :VOCAB][filled], theirs_BSV[filled], **close)
    torch.testing.assert_close(logits.pooled, theirs_B2, **close)


def modern(packed):
    """ModernBERT's blocks; theirs has no norm before the first one's attention."""
    config = transformers.ModernBertConfig(
        **SIZES, local_attention=WINDOW, hidden_activation="gelu_pytorch_tanh", norm_bias=True,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        cls_token_id=1, bos_token_id=1, sep_token_id=2, eos_token_id=2,
    )  # fmt: skip
    theirs = transformers.ModernBertForMaskedLM(config)
    theirs.head.norm = nn.LayerNorm(WIDTH)
    theirs.model.layers[0].attn_norm = nn.LayerNorm(WIDTH)
    model = model_config(
        family="bert", num_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS,
        kv_channels=WIDTH // HEADS, seq_length=LENGTH * (2 if packed else 1), ffn_hidden_size=24,
        hidden_dropout=0.0, attention_dropout=0.0, bert_binary_head=False, add_bias_linear=False,
        position_embedding_type="rope", rotary_base=160000.0, rotary_base_local=10000.0,
        sliding_window=WINDOW, window_attn_skip_freq=3, embed_layernorm=True,
        glu_activation="geglu",
    ).with_vocabulary(VOCAB)  # fmt: skip
    return model, *ours_and_theirs(model, theirs, MODERN)


def as_row(samples, length=2 * LENGTH):
    """The samples in one row, which has space for more."""
    whole = [
        BertSample(*(np.pad(v, (0, length - LENGTH)) if np.ndim(v) else v for v in each[:-1]))
        for each in samples
    ]
    return BertSample.packed(whole, pad=PAD)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_windows_and_packed_samples_against_modern_bert(packed):
    """Packed, every sample sees what it sees in a row of its own."""
    model, ours, theirs = modern(packed)
    batch = collate_bert(SAMPLES)
    rows = collate_bert([as_row(SAMPLES[:2]), as_row(SAMPLES[2:])]) if packed else batch
    found = ours(spec_of(model).begin(rows)).losses["lm loss"]
    found.backward()
    labels = batch.labels_BS.where(batch.loss_mask_BS > 0, -100)
    logits_BSV = theirs(batch.tokens_BS, batch.padding_mask_BS).logits
    expected = nn.functional.cross_entropy(logits_BSV.flatten(0, 1), labels.flatten())
    expected.backward()
    # Their angles, and ours, are float32.
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    weights = dict(theirs.named_parameters())
    for name, param in ours.canonical_parameters():
        (other,) = names_in(MODERN, name)
        close = {"rtol": 1e-4, "atol": 1e-7, "msg": name}
        torch.testing.assert_close(param.shard.join([param.grad]), weights[other].grad, **close)


def test_learned_positions_of_packed_samples():
    """They restart with each sample."""
    model = model_config(
        family="bert", seq_length=2 * LENGTH, bert_binary_head=False, hidden_dropout=0.0,
        attention_dropout=0.0,
    ).with_vocabulary(VOCAB)  # fmt: skip
    ours, begin = build_model(model).double(), spec_of(model).begin
    for name, param in ours.canonical_parameters():
        param.init = Init(std=0.3)
        initialise(name, param, 1234)
    rows = collate_bert([as_row(SAMPLES[:2]), as_row(SAMPLES[2:])])
    with torch.no_grad():
        found = ours(begin(rows)).losses["lm loss"]
        expected = ours(begin(collate_bert(SAMPLES))).losses["lm loss"]
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("binary_head", [True, False], ids=["both", "lm-only"])
def test_flops_against_torchs_counter(binary_head):
    """Of a length whose usual share of predicted tokens is a multiple of 8."""
    model = model_config(
        family="bert", seq_length=56, attention_backend="eager", bert_binary_head=binary_head,
        hidden_dropout=0.0, attention_dropout=0.0,
    ).with_vocabulary(VOCAB)  # fmt: skip
    sizes = {"seq_length": 56, "pad": PAD}
    places, tokens = np.arange(2, 10), np.full(56, 5)
    row = BertSample.padded(tokens, np.zeros(56, np.int64), places, tokens[:8], 0, **sizes)
    begin = spec_of(model).begin(collate_bert([row, row]))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        build_model(model)(begin)
    expected = 2 * 56 * family_of("bert").shape(model).flops_per_token(causal=True) / 3
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-12)


def test_rows_without_padding_need_no_mask():
    full = collate_bert([SAMPLES[0], SAMPLES[0]])
    assert not full.padded and collate_bert(SAMPLES).padded
    model = model_config(family="bert", seq_length=LENGTH).with_vocabulary(VOCAB)
    masks = spec_of(model).begin(full).masks
    assert masks.visible(LENGTH, LENGTH, None, torch.device("cpu"), causal=False) is None
    padded = spec_of(model).begin(collate_bert(SAMPLES)).masks
    found = padded.visible(LENGTH, LENGTH, None, torch.device("cpu"), causal=False)
    assert found.shape == (4, 1, 1, LENGTH)


def test_samples_without_an_order_do_not_count():
    logits = torch.randn(3, 2, dtype=torch.float64)
    expected = nn.functional.cross_entropy(logits[:1], torch.tensor([1]))
    torch.testing.assert_close(order_loss(logits, torch.tensor([1, -1, -1])), expected)
    assert order_loss(logits, torch.tensor([-1, -1, -1])) == 0
