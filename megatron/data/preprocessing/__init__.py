"""From text to indexed files: read, parse, split, tokenize in several processes, write.

files of --input -> blocks of whole records -> worker: texts -> token ids -> its place in the .bin
                                                      counts -> lengths, journal -> .idx
"""

from megatron.data.preprocessing.config import PreprocessConfig
from megatron.data.preprocessing.pipeline import preprocess
from megatron.data.preprocessing.summary import KeySummary, Summary

__all__ = ["KeySummary", "PreprocessConfig", "Summary", "preprocess"]
