"""What BERT's and T5's losses depend on, and what they do not."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F

from megatron.families import build_model, spec_of
from megatron.model.layer_list import initialise
from megatron.parallel.shard import Init
from megatron.run.run import parse_run, run_data

COMMON = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 32 --tokenizer-type NullTokenizer "
    "--vocab-size 99 --mock-data --short-seq-prob 0.5 --train-iters 1 --micro-batch-size 4 "
    "--global-batch-size 4 --lr 1e-3 --hidden-dropout 0 --attention-dropout 0"
).split()
RELATIVE = "--position-embedding-type relative --normalization RMSNorm".split()
MODELS = {
    "bert": ["--model-family", "bert", "--num-layers", "2", *COMMON],
    "bert post-norm": [
        *("--model-family", "bert", "--num-layers", "2"),
        "--apply-residual-connection-post-layernorm",
        *COMMON,
    ],
    "t5": ["--model-family", "t5", "--num-layers", "2", "--decoder-seq-length", "16", *COMMON],
    "t5 relative": [
        *("--model-family", "t5", "--num-layers", "2", "--decoder-num-layers", "3"),
        *("--decoder-seq-length", "16"),
        *COMMON,
        *RELATIVE,
    ],
}

VOCAB = 100


@cache
def made(name):
    """Spec, model in float64 with wide weights, collator, and four samples with padding."""
    run = parse_run(None, MODELS[name])
    spec, model = spec_of(run.config.model), build_model(run.config.model).double()
    for param_name, param in model.canonical_parameters():
        param.init = Init(std=0.3)
        initialise(param_name, param, 1234)
    datasets, collate = run_data(run)[:2]
    return spec, model, collate, [datasets.train[i] for i in range(4)]


def losses(name, batch):
    spec, model, _, _ = made(name)
    with torch.no_grad():
        return model(spec.begin(batch)).losses


def batch_of(name, *places):
    _, _, collate, samples = made(name)
    return collate([samples[i] for i in places])


def other_tokens(tokens, mask):
    """Other tokens where the mask is 0."""
    return torch.where(mask > 0, tokens, (tokens + 7) % 50)


@pytest.mark.parametrize("name", MODELS)
def test_padding_changes_nothing(name):
    batch = batch_of(name, 0, 1, 2, 3)
    if name.startswith("bert"):
        masks = {"tokens_BS": batch.padding_mask_BS}
    else:
        masks = {
            "encoder_tokens_BE": batch.encoder_padding_mask_BE,
            "decoder_tokens_BD": batch.decoder_padding_mask_BD,
        }
    changed = {field: other_tokens(getattr(batch, field), mask) for field, mask in masks.items()}
    assert all((mask == 0).any() for mask in masks.values())
    expected = losses(name, batch)
    found = losses(name, batch._replace(**changed))
    assert found.keys() == expected.keys()
    for key, loss in expected.items():
        torch.testing.assert_close(found[key], loss, rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", ["bert", "bert post-norm"])
def test_token_types_and_both_losses_count(name):
    batch = batch_of(name, 0, 1, 2, 3)
    expected = losses(name, batch)
    assert expected.keys() == {"lm loss", "sop loss"}
    other = losses(name, batch._replace(types_BS=1 - batch.types_BS))
    for key, loss in expected.items():
        assert abs(float(other[key] - loss)) > 1e-3, key
    spec, *_ = made(name)
    assert spec.total(expected) == expected["lm loss"] + expected["sop loss"]


@pytest.mark.parametrize("name", ["bert", "bert post-norm"])
def test_the_loss_of_the_order_is_the_mean_over_samples(name):
    """And that of the tokens the mean over the predicted ones."""
    whole, alone = losses(name, batch_of(name, 0, 1, 2, 3)), []
    counts = []
    for place in range(4):
        batch = batch_of(name, place)
        alone.append(losses(name, batch))
        counts.append(batch.loss_mask_BS.sum())
    sop = torch.stack([each["sop loss"] for each in alone]).mean()
    torch.testing.assert_close(whole["sop loss"], sop, rtol=1e-12, atol=0)
    weights = torch.stack(counts).double()
    lm = (torch.stack([each["lm loss"] for each in alone]) * weights).sum() / weights.sum()
    torch.testing.assert_close(whole["lm loss"], lm, rtol=1e-12, atol=0)
    assert len(set(map(float, counts))) > 1, "else both means are the same"


@pytest.mark.parametrize("name", ["bert", "bert post-norm"])
def test_the_head_of_the_predicted_tokens_is_that_of_all(name):
    """Losses and gradients, against those of the logits of every token."""
    spec, model, *_ = made(name)
    batch = batch_of(name, 0, 1, 2, 3)
    assert batch.positions_BP.shape[1] < batch.tokens_BS.shape[1] / 3
    found = dict(model(spec.begin(batch)).losses)
    after = model(spec.begin(batch).changed(targets=None))
    logits_TV = after.hidden.flatten(0, 1)[:, :VOCAB]
    labels_T = batch.labels_BS.flatten()
    expected = {
        "lm loss": F.cross_entropy(logits_TV, labels_T, ignore_index=-1),
        "sop loss": F.cross_entropy(after.pooled, batch.is_random_B),
    }
    for side in (found, expected):
        spec.total(dict(side)).backward()
        side |= {each: param.grad for each, param in model.canonical_parameters()}
        model.zero_grad()
    assert found.keys() == expected.keys()
    for each, value in expected.items():
        assert value.abs().max() > 0, each
        torch.testing.assert_close(found[each], value, rtol=1e-9, atol=1e-13)


def test_blocks_of_a_stack_share_their_bias():
    _, model, _, _ = made("t5 relative")
    names = [name for name, _ in model.canonical_parameters() if "relative_bias" in name]
    assert names == ["encoder.relative_bias.weight", "decoder.relative_bias.weight"]
    batch = batch_of("t5 relative", 0, 1)
    spec = made("t5 relative")[0]
    spec.total(model(spec.begin(batch)).losses).backward()
    for name, param in model.canonical_parameters():
        assert param.grad is not None and param.grad.abs().max() > 1e-9, name
        param.grad = None
