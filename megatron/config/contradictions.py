"""Combinations of model flags that are refused because they contradict each other."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from megatron.config.blocks import NORMS
from megatron.config.flags import ConfigError, ConfigResolver

CONTRADICTIONS: tuple[tuple[Callable[[Any], Any], str], ...] = (
    (
        lambda f: f.fp32_residual_connection and f.apply_residual_connection_post_layernorm,
        "--fp32-residual-connection contradicts --apply-residual-connection-post-layernorm, which "
        "adds to the output of a norm, in the dtype of the weights: leave one of them out",
    ),
    (
        lambda f: f.shared_parallel_norm and not f.parallel_residual,
        "--shared-parallel-norm needs --parallel-residual: only then do attention and MLP start "
        "from the same hidden states",
    ),
    (
        lambda f: not (f.pre_norm or f.post_norm),
        "--no-pre-norm needs --post-norm: without both, attention and MLP have no norm",
    ),
    *(
        (
            lambda f, name=name: not f.pre_norm and getattr(f, name),
            f"--no-pre-norm contradicts --{name.replace('_', '-')}, which {why}; leave one of them "
            "out",
        )
        for name, why in (
            ("apply_residual_connection_post_layernorm", "adds to the norm that it removes"),
            ("shared_parallel_norm", "shares the norm that it removes"),
            ("fp32_residual_connection", "gives attention and MLP inputs in float32"),
        )
    ),
    (
        lambda f: f.qk_l2_norm and f.qk_layernorm,
        "--qk-l2-norm contradicts --qk-layernorm, another norm of queries and keys; give one of "
        "them",
    ),
    *(
        (
            lambda f, name=name: getattr(f, name) and f.normalization != "RMSNorm",
            f"--{name.replace('_', '-')} needs --normalization RMSNorm, not {{=normalization}}",
        )
        for name in ("qk_layernorm_whole", "sub_norm")
    ),
    (
        lambda f: f.qk_layernorm_whole and f.qk_layernorm_per_head,
        "--qk-layernorm-whole contradicts --qk-layernorm-per-head; give one of them",
    ),
    *(
        (
            lambda f, name=name: getattr(f, name) and not NORMS[f.normalization].weighted,
            f"--{name.replace('_', '-')} needs a norm with a weight; {{normalization}} has none",
        )
        for name in ("apply_layernorm_1p", "fp32_residual_connection")
    ),
    (
        lambda f: f.embedding_multiplier is not None and f.scale_embeddings,
        "{embedding_multiplier} contradicts --scale-embeddings; give one of them",
    ),
    (
        lambda f: f.logits_scaling is not None and f.scale_head_input,
        "{logits_scaling} contradicts --scale-head-input; give one of them",
    ),
    (
        lambda f: f.add_mlp_bias and f.add_attention_bias,
        "--add-mlp-bias with --add-attention-bias gives all linear layers biases: leave both and "
        "--disable-bias-linear out",
    ),
    (
        lambda f: (f.num_labels is not None) != (f.head == "classification"),
        "num_labels {=num_labels}: a model has labels if its head is for classification; this one "
        "is {=head}",
    ),
    (
        lambda f: len(f.label_names) not in (0, f.num_labels),
        "label_names {=label_names}: there are {=num_labels} labels",
    ),
    (
        lambda f: f.num_tokentypes == 1 and f.bert_binary_head,
        "--num-tokentypes 1 is less than the two segments of a sample have; give 2 or more, 0 for "
        "none, or --bert-no-binary-head",
    ),
    (
        lambda f: f.parallel_residual and f.apply_residual_connection_post_layernorm,
        "--apply-residual-connection-post-layernorm contradicts --parallel-residual, where nothing "
        "is added to the output of a norm; leave one of them out",
    ),
)
"""Checks of the model flags, in order: a condition that contradictory flags satisfy, and its error
message. In a message ``{name}`` becomes the field's flag with its value, ``{=name}`` the value."""


def refuse_contradictions(flags: Any, resolver: ConfigResolver) -> None:
    """Raise ConfigError with the message of the first matching :data:`CONTRADICTIONS`, if any."""

    def shown(found: re.Match[str]) -> str:
        equals, name = found.groups()
        value = getattr(flags, name)
        if not equals:
            return resolver.show(name)
        return ", ".join(value) if isinstance(value, tuple) else str(value)

    for holds, message in CONTRADICTIONS:
        if holds(flags):
            raise ConfigError(re.sub(r"\{(=?)(\w+)\}", shown, message))
