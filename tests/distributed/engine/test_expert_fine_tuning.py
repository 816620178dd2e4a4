"""Fine-tuning of a model with experts: adapters in layouts, instructions and preferences."""

import json

import numpy as np
import pytest
import torch
from training_jobs import TINY, train

from megatron.apps.parity.runs import Drift
from megatron.checkpoint.source import locate_checkpoint, open_checkpoint

MODEL = [
    *(flag for flag in TINY if flag != "--mock-data"),
    *"--num-layers 2 --hidden-dropout 0 --attention-dropout 0 --init-method-std 0.2".split(),
    *"--swiglu --num-experts 4 --moe-ffn-hidden-size 8".split(),
    *"--moe-router-score-function sigmoid --moe-router-enable-expert-bias".split(),
    *"--moe-router-bias-update-rate 0.1 --split 1,0,0 --train-iters 3".split(),
]
LORA = "--lora --lora-rank 3 --lora-targets experts.up experts.down qkv".split()
EP2 = ["--expert-model-parallel-size", "2"]
LAYOUTS = {
    "ep2": (2, EP2),
    "tp2-sp": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "tp2-folded": (
        2, ["--tensor-model-parallel-size", "2", "--expert-tensor-parallel-size", "1", *EP2],
    ),
    "tp2-whole": (
        2, ["--tensor-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"],
    ),
    "dp2-zero3": (2, ["--zero-stage", "3"]),
    "pp2-zero1": (2, ["--pipeline-model-parallel-size", "2", "--zero-stage", "1"]),
    **{
        f"ep2-cp2-zero{n}": (4, [*EP2, "--context-parallel-size", "2", "--zero-stage", str(n)])
        for n in (1, 2, 3)
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def base(pool, tmp_path_factory):
    """A model that was trained for a step."""
    folder = str(tmp_path_factory.mktemp("base"))
    pool.run(1, train, [*MODEL, "--mock-data", "--train-iters", "1", "--save", folder])
    return folder


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """Files of prompts with an answer, and with two."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(3)

    def text(count):
        return " " + " ".join(map(str, rng.integers(0, 99, count)))

    kinds = {"pairs": ("completion",), "two": ("chosen", "rejected")}
    for name, answers in kinds.items():
        rows = [{"prompt": text(4)} | {a: text(n + 3) for n, a in enumerate(answers)}
                for _ in range(40)]  # fmt: skip
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)
    corpora = {"pairs": {"files": "pairs.jsonl", "type": "instruction"}}
    (folder / "corpora.json").write_text(json.dumps(corpora))
    return {
        "instruction": ["--train-data", "pairs", "--corpora-file", str(folder / "corpora.json")],
        "dpo": ["--data-path", str(folder / "two.jsonl"), "--preference", "dpo"],
    }


@pytest.fixture(scope="module")
def adapted(pool, base, tmp_path_factory):
    """A run with adapters on one process, and its folder."""
    folder = str(tmp_path_factory.mktemp("adapted"))
    argv = [*MODEL, *LORA, "--mock-data", "--pretrained-checkpoint", base, "--save", folder]
    return pool.run(1, train, argv), folder


@pytest.mark.parametrize(
    "layout",
    [n if n == "tp2-sp" else pytest.param(n, marks=pytest.mark.proof) for n in LAYOUTS],
)
def test_adapters_in_layouts_against_one_process(layout, pool, base, adapted):
    size, flags = LAYOUTS[layout]
    argv = [*MODEL, *LORA, "--mock-data", "--pretrained-checkpoint", base, *flags]
    (one,), _ = adapted
    drift = Drift.between(pool.run(size, train, argv), one)
    print(f"{layout}: loss {drift.losses.max():.1e}, norm {drift.norms.max():.1e}")
    assert drift.losses.max() < 2e-6 and drift.norms.max() < 1e-5
    assert len(set(one.losses)) == 3 and min(one.norms) > 1e-3


def test_merged_checkpoint(adapted, base):
    """Additions to each expert are trained; router and its bias stay as in the base."""
    merged, before = (open_checkpoint(folder) for folder in (adapted[1], base))
    changed = set()
    for name in before.names():
        if not torch.equal(merged.tensor(name), before.tensor(name)):
            changed.add(name)
    expected = {f"layers.{n}.{m}.weight" for n in range(2)
                for m in ("mlp.experts.up", "mlp.experts.down", "attention.qkv")}  # fmt: skip
    assert changed == expected
    assert "layers.0.mlp.router.expert_bias" in before.names()
    assert before.tensor("layers.0.mlp.router.expert_bias").abs().max() == pytest.approx(0.1)
    adapted_checkpoint = locate_checkpoint(adapted[1])
    additions = adapted_checkpoint.open().additions
    name = "layers.1.mlp.experts.down"
    a, b = (additions.tensor(f"{name}.lora_{kind}") for kind in "ab")
    for expert in range(4):
        whole = before.tensor(f"{name}.weight")[expert] + 2.0 * b[expert] @ a[expert]
        torch.testing.assert_close(merged.tensor(f"{name}.weight")[expert], whole)


@pytest.mark.parametrize("kind", ["instruction", pytest.param("dpo", marks=pytest.mark.proof)])
def test_runs_on_examples(kind, pool, base, examples):
    argv = [*MODEL, "--pretrained-checkpoint", base, *examples[kind]]
    (one,) = pool.run(1, train, argv)
    drift = Drift.between(pool.run(2, train, [*argv, *EP2]), one)
    assert drift.losses.max() < 1e-5 and len(set(one.losses)) == 3
