"""Flags of preferences: those that a loss does not depend on are refused."""

import pytest

from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, resolve
from megatron.features.preference.flags import PREFERENCES, PreferenceConfig

MINIMAL = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 "
    "--train-iters 1 --lr 1e-3"
)


def resolved(flags):
    settings = FlagParser(*FLAG_CLASSES).settings(f"{MINIMAL} {flags}".split())
    return resolve(settings, 1).config.section(PreferenceConfig)


FLAGS = {
    "--preference-beta 0.3": set(PREFERENCES) - {"reward"},
    "--reference-checkpoint base": {"dpo", "ipo", "kto"},
    "--preference-label-smoothing 0.1": {"dpo"},
    "--preference-average-log-prob": {"dpo"},
    "--rpo-alpha 0.5": {"dpo", "ipo", "simpo"},
    "--simpo-gamma 0.5": {"simpo"},
    "--kto-desirable-weight 2": {"kto"},
    "--kto-undesirable-weight 2": {"kto"},
}


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("loss", PREFERENCES)
def test_flags_that_a_loss_does_not_depend_on(loss, flag):
    if loss in FLAGS[flag]:
        assert resolved(f"--preference {loss} {flag}") != resolved(f"--preference {loss}")
    else:
        with pytest.raises(ConfigError, match="has an effect with --preference .* only"):
            resolved(f"--preference {loss} {flag}")


def test_defaults():
    assert [resolved(f"--preference {loss}").beta for loss in ("dpo", "simpo")] == [0.1, 2.0]
    assert resolved("").preference is None
