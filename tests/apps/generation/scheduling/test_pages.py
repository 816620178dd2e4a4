"""Who uses the pages of a model's memory."""

import pytest

from megatron.apps.generation.scheduling.pages import PagePool, prefix_digests

A, B, C = b"a", b"b", b"c"


def filled(pool, *digests, owner=0):
    """Pages with these contents, of one user."""
    pages = pool.take(len(digests))
    for page, digest in zip(pages, digests, strict=True):
        pool.publish(page, digest, owner)
        pool.fill(page)
    return pages


def test_digests_of_full_pages():
    digests = prefix_digests([1, 2, 3, 4, 5, 6, 7], 3)
    assert len(digests) == 2
    assert prefix_digests([1, 2, 3, 4, 5, 6], 3) == digests
    assert prefix_digests([1, 2, 3], 3) == digests[:1]
    assert prefix_digests([1, 2], 3) == []
    # The second page has the same tokens after others: other keys and values.
    assert prefix_digests([9, 2, 3, 4, 5, 6], 3)[1] != digests[1]


def test_released_pages_are_found_until_their_room_is_needed():
    pool = PagePool(4)
    pages = filled(pool, A, B)
    pool.release(pages, 0)
    assert (pool.used, pool.cached, pool.available) == (0, 2, 4)
    assert pool.find([A, B, C]) == pages
    pool.take(3)
    # The end of a prompt goes before its start, without which it is of no use.
    assert pool.find([A, B]) == pages[:1]
    pool.take(1)
    assert pool.find([A]) == []
    assert (pool.used, pool.available) == (4, 0)


def test_least_recently_used_pages_go_first():
    pool = PagePool(2)
    (a,), (b,) = filled(pool, A), filled(pool, B)
    pool.release([a], 0)
    pool.release([b], 0)
    pool.share([a])
    pool.release([a], 0)
    pool.take(1)
    assert pool.find([A]) == [a] and pool.find([B]) == []


def test_shared_pages_stay_until_the_last_user_goes():
    pool = PagePool(3)
    pages = filled(pool, A)
    pool.share(pool.find([A]))
    pool.release(pages, 0)
    assert pool.used == 1
    assert pool.take(2) and pool.available == 0
    pool.release(pages, 1)
    assert pool.available == pool.cached == 1


def test_idle_pages_that_are_to_be_shared_do_not_count_as_available():
    pool = PagePool(3)
    pages = filled(pool, A, B)
    pool.release(pages, 0)
    assert pool.available - pool.idle_among(pages) == 1


def test_claims_pass_to_the_next_user():
    pool = PagePool(3)
    (page,) = pool.take(1)
    pool.publish(page, A, 7)
    pool.share(pool.find([A]))
    assert not pool.claim(page, 8) and not pool.is_filled(page)
    pool.release([page], 7)
    assert pool.claim(page, 8) and not pool.claim(page, 9)
    pool.fill(page)
    assert pool.is_filled(page)


def test_pages_that_were_never_filled_are_not_kept():
    pool = PagePool(3)
    (page,) = pool.take(1)
    pool.publish(page, A, 7)
    pool.release([page], 7)
    assert pool.cached == 0 and pool.find([A]) == []


def test_first_page_of_equal_ones_is_found():
    pool = PagePool(3)
    first, second = filled(pool, A), pool.take(1)
    pool.publish(second[0], A, 1)
    pool.fill(second[0])
    assert pool.find([A]) == first
    pool.release(second, 1)
    assert pool.cached == 0


def test_releasing_twice_is_an_error():
    pool = PagePool(1)
    pages = pool.take(1)
    pool.release(pages, 0)
    with pytest.raises(AssertionError):
        pool.release(pages, 0)
