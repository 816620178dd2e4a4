"""Where a run starts: from its own checkpoint, from another's weights, from converted weights."""

import contextlib
import dataclasses
import io
from pathlib import Path

import pytest
from training_jobs import TINY, train

from megatron.checkpoint.source import open_checkpoint
from megatron.formats.conversion.output import write_checkpoint

STEPS = 6
FLAGS = [
    *TINY,
    *f"--train-iters {STEPS} --lr-decay-style linear --zero-stage 1".split(),
]


@pytest.fixture
def pretrained(pool, tmp_path):
    """A run's folder of checkpoints, and the first loss of its weights."""
    save = tmp_path / "pretrained"
    pool.run(1, train, [*FLAGS, "--save", str(save)])
    return save


def printed(argv):
    """What a run prints; for the pool."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        train(argv)
    return output.getvalue()


def refused(argv):
    """The message with which a run is refused; for the pool."""
    with pytest.raises(ValueError) as caught:
        train(argv)
    return str(caught.value)


def test_pretrained_checkpoint_and_restart_are_one_command(pool, tmp_path, pretrained):
    save = ["--load", str(tmp_path / "own"), "--save", str(tmp_path / "own")]
    command = [*FLAGS, *save, "--pretrained-checkpoint", str(pretrained)]
    finetuned = pool.run(1, train, [*FLAGS, "--load", str(pretrained), "--finetune"])[0]
    first = pool.run(2, train, [*command, "--exit-interval", "2"])
    second = pool.run(2, train, command)
    losses = first[0].losses + second[0].losses
    assert first[0].iteration == 2 and len(second[0].losses) == STEPS - 2
    assert losses == pytest.approx(finetuned.losses, rel=5e-6)


def test_pretrained_checkpoint_must_be_there(pool, tmp_path):
    argv = [*FLAGS, "--pretrained-checkpoint", str(tmp_path / "typo")]
    assert "--pretrained-checkpoint" in pool.run(1, refused, argv)[0]
    argv = [*FLAGS, "--universal-checkpoint", "--load", str(tmp_path / "typo")]
    assert "--universal-checkpoint: no checkpoint" in pool.run(1, refused, argv)[0]


def test_a_checkpoint_of_another_format_does_not_stand_in_for_a_universal_one(pool, pretrained):
    argv = [*FLAGS, "--universal-checkpoint", "--load", str(pretrained)]
    message = pool.run(1, refused, argv)[0]
    assert message.startswith(f"--universal-checkpoint: --load {pretrained} has no universal")
    assert "to-universal" in message


def test_weights_alone_start_at_the_beginning(pool, tmp_path, pretrained):
    """What from-hf writes: no flag is needed, and a line says where training starts."""
    source = open_checkpoint(pretrained)
    source.state = {}
    write_checkpoint(tmp_path / "weights", source, moments=False)
    load = ["--load", str(tmp_path / "weights")]
    finetuned = pool.run(1, train, [*FLAGS, "--load", str(pretrained), "--finetune"])[0]
    assert pool.run(1, train, [*FLAGS, *load])[0].losses == finetuned.losses
    output = pool.run(1, printed, [*FLAGS, *load])[0]
    assert (
        f"weights from {tmp_path / 'weights' / 'global_step0'}; starting at iteration 0" in output
    )


def test_schedules_of_the_checkpoint(pool, tmp_path):
    flags = [*FLAGS, "--lr-warmup-fraction", "0.5", "--weight-decay", "0.3"]
    whole = pool.run(1, train, flags)[0]
    pool.run(1, train, [*flags, "--save", str(tmp_path), "--exit-interval", "3"])
    other = [*FLAGS, "--load", str(tmp_path), "--lr", "0.5", "--weight-decay", "0"]
    other += ["--min-lr", "0.2", "--lr-decay-style", "cosine"]
    rest = whole.losses[3:]
    kept = pool.run(1, train, [*other, "--use-checkpoint-opt_param-scheduler"])[0]
    assert kept.losses == rest
    assert pool.run(1, train, [*other, "--override-opt_param-scheduler"])[0].losses != rest
    message = pool.run(1, refused, [*FLAGS, "--use-checkpoint-opt_param-scheduler"])[0]
    assert "needs --load" in message


def test_schedules_of_converted_weights(pool, tmp_path, pretrained):
    """No run has trained them: nothing to load, and nothing to differ from."""
    source = open_checkpoint(pretrained)
    source.state, source.run = {}, None
    write_checkpoint(tmp_path / "weights", source, moments=False)
    argv = [*FLAGS, "--load", str(tmp_path / "weights")]
    message = pool.run(1, refused, [*argv, "--use-checkpoint-opt_param-scheduler"])[0]
    assert "does not say what schedules" in message
    assert "differs from the checkpoint's run: lr" not in pool.run(1, printed, argv)[0]


def test_damaged_random_state_is_named_on_all_ranks(pool, tmp_path):
    """DeepSpeed's folders have no checksums."""
    flags = [*FLAGS, "--checkpoint-format", "deepspeed", "--save", str(tmp_path)]
    pool.run(2, train, [*flags, "--exit-interval", "2"])
    path = tmp_path / "global_step2" / "random-00001.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    load = [*flags, "--load", str(tmp_path)]
    messages = pool.run(2, refused, load)
    for message in messages:
        assert str(path) in message and "--no-load-rng" in message
    assert messages[0].startswith("rank 1: ")
    assert pool.run(2, train, [*load, "--no-load-rng"])[0].iteration == STEPS


def test_arguments_of_no_checkpoint(pool, tmp_path):
    argv = ["--load", str(tmp_path / "typo"), "--use-checkpoint-args", "--micro-batch-size", "1"]
    assert "no checkpoint in --load" in pool.run(1, refused, argv)[0]


def test_a_missing_checkpoint_is_an_error_where_it_must_exist(pool, tmp_path):
    argv = [*FLAGS, "--load", str(tmp_path / "typo"), "--exit-on-missing-checkpoint"]
    assert "--exit-on-missing-checkpoint: no checkpoint in" in pool.run(1, refused, argv)[0]


def test_a_model_with_more_rows_than_tokens(pool, tmp_path):
    """As Qwen's have: the checkpoint's rows stay, if the user says so."""
    pool.run(1, train, [*FLAGS, "--vocab-size", "120", "--save", str(tmp_path)])
    argv = [*FLAGS, "--load", str(tmp_path), "--finetune"]
    message = pool.run(1, refused, argv)[0]
    assert "unpadded_vocab_size is 121 in the checkpoint and 100 in this run" in message
    assert "--use-checkpoint-args" in message
    rest = pool.run(1, train, [*argv, "--use-checkpoint-args", "--save", str(tmp_path / "b")])[0]
    assert len(rest.losses) == STEPS
    assert open_checkpoint(Path(tmp_path / "b")).model.vocabulary.size == 121


def test_the_architecture_of_the_weights_is_kept(pool, tmp_path, pretrained):
    """``to-hf`` writes what ``from-hf`` read, also after training from it and after a restart."""
    source = open_checkpoint(pretrained)
    source.state, source.run = {}, None
    source.model = dataclasses.replace(source.model, hf_architecture="phi3")
    write_checkpoint(tmp_path / "weights", source, moments=False)

    def origin(save):
        return open_checkpoint(tmp_path / save).model.hf_architecture

    weights = str(tmp_path / "weights")
    starts = {
        "loaded": ["--load", weights],
        "finetuned": ["--pretrained-checkpoint", weights, "--use-checkpoint-args"],
    }
    for name, flags in starts.items():
        save = ["--save", str(tmp_path / name)]
        output = pool.run(2, printed, [*FLAGS, *flags, *save, "--exit-interval", "2"])[0]
        assert origin(name) == "phi3"
        assert "hf_architecture" not in output
    save = ["--load", str(tmp_path / "loaded"), "--save", str(tmp_path / "loaded")]
    pool.run(1, train, [*FLAGS, *save])
    assert origin("loaded") == "phi3" and origin("pretrained") is None
