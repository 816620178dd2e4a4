"""Megatron-DeepSpeed's scripts: each prints a command of its full size, which resolves there."""

import json
import re
import subprocess

import pytest
from example_scripts import FOLDER, ROOT, SETTINGS, printed, resolved, script
from script_runs import MARK, PAGE, rows

from megatron.config import FLAG_CLASSES, FlagParser
from megatron.tasks.config import TaskConfig
from megatron.training.run import RunToolParser

ROWS = {row.path: row for row in rows()}
TRAINED = [path for path, row in ROWS.items() if row.kind == "train"]
WAITING = [path for path, row in ROWS.items() if row.kind == "waits"]
SAMPLE = {
    *("MoE/ds_pretrain_gpt_1.3B_dense_cl.sh", "compression/ds_pretrain_gpt_125M_dense_kd.sh"),
    *("curriculum_learning/ds_train.sh", "rebase/ds_pretrain_gpt_1.3B_rope_slw.sh"),
    *("bert_with_pile/ds_pretrain_bert.sh", "azure/run-1t.sh"),
}


def sampled(paths):
    return [p if p in SAMPLE else pytest.param(p, marks=pytest.mark.proof) for p in paths]


def printed_row(path, *flags, **settings):
    return printed(FOLDER / path, *ROWS[path].words.split(), *flags, **settings)


@pytest.mark.parametrize("path", sampled(TRAINED))
def test_full_size_command_resolves(path, tmp_path):
    launcher, flags = printed_row(path, OUTPUT_BASEPATH=str(tmp_path), CHECKPOINT_PATH="")
    if launcher[0] == "deepspeed":
        nodes = re.search(r"--num_nodes (\d+)", " ".join(launcher))
        per_node = int(launcher[launcher.index("--num_gpus") + 1])
        assert ROWS[path].processes == per_node * int(nodes[1] if nodes else 1)
    family = next((name for name in ("bert", "t5") if f"pretrain_{name}" in path), "gpt")
    config = resolved(flags, ROWS[path].processes, family)
    assert config.training.global_batch_size % config.parallel.data_parallel_size == 0
