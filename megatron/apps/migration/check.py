"""Check of a translated command: its flags are parsed and its configuration is resolved by the code
of a real run, but without data, tokenizer and checkpoints."""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megatron.apps.finetune.settings import TuningConfig
from megatron.apps.migration.translation import Translation
from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, RunConfig, Setting, Settings
from megatron.run.run import run_of

_FAMILIES = {"pretrain_bert.py": "bert", "pretrain_t5.py": "t5", "pretrain_ict.py": "biencoder"}
_FILES = frozenset(
    """pretrained_checkpoint vocab_extra_ids load_tag use_checkpoint_args reference_checkpoint
    load_teacher bert_load vocab_file merge_file tokenizer_model tokenizer_model_type data_args_path
    retro_project_dir model data output eval_data held_out chat_template train_data valid_data
    test_data per_split_data_args_path kill_switch_file epochs""".split()
)
"""Flags whose files need not exist on this machine, and flags of ``finetune.py``."""
_STAND_IN = {
    **{"num_layers": 64, "hidden_size": 8192, "num_attention_heads": 64, "num_query_groups": 8},
    **{"ffn_hidden_size": 28672, "seq_length": 2048},
}
"""Placeholders for a model's sizes, because the checkpoint is not read."""


class _Parser(FlagParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


@dataclass(frozen=True)
class Checked:
    """Result of checking a command: its resolved configuration, the number of processes, notes for
    the user, and required flags that are missing."""

    config: RunConfig
    processes: int
    notes: tuple[str, ...]
    missing: tuple[str, ...]


REQUIRED = "num_layers hidden_size num_attention_heads seq_length micro_batch_size lr".split()


def resolved(t: Translation) -> Checked:
    """Resolve the translated command. Raises ConfigError, with the message that a run would show,
    if a run would refuse the command."""
    words = [word for each in t.words.values() for word in each]
    classes = (TuningConfig, *FLAG_CLASSES) if t.program == "finetune.py" else FLAG_CLASSES
    settings = _Parser(*classes, prog=t.program).settings(words)
    whole = {name: setting for name, setting in settings.items() if name not in _FILES}
    values = _in_place_of_files(t, settings)
    whole |= {name: Setting(value, "check") for name, value in values.items() if name not in whole}
    whole["tokenizer_type"] = Setting("NullTokenizer", "check")
    whole.setdefault("vocab_size", Setting(50257, "check"))
    processes = t.processes or fewest_processes(whole)
    with tempfile.TemporaryDirectory() as folder:
        whole |= {"load": Setting(folder, "flag --load")} if "load" in whole else {}
        if t.content:
            path = Path(folder) / "ds.json"
            path.write_text(json.dumps(t.content))
            whole["deepspeed_config"] = Setting(str(path), "flag --deepspeed_config")
        else:
            whole.pop("deepspeed_config", None)
        try:
            run = run_of(whole, processes)
        except ConfigError as error:
            raise ConfigError(str(error).replace(f"{folder}/", "")) from None
        notes = tuple(note.replace(f"{folder}/", "") for note in run.resolved.notes)
    given = (
        settings
        if "use_checkpoint_args" not in settings and t.program == "pretrain_gpt.py"
        else {*REQUIRED}
    )
    missing = tuple(f"--{name.replace('_', '-')}" for name in REQUIRED if name not in given)
    if (
        t.program != "finetune.py"
        and not {"epochs", "train_iters", "train_samples", "train_tokens"} & settings.keys()
    ):
        missing += ("--train-iters",)
    return Checked(run.config, processes, notes, missing)


def _in_place_of_files(t: Translation, settings: Settings) -> dict[str, Any]:
    """Return placeholders for values that a run would read from checkpoints and data, or that
    ``finetune.py`` would set."""
    values: dict[str, Any] = {"family": _FAMILIES.get(t.program, "gpt")}
    if {"model", "use_checkpoint_args"} & settings.keys() or t.program == "finetune_llama.py":
        values |= _STAND_IN
    elif t.program == "pretrain_gpt.py" and not settings.keys() >= {*REQUIRED}:
        values |= _STAND_IN | {"micro_batch_size": 1, "lr": 1e-4}
    if not {"train_iters", "train_samples", "train_tokens"} & settings.keys():
        values["train_samples" if "epochs" in settings else "train_iters"] = 10**6
    if t.program == "finetune.py":
        values |= {"sft": True} if "preference" not in settings else {}
        values |= {"data_path": ("examples.json",), "lr": 1e-5, "split": "95,5,0", "save": "out"}
    if "expert_model_parallel_size" in settings and "num_experts" not in settings:
        values["num_experts"] = (settings["expert_model_parallel_size"].value,)
    if "pretrained_checkpoint" in settings or "model" in settings:
        values["pretrained_checkpoint"] = None
    if t.program == "pretrain_ict.py":
        values["titles_data_path"] = "titles"
    return {name: value for name, value in values.items() if value is not None}


def fewest_processes(settings: Settings) -> int:
    """Return the minimum number of processes for the layout."""

    def value(name: str) -> int:
        return int(settings[name].value or 1) if name in settings else 1

    model = value("tensor_model_parallel_size") * value("pipeline_model_parallel_size")
    model *= max(value("context_parallel_size"), value("ds_sequence_parallel_size"))
    experts = value("expert_model_parallel_size") * value("expert_tensor_parallel_size")
    return math.lcm(model, experts * value("pipeline_model_parallel_size"))
