"""Page pool: reference counts, and an index of cached pages that contain the start of a prompt.
Also slots for recurrent states."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import takewhile

import numpy as np


def prefix_digests(
    prompt: Sequence[int], page_size: int, long: bool = False, adapter: str | None = None
) -> list[bytes]:
    """Return a digest for each full page of a prompt. It identifies the page's contents: keys and
    values depend on all tokens up to the end of the page, on the ``adapter`` and on
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
    """Reference-counted pages, with an index of prompt pages by content. A page is published before
    it is filled, so that concurrent requests with the same prompt compute it once: one of them
    claims and fills the page while the others wait. A filled page without users keeps its contents
    until its memory is needed; the least recently used is evicted first.

    A model with recurrent states has a number of ``slots``; for other models it is None. The states
    at the end of a page are not stored, so prompts of such a model share no pages.
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
        """Number of pages that `take` can provide."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        """Number of cached prompt pages without users."""
        return len(self._idle)

    @property
    def used(self) -> int:
        return self.pages - self.available

    @property
    def slots_used(self) -> int:
        return self.slots - len(self._free_slots)

    def has_slots(self, count: int) -> bool:
        """Return whether `take_slots` can provide ``count`` slots. Always true without states."""
        return self.shares or count <= len(self._free_slots)

    def take_slots(self, count: int) -> list[int]:
        """Reserve slots, with arbitrary contents, for one user. Return an empty list for a model
        without states."""
        return [] if self.shares else [self._free_slots.pop() for _ in range(count)]

    def release_slots(self, slots: Sequence[int]) -> None:
        """Return slots to the pool."""
        self._free_slots += slots

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """Return the published pages, filled or not, of the longest known prefix of a prompt."""
        known = takewhile(self._by_digest.__contains__, digests)
        return [self._by_digest[digest] for digest in known]

    def idle_among(self, pages: Sequence[int]) -> int:
        """Return how many of the pages have no users. Sharing them reduces `available`."""
        return sum(page in self._idle for page in pages)

    def share(self, pages: Sequence[int]) -> None:
        """Add a user to pages that `find` returned."""
        for page in pages:
            self._idle.pop(page, None)
            self._users[page] += 1

    def take(self, count: int) -> list[int]:
        """Reserve pages for one user, with arbitrary contents."""
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
        """Publish a page that ``owner`` will fill, unless another has the same contents."""
        if digest not in self._by_digest:
            self._by_digest[digest] = page
            self._digests[page] = digest
            self._claims[page] = owner

    def claim(self, page: int, owner: int) -> bool:
        """Claim an unfilled page. Return whether ``owner`` has to fill it."""
        if page not in self._digests:
            return True
        return self._claims.setdefault(page, owner) == owner

    def is_filled(self, page: int) -> bool:
        """Return whether a page is published and filled."""
        return page in self._filled

    def is_private(self, page: int) -> bool:
        """Return whether a page is not published."""
        return page not in self._digests

    def fill(self, page: int) -> None:
        """Mark a page as filled."""
        if page in self._digests:
            self._filled.add(page)
            del self._claims[page]

    def release(self, pages: Sequence[int], owner: int) -> None:
        """Remove one user of each page. Later pages of a prompt are evicted first, because they can
        only be found if all earlier ones are cached."""
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
