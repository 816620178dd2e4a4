"""Planted bugs of other programs' files: rows, shares, slices and numbers of ranks."""

# ruff: noqa: E501  texts of the source

from places import COUNT, CUT, LOST, OFFSET, ORDER, RANKS, STALE
from planted import Planted

LEGACY, DEEPSPEED, SHARDED, HF = (
    f"formats/{n}/" for n in ("legacy_megatron", "deepspeed_folders", "sharded", "huggingface")
)
NAMES, WRITER, FILES, EXPERTS = (
    f"{LEGACY}{n}.py" for n in ("names", "writer", "rank_files", "experts")
)
ENGINE, NAMING, UNIVERSAL = (f"{DEEPSPEED}{n}.py" for n in ("engine_files", "naming", "universal"))
CHUNKS, CORE, TORCH = (f"{SHARDED}{n}.py" for n in ("files", "megatron_core", "writer"))
ROWS = "formats/legacy_megatron/test_names.py"
WRITTEN = ("formats/legacy_megatron/test_writer.py::test_round_trip_is_bitwise",)
READ = ("formats/legacy_megatron/test_reader.py",)
OF_EXPERTS = ("formats/legacy_megatron/test_experts.py",)
T5 = ("formats/legacy_megatron/test_t5.py",)
ADAM = ("formats/legacy_megatron/test_reader.py::test_optimizer_against_torch_adamw",)
STOCK = "distributed/checkpoint/test_deepspeed_formats.py::"
BITS = STOCK + "test_engine_folder_reads_bitwise[{}]"
LOADS = STOCK + "test_stock_deepspeed_loads_universal[{}]"
FOREIGN = "formats/deepspeed_folders/test_foreign.py"
SHARDS = "formats/trainers/test_trainers.py::test_zero_shards_are_what_zero_to_fp32_makes_of_them"
DCP, NEMO = (f"formats/sharded/test_{n}.py" for n in ("dcp", "nemo"))
LAID_OUT = f"{NEMO}::test_blocks_of_a_stack_halves_of_a_gate_and_flat_pieces"

BUGS = [
    Planted("legacy-rows-of-version-one", "formats", ORDER, NAMES,
            "return per_head.movedim(2, 0).reshape(values.shape)", "return per_head.movedim(2, 1).reshape(values.shape)",
            "version 1 is read with the order of version 2", (ROWS,)),
    Planted("legacy-rows-by-group", "formats", ORDER, NAMES,
            "per_group = [part.reshape(groups, -1, head_dim, *rest) for part in split]\n    return torch.cat(per_group, dim=1).reshape(values.shape)",
            "per_group = [part.reshape(groups, -1, head_dim, *rest) for part in split]\n    return torch.cat([each.flatten(0, 1) for each in per_group]).reshape(values.shape)",
            "written rows are not grouped", (ROWS, *WRITTEN)),
    Planted("legacy-heads-of-all-ranks", "formats", CUT, WRITER,
            "heads, groups = attention.num_attention_heads // size, attention.num_query_groups // size",
            "heads, groups = attention.num_attention_heads, attention.num_query_groups",
            "shares are ordered as if they had all heads", WRITTEN),
    Planted("legacy-block-of-stage", "formats", OFFSET, WRITER,
            "return (rank - self.spans[stack].ranks[0]) * self.spans[stack].blocks",
            "return rank * self.spans[stack].blocks",
            "blocks of a decoder are numbered from the encoder's ranks", T5),
    Planted("legacy-decoder-without-embedding", "formats", LOST, WRITER,
            "return (0,) if self.split is None else (0, self.split)", "return (0,)",
            "the decoder's first rank lacks the embedding", T5),
    Planted("legacy-head-copy-on-every-stage", "formats", COUNT, WRITER,
            "0 < rank.pipeline == sizes.pipeline - 1", "0 < rank.pipeline",
            "stages in the middle have the copy of the head",
            ("formats/legacy_megatron/test_writer.py::test_against_the_writer_of_the_tests",)),
    Planted("legacy-experts-of-first-rank", "formats", RANKS, WRITER,
            "values = source.tensor(name).chunk(sizes.expert)[rank.expert]", "values = source.tensor(name).chunk(sizes.expert)[0]",
            "every expert rank has the first experts", OF_EXPERTS),
    Planted("legacy-rank-names", "formats", RANKS, FILES,
            "rank = Rank(int(match[2] or 0), int(match[1]), int(match[3] or 0))",
            "rank = Rank(int(match[1] or 0), int(match[2] or 0), int(match[3] or 0))",
            "tensor and pipeline ranks are swapped", READ),
    Planted("legacy-missing-rank", "formats", LOST, FILES,
            "    for rank in wanted:\n        if rank not in found:", "    for rank in wanted[:1]:\n        if rank not in found:",
            "a missing rank is not named", ("formats/legacy_megatron/test_rank_files.py", *READ)),
    Planted("engine-slices-without-order", "formats", ORDER, ENGINE,
            "        for data_rank in sorted(files):\n            state = self._zero(rank, data_rank)",
            "        for data_rank in sorted(files, reverse=True):\n            state = self._zero(rank, data_rank)",
            "parts of data ranks are put together from the last",
            (FOREIGN + "::test_bloom", BITS.format("zero3-tp2-dp2"), SHARDS)),
    Planted("engine-stage-three-padding", "formats", OFFSET, ENGINE,
            "length = max(0, min(part, whole - place * part))", "length = max(0, min(part, whole - place * part + 1))",
            "padding counts as an element", (SHARDS,)),
    Planted("engine-stage-three-start", "formats", OFFSET, ENGINE,
            "                yield name, FlatSlice(data_rank, group, start, length)\n                start += part",
            "                yield name, FlatSlice(data_rank, group, start, length)\n                start += length",
            "parameters follow each other without the padding of parts", (SHARDS,)),
    Planted("engine-moments-of-first-group", "formats", STALE, ENGINE,
            "            values = _group_state(state, wanted.group).get(kind)", "            values = _group_state(state, 0).get(kind)",
            "vectors have the moments of matrices", (SHARDS, BITS.format("zero3-tp2-dp2"), FOREIGN + "::test_bloom")),
    Planted("engine-expert-number", "formats", RANKS, ENGINE,
            "* here + int(match[2])", "+ int(match[2])",
            "experts of later ranks are counted as if each had one",
            ("distributed/checkpoint/test_expert_files.py::test_stock_folders_both_ways[zero1-ep2-residual]",)),
    Planted("engine-tensor-ranks-slow", "formats", RANKS, ENGINE,
            "rank = stage * self.tensor_size + tensor_rank", "rank = tensor_rank * self.pipeline_size + stage",
            "pipeline ranks are taken to count fastest", (FOREIGN + "::test_bloom",)),
    Planted("engine-missing-optimizer-rank", "formats", LOST, ENGINE,
            "                if data_rank not in files:", "                if data_rank not in files and not data_rank:",
            "a missing data rank is not named", (FOREIGN + "::test_the_missing_file_of_a_data_rank_is_named",)),
    Planted("naming-gate-with-up", "formats", CUT, NAMING,
            "        if len(shares) == 1 and len(cut.parts) == 2:", "        if len(shares) == 1 and len(cut.parts) == 3:",
            "gate and up of two ranks are put together as one matrix", (FOREIGN + "::test_megatron_deepspeed_llama",)),
    Planted("naming-whole-of-first-rank", "formats", RANKS, NAMING,
            'place = {"tensor": (rank, self._size)}', 'place = {"tensor": (0, self._size)}',
            "shares of all ranks are written into the first one's place", (BITS.format("zero3-tp2-dp2"),)),
    Planted("naming-padding-kept", "formats", CUT, NAMING,
            "return values.reshape(rows, *shape[1:])[: shape[0]]", "return values.reshape(rows, *shape[1:])[-shape[0] :]",
            "padding of the vocabulary is taken from its beginning",
            ("formats/deepspeed_folders/test_universal.py::test_loaders_of_stage_3_get_the_padding",)),
    Planted("universal-parts-not-named", "formats", CUT, UNIVERSAL,
            '        facts["param_n_sub_params"] = 2\n', '        facts["param_n_sub_params"] = 1\n',
            "stock loaders cut gate and up as one matrix",
            ("formats/deepspeed_folders/test_universal.py::test_command_writes_what_stock_loaders_look_for",
             LOADS.format("zero1-tp2-dp2"))),
    Planted("universal-cut-dimension", "formats", CUT, UNIVERSAL,
            'facts: dict[str, Any] = {"cat_dim": cut.dim}', 'facts: dict[str, Any] = {"cat_dim": 0}',
            "stock loaders cut the inputs of row-parallel layers by rows", (LOADS.format("zero1-tp2-dp2"),)),
    Planted("universal-padding-at-stage-three", "formats", CUT, UNIVERSAL,
            "                values = shards[name].cut(values)", "                pass",
            "loaders of stage 3 get no padding", ("formats/deepspeed_folders/test_universal.py::test_loaders_of_stage_3_get_the_padding",)),
    Planted("universal-step-of-iteration", "formats", COUNT, UNIVERSAL,
            "updates = iteration if step is None else math.floor(step)", "updates = iteration",
            "skipped steps count as updates",
            ("formats/deepspeed_folders/test_universal.py::test_skipped_steps_are_no_updates",)),
    Planted("dcp-chunk-place", "formats", OFFSET, CHUNKS,
            "start = chunk.place + (chunk.start + first) * dtype.itemsize", "start = chunk.place + chunk.start * dtype.itemsize",
            "a slice is read from the start of its chunk", (f"{DCP}::test_every_tensor_and_slice_is_what_torch_wrote",)),
    Planted("dcp-chunks-unchecked", "formats", COUNT, CHUNKS,
            "return all(one.overlap(other) is None for one, other in combinations(boxes, 2))", "return True",
            "chunks that overlap count as a whole tensor",
            (f"{DCP}::test_damage_is_refused_by_file_and_tensor",)),
    Planted("core-halves-swapped", "formats", ORDER, CORE,
            "half = match[1], \"wv\".index(match[2])", "half = match[1], \"vw\".index(match[2])",
            "gate and up change places", (LAID_OUT,)),
    Planted("core-block-of-stack", "formats", OFFSET, CORE,
            "    return files.part(part.key, part.block)", "    return files.part(part.key, max(0, part.block - 1))",
            "a block has the weights of the one before", (LAID_OUT,)),
    Planted("core-flat-grid", "formats", ORDER, CORE,
            "order = [axis for dim in range(len(grid)) for axis in (dim, len(grid) + dim)]",
            "order = [*range(2 * len(grid))]",
            "flat pieces of a grid are put together as rows", (LAID_OUT,)),
    Planted("torch-dist-block-place", "formats", OFFSET, TORCH,
            "starts = torch.Size([block * stacked, *[0] * (len(whole) - 1)][: len(whole)])",
            "starts = torch.Size([0, *[0] * (len(whole) - 1)][: len(whole)])",
            "all blocks of a stack are at its beginning", (DCP,)),
    Planted("nanotron-rows", "formats", CUT, "formats/trainers/nanotron.py",
            "                start += count\n            if whole.shape[0] != start:", "                start += max(rows)\n            if whole.shape[0] > start:",
            "values are read behind their rows", ("formats/trainers/test_trainers.py",)),
]  # fmt: skip
