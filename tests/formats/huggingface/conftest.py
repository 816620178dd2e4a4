"""Small models of transformers, all weights random, saved as transformers saves them."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, PreTrainedModel

from megatron.formats.huggingface import architecture_named

# Modules that the tests of this folder share.
sys.path.insert(0, str(Path(__file__).parent))

_CORRECTION = "e_score_correction_bias"
"""End of the names of what is added to the scores of experts in the choice."""


def model_class(model_type: str, architectures: list[str] | None = None, **_: Any) -> Any:
    """The class of `transformers` of a case."""
    named = architecture_named({"model_type": model_type}, Path(model_type)).model_class
    return getattr(transformers, architectures[0] if architectures else named)


@pytest.fixture(scope="session")
def hf_model() -> Callable[..., PreTrainedModel]:
    """Makes a model of transformers whose norms and biases are random too, so that a tensor in the
    wrong place shows."""

    def make(model_type: str, seed: int = 3, scale: float = 0.15, **settings) -> PreTrainedModel:
        tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        config = AutoConfig.for_model(model_type, **(tokens | settings))
        if settings.get("attn_logit_softcapping"):
            config._attn_implementation = "eager"
        model = model_class(model_type, **settings)(config)
        # transformers 5 ties the head of every T5.
        head = model.get_output_embeddings()
        if settings.get("tie_word_embeddings") is False and head is not None:
            head.weight = torch.nn.Parameter(head.weight.detach().clone())
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            corrections = (
                (name, buffer)
                for name, buffer in model.named_buffers()
                if name.endswith((_CORRECTION, "layer_scalar"))
            )
            for name, param in (*model.named_parameters(), *corrections):
                values = torch.randn(param.shape, generator=generator) * scale
                if name.endswith(_CORRECTION):
                    values *= 0.3  # less than the scores differ
                # Norms are the only ones that start at something else than noise or zero.
                param.copy_(values + 1.0 if bool((param == 1).all()) else values)
            if settings.get("tie_word_embeddings") is False and hasattr(model, "cls"):
                # One bias by two names; transformers 5 uses the second then.
                model.cls.predictions.bias.copy_(model.cls.predictions.decoder.bias)
            elif settings.get("tie_word_embeddings") is False and hasattr(model, "roberta"):
                model.lm_head.bias.copy_(model.lm_head.decoder.bias)
        return model.eval()

    return make


@pytest.fixture
def hf_folder(tmp_path, hf_model) -> Callable[..., Path]:
    """Saves such a model."""

    def save(model_type: str, name: str = "theirs", **settings) -> Path:
        hf_model(model_type, **settings).save_pretrained(tmp_path / name)
        return tmp_path / name

    return save
