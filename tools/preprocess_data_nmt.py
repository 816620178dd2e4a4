#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Converts the sentences of one side of a parallel corpus to the indexed files of training.

    python tools/preprocess_data_nmt.py --input train.en --output-prefix data/train-en \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model spm.model --workers 4

Each line is a document of one sentence in PREFIX.bin and PREFIX.idx. tools/preprocess_data.py reads
JSON lines, Parquet and other text.
"""

from megatron.apps.corpus.preprocessing.parallel_text import (
    ParallelTextConfig,
    preprocess_sentences,
)
from megatron.config import TokenizerConfig, parse_configs
from megatron.config.output import check_output
from megatron.run.process import errors_for_users


def main() -> None:
    """Parses the command line and converts."""
    with errors_for_users():
        classes = (ParallelTextConfig, TokenizerConfig)
        config, tokenizer = parse_configs(classes, description=__doc__)
        check_output("--output-prefix", f"{config.output_prefix}.bin")
        print(preprocess_sentences(config, tokenizer))


if __name__ == "__main__":
    main()
