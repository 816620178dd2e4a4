"""Flags for the data: location, construction of samples, and tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.features import flag_parts
from megatron.config.flags import NOT_NEGATIVE, POSITIVE, ConfigResolver, option
from megatron.config.sections import with_parts

SOURCE_FIELDS = (
    *("data_path", "data_args_path", "per_split_data_args_path"),
    *(
        f"{part}_{name}"
        for name in ("data", "data_path", "weighted_split_paths", "weighted_split_paths_path")
        for part in ("train", "valid", "test")
    ),
)
"""Fields of :class:`DataConfig` that select the data of a run."""


@with_parts(flag_parts("data"))
@dataclass(frozen=True)
class DataConfig:
    """Data: where it is and how samples are made from it."""

    data_path: tuple[str, ...] = option((), aliases=("--dataset",))
    """PREFIX of an indexed dataset (PREFIX.bin and PREFIX.idx), or WEIGHT PREFIX WEIGHT PREFIX ...
    for a blend of several. --split divides the documents into training, validation and test.
    PREFIX@FIRST:LAST uses a range of the documents, given as fractions, such as books@0:0.95. A
    path that ends in .json or .jsonl is raw text, which is tokenized while training."""
    data_args_path: str | None = option(None)
    """Text file with the value of --data-path."""
    train_data_path: tuple[str, ...] = option(())
    """Like --data-path, but for training only: --split does not apply."""
    valid_data_path: tuple[str, ...] = option((), aliases=("--val-data-path",))
    """Like --data-path, but for validation only."""
    test_data_path: tuple[str, ...] = option(())
    """Like --data-path, but for test only."""
    per_split_data_args_path: str | None = option(None)
    """JSON file {"train": [...], "valid": [...], "test": [...]} with the values of
    --train-data-path, --valid-data-path and --test-data-path."""
    train_weighted_split_paths: tuple[str, ...] = option(())
    """Training data as 'NAME: WEIGHT FIRST:LAST PREFIX, WEIGHT FIRST:LAST PREFIX, ...': a blend of
    ranges of documents, given as fractions."""
    valid_weighted_split_paths: tuple[str, ...] = option(())
    """Validation data as in --train-weighted-split-paths. Each NAME is evaluated separately."""
    test_weighted_split_paths: tuple[str, ...] = option(())
    """Test data, in the same form as --train-weighted-split-paths."""
    train_weighted_split_paths_path: str | None = option(None)
    """Text file with the value of --train-weighted-split-paths."""
    valid_weighted_split_paths_path: str | None = option(None)
    """Text file with the value of --valid-weighted-split-paths."""
    test_weighted_split_paths_path: str | None = option(None)
    """Text file with the value of --test-weighted-split-paths."""
    multiple_validation_sets: bool = option(False)
    """Evaluate each path of --valid-data-path (or of "valid" in --per-split-data-args-path)
    separately. The paths must then have no weights."""
    validation_set_names: tuple[str, ...] = option(())
    """Names of the --multiple-validation-sets; by default the last components of their paths."""
    train_data: tuple[str, ...] = option(())
    """Training data: corpora of --corpora-file or of NAMED_CORPORA in data_utils/corpora.py, or raw
    text files, as NAME NAME ... or WEIGHT NAME WEIGHT NAME .... Without --valid-data and
    --test-data, --split divides their documents."""
    valid_data: tuple[str, ...] = option(())
    """Validation data, in the same form as --train-data."""
    test_data: tuple[str, ...] = option(())
    """Test data, in the same form as --train-data."""
    split: str = option("969,30,1")
    """Relative shares of the documents of --data-path for training, validation and test."""
    skip_samples: tuple[str, ...] = option(())
    """Ranges FIRST:LAST ... of training samples to skip, by index. LAST itself is not skipped."""
    train_data_exact_num_epochs: int | None = option(None, bounds=POSITIVE)
    """Build the training samples for this number of epochs, however many the run needs. Runs with
    the same number of epochs have the same order of samples. A blend ends when one of its datasets
    has been read this many times."""
    data_cache_path: str | None = option(None, derived="index-cache next to the data")
    """Folder for the cached sample indices."""
    object_storage_cache_path: str | None = option(None, derived="object-storage-cache")
    """Folder for cached copies of remote data, such as s3://bucket/prefix."""
    num_workers: int = option(2, bounds=NOT_NEGATIVE, role="course")
    """Number of data loader processes per rank; 0 loads data in the training process."""
    mock_data: bool = option(False)
    """Train on synthetic tokens, without data files."""
    reset_position_ids: bool = option(False)
    """Restart position ids after each end-of-document token."""
    reset_attention_mask: bool = option(False)
    """Restrict attention to tokens of the same document."""
    eod_mask_loss: bool = option(False)
    """Exclude positions whose input is an end-of-document token from the loss."""

    def check(self, resolver: ConfigResolver) -> None:
        """Raise ConfigError if flags contradict each other."""
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


@with_parts(flag_parts("tokenizer"))
@dataclass(frozen=True)
class TokenizerConfig:
    """Tokenizer: its type and its files."""

    tokenizer_type: str | None = option(None)
    """Tokenizer: GPT2BPETokenizer, BertWordPieceLowerCase, BertWordPieceCase,
    SentencePieceTokenizer, GPTSentencePieceTokenizer, Llama2Tokenizer, TikTokenizer, HFTokenizer,
    ByteLevelTokenizer, NullTokenizer, IdTokenizer, or a name from the scripts of 2019
    (docs/guides/tokenizers.md). The default is GPT2BPETokenizer if vocabulary files are given,
    BertWordPieceLowerCase for a BERT or T5, and IdTokenizer with --vocab-size alone."""
    vocab_file: str | None = option(None, aliases=("--vocab",))
    """Vocabulary file: vocab.json (GPT2BPETokenizer) or vocab.txt (BertWordPiece...)."""
    merge_file: str | None = option(None)
    """Merges file of a byte-pair encoding (merges.txt)."""
    tokenizer_model: str | None = option(None, aliases=("--tokenizer-path",))
    """Tokenizer folder (HFTokenizer) or model file (SentencePiece..., Llama2Tokenizer,
    TikTokenizer). A SentencePiece model that does not exist is trained with --vocab-size and
    --tokenizer-model-type if the run reads raw text."""
    tokenizer_model_type: str | None = option(None)
    """SentencePieceTokenizer: type of a model to train: unigram, bpe (default), char or word.
    BertWordPieceTokenizer: name of the BERT model, which decides whether text is lower-cased
    (bert-large-cased), or the path of its vocab.txt, as for BertWordPiece...."""
    cache_dir: str | None = option(None)
    """Folder to search for the files of gpt2 (vocab.json and merges.txt, for GPT2BPETokenizer) or
    of the model in --tokenizer-model-type (vocab.txt, for BertWordPiece...) if no files are given.
    The layout of Hugging Face's cache is searched too. Nothing is downloaded."""
    vocab_size: int | None = option(None)
    """Without a tokenizer: number of token ids in the indexed data. With a tokenizer: number of
    rows of the token embedding before padding, at least the tokenizer's number of ids. Exceptions:
    NullTokenizer: number of token ids, excluding the end-of-document token. SentencePiece:
    vocabulary size of a model to train. TikTokenizer: number of tokens to use from a JSON
    vocabulary, including special tokens."""
    vocab_extra_ids: int = option(0)
    """Number of sentinel tokens <extra_id_0>, <extra_id_1>, ... added to the vocabulary (T5)."""
    bpe_library: str = option("tiktoken", choices=("tiktoken", "fastokens"))
    """GPT2BPETokenizer: library that encodes batches of text. All libraries return the same ids.
    fastokens is faster and must be installed (pip install -e '.[fast]')."""
