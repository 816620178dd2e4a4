"""Documents read from text files and tokenized when they are needed."""

from megatron.data.raw_text.build import is_raw_text, open_raw_text, read_texts, text_settings
from megatron.data.raw_text.documents import RawTextDocuments
from megatron.data.raw_text.encode import TextEncoder, TextSettings

__all__ = [
    "RawTextDocuments",
    "TextEncoder",
    "TextSettings",
    "is_raw_text",
    "open_raw_text",
    "read_texts",
    "text_settings",
]
