"""examples_deepspeed/finetune/: every recipe is a command that finetune.py takes."""

import pytest
from example_scripts import FOLDER, printed, script
from finetune_cases import save_data

from megatron.config.kinds.instruction import InstructionConfig
from megatron.config.kinds.preference import PreferenceConfig
from megatron.finetune.command import planned
from megatron.finetune.config import TuningConfig
from megatron.finetune.settings import check_flags
from megatron.training.run import RunToolParser

RECIPES = sorted(p for p in (FOLDER / "finetune").glob("*.sh") if p.name != "common.sh")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    return {"BASE": str(_base(folder / "base")), **save_data(folder)}


def _base(folder):
    """A Llama whose weights nobody reads, and a tokenizer."""
    import json

    from safetensors.torch import save_file
    from torch import zeros

    from megatron.tokenizer.train import train_byte_level_bpe

    tokenizer = train_byte_level_bpe(["say red green"], vocab_size=260, min_frequency=2)
    H, F, V = 16, 32, tokenizer.vocab_size
    config = {
        "model_type": "llama", "vocab_size": V, "hidden_size": H, "intermediate_size": F,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 4096, "tie_word_embeddings": True, "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        "embed_tokens": (V, H), "norm": (H,), "layers.0.input_layernorm": (H,),
        "layers.0.post_attention_layernorm": (H,), "layers.0.mlp.gate_proj": (F, H),
        "layers.0.mlp.up_proj": (F, H), "layers.0.mlp.down_proj": (H, F),
        **{f"layers.0.self_attn.{x}_proj": (H, H) for x in "qkvo"},
    }  # fmt: skip
    tensors = {f"model.{name}.weight": zeros(shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_resolves(path, files, tmp_path):
    kind = "dpo" if "dpo" in path.name else "sft"
    launcher, flags = printed(path, BASE=files["BASE"], DATA=files[kind], RUNS=str(tmp_path))
    assert launcher == ["deepspeed"]
    config, settings = RunToolParser(TuningConfig, None).parse(flags)
    check_flags(config, settings)
    run = planned(config, settings, 2).run
    assert run.config.precision.bf16
    assert run.config.adapters.lora == (("lora" in path.name) or path.name == "llama3_dpo.sh")
    assert run.config.adapters.qlora == ("qlora" in path.name)
    assert run.config.kind(PreferenceConfig).preference == ("dpo" if kind == "dpo" else None)
    assert run.config.kind(InstructionConfig).sft == (kind == "sft")
    assert run.config.checkpoint.save.startswith(str(tmp_path))


def test_a_recipe_without_its_settings_is_refused():
    result = script(RECIPES[0], DATA="a.json")
    assert result.returncode == 2
    assert "set BASE" in result.stderr
