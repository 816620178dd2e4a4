"""Reward models against transformers' models for sequence classification, both ways."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file
from samples import sampled
from test_against_hf import CASES, ours_of
from transformers import AutoConfig, AutoModelForSequenceClassification

from megatron.checkpoint.files import CheckpointError
from megatron.data.gpt_batch import GPTBatch
from megatron.families import spec_of
from megatron.formats.huggingface import architectures
from megatron.formats.huggingface.compare import compare_logits
from megatron.formats.huggingface.export import write_model
from megatron.formats.huggingface.source import HuggingFaceFolder

CAUSAL = {e.model_type: e for e in architectures() if e.family == "gpt" and e.rewards}
CHOSEN = [(kind, next(iter(CASES[kind]))) for kind in CAUSAL]


def theirs_of(model_type, settings, labels=1):
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = AutoConfig.for_model(model_type, **(tokens | settings), num_labels=labels)
    if settings.get("attn_logit_softcapping"):
        config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(0.0, 0.15)
    return model


def test_transformers_has_each_reward_class():
    theirs = {config.model_type for config in AutoModelForSequenceClassification._model_mapping}
    assert set(CAUSAL) <= theirs


@pytest.mark.parametrize(
    ("model_type", "case"),
    sampled(CHOSEN, lambda case: case[0] in ("gpt2", "llama", "gemma3_text")),
)
def test_both_ways(model_type, case, tmp_path):
    """Rewards, loss and gradients of padded texts; what is written again is what was read."""
    theirs, folder, back = theirs_of(model_type, CASES[model_type][case]), *(
        tmp_path / name for name in ("theirs", "back")
    )  # fmt: skip
    theirs.save_pretrained(folder)
    source = HuggingFaceFolder(folder)
    assert source.model.head == "reward"
    ours, spec = ours_of(source), spec_of(source.model)
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, 61, (size,), generator=draw) for size in (7, 11, 5, 3)]
    batch = GPTBatch.ended([row.numpy() for row in rows], 12)
    losses = ours(spec.begin(batch)).losses
    rewards = theirs(batch.tokens_BS, attention_mask=batch.tokens_BS != 0).logits.squeeze(-1)
    expected = -torch.nn.functional.logsigmoid(rewards[0::2] - rewards[1::2]).mean()
    close = {"rtol": 2e-6, "atol": 2e-6}
    torch.testing.assert_close(spec.total(losses), expected, **close)
    torch.testing.assert_close(losses["rewards/chosen"], rewards[0::2].mean(), **close)
    torch.testing.assert_close(losses["rewards/rejected"], rewards[1::2].mean(), **close)
    spec.total(losses).backward()
    expected.backward()
    score = dict(ours.canonical_parameters())["score.weight"]
    torch.testing.assert_close(score.grad, theirs.score.weight.grad, rtol=1e-4, atol=1e-6)

    back.mkdir()
    write_model(source, back, "float32", 10**9)
    actual, wanted = (load_file(path / "model.safetensors") for path in (back, folder))
    assert actual.keys() == wanted.keys()
    assert all(torch.equal(actual[name], wanted[name]) for name in wanted)
    content = json.loads((back / "config.json").read_text())
    assert content["architectures"] == [type(theirs).__name__]
    again = AutoModelForSequenceClassification.from_pretrained(back)
    assert type(again) is type(theirs) and again.config.num_labels == 1
    assert HuggingFaceFolder(back).model == source.model
    assert compare_logits(ours, back, source.model).agree


class Rewarding:
    head = "reward"


def test_every_causal_architecture_has_a_class():
    for architecture in CAUSAL.values():
        assert hasattr(transformers, architecture.class_of(Rewarding))


def test_several_labels_are_refused(tmp_path):
    theirs_of("llama", CASES["llama"]["kv_heads=4,tied"], labels=3).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="it has 3 labels; a reward model has one"):
        HuggingFaceFolder(tmp_path)


def test_a_language_model_is_none(hf_model, tmp_path):
    hf_model("llama", **CASES["llama"]["kv_heads=4,tied"]).save_pretrained(tmp_path)
    assert HuggingFaceFolder(tmp_path).model.head == "lm"
