"""benchmarks/train.py as people call it, on models that take no time."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import train
from contestants import measure, registry
from contestants.process import ContestantError, MissingPackage

SMALL = (
    "--layers 1 --hidden-size 32 --heads 2 --seq-length 16 --vocab-size 128 --micro-batch 2 "
    "--peak-tflops 1 --timeout 300"
).split()
NAMES = ["ours-zero1", "hf-deepspeed", "hf-trainer", "plain", "matmuls"]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """Two micro batches a step in fp32, where all losses have to be equal."""
    folder = tmp_path_factory.mktemp("train")
    file = folder / "out.json"
    flags = f"--dtype fp32 --micro-batches 2 --warmup 2 --rounds 2 --steps 2 --folder {folder}"
    argv = [*SMALL, *flags.split(), "--contestants", ",".join(NAMES), "--json", str(file)]
    assert train.main(argv) == 0
    assert [path.name for path in folder.iterdir()] == ["out.json"]
    return json.loads(file.read_text())


@pytest.mark.proof
def test_all_losses_are_those_of_the_plain_model(found):
    losses = {name: result.get("losses") for name, result in found["contestants"].items()}
    assert set(losses) == set(NAMES), found["contestants"]
    assert losses["matmuls"] == [None] * 6
    assert losses["plain"][0] == pytest.approx(math.log(128), rel=0.05)
    assert losses["plain"][-1] < losses["plain"][0]
    for name in set(NAMES) - {"matmuls"}:
        assert losses[name] == pytest.approx(losses["plain"], rel=1e-5), name


@pytest.mark.proof
def test_json_is_whole(found):
    assert found["warnings"] == []
    assert found["machine"]["peak_flops"] == 1e12
    assert {"torch", "deepspeed", "transformers", "device", "cores"} <= set(found["machine"])
    assert found["command"].startswith("python benchmarks/train.py --layers 1")
    assert found["setting"]["micro_batches"] == 2
    for result in found["contestants"].values():
        assert len(result["rounds"]) == 2
        for answer in result["rounds"]:
            assert answer["cpu_seconds"] > 0 and answer["wall_seconds"] > 0
            assert answer["peak_bytes"] > 100e6  # torch alone takes that
    assert set(found["ratios"]) == {"ours-zero1"}
    assert set(found["ratios"]["ours-zero1"]) == {"hf-deepspeed", "hf-trainer", "plain", "matmuls"}


@pytest.mark.proof
def test_one_at_a_time_in_bf16_with_own_weights_and_flags(capsys, tmp_path):
    file = tmp_path / "out.json"
    flags = "--architecture llama --kv-heads 1 --one-at-a-time --own-weights --rounds 1 --steps 1"
    names = "ours-zero0+seed=5,plain,ours-zero0+no-such-flag"
    argv = [*SMALL, *flags.split(), "--warmup", "1", "--contestants", names, "--json", str(file)]
    assert train.main(argv) == 0
    found = json.loads(file.read_text())["contestants"]
    for name in ("ours-zero0+seed=5", "plain"):
        assert found[name]["losses"] == pytest.approx([math.log(128)] * 2, rel=0.05)
    assert "--no-such-flag" in found["ours-zero0+no-such-flag"]["failed"]
    printed = capsys.readouterr()
    assert "| ours-zero0+no-such-flag | exit status 2" in printed.out
    assert "ours-zero0+no-such-flag is skipped: exit status 2" in printed.err


def test_missing_package_is_said_by_the_process():
    code = (
        f"import sys; sys.path.insert(0, {str(Path(train.__file__).parent)!r})\n"
        "from contestants import registry, worker\n"
        "registry.CONTESTANTS['x'] = registry.Contestant('plain', '', needs=('json', 'no_such'))\n"
        "worker.compete('x', None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"missing": ["no_such"]}


class Fake:
    """A contestant without a process; `absent` is not installed, `late` breaks down."""

    def __init__(self, name, setting, environment, timeout):
        if name == "hf-trainer":
            raise MissingPackage("accelerate not installed")
        self.name, self.malloc = name, "MALLOC_TRIM_THRESHOLD_" in environment
        self.warmup_losses, self.start_seconds, self.rounds = [4.85], 1.0, 0
        Fake.tuned[name] = self.malloc

    def round(self):
        self.rounds += 1
        if self.name == "hf-deepspeed" and self.rounds == 2:
            raise ContestantError("exit status 1: OutOfMemoryError: no memory")
        seconds = {"plain": 2.0}.get(self.name, 1.0) * self.rounds
        clocks = {"cpu_seconds": seconds, "wall_seconds": 2 * seconds, "peak_bytes": 5 * 10**8}
        return clocks | {"losses": [4.8, math.nan if self.name == "plain" else 4.7]}

    def close(self):
        Fake.closed.append(self.name)


@pytest.mark.parametrize("apart", [False, True])
def test_skipped_and_failed_contestants(monkeypatch, capsys, tmp_path, apart):
    Fake.tuned, Fake.closed = {}, []
    monkeypatch.setattr(measure, "Process", Fake)
    monkeypatch.setattr("contestants.command.prepare", lambda *args: MACHINE)
    names = "ours-zero1,plain,hf-deepspeed,hf-trainer"
    argv = [*SMALL, "--rounds", "3", "--steps", "2", "--warmup", "1", "--contestants", names]
    assert train.main([*argv, *["--one-at-a-time"] * apart]) == 0
    printed = capsys.readouterr()
    assert "hf-trainer is skipped: accelerate not installed" in printed.err
    assert "hf-deepspeed is out: exit status 1" in printed.err
    lines = printed.out.splitlines()
    (skipped,) = [line for line in lines if line.startswith("| hf-trainer")]
    assert "skipped: accelerate not installed" in skipped
    (out,) = [line for line in lines if line.startswith("| hf-deepspeed")]
    assert "out after 1 rounds: exit status 1: OutOfMemoryError" in out
    # 1, 2, 3 s a round of two steps, against 2, 4, 6 s.
    assert "| ours-zero1 | bf16 weights, fp32 main weights | 1000 | 500-1500 | 2000 | 32 |" in (
        printed.out
    )
    assert "| ours-zero1 | 0.500 | 1.000 |" in printed.out
    assert "plain: its loss at step 3 is nan" in printed.out
    assert Fake.tuned == {"ours-zero1": False, "plain": True, "hf-deepspeed": True}
    assert {"ours-zero1", "plain"} <= set(Fake.closed)


MACHINE = {"device": "none", "cuda": None, "torch": "2", "peak_flops": 1e12, "peak_is": "given"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--contestants plain,fast", "no contestant 'fast'; there are ours-zero0"),
        ("--contestants plain+torch-compile", "plain has none"),
        ("--heads 3", "--hidden-size 32 / --heads 3"),
        ("--kv-heads 1", "--kv-heads: GPT-2"),
        ("--rounds 0", "--rounds is 0, below 1"),
        ("--json /no/such/folder/x.json", "/no/such/folder is not a directory"),
    ],
)
def test_errors_are_one_line(capsys, flags, said):
    assert train.main([*SMALL, *flags.split()]) == 2
    message = capsys.readouterr().err
    assert message.startswith("train.py: error: ") and message.count("\n") == 1
    assert said in message


def test_extra_flags_of_a_name():
    found = registry.contestant("ours-zero1+torch-compile+attention-backend=flash")
    assert found.flags == ("--torch-compile", "--attention-backend", "flash")
    assert found.stage == 1
