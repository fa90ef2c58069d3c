"""What `shared_atomics` does in PTX, in numpy, so that the selections run in Triton's interpreter.

Import it only where TRITON_INTERPRET is set. One program at a time: its bins and its counter are this module's.
"""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

BINS = 2048
INVALID = np.int64(-(2**63))
bins = np.zeros(BINS, np.int64)
counter = 0
generator = np.random.default_rng(0)


def data(value):
    return value.handle.data if isinstance(value, tl.tensor) else np.asarray(value)


def number(value) -> int:
    return int(data(value).reshape(-1)[0])


def tensor(array, dtype):
    return tl.core.tensor(interpreter.TensorHandle(array, dtype), tl.block_type(dtype, list(array.shape)))


def scalar(value: int):
    return tl.core.tensor(interpreter.TensorHandle(np.array([value], np.int32), tl.int32), tl.int32)


def shared_base():
    clear_bins(0)
    return scalar(0)


def clear_bins(shared) -> None:
    bins[:] = 0


def count_where(shared, at, flag) -> None:
    np.add.at(bins, data(at)[data(flag).astype(bool)], 1)


def find_bin(shared, wanted):
    counts = bins[::-1].cumsum()
    assert counts[-1] >= number(wanted)
    found = BINS - 1 - int(np.argmax(counts >= number(wanted)))
    inside = int(bins[found])
    above = int(counts[BINS - 1 - found]) - inside
    clear_bins(shared)
    return scalar(found), scalar(above), scalar(inside)


def take_where(shared, at, flag):
    taken = np.zeros(data(at).shape, np.int32)
    for i in np.nonzero(data(flag))[0]:
        taken[i] = bins[data(at)[i]]
        bins[data(at)[i]] += 1
    return tensor(taken, tl.int32)


def bin_starts(shared):
    most = scalar(int(bins.max()))
    bins[:] = bins[::-1].cumsum()[::-1] - bins
    return most


def shared_load(address):
    return tensor(bins[data(address) // 4].astype(np.int32), tl.int32)


def claim(shared, flag):
    """In an order of its own, as threads do."""
    global counter
    slots = np.zeros(data(flag).shape, np.int32)
    count = int(np.count_nonzero(data(flag)))
    slots[data(flag).astype(bool)] = counter + generator.permutation(count)
    counter += count
    return tensor(slots, tl.int32)


def read_counter(shared):
    return scalar(counter)


def set_counter(shared, value) -> None:
    global counter
    counter = number(value)


def store_where(pointers, values, flag) -> None:
    tl.store(pointers, values, mask=flag)


def position_of(place):
    near = ((place >> 4) & 7) | ((place & 4) << 1) | ((place >> 3) & 0x30)
    return (place & -512) | near | ((place & 3) << 6) | ((place & 8) << 5)


def keys_of(scores, positions):
    bits = np.where(np.isnan(scores), np.int32(0x7FC00000), (scores + np.float32(0.0)).view(np.int32))
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.astype(np.int64) << 32) | (~positions.astype(np.int64) & 0xFFFFFFFF)


def append_above(shared, buffer, row, scores, places, threshold, stop, length=None) -> None:
    passes = ~(data(scores) <= data(threshold)) & (data(places) < number(stop))
    positions = data(places)
    if length is not None:
        positions = position_of(positions)
    keys = keys_of(data(scores), positions)
    if length is not None:
        keys = np.where(positions < number(length), keys, INVALID)
    flag = tensor(passes, tl.int1)
    tl.store(buffer + claim(shared, flag), tensor(keys, tl.int64), mask=flag)


append_grouped = append_above


def leading_zeros(assembly, constraints, arguments, dtype, is_pure, pack):
    assert "clz.b64" in assembly
    return scalar(64 - (number(arguments[0]) & (2**64 - 1)).bit_length())


def install(*modules) -> None:
    """In place of what the modules of a kernel imported."""
    names = """shared_base clear_bins count_where find_bin take_where bin_starts shared_load claim read_counter
               set_counter store_where append_above append_grouped""".split()
    for module in modules:
        for name in names:
            if hasattr(module, name):
                setattr(module, name, globals()[name])
    tl.inline_asm_elementwise = leading_zeros
    patch = interpreter._patch_lang_core

    def patched(language, scope):
        result = patch(language, scope)
        # Scalars are arrays of one element, which numpy no longer takes for numbers.
        language.range = lambda start, stop, step=1: map(scalar, range(number(start), number(stop), number(step)))
        return result

    interpreter._patch_lang_core = patched
