"""Properties of decoders of 2019 to 2023 besides logits and gradients in float32: both in float64,
generation, and defaults; all against transformers."""

import contextlib
from pathlib import Path

import pytest
import torch
from configs import run_config
from generation_models import PROMPTS, play, their_greedy
from hf_classic_cases import CLASSIC_CASES
from hf_inputs import pair
from samples import sampled
from test_against_hf import LENGTH, gradients_of, ours_of
from transformers import AutoConfig

from megatron.apps.generation.execution.runner import PagedRunner
from megatron.apps.generation.execution.stages import StagedLayers
from megatron.families import family_of
from megatron.formats.huggingface import architecture_named
from megatron.formats.huggingface.source import HuggingFaceFolder
from megatron.formats.inspection import model_of
from megatron.parallel.shard import shard_of

ALL = [(model_type, case) for model_type, cases in CLASSIC_CASES.items() for case in cases]
FIRST = [(model_type, next(iter(CLASSIC_CASES[model_type]))) for model_type in ("gptj", "xglm")]

SINGLE, PATH = torch.float32, Path("config.json")


@contextlib.contextmanager
def everything_double(monkeypatch):
    """In it float32 means float64, also to code that names it, and to frequencies."""
    with monkeypatch.context() as patch:
        for name in ("float32", "float"):
            patch.setattr(torch, name, torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(SINGLE)


@pytest.mark.parametrize(("model_type", "case"), sampled(ALL, lambda case: case in FIRST))
def test_float64_against_hf(model_type, case, hf_model, tmp_path, monkeypatch):
    """Logits and gradients to 1e-10."""
    with everything_double(monkeypatch):
        theirs = hf_model(model_type, **CLASSIC_CASES[model_type][case]).double()
    with torch.no_grad():  # what float32 has, which is what is read
        for param in theirs.parameters():
            param.copy_(param.float())
    theirs.save_pretrained(tmp_path)
    source = HuggingFaceFolder(tmp_path)
    ours, inputs = ours_of(source).double(), pair(source.model, LENGTH)
    with everything_double(monkeypatch):
        output = theirs(**inputs.theirs)
        logits = ours(inputs.ours.changed(targets=None)).hidden
        torch.testing.assert_close(
            logits[..., : output.logits.shape[-1]], output.logits, rtol=1e-10, atol=1e-10
        )
        inputs.loss(output).backward()
        sum(ours(inputs.ours).losses.values()).backward()
    gradients = {
        name: shard_of(param).join([param.grad]) for name, param in ours.canonical_parameters()
    }
    expected = gradients_of(theirs, tmp_path / "gradients")
    compared = {
        name: gradient
        for parameter in source.architecture.parameters(source.model)
        for name, gradient in parameter.to_hf(gradients[parameter.ours]).items()
    }
    assert compared.keys() == expected.keys()
    for name, gradient in compared.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-12)


def test_the_share_of_a_head_in_a_file_without_it():
    for model_type in ("stablelm", "phi", "persimmon"):
        content = {"model_type": model_type, "hidden_size": 512, "num_attention_heads": 32}
        read = architecture_named(content, PATH).model(content, PATH)
        theirs = AutoConfig.for_model(**content).rope_parameters["partial_rotary_factor"]
        assert read.positions.rotary_percent == theirs


GENERATING = [
    ("gptj", "untied"), ("xglm", "tied"), ("gpt_neo", "irregular"), ("gpt_bigcode", "multi_query"),
    ("codegen", "tied"), ("biogpt", "tied"), ("phi", "normalised"), ("stablelm", "parallel"),
    ("starcoder2", "window"), ("mpt", "six"), ("persimmon", "normalised"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "case"), sampled(GENERATING, lambda case: case[0] == "xglm")
)
def test_greedy_texts_against_hf(model_type, case, hf_model, tmp_path):
    """Texts of several lengths under way together, their prompts in pieces."""
    theirs = hf_model(model_type, **CLASSIC_CASES[model_type][case])
    theirs.save_pretrained(tmp_path)
    source = HuggingFaceFolder(tmp_path)
    model = model_of(source, torch.float32, torch.device("cpu"))
    generation = family_of("gpt").generation(run_config(model=source.model), None)
    stages = StagedLayers.alone(model, source.model.hidden_size)
    runner = PagedRunner(stages, source.model, generation, 60, 4)
    short = [prompt for prompt in PROMPTS if len(prompt) < 20]
    for text in play(runner, short, 9, chunk=5, together=3):
        tokens, log_probs = their_greedy(theirs, text.prompt, 9)
        assert text.tokens == tokens
        torch.testing.assert_close(text.log_probs, log_probs, rtol=0, atol=2e-5)
