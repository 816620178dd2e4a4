"""From JSON lines to indexed files: read, parse, split, tokenize in several processes, write.

files of --input -> batches of lines -> worker: texts -> token ids -> .bin/.idx, in input order
"""

from megatron.data.preprocessing.config import PreprocessConfig
from megatron.data.preprocessing.pipeline import KeySummary, Summary, preprocess

__all__ = ["KeySummary", "PreprocessConfig", "Summary", "preprocess"]
