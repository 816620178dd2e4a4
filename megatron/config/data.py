"""Data: its location, the construction of samples, and the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.features import flag_parts
from megatron.config.flags import NOT_NEGATIVE, POSITIVE, ConfigResolver, needs_value, option
from megatron.config.sections import with_parts

SOURCE_FIELDS = (
    *("data_path", "data_args_path", "per_split_data_args_path"),
    *(
        f"{part}_{name}"
        for name in ("data", "data_path", "weighted_split_paths", "weighted_split_paths_path")
        for part in ("train", "valid", "test")
    ),
)
"""The fields of :class:`DataConfig` that name data."""


@with_parts(flag_parts("data"))
@dataclass(frozen=True)
class DataConfig:
    """Data: where it is and how samples are made of it."""

    data_path: tuple[str, ...] = option((), aliases=("--dataset",))
    """PREFIX of an indexed dataset (PREFIX.bin and PREFIX.idx), or WEIGHT PREFIX WEIGHT PREFIX ...
    for a blend of several; --split divides the documents into training, validation and test.
    PREFIX@FIRST:LAST uses a range of the documents, given as fractions, such as books@0:0.95. A
    path that ends in .json or .jsonl is raw text, tokenized while training."""
    data_args_path: str | None = option(None)
    """Text file with the value of --data-path."""
    train_data_path: tuple[str, ...] = option(())
    """Like --data-path, for training only: --split does not apply."""
    valid_data_path: tuple[str, ...] = option((), aliases=("--val-data-path",))
    """Like --data-path, for validation only."""
    test_data_path: tuple[str, ...] = option(())
    """Like --data-path, for test only."""
    per_split_data_args_path: str | None = option(None)
    """JSON file {"train": [...], "valid": [...], "test": [...]} with the values of
    --train-data-path, --valid-data-path and --test-data-path."""
    train_weighted_split_paths: tuple[str, ...] = option(())
    """Training data as 'NAME: WEIGHT FIRST:LAST PREFIX, WEIGHT FIRST:LAST PREFIX, ...': a blend of
    ranges of documents, given as fractions."""
    valid_weighted_split_paths: tuple[str, ...] = option(())
    """The same for validation; several NAMEs are evaluated separately."""
    test_weighted_split_paths: tuple[str, ...] = option(())
    """The same for test."""
    train_weighted_split_paths_path: str | None = option(None)
    """Text file with the value of --train-weighted-split-paths."""
    valid_weighted_split_paths_path: str | None = option(None)
    """Text file with the value of --valid-weighted-split-paths."""
    test_weighted_split_paths_path: str | None = option(None)
    """Text file with the value of --test-weighted-split-paths."""
    multiple_validation_sets: bool = option(False)
    """Evaluate every path of --valid-data-path (or of "valid" in --per-split-data-args-path), which
    then have no weights, separately."""
    validation_set_names: tuple[str, ...] = option(())
    """Names of these validation sets, in their order; by default the last parts of the paths."""
    train_data: tuple[str, ...] = option(())
    """Corpora of --corpora-file, of NAMED_CORPORA in data_utils/corpora.py, or files of raw text,
    as NAME NAME ... or WEIGHT NAME WEIGHT NAME ...; without --valid-data and --test-data, --split
    divides their documents."""
    valid_data: tuple[str, ...] = option(())
    """Like --train-data, for validation."""
    test_data: tuple[str, ...] = option(())
    """Like --train-data, for test."""
    corpora_file: str = option("corpora.json")
    """JSON file that maps the names of --train-data to files."""
    corpora_outside: bool = option(False)
    """Accept paths in --corpora-file that lead out of its folder. Without the flag a file that
    another user wrote cannot make a run read others than those next to it."""
    split: str = option("969,30,1")
    """Relative shares of the documents of --data-path for training, validation and test."""
    skip_samples: tuple[str, ...] = option(())
    """FIRST:LAST ...: ranges of training samples to skip, by their number; LAST is not skipped."""
    train_data_exact_num_epochs: int | None = option(None, bounds=POSITIVE)
    """Number of epochs of training samples, however many the run needs: their order is then that of
    any other run over so many epochs. Of a blend, until the first file has been read so often."""
    data_cache_path: str | None = option(None, derived="index-cache next to the data")
    """Folder for the cached sample indices."""
    object_storage_cache_path: str | None = option(None, derived="object-storage-cache")
    """Folder that caches remote data, such as s3://bucket/prefix."""
    num_workers: int = option(2, bounds=NOT_NEGATIVE, role="course")
    """Number of data loader processes per rank; 0 loads in the training process."""
    mock_data: bool = option(False)
    """Train on synthetic tokens, without data files."""
    reset_position_ids: bool = option(False)
    """Restart position ids after each end-of-document token."""
    reset_attention_mask: bool = option(False)
    """Restrict attention to tokens of the same document."""
    eod_mask_loss: bool = option(False)
    """Exclude end-of-document tokens (as inputs) from the loss."""

    def check(self, resolver: ConfigResolver) -> None:
        """Refuses data files together with --mock-data, and names without sets."""
        named = [resolver.flag(name) for name in SOURCE_FIELDS if getattr(self, name)]
        resolver.check(
            self.multiple_validation_sets or not self.validation_set_names,
            f"{resolver.show('validation_set_names')} names the sets of "
            "--multiple-validation-sets: give that too",
        )
        resolver.check(
            not (self.mock_data and named),
            f"--mock-data contradicts {', '.join(named)}: give one of them",
        )
        resolver.check(
            self.train_data_exact_num_epochs is None or not self.mock_data,
            f"{resolver.show('train_data_exact_num_epochs')}: --mock-data have no epochs; give one "
            "of them",
        )


_TIKTOKEN = needs_value("tokenizer_type", "TikTokenizer", "Llama3Tokenizer")


@dataclass(frozen=True)
class TokenizerConfig:
    """Tokenizer: which one, and its files."""

    tokenizer_type: str | None = option(None)
    """Tokenizer: GPT2BPETokenizer, BertWordPieceLowerCase, BertWordPieceCase,
    SentencePieceTokenizer, GPTSentencePieceTokenizer, Llama2Tokenizer, TikTokenizer, HFTokenizer,
    ByteLevelTokenizer, NullTokenizer, IdTokenizer, or a name from the scripts of 2019
    (docs/guides/tokenizers.md). With vocabulary files GPT2BPETokenizer is the default, for a BERT
    or T5 BertWordPieceLowerCase; with --vocab-size alone IdTokenizer."""
    vocab_file: str | None = option(None, aliases=("--vocab",))
    """Vocabulary file: vocab.json (GPT2BPETokenizer) or vocab.txt (BertWordPiece...)."""
    merge_file: str | None = option(None)
    """Merges file of a byte-pair encoding (merges.txt)."""
    tokenizer_model: str | None = option(None, aliases=("--tokenizer-path",))
    """Tokenizer folder (HFTokenizer) or model file (SentencePiece..., Llama2Tokenizer,
    TikTokenizer). If a SentencePiece model does not exist and the run reads raw text, it is
    trained, with --vocab-size and --tokenizer-model-type."""
    tokenizer_model_type: str | None = option(None)
    """SentencePieceTokenizer: type of a model that is trained: unigram, bpe (default), char or
    word. BertWordPieceTokenizer: name of the BERT model, which decides whether text is lower-cased
    (bert-large-cased); or, as for BertWordPiece..., the path of its vocab.txt."""
    cache_dir: str | None = option(None)
    """Folder in which vocab.json and merges.txt of gpt2 (GPT2BPETokenizer), or vocab.txt of the
    model in --tokenizer-model-type (BertWordPiece...), are looked for if no files are given, also
    where Hugging Face's cache puts them. Nothing is downloaded."""
    vocab_size: int | None = option(None)
    """Number of token ids in indexed data whose tokenizer is not named. With a tokenizer: number of
    rows of the token embedding before padding, at least as many as the tokenizer has ids. But
    NullTokenizer: number of token ids, without the end-of-document token. SentencePiece: size of a
    model that is trained. TikTokenizer: number of tokens of a JSON vocabulary that are used,
    special tokens included."""
    vocab_extra_ids: int = option(0)
    """Number of sentinel tokens <extra_id_0>, <extra_id_1>, ... added to the vocabulary (T5)."""
    bpe_library: str = option("tiktoken", choices=("tiktoken", "fastokens"))
    """GPT2BPETokenizer: library that encodes batches of text, with the same ids. fastokens must be
    installed (pip install -e '.[fast]') and is faster."""
    tiktoken_pattern: str | None = option(None, choices=("v1", "v2"), needs=_TIKTOKEN)
    """TikTokenizer: version of the pattern that splits text, for a JSON vocabulary."""
    tiktoken_num_special_tokens: int = option(1000, needs=_TIKTOKEN)
    """TikTokenizer: number of ids reserved for special tokens before those of a JSON vocabulary."""
    tiktoken_special_tokens: tuple[str, ...] = option(("<unk>", "<s>", "</s>"), needs=_TIKTOKEN)
    """TikTokenizer: first special tokens of a JSON vocabulary; the others are <SPECIAL_N>."""
