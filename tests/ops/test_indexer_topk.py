"""The fused indexer against scores in fp64 and a sort, and its batch invariance bit by bit.

Most inputs are small integers: their scores are exact in fp32 in any order of summation and full of ties, so positions
must agree exactly.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cptools.kernels.indexer_topk import KEY_TILE, QUERY_TILE, indexer_scores, indexer_topk

INF, NAN = math.inf, math.nan
SetThreads = Callable[[int], None]


def integers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ids(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def scores_fp64(query: Tensor, weights: Tensor, keys: Tensor) -> np.ndarray:
    products = np.einsum("thd,sd->ths", query.double().numpy(), keys.double().numpy())
    return np.einsum("th,ths->ts", weights.double().numpy(), np.maximum(products, 0))


def best(scores: np.ndarray, k: int) -> np.ndarray:
    """Positions by (score descending, position ascending), padded with -1."""
    order = np.lexsort((np.arange(len(scores)), -scores))[:k]
    return np.pad(order, (0, k - len(order)), constant_values=-1)


def assert_exact(
    query: Tensor, weights: Tensor, keys: Tensor, starts: Sequence[int], lens: Sequence[int], k: int
) -> None:
    """Integers in, so that every position and score is known exactly. Keys that no row sees may hold anything."""
    positions, scores = indexer_topk(query, weights, keys, key_starts=ids(starts), kv_lens=ids(lens), k=k)
    assert positions.dtype == torch.int64
    assert scores.dtype == torch.float32
    assert positions.shape == scores.shape == (len(lens), k)
    for t, (start, length) in enumerate(zip(starts, lens, strict=True)):
        row = scores_fp64(query[t : t + 1], weights[t : t + 1], keys[start : start + length])[0]
        expected = best(row, k)
        assert np.array_equal(positions[t].numpy(), expected), t
        wanted = np.where(expected >= 0, row[expected.clip(min=0)] if length else -INF, -INF)
        assert np.array_equal(scores[t].numpy().astype(np.float64), wanted), t


LENGTHS = [0, 1, 2, 511, 512, 513, 1023, 2047, 2048, 2049, 4096]


@pytest.mark.parametrize("k", [1, 16, 600])
def test_lengths_around_the_tiles(k) -> None:
    """Contexts of a tile more or less, and up to 4,096, in one call (field case D17)."""
    rows = len(LENGTHS)
    query, weights, keys = integers(rows, 3, 8, seed=0), integers(rows, 3, seed=1), integers(4096, 8, seed=2)
    assert_exact(query, weights, keys, [0] * rows, LENGTHS, k)


def test_top_2048_of_4096() -> None:
    query, weights, keys = integers(5, 2, 8, seed=3), integers(5, 2, seed=4), integers(4100, 8, seed=5)
    assert_exact(query, weights, keys, [0] * 5, [2047, 2048, 2049, 4096, 4100], 2048)


def test_more_key_tiles_than_one_merge_takes() -> None:
    """33 tiles of keys with the best scores in the first, the middle and the last."""
    keys = integers(33 * KEY_TILE - 7, 4, seed=6)
    keys[[3, 16 * KEY_TILE, 16 * KEY_TILE + 1, len(keys) - 1]] = 4.0
    query, weights = torch.ones(2, 1, 4), torch.ones(2, 1)
    assert_exact(query, weights, keys, [0, 0], [len(keys), len(keys) - 1], 10)


@pytest.mark.parametrize("queries", [1, 2, 3, 4, 5, 7, 31, 32, 33, 65])
def test_any_number_of_query_rows(queries) -> None:
    """Decode, odd numbers of verification rows, and tiles of queries (field case D15)."""
    assert QUERY_TILE == 32
    query, weights, keys = integers(queries, 4, 8, seed=7), integers(queries, 4, seed=8), integers(600, 8, seed=9)
    assert_exact(query, weights, keys, [0] * queries, [600 - queries + 1 + t for t in range(queries)], 40)


def test_several_sequences_in_one_call() -> None:
    """Positions count from each sequence's own first key."""
    lens, rows = [700, 1, 513, 40], [5, 1, 34, 3]
    firsts = [0, 700, 701, 1214]
    starts = [first for first, count in zip(firsts, rows, strict=True) for _ in range(count)]
    limits = [length - count + 1 + t for length, count in zip(lens, rows, strict=True) for t in range(count)]
    total = sum(rows)
    query, weights, keys = integers(total, 2, 8, seed=10), integers(total, 2, seed=11), integers(1254, 8, seed=12)
    assert_exact(query, weights, keys, starts, limits, 64)


def test_empty_sequences_beside_full_ones() -> None:
    """A sequence without keys starts where the next one does."""
    query, weights, keys = integers(6, 2, 8, seed=13), integers(6, 2, seed=14), integers(30, 8, seed=15)
    assert_exact(query, weights, keys, [0, 0, 0, 20, 30, 30], [0, 20, 19, 10, 0, 0], 8)


@pytest.mark.parametrize("rows", [1, 4, 40])
@pytest.mark.parametrize("keys", [0, 5])
def test_all_lengths_zero(rows, keys) -> None:
    """Nothing to select for anyone: -1 and -inf, no read (field case D14)."""
    positions, scores = indexer_topk(
        torch.full((rows, 2, 8), NAN),
        torch.full((rows, 2), NAN),
        torch.full((keys, 8), NAN),
        key_starts=ids([0] * rows),
        kv_lens=ids([0] * rows),
        k=7,
    )
    assert (positions == -1).all()
    assert (scores == -INF).all()


def test_no_row() -> None:
    positions, scores = indexer_topk(
        torch.empty(0, 2, 8), torch.empty(0, 2), integers(9, 8, seed=16), key_starts=ids([]), kv_lens=ids([]), k=7
    )
    assert positions.shape == scores.shape == (0, 7)


def test_keys_outside_a_rows_range_never_matter() -> None:
    """NaN before, between and after the sequences, and in keys later than a query (field case D13)."""
    keys = torch.full((2000, 8), NAN)
    keys[3:603], keys[700:764] = integers(600, 8, seed=17), integers(64, 8, seed=18)
    query, weights = integers(5, 2, 8, seed=19), integers(5, 2, seed=20)
    assert_exact(query, weights, keys, [3, 3, 700, 700, 1200], [600, 599, 64, 1, 0], 700)
    keys[603:700] = INF
    assert_exact(query, weights, keys, [3, 3, 700, 700, 1200], [600, 599, 64, 1, 0], 700)


def test_a_key_later_than_the_query_is_not_read() -> None:
    """The rows of one tile have different limits: NaN at position 5 is seen by kv_lens 6, not by 5."""
    keys = integers(20, 8, seed=21)
    query, weights = integers(2, 2, 8, seed=22), torch.ones(2, 2)
    keys[5] = NAN
    positions, scores = indexer_topk(query, weights, keys, key_starts=ids([0, 0]), kv_lens=ids([5, 6]), k=8)
    assert not scores[0].isnan().any()
    assert np.array_equal(positions[0].numpy(), best(scores_fp64(query[:1], weights[:1], keys[:5])[0], 8))
    assert positions[1, 0] == 5  # a NaN in a key that is seen stays visible, on top
    assert scores[1, 0].isnan()


def test_zero_scores_of_both_signs_tie() -> None:
    """A negative head weight makes -0.0 of a dead ReLU: it must not lose to 0.0."""
    keys = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    query, weights = torch.tensor([[[-1.0], [-1.0]]]), torch.tensor([[-1.0, 0.0]])
    positions, _ = indexer_topk(query, weights, keys, key_starts=ids([0]), kv_lens=ids([4]), k=4)
    assert positions.tolist() == [[0, 2, 1, 3]]


@pytest.mark.parametrize("heads, dim", [(1, 1), (3, 33), (4, 100), (32, 128)])
def test_real_scores_in_fp64(heads, dim) -> None:
    """Scores within the bound of their rounding, and nothing left out that is better by more than that."""
    lens = [1, 512, 700, 1300]
    query, weights, keys = normal(4, heads, dim, seed=23), normal(4, heads, seed=24), normal(1300, dim, seed=25)
    exact = scores_fp64(query, weights, keys)
    bound = (dim + heads) * 2.0**-23 * scores_fp64(query.abs(), weights.abs(), keys.abs()).max()
    assert np.abs(indexer_scores(query, weights, keys).double().numpy() - exact).max() <= bound
    positions, scores = indexer_topk(query, weights, keys, key_starts=ids([0] * 4), kv_lens=ids(lens), k=128)
    for t, length in enumerate(lens):
        chosen = positions[t][positions[t] >= 0].numpy()
        assert len(chosen) == len(set(chosen.tolist())) == min(length, 128)
        assert np.abs(scores[t, : len(chosen)].numpy() - exact[t, chosen]).max() <= bound
        assert (scores[t].diff()[: len(chosen) - 1] <= 0).all()
        left_out = np.delete(exact[t, :length], chosen)
        assert not len(left_out) or left_out.max() <= exact[t, chosen].min() + 2 * bound


def test_row_beyond_the_keys_raises() -> None:
    query, weights, keys = integers(2, 2, 8, seed=26), integers(2, 2, seed=27), integers(10, 8, seed=28)
    for starts, lens in (([0, 0], [10, 11]), ([0, 4], [10, 7])):
        with pytest.raises(ValueError, match="to 11, there are 10 keys"):
            indexer_topk(query, weights, keys, key_starts=ids(starts), kv_lens=ids(lens), k=3)


def test_wrong_shapes_raise_with_the_numbers() -> None:
    query, weights, keys = torch.zeros(2, 3, 8), torch.zeros(2, 3), torch.zeros(10, 8)
    two = ids([0, 0])
    with pytest.raises(ValueError, match=r"\(2, 3, 8\), \(2, 3\), \(10, 7\)"):
        indexer_topk(query, weights, keys[:, :7], key_starts=two, kv_lens=two, k=3)
    with pytest.raises(ValueError, match=r"\(2, 3, 8\), \(2, 2\), \(10, 8\)"):
        indexer_topk(query, weights[:, :2], keys, key_starts=two, kv_lens=two, k=3)
    with pytest.raises(ValueError, match=r"\(2, 8\), \(2, 3\), \(10, 8\)"):
        indexer_scores(query[:, 0], weights, keys)
    with pytest.raises(ValueError, match=r"key_starts must be int64 or int32 \[2\], got int64 \[1\]"):
        indexer_topk(query, weights, keys, key_starts=two[:1], kv_lens=two, k=3)
    with pytest.raises(ValueError, match=r"kv_lens must be int64 or int32 \[2\], got int64 \[2, 1\]"):
        indexer_topk(query, weights, keys, key_starts=two, kv_lens=two.unsqueeze(1), k=3)


class LargestResult(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple) else (result,):
            if isinstance(x, Tensor) and not func.is_view:
                self.bytes = max(self.bytes, x.numel() * x.element_size())
        return result


def test_memory_does_not_grow_with_the_context() -> None:
    """64 queries over 200,000 keys make no [T, S] tensor, nor anything else that grows with S."""
    largest = []
    for length in (50_000, 200_000):
        query, weights, keys = normal(64, 2, 4, seed=29), normal(64, 2, seed=30), normal(length, 4, seed=31)
        with LargestResult() as watched:
            indexer_topk(query, weights, keys, key_starts=ids([0] * 64), kv_lens=ids([length] * 64), k=256)
        largest.append(watched.bytes)
    assert largest[0] == largest[1]
    assert largest[1] < 4 * 64 * 200_000 / 10


def test_positions_beyond_2_31_scores() -> None:
    """Positions, and T * S, are int64 arithmetic: 2,048 x 1,048,576 is 2^31 scores (field case D11).

    No such tensor is ever made, so only the last row is computed here: its order keys must not depend on the others.
    """
    length = 1_048_576
    keys = torch.zeros(length, 1)
    keys[[length - 1, length - 3, 5]] = 1.0
    positions, scores = indexer_topk(
        torch.ones(1, 1, 1), torch.ones(1, 1), keys, key_starts=ids([0]), kv_lens=ids([length]), k=5
    )
    assert positions.tolist() == [[5, length - 3, length - 1, 0, 1]]
    assert scores.tolist() == [[1.0, 1.0, 1.0, 0.0, 0.0]]


@pytest.mark.parametrize("rows", [2_097_153, 2_097_153 + 2**21])
def test_keys_beyond_2_31_elements(rows, virtual_bytes: Callable[[int], Tensor]) -> None:
    """2,097,153 rows of stride 1,024: offsets of the last keys do not fit 31 bits (field case D12)."""
    memory = virtual_bytes(rows * 1024 * 4).view(torch.float32)
    keys = memory.view(rows, 1024)[:, :8]
    assert (rows - 1) * 1024 >= 2**31
    keys[-600:] = integers(600, 8, seed=32)
    query, weights = integers(3, 2, 8, seed=33), integers(3, 2, seed=34)
    assert_exact(query, weights, keys, [rows - 600] * 3, [598, 599, 600], 50)


@pytest.mark.parametrize("heads, dim", [(1, 33), (3, 33), (4, 100), (2, 257), (32, 128)])
def test_batch_invariance(heads, dim, set_threads: SetThreads) -> None:
    """A row's positions and scores have the bits it gets alone, wherever its sequence stands in the gathered keys."""
    first, second, rows = 1100, 530, 35
    query, weights = normal(2 * rows, heads, dim, seed=35), normal(2 * rows, heads, seed=36)
    keys = normal(first + second, dim, seed=37)
    starts = ids([0] * rows + [first] * rows)
    lens = torch.cat([torch.arange(first - rows, first), torch.arange(second - rows, second)]) + 1

    def run(part: slice, **changed: Tensor) -> tuple[Tensor, Tensor]:
        given = {"keys": keys, "key_starts": starts[part], "kv_lens": lens[part]} | changed
        return indexer_topk(query[part], weights[part], k=64, **given)

    set_threads(1)
    alone = [run(slice(t, t + 1)) for t in range(2 * rows)]
    positions, scores = (torch.cat(column) for column in zip(*alone, strict=True))
    for threads in (1, 2):
        set_threads(threads)
        for part in (slice(None), slice(1, rows), slice(3, 36), slice(rows - 1, rows + 2), slice(rows, 2 * rows)):
            batch = run(part)
            assert torch.equal(batch[0], positions[part])
            assert torch.equal(batch[1], scores[part])
        # The second sequence's keys elsewhere: alone, at an odd address, in a strided tensor.
        part, own = slice(rows, 2 * rows), keys[first:]
        odd = torch.empty(own.numel() + 1)[1:].view(own.shape).copy_(own)
        wide = torch.full((second, 2 * dim), NAN)
        wide[:, ::2] = own
        for moved in (own.clone(), odd, wide[:, ::2]):
            batch = run(part, keys=moved, key_starts=torch.zeros(rows, dtype=torch.int64))
            assert torch.equal(batch[0], positions[part])
            assert torch.equal(batch[1], scores[part])


def test_decode_of_the_last_row_equals_prefill() -> None:
    """One query over the whole context selects, bit by bit, what it selected as the last row of the prompt."""
    length, heads, dim = 700, 4, 32
    query, weights, keys = (
        normal(length, heads, dim, seed=38),
        normal(length, heads, seed=39),
        normal(length, dim, seed=40),
    )
    prefill = indexer_topk(
        query, weights, keys, key_starts=ids([0] * length), kv_lens=torch.arange(1, length + 1), k=64
    )
    for t in (0, 1, 511, 512, length - 1):
        decode = indexer_topk(
            query[t : t + 1],
            weights[t : t + 1],
            keys[: t + 1],
            key_starts=ids([0]),
            kv_lens=ids([t + 1]),
            k=64,
        )
        assert torch.equal(decode[0][0], prefill[0][t])
        assert torch.equal(decode[1][0], prefill[1][t])


def test_fused_and_unfused_scores_are_the_same_bits() -> None:
    """What `indexer_scores` shows for inspection is what the selection saw."""
    query, weights, keys = normal(40, 3, 24, seed=41), normal(40, 3, seed=42), normal(1100, 24, seed=43)
    positions, scores = indexer_topk(query, weights, keys, key_starts=ids([0] * 40), kv_lens=ids([1100] * 40), k=300)
    assert torch.equal(indexer_scores(query, weights, keys).gather(1, positions), scores)


def test_nan_in_one_query_stays_there() -> None:
    query, weights, keys = normal(33, 2, 8, seed=44), normal(33, 2, seed=45), normal(600, 8, seed=46)
    starts, lens = ids([0] * 33), ids([600] * 33)
    clean = indexer_topk(query, weights, keys, key_starts=starts, kv_lens=lens, k=20)
    query[4, 0, 0] = NAN
    poisoned = indexer_topk(query, weights, keys, key_starts=starts, kv_lens=lens, k=20)
    assert poisoned[1][4].isnan().all()
    others = torch.arange(33) != 4
    assert torch.equal(poisoned[0][others], clean[0][others])
    assert torch.equal(poisoned[1][others], clean[1][others])


def test_negative_key_start_is_refused() -> None:
    one = torch.ones(1, 1, 4), torch.ones(1, 1), torch.ones(6, 4)
    with pytest.raises(ValueError, match="from -3 to -1, there are 6 keys"):
        indexer_topk(*one, key_starts=torch.tensor([-3]), kv_lens=torch.tensor([2]), k=2)
