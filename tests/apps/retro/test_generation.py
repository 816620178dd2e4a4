"""Generation whose neighbours come as the text grows, against the model without pages."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from generation_models import play, same
from small_databases import CHUNK, chunk_database, nearest

from megatron.apps.generation.execution.runner import PagedRunner, page_shape
from megatron.apps.generation.execution.stages import StagedLayers
from megatron.apps.generation.request import Beams, GenerationRequest, Sampling, StopRules
from megatron.apps.generation.scheduling.engine import GenerationEngine
from megatron.apps.generation.scheduling.schedule import EngineLimits
from megatron.apps.retro.generation import ChunkNeighbors, RetrievingRunner, neighbors_read
from megatron.families import family_of
from megatron.features.retro.family import Retrieved
from megatron.model.attention_masks import AttentionMasks
from megatron.model.layer_list import LayerState

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
    "gate": {
        "retro_attention_gate": 0.3,
        "qk_layernorm": True,
        "retro_num_retrieved_chunks": 1,
        "softmax_type": "learnable",
    },
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


# The other tests have the learned positions.
@pytest.mark.parametrize(
    "kind",
    [pytest.param("learned", marks=pytest.mark.proof), *(k for k in KINDS if k != "learned")],
)
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


def test_the_neighbours_of_a_chunk_are_read_from_its_last_token_on(gpt_config, random_gpt):
    """Not before, and only until the last token of the next chunk is read."""
    config = gpt_config(**RETRO)
    model = random_gpt(config).double()
    tokens = [*range(3, 17)]

    def log_probs(changed=None):
        def search(chunks_NM, k):
            found_NK = nearest(chunks_NM, k)
            for chunk, row_K in enumerate(chunks_NM[:, 0] if changed is not None else ()):
                if row_K == tokens[changed * CHUNK]:
                    found_NK[chunk] = (found_NK[chunk] + 1) % 20
            return found_NK

        (text,) = play(made(config, model, search), [tokens], 1, chunk=5)
        return text.prompt_log_probs

    before, later = log_probs(), log_probs(1)
    # Entry i is the token i + 1, which the token i predicts.
    first = 2 * CHUNK - 1
    assert torch.equal(later[:first], before[:first])
    assert float((later - before)[first:].abs().min()) > 1e-4


def engine_of(config, model, search=nearest, limits=None):
    runner = made(config, model, search)
    return GenerationEngine(runner, SimpleNamespace(special_ids=None), limits)


def request(prompt, count, **fields):
    sampling = Sampling(greedy=True)
    return GenerationRequest(tuple(prompt), StopRules(count), sampling, logprobs=0, **fields)


def test_prompts_share_their_neighbours(gpt_config, random_gpt):
    """A page that another request has filled has its neighbours, too, which are searched for
    once."""
    config = gpt_config(**RETRO)
    model, searched = random_gpt(config), []

    def search(chunks_NM, k):
        searched.extend(map(tuple, chunks_NM.tolist()))
        return nearest(chunks_NM, k)

    engine = engine_of(config, model, search)
    prompt = [*range(3, 20)]
    (first,) = engine.complete([request(prompt, 9)])
    again, longer = engine.complete([request(prompt, 9), request(prompt[:10], 3)])
    assert (first.cached, again.cached, longer.cached) == (0, 16, 8)
    assert first.scores == again.scores
    alone = engine_of(config, model).complete([request(prompt[:10], 3)])
    assert longer.scores == alone[0].scores
    assert len(searched) == len(set(searched))
    # A prompt that ends with a chunk: its last page is copied for the other.
    one, other = engine_of(config, model).complete([request(prompt[: 2 * CHUNK], 6)] * 2)
    assert one.scores == other.scores


def test_beams_have_the_probabilities_of_the_whole_model(gpt_config, random_gpt):
    """Their pages are copied while chunks are not finished."""
    config = gpt_config(**RETRO)
    model = random_gpt(config).double()
    prompt, forked = [5, 7, 9, 2, 4, 4], 0
    for count in (3, 8, 9):
        (found,) = engine_of(config, model).complete([request(prompt, count, beams=Beams(5))])
        forked += len({beam.tokens[:2] for beam in found.beams}) > 1
        for beam in found.beams:
            log_probs = forward(config, model, prompt + list(beam.tokens[:-1])).log_softmax(-1)
            after = log_probs[len(prompt) - 1 :]
            expected = after.gather(1, torch.tensor(beam.tokens)[:, None])[:, 0]
            ours = torch.tensor([score.logprob for score in beam.scores]).double()
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)
    assert forked  # in the chunk that the prompt has begun


def test_drafts_change_no_bit(gpt_config, random_gpt):
    """Also where a chunk ends with a draft that is wrong, whose neighbours are read in vain."""
    config = gpt_config(**RETRO)
    model, few = random_gpt(config), Sampling(seed=3, bias={5: 60.0, 7: 60.0})
    asked = [
        GenerationRequest(tuple(prompt), StopRules(15), few, logprobs=0)
        for prompt in ([5, 7, 7], [5, 7] * 4, [*range(3, 11)])
    ]
    plain = engine_of(config, model).complete(asked)
    engine = engine_of(config, model, limits=EngineLimits(3, 20, 9, 3))
    for one, other in zip(engine.complete(asked), plain, strict=True):
        assert (one.tokens, one.scores) == (other.tokens, other.scores)
    assert 0 < engine.stats.accepted_tokens < engine.stats.draft_tokens


def test_without_retrieval_nothing_is_attended_to(gpt_config, random_gpt):
    """As for a batch without neighbours."""
    config = gpt_config(**RETRO)
    model = random_gpt(config).double()
    generation = family_of("retro").generation(config, None)._replace(neighbors=None)
    runner = PagedRunner(StagedLayers.alone(model, 32), config.model, generation, 40, 8)
    for text in play(runner, PROMPTS, 9, chunk=3):
        tokens = text.prompt + text.tokens[:-1]
        batch = Retrieved(torch.empty(1, 0, 0, 0, dtype=torch.int64))
        begin = LayerState(torch.tensor([tokens]), masks=AttentionMasks(), batch=batch)
        with torch.inference_mode():
            log_probs = model(begin).hidden[0, len(text.prompt) - 1 :, :61].log_softmax(-1)
        torch.testing.assert_close(text.log_probs.double(), log_probs, rtol=0, atol=1e-6)


def test_what_a_text_has_read(gpt_config):
    """The neighbours of its chunks but one that ends with the last token, which is not computed."""
    generation = family_of("retro").generation(gpt_config(**RETRO), None)
    neighbors = ChunkNeighbors(nearest, chunk_database(), generation.neighbors)
    tokens = [*range(3, 3 + 2 * CHUNK)]
    read = neighbors_read(neighbors, str, tokens)
    database, numbers_NK = neighbors.database, neighbors.of_text(tokens[:CHUNK])
    assert len(read) == (numbers_NK >= 0).sum() > 0
    for found, number in zip(read, numbers_NK[numbers_NK >= 0].tolist(), strict=True):
        dataset, document, start, stop, _ = database.table[number].tolist()
        assert dataset == 0
        assert found.piece == ("made/corpus_text_document", document, start, stop)
        assert found.text == str(database.tokens(number, 2).tolist())


def test_the_memory_of_a_page(gpt_config, random_gpt):
    config = gpt_config(**RETRO)
    model = random_gpt(config)
    generation = family_of("retro").generation(config, None)
    stages = StagedLayers.alone(model, 32)
    runner = PagedRunner(stages, config.model, generation, 30)
    pools = [*runner.memory.pools, runner.neighbors.pool, runner.neighbors.states_XPH]
    shape = page_shape(stages, config.model, CHUNK, generation.neighbors)
    assert shape.bytes * 30 == sum(pool.nbytes for pool in pools)
