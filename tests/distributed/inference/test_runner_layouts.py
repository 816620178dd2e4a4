"""Generation in every layout, from a folder of Hugging Face to tokens, against transformers."""

from pathlib import Path

import pytest
import torch
from generation_models import (
    PROMPTS,
    SHAPES,
    Played,
    play,
    same,
    save_theirs,
    their_greedy,
    their_model,
    tolerance,
)

from megatron.apps.generation.memory import CacheConfig
from megatron.apps.generation.opening import opened_runner
from megatron.run.run import RunToolParser

COUNT = 10
LAYOUTS = {
    "tp1": (1, []),
    "tp2": (2, ["--tensor-model-parallel-size", "2"]),
    "tp2-sp": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "pp2": (2, ["--pipeline-model-parallel-size", "2"]),
    "tp2-pp2": (
        4,
        ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"],
    ),
}
INTERLEAVED = {
    "virtual": ["--num-layers-per-virtual-pipeline-stage", "1"],
    "dualpipev": ["--pipeline-schedule", "dualpipev"],
}
SAMPLE = [("gemma2", "tp2-pp2"), ("t5", "pp2")]
WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the cat".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Saves a shape, once."""
    saved = {}

    def save(shape: str) -> Path:
        if shape not in saved:
            saved[shape] = save_theirs(tmp_path_factory.mktemp("theirs") / shape, shape)
            (saved[shape] / "vocab.txt").write_text("\n".join(WORDS))
        return saved[shape]

    return save


def generated(
    load: Path, layout: list[str], processes: int, alone: bool = False
) -> list[Played] | None:
    """For the pool: what the main rank got, with prompts in pieces between others' decoding, or
    each alone."""
    argv = ["--load", str(load), "--kv-cache-gib", "0.001", *layout]
    argv += ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(load / "vocab.txt")]
    config, settings = RunToolParser(CacheConfig, None).parse(argv)
    with opened_runner(settings, processes, config) as opened:
        if opened is None:
            return None
        if alone:
            return [play(opened.runner, [prompt], COUNT)[0] for prompt in PROMPTS]
        return play(opened.runner, PROMPTS, COUNT, chunk=5, together=4)


def check(pool, folder, shape: str, layout: str) -> list[Played]:
    processes, flags = LAYOUTS[layout]
    texts, *others = pool.run(processes, generated, folder(shape), flags, processes)
    assert others == [None] * (processes - 1)
    theirs = their_model(shape)
    for text, prompt in zip(texts, PROMPTS, strict=True):
        tokens, log_probs = their_greedy(theirs, prompt, COUNT)
        assert text.tokens == tokens
        torch.testing.assert_close(text.log_probs, log_probs, rtol=0, atol=tolerance(shape))
    return texts


@pytest.mark.parametrize(("shape", "layout"), SAMPLE)
def test_a_sample_of_layouts(shape, layout, pool, folder):
    check(pool, folder, shape, layout)


@pytest.mark.proof
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_layout(shape, layout, pool, folder):
    texts = check(pool, folder, shape, layout)
    processes, flags = LAYOUTS[layout]
    alone, *_ = pool.run(processes, generated, folder(shape), flags, processes, True)
    assert same(texts, alone)


@pytest.mark.proof
@pytest.mark.parametrize("layout", INTERLEAVED)
@pytest.mark.parametrize("shape", ["gpt2", "gemma2"])
def test_several_stages_on_a_process(shape, layout, pool, tmp_path, monkeypatch):
    name = "n_layer" if shape == "gpt2" else "num_hidden_layers"
    monkeypatch.setitem(SHAPES, shape, SHAPES[shape] | {name: 4})
    flags = ["--pipeline-model-parallel-size", "2", *INTERLEAVED[layout]]
    load, theirs = save_theirs(tmp_path / shape, shape), their_model(shape)
    (load / "vocab.txt").write_text("\n".join(WORDS))
    texts, _ = pool.run(2, generated, load, flags, 2)
    for text, prompt in zip(texts, PROMPTS, strict=True):
        tokens, log_probs = their_greedy(theirs, prompt, COUNT)
        assert text.tokens == tokens
        torch.testing.assert_close(text.log_probs, log_probs, rtol=0, atol=5e-6)
