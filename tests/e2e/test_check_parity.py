"""tools/check_parity.py as people start it, on right code and on code that is broken on purpose.

A broken copy is a script that takes something away and then calls the command; the processes that
the command starts import the script, so that it acts in them too.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16".split()
LLAMA = (
    "--swiglu --use-rotary-position-embeddings --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --num-query-groups 1"
).split()
BREAKS = {
    "sequence-parallel norms": """
from megatron.engine.update.shared_gradients import SharedGradients
SharedGradients.sum = lambda self: None
""",
    "tied gradients": """
from megatron.engine.pipeline_module import StageModule
StageModule.tied_parameters = lambda self: []
""",
    "mean over replicas": """
from megatron.engine.update.reduction import GradientReduction
build = GradientReduction.__init__
def without_mean(self, buckets, rules):
    build(self, buckets, rules._replace(replicas=1))
GradientReduction.__init__ = without_mean
""",
    "sum over tensor ranks": """
from megatron.parallel.tensor_parallel import TensorParallel
TensorParallel.leave = lambda self, x: x
""",
    "learning rate": """
from megatron.engine import train_engine
right = train_engine.set_rates
train_engine.set_rates = lambda optimizer, lr, *more: right(optimizer, 1.05 * lr, *more)
""",
    "later learning rate": """
from megatron.engine import train_engine
right, steps = train_engine.set_rates, []
def wrong(optimizer, lr, *more):
    steps.append(lr)
    right(optimizer, lr if len(steps) < 3 else 1.05 * lr, *more)
train_engine.set_rates = wrong
""",
    "dropout masks": """
from megatron.engine import train_engine
right = train_engine.dropout_seed
train_engine.dropout_seed = lambda seed, sample: right(seed, sample) + 1
""",
    "a rank": """
from megatron.training.trainer import Trainer
fit = Trainer.fit
def some(self):
    if self.engine.mesh.pipeline.rank == 1:
        raise RuntimeError("no memory is left on this rank")
    fit(self)
Trainer.fit = some
""",
    "progress": """
import time
from megatron.training.trainer import Trainer
Trainer.fit = lambda self: time.sleep(600)
""",
}
"""What is taken away, and how."""


def command(folder: Path | None, breaks: str | None, *flags: object) -> list[str]:
    script = ROOT / "tools/check_parity.py"
    if breaks is not None:
        assert folder is not None
        script = folder / "broken.py"
        call = 'from tools.check_parity import main\nif __name__ == "__main__":\n    main()\n'
        script.write_text(BREAKS[breaks] + call)
    return [sys.executable, str(script), *MODEL, *map(str, flags)]


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def check(*flags: object, breaks: str | None = None, folder: Path | None = None):
    return subprocess.run(
        command(folder, breaks, *flags),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )


def verdict(result, layout: str) -> str:
    """What the output says of a layout."""
    found = re.search(rf"^{layout}: (.*)$", result.stdout, re.MULTILINE)
    assert found, result.stdout + result.stderr
    return found[1]


@pytest.mark.proof
def test_equal_layouts(tmp_path):
    """Model of Llama's shape with fewer key-value heads than ranks, dropout, and a JSON file."""
    out = tmp_path / "out.json"
    result = check(
        *LLAMA, "--layouts", "tp2-sp,dp2", "--steps", 3, "--json", out, "--train-iters", 100,
        "--deepspeed_config", "deepspeed_configs/ds_zero1.json", "--save", tmp_path / "save",
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert verdict(result, "tp2-sp") == verdict(result, "dp2") == "equal"
    assert "Ignored by this check: --save" in result.stdout
    assert not (tmp_path / "save").exists()
    first, second = json.loads(out.read_text())
    assert (first["layout"], first["resolved"]) == ("tp2-sp", "tp2-sp-zero1")
    assert first["dropout_off"] == "attention-dropout and hidden-dropout"
    assert second["dropout_off"] == "" and second["processes"] == 2
    for outcome in (first, second):
        assert outcome["status"] == "equal" and len(outcome["losses"]) == 3
        for loss, plain in zip(outcome["losses"], outcome["plain_losses"], strict=True):
            assert abs(loss - plain) <= outcome["allowed"]["loss"]
            assert f"{loss:12.7f}  {plain:12.7f}" in result.stdout


def test_refused_layouts():
    result = check("--layouts", "pp2-zero3,tp3,dp3", "--global-batch-size", 4)
    assert result.returncode == 2
    refused = verdict(result, "pp2-zero3")
    assert refused.startswith("refused: --zero-stage 3, --pipeline-model-parallel-size 2: ")
    assert "for every micro batch and not once in a step" in refused
    assert "--tensor-model-parallel-size 3 must divide" in verdict(result, "tp3")
    assert "--global-batch-size 4 is not a multiple of" in verdict(result, "dp3")


def different(tmp_path, breaks: str, layout: str, *flags: object) -> str:
    result = check("--layouts", layout, *flags, breaks=breaks, folder=tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert result.stdout.count("\n     1  ") == 1, "numbers are shown next to those of one process"
    status, reason = verdict(result, layout).split(": ", 1)
    assert status == "different"
    return reason


@pytest.mark.proof
def test_norm_gradients_of_slices_not_summed(tmp_path):
    reason = different(tmp_path, "sequence-parallel norms", "tp2-sp")
    assert re.match(r"gradient of final_norm\.norm\.(bias|weight) on rank 0: ", reason)
    assert reason.endswith("(one step in float64)")


@pytest.mark.proof
def test_tied_gradients_not_summed(tmp_path):
    reason = different(tmp_path, "tied gradients", "pp2")
    assert reason.startswith("gradient of embedding.word_embeddings.weight on rank 0: ")
    assert reason.endswith("(one step in float64)")


@pytest.mark.proof
def test_gradients_of_replicas_summed_by_the_engine(tmp_path):
    """The step in float64 does not go through DeepSpeed's reduction; clipping hides a factor."""
    reason = different(tmp_path, "mean over replicas", "dp2-zero1")
    assert re.match(r"gradient of final_norm\.norm\.(bias|weight) on rank [01]: ", reason)
    assert reason.endswith("(first step through DeepSpeed's engine)")


@pytest.mark.proof
def test_dead_process(tmp_path):
    """The rank is named with its last lines, and the other layouts run."""
    result = check("--layouts", "pp2,dp1,pp2-zero3", breaks="a rank", folder=tmp_path)
    assert result.returncode == 1, "a refusal counts for less than a failure"
    failed = verdict(result, "pp2")
    assert failed.startswith("failed: in DeepSpeed's engine, rank 1 of 2 ended with exit status 1")
    assert "    RuntimeError: no memory is left on this rank" in result.stdout
    assert verdict(result, "dp1") == "equal"
    assert verdict(result, "pp2-zero3").startswith("refused: ")


def children(process: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def gone(process: int) -> bool:
    """True if a process has ended (what is left of it may wait to be collected)."""
    for _ in range(100):
        try:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.1)
    return False


def deaf_to_interrupts(process: int) -> bool:
    """True if a process blocks or ignores Ctrl-C, which a terminal sends to all."""
    status = Path(f"/proc/{process}/status").read_text()
    masks = dict(line.split(":\t") for line in status.splitlines())
    held = int(masks["SigBlk"], 16) | int(masks["SigIgn"], 16)
    return bool(held >> (signal.SIGINT - 1) & 1)


SIGNALS = [signal.SIGINT, *(pytest.param(s, marks=pytest.mark.proof) for s in ("TERM", "KILL"))]


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.proof
def test_no_process_is_left_behind(tmp_path, number):
    if isinstance(number, str):
        number = signal.Signals[f"SIG{number}"]
    process = subprocess.Popen(
        command(tmp_path, "progress", "--layouts", "dp2"),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Whatever runs the tests in the background may have had interrupts ignored.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 120
    while len(children(process.pid)) < 3 and time.monotonic() < deadline:  # and Python's tracker
        time.sleep(0.1)
    time.sleep(2)  # on a busy machine they are still starting, on an idle one at work
    started = children(process.pid)
    assert process.poll() is None and len(started) >= 3
    assert all(map(deaf_to_interrupts, started))
    if number == signal.SIGINT:  # as a terminal does
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    expected = -number if number == signal.SIGKILL else 128 + number
    assert process.returncode == expected
    assert all(map(gone, started))
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--layouts tp2 --tensor-model-paralel-size 2", "nearest known flag is --tensor-model-par"),
        ("--layouts tp2 --model-parallel-size 2", "--model-parallel-size: the layouts to compare"),
        ("--layouts tp2,tq2", "unknown 'tq2'"),
        ("--layouts tp2 --data-path nowhere", "--tokenizer-type is missing"),
        ("--layouts tp2 --num-attention-heads 3", "--num-attention-heads 3 must divide"),
        (
            "--layouts tp2 --json nowhere/out.json",
            "--json nowhere/out.json: its folder does not exist",
        ),
        ("", "--layouts is missing"),
        ("--symbolic", "--ranks is missing: --symbolic checks the layout of the run's own flags"),
        ("--symbolic --ranks 2 --layouts tp2", "--layouts: --symbolic checks the layout of"),
    ],
)
def test_bad_command_line(flags, message, monkeypatch, capsys):
    from tools.check_parity import main

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as end:
        main([*MODEL, *flags.split()])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_help_is_for_newcomers(capsys):
    from tools.check_parity import main

    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert len(text.splitlines()) < 60
    for word in ("--layouts", "--steps", "--json", "All flags of pretrain_gpt.py", "Exit status"):
        assert word in text


@pytest.mark.proof
@pytest.mark.parametrize(
    ("breaks", "layout", "named"),
    [
        ("sum over tensor ranks", "tp2", "output of embedding.word_embeddings on rank 0"),
        ("sequence-parallel norms", "tp2-sp-zero1-bf16", "gradient of final_norm.norm"),
        ("mean over replicas", "dp2-zero2", "gradient of final_norm.norm"),
        ("mean over replicas", "dp2-zero2-bf16", "gradient of final_norm.norm"),
        ("learning rate", "dp2-zero3", "new weights of final_norm.norm"),
        ("later learning rate", "pp2", "gradient norm of step 4|loss of step 4"),
        ("dropout masks", "dp2", "gradient of |loss of step 1"),
    ],
)
def test_other_breaks(tmp_path, breaks, layout, named):
    assert re.match(named, different(tmp_path, breaks, layout))


@pytest.mark.proof
def test_half_precision_and_few_micro_batches():
    layouts = "dp2-bf16,dp2-zero1-bf16,tp2-zero2-bf16,dp2-zero1-fp16,dp2-zero3-fp16,pp2-zero1-fp16"
    halves = f"{layouts},dp2-fp16,tp2-sp-fp16,pp2-dualpipev-fp16"
    result = check("--num-layers", 4, "--layouts", halves)
    assert result.returncode == 0, result.stdout
    assert re.search("bf16, fp16: .* of one process in fp32", result.stdout)
    # One micro batch for each replica: one process has a single order to sum them in.
    result = check("--layouts", "dp2,tp2", "--global-batch-size", 2, "--steps", 20)
    assert result.returncode == 0, result.stdout
    result = check("--layouts", "dp2-zero1", "--optimizer", "sgd", "--lr", 0.1)
    assert result.returncode == 0, result.stdout
    result = check("--layouts", "dp2-zero1-fp16", "--initial-loss-scale", 2.0**32, "--clip-grad", 0)
    assert result.returncode == 1
    assert "step 1 was skipped" in verdict(result, "dp2-zero1-fp16")


@pytest.mark.proof
@pytest.mark.realdata
def test_real_data(realdata, tmp_path):
    folder = realdata / "megatron_indexed"
    result = check(
        *LLAMA, "--layouts", "tp2-sp,pp2,dp2", "--micro-batch-size", 2, "--global-batch-size", 16,
        "--data-path", folder / "meg-gpt2-openwebtext_text_document",
        "--data-cache-path", tmp_path, "--tokenizer-type", "GPT2BPETokenizer",
        "--vocab-file", folder / "gpt2-tiny-vocab.json",
        "--merge-file", folder / "gpt2-tiny-merges.txt",
        "--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss",
        "--deepspeed_config", "deepspeed_configs/ds_zero1.json", "--seq-length", 128,
        "--train-iters", 10000, "--lr", 3e-4, "--lr-warmup-iters", 1000,
        "--lr-decay-style", "cosine",
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
