"""Proposals for tokens, rate and batch, against the publications' formulas by hand."""

import json

import pytest
from fuzz.readers.checkpoints import CONFIG
from tool_modules import load_program

from megatron.apps.planning.proposals import TrainingSizes, proposal_rows, rules
from megatron.config import ModelFlags


def test_rules_against_published_numbers():
    """A billion parameters and 1e11 tokens; DeepSeek's fits at 1e20 FLOPs."""
    kaplan, deepseek, step_law = rules(TrainingSizes(10**9, 10**9, 10**11))
    assert step_law.rate == pytest.approx(1.79 * 1e9**-0.713 * 1e11**0.307)
    assert step_law.batch == pytest.approx(0.58 * 1e11**0.571)
    assert 3e-4 < kaplan.rate < 4e-4
    at_1e20 = rules(TrainingSizes(10**9, 10**9, round(1e20 / 6e9)))[1]
    assert at_1e20.rate == pytest.approx(9.86e-4, rel=0.01)
    assert at_1e20.batch == pytest.approx(1.02e6, rel=0.01)
    assert deepseek.rate < at_1e20.rate and deepseek.batch > at_1e20.batch


def test_sizes_of_a_model():
    """GPT-2 small: 124 million with its tied embedding, 85 million in blocks and positions."""
    model = ModelFlags(
        num_layers=12, hidden_size=768, num_attention_heads=12, seq_length=1024,
        max_position_embeddings=1024, position_embedding_type="learned_absolute",
    ).resolve().with_vocabulary(50257)  # fmt: skip
    sizes = TrainingSizes.of(model, None)
    assert sizes.whole == 124_439_808 and sizes.inner == 124_439_808 - 50257 * 768
    assert sizes.tokens == 20 * sizes.whole
    lines, table = proposal_rows(model, 10**10)
    assert "80.4 for each parameter" in lines[1] and len(table) == 4
    assert table[1][1] == ""  # Kaplan's rule has no batch


def test_the_text_model_within_a_folder_is_planned(tmp_path, capsys):
    """The same proposals as for a folder of that model alone, and no number of GPUs that is 0."""
    main, printed = load_program("tools/plan.py").main, []
    for name, content in (
        ("text", CONFIG),
        ("whole", {"model_type": "llava", "text_config": CONFIG}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
        assert main(["--propose", "--load", str(tmp_path / name)]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and "Kaplan" in printed[0]
    with pytest.raises(SystemExit):
        main(["--propose", "--load", str(tmp_path / "text"), "--gpus", "0"])
    assert "--gpus 0 must be positive" in capsys.readouterr().err
