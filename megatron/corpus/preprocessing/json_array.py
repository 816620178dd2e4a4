"""Reads a file that is one JSON array, an item at a time."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import BinaryIO

_READ_BYTES = 1 << 18
_SPACE = " \t\r\n"


class ArrayReader:
    """The items of an array as JSON text, without holding more than one and what is read ahead."""

    def __init__(self, stream: BinaryIO, name: str, max_bytes: int) -> None:
        """`name` is the file's, for messages; an item of more than `max_bytes` is an error."""
        self._stream, self._name, self._max_bytes = stream, name, max_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        # Keys and numbers are looked at later, by the parser of lines; here only the end counts.
        self._scan = json.JSONDecoder(parse_int=len, parse_float=len).raw_decode
        self._text, self._at, self._is_whole = "", 0, False
        self._number = 1

    def __iter__(self) -> Iterator[bytes]:
        """Each item on a line of its own, without the line break.

        Raises:
            ValueError: the file is no JSON array; the message names file and item. What follows a
                malformed item cannot be told apart, so this is not a malformed line to be skipped.
        """
        self._expect("[")
        if self._next_character() == "]":
            self._at += 1
        else:
            while True:
                yield self._item()
                self._number += 1
                if self._expect(",]") == "]":
                    break
        if self._next_character():
            raise self._error("something follows the array; is this a file of JSON lines?")

    def _item(self) -> bytes:
        self._next_character()
        while True:
            try:
                _, end = self._scan(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._is_whole:
                    raise self._error(f"not JSON: {error.msg}") from None
            except RecursionError:
                raise self._error("nested too deeply") from None
            else:
                if end < len(self._text) or self._is_whole:  # else a number may go on
                    item = self._text[self._at : end].replace("\r", " ").replace("\n", " ")
                    self._at = end
                    return item.encode()
            size = len(self._text) - self._at
            if size > self._max_bytes:
                raise self._error(f"more than {self._max_bytes} bytes long, or never ending")
            self._read(max(size, _READ_BYTES))

    def _expect(self, wanted: str) -> str:
        found = self._next_character()
        if not found or found not in wanted:
            what = repr(found) if found else "the end of the file"
            raise self._error(f"{' or '.join(wanted)} expected, found {what}")
        self._at += 1
        return found

    def _next_character(self) -> str:
        """The next one that is no white space; empty at the end of the file."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if self._is_whole:
                return ""
            self._read(_READ_BYTES)

    def _read(self, count: int) -> None:
        data = self._stream.read(count)
        self._is_whole = not data
        try:
            more = self._decode(data, final=self._is_whole)
        except UnicodeDecodeError as error:
            raise self._error(f"not UTF-8: {error}") from None
        self._text, self._at = self._text[self._at :] + more, 0

    def _error(self, finding: str) -> ValueError:
        return ValueError(f"--input {self._name}, item {self._number} of the array: {finding}")
