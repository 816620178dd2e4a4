"""tools/plan.py as people call it."""

import re

import pytest
from tool_modules import load_program

SMALL = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --vocab-size 5000 "
    "--global-batch-size 64 --bf16 "
)


@pytest.fixture(scope="module")
def main():
    return load_program("tools/plan.py").main


def test_lists_the_best(main, capsys):
    assert main((SMALL + "--gpus 8 --top 3").split()) == 0
    out = capsys.readouterr().out
    head, *rows = out.split("layouts:\n\n")[1].split("\n\n")[0].splitlines()
    assert head.split()[:3] == ["layout", "micro", "m"]
    assert len(rows) == 3
    step = head.split().index("step")
    times = [float(row.split()[step]) for row in rows]
    assert times == sorted(times)
    assert "--micro-batch-size" in out.splitlines()[-1]
    assert "--utilisation 0.6 of --peak-tflops 312" in out, "assumptions are printed"


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
        main((SMALL + "--gpus 8 --top 1 " + flags).split())
        return capsys.readouterr().out.split("layouts:\n\n")[1]

    usual = table("")
    for flags in (
        "--utilisation 0.3", "--peak-tflops 989", "--micro-batch-size 2",
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


def test_says_what_is_missing(main, capsys):
    flags = SMALL + "--gpus 1 --gpu-memory 0.5GiB --memory-reserve 0.1GiB"
    assert main(flags.split()) == 1
    out = capsys.readouterr().out
    assert "nothing fits" in out and "more than a GPU has available" in out
    assert "  --gpus 2\n" in out
    assert "offloading the optimizer" in out
    assert "Flags of the best" not in out


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
        ("--gpus 8 --fp8-format hybrid --ffn-hidden-size 8", "--ffn-hidden-size 8 is 8"),
    ],
)
def test_bad_command_lines(main, flags, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main((SMALL + flags).split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--vocab-size", "--global-batch-size", "--num-layers"])
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
