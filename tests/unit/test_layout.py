"""Chunks and spans of mixed tensors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_adpsgd.engine.layout import DTYPE_CODES, Layout, Shard, TensorSpec
from hvd_adpsgd.engine.loop import layout_mark
from hvd_adpsgd.errors import ModelMismatchError

ITEMSIZE = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}

tensors = st.lists(
    st.tuples(
        st.lists(st.integers(0, 9), max_size=3).map(tuple), st.sampled_from(list(DTYPE_CODES))
    ),
    max_size=8,
)


def specs_of(generations):
    for g, members in enumerate(generations):
        yield [TensorSpec(f"{g}.{i}", *each, 1 + 3 * (i % 2)) for i, each in enumerate(members)]


def require_apart(parts):
    """Chunks lie one behind the other, and within the part."""
    for part in parts:
        ends = [c.offset + c.count * ITEMSIZE[c.dtype] for c in part.chunks]
        assert all(a <= c.offset for a, c in zip(ends, part.chunks[1:], strict=False))
        assert not part.chunks or (part.chunks[0].offset == 0 and ends[-1] <= part.nbytes)


@given(st.lists(tensors, min_size=1, max_size=3), st.sampled_from([64, 128, 4096]))
def test_every_element_has_exactly_one_place(generations, chunk_nbytes):
    layout = Layout(chunk_nbytes)
    chunks = []
    for specs in specs_of(generations):
        part = layout.extend(specs)
        chunks += part.chunks
        require_apart([part])
    assert layout.nchunks == len(chunks)
    taken = [np.zeros(c.count, dtype=int) for c in chunks]
    seen = [np.zeros(t.count, dtype=int) for t in layout.tensors]
    rare = layout.rare(layout.nchunks)
    for tensor, start, chunk, place, count in layout.spans:
        assert layout.tensors[tensor].dtype == chunks[chunk].dtype
        assert (layout.tensors[tensor].period > 1) == chunks[chunk].rare == (chunk in rare)
        taken[chunk][place : place + count] += 1
        seen[tensor][start : start + count] += 1
    assert all((t == 1).all() for t in taken + seen)
    assert all(c.count * ITEMSIZE[c.dtype] <= chunk_nbytes for c in chunks)
    assert (np.diff(layout.spans[:, 2]) >= 0).all()


@given(
    st.lists(tensors, min_size=1, max_size=3), st.sampled_from([64, 128, 4096]), st.integers(2, 5)
)
def test_every_element_has_exactly_one_place_in_one_shard(generations, chunk_nbytes, of):
    whole = Layout(chunk_nbytes)
    shards = [Layout(chunk_nbytes, Shard(number, of)) for number in range(of)]
    for specs in specs_of(generations):
        part = whole.extend(specs)
        parts = [shard.extend(specs) for shard in shards]
        nbytes = [p.nbytes for p in parts]
        assert sum(nbytes) == part.nbytes
        assert max(nbytes) - min(nbytes) <= 4 * chunk_nbytes  # of each kind 2
        for rare in (False, True):
            cut = [c.count for p in parts for c in p.chunks if c.rare == rare]
            assert cut == [c.count for c in part.chunks if c.rare == rare]
        require_apart(parts)
    seen = [np.zeros(t.count, dtype=int) for t in whole.tensors]
    for shard in shards:
        sizes = [c.count for p in shard.parts for c in p.chunks]
        for tensor, start, chunk, place, count in shard.spans:
            seen[tensor][start : start + count] += 1
            assert place + count <= sizes[chunk]
    assert all((s == 1).all() for s in seen)
    marks = {p.fingerprint for layout in (whole, *shards) for p in layout.parts[:1]}
    assert len(marks) == of + 1, "a shard is never taken for another one"


def test_a_later_generation_leaves_earlier_chunks_alone():
    a = [TensorSpec("a", (100,), "float32")]
    one, two = Layout(128), Layout(128)
    one.extend(a)
    two.extend(a)
    two.extend([TensorSpec("b", (5,), "float32")])
    assert one.parts[0].fingerprint == two.parts[0].fingerprint
    assert two.parts[1].last_chunk > two.parts[0].last_chunk


@pytest.mark.parametrize(
    ("other", "chunk_nbytes"),
    [
        (("a", (4, 1), "float32"), 64),
        (("b", (4,), "float32"), 64),
        (("a", (4,), "float64"), 64),
        (("a", (4,), "float32", 4), 64),  # another period: other chunks in the same place
        (("a", (4,), "float32"), 128),  # else a chunk could be longer than the buffer for it
    ],
)
def test_fingerprints_tell_models_and_sizes_of_chunks_apart(other, chunk_nbytes):
    one = Layout(64).extend([TensorSpec("a", (4,), "float32")])
    assert Layout(chunk_nbytes).extend([TensorSpec(*other)]).fingerprint != one.fingerprint


def test_a_name_is_used_once():
    layout = Layout(64)
    layout.extend([TensorSpec("a", (), "float32")])
    with pytest.raises(ModelMismatchError, match="'a'"):
        layout.extend([TensorSpec("a", (2,), "float32")])


def test_an_integer_tensor_cannot_be_averaged():
    with pytest.raises(ModelMismatchError, match="int64 cannot be averaged"):
        TensorSpec("steps", (), "int64")


@pytest.mark.parametrize("n", [1, 2, 4099, 4100, 10_007, 10**6, 2**24])
def test_marks_of_any_number_of_super_learners_sum_exactly(n: int) -> None:
    """Every partial sum of a mean in float32 is a whole number that float32 holds."""
    for fingerprint, chunk in [(0, 0), (4092, 0), (2**63 - 1, 7), (12345678901, 10**6)]:
        mark = layout_mark(fingerprint, chunk, n)
        assert mark == int(mark) and mark >= 1 and n * mark <= 2**24


def test_marks_tell_layouts_apart() -> None:
    assert len({layout_mark(fingerprint, 3, 4000) for fingerprint in range(4093)}) == 4093
    assert len({layout_mark(fingerprint, 3, 10**5) for fingerprint in range(4093)}) > 100
