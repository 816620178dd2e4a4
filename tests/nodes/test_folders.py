"""Folders of runs on two nodes: one that not every node sees is named before training; indices are
built once where nodes share the cache, and once for each node where it is the node's own."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from launched_runs import ROOT, environment, free_port

from .namespaces import missing, nodes

pytestmark = [pytest.mark.proof, pytest.mark.skipif(bool(missing()), reason=missing())]
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1e-3 "
    "--micro-batch-size 1 --global-batch-size 4 --tokenizer-type NullTokenizer --vocab-size 99 "
    "--train-iters 2 --num-workers 0 --eval-iters 0 --log-interval 1 --split 1,0,0"
).split()


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """Two nodes; ``own`` is a folder of which each has its own, ``shared`` one that both see."""
    folder = tmp_path_factory.mktemp("folders")
    for name in ("own", "shared", "nodes"):
        (folder / name).mkdir()
    with nodes(2, folder / "nodes", private=[folder / "own"]) as both:
        yield folder, both


def corpus(folder):
    """Writes a small indexed file; the prefix of its name."""
    text = folder / "numbers.jsonl"
    lines = (json.dumps({"text": " ".join(str(n * k % 90) for n in range(40))}) for k in range(20))
    text.write_text("\n".join(lines))
    words = ["--input", text, "--output-prefix", folder / "numbers", "--append-eod"]
    words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "99"]
    subprocess.run(
        ["python", "tools/preprocess_data.py", *words],
        cwd=ROOT, env=environment(), check=True, capture_output=True,
    )  # fmt: skip
    return folder / "numbers_text_document"


COUNTING = """
import sys
import megatron.data.index_cache as cache
import pretrain_gpt

publish = cache._Entry.publish

def counted(entry, built):
    with open(entry.folder.parent.parent / "built", "a") as list:
        list.write(entry.folder.name + "\\n")
    return publish(entry, built)

cache._Entry.publish = counted
pretrain_gpt.main()
"""
"""The trainer; next to a cache it writes a list of the entries that processes have built."""


def train(both, *flags, processes=1, program="pretrain_gpt.py"):
    """What each node printed, and their exit statuses."""
    start = ["torchrun", "--nproc-per-node", processes, "--nnodes", len(both)]
    start += ["--master-addr", "node-1", "--master-port", free_port()]
    variables = {**environment(), "OMP_NUM_THREADS": "1"}
    running = [
        machine.start(
            *start, "--node-rank", rank, program, *MODEL, *flags,
            cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank, machine in enumerate(both)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=240)[0] for process in running]
    return outputs, [process.returncode for process in running]


def test_indices_are_built_once_for_each_cache(machines):
    """An entry of a shared cache is built by one process of one node, of nodes with caches of their
    own by one on each. Both train alike, and leave no probes. The log and the record of the run
    say which node has which ranks."""
    folder, both = machines
    data, program = corpus(folder / "shared"), folder / "counting.py"
    program.write_text(COUNTING)
    losses = {}
    for name in ("shared", "own"):
        save, cache = folder / "shared" / f"save-{name}", folder / name / "cache"
        flags = ["--data-path", data, "--data-cache-path", cache, "--save", save]
        outputs, statuses = train(both, *flags, processes=2, program=program)
        assert statuses == [0, 0], outputs
        rows = map(json.loads, (save / "metrics.jsonl").read_text().splitlines())
        losses[name] = [row["loss"] for row in rows if row["kind"] == "train"]
        for machine in both:
            built = machine.run("cat", folder / name / "built").stdout.split()
            assert built and len(built) == len(set(built)), built
            listed = machine.run("ls", cache).stdout.split()
            assert sorted(built) == sorted(n for n in listed if not n.endswith(".lock"))
        assert not list(save.glob(".probe*"))
        assert "node-1 has ranks 0 to 1: 2 x " in outputs[0]
        assert "node-2 has ranks 2 to 3: 2 x " in outputs[0] and "node-2 has" not in outputs[1]
        record = json.loads((save / "run" / "001" / "record.json").read_text())
        hosts = {host["host"]: host["ranks"] for host in record["hosts"]}
        assert hosts == {"node-1": [0, 1], "node-2": [2, 3]}
        assert [file["path"] for file in record["data"]] == [str(data)]
        assert record["launcher"] is None  # no one command starts both machines
        assert program.name in record["command"][1]
    assert losses["own"] == losses["shared"] and len(losses["own"]) == 2


@pytest.mark.parametrize("flag", ["--save", "--load", "--data-path", "--data-cache-path"])
def test_a_folder_that_one_node_does_not_see_is_named(machines, flag):
    """Flag, folder and node, on both nodes, before a step is taken."""
    folder, both = machines
    data = corpus(folder / "shared")
    own, save = folder / "own" / f"for{flag}", folder / "shared" / f"save{flag}"
    both[0].run("mkdir", own).check_returncode()
    flags = ["--data-path", data, "--save", save]
    if flag == "--save":
        flags = ["--data-path", data, "--save", own]
    elif flag == "--load":
        outputs, statuses = train(both[:1], *flags, "--save", own)
        assert statuses == [0], outputs
        flags += ["--load", own]
    elif flag == "--data-path":
        both[0].run("cp", f"{data}.bin", f"{data}.idx", own).check_returncode()
        flags = ["--data-path", own / data.name, "--save", save]
    else:
        both[1].run("touch", own).check_returncode()
        flags += ["--data-cache-path", own / "cache"]
    outputs, statuses = train(both, *flags)
    assert all(statuses), outputs
    assert "lm loss" not in outputs[0]
    for said in outputs:
        lines = [line for line in said.splitlines() if "error: " in line and flag in line]
        assert lines and all(str(own) in line and "node-2" in line for line in lines), outputs


SFTP = "/usr/lib/openssh/sftp-server"


@pytest.mark.skipif(
    not (shutil.which("sshfs") and Path(SFTP).exists() and Path("/dev/fuse").exists()),
    reason="sshfs, openssh-sftp-server or FUSE are not here",
)
def test_a_network_file_system_that_remembers_what_a_folder_had(machines):
    """One node has the folder and the other mounts it, and has listed it before: for twenty seconds
    it believes what it saw. Both train, save there and resume."""
    folder, both = machines
    data, own = corpus(folder / "shared"), folder / "own"
    save = own / "remembered"
    both[0].run("mkdir", save).check_returncode()
    remembers = (
        ",".join(f"dcache_{what}timeout=20" for what in ("", "stat_", "dir_", "link_"))
        + f",entry_timeout=20,attr_timeout=20,negative_timeout=20,sftp_server={SFTP}"
    )
    both[1].run("sshfs", "-o", remembers, f"node-1:{own}", own).check_returncode()
    try:
        assert both[1].run("ls", own, save).returncode == 0
        for last in ("2", "4"):
            flags = ["--data-path", data, "--save", save, "--load", save, "--train-iters", last]
            outputs, statuses = train(both, *flags)
            assert statuses == [0, 0], outputs
        assert "at iteration 2" in outputs[0]
        assert not both[1].run("sh", "-c", f"ls -a {save} | grep probe").stdout
    finally:
        both[1].run("fusermount", "-u", own)
