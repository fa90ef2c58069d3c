"""PageAllocator against a plain model."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cptools.page_allocator import PageAllocator, PoolExhausted

PAGES = 6
some_pages = st.lists(st.integers(-1, PAGES), max_size=5)


class Against(RuleBasedStateMachine):
    """Every call either does what the counts say or raises and changes nothing."""

    def __init__(self):
        super().__init__()
        self.allocator = PageAllocator(PAGES)
        self.users = dict.fromkeys(range(PAGES), 0)

    @rule(n=st.integers(-1, PAGES + 1))
    def allocate(self, n):
        free = [page for page in range(PAGES) if not self.users[page]]
        if n < 0:
            with pytest.raises(ValueError, match=f"n={n}"):
                self.allocator.allocate(n)
        elif n > len(free):
            with pytest.raises(PoolExhausted, match=f"{n} pages wanted, {len(free)} of {PAGES} are free"):
                self.allocator.allocate(n)
        else:
            assert self.allocator.allocate(n) == free[:n]
            self.users |= dict.fromkeys(free[:n], 1)

    @rule(pages=some_pages)
    def retain(self, pages):
        if all(self.users.get(page) for page in pages):
            self.allocator.retain(pages)
            for page in pages:
                self.users[page] += 1
        else:
            with pytest.raises(ValueError):
                self.allocator.retain(pages)

    @rule(pages=some_pages)
    def release(self, pages):
        if all(self.users.get(page, 0) >= pages.count(page) for page in pages):
            self.allocator.release(pages)
            for page in pages:
                self.users[page] -= 1
        else:
            with pytest.raises(ValueError):
                self.allocator.release(pages)

    @invariant()
    def counts_agree(self):
        assert [self.allocator.users(page) for page in range(PAGES)] == list(self.users.values())
        assert self.allocator.num_free == sum(not n for n in self.users.values())
        assert self.allocator.num_pages == PAGES


TestAgainst = Against.TestCase
TestAgainst.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_page_released_twice_in_one_call_needs_two_users():
    allocator = PageAllocator(2)
    (page,) = allocator.allocate(1)
    with pytest.raises(ValueError, match="page 0 is released 2 times but has 1 users"):
        allocator.release([page, page])
    allocator.retain([page])
    allocator.release([page, page])
    assert allocator.num_free == 2


def test_pages_may_be_any_iterable():
    allocator = PageAllocator(3)
    pages = allocator.allocate(3)
    allocator.retain(page for page in pages)
    allocator.release(iter(pages))
    assert allocator.num_free == 0


@pytest.mark.parametrize("page", [-1, 2])
def test_pages_out_of_range_are_refused(page):
    allocator = PageAllocator(2)
    allocator.allocate(2)
    for call in (allocator.retain, allocator.release):
        with pytest.raises(ValueError, match=f"page {page} is outside num_pages=2"):
            call([0, page])
    with pytest.raises(ValueError, match=f"page {page} is outside num_pages=2"):
        allocator.users(page)
    assert (allocator.users(0), allocator.num_free) == (1, 0)


def test_a_free_page_has_no_users_to_add_to():
    with pytest.raises(ValueError, match="page 1 is free"):
        PageAllocator(2).retain([1])
    with pytest.raises(ValueError, match="num_pages=-1"):
        PageAllocator(-1)


def test_tensors_and_numpy_integers_are_page_ids_like_any_other() -> None:
    """Tensors hash by identity, so that a page named twice would pass for two pages."""
    allocator = PageAllocator(4)
    allocator.allocate(2)
    with pytest.raises(ValueError, match="released 2 times"):
        allocator.release(torch.tensor([0, 0]))
    allocator.release(torch.tensor([1]))
    assert [type(page) for page in allocator.allocate(1)] == [int]
    with pytest.raises(ValueError, match="must be an integer"):
        allocator.release([0.5])
