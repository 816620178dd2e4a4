"""Checkpoints of every format, all made from one small Llama."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from fuzz.fuzzer import Fuzzer
from safetensors.torch import save_file

from megatron.checkpoint.manifest import MANIFEST, file_facts, write_manifest
from megatron.checkpoint.source import Source, open_checkpoint
from megatron.formats.conversion.output import write_checkpoint
from megatron.formats.deepspeed_folders.universal import MANIFEST as UNIVERSAL_MANIFEST
from megatron.formats.deepspeed_folders.universal import write_universal
from megatron.formats.legacy_megatron.writer import write_megatron

H, F, V, HEADS, GROUPS = 16, 24, 32, 4, 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": H,
    "intermediate_size": F, "num_hidden_layers": 1, "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS, "vocab_size": V, "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "torch_dtype": "float32",
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "bos_token_id": 1,
    "eos_token_id": 2, "rope_scaling": None, "attention_dropout": 0.0, "head_dim": 4,
    "pad_token_id": None, "initializer_range": 0.02, "partial_rotary_factor": 1.0,
}  # fmt: skip


def shapes(
    names: Sequence[str] = (
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        *("input_layernorm", "post_attention_layernorm"),
        *("model.embed_tokens", "model.norm", "lm_head"),
    ),
    layer: str = "model.layers.0",
    inner: int = F,
) -> dict[str, tuple[int, ...]]:
    """Shapes of a Llama with one block by a format's names: attention, MLP, norms of the block,
    what is outside of it."""
    kv = H // HEADS * GROUPS
    block: list[tuple[int, ...]] = [(H, H), (kv, H), (kv, H), (H, H)]
    block += [(inner, H), (inner, H), (H, inner), (H,), (H,)]
    places = [*(f"{layer}.{name}" for name in names[: len(block)]), *names[len(block) :]]
    listed = zip(places, [*block, (V, H), (H,), (V, H)], strict=True)
    return {f"{place}.weight": shape for place, shape in listed}


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes().items()}


def write_huggingface(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights(), folder / "model.safetensors", {"format": "pt"})


def write_shards(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    names, tensors = list(shapes()), weights()
    files = {name: f"model-0000{n % 2 + 1}-of-00002.safetensors" for n, name in enumerate(names)}
    for file in sorted(set(files.values())):
        save_file({n: tensors[n] for n in names if files[n] == file}, folder / file)
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_within(folder: Path) -> None:
    """A text model within one that sees images."""
    content = {"model_type": "llava", "text_config": CONFIG, "vision_config": {"hidden_size": 4}}
    (folder / "config.json").write_text(json.dumps(content))
    tensors = {f"language_model.{name}": values for name, values in weights().items()}
    tensors["vision_tower.patch.weight"] = torch.ones(4, 3)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def write_pickles(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    torch.save(weights(), folder / "pytorch_model.bin")


def write_old_pickles(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    torch.save(weights(), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def write_meta(folder: Path) -> None:
    params = {"dim": H, "n_layers": 1, "n_heads": HEADS, "n_kv_heads": GROUPS, "norm_eps": 1e-5,
              "vocab_size": V, "multiple_of": 8, "rope_theta": 10000.0}  # fmt: skip
    (folder / "params.json").write_text(json.dumps(params))
    names = ("attention.wq", "attention.wk", "attention.wv", "attention.wo", "feed_forward.w1",
             "feed_forward.w3", "feed_forward.w2", "attention_norm", "ffn_norm",
             "tok_embeddings", "norm", "output")  # fmt: skip
    named = shapes(names, "layers.0", 8 * -(-int(2 * 4 * H / 3) // 8))
    tensors = {name: torch.randn(shape) for name, shape in named.items()}
    torch.save(tensors, folder / "consolidated.00.pth")


ADAPTER = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "bias": "none",
    "target_modules": ["q_proj", "up_proj"], "fan_in_fan_out": False, "use_dora": False,
    "use_rslora": False, "lora_dropout": 0.0, "modules_to_save": ["norm"], "rank_pattern": {},
    "alpha_pattern": {}, "trainable_token_indices": {"embed_tokens": [3, 5]},
    "base_model_name_or_path": "base", "inference_mode": True,
}  # fmt: skip


def write_peft(folder: Path) -> None:
    """With its base in a folder of it, which is found next to the working directory."""
    (folder / "base").mkdir()
    write_huggingface(folder / "base")
    (folder / "adapters").mkdir()
    config = ADAPTER | {"base_model_name_or_path": "../input/base"}
    (folder / "adapters" / "adapter_config.json").write_text(json.dumps(config))
    tensors = {
        "base_model.model.model.norm.weight": torch.randn(H),
        "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta":
            torch.randn(2, H),
        "base_model.model.lm_head.lora_A.weight": torch.randn(2, H),
        "base_model.model.lm_head.lora_B.weight": torch.randn(V, 2),
    }  # fmt: skip
    for module, rows in (("self_attn.q_proj", H), ("mlp.up_proj", F)):
        name = f"base_model.model.model.layers.0.{module}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(2, H)
        tensors[f"{name}.lora_B.weight"] = torch.randn(rows, 2)
    save_file(tensors, folder / "adapters" / "adapter_model.safetensors")


def converted(write: Callable[[Source, Path], object]) -> Callable[[Path], None]:
    """Another format of the Llama."""

    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as temporary:
            write_huggingface(Path(temporary))
            write(open_checkpoint(temporary), folder)

    return make


def write_universal_copy(source: Source, folder: Path) -> None:
    write_universal(source, folder / "global_step7_universal")


def read_all(folder: Path) -> None:
    """Opens it as training does, and reads every tensor."""
    source = open_checkpoint(folder)
    source.require_model()
    for name in source.names():
        for kind in source.kinds(name):
            source.tensor(name, kind)
    shutil.rmtree(folder.parent / "copied", ignore_errors=True)
    source.copy_tokenizer(folder.parent / "copied")


def read_adapters(folder: Path) -> None:
    read_all(folder / "adapters")


def sign_again(folder: Path) -> None:
    """A manifest of the edited files."""
    for path in folder.rglob(MANIFEST):
        inside = path.parent
        names = [p for p in inside.rglob("*") if p.is_file() and p.name != MANIFEST]
        facts = {str(p.relative_to(inside)): file_facts(p) for p in names}
        path.unlink()
        write_manifest(inside, facts)


def sign_universal_again(folder: Path) -> None:
    """The same of a universal one."""
    for path in folder.rglob(UNIVERSAL_MANIFEST):
        content = json.loads(path.read_bytes())
        names = [p for p in path.parent.rglob("*") if p.is_file() and p != path]
        content["files"] = {str(p.relative_to(path.parent)): file_facts(p) for p in names}
        path.write_text(json.dumps(content))


FUZZERS = (
    Fuzzer("native", converted(lambda s, f: write_checkpoint(f, s, 7)), read_all, sign_again),
    Fuzzer("universal", converted(write_universal_copy), read_all, sign_universal_again),
    Fuzzer(
        "megatron", converted(lambda s, f: write_megatron(s, f, iteration=7)), read_all, heavy=True
    ),
    Fuzzer("safetensors", write_huggingface, read_all, heavy=True),
    Fuzzer("safetensors-shards", write_shards, read_all, heavy=True),
    Fuzzer("within", write_within, read_all, heavy=True),
    Fuzzer("pickles", write_pickles, read_all, heavy=True),
    Fuzzer("old-pickles", write_old_pickles, read_all, heavy=True),
    Fuzzer("meta", write_meta, read_all),
    Fuzzer("peft", write_peft, read_adapters, heavy=True),
)
