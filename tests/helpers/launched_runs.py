"""What tests share that start pretrain_gpt.py as people do: flags, environment, two nodes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1e-2 "
    "--micro-batch-size 1 --global-batch-size 4 --tokenizer-type NullTokenizer --vocab-size 99 "
    "--mock-data --num-workers 0 --eval-iters 0 --peak-tflops 1 --log-interval 1"
).split()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def environment():
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    # The names in compat/ are found in a checkout that is not installed.
    path = os.pathsep.join([str(ROOT), str(ROOT / "compat")])
    return kept | {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": path}


ADDRESSES = ("10.77.16.1", "10.77.16.2")


@pytest.fixture
def nodes():
    """The names of two network namespaces with an address each, and a cable between them."""
    names = [f"node{rank}-{os.getpid()}" for rank in (0, 1)]
    cable = [f"v{rank}-{os.getpid()}" for rank in (0, 1)]
    made = [
        *(["netns", "add", name] for name in names),
        ["link", "add", cable[0], "type", "veth", "peer", "name", cable[1]],
        *(["link", "set", end, "netns", name] for end, name in zip(cable, names, strict=True)),
    ]
    for end, name, address in zip(cable, names, ADDRESSES, strict=True):
        made += [
            ["-n", name, "address", "add", f"{address}/24", "dev", end],
            ["-n", name, "link", "set", end, "up"],
            ["-n", name, "link", "set", "lo", "up"],
        ]
    try:
        for words in made:
            try:
                done = subprocess.run(["ip", *words], capture_output=True, text=True)
            except FileNotFoundError:
                pytest.skip("iproute2 is not installed")
            if done.returncode:
                pytest.skip(f"no network namespaces here: {done.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
