"""Rules of axolotl's keys that are more than a name (``tables/axolotl.txt``)."""

from __future__ import annotations

from megatron.apps.migration import trainer
from megatron.apps.migration.rules import rules_of
from megatron.apps.migration.translation import Translation, number
from megatron.apps.migration.tuning import DATA_NOT_HERE, download, pretrains, set_targets

_COLUMNS = {
    "field_instruction": "--prompt-column",
    "field_input": "--context-column",
    "field_output": "--response-column",
    "field_messages": "--messages-column",
    "field_system": "--system-column",
    "field_prompt": "--prompt-column",
    "field_chosen": "--chosen-column",
    "field_rejected": "--rejected-column",
    "field_completion": "--response-column",
    "field_label": "--label-column",
}


def datasets(t: Translation) -> None:
    _entries(t, "datasets", "--data")


def targets(t: Translation) -> None:
    if t.get("adapter"):
        if t.get("lora_target_linear"):
            t.put("lora_target_linear", "--lora-targets", "all-linear")
            t.lose("lora_target_modules", "lora_target_linear has all linear layers")
        elif t.get("lora_target_modules"):
            value = t.get("lora_target_modules")
            if value == "all-linear" or isinstance(value, list) or value.isidentifier():
                set_targets(t, "lora_target_modules", value)
            else:
                t.lose("lora_target_modules", "--lora-targets has names, not a pattern")
    t.harmless("lora_target_modules lora_target_linear", "it is off")


def adapter(t: Translation) -> None:
    kind = t.get("adapter")
    if kind in ("lora", "qlora"):
        t.put("adapter", "--lora")
        if kind == "qlora":
            t.put("adapter", "--qlora")
    t.lose("adapter", f"there is no {kind}: --lora, --use-dora, --qlora")


def bits(t: Translation) -> None:
    if t.get("load_in_4bit"):
        t.put("load_in_4bit", "--qlora")
    t.lose(
        "load_in_8bit", "frozen weights are in bf16, or by --qlora in 4 bits: more or less memory"
    )
    t.harmless("load_in_4bit", "it is off")


def orpo(t: Translation) -> None:
    if t.get("orpo_alpha") is not None and t.get("rl") == "orpo":
        t.put("orpo_alpha", "--preference-beta", t.get("orpo_alpha"))
    t.harmless("orpo_alpha", "only orpo reads it")


def test_datasets(t: Translation) -> None:
    _entries(t, "test_datasets", "--eval-data")


def pretraining(t: Translation) -> None:
    keys = [key for key in t.source if key.startswith("pretraining_dataset") and t.source[key]]
    t.program = "pretrain_gpt.py" if keys else "finetune.py"
    if not keys:
        return
    path = t.get(
        "pretraining_dataset.0.path",
        t.get("pretraining_dataset.path", t.get("pretraining_dataset")),
    )
    used = [k for k in keys if k.endswith("path") or k == "pretraining_dataset"]
    t.put(used, "--data-path", path, note=download(path, DATA_NOT_HERE))
    t.put(used, "--lazy-loader")
    for key in keys:
        if key.endswith("text_column"):
            t.put(key, "--text-key", t.source[key])
        elif key.endswith((".name", ".split", ".data_files", ".skip")) and t.source[key] not in (
            "train",
            None,
        ):
            t.lose(key, "name the files in --data-path")
    t.harmless(keys, "documents of text are packed in the order of Megatron")


def _entries(t: Translation, name: str, flag: str) -> None:
    """axolotl's list of data sets, with how their prompts look and where their columns are."""
    keys = [key for key in t.source if key.startswith(f"{name}.")]
    numbers = sorted({int(key.split(".")[1]) for key in keys if key.split(".")[1].isdigit()})
    paths = []
    for index in numbers:
        prefix = f"{name}.{index}."
        files = t.get(f"{prefix}data_files")
        path = t.get(f"{prefix}path")
        if files is not None and path in ("json", "csv", "parquet", "text"):
            path = None
        paths += [path] if files is None else files if isinstance(files, list) else [files]
        if files is not None and path is not None:
            paths[-1] = f"{path}/{paths[-1]}"
    for index in numbers:
        prefix = f"{name}.{index}."
        t.put(
            [k for k in keys if k.startswith(prefix) and k.endswith((".path", ".data_files"))],
            flag,
            *paths,
            note=download(paths[0], DATA_NOT_HERE),
        )
        _format(t, prefix)
        for column, column_flag in _COLUMNS.items():
            for key in (f"{prefix}{column}", f"{prefix}type.{column}"):
                if key in t.source and t.source[key] is not None:
                    t.put(key, column_flag, t.source[key])
        t.harmless(
            [
                f"{prefix}{word}"
                for word in ("ds_type", "trust_remote_code", "revision", "conversation")
            ],
            "files are local, and recognised",
        )
        if t.get(f"{prefix}split", "train") in ("train", "test", "validation"):
            t.harmless(f"{prefix}split", "splits are found by their names")
        for key in [
            k
            for k in keys
            if k.startswith(prefix)
            and k.endswith(("message_field_role", "message_field_content"))
            or f"{prefix}message_property_mappings" in k
        ]:
            t.harmless(key, "role and content, from and value are known")
        if t.get(f"{prefix}train_on_eos", "turn") in ("turn", "last"):
            t.harmless(f"{prefix}train_on_eos", "the token that ends an answer counts")
        if t.get(f"{prefix}roles_to_train", ["assistant"]) in (
            ["assistant"],
            ["gpt", "assistant"],
            ["gpt"],
        ):
            t.harmless(f"{prefix}roles_to_train", "answers count")
        rest = [k for k in keys if k.startswith(prefix) and k not in t.outcomes]
        t.lose(
            rest,
            "examples are read as they are: change the file, or name its columns "
            "(--ignore-columns)",
        )


def _format(t: Translation, prefix: str) -> None:
    key, kind = f"{prefix}type", t.get(f"{prefix}type")
    if kind is None:
        return
    text = str(kind).partition(".")[0].partition(":")[0]
    if text == "alpaca":
        t.put(key, "--prompt-format", "alpaca")
    elif text in ("chat_template", "sharegpt"):
        t.put(key, "--prompt-format", "chat")
    elif text == "completion":
        t.put(key, "--prompt-format", "plain")
        t.tell(
            key,
            "--loss-on everything"
            if t.words.setdefault("--loss-on", ("--loss-on", "everything"))
            else "",
        )
    elif t.get("rl"):
        t.harmless(key, "prompt, chosen and rejected are recognised, or their columns named")
    else:
        t.lose(
            key,
            f"there is no format {text}: --prompt-format has chat, alpaca and plain, "
            "--chat-template any other",
        )
    t.harmless([f"{prefix}chat_template"], "the tokenizer's, or --chat-template FILE")


def accumulation(t: Translation) -> None:
    """axolotl's ``batch_size`` is that of a process: micro batches times accumulation."""
    steps, whole = t.get("gradient_accumulation_steps"), t.get("batch_size")
    if whole is not None and steps is None:
        steps = max(1, int(whole) // int(t.get("micro_batch_size", 1)))
    t.put("gradient_accumulation_steps batch_size", "--num-accumulation-steps", steps or 1)
    t.harmless("batch_size", "gradient_accumulation_steps says it")


def length(t: Translation) -> None:
    renamed = Translation(
        {("num_train_epochs" if k == "num_epochs" else k): v for k, v in t.source.items()},
        t.trainer,
        t.program,
    )
    renamed.source = {"num_train_epochs": 1, **renamed.source}
    trainer.length(renamed)
    for flag, words in renamed.words.items():
        t.put("max_steps" if flag == "--train-iters" else "num_epochs", flag, *words[1:])
    if "--epochs" not in renamed.words:
        t.lose(
            "num_epochs", renamed.outcomes["num_train_epochs"].text
        ) if "--train-iters" not in renamed.words else None
    t.harmless("num_epochs max_steps", "the other says the length")


def schedule(t: Translation) -> None:
    """axolotl's schedule: cosine by default, with a share of the peak as its end."""
    names = {"lr_scheduler": "lr_scheduler_type"}
    source = {names.get(key, key): value for key, value in t.source.items()}
    source.setdefault("lr_scheduler_type", "cosine")
    ratio, rest = (
        source.pop("cosine_min_lr_ratio", None),
        source.pop("cosine_constant_lr_ratio", None),
    )
    if ratio is not None:
        source |= {
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs.min_lr_rate": ratio,
        }
    inner = Translation(source, t.trainer, t.program)
    trainer.schedule(inner)
    back = {
        "lr_scheduler_type": "lr_scheduler",
        "lr_scheduler_kwargs.min_lr_rate": "cosine_min_lr_ratio",
    }
    for flag, words in inner.words.items():
        origin = inner.origins[flag].split()[-1]
        if rest is None or flag not in ("--min-lr",):
            t.put(back.get(origin, origin), flag, *words[1:])
    for key, outcome in inner.outcomes.items():
        if outcome.state != "translated" and back.get(key, key) in t.source:
            t.outcomes.setdefault(back.get(key, key), outcome)
    t.lose(
        "cosine_constant_lr_ratio",
        "the cosine falls until the last step; --lr-decay-iters ends it earlier",
    )
    if ratio is not None and rest is None:
        t.harmless("cosine_min_lr_ratio", "it is 0")


def precision(t: Translation) -> None:
    for key, flag in (
        ("bf16", "--bf16"),
        ("bfloat16", "--bf16"),
        ("fp16", "--fp16"),
        ("float16", "--fp16"),
    ):
        if t.get(
            key, "auto" if key == "bf16" and not t.get("fp16") and not t.get("float32") else None
        ) in (True, "auto", "full"):
            if flag == "--fp16" and t.has("--bf16"):
                continue
            t.put(key, flag)
    t.harmless("bf16 bfloat16 fp16 float16 float32", "it is off, or another dtype is named")


def saving(t: Translation) -> None:
    if t.get("saves_per_epoch") is not None:
        if int(t.get("saves_per_epoch")) == 1 and not pretrains(t):
            t.harmless("saves_per_epoch", "finetune.py saves after every epoch")
        t.lose(
            "saves_per_epoch",
            "--save-interval is in iterations; finetune.py saves after every epoch",
        )
        t.harmless("save_strategy save_steps", "saves_per_epoch says it")
    elif number(t.get("save_steps")) or t.get("save_strategy"):
        trainer.saving(t)
    t.harmless("saves_per_epoch save_strategy save_steps", "it is not set")


def evaluation(t: Translation) -> None:
    if t.get("evals_per_epoch") is not None:
        t.lose(
            "evals_per_epoch",
            "--eval-interval is in iterations; finetune.py evaluates ten times in a run",
        )
        t.harmless("eval_strategy evaluation_strategy eval_steps", "evals_per_epoch says it")
    elif number(t.get("eval_steps")):
        trainer.evaluation(Translation({}, "", t.program))
        t.put("eval_steps", "--eval-interval", t.get("eval_steps"))
    elif pretrains(t):
        t.put("eval_steps", "--eval-iters", 0)
    t.harmless(
        "evals_per_epoch eval_strategy evaluation_strategy eval_steps",
        "finetune.py evaluates ten times in a run",
    )


def plugins(t: Translation) -> None:
    names = t.get("plugins", [])
    known = [
        name for name in names if "liger" in name.lower() or "cut_cross_entropy" in name.lower()
    ]
    if len(known) == len(names):
        t.harmless(
            "plugins", "the loss is computed in chunks, and --torch-compile fuses the layers"
        )
    t.lose(
        "plugins",
        f"{', '.join(sorted(set(names) - set(known)))}: there are no plugins; a feature is a "
        "folder of megatron/features",
    )


def special(t: Translation) -> None:
    keys = [key for key in t.source if key.startswith(("special_tokens", "eot_tokens"))]
    t.harmless(
        [k for k in keys if k.endswith("pad_token")],
        "padding is never attended to, and has no loss",
    )
    t.lose(
        keys,
        "set it in the tokenizer's folder (tokenizer_config.json), which is exported with the "
        "model",
    )


def resume(t: Translation) -> None:
    keys = "resume_from_checkpoint auto_resume_from_checkpoints"
    if isinstance(t.get("resume_from_checkpoint"), str) and pretrains(t):
        trainer.resume(t)
    t.harmless(keys, "the same command continues from the newest checkpoint of its folder")


RULES = rules_of(__name__)
