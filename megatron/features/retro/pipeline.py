"""The data of a run whose samples have neighbours, from those of a run whose samples have not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from megatron.config import ConfigError
from megatron.data.build import Datasets
from megatron.data.pipeline import DataPipeline
from megatron.data.samples import RepeatedSamples, SampleDataset, SampleRecipe, SampleView
from megatron.data.sources import PARTS
from megatron.features.retro.batch import (
    RetroBatch,
    RetroCollator,
    RetroSample,
)
from megatron.features.retro.chunks import ChunkDatabase
from megatron.features.retro.flags import RetrievalConfig, RetroDataConfig
from megatron.features.retro.project import RetroProject
from megatron.features.retro.run_settings import project_counts, without_project
from megatron.features.retro.samples import (
    MockRetroSamples,
    RetroSamples,
    neighbor_texts,
)

Samples = dict[str, SampleDataset[RetroSample]]
"""By the name of their set."""


class RetroData(DataPipeline):
    """The data of a Retro's run: ``text``, those of a GPT, with the neighbours of their chunks.
    Raises ConfigError if flags contradict each other or the project, or something of it is
    missing."""

    flags = frozenset({"retro"})

    def __init__(self, text: DataPipeline) -> None:
        config = text.config
        super().__init__(config, text.tokenizer)
        self.text = text
        moved = next(filter(None, (kind.moves_text for kind in config.kinds)), None)
        if moved is not None:
            raise ConfigError(
                f"{moved} moves the text of samples whose neighbours are known: leave it out, or "
                "train without --retro-add-retriever"
            )
        if self._flags.retro_project_dir is None and not config.data.mock_data:
            raise without_project()

    def recipe(self) -> SampleRecipe[Any]:
        return self.text.recipe()

    def collator(self) -> Callable[[Sequence[RetroSample]], RetroBatch]:
        return RetroCollator(self.text.collator())

    def mock(self, num_samples: int, part: int) -> SampleDataset[RetroSample]:
        retrieval = self.config.model.part(RetrievalConfig)
        chunks = self.seq_length // retrieval.retro_gpt_chunk_length
        shape_LKR = (chunks, retrieval.retro_num_neighbors, retrieval.retrieved_length)
        text = self.text.mock(num_samples, part)
        return MockRetroSamples(text, shape_LKR, self.tokenizer.vocab_size, self.seed, part)

    def view(self, sample: RetroSample, length: int) -> SampleView:
        """See `DataPipeline.view`; beside it the neighbours of its chunks."""
        view = self.text.view(sample.text, length)
        if sample.chunks_LK is None:
            return view
        retrieval = self.config.model.part(RetrievalConfig)
        chunks_LK = sample.chunks_LK[: length // retrieval.retro_gpt_chunk_length]
        retrieved = retrieval.retro_num_retrieved_chunks
        beside = neighbor_texts(self._database, chunks_LK, retrieved, self.tokenizer.detokenize)
        return view._replace(neighbors=beside)

    @property
    def _flags(self) -> RetroDataConfig:
        return self.config.section(RetroDataConfig)

    @property
    def _repeats(self) -> bool:
        return self._flags.dataloader_type == "cyclic"

    @cached_property
    def project(self) -> RetroProject:
        """The project of the run."""
        assert self._flags.retro_project_dir is not None
        return RetroProject(
            self._flags.retro_project_dir, self.config.data.object_storage_cache_path
        )

    @cached_property
    def _database(self) -> ChunkDatabase:
        return self.project.database(self.tokenizer.eod)

    def _unordered(self, sample_counts: tuple[int, int, int]) -> Datasets:
        if self.config.data.mock_data:
            return super()._unordered(sample_counts)
        # The order of samples depends on their number: those of the project, whatever a run reads.
        known = project_counts(self.project)
        found = super()._unordered(known)
        needed = dict(zip(PARTS, zip(known, sample_counts, strict=True), strict=True))

        def held_out(part: str, sets: Mapping[str, SampleDataset[Any]]) -> Samples:
            return {name: self._with_neighbors(part, text, *needed[part])
                    for name, text in sets.items() if needed[part][1]}  # fmt: skip

        return Datasets(
            held_out("train", {} if found.train is None else {"train": found.train}).get("train"),
            held_out("valid", found.valid),
            held_out("test", found.test),
        )

    def _with_neighbors(
        self, part: str, text: SampleDataset[Any], known: int, wanted: int
    ) -> SampleDataset[RetroSample]:
        """The samples of a part with their neighbours, ``wanted`` of them at least; the project has
        searched for those of the first ``known``, or of all as upstream."""
        table, retrieval = self.project.neighbors(part), self.config.model.part(RetrievalConfig)
        where = f"--retro-project-dir {self.project.folder}"
        if table.kept < retrieval.retro_num_neighbors:
            raise ConfigError(
                f"--retro-num-neighbors {retrieval.retro_num_neighbors}: {where} has {table.kept} "
                "neighbours of each chunk; give fewer, or run query-neighbors again with a larger "
                "--retro-query-num-neighbors-save"
            )
        verified = self._flags.retro_verify_neighbor_count
        if verified and len(table) not in (known, len(text)):
            raise ConfigError(
                f"{where} has the neighbours of {len(table)} samples for {part}, and a run with "
                f"its config.json reads {known}: run query-neighbors again with the same "
                "--retro-gpt-train-samples, --retro-gpt-eval-interval, --retro-gpt-eval-iters and "
                "--retro-gpt-global-batch-size, or train with --retro-no-verify-neighbor-count"
            )
        count = len(table) if verified else len(text)
        if wanted > count and verified and not self._repeats:
            raise ConfigError(
                f"the run reads {wanted} samples for {part}, of which {where} has {count}: leave "
                "out --rampup-batch-size, make another project with a larger "
                "--retro-gpt-train-samples, or read them several times with --dataloader-type "
                "cyclic"
            )
        samples = RetroSamples(
            text,
            count,
            table,
            self._database,
            retrieval.retro_num_neighbors,
            retrieval.retro_num_retrieved_chunks,
            self._flags.retro_return_doc_ids,
        )
        return RepeatedSamples(samples, wanted) if wanted > count else samples
