"""Data sets of Megatron-LM's first release (2019), to derive corpora from. The files are read by
`megatron/features/raw_text`, from which every text is read when it is needed."""

from bisect import bisect_right
from collections.abc import Callable
from functools import cached_property
from itertools import accumulate

import numpy as np
from torch.utils.data import Dataset

from megatron.features.raw_text.text_files import batches, text_records


class csv_dataset(Dataset):
    """The texts of a .csv or .tsv file, or of a folder or glob of such files.

    Items are dicts with the "text" and its "length" in characters. `text_key` names the column of
    the text, `delim` separates columns, `preprocess_fn` is applied to each text. Other arguments of
    2019 (labels, tokenizer) have no effect on pretraining. Raises FileNotFoundError; ValueError for
    a malformed row.
    """

    def __init__(
        self,
        path: str,
        tokenizer: object = None,
        preprocess_fn: Callable[[str], str] | None = None,
        delim: str | None = None,
        text_key: str = "sentence",
        **kwargs: object,
    ) -> None:
        self._records = text_records(path, text_key, delim)
        self._preprocess = preprocess_fn or str

    @cached_property
    def _starts(self) -> list[np.ndarray]:
        """By file, where each text and the end of the file is."""
        return [
            np.array(
                [
                    *(start for span in r.ranges() for b in batches(r, span) for start, _ in b),
                    r.file.size,
                ]
            )
            for r in self._records
        ]

    @cached_property
    def _firsts(self) -> list[int]:
        """By file, the number of texts before it."""
        return list(accumulate((len(starts) - 1 for starts in self._starts), initial=0))

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, index: int) -> dict[str, object]:
        if not 0 <= index < len(self):
            raise IndexError(f"there is no text {index} of {len(self)}")
        file = bisect_right(self._firsts, index) - 1
        starts = self._starts[file][index - self._firsts[file] :]
        text = self._preprocess(self._records[file].text_at(int(starts[0]), int(starts[1])))
        return {"text": text, "length": len(text)}


class json_dataset(csv_dataset):
    """The same for files with one JSON object per line; `text_key` is the key of the text."""
