"""Pages of a model's memory: their users, and the pages that contain the start of a prompt; and
slots for states."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import takewhile

import numpy as np


def prefix_digests(
    prompt: Sequence[int], page_size: int, long: bool = False, adapter: str | None = None
) -> list[bytes]:
    """Digests of the tokens up to the end of each full page of a prompt, which identify its
    contents: keys and values depend on all tokens before them, on the ``adapter``, and on
    `SequencePart.long`."""
    whole = len(prompt) // page_size
    pages = np.asarray(prompt[: whole * page_size], np.int64).reshape(whole, page_size)
    digests, before = [], b"long" if long else b""
    if adapter is not None:
        before = blake2b(before + b"adapter" + adapter.encode(), digest_size=32).digest()
    for page in pages:
        before = blake2b(before + page.tobytes(), digest_size=32).digest()
        digests.append(before)
    return digests


class PagePool:
    """Counts the users of each page, and indexes the pages of prompts by content. A page is
    published before it is filled, so that simultaneous requests with one prompt compute it once:
    one of them claims and fills it, the others wait. A filled page without users keeps its contents
    until its memory is needed; the least recently used is evicted first.

    A model with states has ``slots`` of them, None without. No state is kept at the end of a page,
    so that prompts find nothing computed and share no page.
    """

    def __init__(self, pages: int, slots: int | None = None) -> None:
        self.pages, self.slots = pages, slots or 0
        self.shares = slots is None
        self._free_slots = list(range(self.slots - 1, -1, -1))
        self._free = list(range(pages - 1, -1, -1))
        self._users = [0] * pages
        self._by_digest: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        self._claims: dict[int, int] = {}
        self._filled: set[int] = set()
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages that `take` can give."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        """Pages of prompts, without users."""
        return len(self._idle)

    @property
    def used(self) -> int:
        return self.pages - self.available

    @property
    def slots_used(self) -> int:
        return self.slots - len(self._free_slots)

    def has_slots(self, count: int) -> bool:
        """True if `take_slots` can provide this many; always for a model without states."""
        return self.shares or count <= len(self._free_slots)

    def take_slots(self, count: int) -> list[int]:
        """Slots for one user, with any contents; none of a model without states."""
        return [] if self.shares else [self._free_slots.pop() for _ in range(count)]

    def release_slots(self, slots: Sequence[int]) -> None:
        """Take slots back."""
        self._free_slots += slots

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The pages of the longest known part of a prompt."""
        known = takewhile(self._by_digest.__contains__, digests)
        return [self._by_digest[digest] for digest in known]

    def idle_among(self, pages: Sequence[int]) -> int:
        """Return the number of pages without users; `share` makes that many fewer available."""
        return sum(page in self._idle for page in pages)

    def share(self, pages: Sequence[int]) -> None:
        """Adds a user to pages that `find` found."""
        for page in pages:
            self._idle.pop(page, None)
            self._users[page] += 1

    def take(self, count: int) -> list[int]:
        """Pages for one user, with any contents."""
        assert count <= self.available
        taken = []
        for _ in range(count):
            if not self._free:
                page, _ = self._idle.popitem(last=False)
                self._discard(page)
            page = self._free.pop()
            self._users[page] = 1
            taken.append(page)
        return taken

    def publish(self, page: int, digest: bytes, owner: int) -> None:
        """Lets others find a page that its owner will fill, unless another has these contents."""
        if digest not in self._by_digest:
            self._by_digest[digest] = page
            self._digests[page] = digest
            self._claims[page] = owner

    def claim(self, page: int, owner: int) -> bool:
        """True if this owner must fill a page that is not filled."""
        if page not in self._digests:
            return True
        return self._claims.setdefault(page, owner) == owner

    def is_filled(self, page: int) -> bool:
        """True if a published page is filled."""
        return page in self._filled

    def is_private(self, page: int) -> bool:
        """True if a page is not published."""
        return page not in self._digests

    def fill(self, page: int) -> None:
        """Mark a page as filled."""
        if page in self._digests:
            self._filled.add(page)
            del self._claims[page]

    def release(self, pages: Sequence[int], owner: int) -> None:
        """Removes a user of each. Later pages of a prompt are evicted before earlier ones, without
        which they cannot be found."""
        for page in reversed(pages):
            assert self._users[page] > 0
            self._users[page] -= 1
            if self._claims.get(page) == owner:
                del self._claims[page]
            if self._users[page]:
                continue
            if page in self._filled:
                self._idle[page] = None
            else:
                self._discard(page)

    def _discard(self, page: int) -> None:
        digest = self._digests.pop(page, None)
        if digest is not None:
            del self._by_digest[digest]
            self._filled.discard(page)
        self._free.append(page)
