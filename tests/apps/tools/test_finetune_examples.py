"""examples_deepspeed/finetune/: every recipe is a command that finetune.py takes."""

import json
from pathlib import Path

import pytest
from example_scripts import FOLDER, printed, script
from finetune_cases import save_blank, save_data

from megatron.apps.finetune.command import planned
from megatron.apps.finetune.settings import TuningConfig, check_flags
from megatron.apps.reinforcement.flags import ReinforcementConfig
from megatron.apps.reinforcement.rewards.sources import sources_of
from megatron.features.adapters.flags import AdapterConfig
from megatron.features.instruction.flags import InstructionConfig
from megatron.features.preference.flags import PreferenceConfig
from megatron.run.run import RunToolParser

RL = sorted((FOLDER / "rl").glob("*.sh"))
RECIPES = sorted(p for p in (FOLDER / "finetune").glob("*.sh") if p.name != "common.sh")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    return {"BASE": str(save_blank(folder / "base")), **save_data(folder)}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_resolves(path, files, tmp_path):
    kind = "dpo" if "dpo" in path.name else "sft"
    launcher, flags = printed(path, BASE=files["BASE"], DATA=files[kind], RUNS=str(tmp_path))
    assert launcher == ["deepspeed"]
    config, settings = RunToolParser(TuningConfig, None).parse(flags)
    check_flags(config, settings)
    run = planned(config, settings, 2).run
    assert run.config.precision.bf16
    assert run.config.section(AdapterConfig).lora == (
        ("lora" in path.name) or path.name == "llama3_dpo.sh"
    )
    assert run.config.section(AdapterConfig).qlora == ("qlora" in path.name)
    assert run.config.section(PreferenceConfig).preference == ("dpo" if kind == "dpo" else None)
    assert run.config.section(InstructionConfig).sft == (kind == "sft")
    assert run.config.checkpoint.save.startswith(str(tmp_path))


@pytest.mark.parametrize("path", RL, ids=lambda path: path.stem)
def test_a_recipe_of_rewards_resolves(path, files, tmp_path):
    data = tmp_path / "sums.jsonl"
    records = [{"question": f"{n}+1?", "answer": n + 1, "tests": ["assert 1"]} for n in range(40)]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    places = {"BASE": files["BASE"], "DATA": str(data), "RUNS": str(tmp_path), "TP": "2"}
    launcher, flags = printed(path, **places)
    alone = "one_process" in path.name
    assert launcher == (["python"] if alone else ["deepspeed", "--num_gpus", "8"])
    config, settings = RunToolParser(TuningConfig, None).parse(flags)
    check_flags(config, settings)
    run = planned(config, settings, 1 if alone else 8).run
    options = run.config.section(ReinforcementConfig)
    assert options.rl == path.name.split("_")[0].replace("tools", "grpo")
    assert run.config.parallel.tensor_model_parallel_size == (2 if "nodes" in path.name else 1)
    assert options.environment is None or Path(options.environment.rpartition(":")[0]).is_file()
    assert sources_of(options) or options.environment


def test_a_recipe_without_its_settings_is_refused():
    result = script(RECIPES[0], DATA="a.json")
    assert result.returncode == 2
    assert "set BASE" in result.stderr
