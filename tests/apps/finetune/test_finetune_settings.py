"""What finetune.py fills in, and what it refuses before anything takes time."""

import json
import os

import pytest
from finetune_cases import save_blank, save_data

from megatron.apps.finetune.answers import answer_tokens
from megatron.apps.finetune.command import SameSamples, parse, planned
from megatron.apps.finetune.export import check_output_folder
from megatron.apps.finetune.settings import TuningConfig, check_flags
from megatron.apps.reinforcement.flags import ReinforcementConfig
from megatron.checkpoint.files import CheckpointError
from megatron.config import ConfigError
from megatron.features.instruction.flags import InstructionConfig
from megatron.run.run import RunToolParser


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("settings")
    return {"base": str(save_blank(folder / "base")), **save_data(folder)}


@pytest.fixture
def tuning(files, tmp_path):
    """The fine-tuning of further flags on some processes."""

    def of(*more: str, processes: int = 1, data: str = "sft"):
        argv = ["--model", files["base"], "--data", files[data], "--output", str(tmp_path / "o")]
        config, settings = RunToolParser(TuningConfig, None).parse([*argv, *more])
        check_flags(config, settings)
        return planned(config, settings, processes)

    return of


def test_answers_leave_room_for_a_prompt(tuning):
    config = tuning().config
    assert [answer_tokens(config, positions) for positions in (96, 128, 4096)] == [48, 64, 128]
    config = tuning("--sample-tokens", "128").config
    assert answer_tokens(config, 4096) == 128
    with pytest.raises(
        ConfigError, match="--sample-tokens 128 .* 128 positions .* than 128, or --s"
    ):
        answer_tokens(config, 128)


def test_values_that_nobody_gives(tuning, files):
    found = tuning()
    config = found.run.config
    assert config.model.seq_length == 2048  # of the model's 4096
    assert (config.optimizer.lr, config.optimizer.lr_decay_style) == (1e-5, "cosine")
    assert (config.training.micro_batch_size, config.training.global_batch_size) == (2, 16)
    assert config.section(InstructionConfig).sft_loss_weights == "tokens"
    # 30 examples, of which those of some prompts are held out; three epochs.
    held_out = sum(found.counts.valid.values())
    assert (found.epochs.count, found.epochs.samples) == (3, 30 - held_out)
    assert config.training.train_samples == 3 * (30 - held_out)
    assert config.training.eval_iters == (held_out > 0)
    assert config.section(InstructionConfig).split_by == "prompt"
    assert config.checkpoint.save == config.checkpoint.load
    assert config.tokenizer.tokenizer_model == files["base"]


@pytest.mark.parametrize(
    ("steps", "every"), [(1, 1), (12, 1), (99, 1), (100, 2), (300, 6), (500, 10), (100_000, 10)]
)
def test_a_short_run_has_a_curve(tuning, steps, every):
    assert tuning("--train-iters", str(steps)).run.config.logging.log_interval == every
    given = tuning("--train-iters", str(steps), "--log-interval", "7")
    assert given.run.config.logging.log_interval == 7


def test_flags_come_first(tuning):
    config = tuning("--lr", "3e-4", "--seq-length", "512", "--global-batch-size", "6").run.config
    assert (config.optimizer.lr, config.model.seq_length) == (3e-4, 512)
    assert (config.training.micro_batch_size, config.training.global_batch_size) == (2, 6)


@pytest.mark.parametrize(
    "more, rate",
    [
        (["--lora"], 1e-4),
        (["--preference", "dpo"], 5e-7),
        (["--preference", "orpo", "--lora"], 5e-6),
    ],
)
def test_rates_by_method(tuning, more, rate):
    data = "dpo" if "--preference" in more else "sft"
    assert tuning(*more, data=data).run.config.optimizer.lr == rate


@pytest.mark.parametrize(
    "more, group, size, rate",
    [
        (["--rl", "grpo"], 8, 16, 1e-6),
        (["--rl", "rloo", "--lora"], 4, 16, 1e-5),
        (["--rl", "dapo", "--num-generations", "6"], 6, 18, 1e-6),
        (["--rl", "ppo"], 1, 16, 1e-6),
    ],
)
def test_texts_of_the_model(tuning, more, group, size, rate):
    """Batches of whole groups, one pass over the prompts, no dropout, and no answers to learn."""
    tuned = tuning(*more, "--reward-funcs", "exact", data="rl")
    config = tuned.run.config
    options = config.section(ReinforcementConfig)
    assert (options.num_generations, config.optimizer.lr) == (group, rate)
    assert config.training.global_batch_size == size
    assert not config.section(InstructionConfig).sft
    assert config.model.hidden_dropout == config.model.attention.attention_dropout == 0.0
    held_out = sum(tuned.counts.valid.values())
    assert (tuned.epochs.count, tuned.epochs.samples) == (1, (30 - held_out) * group)


def test_batches_fit_the_layout(tuning):
    config = tuning(processes=3).run.config
    assert config.training.global_batch_size == 18
    config = tuning("--tensor-model-parallel-size", "2", processes=4).run.config
    assert config.training.global_batch_size == 16


def test_the_json_of_deepspeed_comes_before_what_is_filled_in(tuning, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 3, "train_batch_size": 9}))
    config = tuning("--deepspeed_config", str(path)).run.config
    assert (config.training.micro_batch_size, config.training.global_batch_size) == (3, 9)


def test_several_paths_are_used_alike(tuning, files):
    found = tuning("--data", files["sft"], files["sft"])
    count = found.counts.train[0]
    assert found.counts.train == (count, count)
    assert found.run.config.data.data_path == (str(count), files["sft"]) * 2
    assert found.epochs.samples == 2 * count


def test_held_out_samples_are_those_of_every_evaluation():
    same = SameSamples(list("abcdefg"), count=3, each=4, num_samples=12)
    assert "".join(same[i] for i in range(12)) == "abcaabcaabca"
    assert len(same) == 12


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"--model": None}, ConfigError, "--model is missing"),
        ({"--data": None}, ConfigError, "--data is missing"),
        ({"--model": "nowhere"}, CheckpointError, "--model nowhere: there is no such"),
        ({"--load": "x"}, ConfigError, "--load: finetune.py sets this by --output"),
        ({"--split": "9,1"}, ConfigError, "sets this by --held-out"),
        ({"--eval-data": "b.json", "--held-out": "0.1"}, ConfigError, "give one of them"),
        ({"--output": "{base}/tuned"}, ConfigError, "contain each other"),
    ],
)
def test_refusals(files, tmp_path, change, error, words):
    flags = {"--model": files["base"], "--data": files["sft"], "--output": str(tmp_path / "o")}
    flags |= {k: v if v is None else v.format(base=files["base"]) for k, v in change.items()}
    argv = [word for name, value in flags.items() if value for word in (name, value)]
    with pytest.raises(error, match=words):
        parse(None, argv)


def test_an_output_that_cannot_be_written(files, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        check_output_folder(TuningConfig(output=str(file)))
    with pytest.raises(ConfigError, match=r"cannot write to .*choose a folder"):
        check_output_folder(TuningConfig(output=str(file / "inside")))
    if os.geteuid():
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(ConfigError, match="cannot write to"):
            check_output_folder(TuningConfig(output=str(tmp_path / "locked" / "o")))


def test_a_model_of_others_is_not_replaced(tmp_path):
    output = tmp_path / "o"
    output.mkdir()
    (output / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="--overwrite"):
        check_output_folder(TuningConfig(output=str(output)))
    check_output_folder(TuningConfig(output=str(output), overwrite=True))
    (output / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="that no checkpoint in .*checkpoints has made"):
        check_output_folder(TuningConfig(output=str(output)))
