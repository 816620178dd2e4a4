"""Completes and checks the shape of the network."""

from __future__ import annotations

from megatron.config.draft import Draft, divides, not_negative, positive
from megatron.config.rope_scaling import RopeScaling, llama3_scaling


def derive_model(draft: Draft, world_size: int) -> None:
    """Completes the model's part of a configuration in place.

    Raises:
        ConfigError: naming flags, values and what would be right.
    """
    draft.require("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    positive(
        draft, "num_layers", "hidden_size", "num_attention_heads", "seq_length", "kv_channels",
        "num_query_groups", "ffn_hidden_size", "make_vocab_size_divisible_by",
        "max_position_embeddings", "norm_epsilon", "init_method_std", "final_logit_softcapping",
    )  # fmt: skip
    _heads(draft)
    _mlp(draft)
    _positions(draft)
    _rotary(draft)
    _scores(draft)
    draft.check(
        draft["parallel_residual"] or not draft["shared_parallel_norm"],
        "--shared-parallel-norm needs --parallel-residual: only then do attention and MLP start "
        "from the same hidden states",
    )
    _biases(draft)
    for name in ("attention_dropout", "hidden_dropout"):
        draft.check(0 <= draft[name] < 1, f"{draft.show(name)} must be in [0, 1)")


def _heads(draft: Draft) -> None:
    if draft["kv_channels"] is None:
        divides(draft, "num_attention_heads", "hidden_size")
        draft.put(
            "kv_channels",
            draft["hidden_size"] // draft["num_attention_heads"],
            "hidden-size / num-attention-heads",
        )
    if draft["num_query_groups"] is None:
        shared = draft["group_query_attention"]
        draft.put(
            "num_query_groups",
            1 if shared else draft["num_attention_heads"],
            "--group-query-attention without --num-query-groups" if shared
            else "num-attention-heads",
        )  # fmt: skip
    divides(draft, "num_query_groups", "num_attention_heads")
    draft.put(
        "group_query_attention",
        draft["num_query_groups"] < draft["num_attention_heads"],
        "num-query-groups < num-attention-heads",
    )


def _biases(draft: Draft) -> None:
    if not draft["add_attention_bias"]:
        return
    draft.check(
        not draft["add_bias_linear"],
        "--add-attention-bias needs --disable-bias-linear: without it all linear layers have "
        "biases",
    )
    draft.check(
        not draft["add_qkv_bias"],
        "--add-attention-bias and --add-qkv-bias contradict each other: with the second the output "
        "projection has no bias; give one of them",
    )


def _mlp(draft: Draft) -> None:
    if draft["swiglu"]:
        draft.check(
            draft["glu_activation"] in (None, "swiglu"),
            f"--swiglu contradicts {draft.show('glu_activation')}; give one of them",
        )
        draft.fill("glu_activation", "swiglu", "--swiglu")
    elif draft["glu_activation"] == "swiglu":
        draft.put("swiglu", True, "--glu-activation swiglu")
    gate = "--swiglu" if draft["swiglu"] else f"--glu-activation {draft['glu_activation']}"
    given = [gate] if draft["glu_activation"] else []
    given += [draft.flags[name] for name in ("relu", "squared_relu") if draft[name]]
    draft.check(
        len(given) < 2,
        f"{' contradicts '.join(given)}: an MLP has one activation; give one",
    )
    hidden = draft["hidden_size"]
    if draft["glu_activation"]:
        draft.fill("ffn_hidden_size", int(hidden * 8 / 3) // 64 * 64 or hidden,
                   "8/3 x hidden-size, down to a multiple of 64")  # fmt: skip
    draft.fill("ffn_hidden_size", 4 * hidden, "4 x hidden-size")


def _positions(draft: Draft) -> None:
    if draft["use_rotary_position_embeddings"]:
        draft.check(
            not draft.given("position_embedding_type")
            or draft["position_embedding_type"] == "rope",
            f"--use-rotary-position-embeddings contradicts {draft.show('position_embedding_type')}",
        )
        draft.put("position_embedding_type", "rope", "--use-rotary-position-embeddings")
    draft.fill("max_position_embeddings", draft["seq_length"], "seq-length")
    draft.check(
        draft["seq_length"] <= draft["max_position_embeddings"],
        f"{draft.show('seq_length')} is longer than {draft.show('max_position_embeddings')}",
    )
    not_negative(draft, "position_embedding_offset")
    draft.check(
        not draft["position_embedding_offset"]
        or draft["position_embedding_type"] == "learned_absolute",
        f"{draft.show('position_embedding_offset')} needs --position-embedding-type "
        f"learned_absolute, the only one with a table; it is {draft['position_embedding_type']}",
    )


def _rotary(draft: Draft) -> None:
    positive(draft, "rotary_base", "rotary_base_local", "rope_scaling_factor")
    draft.check(
        0 < draft["rotary_percent"] <= 1, f"{draft.show('rotary_percent')} must be in (0, 1]"
    )
    rope = draft["position_embedding_type"] == "rope"
    for name in ("rope_scaling", "use_rope_scaling", "rotary_base_local"):
        draft.check(
            rope or not draft[name],
            f"{draft.show(name)} needs --position-embedding-type rope; it is "
            f"{draft['position_embedding_type']}",
        )
    if not rope:
        return
    rotated = int(draft["kv_channels"] * draft["rotary_percent"])
    draft.check(
        rotated > 0 and rotated % 2 == 0,
        f"{draft.show('rotary_percent')} of {draft.show('kv_channels')} rotates {rotated} "
        "channels; an even number is needed",
    )
    if draft["use_rope_scaling"]:
        stretched = llama3_scaling(draft["rope_scaling_factor"])
        draft.fill("rope_scaling", stretched.to_json(), "--use-rope-scaling")
        draft.check(
            RopeScaling.parse(draft["rope_scaling"], rotated // 2) == stretched,
            f"--use-rope-scaling, which is {stretched.to_json()}, contradicts "
            f"{draft.show('rope_scaling')}; give one of them",
        )
    elif draft["rope_scaling"] is not None:
        RopeScaling.parse(draft["rope_scaling"], rotated // 2)


def _scores(draft: Draft) -> None:
    positive(
        draft, "sliding_window", "window_attn_skip_freq", "query_pre_attn_scalar",
        "attn_logit_softcapping",
    )  # fmt: skip
    for name in ("window_attn_skip_freq", "rotary_base_local"):
        draft.check(
            draft[name] is None or draft["sliding_window"] is not None,
            f"{draft.show(name)} has an effect with --sliding-window only",
        )
