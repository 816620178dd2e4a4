#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Shows the contents of indexed datasets (PREFIX.bin and PREFIX.idx).

    python tools/inspect_index.py data/corpus_text_document
    python tools/inspect_index.py data/corpus_text_document --document 7 \
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt

A folder means all datasets in it. --document prints the token ids of that document, and its text if
tokenizer flags are given.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.apps.corpus.indexed_files import contents, find_prefixes
from megatron.config import ConfigError, FlagParser, TokenizerConfig
from megatron.config.flags import build, option
from megatron.data.indexed import IndexedDataset
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.util.errors import one_line


@dataclass(frozen=True)
class InspectConfig:
    """Inspect: output."""

    document: int | None = option(None)
    """Number of a document to print, from 0; negative numbers count from the end."""
    max_tokens: int = option(256)
    """Number of its token ids to print; 0 prints all. The text is always printed whole."""
    json: bool = option(False)
    """Print JSON."""


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = FlagParser(InspectConfig, TokenizerConfig, description=__doc__)
    parser.usage = "%(prog)s PREFIX|FOLDER ... [flags]"
    parser.add_argument("inputs", nargs="+", metavar="PREFIX|FOLDER")
    settings: dict[str, Any] = parser.settings(argv)
    prefixes = settings.pop("inputs")
    config: InspectConfig = build(InspectConfig, settings)
    tokenizer_config: TokenizerConfig = build(TokenizerConfig, settings)
    try:
        named = tokenizer_config.tokenizer_type is not None
        tokenizer = build_tokenizer(tokenizer_config) if named else None
        if config.document is not None and config.max_tokens < 0:
            raise ConfigError(f"--max-tokens {config.max_tokens} must not be negative")
        shown: list[dict[str, Any]] = []
        for prefix in find_prefixes(prefixes):
            dataset = IndexedDataset(prefix)
            if config.document is not None:
                shown.append(document(dataset, config.document, tokenizer))
                lines = document_report(shown[-1], config.max_tokens)
            else:
                shown.append(contents(dataset))
                lines = report(shown[-1])
            if not config.json:
                print("\n".join(lines))
    except (ValueError, OSError) as error:
        sys.exit(f"inspect_index.py: error: {one_line(error)}")
    if config.json:
        print(json.dumps(shown, indent=1))


def report(found: dict[str, Any]) -> Iterator[str]:
    """The lines that describe the contents of a dataset."""
    yield (
        f"{found['prefix']}: {found['documents']:,} documents, {found['sequences']:,} sequences, "
        f"{found['tokens']:,} tokens of {found['dtype']}"
        + (", modes (multimodal)" if found["multimodal"] else "")
    )
    yield f"  .bin {found['bin_bytes']:,} bytes, .idx {found['idx_bytes']:,} bytes"
    names = ["tokens_per_document"]
    sequences = found["sequences_per_document"]
    if sequences["largest"] != 1 or sequences["smallest"] != 1:
        names += ["sequences_per_document", "tokens_per_sequence"]
    for name in names:
        lengths = found[name]
        quantiles = ", ".join(f"{share} {value:,}" for share, value in lengths["quantiles"].items())
        empty = f", {lengths['empty']:,} empty" if lengths["empty"] else ""
        yield (
            f"  {name.replace('_', ' ')}: mean {lengths['mean']:,.1f}, from "
            f"{lengths['smallest']:,} to {lengths['largest']:,} ({quantiles}){empty}"
        )


def document(dataset: IndexedDataset, number: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """A document, sequence by sequence.

    Raises:
        ValueError: it does not exist, or it has ids that the tokenizer does not know.
    """
    total = dataset.num_documents
    if not -total <= number < total:
        raise ValueError(f"--document {number}: {dataset.prefix} has {total} documents")
    number %= total
    first, stop = dataset.document_indices[number : number + 2].tolist()
    sequences: list[dict[str, Any]] = []
    for sequence in range(first, stop):
        content: dict[str, Any] = {"sequence": sequence, "tokens": dataset[sequence].tolist()}
        if dataset.modes is not None:
            content["mode"] = int(dataset.modes[sequence])
        if tokenizer is not None:
            largest = max(content["tokens"], default=0)
            if largest >= tokenizer.vocab_size:
                raise ValueError(
                    f"{dataset.prefix}.bin: sequence {sequence} contains the token id {largest}, "
                    f"but the tokenizer has {tokenizer.vocab_size} ids: the file was made with "
                    "another one"
                )
            content["text"] = tokenizer.detokenize(content["tokens"])
        sequences.append(content)
    return {"prefix": dataset.prefix, "document": number, "sequences": sequences}


def document_report(found: dict[str, Any], max_tokens: int) -> Iterator[str]:
    """The lines that show a document."""
    sequences = found["sequences"]
    count = sum(len(sequence["tokens"]) for sequence in sequences)
    yield (
        f"{found['prefix']}: document {found['document']}, {len(sequences)} sequences, "
        f"{count:,} tokens"
    )
    for sequence in sequences:
        ids = sequence["tokens"]
        mode = f", mode {sequence['mode']}" if "mode" in sequence else ""
        yield f"sequence {sequence['sequence']}, {len(ids):,} tokens{mode}:"
        shown = ids if not max_tokens else ids[:max_tokens]
        more = f" ... ({len(ids) - len(shown):,} more)" if len(shown) < len(ids) else ""
        yield "  " + " ".join(map(str, shown)) + more
        if "text" in sequence:
            yield sequence["text"]


if __name__ == "__main__":
    main()
