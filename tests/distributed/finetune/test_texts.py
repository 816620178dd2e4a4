"""finetune.py --rl with what teaches the policy, or is trained next to it: from one folder to
another, in every layout."""

import shutil
from pathlib import Path

import pytest
import torch
from finetune_cases import metrics, save_base, save_data, tune
from safetensors.torch import load_file
from samples import sampled

from megatron.checkpoint.source import open_checkpoint

pytest.importorskip("transformers")

QUICK = (
    "--train-iters 4 --lr 3e-3 --micro-batch-size 2 --global-batch-size 4 --seq-length 48 "
    "--max-completion-length 8 --held-out 0.2 --eval-interval 2 --samples 0 --num-workers 0 "
    "--log-interval 1 --peak-tflops 1"
).split()
PPO = "--rl ppo --reward-funcs rewards.py:reds --num-iterations 2".split()
KINDS = {
    "distill": "--rl distill --load-teacher teacher --jsd-beta 0.5".split(),
    "distill-lora": "--rl distill --load-teacher teacher --lora --lora-rank 4".split(),
    "ppo": PPO,
    "ppo-lora": [*PPO, "--lora", "--lora-rank", "4"],
}
LAYOUTS = {
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "dp2-zero3": (2, "--zero-stage 3"),
    "tp2-pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
}
REWARD = (
    "def reds(prompts, completions, **_):\n    return [c.count('e') / 4 for c in completions]\n"
)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("texts")
    base = save_base(folder / "base")
    teacher = shutil.copytree(base, folder / "teacher")
    torch.manual_seed(8)
    config = LlamaConfig.from_pretrained(base, hidden_size=48, num_hidden_layers=3)
    LlamaForCausalLM(config).save_pretrained(teacher)
    (folder / "rewards.py").write_text(REWARD)
    return {"base": str(base), "folder": str(folder), **save_data(folder)}


def flags(files, kind: str, output: Path, *more: str) -> list[str]:
    words = ["--model", files["base"], "--data", files["rl"], "--output", str(output)]
    own = [
        f"{files['folder']}/{word}" if word.startswith(("teacher", "rewards.py")) else word
        for word in KINDS[kind]
    ]
    return [*words, *QUICK, *own, *more]


@pytest.fixture(scope="module")
def tuned(files, pool, tmp_path_factory):
    """The results of fine-tunings on one process, each computed once."""
    results: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in results:
            output = tmp_path_factory.mktemp(kind) / "tuned"
            pool.run(1, tune, flags(files, kind, output))
            results[kind] = output
        return results[kind]

    return of


@pytest.mark.parametrize("kind", sampled(KINDS, lambda kind: kind == "distill"))
def test_a_stopped_run_continues_bitwise(files, tuned, pool, tmp_path, kind):
    output, whole = tmp_path / "tuned", tuned(kind)
    argv = flags(files, kind, output)
    pool.run(1, tune, [*argv, "--exit-interval", "1"])
    assert not (output / "model.safetensors").exists()
    pool.run(1, tune, argv)
    for name in ("model.safetensors", *(["adapter/adapter_model.safetensors"] * ("lora" in kind))):
        assert (output / name).read_bytes() == (whole / name).read_bytes()
    assert metrics(output, "validation") == metrics(whole, "validation")


def test_a_student_comes_nearer_to_its_teacher(tuned):
    losses = [row["loss"] for row in metrics(tuned("distill"), "validation")]
    assert losses[0] > losses[1] > losses[2] > 0


@pytest.mark.parametrize("kind", sampled(["ppo", "ppo-lora"], lambda kind: False))
def test_values_are_saved_and_not_exported(files, tuned, kind):
    output = tuned(kind)
    source = open_checkpoint(output / "checkpoints")
    assert {"value_head.weight", "value_head.bias"} <= set(source.names())
    assert source.tensor("value_head.weight").abs().max() > 0
    exported = load_file(output / "model.safetensors")
    assert exported.keys() == load_file(f"{files['base']}/model.safetensors").keys()
    if kind == "ppo-lora":
        adapters = load_file(output / "adapter" / "adapter_model.safetensors")
        assert adapters and all(".lora_" in name for name in adapters)


@pytest.mark.proof
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_model(files, tuned, pool, tmp_path, kind, layout):
    """To rounding, as far as the same tokens are drawn."""
    processes, more = LAYOUTS[layout]
    output, whole = tmp_path / "tuned", tuned(kind)
    pool.run(processes, tune, flags(files, kind, output, *more.split()))
    weights, expected = (load_file(each / "model.safetensors") for each in (output, whole))
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=2e-3, atol=2e-3)
    if kind.startswith("ppo"):
        heads = [open_checkpoint(each / "checkpoints") for each in (output, whole)]
        values = [each.tensor("value_head.weight") for each in heads]
        torch.testing.assert_close(*values, rtol=2e-3, atol=2e-3)
