"""Reads config.json so that nothing in it is passed over: what is not understood is refused."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron.checkpoint.files import CheckpointError

_HARMLESS = frozenset(
    # Who wrote it, in which number format.
    "_name_or_path architectures auto_map dtype model_type name_or_path torch_dtype "
    "transformers_version unsloth_fixed unsloth_version "
    # Tokens and generation.
    "bos_token_id decoder_start_token_id eos_token_id pad_token_id sep_token_id unk_token_id "
    "bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping "
    "encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id "
    "forced_eos_token_id length_penalty max_length min_length no_repeat_ngram_size "
    "num_beam_groups num_beams num_return_sequences prefix remove_invalid_values "
    "repetition_penalty suppress_tokens temperature tf_legacy_loss tokenizer_class top_k top_p "
    "typical_p use_bfloat16 use_cache cache_implementation "
    # Other tasks than language modelling.
    "classifier_dropout finetuning_task id2label label2id num_labels problem_type "
    "task_specific_params summary_activation summary_first_dropout summary_proj_to_labels "
    "summary_type summary_use_proj "
    # How transformers returns and computes, not what.
    "_attn_implementation _attn_implementation_autoset attn_implementation "
    "chunk_size_feed_forward gradient_checkpointing "
    "output_attentions output_hidden_states return_dict return_dict_in_generate output_scores "
    "output_past torchscript".split()
)
"""Keys that say nothing about the network."""


class HFConfigReader:
    """The keys of a config.json.

    Args:
        content: what is in it.
        path: where it is, for messages.
        title: what models of this kind are called.
    """

    def __init__(self, content: dict[str, Any], path: Path, title: str) -> None:
        self.content, self.path, self.title = content, path, title
        self._understood: set[str] = set()

    def whole(self, names: str | Sequence[str], default: int) -> int:
        """A positive whole number."""
        value = self._value(names, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.refuse(names, value, "it must be a positive whole number")
        return value

    def optional_whole(self, names: str | Sequence[str], default: int | None = None) -> int | None:
        """A positive whole number, or null."""
        if self._value(names, default) is None:
            return None
        return self.whole(names, default or 0)

    def number(self, names: str | Sequence[str], default: float) -> float:
        """A number."""
        value = self._value(names, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(names, value, "it must be a number")
        return float(value)

    def optional_number(self, names: str | Sequence[str], default: float | None) -> float | None:
        """A number, or null."""
        if self._value(names, default) is None:
            return None
        return self.number(names, default or 0.0)

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            self.refuse(name, value, "it must be true or false")
        return value

    def choice(self, name: str, default: str, known: dict[str, Any]) -> Any:
        """What one of several names stands for."""
        value = self._value(name, default)
        if not isinstance(value, str) or value not in known:
            self.refuse(name, value, f"what can be represented here is {', '.join(known)}")
        return known[value]

    def table(self, name: str) -> dict[str, Any] | None:
        """An object, or null."""
        value = self._value(name, None)
        if value is not None and not isinstance(value, dict):
            self.refuse(name, value, "it must be an object")
        return value

    def names(self, name: str) -> list[str] | None:
        """A list of strings, or null."""
        value = self._value(name, None)
        if value is not None and not (
            isinstance(value, list) and all(isinstance(word, str) for word in value)
        ):
            self.refuse(name, value, "it must be a list of names")
        return value

    def only(self, name: str, allowed: Collection[Any], why: str) -> None:
        """Refuses other values than these; an absent key is fine."""
        if name in self.content and self._value(name, None) not in allowed:
            self.refuse(name, self.content[name], why)

    def unused(self, *names: str) -> None:
        """Keys that do not change what such a model computes."""
        self._understood.update(names)

    def refuse(self, names: str | Sequence[str], value: Any, why: str) -> NoReturn:
        """Says which value of which file is wrong.

        Raises:
            CheckpointError: always.
        """
        name = names if isinstance(names, str) else names[0]
        text = f"{value!r}"
        text = text if len(text) < 200 else text[:197] + "..."
        raise CheckpointError(f"{self.path}: {name} is {text} ({self.title}): {why}")

    def refuse_the_rest(self) -> None:
        """Refuses keys that nobody has asked for, unless they say nothing.

        Raises:
            CheckpointError: naming them.
        """
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
                f"{self.path}: what {', '.join(unknown)} does to a model ({self.title}) is not "
                "known here; remove what makes no difference to what it computes"
            )

    def _value(self, names: str | Sequence[str], default: Any) -> Any:
        names = (names,) if isinstance(names, str) else names
        self._understood.update(names)
        given = [name for name in names if name in self.content]
        if not given:
            return default
        value = self.content[given[0]]
        for other in given[1:]:
            if self.content[other] != value:
                raise CheckpointError(
                    f"{self.path}: {given[0]} is {value!r}, but {other} is "
                    f"{self.content[other]!r}; they mean the same"
                )
        return value
