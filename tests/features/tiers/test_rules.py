"""Keys of offloading and of ZeRO++: what is refused, by name and value, and what is left for
DeepSpeed."""

import json

import pytest

from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, resolve
from megatron.engine.deepspeed_file import read_json
from megatron.engine.deepspeed_json import complete, feature_notes, for_engine, merge

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3 "
    "--micro-batch-size 2 --train-iters 10 --global-batch-size 24 --deepspeed_config"
).split()
NVME = {"device": "nvme", "nvme_path": "/nvme"}


def run(tmp_path, zero, flags="--zero-stage 3", processes=4):
    """The run and its completed JSON."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": zero}))
    words = [*MODEL, str(path), *flags.split()]
    content = read_json(str(path))
    settings = merge(FlagParser(*FLAG_CLASSES).settings(words), content, str(path), processes)
    config = resolve(settings, processes).config.with_vocabulary(100)
    return config, complete(content, config)


def optimizer(**section):
    return {"offload_optimizer": {"device": "cpu", **section}}


ADAM_ON_CPU = "--zero-stage 2 --cpu-optimizer"
ON_CPU = '"offload_optimizer": {"device": "cpu"}'
REFUSED = {
    "Adam on the CPU without states there": ({}, ADAM_ON_CPU, ON_CPU),
    "SGD on the CPU": (optimizer(), f"{ADAM_ON_CPU} --optimizer sgd", ON_CPU),
    "ratio below stage 3": (optimizer(ratio=0.3), "--zero-stage 2", "ratio 0.3, --zero-stage 2"),
    "ratio of files": ({"offload_optimizer": NVME | {"ratio": 0.3}}, "", "ratio 0.3, device nvme"),
    "ratio of matrices": (optimizer(ratio=0.5), "--optimizer muon", "0.5, --optimizer muon"),
    "ratio above 1": (optimizer(ratio=1.5), "", "ratio 1.5 must be a number from 0 to 1"),
    "ratio of words": (optimizer(ratio="all"), "", 'ratio "all" must be a number from 0 to 1'),
    "files without a folder": (
        {"offload_optimizer": {"device": "nvme"}}, "",
        "offload_optimizer.device is nvme, and nvme_path is null",
    ),
    "weights without a folder": ({}, "--remote-device nvme", "offload_param.nvme_path in the"),
    "files of SGD": ({"offload_optimizer": NVME}, "--optimizer sgd", "nvme, --optimizer sgd"),
    "SuperOffload": (optimizer(super_offload=True), "", "super_offload: SuperOffload's updates"),
    "ZenFlow": (optimizer() | {"zenflow": {"topk_ratio": 0.1}}, "", "zenflow: ZenFlow updates"),
    "hpZ of 3": ({"zero_hpz_partition_size": 3}, "", "size 3 must divide the 4 processes"),
    "hpZ of 8": ({"zero_hpz_partition_size": 8}, "", "size 8 must divide the 4 processes"),
    "hpZ below stage 3": ({"zero_hpz_partition_size": 2}, "--zero-stage 1", "2, --zero-stage 1"),
    "hpZ and parts of layers": (
        {"zero_hpz_partition_size": 2}, "--tensor-model-parallel-size 2",
        "size 2, --tensor-model-parallel-size 2: DeepSpeed's second copies",
    ),
    "rounding below stage 3": (
        {"zero_quantized_gradients": True}, "--zero-stage 2",
        "zero_quantized_gradients true, --zero-stage 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_contradictions_are_named(tmp_path, case):
    zero, flags, told = REFUSED[case]
    flags = flags if "--zero-stage" in flags else f"--zero-stage 3 {flags}"
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, zero, flags)
    assert told in str(caught.value) and "ds.json" in str(caught.value).lower()


def test_adam_on_the_cpu_is_said_and_changes_nothing(tmp_path):
    config, completed = run(tmp_path, optimizer(), f"{ADAM_ON_CPU} --cpu_torch_adam")
    assert "torch's fused AdamW" in feature_notes(completed, config)[0]
    without, as_without = run(tmp_path, optimizer(), "--zero-stage 2")
    assert feature_notes(as_without, without) == [] and completed == as_without


def test_what_is_off_is_no_contradiction(tmp_path):
    off = {"super_offload": False, "ratio": 1.0}
    run(tmp_path, optimizer(**off) | {"zero_hpz_partition_size": 1}, "--zero-stage 2")
    run(tmp_path, {"zero_quantized_weights": False, "zenflow": None}, "--zero-stage 1")
    run(tmp_path, {"offload_optimizer": {"device": "none", "ratio": 0.5}}, "--zero-stage 2")


def test_deepspeed_gets_main_memory(tmp_path):
    """Its own reader of files, its Adam, and pinned copies of what is in files are left out."""
    zero = {"offload_optimizer": NVME | {"pin_memory": True, "buffer_count": 4}}
    config, content = run(tmp_path, zero | {"offload_param": NVME})
    zero = for_engine(content, config, on_cpu=True)["zero_optimization"]
    expected = {"device": "cpu", "pin_memory": False}
    assert zero["offload_optimizer"] == expected | {"buffer_count": 4}
    assert zero["offload_param"] == expected
    assert content["zero_optimization"]["offload_param"] == NVME  # as checkpoints keep it
    config, content = run(tmp_path, optimizer(ratio=0.3, pin_memory=True))
    zero = for_engine(content, config, on_cpu=False)["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}


@pytest.mark.parametrize(
    "key", [f"zero_quantized_{name}" for name in ("weights", "nontrainable_weights", "gradients")]
)
def test_what_rounds_is_said_and_needs_gpus(tmp_path, key):
    config, content = run(tmp_path, {key: True})
    (line,) = feature_notes(content, config)
    assert line.startswith(f"not exact: {key}: ") and "bits" in line
    with pytest.raises(ConfigError, match=f"{key} of the DeepSpeed JSON runs on GPUs only"):
        for_engine(content, config, on_cpu=True)
    assert for_engine(content, config, on_cpu=False)["zero_optimization"][key] is True


def test_hpz_reaches_the_engine_and_is_exact(tmp_path):
    config, content = run(tmp_path, {"zero_hpz_partition_size": 2})
    assert for_engine(content, config, True)["zero_optimization"]["zero_hpz_partition_size"] == 2
    assert feature_notes(content, config) == []
