"""Reads config.json so that no key is overlooked: what is not understood is refused."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron.checkpoint.files import CheckpointError
from megatron.config import ModelFlags
from megatron.config.flags import value_type

Names = str | tuple[str, ...]
"""A key, or several that mean the same, of which the first is written."""
Keys = Mapping[Any, str]
"""Fields of :class:`ModelFlags` by :data:`Names`; ``activation`` stands for the flags of the MLP's
activation."""

ACTIVATIONS: dict[str, dict[str, Any]] = {
    "gelu": {"bias_gelu_fusion": False},
    "gelu_python": {"bias_gelu_fusion": False},
    "gelu_new": {},
    "gelu_fast": {},
    "gelu_accurate": {},
    "gelu_pytorch_tanh": {},
    "relu": {"relu": True},
    "relu2": {"squared_relu": True},
}
"""Our flags by the name of an activation without a gate."""

GATES: dict[str, dict[str, Any]] = {
    "silu": {"glu_activation": "swiglu"},
    "swish": {"glu_activation": "swiglu"},
    "gelu_pytorch_tanh": {"glu_activation": "geglu"},
    "gelu_new": {"glu_activation": "geglu"},
    "gelu_fast": {"glu_activation": "geglu"},
}
"""Our flags by the name of a gate's activation."""

ACTIVATION_NAMES = {
    "gelu_tanh": "gelu_new",
    "gelu_erf": "gelu",
    "relu": "relu",
    "squared_relu": "relu2",
    "swiglu": "silu",
    "geglu": "gelu_pytorch_tanh",
}
"""The name that is written for each activation of :class:`MLPConfig`."""

_NULLABLE = (
    "num_query_groups", "kv_channels", "sliding_window", "attn_logit_softcapping",
    "final_logit_softcapping",
)  # fmt: skip
"""Fields whose key can be null whatever its default is."""

_HARMLESS = frozenset(
    # Who wrote the file, and the dtype of the weights.
    "_name_or_path architectures auto_map dtype model_type name_or_path torch_dtype "
    "transformers_version unsloth_fixed unsloth_version "
    # Tokens and generation.
    "bos_token_id decoder_start_token_id eos_token_id pad_token_id sep_token_id unk_token_id "
    "bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping "
    "encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id "
    "forced_eos_token_id length_penalty max_length min_length no_repeat_ngram_size "
    "num_beam_groups num_beams num_return_sequences prefix remove_invalid_values "
    "repetition_penalty suppress_tokens temperature tf_legacy_loss tokenizer_class top_k top_p "
    "typical_p use_bfloat16 use_cache cache_implementation forced_decoder_ids max_new_tokens "
    "min_new_tokens renormalize_logits add_bos_token add_eos_token model_max_length padding_side "
    "tokenizer_model_max_length tokenizer_padding_side "
    # Other tasks than language modelling.
    "_num_labels classifier_dropout finetuning_task id2label label2id num_labels problem_type "
    "task_specific_params summary_activation summary_first_dropout summary_proj_to_labels "
    "summary_type summary_use_proj "
    # How transformers and other programs return and compute, not what.
    "_attn_implementation _attn_implementation_autoset _attn_implementation_internal "
    "attn_implementation _experts_implementation _flash_attn_2_enabled use_flash_attention_2 "
    "transformers.js_config pretraining_tp loss_type keys_to_ignore_at_inference _commit_hash "
    "chunk_size_feed_forward gradient_checkpointing "
    "output_attentions output_hidden_states return_dict return_dict_in_generate output_scores "
    "output_past torchscript".split()
)
"""Keys that say nothing about the network."""


class HFConfigReader:
    """The keys of a config.json. A key that the file lacks has the default of the model's
    configuration class in `transformers`, which is imported only then, or else of ``defaults``."""

    def __init__(
        self,
        content: dict[str, Any],
        path: Path,
        title: str,
        model_type: str,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.content, self.path, self.title = content, path, title
        self._model_type = model_type
        self._defaults = dict(defaults or {})
        self._understood: set[str] = set()

    def fields(self, keys: Keys, activations: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """The values of keys that mean the same as a flag, by field of :class:`ModelFlags`. Raises
        CheckpointError if a value has the wrong type."""
        hints, found = typing.get_type_hints(ModelFlags), dict[str, Any]()
        for names, field in keys.items():
            if field == "activation":
                found |= self.choice(names, activations)
                continue
            kind, value = value_type(hints[field]), self._value(names)
            if value is None and (field in _NULLABLE or self.default(names) is None):
                found[field] = None
            else:
                read = {int: self.whole, float: self.number, bool: self.flag}[kind]
                found[field] = read(names)
        return found

    def whole(self, names: Names) -> int:
        """A positive integer."""
        value = self._value(names)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.refuse(names, value, "expected a positive integer")
        return value

    def optional_whole(self, names: Names) -> int | None:
        """A positive integer, or null."""
        return None if self._value(names) is None else self.whole(names)

    def number(self, names: Names) -> float:
        """A number."""
        value = self._value(names)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(names, value, "expected a number")
        return float(value)

    def flag(self, names: Names) -> bool:
        """true or false."""
        value = self._value(names)
        if not isinstance(value, bool):
            self.refuse(names, value, "expected true or false")
        return value

    def choice(self, names: Names, known: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """The flags that one of several names stands for."""
        value = self._value(names)
        if not isinstance(value, str) or value not in known:
            self.refuse(names, value, f"expected one of {', '.join(known)}")
        return known[value]

    def table(self, name: str) -> dict[str, Any]:
        """An object; empty where it is null or absent."""
        value = self._value(name) if name in self.content else None
        if value is not None and not isinstance(value, dict):
            self.refuse(name, value, "expected an object")
        return value or {}

    def names(self, name: str) -> list[str] | None:
        """A list of strings; None where it is null or absent."""
        value = self._value(name) if name in self.content else None
        if value is not None and not (
            isinstance(value, list) and all(isinstance(word, str) for word in value)
        ):
            self.refuse(name, value, "expected a list of names")
        return value

    def only(self, name: str, allowed: Collection[Any], why: str) -> None:
        """Refuses other values than these; an absent key is fine."""
        if name in self.content and self._value(name) not in allowed:
            self.refuse(name, self.content[name], why)

    def unused(self, *names: str) -> None:
        """Accepts keys that do not change what such a model computes."""
        self._understood.update(names)

    def refuse(self, names: Names, value: Any, why: str) -> NoReturn:
        """Raises a CheckpointError that says which value of which file is wrong."""
        name = names if isinstance(names, str) else names[0]
        text = f"{value!r}"
        text = text if len(text) < 200 else text[:197] + "..."
        raise CheckpointError(f"{self.path}: {name} is {text} ({self.title}): {why}")

    def refuse_the_rest(self) -> None:
        """Refuses keys that nothing has read, unless they say nothing. Raises CheckpointError
        naming them."""
        unknown = [
            f"{name} = {value!r}"
            for name, value in self.content.items()
            if name not in self._understood | _HARMLESS
            and value is not None
            and value is not False
            and value not in ([], {}, "")
        ]
        if unknown:
            raise CheckpointError(
                f"{self.path}: the effect of {', '.join(unknown)} on a model ({self.title}) is not "
                "known; remove keys that do not change what it computes"
            )

    def default(self, names: Names) -> Any:
        """The value of a key that the file lacks. Raises CheckpointError if the installed
        `transformers` does not know such models."""
        for name in _tuple(names):
            if name in self._defaults:
                return self._defaults[name]
        import transformers  # takes seconds
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        name, model_type = _tuple(names)[0], self._model_type
        if model_type not in CONFIG_MAPPING:
            raise CheckpointError(
                f"{self.path} has no {name}, and transformers {transformers.__version__} has no "
                f"default for it ({model_type}); install a newer version, or add the key"
            )
        # The signature has the defaults as they are before others are derived from them.
        known = CONFIG_MAPPING[model_type]
        parameters = inspect.signature(known).parameters
        return parameters[name].default if name in parameters else getattr(known(), name, None)

    def _value(self, names: Names) -> Any:
        self._understood.update(_tuple(names))
        present = [name for name in _tuple(names) if name in self.content]
        if not present:
            return self.default(names)
        value = self.content[present[0]]
        for other in present[1:]:
            if self.content[other] != value:
                raise CheckpointError(
                    f"{self.path}: {present[0]} is {value!r}, but {other} is "
                    f"{self.content[other]!r}; they mean the same"
                )
        return value


def _tuple(names: Names) -> Sequence[str]:
    return (names,) if isinstance(names, str) else names
