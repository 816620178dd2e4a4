"""OneFlow GPT's way to several nodes: the same command on each, which finds its own place."""

import json
import re
import subprocess

import pytest
from launched_runs import ROOT, environment, free_port

from .namespaces import missing, nodes

pytestmark = [pytest.mark.proof, pytest.mark.skipif(bool(missing()), reason=missing())]
SCRIPT = "examples_deepspeed/distribute_pretrain_4n8d_2x4x4_512_2304x24.sh"
SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 100 "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 "
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 3 --log-interval 1 "
    "--eval-iters 0 --num-workers 0 --loss-scale 1"
).split()


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    folder = tmp_path_factory.mktemp("node-ips")
    (folder / "nodes").mkdir()
    lines = (json.dumps({"text": " ".join(str(n * k % 90) for n in range(40))}) for k in range(20))
    (folder / "numbers.jsonl").write_text("\n".join(lines))
    words = ["--input", folder / "numbers.jsonl", "--output-prefix", folder / "numbers"]
    words += ["--append-eod", "--tokenizer-type", "NullTokenizer", "--vocab-size", "99"]
    subprocess.run(
        ["python", "tools/preprocess_data.py", *words],
        cwd=ROOT, env=environment(), check=True, capture_output=True,
    )  # fmt: skip
    with nodes(4, folder / "nodes") as machines:
        yield folder, machines


def start(folder, addresses, port, runs, *flags):
    """What starts the script on a node by ssh."""
    variables = {
        **{"GPUS": "1", "ONEFLOW_GPT_NODE_IPS": addresses, "RUNS": str(folder / runs)},
        **{"DATA_PATH": str(folder / "numbers_text_document"), "OMP_NUM_THREADS": "1"},
        **{name: environment()[name] for name in ("PATH", "PYTHONPATH")},
    }
    given = " ".join(f"{name}={value}" for name, value in variables.items())
    words = " ".join([SCRIPT, *SMALL, "--ctrl-port", port, *flags])
    return f"cd {ROOT} && env {given} bash {words}"


@pytest.mark.parametrize("by", ["address", "name"])
def test_the_script_of_four_nodes_trains_on_them(four, by):
    """Node 3 of the list is rank 2, whatever it is called; one of them prints."""
    folder, machines = four
    addresses = ",".join(getattr(machine, by) for machine in machines)
    port, running = free_port(), []
    for machine in machines:
        command = start(folder, addresses, port, by)
        running.append(
            machines[0].start(
                "ssh", machine.name, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
    outputs = [process.communicate(timeout=240)[0] for process in running]
    assert [process.returncode for process in running] == [0] * 4, outputs
    assert "layout: 4 processes, pipeline x data x tensor = 1 x 2 x 2" in outputs[0]
    assert [len(re.findall("lm loss:", output)) for output in outputs] == [3, 0, 0, 0]
    (metrics,) = (folder / by).rglob("metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert len(losses) == 3 and losses[0] == pytest.approx(4.6, abs=0.2)


def test_a_node_that_is_not_in_the_list_and_one_that_does_not_come_are_named(four):
    """The first ends at once, and the others after the time limit."""
    folder, machines = four
    addresses = ",".join([*(machine.address for machine in machines[:3]), "node-9"])
    command = start(folder, addresses, free_port(), "wrong")
    done = machines[0].run("ssh", "node-4", command)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "--node-ips: node-9 is not known here: " in done.stderr
    listed = ",".join(machine.address for machine in machines[:3])
    wrong = f"{listed},{machines[0].address}"
    done = machines[0].run("ssh", "node-4", start(folder, wrong, "1", "wrong"))
    assert done.returncode == 2
    assert f"--node-ips {wrong}: none of them is this node's, whose addresses are" in done.stderr
    assert machines[3].address in done.stderr
    addresses = ",".join(machine.address for machine in machines)
    late = ["--distributed-timeout-minutes", "0.1"]
    command = start(folder, addresses, free_port(), "late", *late)
    done = machines[0].run("ssh", "node-2", command)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "node 1 of 4" in done.stderr and machines[0].address in done.stderr
    assert "--ctrl-port" in done.stderr
