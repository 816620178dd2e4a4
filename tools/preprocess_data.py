#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Converts JSON lines, text and Parquet to the indexed files that training reads.

    python tools/preprocess_data.py --input corpus.jsonl.zst --output-prefix data/corpus \
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt \
        --append-eod
"""

import sys
from collections.abc import Sequence

from megatron.apps.corpus.preprocessing.inputs import PreprocessConfig
from megatron.apps.corpus.preprocessing.job import PreprocessSummary
from megatron.apps.corpus.preprocessing.preprocess import preprocess
from megatron.config import TokenizerConfig, parse_configs
from megatron.util.errors import one_line


def main(argv: Sequence[str] | None = None) -> None:
    config, tokenizer_config = parse_configs(
        (PreprocessConfig, TokenizerConfig),
        argv,
        description=__doc__,
    )
    try:
        summary = preprocess(config, tokenizer_config)
    except (ValueError, OSError) as error:
        sys.exit(f"preprocess_data.py: error: {one_line(error)}")
    except KeyboardInterrupt:
        sys.exit("preprocess_data.py: interrupted")
    report(summary)


def report(summary: PreprocessSummary) -> None:
    for key in summary.keys.values():
        empty = f" ({key.empty:,} empty ones left out)" if key.empty else ""
        print(
            f"{key.prefix}.bin/.idx: {key.documents:,} documents{empty}, {key.tokens:,} tokens, "
            f"{key.text_bytes:,} bytes, {summary.seconds:.1f} seconds, "
            f"{key.tokens / max(key.text_bytes, 1):.4f} tokens per byte"
        )
    if summary.parts_left:
        print(summary.parts_left)


if __name__ == "__main__":
    main()
