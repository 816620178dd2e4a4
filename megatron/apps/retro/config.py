"""The flags of ``tools/retro/preprocess_data.py`` besides those of training."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.apps.retro.embedding.config import EmbedderFlags
from megatron.apps.retro.index.config import IndexFlags
from megatron.config.flags import NOT_NEGATIVE, POSITIVE, SHARE, option

TASK_SPELLINGS = {
    "query-pretraining-neighbors": "query-neighbors",
    "pretraining-query-neighbors": "query-neighbors",
}
"""Other names of tasks: of 2023, and a slip in its documentation."""


@dataclass(frozen=True, kw_only=True)
class RetroPreprocessConfig(EmbedderFlags, IndexFlags):
    """Retro: project, tasks, data of the GPT, embedder, index, neighbours."""

    retro_project_dir: str | None = option(None, aliases=("--retro-workdir",))
    """Folder of the project, which the stages fill and training reads."""
    retro_tasks: str = option("build")
    """What to do, with commas between several: db-build, index-train, index-add (index-build is
    both), query-neighbors; build is all."""
    retro_task_validate: float | None = option(None, bounds=SHARE)
    """Compute this share of the finished blocks of the tasks again and compare them bit for bit,
    instead of computing missing ones."""
    retro_block_size: int = option(100_000, bounds=POSITIVE, role="results")
    """Chunks, or samples, of a file of embeddings, codes or neighbours."""
    retro_doc_block_size: int = option(100_000, bounds=POSITIVE, role="results")
    """Documents of a file of chunks."""

    retro_gpt_chunk_length: int = option(
        64, bounds=POSITIVE, aliases=("--retro-chunk-length",), role="results"
    )
    """Tokens of a chunk."""
    retro_gpt_seq_length: int | None = option(None, derived="seq-length", bounds=POSITIVE)
    """Tokens of a sample of the GPT."""
    retro_gpt_seed: int | None = option(None, derived="seed", bounds=NOT_NEGATIVE)
    """Seed of the order of the GPT's samples."""
    retro_gpt_data_path: tuple[str, ...] = option((), derived="data-path")
    """The GPT's data; any flag that names data for training does as well."""
    retro_gpt_split: str | None = option(None, derived="split")
    """Shares of training, validation and test."""
    retro_gpt_train_samples: int | None = option(None, derived="train-samples", bounds=POSITIVE)
    """Training samples that get neighbours."""
    retro_gpt_eval_interval: int | None = option(None, derived="eval-interval", bounds=POSITIVE)
    """Steps between evaluations, which says how many validation samples get neighbours."""
    retro_gpt_eval_iters: int | None = option(None, derived="eval-iters", bounds=NOT_NEGATIVE)
    """Batches of an evaluation."""
    retro_gpt_global_batch_size: int | None = option(
        None, derived="global-batch-size", bounds=POSITIVE
    )
    """Samples of a step."""
    retro_gpt_tokenizer_type: str | None = option(None, derived="tokenizer-type")
    """Tokenizer of the GPT's data. If one of these flags is given, those without gpt are the
    embedder's."""
    retro_gpt_tokenizer_model: str | None = option(None, derived="tokenizer-model")
    """Its folder or model file."""
    retro_gpt_vocab_file: str | None = option(None, derived="vocab-file")
    """Its vocabulary file."""
    retro_gpt_merge_file: str | None = option(None, derived="merge-file")
    """Its merges file."""

    retro_query_num_neighbors_query: int = option(200, bounds=POSITIVE)
    """Chunks that are searched for, from which those of the sample's own documents are taken
    out."""
    retro_query_num_neighbors_save: int = option(20, bounds=POSITIVE)
    """Of the others, how many are kept."""

    retro_index_nfeats: int | None = option(None, note="the embedder says how wide vectors are")
    output_bert_embeddings: bool = option(False, note="a BERT that embeds chunks always does this")
    no_data_sharding: bool = option(False, note="processes share the work block by block")
