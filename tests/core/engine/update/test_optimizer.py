"""What a process imports up to its first steps; leaving the compiler out changes no number."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.config import OptimizerConfig
from megatron.engine.update.optimizer import build_optimizer
from megatron.parallel.shard import Shard

ROOT = Path(__file__).parents[4]

HEAVY = (
    "torch._dynamo",
    "torch._inductor",
    "torch.onnx",
    "triton",
    "sympy",
    "transformers",
    "matplotlib",
    "pandas",
    "scipy",
    "numba",
    "nltk",
    "rich",
    "tensorboard",
    "torch.utils.tensorboard",
    "tensorflow",
    "wandb",
)
"""Modules that take long to import and that a training run does not need by itself."""

STEPS = """
import sys
import pretrain_gpt
heavy = json.loads(sys.argv.pop())
imported = [name for name in heavy if name in sys.modules]
import os
end = os._exit

def report(status):
    stepped = [name for name in heavy if name in sys.modules]
    print(json.dumps([imported, stepped]))
    sys.stdout.flush()
    end(status)

os._exit = report
pretrain_gpt.main()
"""


def imported_by_a_run(tmp_path, stage: int, *flags: str) -> tuple[list[str], list[str]]:
    """Heavy modules that importing the program loads, and those there are at a run's end."""
    command = [
        *(sys.executable, "-c", f"import json\n{STEPS}", "--num-layers", "1", "--hidden-size", "8"),
        *"--num-attention-heads 1 --seq-length 4 --micro-batch-size 1 --lr 1e-3 --bf16".split(),
        *"--tokenizer-type NullTokenizer --vocab-size 31 --mock-data --train-iters 2".split(),
        *"--eval-iters 0 --num-workers 0 --save".split(),
        *(str(tmp_path), "--zero-stage", str(stage), *flags, json.dumps(HEAVY)),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    at_import, at_end = json.loads(done.stdout.splitlines()[-1])
    return at_import, at_end


@pytest.mark.parametrize("stage", [1, *(pytest.param(s, marks=pytest.mark.proof) for s in (0, 2))])
def test_a_run_imports_nothing_heavy(tmp_path, stage):
    assert imported_by_a_run(tmp_path, stage) == ([], [])


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_against_torchs_own_step(kind):
    """Weights and moments bitwise those of an optimizer whose step torch has wrapped."""

    def parameters():
        torch.manual_seed(1)
        result = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(7))]
        for param in result:
            param.shard = Shard(tuple(param.shape))
        return result

    config = OptimizerConfig(optimizer=kind, lr=0.1, weight_decay=0.2)
    ours, theirs = parameters(), parameters()
    optimizer = build_optimizer(ours, config)
    reference = build_optimizer(theirs, config)
    del reference.__dict__["step"]
    calls = []
    for one, params in ((optimizer, ours), (reference, theirs)):
        one.register_step_post_hook(lambda *_: calls.append(None))
        for step in range(3):
            for param in params:
                param.grad = torch.sin(param.detach() + step)
            one.step()
            one.zero_grad()
            assert all(param.grad is None for param in params)
    assert len(calls) == 6
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b) and not a.grad_fn
        for key, value in reference.state[b].items():
            assert torch.equal(optimizer.state[a][key], value)
