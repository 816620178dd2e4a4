"""Whether a model and a project belong together."""

from __future__ import annotations

import numpy as np

from megatron.config import ConfigError, ModelConfig
from megatron.features.retro.flags import RetrievalConfig
from megatron.features.retro.project import RetroProject
from megatron.tokenizer import Tokenizer


def check_model(model: ModelConfig, own: Tokenizer, project: RetroProject) -> None:
    """Raises ConfigError if a model, whose ``own`` tokenizer this is, does not read the tokens, or
    the chunks, of a project with a database."""
    where, tokenizer = project.config_file, project.tokenizer
    if tokenizer.vocab_size != model.vocabulary.size:
        raise ConfigError(
            f"the model has a vocabulary of {model.vocabulary.size} tokens, and the tokenizer of "
            f"{where} has {tokenizer.vocab_size}: name the project of the model's training "
            "(--retro-project-dir)"
        )
    length = model.part(RetrievalConfig).retro_gpt_chunk_length
    if model.part(RetrievalConfig).retro_add_retriever and length != project.chunk_length:
        raise ConfigError(
            f"the model reads the neighbours of chunks of {length} tokens, and those of {where} "
            f"have {project.chunk_length} (retro_gpt_chunk_length): name the project of the "
            "model's training (--retro-project-dir)"
        )
    text = tokenizer.detokenize(project.database().tokens(np.zeros(1, np.int64), 1)[0].tolist())
    if own.tokenize(text) != tokenizer.tokenize(text):
        raise ConfigError(
            f"the tokenizer of {where} splits text otherwise than the model's: name the project of "
            "the model's training (--retro-project-dir)"
        )
