"""Files for Kubernetes, SkyPilot and dstack in examples_deepspeed/: what their containers start,
and that their own parsers take them."""

import json
import os
import re
import subprocess
import sys

import pytest
import yaml
from example_scripts import FOLDER, ROOT, SETTINGS, printed

from megatron.config import FLAG_CLASSES, FlagParser

INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def documents(path):
    return list(yaml.safe_load_all((FOLDER / path).read_text()))


def pod_of(document):
    """The specification of the pods of a Job or JobSet, and the Job's."""
    job = document["spec"]
    if document["kind"] == "JobSet":
        (replicated,) = job["replicatedJobs"]
        job = replicated["template"]["spec"]
    return job["template"]["spec"], job


def started(document, index):
    """What the container of a pod starts, as the shell of a dry run prints it; flags too."""
    (container,) = pod_of(document)[0]["containers"]
    assert container["workingDir"] == "/workspace/megatron"
    variables = {}
    for variable in container["env"]:
        if "valueFrom" in variable:
            assert variable["valueFrom"]["fieldRef"]["fieldPath"] == INDEX
            variable["value"] = str(index)
        variables[variable["name"]] = variable["value"]
    shell, script = container["command"]
    assert shell == "bash"
    return printed(ROOT / script, **variables)


@pytest.mark.parametrize("index", [0, 1])
def test_a_job_meets_at_its_first_pod_and_may_lose_one(index):
    service, job = documents("kubernetes/job.yaml")
    pod, spec = pod_of(job)
    launcher, flags = started(job, index)
    assert " ".join(launcher) == (
        "torchrun --nproc-per-node 8 --nnodes 2:2 --rdzv-backend c10d --rdzv-endpoint "
        "pretrain-0.pretrain:29500 --rdzv-id pretrain --rdzv-conf "
        f"last_call_timeout=5,is_host={1 - index} --max-restarts 20"
    )
    assert f"{spec['completions']}:{spec['parallelism']}" == "2:2"
    name = job["metadata"]["name"]
    assert (
        service["spec"]["selector"] == {"job-name": name} and service["spec"]["clusterIP"] == "None"
    )
    assert service["metadata"]["name"] == pod["subdomain"] == "pretrain"
    settings = FlagParser(*FLAG_CLASSES).settings(flags)
    assert settings["save"].value == settings["load"].value == "/runs/llama-1b"
    mounted = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted == {"/data", "/runs", "/dev/shm"}


@pytest.mark.parametrize("index", [0, 1])
def test_a_jobset_meets_at_its_first_pod(index):
    (jobset,) = documents("kubernetes/jobset.yaml")
    launcher, _ = started(jobset, index)
    name, (job,) = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"]
    address = f"{name}-{job['name']}-0-0.{name}"
    assert " ".join(launcher) == (
        f"torchrun --nproc-per-node 8 --nnodes 2 --node-rank {index} --master-addr {address} "
        "--master-port 29500"
    )
    assert pod_of(jobset)[1]["completions"] == 2


def run_of(commands, variables):
    """What commands of a shell start on a node, without what they install."""
    commands = "\n".join(line for line in commands if not line.startswith("pip install"))
    kept = {name: os.environ[name] for name in ("PATH", "HOME")}
    done = subprocess.run(
        ["bash", "-ec", commands],
        cwd=ROOT, env=kept | SETTINGS | variables, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.partition(" pretrain_gpt.py ")[0]


EXPECTED = (
    "torchrun --nproc-per-node 8 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 "
    "--master-port 29500"
)


def test_skypilot_starts_a_torchrun_on_each_node():
    (task,) = documents("skypilot/pretrain.yaml")
    variables = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1",
                 "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
                 "SKYPILOT_NUM_GPUS_PER_NODE": "8"}  # fmt: skip
    assert run_of(task["run"].splitlines(), variables) == EXPECTED
    assert set(re.findall(r"SKYPILOT_\w+", task["run"])) == set(variables)


def test_dstack_starts_a_torchrun_on_each_node():
    (task,) = documents("dstack/pretrain.dstack.yml")
    variables = {"DSTACK_NODES_NUM": "2", "DSTACK_NODE_RANK": "1",
                 "DSTACK_MASTER_NODE_IP": "10.0.0.1", "DSTACK_GPUS_PER_NODE": "8"}  # fmt: skip
    given = dict(line.split("=", 1) for line in task["env"])
    assert run_of(task["commands"], given | variables) == EXPECTED
    used = set(re.findall(r"DSTACK_\w+", "\n".join(task["commands"])))
    assert used == set(variables)


PACKAGES = "dstack==0.22.5 kubeflow-trainer-api==2.3.0 kubernetes-validate==1.37.0 skypilot==0.14.1"
"""What these tests ran with. It is no extra of setup.py, since it would hold other packages back:
an environment of its own has it, whose python MEGATRON_TEST_PEERS names."""

PARSING = {
    "kubernetes-validate": """
import kubernetes_validate as parser
for document in documents:
    parser.validate(document, parser.latest_version(), strict=True)
""",
    "kubeflow-trainer-api": """
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
(document,) = documents
found = JobsetV1alpha2JobSet.from_dict(document).to_dict()
assert found == document, "a field of this name is not known"
""",
    "skypilot": """
import sky
task = sky.Task.from_yaml(path)
assert task.num_nodes == 2 and "H100" in str(task.resources)
""",
    "dstack": """
from dstack._internal.core.models.configurations import parse_apply_configuration
(document,) = documents
assert parse_apply_configuration(document).nodes == 2
""",
}
"""By package: takes the documents of the file ``path``, or raises."""


def parsed(package, path, text):
    """Whether a package takes a file, and what it said."""
    python = os.environ.get("MEGATRON_TEST_PEERS", sys.executable)
    look = f"from importlib.metadata import version; version({package!r})"
    if subprocess.run([python, "-c", look], capture_output=True).returncode:
        pytest.skip(f"MEGATRON_TEST_PEERS names no python with {package}: pip install {PACKAGES}")
    path.write_text(text)
    listed = json.dumps(list(yaml.safe_load_all(text)))
    begin = f"import json\npath, documents = {str(path)!r}, json.loads({listed!r})\n"
    home = {"HOME": str(path.parent), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [python, "-c", begin + PARSING[package]],
        cwd=path.parent, env=home, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode == 0, done.stderr


@pytest.mark.proof
@pytest.mark.parametrize(
    ("package", "path", "wrong"),
    [
        ("kubernetes-validate", "kubernetes/job.yaml", ("completionMode:", "completionmode:")),
        ("kubeflow-trainer-api", "kubernetes/jobset.yaml", ("maxRestarts:", "maxRestart:")),
        ("skypilot", "skypilot/pretrain.yaml", ("num_nodes: 2", "num_node: 2")),
        ("dstack", "dstack/pretrain.dstack.yml", ("nodes: 2", "node: 2")),
    ],
)
def test_its_own_parser_takes_a_file(package, path, wrong, tmp_path):
    """And refuses a field with a typing error."""
    text = (FOLDER / path).read_text()
    good, said = parsed(package, tmp_path / "task.yml", text)
    assert good, said
    assert wrong[0] in text
    assert not parsed(package, tmp_path / "task.yml", text.replace(*wrong))[0]


@pytest.mark.proof
def test_the_job_of_a_jobset_is_one_of_kubernetes(tmp_path):
    (jobset,) = documents("kubernetes/jobset.yaml")
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "nodes"}}
    job["spec"] = pod_of(jobset)[1]
    good, said = parsed("kubernetes-validate", tmp_path / "job.yml", yaml.safe_dump(job))
    assert good, said
