"""Rules of LLaMA-Factory's keys that are more than a name and not those of transformers' Trainer
(``tables/llama_factory.txt``); axolotl shares some of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.apps.migration import trainer
from megatron.apps.migration.rules import rules_of
from megatron.apps.migration.translation import Translation, number
from megatron.config import ConfigError

_NOT_HERE = "a folder: hf download {0} --local-dir {0}"
DATA_NOT_HERE = "a folder: hf download --repo-type dataset {0} --local-dir {0}"
_SWITCHES = {
    "flash_attention": "flash",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
    "xformers_attention": "sdpa",
    "flex_attention": "sdpa",
}
"""axolotl's switches of attention kernels."""
_LOSSES = {
    "sigmoid": "dpo",
    "ipo": "ipo",
    "orpo": "orpo",
    "simpo": "simpo",
    "dpo": "dpo",
    "kto": "kto",
}
_KERNELS = {
    "fa2": "flash2",
    "fa3": "flash3",
    "sdpa": "sdpa",
    "disabled": "eager",
    "flash_attention_2": "flash2",
    "flash_attention_3": "flash3",
    "eager": "eager",
}


def download(name: object, words: str = _NOT_HERE) -> str:
    text = str(name)
    return (
        words.format(text)
        if text.count("/") == 1 and not text.startswith((".", "/")) and not Path(text).exists()
        else ""
    )


def pretrains(t: Translation) -> bool:
    return t.program == "pretrain_gpt.py"


def model(t: Translation) -> None:
    key = "base_model" if "base_model" in t.source else "model_name_or_path"
    folder = t.get(key)
    if folder is None:
        raise ConfigError(f"{key} is missing: {t.trainer} needs it")
    if pretrains(t):
        t.put(key, "--pretrained-checkpoint", folder, note=download(folder))
        t.put(key, "--use-checkpoint-args")
        t.put(key, "--tokenizer-type", "HFTokenizer")
        t.put(key, "--tokenizer-model", t.get("tokenizer_config", folder))
    else:
        t.put(key, "--model", folder, note=download(folder))


def stage(t: Translation) -> None:
    """The stage of LLaMA-Factory, which chooses the program."""
    kind = t.get("stage", "sft")
    t.program = "pretrain_gpt.py" if kind == "pt" else "finetune.py"
    if kind in ("kto", "rm"):
        t.put("stage", "--preference", "reward" if kind == "rm" else "kto")
    elif kind == "ppo":
        t.lose("stage", "there is no PPO here")
    elif kind in ("pt", "sft"):
        t.harmless("stage", t.program)
    elif kind != "dpo":
        t.lose("stage", f"there is no {kind}")
    t.harmless("do_train", "programs train")


def method(t: Translation) -> None:
    kind = t.get("finetuning_type", "lora")
    if kind == "lora":
        t.put("finetuning_type", "--lora")
    elif kind != "full":
        t.lose("finetuning_type", f"there is no {kind}: all weights are trained, or --lora")
    t.harmless("finetuning_type", "all weights are trained")


def preference(t: Translation) -> None:
    """DPO and its kin, of LLaMA-Factory (``pref_loss``) or axolotl (``rl``)."""
    if "rl" in t.source or t.trainer == "axolotl":
        kind, key, beta = t.get("rl"), "rl", "rl_beta" if "rl_beta" in t.source else "dpo_beta"
    elif t.get("stage") == "dpo":
        kind, key, beta = t.get("pref_loss", "sigmoid"), "pref_loss stage", "pref_beta"
    else:
        kind, key, beta = (
            t.get("stage") if t.get("stage") == "kto" else None,
            "pref_loss stage",
            "pref_beta",
        )
    if kind in _LOSSES:
        t.put(key, "--preference", _LOSSES[kind])
        if t.get(beta) is not None:
            t.put(beta, "--preference-beta", t.get(beta))
        elif kind == "simpo":
            t.put(beta, "--preference-beta", 0.1)
    elif kind is not None:
        t.lose(key, f"there is no {kind}: --preference has dpo, ipo, kto, orpo, simpo and reward")
    t.harmless("rl rl_beta dpo_beta pref_loss pref_beta", "there is no preference loss")


def lora(t: Translation) -> None:
    keys = "lora_rank lora_alpha lora_dropout lora_target"
    if t.get("finetuning_type", "lora") != "lora":
        t.harmless(keys, "all weights are trained")
        return
    for name, flag in (
        ("lora_rank", "--lora-rank"),
        ("lora_alpha", "--lora-alpha"),
        ("lora_dropout", "--lora-dropout"),
    ):
        if t.get(name) is not None:
            t.put(name, flag, t.get(name))
    set_targets(t, "lora_target", t.get("lora_target", "all"))
    t.harmless(keys, "it is the default")


def set_targets(t: Translation, key: str, value: Any) -> None:
    names = value if isinstance(value, list) else [name.strip() for name in str(value).split(",")]
    t.put(key, "--lora-targets", *(["all-linear"] if names == ["all"] else names))


def quantization(t: Translation) -> None:
    width = t.get("quantization_bit")
    if width == 4:
        t.put("quantization_bit", "--qlora")
        t.put("double_quantization", "--qlora-double-quant", t.get("double_quantization", True))
        if t.get("quantization_type", "nf4") != "nf4":
            t.lose("quantization_type", "--qlora is NF4")
    elif width is not None:
        t.lose("quantization_bit", "frozen weights are in bf16, or by --qlora in 4 bits")
    t.harmless(
        "quantization_bit quantization_method quantization_type double_quantization",
        "the default, or without effect",
    )


def eight(t: Translation) -> None:
    if t.get("fp8"):
        t.put("fp8", "--fp8-format", "hybrid")
        t.put("fp8", "--bf16")
    t.harmless("fp8", "it is off")


def plus(t: Translation) -> None:
    ratio = t.get("loraplus_lr_ratio")
    if ratio is not None:
        t.put("loraplus_lr_ratio", "--lr-group", f"*.lora_*_b.*={ratio}")
    rate, peak = number(t.get("embedding_lr")), number(t.get("learning_rate"))
    scale = t.get("embedding_lr_scale", rate / peak if rate and peak else None)
    if scale is not None:
        t.put(
            "embedding_lr embedding_lr_scale", "--lr-group", f"embedding.*={float(f'{scale:.10g}')}"
        )
    t.lose(
        [k for k in t.source if k.startswith("lr_groups")],
        "--lr-group PATTERN=FACTOR has this project's names of parameters",
    )
    t.harmless("embedding_lr embedding_lr_scale loraplus_lr_ratio", "it is not set")


def recompute(t: Translation) -> None:
    """LLaMA-Factory recomputes activations unless it is told not to."""
    if t.trainer == "LLaMA-Factory":
        off = t.get("disable_gradient_checkpointing", False)
        if not off:
            keys = "disable_gradient_checkpointing gradient_checkpointing"
            t.put(keys, "--recompute-granularity", "full")
            t.put(keys, "--recompute-method", "uniform")
        t.harmless("disable_gradient_checkpointing gradient_checkpointing", "nothing is recomputed")
    else:
        trainer.recompute(t)
        if t.get("activation_offloading"):
            t.put("activation_offloading", "--cpu-offloading")
        t.harmless("activation_offloading", "it is off")


def kernel(t: Translation) -> None:
    named = t.get("flash_attn", t.get("attn_implementation"))
    keys = "flash_attn attn_implementation " + " ".join(_SWITCHES)
    if named in _KERNELS:
        t.put("flash_attn attn_implementation", "--attention-backend", _KERNELS[named])
    else:
        for key, name in _SWITCHES.items():
            if t.get(key):
                t.put(key, "--attention-backend", name)
    t.harmless(keys, "the default chooses a kernel")


def datasets(t: Translation) -> None:
    """Files of examples, which ``dataset_info.json`` names."""
    names = _names(t.get("dataset"))
    if not names:
        raise ConfigError("dataset is missing: LLaMA-Factory needs it")
    folder = str(t.get("dataset_dir", "data"))
    paths = [_file(folder, name) for name in names]
    shares = _names(t.get("interleave_probs"))
    words = [word for pair in zip(shares, paths, strict=True) for word in pair] if shares else paths
    flag = "--data-path" if pretrains(t) else "--data"
    t.put(
        "dataset dataset_dir interleave_probs",
        flag,
        *words,
        note=f"by {folder}/dataset_info.json"
        if (Path(folder) / "dataset_info.json").is_file()
        else f"names of files are in {folder}/dataset_info.json, which is not here",
    )
    if "interleave_probs" in t.source or t.get("mix_strategy", "concat") == "concat":
        t.harmless(
            "mix_strategy",
            "without weights all examples of each file are used, with weights files are blended",
        )
    t.lose("mix_strategy", "give weights before the paths of --data")


def _names(value: Any) -> list[str]:
    if value is None:
        return []
    return [str(v).strip() for v in (value if isinstance(value, list) else str(value).split(","))]


def _file(folder: str, name: str) -> str:
    info = Path(folder) / "dataset_info.json"
    if info.is_file():
        entry = json.loads(info.read_text(encoding="utf-8")).get(name)
        if entry is None:
            raise ConfigError(f"{info} has no {name}")
        return str(Path(folder) / entry.get("file_name", entry.get("hf_hub_url", name)))
    return f"{folder}/{name}.json"


def eval_data(t: Translation) -> None:
    names = _names(t.get("eval_dataset"))
    if names:
        folder = str(t.get("dataset_dir", "data"))
        flag = "--valid-data-path" if pretrains(t) else "--eval-data"
        t.put("eval_dataset", flag, *(_file(folder, name) for name in names))
    t.harmless("eval_dataset", "no other data are named")


def held_out(t: Translation) -> None:
    key = "val_set_size" if "val_set_size" in t.source else "val_size"
    share = number(t.get(key, 0)) or 0
    if (
        pretrains(t)
        or t.given("eval_dataset")
        or any(k.startswith("test_datasets") for k in t.source)
    ):
        t.harmless(key, "other data are evaluated on")
    elif share > 0.5:
        t.lose(key, "--held-out is a share of at most a half, not a number of examples")
    else:
        t.put(key, "--held-out", share)


def template(t: Translation) -> None:
    key = "template" if "template" in t.source else "chat_template"
    name = t.get(key)
    file = t.get("chat_template_jinja")
    if file:
        t.put("chat_template_jinja chat_template", "--chat-template", file)
    elif name == "alpaca":
        t.put(key, "--prompt-format", "alpaca")
    elif name in ("empty", "default", "vanilla"):
        t.lose(key, "--prompt-format has chat, alpaca and plain; --chat-template FILE any other")
    elif name is not None and not pretrains(t):
        t.put(f"the template of {name}", "--prompt-format", "chat")
        if str(name).startswith("tokenizer_default"):
            t.harmless(key, "the template of the tokenizer")
        t.lose(
            key,
            "--prompt-format chat is the template of the tokenizer: compare it with "
            f"{t.trainer}'s {name}, or give --chat-template FILE",
        )
    t.harmless(
        "template chat_template chat_template_jinja default_system_message",
        "documents of text have none",
    )


def loss(t: Translation) -> None:
    if t.get("train_on_prompt"):
        t.put("train_on_prompt", "--loss-on", "everything")
    elif t.get("mask_history"):
        t.put("mask_history", "--loss-on", "last")
    t.harmless("train_on_prompt mask_history", "all answers count")


def packing(t: Translation) -> None:
    keys = "packing neat_packing sample_packing pretraining_sample_concatenation"
    if any(t.get(key) for key in keys.split()) and not pretrains(t):
        t.put([k for k in t.given(keys) if t.source[k]], "--packing")
    t.harmless(keys, "it is off, or documents fill samples anyway")


RULES = rules_of(__name__)
