"""tools/plan.py as people call it."""

import re
import shlex
from types import SimpleNamespace

import pytest
import torch
from tool_modules import load_program
from transformers import LlamaConfig, LlamaForCausalLM

from megatron.apps.planning.activations import WHOLE
from megatron.apps.planning.budget import simplest_first, usual_batch
from megatron.apps.planning.parameters import model_parameters
from megatron.apps.planning.presets import MODELS
from megatron.config import FLAG_CLASSES, FlagParser, ModelFlags, resolve
from megatron.config.layouts import Layout

SMALL = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --vocab-size 5000 "
    "--global-batch-size 64 --bf16 "
)


@pytest.fixture(scope="module")
def tool():
    return load_program("tools/plan.py")


@pytest.fixture
def main(tool):
    return tool.main


def test_lists_the_best(main, capsys):
    assert main((SMALL + "--gpus 8 --top 3").split()) == 0
    out = capsys.readouterr().out
    head, *rows = out.split("layouts:\n\n")[1].split("\n\n")[0].splitlines()
    assert head.split()[:3] == ["layout", "micro", "m"]
    assert len(rows) == 3
    step = head.split().index("step")
    times = [float(row.split()[step]) for row in rows]
    assert times[1:] == sorted(times[1:]) and times[0] <= 1.03 * min(times)
    assert "--micro-batch-size" in out.splitlines()[-1]
    assert "--utilisation 0.6 of --peak-tflops 989" in out, "assumptions are printed"


LARGE = "--hidden-size 1024 --num-attention-heads 16 --num-layers 24 --seq-length 512 --gpus 4 "
BERT_LARGE = LARGE + "--model-family bert --vocab-size 30522 "
T5_LARGE = LARGE + (
    "--model-family t5 --decoder-num-layers 24 --ffn-hidden-size 4096 --decoder-seq-length 128 "
    "--vocab-size 32128 "
)


@pytest.mark.parametrize(
    ("flags", "size"), [(BERT_LARGE, "0.34B parameters"), (T5_LARGE, "0.74B parameters")]
)
def test_other_families(main, flags, size, capsys):
    """The published numbers of parameters; pipelines and all else are planned too."""
    assert main((flags + "--global-batch-size 8 --micro-batch-size 1 --bf16").split()) == 0
    out = capsys.readouterr().out
    assert size in out and "pp2-interleaved" in out


def test_assumptions_act(main, capsys):
    def table(flags):
        main((SMALL + "--gpus 4 --micro-batch-size 1 --top 1 " + flags).split())
        return capsys.readouterr().out.split("layouts:\n\n")[1]

    usual = table("")
    for flags in (
        "--utilisation 0.3", "--peak-tflops 312", "--micro-batch-size 2", "--gpu A100",
        "--swiglu", "--vocab-size 50000", "--global-batch-size 128",
    ):  # fmt: skip
        assert table(flags) != usual, flags
    assert table("--gpus-per-node 1 --inter-node-bandwidth 0.1") != usual


def test_8_bit_products_are_counted(main, capsys):
    """Their weights, and the flags of the plan; of how many blocks is said by flags as well."""

    def run(flags):
        large = "--hidden-size 4096 --gpus 1 --micro-batch-size 1 --top 1 "
        assert main((SMALL + large + flags).split()) == 0
        return capsys.readouterr().out

    fp8 = "--fp8-format hybrid"
    plain, all_blocks, some = run(""), run(fp8), run(f"{fp8} --first-last-layers-bf16")
    tables = [out.split("layouts:\n\n")[1].split("\n\n")[0] for out in (plain, all_blocks, some)]
    assert len(set(tables)) == 3
    note = "8-bit products count in memory, not in time"
    assert note in all_blocks and note not in plain
    assert plain.splitlines()[-1] + f" {fp8}" == all_blocks.splitlines()[-1]
    assert some.rstrip().endswith(f"{fp8} --first-last-layers-bf16")


def test_layers_of_a_pattern(main, capsys):
    """The pattern says how many layers there are, and which have experts, as in a run."""
    flags = SMALL.replace("--num-layers 8 ", "--hybrid-layer-pattern M-M*ME ")
    flags += "--position-embedding-type none --num-experts 4 --mamba-num-groups 8 "
    assert main((flags + "--mamba-state-dim 64 --gpus 1 --top 1").split()) == 0
    words = capsys.readouterr().out.splitlines()[-1]
    assert "--num-layers 6 " in words and "--hybrid-layer-pattern 'M-M*ME'" in words


def test_says_what_is_missing(main, capsys):
    flags = SMALL + "--gpus 1 --gpu-memory 0.5GiB --memory-reserve 0.1GiB"
    assert main(flags.split()) == 1
    out = capsys.readouterr().out
    assert "nothing fits" in out and "more than a GPU has available" in out
    assert "  --gpus 2\n" in out
    assert "offloading the optimizer" in out
    assert "Flags of the first" not in out and "Command of" not in out


def test_says_when_there_is_no_layout(main, capsys):
    assert main((SMALL + "--gpus 8 --micro-batch-size 65").split()) == 1
    assert "no layout exists: --global-batch-size 64" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--gpus 8 --hiden-size 3", "unknown flag --hiden-size; the nearest known flag"),
        ("--gpus 8 --zero-stage 1", "--zero-stage is a flag of pretrain_gpt.py"),
        ("", "--gpus is missing"),
        ("--gpus 8 --gpu-memory much", "--gpu-memory much: expected a size"),
        ("--gpus 8 --num-attention-heads 7", "--num-attention-heads 7 must divide"),
        ("--gpus 8 --fp16", "--fp16 contradicts --bf16"),
        ("--gpus 8 --top 0", "--top 0 must be positive"),
        ("--gpus 8 --train-tokens lots", "--train-tokens: invalid int value: 'lots'"),
        ("--gpus 8 --train-tokens 0", "--train-tokens 0 is less than one step takes: 64 samples"),
        ("--gpus 8 --train-tokens 1.5", "--train-tokens: 1.5 is not an integer"),
        ("--gpus 8 --train-tokens 9", "--train-tokens 9 is less than one step takes: 64 samples"),
        ("--gpus 8 --gpu-hour-price -1", "--gpu-hour-price -1.0 must not be negative"),
        ("--gpus 8 --gpu H1000", "H1000"),
        ("--gpus 8 --model llama-8b", "llama-8b"),
        ("--gpus 8 --model gpt2 --load x", "--model gpt2, --load x: give one of the two"),
        ("--gpus 8 --load no-such-folder", "no-such-folder"),
        ("--gpus 8 --fp8-format hybrid --ffn-hidden-size 8", "--ffn-hidden-size 8 is 8"),
    ],
)
def test_bad_command_lines(main, flags, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main((SMALL + flags).split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--vocab-size", "--num-layers"])
def test_what_is_needed(main, flag, capsys):
    words = SMALL.split()
    place = words.index(flag)
    with pytest.raises(SystemExit):
        main([*words[:place], *words[place + 2 :], "--gpus", "8"])
    assert f"{flag}" in capsys.readouterr().err


def test_published_tables(main, capsys):
    assert main(["--like-table"]) == 0
    out = capsys.readouterr().out
    for name in ("22B", "175B", "530B", "1T", "1.7B", "1008.0B"):
        assert sum(line.startswith(f"{name} ") for line in out.splitlines()) >= 1
    published = re.findall(r"selective.* (\S+%)  +\S+%  +\S+\n", out)
    assert published == ["43.7%", "52.8%", "57.0%", "57.0%"]
    assert re.search(r"^175B .* 1024 +1536 +138 +\d+ +32\.00 ", out, re.MULTILINE)
    assert "4 + 16/d" in out and "6 + 12/d" in out and "8 + 8/d" in out
    assert "arXiv:2205.05198" in out and "arXiv:2104.04473" in out


QUESTION = "--gpus 8 --gpu H100 --model llama-7b --seq-length 8192 --train-tokens 1T --top 1"


def printed_command(out):
    text = out.split("Command of the first:\n")[1].replace("\\\n", " ")
    return shlex.split(text)


def test_a_question_is_answered_with_time_cost_and_a_command(main, capsys):
    """Against the sum by hand, and the trainer's own reading of the command."""
    assert main(QUESTION.split()) == 0
    out = capsys.readouterr().out
    row = out.split("layouts:\n\n")[1].splitlines()[1].split()
    assert row[0] == "dp8-zero1-bf16"
    seconds = float(row[10])
    steps = int(1e12 // (512 * 8192))
    days, hours = (
        float(re.search(rf"([\d.,]+) {unit}", out)[1].replace(",", ""))
        for unit in ("days", "GPU hours")
    )
    assert days == pytest.approx(steps * seconds / 86400, rel=1e-3)
    assert hours == pytest.approx(8 * 24 * days, rel=1e-3)
    dollars = float(re.search(r"\$([\d,]+) at --gpu-hour-price 2.5", out)[1].replace(",", ""))
    assert dollars == pytest.approx(2.5 * hours, rel=1e-3)
    assert f"{steps:,} steps" in out and "energy" in out

    words = printed_command(out)
    assert words[:4] == ["deepspeed", "--num_gpus", "8", "pretrain_gpt.py"]
    argv = [word for word in words[4:] if word not in ("--data-path", "DATA")]
    run = resolve(parser().settings(argv), world_size=8).config
    assert run.training.train_tokens == 10**12 and run.training.global_batch_size == 512
    assert (run.model.seq_length, run.model.mlp.ffn_hidden_size) == (8192, 11_008)
    assert run.engine.zero_stage == 1 and run.precision.bf16


def test_any_number_of_gpus_can_share_the_usual_batch():
    """A power of two would leave 3 GPUs layouts without data parallelism only."""
    sizes = {gpus: usual_batch(1024, gpus) for gpus in (1, 3, 8, 24, 1000)}
    assert sizes == {1: 4096, 3: 3072, 8: 4096, 24: 3072, 1000: 4000}


def test_the_command_is_of_the_plan(main, capsys):
    """Its program, adapters and teacher; words are quoted, and a length that is missing stays."""
    teacher = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 512"
    bert = f"--gpus 1 --model-family bert {teacher} --seq-length 32 --global-batch-size 4 --bf16"
    assert main(f"{bert} --train-tokens 1e4 --top 1".split()) == 0
    assert printed_command(capsys.readouterr().out)[3] == "pretrain_bert.py"
    scaling = '{"rope_type": "linear", "factor": 4.0}'
    flags = "--gpus 1 --model llama-7b --num-layers 2 --global-batch-size 4 --lora --top 1"
    assert main([*flags.split(), "--rope-scaling", scaling]) == 0
    words = printed_command(capsys.readouterr().out)
    assert words[words.index("--rope-scaling") + 1] == scaling
    assert words[words.index("--train-tokens") + 1] == "TOKENS" and "--lora" in words


def parser():
    return FlagParser(*FLAG_CLASSES)


PUBLISHED = {
    "gpt2": 0.1244, "gpt2-medium": 0.355, "gpt2-large": 0.774, "gpt2-xl": 1.558,
    "gpt3-175b": 174.6, "llama-7b": 6.738, "llama-13b": 13.016, "llama-70b": 68.977,
    "llama3-1b": 1.236, "llama3-3b": 3.213, "llama3-8b": 8.030, "llama3-70b": 70.554,
    "llama3-405b": 405.85, "mistral-7b": 7.242, "qwen2.5-0.5b": 0.494, "qwen2.5-1.5b": 1.544,
    "qwen2.5-7b": 7.616, "qwen2.5-32b": 32.764, "qwen2.5-72b": 72.706,
}  # fmt: skip
"""Billions of parameters, as the files of the published models have them."""


@pytest.mark.parametrize("name", MODELS)
def test_models_known_by_name_have_the_published_number_of_parameters(name):
    values = dict(MODELS[name])
    vocabulary = values.pop("vocab_size")
    model = ModelFlags(**values).resolve().with_vocabulary(vocabulary, 1)
    assert model_parameters(model) / 1e9 == pytest.approx(PUBLISHED[name], rel=2e-3)


def test_a_hugging_face_folder_is_planned_by_its_config_alone(main, capsys, tmp_path):
    config = LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=1000, max_position_embeddings=512, rope_theta=50_000.0,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    assert main(f"--gpus 1 --load {tmp_path} --train-tokens 1e9 --top 1".split()) == 0
    out = capsys.readouterr().out
    with torch.device("meta"):
        expected = sum(p.numel() for p in LlamaForCausalLM(config).parameters())
    assert f"{expected / 1e9:.2f}B parameters" in out
    words = printed_command(out)
    for flag, value in (("--rotary-base", "50000"), ("--num-query-groups", "2")):
        assert words[words.index(flag) + 1].removesuffix(".0") == value
    assert words[words.index("--tokenizer-model") + 1] == "FOLDER"  # it has no tokenizer


def plan_of(seconds, **layout):
    return SimpleNamespace(
        layout=Layout(**layout), time=SimpleNamespace(total=seconds), micro_batch=1, saving=WHOLE
    )


def test_ties_go_to_the_simplest_layout():
    fastest = plan_of(1.0, pipeline=2, schedule="interleaved", chunks=4)
    cut = plan_of(1.01, tensor=2)
    simple = plan_of(1.02, zero=2, data=8)
    slow = plan_of(1.05, zero=1, data=8)
    assert simplest_first([fastest, cut, simple, slow]) == [simple, fastest, cut, slow]
    assert simplest_first([fastest, slow])[0] is fastest
