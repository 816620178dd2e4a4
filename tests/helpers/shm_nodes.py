"""``pretrain_gpt.py`` on one of several nodes of one machine.

    shm_nodes.py FOLDER 0,0,1 FLAGS ...

trains on three ranks, of which the first two have the folder ``FOLDER/node0`` as their ``/dev/shm``
and the third ``FOLDER/node1``.
"""

import ctypes
import os
import subprocess
import sys

import pretrain_gpt

CLONE_NEWNS = 0x00020000


def main() -> None:
    """Trains on the node of this rank."""
    _, base, nodes, *flags = sys.argv
    folder = os.path.join(base, f"node{nodes.split(',')[int(os.environ['RANK'])]}")
    os.makedirs(folder, exist_ok=True)
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "mounts of its own are for root")
    for mount in (["--make-rprivate", "/"], ["--bind", folder, "/dev/shm"]):
        subprocess.run(["mount", *mount], check=True)
    sys.argv = ["pretrain_gpt.py", *flags]
    pretrain_gpt.main()
