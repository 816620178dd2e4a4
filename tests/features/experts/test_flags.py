"""Flags of experts: patterns of layers, both programs' spellings, what is refused and why."""

import dataclasses

import pytest

from megatron.apps.parity.layouts import flags_for, parse_layout
from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, RunConfig, resolve
from megatron.config.layouts import refusal
from megatron.config.patterns import every_first, layer_pattern
from megatron.engine.deepspeed_json import complete, merge
from megatron.families import family_of, refuse_unused
from megatron.features.experts.flags import ExpertsConfig
from megatron.features.experts.resolve import DEEPSPEED_FLAGS

BASE = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --lr 1e-3 "
    "--micro-batch-size 2 --train-iters 4"
)
PARSER = FlagParser(*FLAG_CLASSES)
MDS = (
    "--moe-expert-parallel-size 1 --moe-loss-coeff 0.01 --moe-train-capacity-factor 1.0 "
    "--moe-eval-capacity-factor 1.0 --moe-min-capacity 4 --create-moe-param-group"
)
"""Flags that Megatron-DeepSpeed's scripts add to --num-experts."""


def resolved(words, processes=1):
    return resolve(PARSER.settings(f"{BASE} {words}".split()), processes)


def part(words, processes=1):
    return resolved(words, processes).config.model.part(ExpertsConfig)


def refused(words, processes=1):
    with pytest.raises(ConfigError) as raised:
        resolved(words, processes)
    return str(raised.value)


@pytest.mark.parametrize(
    "text, layers",
    [
        ("1", [1, 1, 1, 1, 1, 1]),
        ("2", [1, 0, 1, 0, 1, 0]),
        ("([0]*2+[1]*4)", [0, 0, 1, 1, 1, 1]),
        ("[0]+[1,0]*2+[1]", [0, 1, 0, 1, 0, 1]),
        ("3*[1,0]", [1, 0, 1, 0, 1, 0]),
    ],
)
def test_patterns_are_those_of_python(text, layers):
    """As Megatron-LM's ``eval`` of the same text, which nothing here does."""
    value = eval(text)
    expected = value if isinstance(value, list) else [int(i % value == 0) for i in range(6)]
    blocks = layer_pattern("--moe-layer-freq", text, 6, every_first)
    assert list(blocks) == list(map(bool, layers)) == list(map(bool, expected))


@pytest.mark.parametrize(
    "text",
    [
        "0", "-1", "[1]*5", "[1]*7", "[2]*6", "[1]*-1", "[[1]]*6", "True", "1.5", "'1'", "abc", "",
        "__import__('os').abort()", "[1 for _ in range(6)]", "[0]*10**9", "[1]*(10**9)", "[[]]*6",
        "(" * 5000, "[1]" + "+[1]" * 5000, "[1]*" * 5000 + "1", "\0", "[1]*6 if 1 else 2", "6//1",
    ],
)  # fmt: skip
def test_other_patterns_are_refused(text):
    with pytest.raises(ConfigError, match="^--moe-layer-freq ") as raised:
        layer_pattern("--moe-layer-freq", text, 6, every_first)
    assert "expected" in str(raised.value) and len(str(raised.value)) < 400


@pytest.mark.parametrize(
    "words, layers",
    [
        ("--num-experts 8", (8, 8, 8, 8)),
        ("--num-experts 8 --moe-layer-freq 3", (8, 0, 0, 8)),
        ("--num-experts 8 --moe-layer-freq [0]*3+[1]", (0, 0, 0, 8)),
        ("--num-experts 8 --expert-interval 2", (0, 8, 0, 8)),
        ("--num-experts 8 --expert-interval 3", (0, 0, 8, 0)),
        ("--num-experts 8 --topk 1", (0, 8, 0, 8)),
        ("--num-experts 8 --topk 1 --moe-layer-freq 1", (8, 8, 8, 8)),
        ("--num-experts 8 --topk 1 --expert-interval 1", (8, 8, 8, 8)),
        ("--num-experts 8 16 --expert-interval 2 --mlp-type residual", (0, 8, 0, 16)),
        ("--num-experts 2 4 6 8", (2, 4, 6, 8)),
        ("--num-experts 1 4 --moe-layer-freq [1,1,0,0]", (0, 4, 0, 0)),
        ("--num-experts 1", ()),
        ("--num-experts 0", ()),
        ("", ()),
    ],
)
def test_layers_with_experts(words, layers):
    config = part(words)
    assert config.layer_experts == layers
    assert config.layers == sum(n > 0 for n in layers)
    assert [config.experts_of(i) for i in range(4)] == list(layers or [0] * 4)
    assert config.idle == (not layers)


def test_a_bare_number_is_megatrons():
    config = part("--num-experts 8")
    assert (config.moe_gate, config.moe_router_topk) == ("megatron", 2)
    assert config.moe_aux_loss_coeff == (0.0,) and config.moe_expert_capacity_factor is None
    assert config.moe_ffn_hidden_size == 64
    assert config.loss_weights == {"load_balancing_loss": 0.0, "z_loss": 0.0}
    assert not config.draws


@pytest.mark.parametrize("flag", DEEPSPEED_FLAGS)
def test_a_flag_of_megatron_deepspeed_brings_its_defaults(flag):
    """Defaults of ``megatron/arguments.py`` at 4efb479d."""
    values = {
        "--topk": "1", "--moe-loss-coeff": "0.1", "--moe-train-capacity-factor": "1.0",
        "--moe-eval-capacity-factor": "1.0", "--moe-min-capacity": "4", "--expert-interval": "2",
        "--mlp-type": "standard", "--moe-expert-parallel-size": "1",
    }  # fmt: skip
    config = part(f"--num-experts 8 {flag} {values.get(flag, '')}")
    expected = ExpertsConfig(
        num_experts=(8,), expert_interval=2, layer_experts=(0, 8, 0, 8), moe_ffn_hidden_size=64,
        moe_gate="deepspeed", moe_router_topk=1, moe_aux_loss_coeff=(0.1,),
        moe_expert_capacity_factor=1.0, moe_eval_capacity_factor=1.0, moe_min_capacity=4,
        moe_token_dropping=flag != "--disable-moe-token-dropping",
        moe_top2_2nd_expert_sampling=flag != "--disable-moe-top2-2nd-expert-sampling",
    )  # fmt: skip
    assert config == expected
    assert config.draws == (flag != "--disable-moe-token-dropping")


@pytest.mark.parametrize(
    "deepspeed, megatron",
    [
        ("--topk 2", "--moe-aux-loss-coeff 0.1"),
        ("--moe-loss-coeff 0.1", "--moe-router-topk 2"),
        ("--moe-min-capacity 4", "--moe-router-score-function sigmoid"),
        ("--expert-interval 2", "--moe-router-pre-softmax"),
        ("--moe-expert-parallel-size 1", "--moe-expert-capacity-factor 1.0"),
    ],
)
def test_flags_of_both_programs_need_a_gate(deepspeed, megatron):
    message = refused(f"--num-experts 8 {deepspeed} {megatron}")
    assert deepspeed.split()[0] in message and megatron.split()[0] in message
    assert "--moe-gate megatron or --moe-gate deepspeed" in message
    config = part(f"--num-experts 8 {deepspeed} {megatron} --moe-gate megatron")
    assert config.moe_gate == "megatron" and config.moe_router_topk == 2


def test_one_value_under_two_names(capsys):
    for words in (
        "--topk 2 --moe-router-topk 3", "--moe-loss-coeff 0.1 --moe-aux-loss-coeff 0.2",
        "--moe-train-capacity-factor 1 --moe-expert-capacity-factor 2",
        "--moe-expert-parallel-size 1 --expert-model-parallel-size 2",
    ):  # fmt: skip
        with pytest.raises(SystemExit):
            resolved(f"--num-experts 8 {words}")
        first, _, second, _ = words.split()
        message = capsys.readouterr().err
        assert f"{first} " in message and f" and {second} " in message
        assert "set the same thing; give one of them" in message


def test_a_capacity_that_changes_nothing_is_noted():
    words = "--num-experts 8 --topk 1 --moe-eval-capacity-factor 2.0"
    assert not any("capacity" in note for note in resolved(words).notes)
    notes = resolved(f"{words} --disable-moe-token-dropping --moe-min-capacity 8").notes
    for flag in ("--moe-eval-capacity-factor 2.0", "--moe-min-capacity 8"):
        (note,) = [note for note in notes if note.startswith(f"{flag} changes nothing without")]
        assert note.endswith(", or with --disable-moe-token-dropping")
    notes = resolved("--num-experts 8 --moe-gate deepspeed --moe-token-drop-policy position").notes
    assert any(note.endswith("and --moe-gate megatron") for note in notes)


def test_a_negative_capacity_is_none_in_every_gate():
    for gate in ("megatron", "deepspeed"):
        words = f"--num-experts 8 --moe-gate {gate} --moe-expert-capacity-factor"
        assert part(f"{words} 2.0").moe_expert_capacity_factor == 2.0
        assert part(f"{words} -1").moe_expert_capacity_factor is None


REFUSED = {
    "--num-experts 8 --moe-router-topk 9": "more than the 8 experts",
    "--num-experts 8 2 8 8 --moe-router-topk 4": "more than the 2 experts",
    "--num-experts 8 --moe-router-topk 1": "--moe-router-pre-softmax",
    "--num-experts 8 8": "2 numbers for 4 layers",
    "--num-experts 8 --moe-layer-freq [0]*4": "none of 4 layers",
    "--num-experts 8 --expert-interval 5": "none of 4 layers",
    "--num-experts 8 --moe-layer-freq 2 --expert-interval 2": "from 0, the second from 1",
    "--num-experts 8 --moe-router-num-groups 4": "needs --moe-router-group-topk",
    "--num-experts 8 --moe-router-num-groups 3 --moe-router-group-topk 1": "must divide the exp",
    "--num-experts 8 --moe-router-num-groups 2 --moe-router-group-topk 4": "more than",
    "--num-experts 8 --moe-router-num-groups 8 --moe-router-group-topk 1": "have 1 of 8 experts",
    "--num-experts 8 --moe-router-num-groups 8 --moe-router-group-topk 3": "group-score max",
    "--num-experts 8 --moe-router-group-topk 2": "--moe-router-num-groups only",
    "--num-experts 8 --moe-router-enable-expert-bias": "sigmoid or sqrtsoftplus",
    "--num-experts 8 --moe-router-pre-softmax --moe-router-score-function sigmoid": "give one of",
    "--num-experts 8 --moe-expert-capacity-factor 1 --moe-router-score-function sigmoid": "compare",
    "--num-experts 8 --moe-expert-capacity-factor 1 --moe-gate sparsemixer": "drops no token",
    "--num-experts 8 --moe-expert-capacity-factor 0": "must be positive",
    "--num-experts 8 --moe-expert-capacity-factor 1 --moe-router-load-balancing-type sinkhorn": (
        "contradicts --moe-router-load-balancing-type sinkhorn"
    ),
    "--num-experts 8 --moe-aux-loss-coeff 0.1 0.2": "must have one weight for each type",
    "--num-experts 8 --moe-aux-loss-coeff -0.1": "must not be negative",
    "--num-experts 8 --moe-router-load-balancing-type aux_loss none": "cannot be combined",
    "--num-experts 8 --moe-router-load-balancing-type aux_loss aux_loss": "twice",
    "--num-experts 8 --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 1": "has none",
    "--num-experts 8 --moe-router-load-balancing-type sinkhorn --moe-gate deepspeed": "both say",
    "--num-experts 8 --moe-gate deepspeed --moe-router-score-function sigmoid": "its own",
    "--num-experts 8 --moe-apply-probs-on-input": "one expert per token",
    "--num-experts 8 --moe-shared-expert-gate": "--moe-shared-expert-intermediate-size only",
    "--num-experts 8 --moe-router-bias-update-rate 0.1": "--moe-router-enable-expert-bias only",
    "--num-experts 8 --mlp-type residual --moe-shared-expert-intermediate-size 8": "give one of",
    "--num-experts 8 --xielu": "choose another activation",
    "--num-experts 8 -1": "must not be negative",
}


@pytest.mark.parametrize("words", REFUSED)
def test_bad_values_are_named_with_the_remedy(words):
    message = refused(words)
    assert REFUSED[words] in message
    flags = [word for word in words.split() if word.startswith("--") and word in message]
    assert flags and "None" not in message and message[0] == "-"


RANKS = {
    "--expert-model-parallel-size 4": (4, "the model has none"),
    "--num-experts 6 --expert-model-parallel-size 4": (4, "one has 6"),
    "--num-experts 4 4 4 6 --expert-model-parallel-size 4": (4, "one has 6"),
    "--num-experts 8 --expert-model-parallel-size 4": (2, "data-parallel size, 2"),
    "--num-experts 8 --expert-model-parallel-size 4 --tensor-model-parallel-size 2": (4, "size, 2"),
    "--num-experts 8 --expert-tensor-parallel-size 2": (2, "must be 1"),
    "--num-experts 8 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 "
    "--expert-model-parallel-size 3": (6, "or cut them by --expert-tensor-parallel-size 2"),
    "--num-experts 8 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 "
    "--enable-expert-tensor-parallelism": (2, "which makes it 2"),
    "--num-experts 8 --tensor-model-parallel-size 2 --moe-ffn-hidden-size 9": (2, "must divide"),
}


@pytest.mark.parametrize("words", RANKS)
def test_ranks_that_do_not_fit(words):
    processes, told = RANKS[words]
    assert told in refused(words, processes)


@pytest.mark.parametrize(
    "words, processes, axis, how",
    [
        ("", 4, 1, "cut"),
        ("--expert-model-parallel-size 2", 4, 2, "cut"),
        ("--tensor-model-parallel-size 2 --expert-model-parallel-size 2", 4, 2, "cut"),
        ("--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1", 4, 1, "whole"),
        (
            "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 "
            "--expert-model-parallel-size 4", 4, 2, "folded",
        ),
        ("--tensor-model-parallel-size 2 --moe-expert-parallel-size 1", 2, 1, "whole"),
        ("--tensor-model-parallel-size 2 --moe-expert-parallel-size 2", 2, 1, "folded"),
        (
            "--tensor-model-parallel-size 2 --moe-expert-parallel-size 2 "
            "--enable-expert-tensor-parallelism", 4, 2, "cut",
        ),
    ],
)  # fmt: skip
def test_expert_ranks_of_the_mesh(words, processes, axis, how):
    parallel = resolved(f"--num-experts 8 --ffn-hidden-size 64 {words}", processes).config.parallel
    assert (parallel.expert_axis, parallel.experts_over_tensor) == (axis, how)
    assert parallel.axes["expert"] == axis
    assert parallel.data_parallel_size * parallel.tensor_model_parallel_size == processes


@pytest.mark.parametrize(
    "name",
    ["ep2", "ep2-tp2", "ep2-pp2", "ep2-dp2-zero1", "ep2-dp4-zero3-bf16", "ep4-tp2-etp1",
     "tp2-etp1", "tp2-sp-pp2-ep2-uniform", "ep2-pp2-dualpipev"],
)  # fmt: skip
def test_a_layout_of_experts_is_what_a_run_with_its_flags_has(name):
    layout = parse_layout(name)
    assert refusal(layout) is None
    words = [*BASE.split(), *flags_for(layout), "--num-experts", "8", "--skip-train"]
    words += ["--deepspeed_config", "ds.json"]
    settings = merge(PARSER.settings(words), {}, "ds.json", layout.processes)
    config = resolve(settings, layout.processes).config.with_vocabulary(100)
    complete({}, config)
    assert config.layout({}) == layout
    assert config.parallel.expert_axis == layout.expert_axis


EVERYTHING = (
    "--num-experts 8",
    f"--num-experts 8 4 --mlp-type residual --topk 2 --disable-moe-token-dropping {MDS}",
    "--num-experts 8 --moe-gate deepspeed --moe-router-topk 2 --expert-interval 1",
    "--num-experts 8 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2 "
    "--moe-layer-freq [0]+[1]*3 --moe-shared-expert-intermediate-size 32",
    "--num-experts 8 --moe-router-load-balancing-type aux_loss global_aux_loss "
    "--moe-aux-loss-coeff 0.1 0.2 --no-moe-router-normalize --moe-router-pre-softmax",
)


@pytest.mark.parametrize("words", EVERYTHING)
def test_a_saved_configuration_is_the_same_network(words):
    config = resolved(words).config
    assert not config.model.part(ExpertsConfig).idle
    assert config.model.flags().resolve() == config.model
    assert RunConfig.from_dict(config.to_dict()) == config


def test_values_of_a_checkpoint_do_not_choose_a_gate():
    """Its names are one program's whoever saved it; a flag that is added changes that value."""
    from megatron.config import Setting

    saved = resolved("--num-experts 8 --moe-router-topk 1 --moe-router-pre-softmax").config
    flags = saved.model.flags()
    saved_settings = {
        f.name: Setting(getattr(flags, f.name), "checkpoint x")
        for f in dataclasses.fields(flags)
        if getattr(flags, f.name) != f.default and not f.metadata.get("internal")
    }
    settings = saved_settings | PARSER.settings(
        "--lr 1e-3 --micro-batch-size 2 --train-iters 4".split()
    )
    settings |= PARSER.settings(["--moe-eval-capacity-factor", "2.0"])
    config = resolve(settings, 1).config.model.part(ExpertsConfig)
    assert (config.moe_gate, config.moe_eval_capacity_factor) == ("megatron", 2.0)
    assert config.layer_experts == (8,) * 4


@pytest.mark.parametrize(
    ("words", "noted"),
    [
        ("", True),
        ("--moe-aux-loss-coeff 0.01", False),
        ("--moe-loss-coeff 0.01", False),
        ("--moe-router-load-balancing-type none", False),
        ("--moe-router-score-function sigmoid --moe-router-enable-expert-bias", False),
    ],
)
def test_experts_that_nothing_balances_are_noted(words, noted):
    notes = resolved(f"--num-experts 4 {words}").notes
    assert any("nothing balances the experts" in note for note in notes) is noted


def test_numbers_of_experts_change_nothing_in_a_dense_run():
    plain = resolved("")
    numbers = f"--topk 1 --expert-interval 2 --disable-moe-token-dropping --use-tutel {MDS}"
    for dense in ("", "--num-experts 1 --mlp-type standard"):
        result = resolved(f"{numbers} {dense}")
        assert result.config == plain.config
        assert all(
            "changes nothing without --num-experts" in note
            or "is accepted and not used" in note
            or note == "--num-experts 1: the model is dense"
            for note in result.notes
        ), result.notes
        assert len(result.notes) == (10 if dense else 9)


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_other_families_have_no_experts(family):
    planned = family_of(family)
    words = f"{BASE} --model-family {family} --decoder-seq-length 8".split()
    words = words if family == "t5" else words[:-2]

    def run(*more):
        settings = PARSER.settings([*words, *more])
        refuse_unused(settings, planned)
        return resolve(planned.complete_settings(settings), 1)

    with pytest.raises(ConfigError, match=f"--num-experts 8: models of the family {family}"):
        run("--num-experts", "8")
    result = run("--num-experts", "1", "--topk", "1")
    assert "--topk 1 changes nothing without --num-experts" in result.notes
