"""Small models of transformers, all weights random, saved as transformers saves them."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

# Modules that the tests of this folder share.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def hf_model() -> Callable[..., PreTrainedModel]:
    """Makes a model of transformers whose norms and biases are random too, so that a tensor in the
    wrong place shows."""

    def make(model_type: str, seed: int = 3, scale: float = 0.15, **settings) -> PreTrainedModel:
        tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        config = AutoConfig.for_model(model_type, **(tokens | settings))
        attention = "eager" if settings.get("attn_logit_softcapping") else None
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in model.parameters():
                values = torch.randn(param.shape, generator=generator) * scale
                # Norms are the only ones that start at something else than noise or zero.
                param.copy_(values + 1.0 if bool((param == 1).all()) else values)
        return model.eval()

    return make


@pytest.fixture
def hf_folder(tmp_path, hf_model) -> Callable[..., Path]:
    """Saves such a model."""

    def save(model_type: str, name: str = "theirs", **settings) -> Path:
        hf_model(model_type, **settings).save_pretrained(tmp_path / name)
        return tmp_path / name

    return save
