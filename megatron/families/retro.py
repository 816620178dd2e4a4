"""Retro: a GPT that also reads the text of retrieved neighbours (Borgeaud et al. 2022)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.config import (
    ConfigError,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    Setting,
    Settings,
)
from megatron.config.kinds.fill_in_the_middle import FimConfig
from megatron.config.kinds.retro import RetroDataConfig
from megatron.data.build import Datasets
from megatron.data.gpt_batch import GPTBatch
from megatron.data.kinds.retro.batch import RetroBatch, RetroCollator, RetroSample
from megatron.data.kinds.retro.project import RetroProject
from megatron.data.kinds.retro.run_settings import cyclic_settings, project_counts, with_project
from megatron.data.kinds.retro.samples import MockRetroSamples, RetroSamples, neighbor_texts
from megatron.data.pipeline import DataPipeline
from megatron.data.samples import RepeatedSamples, SampleDataset, SampleRecipe, SampleView
from megatron.data.scored_text import ScoredText
from megatron.families import gpt
from megatron.families.family import RETRIEVAL_FLAGS, GenerationSpec, NeighborSpec
from megatron.families.gpt import GPT, GPTData
from megatron.model.layer_list import LayerCache, LayerState
from megatron.model.retro import ADDED_PARTS, encoder_travels, retro_layers
from megatron.model.spec import ModelSpec
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.tokenizer import Tokenizer


def begin(model: ModelConfig, batch: RetroBatch) -> LayerState:
    """The initial state of a micro batch: that of its text; the neighbours come in the middle."""
    return gpt.begin(model, batch.text).changed(batch=batch)


def travels(
    model: ModelConfig, state: LayerState, tp: TensorParallel, index: int
) -> dict[str, tuple[int, ...]]:
    """What crosses a stage boundary: hidden states [B, S / slices, H]; between the block that reads
    the neighbours and the last one that attends to them the encoder's output, too,
    [B, L x K x R / slices, H]."""

    def shape(samples: int, length: int) -> tuple[int, ...]:
        assert length % tp.slices == 0
        return samples, length // tp.slices, model.hidden_size

    found = {"hidden": shape(*state.hidden.shape)}
    samples, retrieved = state.batch.neighbors_BLKR.flatten(1).shape
    if retrieved and encoder_travels(model, index):
        found["encoder"] = shape(samples, retrieved)
    return found


class Retrieved(NamedTuple):
    """What the layers of a generation take of a batch, [1, C, K, R]."""

    neighbors_BLKR: Tensor


def _continue(tokens_1S: Tensor, positions_1S: Tensor, cache: LayerCache) -> LayerState:
    none = tokens_1S.new_empty(1, 0, 0, 0)
    batch = Retrieved(none if cache.neighbors is None else cache.neighbors.neighbors_BLKR)
    return LayerState(tokens_1S, position_ids=positions_1S, cache=cache, batch=batch)


def without_neighbors(text: GPTBatch) -> RetroBatch:
    """A batch whose model does not attend to retrieved text: the paper's Retro[Off]."""
    samples = text.tokens_BS.shape[0]
    return RetroBatch(text, torch.empty(samples, 0, 0, 0, dtype=torch.int64))


class RetroData(DataPipeline):
    """The data of a Retro's run: those of a GPT, with the neighbours of their chunks. Raises
    ConfigError if flags contradict the project, or something of it is missing."""

    flags = frozenset({"retro"})

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self.text = GPTData(config, tokenizer)
        if config.kind(FimConfig).fim_data:
            raise ConfigError(
                "--fim-data moves the text of samples whose neighbours are known: leave it out, or "
                "train without --retro-add-retriever"
            )
        if self._flags.retro_project_dir is None and not config.data.mock_data:
            raise ConfigError(
                "--retro-add-retriever needs --retro-project-dir, a folder of "
                "tools/retro/preprocess_data.py (or --mock-data)"
            )

    def recipe(self) -> SampleRecipe[Any]:
        return self.text.recipe()

    def collator(self) -> Callable[[Sequence[RetroSample]], RetroBatch]:
        return RetroCollator(self.text.collator())

    def mock(self, num_samples: int, part: int) -> SampleDataset[RetroSample]:
        retrieval = self.config.model.retrieval
        chunks = self.seq_length // retrieval.retro_gpt_chunk_length
        shape_LKR = (chunks, retrieval.retro_num_neighbors, retrieval.retrieved_length)
        text = self.text.mock(num_samples, part)
        return MockRetroSamples(text, shape_LKR, self.tokenizer.vocab_size, self.seed, part)

    def view(self, sample: RetroSample, length: int) -> SampleView:
        """See `DataPipeline.view`; beside it the neighbours of its chunks."""
        view = self.text.view(sample.text, length)
        if sample.chunks_LK is None:
            return view
        retrieval = self.config.model.retrieval
        chunks_LK = sample.chunks_LK[: length // retrieval.retro_gpt_chunk_length]
        retrieved = retrieval.retro_num_retrieved_chunks
        beside = neighbor_texts(self._database, chunks_LK, retrieved, self.tokenizer.detokenize)
        return view._replace(neighbors=beside)

    @property
    def _flags(self) -> RetroDataConfig:
        return self.config.kind(RetroDataConfig)

    @property
    def _repeats(self) -> bool:
        return self._flags.dataloader_type == "cyclic"

    @cached_property
    def project(self) -> RetroProject:
        """The project of the run."""
        assert self._flags.retro_project_dir is not None
        return RetroProject(self._flags.retro_project_dir)

    @cached_property
    def _database(self) -> Any:
        return self.project.database(self.tokenizer.eod)

    def _unordered(self, sample_counts: tuple[int, int, int]) -> Datasets:
        if self.config.data.mock_data:
            return super()._unordered(sample_counts)
        # The order of samples depends on their number: those of the project, whatever a run reads.
        counts = project_counts(self.project)
        read = (c if n else 0 for c, n in zip(counts, sample_counts, strict=True))
        found = super()._unordered(tuple(read))  # type: ignore[arg-type]
        train, valid, test = sample_counts
        return Datasets(
            None if found.train is None else self._with_neighbors("train", found.train, train),
            self._held_out("valid", found.valid, valid),
            self._held_out("test", found.test, test),
        )

    def _held_out(
        self, part: str, found: Mapping[str, SampleDataset[Any]], wanted: int
    ) -> dict[str, SampleDataset[RetroSample]]:
        return {name: self._with_neighbors(part, text, wanted) for name, text in found.items()}

    def _with_neighbors(
        self, part: str, text: SampleDataset[Any], wanted: int
    ) -> SampleDataset[RetroSample]:
        """The samples of a part with their neighbours, ``wanted`` of them at least."""
        table, retrieval = self.project.neighbors(part), self.config.model.retrieval
        where = f"--retro-project-dir {self.project.folder}"
        if table.kept < retrieval.retro_num_neighbors:
            raise ConfigError(
                f"--retro-num-neighbors {retrieval.retro_num_neighbors}: {where} has {table.kept} "
                "neighbours of each chunk; give fewer, or run query-neighbors again with a larger "
                "--retro-query-num-neighbors-save"
            )
        verified = self._flags.retro_verify_neighbor_count
        if verified and len(table) != len(text):
            raise ConfigError(
                f"{where} has the neighbours of {len(table)} samples for {part}, and its data have "
                f"{len(text)}: run query-neighbors again with --retro-gpt-train-samples, "
                "--retro-gpt-eval-interval, --retro-gpt-eval-iters and "
                "--retro-gpt-global-batch-size as they are in its config.json, or train with "
                "--retro-no-verify-neighbor-count"
            )
        if wanted > len(text) and verified and not self._repeats:
            raise ConfigError(
                f"the run reads {wanted} samples for {part}, of which {where} has {len(text)}: "
                "leave out --rampup-batch-size and --skip-samples, run query-neighbors with a "
                "larger --retro-gpt-train-samples, or go over them several times with "
                "--dataloader-type cyclic"
            )
        numbers = None
        if self._flags.retro_return_doc_ids:
            numbers = {prefix: number for number, prefix in enumerate(self._database.sources)}
        samples = RetroSamples(
            text,
            table,
            self._database,
            retrieval.retro_num_neighbors,
            retrieval.retro_num_retrieved_chunks,
            numbers,
        )
        return RepeatedSamples(samples, wanted) if wanted > len(text) else samples


class Retro(GPT):
    name = "retro"
    starts_from = frozenset({"gpt"})
    unused_flags = GPT.unused_flags - RETRIEVAL_FLAGS
    heads = frozenset({"lm"})

    def complete_settings(self, settings: Settings) -> Settings:
        """Those of the project of a run take the place of its flags. A program that trains Retros
        trains a GPT without a retriever, on the same samples."""
        settings = super().complete_settings(settings)
        given = settings.get("retro_project_dir")
        if given is not None:
            settings = with_project(settings, RetroProject(given.value))
        settings = cyclic_settings(settings)
        named, retriever = settings.get("family"), settings.get("retro_add_retriever")
        if retriever is not None and retriever.value:
            return settings
        if named is None or named.origin != "this program":
            return settings | {"retro_add_retriever": Setting(True, f"family {self.name}")}
        ours = {field.name for field in dataclasses.fields(RetroDataConfig)}
        kept = {name: value for name, value in settings.items() if name not in ours}
        return kept | {"family": Setting("gpt", "derived: without --retro-add-retriever")}

    def spec(self, model: ModelConfig, parallel: ParallelConfig) -> ModelSpec:
        layers = partial(retro_layers, model, parallel)
        crossing = partial(travels, model)
        return ModelSpec(layers, partial(begin, model), crossing, added_parts=ADDED_PARTS)

    def generation(self, config: RunConfig, tokenizer: Tokenizer | None) -> GenerationSpec:
        model, retrieval = config.model, config.model.retrieval
        neighbors = NeighborSpec(
            retrieval.retro_gpt_chunk_length,
            retrieval.retro_num_neighbors,
            retrieval.retrieved_length,
            tuple(number - 1 for number in retrieval.retro_cross_attention_layers),
            partial(encoder_travels, model),
        )
        longest = model.positions.max_position_embeddings
        return GenerationSpec(_continue, longest, neighbors=neighbors)

    def scored_batch(
        self,
        config: RunConfig,
        tokenizer: Tokenizer,
        texts: Sequence[ScoredText],
        pad_to: int | None = None,
    ) -> Any:
        """See :meth:`Family.scored_batch`; texts that are scored have no neighbours."""
        return without_neighbors(super().scored_batch(config, tokenizer, texts, pad_to))

    def data(self, config: RunConfig, tokenizer: Tokenizer) -> DataPipeline:
        return RetroData(config, tokenizer)


FAMILY = Retro()
