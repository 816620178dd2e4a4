"""From a folder of Hugging Face by a run with --lora to folders of peft and Hugging Face."""

import shutil

import pytest
import torch
from generation_models import PROMPTS, save_theirs, their_model
from tool_modules import load_program

from megatron.apps.parity.runs import train
from megatron.checkpoint.source import open_checkpoint

pytestmark = pytest.mark.proof
peft = pytest.importorskip("peft", reason="the exports are loaded with peft")

RUN = (
    "--use-checkpoint-args --tokenizer-type NullTokenizer --vocab-size 60 --mock-data "
    "--seq-length 16 --micro-batch-size 1 --global-batch-size 4 --train-iters 3 --lr 3e-2 "
    "--num-workers 0 --eval-iters 0 --peak-tflops 1 --log-interval 1000 --lora --lora-rank 3 "
    "--lora-alpha 6 --use-dora --lora-targets q_proj v_proj o_proj gate_proj "
    "--ema-decay 0.5"
).split()
LAYOUT = "--tensor-model-parallel-size 2 --zero-stage 1".split()


@pytest.fixture(scope="module")
def trained(pool, tmp_path_factory):
    """The folder of a run on a base of transformers."""
    place = tmp_path_factory.mktemp("trained")
    base = save_theirs(place / "base", "llama")
    flags = ["--pretrained-checkpoint", str(base), "--save", str(place / "run")]
    pool.run(2, train, [*RUN, *LAYOUT, *flags])
    return place


def test_to_peft_and_merged(trained, tmp_path, capsys):
    """transformers with peft's adapters computes what it does with the merged model, and neither is
    the base."""
    convert = load_program("tools/convert_checkpoint.py")
    for command in ("to-peft", "to-hf"):
        flags = ["--load", str(trained / "run"), "--output", str(tmp_path / command)]
        convert.main([command, *flags])
    printed = capsys.readouterr().out
    assert "read back and equal" in printed
    theirs = their_model("llama")
    tokens = torch.tensor([PROMPTS[4]])
    with torch.no_grad():
        before = theirs(tokens).logits
        adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "to-peft").eval()
        expected = adapted(tokens).logits
        merged = type(theirs).from_pretrained(tmp_path / "to-hf")(tokens).logits
    torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-5)
    assert (expected - before).abs().max() > 0.01
    ours = open_checkpoint(trained / "run")
    for name in ours.names():
        theirs_read = open_checkpoint(tmp_path / "to-peft").tensor(name)
        torch.testing.assert_close(theirs_read, ours.tensor(name), rtol=0, atol=0)


def test_averages_of_adapters(trained, tmp_path):
    """The average of the adapters is exported, alone and merged."""
    convert = load_program("tools/convert_checkpoint.py")
    for command in ("to-peft", "to-hf"):
        flags = ["--average", "exponential", "--output", str(tmp_path / command)]
        convert.main([command, "--load", str(trained / "run"), *flags])
    run, written = open_checkpoint(trained / "run"), open_checkpoint(tmp_path / "to-peft")
    for name in run.additions.names():
        average = run.additions.tensor(name, "exponential_average")
        assert torch.equal(written.additions.tensor(name), average)
        assert not torch.equal(average, run.additions.tensor(name))
    merged = open_checkpoint(tmp_path / "to-hf")
    for name in written.names():
        torch.testing.assert_close(merged.tensor(name), written.tensor(name), rtol=0, atol=1e-7)


def test_a_base_elsewhere_is_named_by_a_flag(trained, tmp_path):
    convert = load_program("tools/convert_checkpoint.py")
    shutil.copytree(trained, tmp_path / "all")
    moved = tmp_path / "all" / "run"
    (trained / "base").rename(trained / "away")
    try:
        command = ["to-peft", "--load", str(moved), "--output", str(tmp_path / "out")]
        with pytest.raises(SystemExit, match=r"is not there: name its place by --pretrained-ch"):
            convert.main(command)
        convert.main([*command, "--pretrained-checkpoint", str(tmp_path / "all" / "base")])
    finally:
        (trained / "away").rename(trained / "base")
    assert (tmp_path / "out" / "adapter_config.json").is_file()


def test_a_whole_model_has_no_adapters_to_write(trained, tmp_path):
    with pytest.raises(SystemExit, match="has a whole model, not adapters: to-hf"):
        load_program("tools/convert_checkpoint.py").main(
            ["to-peft", "--load", str(trained / "base"), "--output", str(tmp_path / "out")]
        )


def test_inspected(trained, capsys):
    assert load_program("tools/inspect_checkpoint.py").main([str(trained / "run")]) == 0
    printed = capsys.readouterr().out
    assert f"adapters of {trained / 'base'}" in printed
    assert "layers.2.attention.qkv.lora_v_b" in printed
    assert "mlp.down.weight" not in printed
