"""The scripts of examples_deepspeed/ that train a Llama further, and finetune_llama.py."""

import pytest
from example_scripts import FOLDER, ROOT, printed, script
from tool_modules import load_program

from megatron.config import FLAG_CLASSES, FlagParser, Setting, resolve
from megatron.engine import deepspeed_json
from megatron.engine.deepspeed_file import read_json
from megatron.features.instruction.flags import InstructionConfig
from megatron.formats.conversion.megatron_programs import HFConverterConfig
from megatron.run.run import RunToolParser


def test_llamas_pretraining_continues_from_the_model_of_a_folder():
    path = FOLDER / "continue_pretrain_llama2.sh"
    _, flags = printed(path, LLAMA_PATH="my llama", DATA_PATH="data/a")
    settings = FlagParser(*FLAG_CLASSES).settings(flags)
    assert settings["pretrained_checkpoint"].value == "my llama"
    assert settings["tokenizer_model"].value == "my llama"
    assert settings["use_checkpoint_args"].value and "num_layers" not in settings


FINE_TUNING = FOLDER / "finetune_hf_llama" / "finetune_llama.sh"


@pytest.mark.parametrize("what", ["convert_hf2mds", "convert_mds2hf", ""])
def test_fine_tuning_of_a_llama_is_what_its_name_says(what):
    """Sizes, layout and folders of Megatron-DeepSpeed's script, in all three uses."""
    words = [what] if what else []
    given = {"HF_LLAMA_PATH": "my llama/", "DATASET_PATH": "my alpaca.json"}
    launcher, flags = printed(FINE_TUNING, *words, "--train-iters", "7", **given)
    assert launcher == ["deepspeed"]
    own, settings = RunToolParser(HFConverterConfig, None).parse(flags)
    trained = "./llama-7b-mega-ds-T2P2-finetuned"
    folders = [settings[name].value if name in settings else None for name in ("load", "save")]
    assert (
        folders
        == {
            "convert_hf2mds": [None, "./llama-7b-mega-ds-T2P2"],
            "convert_mds2hf": [trained, "my llama-hf-out"],
            "": ["./llama-7b-mega-ds-T2P2", trained],
        }[what]
    )
    assert own.to_hf_ckpt == (what == "convert_mds2hf")
    assert own.hf_ckpt_dir == ("my llama" if what else None)
    if what:
        return
    settings = load_program("finetune_llama.py").completed(settings)
    assert settings.pop("use_checkpoint_args").value
    file = ROOT / settings["deepspeed_config"].value
    settings = deepspeed_json.merge(settings, read_json(str(file)), str(file), 4)
    config = resolve(settings, world_size=4).config
    parallel, model, batch = config.parallel, config.model, config.training
    assert (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size) == (2, 2)
    assert (model.num_layers, model.hidden_size, model.mlp.ffn_hidden_size) == (32, 4096, 11008)
    sizes = (model.seq_length, batch.micro_batch_size, batch.global_batch_size, batch.train_iters)
    assert sizes == (512, 16, 256, 7)
    assert config.precision.bf16 and config.engine.zero_stage == 0
    instructions = config.section(InstructionConfig)
    assert instructions.sft and instructions.prompt_format == "alpaca"
    assert config.data.data_path == ("my alpaca.json",)


def test_what_was_not_trained_is_not_converted(tmp_path):
    settings = {"FINETUNED_PATH": str(tmp_path / "gone"), "DRY_RUN": ""}
    result = script(FINE_TUNING, "convert_mds2hf", **settings)
    assert result.returncode == 2 and "train first, or set FINETUNED_PATH" in result.stderr


def test_what_finetune_llama_fills_in():
    completed = load_program("finetune_llama.py").completed

    def filled(words):
        settings = completed(FlagParser(*FLAG_CLASSES).settings(words.split()))
        return {name: setting.value for name, setting in settings.items()}

    assert filled("--data-path a.json") == {
        "family": "gpt", "sft": True, "prompt_format": "alpaca", "data_path": ("a.json",),
    }  # fmt: skip
    assert filled("--load x --save-interval 5 --prompt-format chat") == {
        "family": "gpt", "sft": True, "prompt_format": "chat", "load": "x", "save_interval": 5,
        "use_checkpoint_args": True, "save": "x-finetuned",
    }  # fmt: skip
    assert filled("--load x --save y --save-interval 5")["save"] == "y"
    assert "sft" not in filled("--preference dpo")
    given = {"family": Setting("gpt", "flag --model-family")}
    assert completed(given)["family"] is given["family"]
