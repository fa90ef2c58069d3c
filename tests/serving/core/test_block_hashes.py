"""Which blocks are the same block."""

from __future__ import annotations

import hashlib
import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cptools import KVLayout
from cptools.formats import BF16_MLA, FP8, FP8_INDEX, FP8_MLA, IndexRows, MlaRows
from serving.core import CacheIdentity, TokenBlocks

LAYOUT = KVLayout(2, 1, 4)
IDENTITY = CacheIdentity("glm", "a1", LAYOUT, (str(FP8_MLA), str(FP8_INDEX)))


@pytest.mark.parametrize("mtp", [False, True])
@given(tokens=st.lists(st.integers(0, 2**32 - 1), max_size=40), data=st.data())
@settings(max_examples=60, deadline=None)
def test_chain_is_as_written_and_grows_in_any_pieces(mtp: bool, tokens: list[int], data) -> None:
    identity = replace(IDENTITY, mtp=mtp)
    want, parent = [], identity.root("t")
    for start in range(0, len(tokens) - 8 - mtp + 1, 8):
        covered = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + 8 + mtp])
        parent = hashlib.sha256(parent + covered).digest()
        want.append(parent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=4)))
    blocks = TokenBlocks(identity, salt="t")
    for start, stop in itertools.pairwise([0, *cuts, len(tokens)]):
        blocks.extend(tokens[start:stop])
    assert blocks.hashes == want
    assert len(blocks) == len(tokens)
    assert blocks.reusable == max(len(tokens) - 1, 0) // 8
    assert blocks.token_ids(0, len(want)) == tuple(tokens[: 8 * len(want)])


def test_anything_that_changes_bytes_changes_every_key() -> None:
    """Field cases C5, F19: models, formats, layouts and tenants never share a key, and equal settings always do."""
    finer = str(MlaRows(512, 64, FP8, power_of_two_scales=False))
    index = str(FP8_INDEX)
    others = [
        replace(IDENTITY, model="glm2"),
        replace(IDENTITY, revision="a2"),
        replace(IDENTITY, row_formats=(str(BF16_MLA), index)),
        replace(IDENTITY, row_formats=(finer, index)),
        replace(IDENTITY, row_formats=(index, str(FP8_MLA))),
        replace(IDENTITY, row_formats=(str(FP8_MLA), str(IndexRows(128, torch.bfloat16)))),
        replace(IDENTITY, layout=KVLayout(2, 4, 4)),
        replace(IDENTITY, layout=KVLayout(1, 1, 8)),
        replace(IDENTITY, layout=KVLayout(4, 1, 2)),
        replace(IDENTITY, mtp=True),
    ]
    assert {identity.layout.virtual_block for identity in others} == {8}
    assert len({identity.root() for identity in [IDENTITY, *others]}) == len(others) + 1
    tokens = list(range(40))
    chains = [TokenBlocks(identity, tokens).hashes for identity in [IDENTITY, *others]]
    chains += [TokenBlocks(IDENTITY, tokens, salt=salt).hashes for salt in ("a", "b", '", "', "\ud800")]
    keys = [key for chain in chains for key in chain]
    assert len(set(keys)) == len(keys)
    again = CacheIdentity("glm", "a1", KVLayout(2, page_size=4), (str(MlaRows(512, 64, FP8)), index))
    assert TokenBlocks(again, tokens).hashes == chains[0]


def test_names_do_not_run_into_each_other() -> None:
    roots = [
        CacheIdentity(model, revision, LAYOUT, formats).root(salt)
        for model, revision, formats, salt in [
            ("ab", "c", ("x",), ""),
            ("a", "bc", ("x",), ""),
            ("a", "b", ("c", "x"), ""),
            ("a", "b", ("cx",), ""),
            ("a", "b", ("c",), "x"),
        ]
    ]
    assert len(set(roots)) == 5


@pytest.mark.parametrize("mtp", [False, True])
def test_one_token_is_always_left(mtp: bool) -> None:
    identity = replace(IDENTITY, mtp=mtp)
    got = [TokenBlocks(identity, range(n)).reusable for n in (0, 1, 7, 8, 9, 16, 17)]
    assert got == [0, 0, 0, 0, 1, 1, 2]


def test_any_container_of_integers_gives_the_same_chain() -> None:
    tokens = [5, 0, 154_879, 7, 1, 2, 3, 4, 9]
    want = TokenBlocks(IDENTITY, tokens).hashes
    arrays = [np.array(tokens), np.array(tokens, dtype=np.uint32), np.array(tokens, dtype=">i4")]
    for given_as in [tuple(tokens), *arrays, torch.tensor(tokens), torch.tensor(tokens, dtype=torch.int32)]:
        assert TokenBlocks(IDENTITY, given_as).hashes == want


@pytest.mark.parametrize(
    "bad", [[1, -1], [2**32], [1.0], ["1"], [None], b"abcd", "abcd", np.ones((2, 2), dtype=int), torch.ones(3)]
)
def test_what_is_no_token_is_refused_and_changes_nothing(bad) -> None:
    blocks = TokenBlocks(IDENTITY, range(9))
    before = list(blocks.hashes)
    with pytest.raises(ValueError):
        blocks.extend(bad)
    assert (len(blocks), blocks.hashes) == (9, before)


@pytest.mark.parametrize("bad", [{"model": ""}, {"revision": ""}, {"row_formats": ()}, {"row_formats": ("",)}])
def test_an_identity_needs_its_names(bad: dict) -> None:
    with pytest.raises(ValueError, match="need a name"):
        replace(IDENTITY, **bad)


def test_a_million_tokens_take_no_loop_over_tokens() -> None:
    """0.03 s on a free core; the bound is for busy ones. Time of this process, not of the clock."""
    identity = replace(IDENTITY, layout=KVLayout(1))
    tokens = [i * 7919 % 154_880 for i in range(1 << 20)]
    spent = []
    for _ in range(3):
        start = time.process_time()
        blocks = TokenBlocks(identity, tokens)
        spent.append(time.process_time() - start)
    assert len(blocks.hashes) == 1 << 14
    assert min(spent) < 0.2
