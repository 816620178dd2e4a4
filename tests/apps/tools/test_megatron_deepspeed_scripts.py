"""Megatron-DeepSpeed's scripts: each prints a command of its full size, which resolves there."""

import json
import os
import re
import shlex
import subprocess

import pytest
from example_scripts import FOLDER, ROOT, printed, resolved, script
from script_runs import MARK, PAGE, follows, rows, steps

from megatron.config import FLAG_CLASSES, FlagParser
from megatron.features.experts.flags import ExpertsConfig

ROWS = {row.path: row for row in rows()}
TRAINED = [
    path
    for path, row in ROWS.items()
    if row.kind == "train" and "MEGATRON_PARAMS" not in row.settings
]
SAMPLE = {
    "MoE/ds_pretrain_gpt_125M_MoE64.sh",
    *("MoE/ds_pretrain_gpt_1.3B_dense_cl.sh", "compression/ds_pretrain_gpt_125M_dense_kd.sh"),
    *("curriculum_learning/ds_train.sh", "rebase/ds_pretrain_gpt_1.3B_rope_slw.sh"),
    *("bert_with_pile/ds_pretrain_bert.sh", "azure/run-1t.sh", "megatron/pretrain_ict.sh"),
    *(
        "megatron/sc21/run_table_1.sh",
        "data_efficiency/gpt/pretrain/ds_pretrain_gpt_1.3B_dense_run.sh",
    ),
}


def sampled(paths, *more):
    kept = {*SAMPLE, *more}
    return [p if p in kept else pytest.param(p, marks=pytest.mark.proof) for p in paths]


@pytest.fixture
def printed_row(tmp_path):
    """Prints the command of a row; a JSON that it fills is in a folder of the test."""

    def command(path, *flags, **settings):
        place = "checkpoints" if path.startswith("megatron/") else ""
        folders = {"OUTPUT_BASEPATH": str(tmp_path), "CHECKPOINT_PATH": place}
        words = [*ROWS[path].words.split(), *flags]
        return printed(FOLDER / path, *words, **folders | settings)

    return command


@pytest.mark.parametrize("path", sampled(TRAINED))
def test_full_size_command_resolves(path, printed_row):
    launcher, flags = printed_row(path)
    if launcher[0] == "deepspeed":
        nodes = re.search(r"--num_nodes (\d+)", " ".join(launcher))
        per_node = int(launcher[launcher.index("--num_gpus") + 1])
        assert ROWS[path].processes == per_node * int(nodes[1] if nodes else 1)
    families = {"bert": "bert", "t5": "t5", "ict": "biencoder"}
    family = next((families[name] for name in families if f"pretrain_{name}" in path), "gpt")
    config = resolved(flags, ROWS[path].processes, family)
    assert config.training.global_batch_size % config.parallel.data_parallel_size == 0


def test_values_of_the_full_size(printed_row):
    """Numbers of Megatron-DeepSpeed's own scripts, in the command and in its JSON."""
    _, flags = printed_row("MoE/ds_pretrain_gpt_1.3B_dense.sh")
    values = FlagParser(*FLAG_CLASSES).settings(flags)
    expected = {
        "num_layers": 24, "hidden_size": 2048, "num_attention_heads": 16, "seq_length": 2048,
        "global_batch_size": 512, "micro_batch_size": 2, "tensor_model_parallel_size": 4,
        "lr": 2e-4, "min_lr": 2e-5, "rampup_batch_size": (32, 32, 1953125), "split": "98,2,0",
        "train_tokens": 300 * 10**9, "train_samples": 300 * 10**9 * 3 // 2048,
        "lr_decay_tokens": 260 * 10**9, "lr_warmup_tokens": 375 * 10**6, "zero_stage": 0,
    }  # fmt: skip
    assert {name: values[name].value for name in expected} == expected


PYRAMIDS = {
    "350M_PR-MoE32or64": (32, (0, 32) * 10 + (0, 64) * 2, 3e-4, 0),
    "1.3B_PR-MoE64or128": (64, (0, 64) * 10 + (0, 128) * 2, 1.2e-4, 2),
    "350M_PR-MoE32or64_MoS": (32, (0, 32) * 8 + (0, 64) * 2 + (0,), 3e-4, 0),
    "1.3B_PR-MoE64or128_MoS": (64, (0, 64) * 8 + (0, 128) * 2 + (0,), 1.2e-4, 2),
}


@pytest.mark.parametrize("name", sampled(PYRAMIDS, "350M_PR-MoE32or64_MoS"))
def test_experts_of_the_full_size(name, printed_row):
    """Numbers of Megatron-DeepSpeed's own scripts, but for the ranks that share experts."""
    path = f"MoE/ds_pretrain_gpt_{name}.sh"
    ranks, layers, rate, stage = PYRAMIDS[name]
    _, flags = printed_row(path)
    config = resolved(flags, ROWS[path].processes)
    experts = config.model.part(ExpertsConfig)
    assert config.parallel.expert_model_parallel_size == ranks
    assert experts.layer_experts == layers and experts.mlp_type == "residual"
    assert (experts.moe_gate, experts.moe_router_topk) == ("deepspeed", 1)
    assert experts.moe_aux_loss_coeff == (0.01,)
    capacity = (experts.moe_expert_capacity_factor, experts.moe_eval_capacity_factor)
    assert (*capacity, experts.moe_min_capacity) == (1.0, 1.0, 4)
    values = FlagParser(*FLAG_CLASSES).settings(flags)
    assert (values["lr"].value, values["min_lr"].value) == (rate, 1e-6)
    assert config.engine.zero_stage == stage
    if name.endswith("MoS"):
        teacher = tuple(layers[1:-1:2])
        assert values["num_experts_teacher"].value == teacher[:1] * 2 + teacher
        assert values["num_layers_teacher"].value == 24


def test_curriculum_of_the_full_size(printed_row):
    _, flags = printed_row("rebase/ds_pretrain_gpt_1.3B_rope_slw.sh")
    values = FlagParser(*FLAG_CLASSES).settings(flags)
    file = json.loads((ROOT / values["deepspeed_config"].value).read_text())
    section = file["curriculum_learning"]
    assert (section["min_difficulty"], section["max_difficulty"]) == (64, 2048)
    assert section["schedule_config"]["total_curriculum_step"] == 953
    assert values["min_lr"].value == 1e-6 and values["zero_stage"].value == 1


@pytest.mark.parametrize("name", ["SEQ_LEN", "seq_len"])
def test_a_flag_comes_before_the_environment_and_that_before_the_script(name, printed_row):
    path = "MoE/ds_pretrain_gpt_125M_dense_cl.sh"
    for flags, length in (((), 64), (("--seq-length", "32"), 32), (("--seq-length=16",), 16)):
        _, words = printed_row(path, *flags, TRAIN_TOKENS="1000000", **{name: "64"})
        values = FlagParser(*FLAG_CLASSES).settings(words)
        json_file = json.loads((ROOT / values["deepspeed_config"].value).read_text())
        assert values["seq_length"].value == values["max_position_embeddings"].value == length
        assert values["train_samples"].value == 3 * 10**6 // length
        assert json_file["curriculum_learning"]["max_difficulty"] == length


def test_a_flag_replaces_those_that_say_the_same(printed_row):
    flags = ["--train-iters", "9", "--lr-warmup-fraction=0.1", "--bf16", "--lr-decay-iters", "9"]
    _, words = printed_row("rebase/ds_pretrain_gpt_1.3B.sh", *flags)
    assert not {"--train-samples", "--lr-warmup-tokens", "--fp16", "--lr-decay-tokens"} & {*words}
    assert "--train-tokens" in words


@pytest.mark.parametrize(
    ("path", "settings", "message"),
    [
        ("MoE/ds_pretrain_gpt_350M_dense.sh", {"DATA_BLEND": "no/pile"}, "no/pile.bin does not"),
        ("rebase/ds_pretrain_gpt_1.3B.sh", {"DATA_PATH": "1 {f}", "VOCAB_PATH": "v"}, "v does not"),
        ("rebase/ds_pretrain_gpt_1.3B.sh", {"MODEL_SIZE": "5"}, "MODEL_SIZE 5 is not one of"),
        ("rebase/ds_pretrain_gpt_13B.sh", {}, "64 are 8 nodes of 8: set HOSTFILE"),
        ("compression/ds_pretrain_gpt_125M_dense_kd.sh", {}, "set CHECKPOINT_PATH_TEACHER"),
        ("bert_with_pile/ds_finetune_bert_race.sh", {}, "set TRAIN_DATA"),
        ("MoE/ds_evalharness.sh", {}, "set CHECKPOINT_PATH"),
    ],
)
def test_what_is_missing_is_named(path, settings, message, tmp_path):
    (tmp_path / "a.bin").touch()
    empty = {"DRY_RUN": "", "DATA_PATH": "", "VOCAB_FILE": "", "OUTPUT_BASEPATH": str(tmp_path)}
    empty["CHECKPOINT_PATH"] = ""
    if "64 are" not in message:
        empty["NUM_GPUS"] = "2"
    own = {name: value.format(f=tmp_path / "a") for name, value in settings.items()}
    if path.startswith("bert"):
        own["VOCAB_FILE"] = str(tmp_path / "a.bin")
    done = script(FOLDER / path, **empty | own)
    assert done.returncode == 2 and message in done.stderr, done.stderr


def test_page_and_table_name_every_script():
    sourced = {
        str(path.relative_to(FOLDER))
        for path in FOLDER.rglob("*.sh")
        if path.name not in ("analyze.sh", "data_efficiency.sh")
        and re.search(r"^source .*megatron_deepspeed\.sh", path.read_text(), re.MULTILINE)
    }
    assert sourced <= set(ROWS)
    written = PAGE.read_text().split(MARK)[1]
    names = {path.rsplit("/", 1)[-1] for path in ROWS}
    assert names == set(re.findall(r"^\| `([^`]+)` \|", written, re.MULTILINE))


def test_relative_paths_are_those_of_the_caller(tmp_path):
    """From any folder, by any path of the project, with spaces in both."""
    here = tmp_path / "my folder"
    (here / "data").mkdir(parents=True)
    (tmp_path / "the project").symlink_to(ROOT)
    for name in ("text_document.bin", "vocab.json", "merges.txt"):
        (here / "data" / name).touch()
    settings = {
        "DATA_PATH": "data/text_document", "VOCAB_FILE": "data/vocab.json", "DRY_RUN": "1",
        "MERGE_FILE": "data/merges.txt", "OUTPUT_BASEPATH": "out",
    }  # fmt: skip
    for path in ("rebase/ds_pretrain_gpt_1.3B.sh", "megatron/sc21/run_figure_11.sh"):
        program = f"../the project/examples_deepspeed/{path}"
        environment = os.environ | settings | {
            "MEGATRON_DATA": settings["DATA_PATH"], "BPE_VOCAB_FILE": settings["VOCAB_FILE"],
            "BPE_MERGE_FILE": settings["MERGE_FILE"],
        }  # fmt: skip
        command = ["bash", program, "--titles-data-path", "data/vocab.json"]
        run = subprocess.run(
            command, cwd=here, env=environment, capture_output=True, text=True, check=True
        )
        words = shlex.split(run.stdout)
        at = words.index("--data-path")
        assert words[at + 1] == str(here / settings["DATA_PATH"]) and words[at + 2][:2] == "--"
        assert words[words.index("--merge-file") + 1] == str(here / settings["MERGE_FILE"])
        assert words[words.index("--titles-data-path") + 1] == str(here / "data/vocab.json")
        if "rebase" in path:
            assert words[words.index("--save") + 1].startswith(f"{here}/out/checkpoint/")


LOG = " iteration {0:8}/      10 | learning rate: 1.0E-03 | lm loss: {1:.6E} | grad norm: 1.5 |"


@pytest.mark.parametrize(
    ("first", "factor", "same"),
    [(6, 1.0, True), (6, 1 + 4e-4, True), (6, 1 + 7e-4, False), (6, float("nan"), False),
     (5, 1.0, False), (7, 1.0, False)],
)  # fmt: skip
def test_a_resumed_run_is_compared_with_one_in_one_piece(first, factor, same):
    whole = steps("\n".join(LOG.format(n, 10 - n / 4) for n in range(1, 11)))
    resumed = steps("\n".join(LOG.format(n, factor * (10 - n / 4)) for n in range(first, 11)))
    if same:
        assert follows(whole, resumed, 5e-4).startswith("steps 6 to 10 as without a stop")
    else:
        with pytest.raises(AssertionError):
            follows(whole, resumed, 5e-4)
