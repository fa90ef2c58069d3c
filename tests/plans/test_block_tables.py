"""Which pages a request holds, against a plain count."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cptools.block_tables import BlockTables
from cptools.layout import KVLayout
from cptools.page_allocator import PageAllocator, PoolExhausted

PAGES, BLOCK = 7, 6  # a virtual block of 2 ranks x 3 rows


def tables(pages: int = PAGES) -> tuple[BlockTables, PageAllocator]:
    allocator = PageAllocator(pages)
    return BlockTables(KVLayout(2, 1, 3), allocator), allocator


class Against(RuleBasedStateMachine):
    """Every call either does what the counts say or raises and changes nothing."""

    def __init__(self):
        super().__init__()
        self.tables, self.allocator = tables()
        self.held = {}  # pages of each open request, in order
        self.seen = set()

    @rule()
    def open(self):
        request = self.tables.open()
        assert request not in self.seen
        self.seen.add(request)
        self.held[request] = []

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def reserve(self, data):
        tokens = data.draw(st.dictionaries(st.sampled_from(sorted(self.held)), st.integers(0, (PAGES + 1) * BLOCK)))
        missing = {request: max(-(-n // BLOCK) - len(self.held[request]), 0) for request, n in tokens.items()}
        if sum(missing.values()) > PAGES - sum(map(len, self.held.values())):
            with pytest.raises(PoolExhausted):
                self.tables.reserve(tokens)
            return  # the invariants see that nothing has changed
        self.tables.reserve(tokens)
        for request, count in missing.items():
            row = self.tables.table([request])[0].tolist()
            assert len(row) == len(self.held[request]) + count
            assert row[: len(self.held[request])] == self.held[request]  # pages that were held stay where they are
            self.held[request] = row

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def close(self, data):
        request = data.draw(st.sampled_from(sorted(self.held)))
        self.tables.close(request)
        del self.held[request]
        with pytest.raises(ValueError, match=f"request {request} is not open"):
            self.tables.close(request)

    @invariant()
    def no_page_has_two_users(self):
        pages = [page for held in self.held.values() for page in held]
        assert len(set(pages)) == len(pages)
        assert [self.allocator.users(page) for page in range(PAGES)] == [int(page in pages) for page in range(PAGES)]

    @invariant()
    def tables_are_padded(self):
        requests = sorted(self.held, reverse=True)
        width = max((len(held) for held in self.held.values()), default=0)
        expected = [self.held[request] + [-1] * (width - len(self.held[request])) for request in requests]
        table = self.tables.table(requests)
        assert table.dtype == torch.int64
        assert table.shape == (len(requests), width)
        assert table.tolist() == expected


TestAgainst = Against.TestCase
TestAgainst.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("tokens, pages", [(0, 0), (1, 1), (5, 1), (6, 1), (7, 2), (12, 2), (13, 3)])
def test_a_page_covers_a_block_on_all_ranks(tokens, pages):
    """The width of a table is ceil(tokens / (page_size * N)), divisible or not (field case C7)."""
    held, allocator = tables()
    request = held.open()
    held.reserve({request: tokens})
    assert held.table([request]).shape == (1, pages)
    assert allocator.num_free == PAGES - pages


def test_reserve_is_all_or_nothing_over_all_requests():
    """A request whose pages would have sufficed gets none either when another's do not."""
    held, allocator = tables(3)
    first, second, third = held.open(), held.open(), held.open()
    held.reserve({first: 2 * BLOCK})
    with pytest.raises(PoolExhausted, match="2 pages wanted, 1 of 3 are free"):
        held.reserve({second: BLOCK, third: BLOCK})
    with pytest.raises(ValueError, match="request 99 is not open"):
        held.reserve({second: BLOCK, 99: BLOCK})
    with pytest.raises(ValueError, match="-1 is negative"):
        held.reserve({second: BLOCK, third: -1})
    assert allocator.num_free == 1
    assert held.table([first, second, third]).tolist() == [[0, 1], [-1, -1], [-1, -1]]
    held.reserve({first: BLOCK, second: BLOCK, third: 0})
    assert held.table([first, second, third]).tolist() == [[0, 1], [2, -1], [-1, -1]]


def test_reserve_is_for_the_first_tokens_not_for_more():
    """Growing token by token takes a page only when a block is full; asking for less takes and gives nothing."""
    held, allocator = tables()
    request = held.open()
    for tokens in range(1, 2 * BLOCK + 1):
        held.reserve({request: tokens})
        assert PAGES - allocator.num_free == -(-tokens // BLOCK)
    held.reserve({request: 1})
    assert held.table([request]).tolist() == [[0, 1]]


def test_close_gives_the_pages_back():
    held, allocator = tables()
    first, second = held.open(), held.open()
    held.reserve({first: 3 * BLOCK})
    held.reserve({second: BLOCK})
    held.close(first)
    assert allocator.num_free == PAGES - 1
    assert held.table([second]).tolist() == [[3]]
    third = held.open()
    held.reserve({third: BLOCK})
    assert held.table([third, second]).tolist() == [[0], [3]]
    with pytest.raises(ValueError, match=rf"request {first} is not open; open: \[{second}, {third}\]"):
        held.close(first)
    assert allocator.num_free == PAGES - 2


def test_a_handle_is_never_used_again():
    held, _ = tables()
    closed = held.open()
    held.close(closed)
    assert held.open() != closed


def test_a_shared_page_stays_with_its_other_user():
    held, allocator = tables()
    request = held.open()
    held.reserve({request: 2 * BLOCK})
    allocator.retain([1])
    held.close(request)
    assert [allocator.users(page) for page in (0, 1)] == [0, 1]


def test_a_request_begins_with_pages_of_others_and_pages_of_its_own():
    """It takes over one user of each: what it shares stays behind when it closes, the rest is free."""
    held, allocator = tables()
    first = held.open()
    held.reserve({first: 2 * BLOCK})
    allocator.retain([0, 1])
    second = held.open([0, 1], allocator.allocate(1))
    held.reserve({second: 3 * BLOCK + 1})
    assert held.table([first, second]).tolist() == [[0, 1, -1, -1], [0, 1, 2, 3]]
    assert [held.pages(second, 1), held.pages(second, stop=2), held.pages(second, 1, 3)] == [[1, 2, 3], [0, 1], [1, 2]]
    assert [held.read_only_tokens(request) for request in (first, second)] == [0, 2 * BLOCK]
    held.close(second)
    assert [allocator.users(page) for page in range(4)] == [1, 1, 0, 0]
    held.close(first)
    assert allocator.num_free == PAGES
    with pytest.raises(ValueError, match=r"can not begin with pages \[0\]: they are free"):
        held.open([0])
    with pytest.raises(ValueError, match="page 7 is outside num_pages=7"):
        held.open([], [7])


def test_blocks_become_read_only_and_stay_so():
    held, _ = tables()
    request = held.open()
    held.reserve({request: 2 * BLOCK})
    for blocks, tokens in [(0, 0), (1, BLOCK), (2, 2 * BLOCK), (1, 2 * BLOCK)]:
        held.protect(request, blocks)
        assert held.read_only_tokens(request) == tokens
    with pytest.raises(ValueError, match=f"request {request} holds 2 pages, no 3 to protect"):
        held.protect(request, 3)
    held.close(request)
    for call in (lambda: held.protect(request, 0), lambda: held.read_only_tokens(request)):
        with pytest.raises(ValueError, match=f"request {request} is not open"):
            call()


def test_unknown_requests_raise():
    held, _ = tables()
    request = held.open()
    for call in (lambda: held.reserve({request: 0, 99: 1}), lambda: held.close(99), lambda: held.table([request, 99])):
        with pytest.raises(ValueError, match=rf"request 99 is not open; open: \[{request}\]"):
            call()


def test_no_request():
    held, _ = tables()
    assert held.table([]).shape == (0, 0)
