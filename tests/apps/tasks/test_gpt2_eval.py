"""The flags of 2019's run_gpt2_eval.py as those of tasks/main.py."""

import pytest

from megatron.apps.tasks.command import Gpt2EvalConfig
from megatron.apps.tasks.config import TaskConfig
from megatron.config import ConfigError, parse_configs
from megatron.run.run import RunToolParser


def options(*words):
    (found,) = parse_configs((Gpt2EvalConfig,), words)
    found.check()
    return found


def task(*words):
    given = options("--model-path", "gpt2", "--data-path", "text", *words)
    return RunToolParser(TaskConfig, None).parse(given.task_flags())


@pytest.mark.parametrize(
    "words, name, used",
    [
        ([], "WIKITEXT103", {"overlapping_eval": 32}),
        (["--cloze-eval"], "LAMBADA", {"strict_lambada": False}),
        (["--webtext-eval"], "RAW", {}),
    ],
)
def test_each_task(words, name, used):
    config, settings = task(*words)
    assert config.task == name and config.valid_data == ("text",)
    assert used.items() <= vars(config).items()
    iters = settings["eval_iters"].value if "eval_iters" in settings else None
    assert iters == (5000 if name == "RAW" else None)


def test_defaults_of_2019(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    _, settings = task("--batch-size", "16", "--model-parallel-size", "2")
    values = {name: setting.value for name, setting in settings.items()}
    assert values == {
        **dict(load="gpt2", num_layers=12, hidden_size=768, num_attention_heads=12),
        **dict(seq_length=1024, max_position_embeddings=1024, micro_batch_size=16, fp16=True),
        **dict(tokenizer_type="GPT2BPETokenizer", cache_dir="cache", load_optim=False),
        **dict(load_rng=False, tensor_model_parallel_size=2, num_gpus_per_node=2),
    }
    assert task("--num-layers", "3")[1]["num_layers"].value == 3
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "num_gpus_per_node" not in task("--model-parallel-size", "2")[1]


def test_sizes_of_a_hugging_face_folder():
    _, settings = task("--load-openai", "--num-layers", "3")
    assert settings["num_layers"].value == 3 and settings["use_checkpoint_args"].value
    assert not {"hidden_size", "num_attention_heads", "seq_length"} & settings.keys()


def test_what_is_missing():
    with pytest.raises(ConfigError, match="--model-path is missing"):
        options("--data-path", "text")
    both = ["--model-path", "a", "--data-path", "b", "--cloze-eval", "--webtext-eval"]
    with pytest.raises(ConfigError, match="--cloze-eval and --webtext-eval"):
        options(*both)
