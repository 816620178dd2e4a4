"""Heads for labelled text against transformers' models with the same weights, in float64."""

import dataclasses

import numpy as np
import pytest
import torch
from bert_pairs import (
    CLASSIC,
    LENGTH,
    PAD,
    SIZES,
    VOCAB,
    check_gradients,
    classic,
    ours_and_theirs,
    table_of,
)
from configs import model_config, with_flags
from torch.utils.flop_counter import FlopCounterMode

from megatron.config import ConfigError
from megatron.families import build_model, family_of, spec_of
from megatron.features.masked.heads import (
    IGNORED,
    LabelledText,
    collate_labelled,
    label_loss,
    span_loss,
)
from megatron.model.layer_list import initialise
from megatron.parallel.shard import Init

transformers = pytest.importorskip("transformers")

SIZES_OF_TEXTS = (LENGTH, 7, 4, 9)


def text(size, seed):
    """Tokens of two segments, and their types."""
    tokens = np.random.default_rng(seed).integers(3, VOCAB, size)
    return tokens, (np.arange(size) > size // 2).astype(np.int64)


def samples(labels, choices=1, sizes=SIZES_OF_TEXTS):
    texts = [[text(size, 10 * n + c) for c in range(choices)] for n, size in enumerate(sizes)]
    return [
        LabelledText(*zip(*each, strict=True), label)
        for each, label in zip(texts, labels, strict=True)
    ]


def batch_of(labels, choices=1, **options):
    return collate_labelled(samples(labels, choices), pad=PAD, **{"length": LENGTH} | options)


SPANS = [(1, 3), (0, 6), (2, LENGTH), (LENGTH + 3, 8)]
"""Places after the sequence do not count."""
CASES = {
    "classification": (
        "SequenceClassification", {"head": "classification", "num_labels": 3}, (2, 0, 1, 2), 1
    ),
    "regression": (
        "SequenceClassification", {"head": "classification", "num_labels": 1},
        (2.5, 0.0, 1.2, -3.0), 1,
    ),
    "multiple_choice": ("MultipleChoice", {"head": "multiple_choice"}, (2, 0, 1, 1), 3),
    "span": ("QuestionAnswering", {"head": "span"}, SPANS, 1),
}  # fmt: skip
"""Class in `transformers`, flags, labels and choices."""


@pytest.mark.parametrize("post_norm", [True, False], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("case", CASES)
def test_against_transformers(case, post_norm):
    kind, flags, labels, choices = CASES[case]
    made = "Bert" if post_norm else "MegatronBert"
    config = getattr(transformers, f"{made}Config")(
        **SIZES, **CLASSIC, hidden_act="gelu", num_labels=flags.get("num_labels", 2)
    )
    theirs = getattr(transformers, f"{made}For{kind}")(config)
    if case == "span":
        # The scores of padding are part of the loss; theirs would leave that token's embedding out.
        theirs.bert.embeddings.word_embeddings.padding_idx = None
    table = table_of(post_norm)
    ours, theirs = ours_and_theirs(classic(post_norm, **flags), theirs, table)
    spec, batch = spec_of(classic(post_norm, **flags)), batch_of(labels, choices)
    found = ours(spec.begin(batch)).losses["lm loss"]
    found.backward()
    rows = (len(SIZES_OF_TEXTS), choices, LENGTH) if choices > 1 else (-1, LENGTH)
    answers = {"labels": batch.labels_B}
    if case == "span":
        places = batch.labels_B.unbind(-1)
        answers = dict(zip(("start_positions", "end_positions"), places, strict=True))
    if case == "regression":
        answers = {"labels": batch.labels_B.double()}
    expected = theirs(
        input_ids=batch.tokens_BS.view(rows),
        attention_mask=batch.padding_mask_BS.view(rows),
        token_type_ids=batch.types_BS.view(rows),
        **answers,
    )
    expected.loss.backward()
    torch.testing.assert_close(found, expected.loss, rtol=1e-12, atol=0)
    check_gradients(ours, theirs, table)
    with torch.no_grad():
        state = ours(spec.begin(batch).changed(targets=None))
    close = {"rtol": 1e-10, "atol": 1e-12}
    if case == "span":
        both = torch.stack([expected.start_logits, expected.end_logits], -1)
        torch.testing.assert_close(state.hidden, both, **close)
    else:
        torch.testing.assert_close(state.pooled, expected.logits, **close)


def test_batches():
    full = samples((1, 0), sizes=(8, 8))
    padded = samples((1, 0), sizes=(8, 5))
    assert not collate_labelled(full, pad=PAD).padded
    batch = collate_labelled(padded, pad=9)
    assert batch.padded and batch.tokens_BS[1, 5:].eq(9).all()
    assert batch.padding_mask_BS.sum(1).tolist() == [8, 5] and not batch.types_BS[1, 5:].any()
    assert collate_labelled(samples((1,), sizes=(9,)), pad=PAD).tokens_BS.shape == (1, 16)
    assert batch_of((1.5, 2.0, 0.0, 1.0)).labels_B.dtype == torch.float32
    model = classic(True, head="span")
    masks = spec_of(model).begin(collate_labelled(full, pad=PAD)).masks
    assert masks.visible(8, 8, None, torch.device("cpu"), causal=False) is None
    masks = spec_of(model).begin(batch).masks
    assert masks.visible(8, 8, None, torch.device("cpu"), causal=False).shape == (2, 1, 1, 8)


def wide(model):
    network = build_model(model).double()
    for name, param in network.canonical_parameters():
        param.init = Init(std=0.3)
        initialise(name, param, 1234)
    return network


@pytest.mark.parametrize("case", CASES)
def test_padding_changes_nothing(case):
    """Nor does the length that rows are filled up to, except for a span: its scores are those of
    all places."""
    _, flags, labels, choices = CASES[case]
    model = with_flags(classic(False, **flags), max_position_embeddings=32).with_vocabulary(VOCAB)
    ours, spec = wide(model), spec_of(model)
    with torch.no_grad():
        short, long = (
            ours(spec.begin(batch_of(labels, choices, length=length)).changed(targets=None))
            for length in (LENGTH, 2 * LENGTH)
        )
    close = {"rtol": 1e-12, "atol": 1e-12}
    if case == "span":
        torch.testing.assert_close(short.hidden, long.hidden[:, :LENGTH], **close)
    else:
        torch.testing.assert_close(short.pooled, long.pooled, **close)


@pytest.mark.parametrize("case", ["classification", "multiple_choice"])
def test_dropout_before_the_head(case):
    """While training alone."""
    _, flags, labels, choices = CASES[case]
    model = classic(False, hidden_dropout=0.5, **flags)
    ours, begin = wide(model), spec_of(model).begin(batch_of(labels, choices))
    head = list(ours.sequence.steps)[-1][1]
    assert head.dropout.probability == 0.5

    def pooled():
        torch.manual_seed(len(seeds))
        seeds.append(None)
        state = begin.changed(pooled=torch.ones(4 * choices, 16, dtype=torch.float64), targets=None)
        return head(state).pooled

    seeds: list[None] = []
    assert not torch.equal(pooled(), pooled())
    ours.eval()
    assert torch.equal(pooled(), pooled())


def test_samples_that_do_not_count():
    logits = torch.randn(3, 4, dtype=torch.float64)
    expected = torch.nn.functional.cross_entropy(logits[:1], torch.tensor([1]))
    torch.testing.assert_close(label_loss(logits, torch.tensor([1, IGNORED, IGNORED])), expected)
    assert label_loss(logits, torch.tensor([IGNORED] * 3)) == 0
    spans = torch.randn(1, 4, 2, dtype=torch.float64)
    assert span_loss(spans, torch.tensor([[4, 9]])) == 0
    assert label_loss(logits.half(), torch.tensor([1, 0, 2])).dtype == torch.float32


@pytest.mark.parametrize("case", ["classification", "multiple_choice", "span"])
def test_flops_against_torchs_counter(case):
    """Of one text."""
    flags = CASES[case][1]
    model = classic(False, attention_backend="eager", **flags)
    row = samples([(0, 0) if case == "span" else 0], sizes=(LENGTH,))
    begin = spec_of(model).begin(collate_labelled(row, pad=PAD, length=LENGTH))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        build_model(model)(begin)
    expected = LENGTH * family_of("bert").shape(model).flops_per_token(causal=True) / 3
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"head": "classification"}, "num_labels None: a model has labels if its head is for"),
        ({"num_labels": 2}, "num_labels 2: .* this one is lm"),
        (
            {"head": "classification", "num_labels": 2, "label_names": ("a",)},
            "label_names a: there are 2 labels",
        ),
    ],
)
def test_what_contradicts_itself(flags, message):
    with pytest.raises(ConfigError, match=message):
        model_config(family="bert", **flags)


def test_other_families_have_no_such_head():
    model = dataclasses.replace(model_config(), head="span")
    with pytest.raises(ConfigError, match="of the family gpt has no span head; its heads are lm"):
        spec_of(model)
