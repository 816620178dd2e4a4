"""The coordinate check: powers of the width that it finds, and flat ones with muP."""

import math

import pytest

from megatron.apps.parity.coordinates import (
    LOGITS,
    ActivationSizes,
    CoordinateFlags,
    CoordinateReport,
    compare,
    measure,
    settings_of,
    slopes,
)
from megatron.config import FLAG_CLASSES, ConfigError, FlagParser
from megatron.features.width.flags import WidthConfig
from tools.coordinate_check import main

BASE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 8 --micro-batch-size 1 "
    "--global-batch-size 1 --lr 2e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 128 "
    "--num-workers 0 --peak-tflops 1 --position-embedding-type rope"
).split()


def settings(*flags):
    return FlagParser(*FLAG_CLASSES).settings([*BASE, *flags])


def test_slopes_are_the_exponents_of_powers():
    sizes = {w: {"a": 3 * w**-0.5, "b": 2.0, "c": 0.1 * w, "zero": 0.0} for w in (1, 2, 4, 8)}
    actual = slopes(sizes)
    assert [actual[name] for name in "abc"] == pytest.approx([-0.5, 0.0, 1.0])
    assert math.isnan(actual["zero"])
    report = CoordinateReport(
        *({w: ActivationSizes(first=each, changes=[each]) for w, each in sizes.items()},) * 2
    )
    assert not report.flat and "| c | +1.00 | +1.00 | +1.00 |" in report.table()


def test_wider_models_have_more_heads_of_the_same_size():
    base = settings("--ffn-hidden-size", "96", "--num-query-groups", "2", "--train-samples", "9")
    wide = settings_of(base, 4, 3, mup=True)
    values = {name: setting.value for name, setting in wide.items()}
    assert values["hidden_size"] == 128 and values["num_attention_heads"] == 16
    assert values["ffn_hidden_size"] == 384 and values["num_query_groups"] == 8
    assert values["mup_base_hidden_size"] == 32 and values["mup_base_head_dim"] == 8
    assert values["train_iters"] == 3 and "train_samples" not in values
    assert "use_mup" not in settings_of(base, 4, 3, mup=False)


def test_wrong_flags_are_named(capsys):
    for flags, message in (
        (["--use-mup"], "--use-mup: the check compares models with and without it"),
        (["--widths", "4"], "--widths 4, --check-steps 4: give two or more"),
    ):
        assert main([*BASE, *flags]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(ConfigError, match="missing --num-attention-heads"):
        base = {n: s for n, s in settings().items() if n != "num_attention_heads"}
        settings_of(base, 2, 1, mup=True)


@pytest.mark.proof
@pytest.mark.parametrize("optimizer", ["adam", "muon", "sgd"])
def test_changes_are_flat_with_mup_and_grow_without(optimizer, tmp_path):
    flags = {
        "adam": [],
        "muon": "--optimizer muon --muon-scale-mode unit_rms_norm --muon-extra-scale-factor 0.2",
        "sgd": "--optimizer sgd --lr 0.2 --clip-grad 0",
    }[optimizer]
    report = compare(settings(*(flags.split() if flags else [])), CoordinateFlags((1, 2, 4, 8)))
    assert report.worst() < 0.2, report.table()
    rows = {name: (mup, plain) for name, mup, plain, _ in report.rows()}
    assert abs(rows["layers.1"][1]) > 0.3 and LOGITS in rows
    report.draw(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.proof
def test_logits_grow_without_their_multiplier(monkeypatch):
    """Breaks the rule on purpose: what the check is for."""
    right = WidthConfig.multipliers

    def wrong(self, model):
        return right(self, model) | {"logits_scaling": None}

    monkeypatch.setattr(WidthConfig, "multipliers", wrong)
    sizes = {w: measure(settings_of(settings(), w, 3, mup=True)) for w in (1, 4, 8)}
    assert slopes({w: each.changes[-1] for w, each in sizes.items()})[LOGITS] > 0.4
