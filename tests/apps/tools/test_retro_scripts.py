"""tools/retro/examples/: the scripts print, in a dry run, commands that the programs take."""

import pytest
from example_scripts import ROOT, printed, script

from megatron.apps.retro.command import stages_of
from megatron.apps.retro.config import RetroPreprocessConfig
from megatron.config import FLAG_CLASSES, FlagParser
from megatron.run.run import RunToolParser

FOLDER = ROOT / "tools" / "retro" / "examples"


def preprocessing(*flags, **settings):
    launcher, words = printed(FOLDER / "preprocess_data.sh", *flags, **settings)
    return launcher, *RunToolParser(RetroPreprocessConfig, None).parse(words)


def test_preprocessing_makes_all_files_of_a_project():
    launcher, own, settings = preprocessing()
    assert launcher == ["python"] and own.retro_project_dir == "retro-project"
    assert stages_of(own.retro_tasks) == ["db-build", "index-train", "index-add", "query-neighbors"]
    assert own.bert_embedder_type == "hashing" and own.retro_gpt_chunk_length == 64
    assert settings["data_path"].value == ("0.3", "data/a", "0.7", "data/b")
    samples, batch = settings["train_samples"].value, settings["global_batch_size"].value
    assert (settings["seq_length"].value, samples, batch) == (2048, 200000, 256)


def test_settings_and_flags_of_preprocessing():
    bert = {"BERT_LOAD": "bert", "BERT_VOCAB_FILE": "vocab.txt"}
    launcher, own, settings = preprocessing(
        "--train-samples", "64", RETRO_WORKDIR="old", RETRO_TASKS="db-build", GPUS="4",
        LAUNCHER="torchrun", **bert,
    )  # fmt: skip
    assert launcher[:3] == ["torchrun", "--nproc-per-node", "4"]
    assert own.retro_project_dir == "old" and stages_of(own.retro_tasks) == ["db-build"]
    assert own.bert_embedder_type == "megatron" and own.bert_load == "bert"
    assert own.retro_bert_vocab_file == "vocab.txt"
    assert settings["train_samples"].value == 64


def test_the_command_is_printed():
    shown, run = (
        printed(FOLDER / name) for name in ("get_preprocess_cmd.sh", "preprocess_data.sh")
    )
    assert shown == run


@pytest.mark.parametrize("retriever", ["0", "1"])
def test_training_reads_the_project(retriever):
    given = {"ADD_RETRIEVER": retriever, "GPUS": "2", "CHECKPOINT_PATH": ""}
    launcher, words = printed(FOLDER / "pretrain_model.sh", **given)
    assert launcher[:3] == ["torchrun", "--nproc-per-node", "2"]
    settings = FlagParser(*FLAG_CLASSES).settings(words)
    assert settings["retro_project_dir"].value == "retro-project"
    assert ("retro_add_retriever" in settings) == (retriever == "1")
    folder = {"0": "checkpoints/gpt", "1": "checkpoints/retro"}[retriever]
    assert settings["save"].value == settings["load"].value == folder
    # The project says these.
    assert not {"data_path", "seq_length", "train_samples", "global_batch_size"} & set(settings)


def test_training_begins_with_a_gpt():
    _, words = printed(FOLDER / "pretrain_model.sh", PRETRAINED_GPT="gpt")
    settings = FlagParser(*FLAG_CLASSES).settings(words)
    assert settings["load"].value == "gpt" and settings["finetune"].value
    assert settings["load_optim"].value is False


def test_missing_data():
    result = script(FOLDER / "preprocess_data.sh", DATA_PATH="")
    assert result.returncode == 2 and "set DATA_PATH" in result.stderr
