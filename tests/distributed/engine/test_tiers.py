"""Tiers change the place of numbers, and no number: runs with their states in files, or partly on
the device, save the bits of the same run in main memory."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from samples import sampled
from training_jobs import TINY, run, train

from megatron.config.layouts import Layout
from megatron.engine.state import holders
from megatron.engine.train_engine import TrainEngine
from megatron.features.tiers import places as files_of_run
from megatron.features.tiers.rules import moved_bytes, weight_bytes

FLAGS = [*TINY, "--train-iters", "4", "--save-interval", "2"]
HALF = ["--fp16", "--initial-loss-scale", "1024"]
CASES = {
    "zero3-dp2": (2, 3, [], {}),
    "zero3-dp2-fp16": (2, 3, HALF, {"sub_group_size": 3000}),
    "zero3-dp2-bf16": (2, 3, ["--bf16"], {"stage3_param_persistence_threshold": 0}),
    "zero3-tp2": (2, 3, ["--bf16", "--tensor-model-parallel-size", "2"], {}),
    "zero2-dp2-bf16": (2, 2, ["--bf16"], {}),
    "zero1-dp2-fp16": (2, 1, HALF, {}),
    "zero1-pp2-bf16": (2, 1, ["--bf16", "--pipeline-model-parallel-size", "2"], {}),
    "zero1-sums": (2, 1, ["--bf16", "--accumulate-allreduce-grads-in-fp32"], {}),
}
"""Processes, stage, flags and further keys."""
SAMPLE = ("zero3-dp2-fp16",)


def written(path: Path, stage, **zero) -> list[str]:
    """The flag of a JSON with these keys."""
    path.write_text(json.dumps({"zero_optimization": {"stage": stage, **zero}}))
    return ["--deepspeed_config", str(path)]


def contents(folder: Path) -> dict[str, bytes]:
    """The tensors of a checkpoint, by file."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def places(folder: Path, stage, **zero):
    """The same states in main memory and in files."""
    tier = {"device": "nvme", "nvme_path": str(folder)}
    names = ("offload_optimizer", *["offload_param"] * (stage == 3))
    return [
        {**{name: place for name in names}, **zero} for place in ({"device": "cpu"}, tier)
    ]  # fmt: skip


@pytest.mark.parametrize("case", sampled(CASES, SAMPLE.__contains__))
def test_files_have_the_bits_of_main_memory(pool, tmp_path, case):
    """Also where a run starts from the checkpoint of one in main memory; nothing is left in the
    folder."""
    processes, stage, flags, more = CASES[case]
    folder = tmp_path / "disk"
    folder.mkdir()
    saved = {}
    for name, zero in zip(("memory", "files"), places(folder, stage, **more), strict=True):
        argv = [*FLAGS, *flags, *written(tmp_path / f"{name}.json", stage, **zero)]
        pool.run(processes, train, [*argv, "--save", str(tmp_path / name)])
        saved[name] = argv
    for step in ("global_step2", "global_step4"):
        last = contents(tmp_path / "memory" / step)
        assert last and contents(tmp_path / "files" / step) == last
    load = ["--load", str(tmp_path / "memory"), "--load-tag", "2"]
    pool.run(processes, train, [*saved["files"], *load, "--save", str(tmp_path / "again")])
    assert contents(tmp_path / "again" / "global_step4") == last
    assert not list(folder.iterdir())


def mapped(argv, folder):
    """Names of the tensors of the optimizer that are not in files of a folder at the end of a run,
    and how many there are; for the pool."""
    seen = []

    def look(engine):
        lines = Path("/proc/self/maps").read_text().splitlines()
        spans = [line.split()[0].split("-") for line in lines if folder in line]
        inside = [range(int(first, 16), int(end, 16)) for first, end in spans]
        tensors = {
            f"{number} {name}": tensor
            for number, main in enumerate(holders(engine))
            for name, tensor in {
                "weight": main, "gradient": main.grad, **engine.optimizer.state[main],
            }.items()
            if name != "step"
        }  # fmt: skip
        for param, name in engine.names.items():
            if engine.stage == 3:
                accumulated = getattr(engine.optimizer_wrapper, ACCUMULATED)
                tensors |= {name: param.ds_tensor, f"{name}.grad": accumulated[param.ds_id]}
            elif param._hp_mapping is not None:
                tensors[name] = param._hp_mapping.get_hp_fragment()
        seen.append(len(tensors))
        seen.extend(
            name
            for name, tensor in tensors.items()
            if not any(tensor.data_ptr() in span for span in inside)
        )
        return close(engine)

    close = TrainEngine.close
    with mock.patch.object(TrainEngine, "close", look):
        train(argv)
    return seen


@pytest.mark.parametrize("stage", sampled((1, 2, 3), (3).__eq__))
def test_all_of_it_is_in_files_also_after_a_checkpoint_was_loaded(pool, tmp_path, stage):
    disk = tmp_path / "disk"
    disk.mkdir()
    _, zero = places(disk, stage)
    flags = written(tmp_path / "ds.json", stage, **zero)
    argv = [*FLAGS, "--bf16", *flags, "--save", str(tmp_path)]
    argv += ["--exit-interval", "2"]
    for more in ([], ["--load", str(tmp_path)]):
        for count, *elsewhere in pool.run(2, mapped, [*argv, *more], str(disk)):
            assert count >= 20 and elsewhere == []


def sizes(argv):
    """Bytes of each kind of files of rank 0, and weights of its partition; for the pool."""
    bytes_, counts = {}, []

    def line(key, files):
        bytes_[key] = files.bytes
        return ""

    def look(engine):
        counts.append(sum(main.numel() for main in holders(engine)))
        return close(engine)

    close = TrainEngine.close
    patched = mock.patch.object(files_of_run, "_line", line)
    with patched, mock.patch.object(TrainEngine, "close", look):
        train(argv)
    return bytes_, counts[0]


@pytest.mark.parametrize("case", sampled(CASES, lambda case: False))
def test_the_files_have_the_size_of_the_formula(pool, tmp_path, case):
    processes, stage, flags, more = CASES[case]
    _, zero = places(tmp_path, stage, **more)
    argv = [*TINY, "--train-iters", "1", *flags, *written(tmp_path / "ds.json", stage, **zero)]
    bytes_, weights = pool.run(processes, sizes, argv)[0]
    precision = next((word for word in ("bf16", "fp16") if f"--{word}" in flags), "fp32")
    in_fp32 = "--accumulate-allreduce-grads-in-fp32" in flags
    layout = Layout(zero=stage, precision=precision, grads_in_fp32=in_fp32)
    assert bytes_["offload_optimizer"] == moved_bytes(layout, weights)
    if stage == 3:
        assert bytes_["offload_param"] == weight_bytes(layout, weights)


ACCUMULATED = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


RATIOS = {"zero3-dp2-fp16": HALF, "zero3-dp2-bf16": ["--bf16"], "zero3-sgd": ["--optimizer", "sgd"]}


@pytest.mark.parametrize("case", sampled(RATIOS, lambda case: False))
def test_a_ratio_changes_no_bit_on_a_cpu(pool, tmp_path, case):
    """Rates rise from 0 and fall, which an optimizer with rates of its start would not follow."""
    schedule = ["--lr-warmup-iters", "2", "--lr-decay-style", "linear"]
    argv = [*FLAGS, *RATIOS[case], *schedule]
    saved = []
    for name, ratio in (("whole", 1), ("part", 0.3)):
        offload = {"device": "cpu", "ratio": ratio}
        json_flag = written(
            tmp_path / f"{name}.json", 3, sub_group_size=3000, offload_optimizer=offload
        )
        output, error = pool.run(
            2, run, [*argv, *json_flag, "--save", str(tmp_path / name)]
        )[0]  # fmt: skip
        assert error is None
        saved.append((contents(tmp_path / name / "global_step4"), output))
        load = ["--load", str(tmp_path / name), "--load-tag", "2"]
        pool.run(2, train, [*argv, *json_flag, *load, "--save", str(tmp_path / f"{name}2")])
        saved.append((contents(tmp_path / f"{name}2" / "global_step4"), output))
    assert all(tensors == saved[0][0] for tensors, _ in saved)
    assert "offload_optimizer.ratio 0.3: 3 of 5 sub-groups" in saved[2][1]


def refused(pool, tmp_path, folder, under=None):
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(folder)}}
    argv = [*FLAGS, *written(tmp_path / "ds.json", 3, **zero), "--save", str(tmp_path / "saved")]
    results = pool.run(2, run, argv, *(under or ()))
    assert len({error for _, error in results}) == 1
    return results[0][1]


def little_room(bytes_):
    """A context in which files of rank 1 cannot be larger; for the pool."""
    import contextlib
    import resource

    @contextlib.contextmanager
    def limited():
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        most = bytes_ if os.environ["RANK"] == "1" else limits[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    return limited()


def test_a_folder_that_cannot_be_used_is_named_on_all_ranks(pool, tmp_path):
    key = "zero_optimization.offload_optimizer.nvme_path"
    error = refused(pool, tmp_path, tmp_path / "none")
    assert f"{key} {tmp_path / 'none'}: folder not found" in error
    error = refused(pool, tmp_path, tmp_path, (little_room, 4096))
    assert (
        f"rank 1: {key} {tmp_path}: no room for 0.00 GiB more" in error and "GiB are free" in error
    )
    assert not list((tmp_path / "saved").glob("global_step*"))


ENDLESS = """
import sys
sys.path[:0] = sys.argv.pop(1).split(":")
import pretrain_gpt
pretrain_gpt.main()
"""


@pytest.mark.proof
def test_a_killed_run_leaves_no_file(tmp_path):
    root = Path(__file__).parents[3]
    disk = tmp_path / "disk"
    disk.mkdir()
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(disk)}}
    argv = [*TINY, "--train-iters", "100000", *written(tmp_path / "ds.json", 3, **zero)]
    command = [sys.executable, "-c", ENDLESS, str(root), *argv]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, cwd=root
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("offload_optimizer: "):
                break
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert str(disk) in maps and not list(disk.iterdir())
        process.send_signal(signal.SIGKILL)
    assert not list(disk.iterdir())
