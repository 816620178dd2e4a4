"""Runs that only evaluate."""

import dataclasses
import shutil
from types import SimpleNamespace

import pytest
import torch

from megatron.config import Setting, TokenizerConfig
from megatron.engine.train_engine import ModelEngine
from megatron.features.evaluation.checkpoints import (
    checkpoint_settings,
    evaluated_run,
    evaluation_settings,
)
from megatron.features.use_checkpoint_args.settings import with_checkpoint
from megatron.parallel.mesh import Mesh
from megatron.tokenizer.plain import NullTokenizer


def test_tokenizer_next_to_the_checkpoint(tmp_path, gpt_config, random_gpt, write_checkpoint):
    """Where the files that a run had have gone; a flag that names others is not overruled."""
    original = tmp_path / "original"
    NullTokenizer(60).save_pretrained(original)
    named = TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(original))
    config = dataclasses.replace(gpt_config(), tokenizer=named)
    write_checkpoint(tmp_path / "ours", config, random_gpt(config), NullTokenizer(60))
    given = {"load": Setting(str(tmp_path / "ours"), "flag --load")}
    used, _ = evaluation_settings(checkpoint_settings(given))
    assert evaluated_run(used, 1).config.tokenizer.tokenizer_model == str(original)
    trained = given | {"use_checkpoint_args": Setting(True, "flag --use-checkpoint-args")}
    assert with_checkpoint(trained)["tokenizer_model"].value == str(original)
    shutil.rmtree(original)
    copied = with_checkpoint(trained)["tokenizer_model"].value
    assert copied.startswith(str(tmp_path / "ours")) and copied.endswith("/tokenizer")
    run = evaluated_run(used, 1)
    assert run.tokenizer.tokenize("7 8") == [7, 8]
    others = {"tokenizer_model": Setting(str(original), "flag --tokenizer-model")}
    with pytest.raises(FileNotFoundError, match="original"):
        evaluated_run(used | others, 1)


def test_an_evaluation_is_the_mean_of_its_batches():
    measure = SimpleNamespace(names=("loss",), per_sample=False, report=dict)
    engine = object.__new__(ModelEngine)
    engine.spec = SimpleNamespace(evaluated=measure)
    engine.mesh, engine.device = Mesh(), torch.device("cpu")
    engine.measured = lambda batches, count, by: [torch.tensor([x]).double() for x in batches]
    assert engine.evaluate(iter([1.0, 3.0, 8.0]), 3) == {"loss": 4.0}
