"""Generation whose neighbours come as the text grows, against the model without pages."""

import numpy as np
import pytest
import torch
from generation_models import play, same
from small_databases import CHUNK, chunk_database, nearest

from megatron.families import family_of
from megatron.families.retro import Retrieved
from megatron.inference.execution.runner import PagedRunner
from megatron.inference.execution.stages import StagedLayers
from megatron.model.attention_masks import AttentionMasks
from megatron.model.layer_list import LayerState
from megatron.retro.generation import ChunkNeighbors, RetrievingRunner

RETRO = {
    "family": "retro",
    "num_layers": 4,
    "retro_add_retriever": True,
    "retro_cross_attention_layers": (2, 4),
    "retro_gpt_chunk_length": CHUNK,
    "seq_length": 40,
    "max_position_embeddings": 40,
}
KINDS = {
    "learned": {},
    "rope": {"llama": True, "num_query_groups": 2, "retro_num_neighbors": 3},
    "gate": {"retro_attention_gate": 0.3, "qk_layernorm": True, "retro_num_retrieved_chunks": 1},
}
PROMPTS = [[5, 7, 9], [1], [60, 2, 2, 2], [8, 9, 11, 3, 3, 17, 20, 1], [*range(3, 20)]]


def made(config, model, search=nearest, pages=90):
    """A runner that retrieves, and what it finds the neighbours with."""
    generation = family_of("retro").generation(config, None)
    neighbors = ChunkNeighbors(search, chunk_database(), generation.neighbors)
    stages = StagedLayers.alone(model, config.model.hidden_size)
    return RetrievingRunner(PagedRunner(stages, config.model, generation, pages), neighbors)


@torch.inference_mode()
def forward(config, model, tokens, search=nearest):
    """Logits [S, V] of one pass without pages, with the neighbours of whole chunks."""
    generation = family_of("retro").generation(config, None)
    neighbors = ChunkNeighbors(search, chunk_database(), generation.neighbors)
    whole = tokens[: len(tokens) // CHUNK * CHUNK]
    chunks_NM = np.array(whole, np.int64).reshape(-1, CHUNK)
    neighbors_BLKR = torch.from_numpy(neighbors.tokens(chunks_NM))[None]
    begin = LayerState(
        torch.tensor([tokens]), masks=AttentionMasks(), batch=Retrieved(neighbors_BLKR)
    )
    return model(begin).hidden[0, :, :61]


@pytest.mark.parametrize("kind", KINDS)
def test_against_the_model_without_pages(kind, gpt_config, random_gpt):
    """In float64; in any pieces, and the same bits alone."""
    config = gpt_config(**RETRO | KINDS[kind])
    model = random_gpt(config).double()
    texts = play(made(config, model), PROMPTS, 15, chunk=3, together=3)
    for text in texts:
        tokens = text.prompt + text.tokens[:-1]
        log_probs = forward(config, model, tokens).log_softmax(-1)
        after = len(text.prompt) - 1
        torch.testing.assert_close(text.log_probs.double(), log_probs[after:], rtol=0, atol=1e-6)
        if after:
            given = log_probs[:after].gather(1, torch.tensor(text.prompt[1:])[:, None])[:, 0]
            torch.testing.assert_close(text.prompt_log_probs, given.float(), rtol=0, atol=1e-6)
    assert same(texts, play(made(config, model), PROMPTS, 15, shuffled=False))
    other = lambda chunks_NM, k: nearest(chunks_NM + 1, k)  # noqa: E731
    changed = forward(config, model, tokens, other).log_softmax(-1)
    first = CHUNK - 1
    assert torch.equal(changed[:first], log_probs[:first])
    assert float((changed - log_probs)[first:].abs().amax(1).min()) > 1e-3
