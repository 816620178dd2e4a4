"""examples_deepspeed/: the scripts under other projects' names train, and universal checkpoints go
from layout to layout as in Megatron-DeepSpeed's example."""

import csv
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.image import imread

from megatron.tokenizer.gpt2_bpe import CHARACTER_OF_BYTE

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples_deepspeed"
BIN = Path(sys.executable).parent
TINY = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --log-interval 1"
)
THREE = (
    f"{TINY} --micro-batch-size 1 --global-batch-size 4 --train-iters 3 --initial-loss-scale 1024"
)
SAMPLES = (
    f"{TINY} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--global-batch-size 8 --rampup-batch-size 4 4 8 --train-samples 24 --lr-decay-samples 20 "
    "--lr-warmup-samples 4 --initial-loss-scale 1024"
)
TWENTY = (
    f"{TINY} --save-interval 10 --exit-interval 20 --train-iters 40 --eval-interval 5 "
    "--eval-iters 2 --lr 1e-3 --min-lr 1e-4"
)
"""In the place of 200 steps with a checkpoint at step 100."""

pytestmark = pytest.mark.proof


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Settings of the scripts that name a small corpus and its vocabulary."""
    folder = tmp_path_factory.mktemp("corpus")
    rows = [json.dumps({"text": f"{number} one two three four five " * 40}) for number in range(80)]
    (folder / "text.jsonl").write_text("\n".join(rows) + "\n")
    names = [*CHARACTER_OF_BYTE, "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    vocabulary = {"VOCAB_FILE": f"{folder}/vocab.json", "MERGE_FILE": f"{folder}/merges.txt"}
    run(
        *("python", "tools/preprocess_data.py", "--input", f"{folder}/text.jsonl", "--append-eod"),
        *("--output-prefix", f"{folder}/my-gpt2", "--tokenizer-type", "GPT2BPETokenizer"),
        *("--vocab-file", vocabulary["VOCAB_FILE"], "--merge-file", vocabulary["MERGE_FILE"]),
        *("--workers", "1"),
    )
    return {"DATA_PATH": f"{folder}/my-gpt2_text_document", **vocabulary}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def run(*command, cwd=ROOT, **settings):
    apart = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    kept = {name: value for name, value in os.environ.items() if name not in apart}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=kept | {"PATH": f"{BIN}:{os.environ['PATH']}", "MASTER_PORT": free_port()} | settings,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(folder):
    rows = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if row["kind"] == "train"]


@pytest.mark.parametrize(
    "name, processes, flags",
    [
        ("pretrain_gpt.sh", 1, THREE),
        ("pretrain_gpt_distributed.sh", 2, THREE),
        ("pretrain_gpt_distributed_with_mp.sh", 4, THREE),
        ("pretrain_gpt3_175B.sh", 4, SAMPLES),
        ("pretrain_117M.sh", 1, THREE),
        ("pretrain_345M.sh", 1, THREE),
        ("pretrain_1n8d_2x4x1_16_1536x16.sh", 4, THREE),
    ],
)
def test_scripts_train(name, processes, flags, corpus, tmp_path):
    places = {"RUNS": str(tmp_path / "runs"), "CHECKPOINT_PATH": str(tmp_path / "runs" / "one")}
    output = run("bash", FOLDER / name, *flags.split(), GPUS=str(processes), **corpus, **places)
    assert f"layout: {processes} process" in output and "fp16 on cpu" in output
    (folder,) = (tmp_path / "runs").iterdir()
    assert len(losses(folder)) == (4 if "175B" in name else 3)
    assert (folder / "latest").is_file()


@pytest.fixture(scope="module")
def saved(corpus, tmp_path_factory):
    """Runs of 2 tensor-parallel ranks and a pipeline of 2 stages, one in each precision, with the
    universal checkpoint of the step in the middle."""
    folder = tmp_path_factory.mktemp("universal")
    for precision in ("bf16", "fp16"):
        script = FOLDER / "universal_checkpointing" / f"run_{precision}.sh"
        places = {"RUNS": str(folder), "LAUNCHER": "torchrun", "DP": "1"}
        run("bash", script, *TWENTY.split(), **corpus, **places)
        checkpoints = folder / f"z1_uni_ckpt/checkpoints/gpt2/z1/{precision}/tp2_pp2_dp1_sp1_toy"
        run(
            *("python", "-m", "deepspeed.checkpoint.ds_to_universal"),
            *("--input_folder", checkpoints / "global_step10"),
            *("--output_folder", checkpoints / "global_step10_universal"),
        )
        assert (checkpoints / "latest").read_text() == "global_step20"
        assert (checkpoints / "latest_universal").read_text() == "global_step10_universal"
    return folder


@pytest.mark.parametrize("precision, layout", [("bf16", "211"), ("bf16", "112"), ("fp16", "122")])
def test_universal_checkpoints_continue_at_another_layout(
    precision, layout, saved, corpus, tmp_path
):
    tensor, pipeline, data = layout
    script = FOLDER / "universal_checkpointing" / f"run_universal_{precision}.sh"
    places = {"RUNS": str(saved), "LAUNCHER": "torchrun", "LOAD_DP": "1"}
    output = run(
        *("bash", script, *TWENTY.split()),
        **(corpus | places | {"TP": tensor, "PP": pipeline, "DP": data}),
    )
    assert "global_step10_universal at iteration 10" in output
    runs = saved / "z1_uni_ckpt" / "tensorboard" / precision
    analysis = FOLDER / "universal_checkpointing" / "run_tb_analysis.sh"
    run("bash", analysis, runs, cwd=tmp_path)
    name = f"tp{tensor}_pp{pipeline}_dp{data}_sp1"
    for kind, first in (("", 11), ("val_", 15)):
        before = table(tmp_path / f"{kind}uc_out_tp2_pp2_dp1_sp1.csv")
        after = table(tmp_path / f"{kind}uc_out_{name}.csv")
        assert list(after) == [step for step in before if step >= first]
        rounding = 2e-3 if precision == "fp16" else 4e-3
        assert list(after.values()) == pytest.approx([before[step] for step in after], rel=rounding)
        fell = before[1 if kind == "" else 5] - before[20]
        assert fell > 20 * abs(after[first] - before[first]), "the losses say nothing"
    for picture in ("uc_char_training_loss.png", "uc_char_validation_loss.png"):
        assert imread(tmp_path / picture)[..., :3].std() > 0.05


def table(path):
    with path.open(newline="") as file:
        return {int(row["step"]): float(row["value"]) for row in csv.DictReader(file)}
