"""examples_deepspeed/slurm/pretrain.sbatch and srun on a slurm cluster of namespaces."""

import json
import re
import subprocess
import sys
import time

import numpy as np
import pytest
from launched_runs import ROOT, environment
from nodes.slurm import cluster, missing

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
from megatron.tokenizer.gpt2_bpe import CHARACTER_OF_BYTE

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "-")
SCRIPT = "examples_deepspeed/slurm/pretrain.sbatch"
FLAGS = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 "
    "--num-query-groups 2 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 "
    "--global-batch-size 12 --lr-warmup-iters 2 --log-interval 1 --save-interval 10 --eval-iters 0 "
    "--deepspeed_config deepspeed_configs/ds_zero1.json --num-workers 0 --peak-tflops 1"
).split()


@pytest.fixture(scope="module")
def slurm():
    with cluster(4) as made:
        yield made


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Settings of the scripts that name a small corpus and its vocabulary."""
    folder = tmp_path_factory.mktemp("corpus")
    generator = np.random.default_rng(0)
    with IndexedDatasetWriter(str(folder / "text"), "uint16") as writer:
        for _ in range(200):
            writer.add_document([generator.integers(0, 250, 100)])
    names = [*CHARACTER_OF_BYTE, "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return {
        "DATA_PATH": folder / "text",
        "VOCAB_FILE": folder / "vocab.json",
        "MERGE_FILE": folder / "merges.txt",
        "OMP_NUM_THREADS": "1",
    }


def submit(slurm, folder, flags, options=(), script="pretrain_llama_1b.sh", **settings):
    """Queues the script on nodes without GPUs; the job's number and the file of its output."""
    log = folder / "job-%j.log"
    options = ["--gpus-per-node", "0", "--output", log, *options]
    number = slurm.submit(
        *options, SCRIPT, script, *flags, **{**environment(), "RUNS": folder / "runs", **settings}
    )
    return number, folder / f"job-{number}.log"


def until(condition, log, patience=240):
    deadline = time.monotonic() + patience
    while not condition():
        text = log.read_text() if log.exists() else ""
        assert time.monotonic() < deadline, text[-3000:]
        time.sleep(0.1)


def losses(folder):
    """The loss of each iteration, in the order in which rows were written."""
    path = folder / "runs" / "llama-1b" / "metrics.jsonl"
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [(row["iteration"], row["loss"]) for row in rows if row["kind"] == "train"]


def reference(folder, corpus, steps):
    """The losses of a run that one process does, without interruption."""
    settings = {**environment(), **corpus, "RUNS": folder / "runs", "LAUNCHER": "python"}
    subprocess.run(
        ["bash", "examples_deepspeed/pretrain_llama_1b.sh", *FLAGS, "--train-iters", str(steps)],
        cwd=ROOT, env={name: str(value) for name, value in settings.items()},
        check=True, capture_output=True,
    )  # fmt: skip
    return losses(folder)


def assert_same_course(found, wanted):
    """Every step once and in order, with the losses of the reference but for rounding."""
    assert [step for step, _ in found] == [step for step, _ in wanted]
    np.testing.assert_allclose([x for _, x in found], [x for _, x in wanted], rtol=2e-4)


@pytest.mark.proof
def test_an_allocation_is_examined(slurm, tmp_path):
    doctor = [sys.executable, "tools/doctor.py", "--json", "--save", tmp_path / "save"]
    words = ["salloc", "--nodes", 4, *doctor, "--data-path", tmp_path / "text"]
    settings = {**environment(), "SLURM_CONF": slurm.folder / "slurm.conf"}
    settings = {name: str(value) for name, value in settings.items()}

    def findings():
        answer = json.loads(slurm.run(*words, env=settings, cwd=ROOT).stdout)
        assert answer["nodes"] == [f"node-{number}" for number in (1, 2, 3, 4)]
        assert len(answer["links"]) == 12
        return [(one["node"], one["check"], one["value"]) for one in answer["findings"]]

    files = [tmp_path / "text.bin", tmp_path / "text.idx"]
    for file in files:
        file.write_text("text")
    assert findings() == []
    files[0].unlink()
    assert findings() == [
        (f"node-{number}", f"data {files[0]}", "cannot be read") for number in (1, 2, 3, 4)
    ]


@pytest.mark.proof
def test_a_job_begins_once_its_nodes_are_examined(slurm, corpus, tmp_path):
    flags, nodes = [*FLAGS, "--train-iters", "3"], ["--nodes", "2"]
    number, log = submit(slurm, tmp_path, flags, nodes, **corpus, DOCTOR=1)
    assert slurm.end(number) == "COMPLETED", log.read_text()
    assert "doctor.py: 2 nodes: nothing is wrong" in log.read_text()
    assert [step for step, _ in losses(tmp_path)] == [1, 2, 3]
    missing = corpus | {"DATA_PATH": tmp_path / "other"}
    number, log = submit(slurm, tmp_path, flags, nodes, **missing, DOCTOR=1)
    assert slurm.end(number) == "FAILED" and slurm.job(number)["Restarts"] == "0"
    assert f"data {tmp_path}/other.bin: cannot be read" in log.read_text()
    assert "do not pass tools/doctor.py" in log.read_text()


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_each_process_gets_its_command(slurm, tmp_path, launcher):
    settings = {"DATA_PATH": "d", "TOKENIZER": "t", "DRY_RUN": 1, "GPUS": 2, "LAUNCHER": launcher}
    number, log = submit(slurm, tmp_path, ["--lr", "1"], ["--nodes", "2"], **settings)
    assert slurm.end(number) == "COMPLETED", log.read_text()
    # Slurm may mix the tasks' lines after 1024 characters.
    found = sorted(re.findall(r"((?:python|torchrun [^/]*?) pretrain_gpt\.py)", log.read_text()))
    if launcher == "srun":
        assert found == ["python pretrain_gpt.py"] * 4
    else:
        place = f"--master-addr node-1 --master-port {20000 + number} pretrain_gpt.py"
        assert found == [
            f"torchrun --nproc-per-node 2 --nnodes 2 --node-rank {rank} {place}" for rank in (0, 1)
        ]


def test_an_array_with_flags_of_a_file(slurm, tmp_path):
    (tmp_path / "sweep").write_text("--lr 1e-3\n--lr 2e-3 --seed 2\n")
    settings = {"DATA_PATH": "d", "TOKENIZER": "t", "DRY_RUN": 1, "SWEEP": tmp_path / "sweep"}
    options = ["--nodes", "1", "--array", "1-3", "--output", tmp_path / "array-%a.log"]
    number, _ = submit(slurm, tmp_path, [], options, **settings)
    ends = [slurm.end(f"{number}_{place}") for place in (1, 2, 3)]
    assert ends == ["COMPLETED", "COMPLETED", "FAILED"]
    texts = [(tmp_path / f"array-{place}.log").read_text() for place in (1, 2, 3)]
    for place, words in ((1, "--lr 1e-3 "), (2, "--lr 2e-3 --seed 2 ")):
        assert words in texts[place - 1]
        assert f"--save {tmp_path}/runs/{place}/llama-1b" in texts[place - 1]
    assert "has no line 3; see --array" in texts[2] and slurm.job(f"{number}_3")["Restarts"] == "0"


def test_in_a_container(slurm, tmp_path):
    """Pyxis itself is not here: its flags are taken out before slurm's own srun sees them."""
    (tmp_path / "srun").write_text(
        "#!/bin/bash\nwords=()\nwhile [[ $1 != bash ]]; do\n    if [[ $1 == --container-* ]]; "
        f'then echo "$1 $2" >>{tmp_path}/container; shift 2\n'
        '    else words+=("$1"); shift; fi\ndone\nexec /usr/bin/srun "${words[@]}" "$@"\n'
    )
    (tmp_path / "srun").chmod(0o755)
    settings = {"DATA_PATH": "d", "TOKENIZER": "t", "DRY_RUN": 1, "CONTAINER_IMAGE": "image.sqsh"}
    settings |= {"CONTAINER_MOUNTS": "/data:/data", "PATH": f"{tmp_path}:{environment()['PATH']}"}
    number, log = submit(slurm, tmp_path, [], ["--nodes", "2"], **settings)
    assert slurm.end(number) == "COMPLETED", log.read_text()
    assert log.read_text().count("python pretrain_gpt.py") == 2
    assert (tmp_path / "container").read_text().splitlines() == [
        *("--container-image image.sqsh", f"--container-workdir {ROOT}"),
        f"--container-mounts {ROOT}:{ROOT},/data:/data",
    ]


@pytest.mark.proof
def test_a_mistake_in_the_flags_ends_the_job(slurm, corpus, tmp_path):
    number, log = submit(slurm, tmp_path, ["--lr", "x"], ["--nodes", "2"], **corpus)
    assert slurm.end(number) == "FAILED"
    shown = slurm.job(number)
    assert (shown["ExitCode"], shown["Restarts"]) == ("2:0", "0"), log.read_text()
    assert "--lr" in log.read_text()


@pytest.mark.proof
def test_a_job_that_fails_again_and_again_ends(slurm, corpus, tmp_path):
    """Torchrun does not pass on the status of a mistake."""
    settings = {**corpus, "LAUNCHER": "torchrun", "MAX_REQUEUES": 1}
    number, log = submit(slurm, tmp_path, ["--lr", "x"], ["--nodes", "2"], **settings)
    assert slurm.end(number) == "FAILED", log.read_text()
    assert slurm.job(number)["Restarts"] == "1"
    said = log.read_text()
    assert said.count(": queued again (failure 1 of 1)") == 1
    assert said.count(": not queued again, failure 2 in a row (MAX_REQUEUES=1)") == 1
    assert not list((tmp_path / "runs").glob(".failures-*"))


@pytest.mark.proof
def test_requeued_by_its_signal_and_resumed_on_two_nodes(slurm, corpus, tmp_path):
    steps = 40
    flags = [*FLAGS, "--train-iters", str(steps)]
    number, log = submit(slurm, tmp_path, flags, ["--nodes", "4"], **corpus)
    for restarts in (0, 1):
        before = len(losses(tmp_path))
        until(lambda before=before: len(losses(tmp_path)) > before + 3, log)
        # As slurm does before the time limit, by --signal=B:USR1@600.
        slurm.output("scancel", "--batch", "--signal=USR1", number)
        until(lambda restarts=restarts: slurm.job(number)["Restarts"] > str(restarts), log)
    slurm.output("scancel", number)  # it is queued; another shape of job takes over
    text = log.read_text()
    assert text.count("the run saves and ends") == text.count("queued again, to continue") == 2
    assert 6 < len(losses(tmp_path)) < steps, "the job was over before its signal"
    layout = ["--tensor-model-parallel-size", "2"]
    options = ["--nodes", "2", "--exclude", "node-1"]
    second, log = submit(slurm, tmp_path, [*flags, *layout], options, **corpus)
    assert slurm.end(second) == "COMPLETED", log.read_text()
    assert slurm.job(second)["NodeList"] == "node-[2-3]"
    assert_same_course(losses(tmp_path), reference(tmp_path / "one", corpus, steps))


@pytest.mark.proof
@pytest.mark.parametrize(
    ("launcher", "signal", "end"),
    [("srun", [], "SIGTERM"), ("torchrun", ["--batch", "--signal=USR1"], "SIGUSR1")],
)
def test_a_run_that_is_asked_to_end_saves(slurm, corpus, tmp_path, launcher, signal, end):
    """By scancel, and by its signal where torchrun is between slurm and the run."""
    flags, options = [*FLAGS, "--train-iters", "100000"], ["--nodes", "2"]
    number, log = submit(slurm, tmp_path, flags, options, **corpus, LAUNCHER=launcher)
    until(lambda: len(losses(tmp_path)) > 3, log)
    slurm.output("scancel", *signal, number)
    until(lambda: f"stopped by {end}" in log.read_text(), log)
    until(lambda: not slurm.output("squeue", "--noheader", "--states", "R,CG"), log)
    shown = slurm.job(number)["JobState"]
    slurm.output("scancel", number)
    assert shown == ("CANCELLED" if end == "SIGTERM" else "PENDING"), log.read_text()
    newest = (tmp_path / "runs" / "llama-1b" / "latest").read_text()
    assert newest == f"global_step{losses(tmp_path)[-1][0]}"


@pytest.mark.proof
def test_a_node_is_lost(corpus, tmp_path):
    with cluster(3) as slurm:
        flags = [*FLAGS, "--train-iters", "100000"]
        number, log = submit(slurm, tmp_path, flags, ["--nodes", "2-3"], **corpus)
        until(lambda: len(losses(tmp_path)) > 25, log)
        slurm.nodes[2].die()
        began = time.monotonic()
        until(lambda: slurm.job(number)["Restarts"] != "0", log)
        requeued = time.monotonic() - began
        until(lambda: slurm.job(number)["JobState"] == "RUNNING", log)
        started = time.monotonic() - began
        lines = log.read_text().count(" iteration ")
        until(lambda: log.read_text().count(" iteration ") > lines, log)
        running = time.monotonic() - began
        shown = f"queued again after {requeued:.0f} s, started after {started:.0f} s, "
        print(f"{shown}the first step after {running:.0f} s")
        assert slurm.state("node-3").startswith("down")
        assert slurm.job(number)["NodeList"] == "node-[1-2]"
        slurm.output("scancel", number)
        found = losses(tmp_path)
    assert [step for step, _ in found] == list(range(1, len(found) + 1))


PLAIN = "python pretrain_gpt.py"
FORMS = {
    "srun": f"srun --nodes 2 --ntasks 2 {PLAIN} FLAGS",
    "srun, several processes": f"srun --nodes 2 --ntasks 4 --overcommit {PLAIN} FLAGS",
    "deepspeed": "printf 'node-1 slots=1\\nnode-2 slots=1\\n' >HOSTFILE; deepspeed --hostfile "
    "HOSTFILE --launcher slurm --no_ssh_check --master_addr node-1 pretrain_gpt.py FLAGS",
    "torchrun": "srun --nodes 2 --ntasks-per-node 1 bash -c 'exec torchrun --nproc-per-node 1 "
    "--nnodes 2 --node-rank $SLURM_NODEID --master-addr node-1 pretrain_gpt.py FLAGS'",
}


@pytest.mark.proof
@pytest.mark.parametrize("form", FORMS)
def test_other_forms(slurm, tmp_path, form):
    """In a script of one's own, as docs/how-to/several-nodes.md shows them."""
    flags = "--tokenizer-type NullTokenizer --vocab-size 99 --mock-data --train-iters 3 --lr 1e-2"
    words = [*FLAGS, *flags.split(), "--save", tmp_path / "run"]
    line = FORMS[form].replace("FLAGS", " ".join(map(str, words)))
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n{line.replace('HOSTFILE', str(tmp_path / 'hostfile'))}\n")
    log = tmp_path / "log"
    options = ["--nodes", "2", "--exclusive", "--output", log]
    number = slurm.submit(*options, script, **environment())
    assert slurm.end(number) == "COMPLETED", log.read_text()
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [row["iteration"] for row in rows if row["kind"] == "train"] == [1, 2, 3]
