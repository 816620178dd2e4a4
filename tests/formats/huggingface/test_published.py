"""The tables against models that people have: their config.json is read whole, and the network has
as many parameters as is published."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from hf_published import PUBLISHED

from megatron.config.flags import Setting
from megatron.config.run import resolve
from megatron.families import build_model
from megatron.formats.huggingface import architecture_named
from megatron.parallel.shard import shard_of

PATH = Path("config.json")


def model_of(content):
    return architecture_named(content, PATH).model(content, PATH)


@pytest.mark.parametrize("name", PUBLISHED)
def test_number_of_parameters(name):
    count, content = PUBLISHED[name]
    with torch.device("meta"):
        network = build_model(model_of(content))
    shapes = [shard_of(param).canonical_shape for _, param in network.canonical_parameters()]
    assert sum(map(math.prod, shapes)) == count


@pytest.mark.parametrize("name", PUBLISHED)
def test_nothing_is_left_to_derive(name):
    """A run with the model's flags has exactly the model that was read."""
    _, content = PUBLISHED[name]
    model = model_of(content)
    flags = model.flags()
    given = {
        field.name: Setting(getattr(flags, field.name), "checkpoint")
        for field in dataclasses.fields(flags)
        if getattr(flags, field.name) != field.default
    }
    further = {"micro_batch_size": 1, "lr": 1e-3, "train_iters": 1}
    given |= {key: Setting(value, "flag") for key, value in further.items()}
    assert resolve(given, 1).config.model == model


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_written_is_read_as_the_same(name):
    _, content = PUBLISHED[name]
    known, model = architecture_named(content, PATH), model_of(content)
    assert known.misfits(model) == []
    written = json.loads(json.dumps(known.config(model)))
    assert known.model(written, PATH) == model


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("openai-community/gpt2", {"n_special": 0, "predict_special_tokens": True}),
        ("openai-community/gpt2", {"_num_labels": 1, "id2label": {"0": "LABEL_0"}}),
        ("EleutherAI/pythia-1b", {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0}),
        ("facebook/opt-125m", {"output_projection": True}),
        ("tiiuae/falcon-40b", {"ff_factor": 4}),
    ],
)
def test_keys_of_other_published_models_change_nothing(name, keys):
    _, content = PUBLISHED[name]
    assert model_of(content | keys) == model_of(content)


def test_the_yarn_of_its_authors_is_read_without_their_note():
    _, content = PUBLISHED["meta-llama/Llama-2-7b-hf"]
    yarn = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}
    plain, noted = (content | {"rope_scaling": yarn | note} for note in ({}, {"finetuned": True}))
    assert model_of(noted) == model_of(plain) != model_of(content)


def test_some_values():
    models = {name.split("/")[1]: model_of(content) for name, (_, content) in PUBLISHED.items()}
    llama = models["Llama-3.1-8B"].positions
    assert llama.rope_scaling.rope_type == "llama3" and llama.rotary_base == 5e5
    assert models["Qwen2.5-7B"].attention.sliding_window is None  # use_sliding_window is false
    assert models["Mistral-7B-v0.1"].attention.sliding_window == 4096
    gemma = models["gemma-3-1b-pt"]
    assert [gemma.attention.window(n) for n in range(6)] == [512] * 5 + [None]
    assert (gemma.positions.rotary_base, gemma.positions.rotary_base_local) == (1e6, 1e4)
    assert (
        models["gemma-2-9b"].embedding.tied and models["falcon-7b"].embedding.tied
    )  # though neither says so
    assert not models["Phi-3-mini-4k-instruct"].embedding.tied
    assert (
        models["falcon-7b"].attention.num_query_groups == 1
        and models["falcon-7b"].shared_parallel_norm
    )
    assert not models["falcon-40b"].shared_parallel_norm
    assert models["opt-125m"].positions.position_embedding_offset == 2
    assert models["bloom-560m"].positions.max_position_embeddings == 2048
