"""Averages of weights are torch's AveragedModel, in every layout and through checkpoints."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tool_modules import load_program
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn
from training_jobs import TINY, run, saved_again, train

from megatron.apps.parity.layouts import flags_for, parse_layout
from megatron.checkpoint.source import locate_checkpoint
from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, resolve
from megatron.engine.environment import distributed
from megatron.engine.state import owned_slices
from megatron.engine.update.adam import KeptState
from megatron.features.averages import callback
from megatron.formats.conversion.output import write_checkpoint
from megatron.run.run import parse_run
from megatron.training.build import build_trainer
from megatron.training.trainer import Callback

DECAY, FIRST, EVERY = 0.8, 2, 2
FLAGS = [
    *TINY,
    *(
        f"--hidden-dropout 0 --attention-dropout 0 --train-iters 6 --ema-decay {DECAY} "
        f"--ema-start-iter {FIRST} --swa-start-iter {FIRST} --swa-interval {EVERY}"
    ).split(),
]
LAYOUTS = ("zero0", "tp2", "pp2", "dp2-zero1", "dp2-zero2", "dp2-zero3", "cp2", "ep2",
           "tp2-dp2-zero1", "tp2-dp2-zero3")  # fmt: skip
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-layer-freq 2".split()
PRECISIONS = {
    "fp32": [], "bf16": ["--bf16"], "fp16": "--fp16 --initial-loss-scale 65536".split(),
    "stored": (
        "--bf16 --use-precision-aware-optimizer --main-params-dtype bf16 --exp-avg-dtype bf16 "
        "--exp-avg-sq-dtype bf16"
    ).split(),
}  # fmt: skip


class Recorder(Callback):
    """Averages of this rank's main weights, by torch; ``skipped`` counts steps without update."""

    def __init__(self) -> None:
        self.averages: dict[str, AveragedModel] = {}
        self.skipped = 0

    def after_step(self, trainer, step) -> None:
        if bool(step.result.skipped):
            self.skipped += 1
            return
        pieces = [own.get("weight").detach().clone() for own in owned_slices(trainer.engine)]
        model = nn.ParameterList([nn.Parameter(piece) for piece in pieces])
        for kind, update, every in (
            ("exponential_average", get_ema_multi_avg_fn(DECAY), 1),
            ("uniform_average", get_swa_multi_avg_fn(), EVERY),
        ):
            if step.iteration >= FIRST and (step.iteration - FIRST) % every == 0:
                if kind not in self.averages:
                    self.averages[kind] = AveragedModel(model, multi_avg_fn=update)
                self.averages[kind].update_parameters(model)


def differing(argv: list[str]) -> tuple[list[str], int]:
    """The averages that differ from torch's, bit for bit, and the steps that were skipped; for the
    pool."""
    run_, recorder = parse_run(None, argv), Recorder()
    with distributed(run_.config.parallel) as mesh:
        trainer = build_trainer(run_, mesh, [recorder])
        trainer.fit()
        wrong = [
            f"{own.name} {kind}"
            for kind, average in recorder.averages.items()
            for own, expected in zip(
                owned_slices(trainer.engine), average.module.parameters(), strict=True
            )
            if not torch.equal(own.get(kind), expected.data)
        ]
        assert len(recorder.averages) == 2
        return wrong, recorder.skipped


def flags_of(layout: str) -> list[str]:
    if layout == "zero0":
        return ["--zero-stage", "0"]
    return [*flags_for(parse_layout(layout)), *(EXPERTS if "ep" in layout else [])]


PROOF = pytest.mark.proof
SAMPLE = {("dp2-zero1", "fp32"), ("zero0", "fp16")}


@pytest.mark.parametrize("layout, precision", [
    pytest.param(layout, precision, marks=() if (layout, precision) in SAMPLE else PROOF)
    for layout in LAYOUTS for precision in PRECISIONS
    if not (precision == "stored" and layout not in ("dp2-zero1", "dp2-zero2", "tp2-dp2-zero1"))
])  # fmt: skip
def test_averages_are_those_of_torch(pool, layout, precision):
    """Bitwise; fp16 skips steps, which leave the averages as they are."""
    processes = 1 if layout == "zero0" else parse_layout(layout).processes
    scale = ["--initial-loss-scale", str(2**20)] if precision == "fp16" else []
    argv = [*FLAGS, *flags_of(layout), *PRECISIONS[precision], *scale, "--train-iters", "9"]
    for wrong, skipped in pool.run(processes, differing, argv, timeout=300):
        assert not wrong, wrong
        assert (skipped > 0) == (precision == "fp16")


def test_a_step_that_is_skipped_on_the_device_counts_in_no_mean(monkeypatch):
    weight, kept, taken = torch.zeros(3), KeptState(), []
    own = SimpleNamespace(get=lambda kind: weight if kind == "weight" else kept.tensors[weight])
    monkeypatch.setattr(callback, "holders", lambda engine: [weight])
    monkeypatch.setattr(callback, "owned_slices", lambda engine: [own])
    engine = SimpleNamespace(kept={"mean": kept}, device=torch.device("cpu"))
    for step, skipped in enumerate((1.0, 0.0, 0.0, 1.0, 0.0)):
        weight.fill_(step)
        callback.add_weights(engine, "mean", None, torch.tensor(skipped))
        taken += [] if skipped else [float(step)]
        expected = torch.full((3,), sum(taken) / max(1, len(taken)))
        torch.testing.assert_close(kept.tensors[weight], expected)
    assert int(kept.count) == 3


CONTINUED = (
    ("dp2-zero1", "dp2-zero1"), ("dp2-zero3", "dp2-zero3"), ("dp2-zero1", "tp2"),
    ("tp2-dp2-zero1", "pp2-dp2-zero1"), ("dp2-zero3", "tp2"), ("pp2", "dp2-zero2"),
)  # fmt: skip


@pytest.mark.parametrize("saved, loaded", [
    pytest.param(*pair, marks=() if pair == CONTINUED[2] else PROOF)
    for pair in CONTINUED
])  # fmt: skip
def test_any_layout_continues(pool, saved, loaded, tmp_path):
    """The averages of a whole run and of one that was interrupted: bitwise at the same layout, else
    to rounding. At the end they are those of one process."""
    first, second = parse_layout(saved), parse_layout(loaded)
    to = [*FLAGS, *flags_for(first), "--save", str(tmp_path / "a"), "--exit-interval", "3"]
    pool.run(first.processes, train, to, timeout=300)
    again = [*FLAGS, *flags_for(second), "--load", str(tmp_path / "a")]
    again += ["--save", str(tmp_path / "b")]
    pool.run(second.processes, train, again, timeout=300)
    whole = [*FLAGS, *flags_for(first), "--save", str(tmp_path / "c")]
    pool.run(first.processes, train, whole, timeout=300)
    pool.run(1, train, [*FLAGS, "--save", str(tmp_path / "d")], timeout=300)
    continued, expected, one = (averages_of(tmp_path / name) for name in "bcd")
    assert {key.rpartition("/")[2] for key in one} == {"exponential_average", "uniform_average"}
    for key, values in one.items():
        if saved == loaded:
            assert torch.equal(continued[key], expected[key]), key
        torch.testing.assert_close(continued[key], values, rtol=2e-4, atol=2e-5)


@pytest.mark.proof
def test_averages_move_bitwise(pool, tmp_path):
    """A checkpoint that another layout has loaded, and saved at once, has the same averages."""
    states = []
    for number, layout in enumerate(("tp2-dp2-zero1", "dp2-zero3", "pp2", "dp2-zero2", "tp2")):
        parsed = parse_layout(layout)
        load = ["--load", str(tmp_path / f"{number - 1}")] if number else []
        argv = [*FLAGS, *flags_for(parsed), *load, "--save", str(tmp_path / f"{number}"),
                "--exit-interval", "3"]  # fmt: skip
        pool.run(parsed.processes, saved_again if number else train, argv, timeout=300)
        states.append(averages_of(tmp_path / f"{number}"))
    for other in states[1:]:
        assert other.keys() == states[0].keys()
        for key, values in other.items():
            assert torch.equal(values, states[0][key]), key


def averages_of(folder) -> dict[str, torch.Tensor]:
    source = locate_checkpoint(folder).open(verify=False)
    return {f"{n}/{k}": source.tensor(n, k)
            for n in source.names() for k in source.kinds(n) if "average" in k}  # fmt: skip


EVALUATED = "--eval-iters 2 --eval-interval 2 --split 8,2,0".split()


def validation_losses(argv: list[str]) -> list[tuple[str, str]]:
    """Words and losses of the evaluations that a run prints; for the pool."""
    text, error = run(argv)
    assert error is None, error
    return re.findall(r"validation loss (.*?) \| lm loss value: (\S+)", text)


@pytest.mark.parametrize("layout, precision", [
    pytest.param(*case, marks=() if case == ("dp2-zero1", "bf16") else PROOF)
    for case in (("dp2-zero1", "bf16"), ("zero0", "bf16"), ("zero0", "fp32"), ("tp2", "fp32"),
                 ("pp2", "bf16"), ("dp2-zero2", "stored"), ("dp2-zero3", "bf16"))
])  # fmt: skip
def test_evaluations_have_both_losses(pool, layout, precision, tmp_path):
    """Of the weights those of a run without averages; of an average those of a checkpoint that has
    it as its weights. Training continues as without."""
    processes = 1 if layout == "zero0" else parse_layout(layout).processes
    plain = [*TINY, *FLAGS[len(TINY) : len(TINY) + 6], *flags_of(layout), *PRECISIONS[precision],
             *EVALUATED]  # fmt: skip
    flags = [*plain, *FLAGS[len(TINY) + 6 :], "--save", str(tmp_path / "run")]
    (printed, *_) = pool.run(processes, validation_losses, flags, timeout=300)
    (without, *_) = pool.run(processes, validation_losses, plain, timeout=300)
    assert [each for each in printed if "average" not in each[0]] == without
    assert printed[1][0] == "of the exponential average at iteration 2", printed
    checkpoint = locate_checkpoint(tmp_path / "run")
    for kind in ("exponential", "uniform"):
        source = checkpoint._replace(weights=f"{kind}_average").open()
        write_checkpoint(tmp_path / kind, source, moments=False)
        alone = [*plain, "--load", str(tmp_path / kind), "--skip-train", "--no-load-optim"]
        (of_average, *_) = pool.run(processes, validation_losses, alone, timeout=300)
        last = [loss for words, loss in printed if f"{kind} average at iteration 6" in words]
        assert last == [loss for _, loss in of_average]


@pytest.mark.proof
def test_programs_know_averages(tmp_path, capsys):
    """Export of an average, the list of a checkpoint's tensors, and the copy for DeepSpeed, which
    has weights and moments."""
    llama = (
        "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
        " --untie-embeddings-and-output-weights --train-iters 3 --save-universal"
    ).split()
    save = tmp_path / "run"
    train([*FLAGS, *llama, "--zero-stage", "1", "--save", str(save)])
    checkpoint = locate_checkpoint(save)
    convert = load_program("tools/convert_checkpoint.py").main
    for average in ("exponential", "uniform"):
        output, name = tmp_path / average, "layers.0.attention.proj.weight"
        convert(["to-hf", "--load", str(save), "--average", average, "--output", str(output)])
        theirs = load_file(output / "model.safetensors")["model.layers.0.self_attn.o_proj.weight"]
        expected = checkpoint.open().tensor(name, f"{average}_average")
        assert torch.equal(theirs, expected)
        assert not torch.equal(theirs, checkpoint.open().tensor(name))
    capsys.readouterr()
    load_program("tools/inspect_checkpoint.py").main([str(save), "--json"])
    tensors = json.loads(capsys.readouterr().out)["tensors"]
    assert {"exponential_average", "uniform_average"} <= {each["kind"] for each in tensors}
    universal = locate_checkpoint(save, prefer="universal").open()
    assert {*universal.kinds(name)} == {"weight", "exp_avg", "exp_avg_sq"}
    with pytest.raises(SystemExit, match="no exponential_average"):
        convert(["to-hf", "--load", str(universal.folder), "--average", "exponential",
                 "--output", str(tmp_path / "x")])  # fmt: skip


def test_the_plan_counts_averages():
    """A number of 4 bytes a parameter for each, like a moment."""
    tool = load_program("tools/plan.py")
    words = "--model gpt2 --seq-length 64 --global-batch-size 1 --swa-start-iter 9".split()
    for flags, states in (([], 3.0), (["--ema-decay", "0.9"], 4.0)):
        parser = FlagParser(tool.PlanConfig, *FLAG_CLASSES)
        settings = parser.settings([*words, *flags])
        settings = tool.with_presets(settings, "H100", "gpt2", None)
        config = tool.build(tool.PlanConfig, settings)
        assert tool.workload_of(config, settings, 1).optimizer_states == states


@pytest.mark.parametrize("words, told", [
    (["--optimizer", "schedule_free"], "--ema-decay contradicts --optimizer schedule_free"),
    (["--no-save-optim"], "--ema-decay contradicts --no-save-optim"),
    (["--checkpoint-format", "deepspeed"], "contradicts --checkpoint-format deepspeed"),
])  # fmt: skip
def test_bad_input(words, told):
    with pytest.raises(ConfigError, match=told):
        resolve(FlagParser(*FLAG_CLASSES).settings([*FLAGS, *words]), 1)


def test_a_run_that_only_evaluates_says_so():
    """Both averages, with the words about how to evaluate one."""
    argv = [*FLAGS, "--skip-train", "--load", "runs"]
    notes = [note for note in parse_run(None, argv).resolved.notes if "--skip-train" in note]
    assert [note.split()[0] for note in notes] == ["--ema-decay", "--swa-start-iter"]
    assert all("convert_checkpoint.py --average makes" in note for note in notes)


def test_an_average_without_a_term_is_refused():
    text, error = run([*FLAGS, "--swa-start-iter", "7"])
    assert error is not None and "--swa-start-iter 7 is after the last iteration, 6" in error
