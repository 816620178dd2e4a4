"""Whether a model and a project belong together."""

from __future__ import annotations

from megatron.config import ConfigError, ModelConfig
from megatron.data.kinds.retro.project import RetroProject
from megatron.tokenizer import Tokenizer


def check_model(model: ModelConfig, project: RetroProject, tokenizer: Tokenizer) -> None:
    """Raises ConfigError if a model does not read the tokens, or the chunks, of a project with this
    tokenizer."""
    where = project.config_file
    if tokenizer.vocab_size != model.vocabulary.size:
        raise ConfigError(
            f"the model has a vocabulary of {model.vocabulary.size} tokens, and the tokenizer of "
            f"{where} has {tokenizer.vocab_size}: name the project of the model's training "
            "(--retro-project-dir)"
        )
    length = model.retrieval.retro_gpt_chunk_length
    if model.retrieval.retro_add_retriever and length != project.chunk_length:
        raise ConfigError(
            f"the model reads the neighbours of chunks of {length} tokens, and those of {where} "
            f"have {project.chunk_length} (retro_gpt_chunk_length): name the project of the "
            "model's training (--retro-project-dir)"
        )
