"""NAMED_CORPORA of Megatron-LM's first release (2019): corpora that `--train-data NAME` trains on.

Add a `torch.utils.data.Dataset` whose PATH is the file or folder that its texts come from and whose
items are strings, or dicts with a string under "text"; then its name to NAMED_CORPORA. A
`data_utils/corpora.py` in the working directory is read instead of this file.
docs/guides/data.md has an example.
"""

from typing import Any

from data_utils.datasets import json_dataset


class wikipedia(json_dataset):
    """Wikipedia's articles, as tools/wikiextractor_json.py writes them."""

    PATH = "data/wikipedia/wikidump_lines.json"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(self.PATH, **{**kwargs, "text_key": "text"})


class webtext(json_dataset):
    """Pages of the web, as the tools in openwebtext/ write them."""

    PATH = "data/webtext/data.json"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(self.PATH, **{**kwargs, "text_key": "text"})


NAMED_CORPORA = {"wikipedia": wikipedia, "webtext": webtext}
