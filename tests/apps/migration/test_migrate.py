"""tools/migrate.py: configurations of eight trainers; no key is lost without a line about it."""

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments, get_scheduler

from megatron.apps.migration import megatron_scripts
from megatron.apps.migration.check import resolved
from megatron.apps.migration.command import TRAINERS, apply, markdown, migrate
from megatron.apps.migration.conversions import FUNCTIONS
from megatron.apps.migration.expressions import compiled
from megatron.apps.migration.reconcile import reconcile
from megatron.apps.migration.rules import expressions_in, flags_in, table
from megatron.apps.migration.shell import read_script
from megatron.apps.migration.translation import Translation, flag_kinds
from megatron.config import ConfigError
from megatron.training.plan import TrainingPlan

from .migration_cases import FILES, FOLDER, UNKNOWN, in_cases, lines, silent_losses, translated

ROOT = Path(__file__).parents[3]
EXPECTED = FOLDER.with_name("expected.txt")


def translation(trainer, program="pretrain_gpt.py", **source):
    """Keys, translated; two underscores are a point."""
    t = Translation(
        {key.replace("__", "."): value for key, value in source.items()}, trainer, program
    )
    apply(t)
    reconcile(t)
    return t


def test_there_are_thirty_cases_of_eight_trainers():
    assert len(FILES) >= 30
    assert {translated(name).translation.trainer for name in FILES} == set(TRAINERS.values())


@pytest.mark.parametrize("name", FILES)
def test_every_key_has_a_line_and_the_command_resolves(name):
    t = translated(name).translation
    assert set(t.source) <= set(t.outcomes)
    assert set(t.of_state("unknown")) <= UNKNOWN
    checked = resolved(t)
    assert checked.config.training.micro_batch_size
    if os.environ.get("MEGATRON_REWRITE_GOLDEN"):
        EXPECTED.write_text("".join(map(lines, FILES)))
    assert lines(name)[3:] in EXPECTED.read_text().split("== ")


SAMPLE = {
    *("megatron_2023_gpt.sh", "neox_125m.yml", "nanotron_smollm.yaml", "torchtitan_debug.toml"),
    *("trainer_clm.sh", "llama_factory_dpo.yaml", "axolotl_qlora_fsdp.yml", "mds_moe.sh"),
}


@pytest.mark.parametrize(
    "name", [n if n in SAMPLE else pytest.param(n, marks=pytest.mark.proof) for n in FILES]
)
def test_no_key_is_lost_silently(name):
    """A key that is translated changes what is printed when it changes."""
    with in_cases():
        assert silent_losses(name) == []


@pytest.mark.parametrize(
    "name, flag, key",
    [
        ("neox_pythia.yml", "--weight-decay", "weight_decay"),
        ("axolotl_lora.yml", "--lora-alpha", "lora_alpha"),
        ("megatron_2023_gpt.sh", "--min-lr", "min-lr"),
    ],
)
def test_a_planted_loss_is_seen(name, flag, key, monkeypatch):
    """A rule that says a key is translated, and adds no flag."""
    put, own = Translation.put, megatron_scripts._put_own

    def lossy(self, keys, name, *values, note=""):
        put(self, keys, name, *values, note=note)
        self.words.pop(flag, None)

    def lossy_own(t, key, value):
        own(t, key, value)
        t.words.pop(flag, None)

    monkeypatch.setattr(Translation, "put", lossy)
    monkeypatch.setattr(megatron_scripts, "_put_own", lossy_own)
    with in_cases():
        assert key in silent_losses(name)


@pytest.mark.parametrize("name", TRAINERS)
def test_tables_name_flags_that_exist(name):
    """And have actions, expressions and functions that exist."""
    read = table(name)
    for row in (*read.rows, *(row for block in read.blocks.values() for row in block)):
        known = {"flag", "=", "!", "json", "keep", "let", "program", "processes"}
        assert row.action in known | {f"@{function}" for function in FUNCTIONS} | set(read.blocks)
        assert set(flags_in(row)) <= set(flag_kinds()), row
        for text in expressions_in(row):
            compiled(text)
    markdown(name)


@pytest.mark.parametrize("name", ["transformers", "llama_factory"])
def test_every_training_argument_of_transformers_has_a_row(name):
    rows = table(name).rows
    missing = [
        field.name
        for field in dataclasses.fields(TrainingArguments)
        if field.init and not any(row.fits(field.name) for row in rows)
    ]
    assert missing == []


def rates(t, steps):
    """Learning rates of a translated run."""
    config = resolved(t).config
    plan = TrainingPlan(config)
    batch = config.training.global_batch_size
    return [plan.rates(k, k * batch)[0] for k in range(steps)]


SCHEDULES = [
    ("linear", 0, {}),
    ("linear", 10, {}),
    ("cosine", 7, {}),
    ("constant", 0, {}),
    ("constant_with_warmup", 5, {}),
    ("polynomial", 4, {"lr_end": 1e-5}),
    ("cosine_with_min_lr", 6, {"min_lr_rate": 0.1}),
    ("cosine_with_min_lr", 6, {"min_lr": 2e-5}),
    (
        "warmup_stable_decay",
        5,
        {"num_decay_steps": 12, "min_lr_ratio": 0.1, "decay_type": "linear"},
    ),
    ("warmup_stable_decay", 5, {"num_decay_steps": 12, "decay_type": "cosine"}),
    ("warmup_stable_decay", 5, {"num_decay_steps": 12, "decay_type": "1-sqrt"}),
    ("inverse_sqrt", 6, {"timescale": 20}),
]


@pytest.mark.parametrize("kind, warmup, kwargs", SCHEDULES)
def test_rates_against_transformers(kind, warmup, kwargs):
    steps, peak = 40, 3e-4
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
    schedule = get_scheduler(kind, optimizer, warmup, steps, dict(kwargs))
    expected = []
    for _ in range(steps):
        expected.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    t = translation(
        "transformers",
        model_type="gpt2",
        max_steps=steps,
        warmup_steps=warmup,
        learning_rate=peak,
        lr_scheduler_type=kind,
        **{f"lr_scheduler_kwargs__{name}": value for name, value in kwargs.items()},
    )
    assert rates(t, steps) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def torchtitan_rate(k, steps, warmup, falls, kind, least):
    """The factor of torchtitan 0.2 in step k (components/lr_scheduler.py), by its definition."""
    stable = steps + 1 - warmup - falls
    if k < warmup:
        return (k + 1) / warmup
    if k < warmup + stable:
        return 1.0
    done = (k + 1 - warmup - stable) / falls
    left = {
        "linear": 1 - done,
        "sqrt": 1 - math.sqrt(done),
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
    }
    return least + (1 - least) * left[kind]


@pytest.mark.parametrize("kind", ["linear", "sqrt", "cosine"])
@pytest.mark.parametrize("warmup, ratio", [(2, 0.8), (5, None), (1, 0.25)])
def test_rates_against_torchtitan(kind, warmup, ratio):
    steps, peak, least = 20, 8e-4, 0.1
    falls = round(steps * ratio) if ratio else steps - warmup
    source = {"lr_scheduler__decay_ratio": ratio} if ratio else {}
    t = translation(
        "torchtitan",
        training__steps=steps,
        optimizer__lr=peak,
        lr_scheduler__warmup_steps=warmup,
        lr_scheduler__decay_type=kind,
        lr_scheduler__min_lr_factor=least,
        **source,
    )
    expected = [peak * torchtitan_rate(k, steps, warmup, falls, kind, least) for k in range(steps)]
    assert rates(t, steps) == pytest.approx(expected, rel=1e-6)


def nanotron_rate(k, peak, least, warmup, start, falls, kind):
    """nanotron 0.4's rate of step k (helpers.py, lr_scheduler_builder), by its definition."""
    if k <= warmup:
        return peak * k / max(warmup, 1) if warmup else peak
    if k < start:
        return peak
    if k < start + falls:
        done = (k - start) / falls
        left = {
            "linear": 1 - done,
            "cosine": (1 + math.cos(math.pi * done)) / 2,
            "1-sqrt": 1 - math.sqrt(done),
        }
        return least + (peak - least) * left[kind]
    return least


@pytest.mark.parametrize(
    "kind, start", [("linear", None), ("cosine", None), ("1-sqrt", 15), ("linear", 12)]
)
def test_rates_against_nanotron(kind, start):
    scheduler = "optimizer__learning_rate_scheduler__"
    source = {
        f"{scheduler}learning_rate": 3e-4,
        f"{scheduler}min_decay_lr": 3e-5,
        f"{scheduler}lr_warmup_steps": 4,
        f"{scheduler}lr_warmup_style": "linear",
        f"{scheduler}lr_decay_style": kind,
        f"{scheduler}lr_decay_steps": 10,
        "tokens__train_steps": 30,
    }
    if start:
        source[f"{scheduler}lr_decay_starting_step"] = start
    t = translation("nanotron", **source)
    expected = [nanotron_rate(k, 3e-4, 3e-5, 4, start or 4, 10, kind) for k in range(30)]
    assert rates(t, 30) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "hidden, size, multiple, width",
    [
        (4096, 43008, 256, 14336),
        (4096, 33024, 256, 11008),
        (512, None, 1, 682),
        (512, None, 256, 768),
    ],
)
def test_width_of_gated_mlps_of_neox(hidden, size, multiple, width):
    """Llama 3 8B's 14,336 and Llama 2 7B's 11,008 channels, as GPT-NeoX writes them."""
    source = {"intermediate_size": size} if size else {}
    t = translation(
        "GPT-NeoX", hidden_size=hidden, activation="swiglu", mlp_multiple_of=multiple, **source
    )
    assert t.words["--ffn-hidden-size"][1] == str(width)


@pytest.mark.parametrize("fused, formula", [(True, "gelu_tanh"), (False, "gelu_erf")])
def test_gelu_of_neox(fused, formula):
    """Its fused kernel computes the formula with tanh (megatron/model/fused_bias_gelu.py there)."""
    t = translation("GPT-NeoX", hidden_size=64, num_attention_heads=8, bias_gelu_fusion=fused)
    assert resolved(t).config.model.mlp.activation == formula


def test_a_value_of_another_kind_is_named():
    with pytest.raises(ConfigError, match="pipe_parallel_size 'two': the value is not of the kind"):
        translation("GPT-NeoX", num_layers=2, hidden_size=64, pipe_parallel_size="two")


def test_steps_of_a_run_in_epochs_become_samples():
    source = {
        "model_name_or_path": "m",
        "output_dir": "o",
        "num_train_epochs": 2,
        "warmup_steps": 10,
    }
    source |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}
    t = Translation(source, "transformers", processes=2)
    apply(t)
    reconcile(t)
    assert t.words["--lr-warmup-samples"][1] == str(10 * 4 * 8 * 2)
    assert "--lr-warmup-iters" not in t.words


def test_two_values_of_one_setting_are_refused():
    with pytest.raises(
        ConfigError,
        match="lr and optimizer.params.lr contradict|optimizer.params.lr and lr contradict",
    ):
        translation("GPT-NeoX", num_layers=2, lr=1e-3, optimizer__params__lr=2e-3)


SCRIPTS = {
    "a program": (
        "torchrun pretrain_vlm.py --num-layers 2",
        "pretrain_vlm.py is not a training program",
    ),
    "nothing": ("echo hello", "no line of it starts a Python program"),
    "two": ("python pretrain_gpt.py --lr 1\npython pretrain_bert.py --lr 1", "lines 1 .*, 2 "),
    "json": (
        "cat <<E > d.json\n{'a': 1}\nE\ndeepspeed pretrain_gpt.py --deepspeed_config d.json",
        "d.json",
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_that_cannot_be_read_are_named(tmp_path, name):
    text, message = SCRIPTS[name]
    file = tmp_path / "run.sh"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        migrate([str(file)])


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.yml", "a: [1", "a.yml"),
        ("a.yml", "- 1", "expected keys with values"),
        ("a.yml", "learning: 1", "not recognised"),
        ("a.toml", "x = ", "a.toml"),
        ("a.json", '{"zero_optimization": {}}', "a DeepSpeed JSON alone"),
        ("a.yml", "base_model: m\nnum_epochs: [1]", "|".join(("num_epochs",))),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    if "num_epochs" in message:
        assert "num_epochs" in migrate([str(tmp_path / name)]).translation.of_state("lost")
        return
    with pytest.raises(ConfigError, match=message):
        migrate([str(tmp_path / name)])


def test_a_missing_file_and_one_that_is_no_text_are_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere.yml: No such file"):
        migrate([str(tmp_path / "nowhere.yml")])
    (tmp_path / "a.sh").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not text"):
        migrate([str(tmp_path / "a.sh")])


def words(text, **variables):
    return read_script(text, "run.sh", variables).words


def test_scripts_are_read_as_bash_expands_them(tmp_path):
    """Words that bash itself gives a program, for the forms that scripts have."""
    text = """
N=${GPUS:-4}
A="--num-layers $((N * 2 + 1)) \\
   --lr 1e-4"
B=(--save "a b" --load ${N}x)
B+=(--bf16)
if [ "$N" -gt 2 ] && [[ -n "$A" ]]; then
  C="--fp16"
elif [[ $N == 1 ]]; then
  C="--no"
else
  C="--other"
fi
D='$N literal'
NAME=python
$NAME pretrain_gpt.py $A "${B[@]}" $C --data-path "$D" --seed ${SEED-7} # --comment
"""
    shown = tmp_path / "pretrain_gpt.py"
    shown.write_text("import sys; print(repr(sys.argv[1:]))")
    script = tmp_path / "run.sh"
    script.write_text(text)
    for variables in ({}, {"GPUS": "1", "SEED": "3"}):
        env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **variables}
        bash = subprocess.run(
            ["bash", str(script)], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert repr(words(text, **variables)) == bash.stdout.strip(), bash.stderr


PAGES = {
    "megatron": "megatron-lm",
    "neox": "gpt-neox",
    "llama_factory": "llama-factory",
    **{name: name for name in ("nanotron", "torchtitan", "transformers", "axolotl")},
}


@pytest.mark.parametrize("name", TRAINERS)
def test_the_table_of_a_page_is_that_of_the_tool(name):
    page = ROOT / "docs" / "coming-from" / f"{PAGES[name]}.md"
    text = page.read_text()
    start = text.index("| there | here |")
    if os.environ.get("MEGATRON_REWRITE_GOLDEN"):
        page.write_text(text[:start] + markdown(name))
    assert page.read_text()[start:] == markdown(name), f"tools/migrate.py --table {name}"
