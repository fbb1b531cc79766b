"""What travels together, in which pieces, under which tag."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import dense

from mpipipe.protocol.plan import (
    MAX_TAG,
    Plan,
    VariableSpec,
    first_difference,
    from_json,
    item_bytes,
    make_plan,
    to_json,
)

MIB = 1 << 20


def plan(
    variables, has_gradient=None, piece_bytes=4 * MIB, fuse_bytes=0, max_buckets=1000, divisible=False, **alone
) -> Plan:
    return make_plan(
        variables,
        [True] * len(variables) if has_gradient is None else has_gradient,
        piece_bytes=piece_bytes,
        fuse_bytes=fuse_bytes,
        max_buckets=max_buckets,
        divisible=divisible,
        **alone,
    )


def groups(made: Plan) -> list[tuple[int, ...]]:
    return [bucket.variables for bucket in made.buckets]


def assert_tags_are_valid(made: Plan) -> None:
    assert [piece.index for piece in made.pieces] == list(range(len(made.pieces)))
    assert len(made.pieces) <= MAX_TAG


# ------------------------------------------------------------------------------------------------------------ grouping


def test_the_variables_of_a_layer_share_a_bucket():
    assert groups(plan(dense("a", 10, 10) + dense("b", 10, 10))) == [(0, 1), (2, 3)]


def test_a_variable_without_a_layer_is_a_group_of_its_own():
    assert groups(plan([VariableSpec("x", (3,), "float32"), VariableSpec("y", (3,), "float32")])) == [(0,), (1,)]


def test_a_layer_within_a_layer_is_told_apart_from_its_neighbour():
    variables = dense("block/a", 4, 4) + dense("block/b", 4, 4)
    assert [bucket.variables for bucket in plan(variables).buckets] == [(0, 1), (2, 3)]


def test_buckets_are_in_the_order_of_the_forward_pass_and_so_is_their_priority():
    made = plan(dense("a", 4, 4) + dense("b", 4, 4) + dense("c", 4, 4))
    assert [bucket.index for bucket in made.buckets] == [0, 1, 2]
    assert [bucket.priority for bucket in made.buckets] == sorted(bucket.priority for bucket in made.buckets)


def test_every_bucket_belongs_to_the_first_server_by_default():
    assert {bucket.owner for bucket in plan(dense("a", 4, 4) + dense("b", 4, 4)).buckets} == {0}


def test_a_change_of_dtype_within_a_layer_makes_two_buckets():
    variables = [VariableSpec("a/kernel", (4,), "bfloat16"), VariableSpec("a/scale", (4,), "float32")]
    made = plan(variables, fuse_bytes=1 << 30)
    assert [(bucket.variables, bucket.dtype) for bucket in made.buckets] == [((0,), "bfloat16"), ((1,), "float32")]


def test_tiny_neighbours_are_fused_up_to_the_size_given():
    tiny = [VariableSpec(f"l{i}/w", (256,), "float32") for i in range(8)]  # 1 KiB each
    assert groups(plan(tiny, fuse_bytes=4096)) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert groups(plan(tiny, fuse_bytes=4095)) == [(0, 1, 2), (3, 4, 5), (6, 7)]


def test_a_layer_at_or_above_the_fusing_size_stays_alone():
    variables = [VariableSpec("a/w", (8,), "float32"), VariableSpec("b/w", (5000,), "float32")]
    assert groups(plan(variables, fuse_bytes=4096)) == [(0,), (1,)]


def test_nothing_is_fused_where_the_fusing_size_is_0():
    assert len(plan([VariableSpec(f"l{i}/w", (1,), "float32") for i in range(20)]).buckets) == 20


@pytest.mark.parametrize("layers,most", [(200, 64), (200, 1), (65, 64), (64, 64), (1000, 7)])
def test_there_are_never_more_buckets_than_asked_for(layers, most):
    made = plan([VariableSpec(f"l{i}/w", (100 + i,), "float32") for i in range(layers)], max_buckets=most)
    assert 1 <= len(made.buckets) <= most
    assert [v for bucket in made.buckets for v in bucket.variables] == list(range(layers))


def test_changes_of_dtype_are_kept_even_where_that_makes_too_many_buckets():
    variables = [VariableSpec(f"l{i}/w", (4,), ("float32", "bfloat16")[i % 2]) for i in range(10)]
    assert len(plan(variables, max_buckets=3).buckets) == 10


# ---------------------------------------------------------------------------------------------------- what is left out


def test_variables_without_a_gradient_are_in_no_bucket():
    made = plan(dense("a", 4, 4) + dense("frozen", 4, 4) + dense("c", 4, 4), [True, True, False, False, True, False])
    assert groups(made) == [(0, 1), (4,)]
    assert made.has_gradient == (True, True, False, False, True, False)
    assert len(made.variables) == 6


def test_a_model_without_any_gradient_has_no_bucket():
    made = plan(dense("a", 4, 4), [False, False])
    assert made.buckets == () and made.pieces == () and made.nbytes == 0


def test_variables_of_size_0_are_in_no_bucket():
    variables = [VariableSpec("a/kernel", (0, 7), "float32"), VariableSpec("a/bias", (7,), "float32")]
    assert groups(plan(variables)) == [(1,)]


def test_a_scalar_variable_has_one_element():
    made = plan([VariableSpec("a/scale", (), "float32")])
    assert (made.nbytes, made.buckets[0].pieces[0].nbytes) == (4, 4)


def test_a_mark_is_needed_for_every_variable():
    with pytest.raises(ValueError, match="2 variables but 1 marks"):
        plan(dense("a", 4, 4), [True])


def test_a_dtype_that_cannot_be_sent_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="dtype string cannot be synchronised"):
        plan([VariableSpec("a/words", (3,), "string")])
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        item_bytes("float8_e4m3fn")


def test_a_dtype_that_cannot_be_sent_does_not_matter_without_a_gradient():
    assert groups(plan([VariableSpec("a/words", (3,), "string"), *dense("b", 4, 4)], [False, True, True])) == [(1, 2)]


# -------------------------------------------------------------------------------------------------------------- pieces


def test_a_64_mib_layer_travels_in_sixteen_pieces_of_4_mib():
    made = plan([VariableSpec("big/kernel", (4096, 4096), "float32")])
    assert [piece.nbytes for piece in made.pieces] == [4 * MIB] * 16
    assert [piece.offset for piece in made.pieces] == [i * 4 * MIB for i in range(16)]


def test_pieces_of_a_bucket_are_about_equal():
    sizes = [piece.nbytes for piece in plan([VariableSpec("a/w", (1025,), "float32")], piece_bytes=4096).pieces]
    assert sum(sizes) == 4100 and max(sizes) - min(sizes) <= 8


@pytest.mark.parametrize("piece_bytes", [1024, 1025, 4099])
@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_no_message_is_longer_than_asked_for(piece_bytes, dtype):
    made = plan([VariableSpec("a/w", (piece_bytes,), dtype)], piece_bytes=piece_bytes)
    assert max(piece.nbytes for piece in made.pieces) <= piece_bytes


def test_200_layers_have_valid_tags():
    made = plan([v for i in range(200) for v in dense(f"l{i}", 1000, 1000)], piece_bytes=64 << 10, max_buckets=64)
    assert_tags_are_valid(made)


def test_hundreds_of_tiny_variables_make_few_messages():
    made = plan([v for i in range(400) for v in dense(f"l{i}", 3, 5)], fuse_bytes=16 << 10, max_buckets=64)
    assert_tags_are_valid(made)
    assert len(made.pieces) == len(made.buckets) <= 4


@pytest.mark.parametrize("piece_bytes,divisible", [(1024, False), (64 << 10, True), (4 * MIB, False)])
def test_a_model_of_100_gb_has_valid_tags_because_its_pieces_grow(piece_bytes, divisible):
    variables = [v for i in range(250) for v in dense(f"l{i}", 10_000, 10_000)]  # 100 GB and 10 MB of biases
    made = plan(variables, piece_bytes=piece_bytes, fuse_bytes=16 << 10, max_buckets=64, divisible=divisible)
    assert made.nbytes == 250 * 4 * (10_000 * 10_000 + 10_000)
    assert_tags_are_valid(made)
    assert max(piece.nbytes for piece in made.pieces) <= max(piece_bytes, 2 * math.ceil(made.nbytes / MAX_TAG))


# --------------------------------------------------------------------------------------------------------------- units


def regions(unit) -> list[tuple[int, int, int]]:
    return [(region.variable, region.start, region.stop) for region in unit.regions]


def test_the_server_updates_bucket_by_bucket_where_the_plan_is_not_divisible():
    made = plan(dense("a", 300, 10) + dense("b", 10, 10), piece_bytes=4096)
    assert len(made.buckets[0].pieces) == 3
    assert [unit.pieces for unit in made.units] == [bucket.pieces for bucket in made.buckets]
    assert [regions(unit) for unit in made.units] == [[(0, 0, 3000), (1, 0, 10)], [(2, 0, 100), (3, 0, 10)]]
    assert made.unit_of == (0, 0, 0, 1)


def test_the_server_updates_piece_by_piece_where_the_plan_is_divisible():
    made = plan(dense("a", 300, 10) + dense("b", 10, 10), piece_bytes=4096, divisible=True)
    assert [unit.pieces for unit in made.units] == [(piece,) for piece in made.pieces]
    assert [unit.bucket for unit in made.units] == [0, 0, 0, 1]
    assert [regions(unit) for unit in made.units] == [
        [(0, 0, 1000)], [(0, 1000, 2010)], [(0, 2010, 3000), (1, 0, 10)], [(2, 0, 100), (3, 0, 10)]
    ]  # fmt: skip
    assert made.unit_of == (0, 1, 2, 3)


def test_a_piece_that_spans_several_variables_has_a_region_of_each():
    fused = [VariableSpec(f"l{i}/w", (size,), "float32") for i, size in enumerate([50, 50, 300, 50, 50])]
    made = plan(fused, piece_bytes=1024, fuse_bytes=1 << 20, divisible=True)
    (first, second) = made.units
    assert first.nbytes == second.nbytes == 1000
    assert regions(first) == [(0, 0, 50), (1, 0, 50), (2, 0, 150)]
    assert regions(second) == [(2, 150, 300), (3, 0, 50), (4, 0, 50)]


def test_a_variable_that_is_no_longer_than_a_piece_is_not_divided_in_a_divisible_plan():
    fused = [VariableSpec(f"l{i}/w", (100,), "float32") for i in range(5)]
    made = plan(fused, piece_bytes=1024, fuse_bytes=1 << 20, divisible=True)
    assert [regions(unit) for unit in made.units] == [
        [(0, 0, 100), (1, 0, 100)], [(2, 0, 100), (3, 0, 100), (4, 0, 100)]
    ]  # fmt: skip


def test_a_piece_of_a_divisible_plan_may_be_almost_twice_as_long_as_asked_for_and_no_longer():
    made = plan([VariableSpec("a/w", (10, 230), "float32")], piece_bytes=1024, divisible=True)  # rows of 920 bytes
    assert sorted(piece.nbytes for piece in made.pieces) == [920] * 8 + [1840]


def test_a_region_is_counted_in_elements_of_the_dtype():
    made = plan([VariableSpec("a/w", (1024,), "float16")], piece_bytes=1024, divisible=True)
    assert [regions(unit) for unit in made.units] == [[(0, 0, 512)], [(0, 512, 1024)]]
    assert [unit.regions[0].size for unit in made.units] == [512, 512]


@pytest.mark.parametrize(
    "shape,piece_bytes,block",
    [
        ((1000, 100), 64 << 10, 100),  # rows
        ((3, 3, 64, 128), 64 << 10, 128),  # a convolution's kernel: its last axis
        ((8, 200, 16), 16 << 10, 16),
        ((50, 5000), 16 << 10, 1),  # rows longer than a piece: single elements
        ((100, 1), 1024, 1),
    ],
)
def test_pieces_of_a_divisible_plan_end_where_a_block_of_a_variable_does(shape, piece_bytes, block):
    made = plan([VariableSpec("a/w", shape, "float32")], piece_bytes=piece_bytes, divisible=True)
    assert all(region.start % block == region.stop % block == 0 for unit in made.units for region in unit.regions)
    assert len(made.units) == math.ceil(math.prod(shape) * 4 / piece_bytes)


def test_the_pieces_of_a_large_kernel_are_about_as_long_in_a_divisible_plan():
    made = plan([VariableSpec("big/kernel", (1000, 777), "float32")], piece_bytes=100_000, divisible=True)
    assert all(piece.nbytes % (4 * 777) == 0 for piece in made.pieces)
    assert all(90_000 < piece.nbytes < 110_000 for piece in made.pieces)


# ------------------------------------------------------------------------------------------- rows, and what is exact

TABLE = VariableSpec("table/embeddings", (1000, 16), "float32")


@pytest.mark.parametrize("kind", ["rows", "exact"])
@pytest.mark.parametrize("sizes", [{}, {"fuse_bytes": 1 << 30}, {"max_buckets": 1}])
def test_a_variable_of_rows_or_an_exact_one_is_a_bucket_of_its_own_however_much_is_fused(kind, sizes):
    variables = [*dense("a", 4, 4), TABLE, *dense("b", 4, 4), *dense("c", 4, 4)]
    made = plan(variables, **sizes, **{kind: [2]})
    last = [(3, 4), (5, 6)] if not sizes else [(3, 4, 5, 6)]
    assert groups(made) == [(0, 1), (2,), *last]
    assert [bucket.exact for bucket in made.buckets] == [False, True, False, False][: len(made.buckets)]
    assert [bucket.row_bytes for bucket in made.buckets] == [0, 64 * (kind == "rows"), 0, 0][: len(made.buckets)]
    assert_tags_are_valid(made)


@pytest.mark.parametrize("alone", [{"rows": [0]}, {"exact": [1]}, {"rows": [0], "exact": [1]}, {"exact": [0, 1]}])
def test_it_does_not_share_a_bucket_with_its_own_layer(alone):
    assert groups(plan(dense("a", 4, 4), fuse_bytes=1 << 30, **alone)) == [(0,), (1,)]


@pytest.mark.parametrize("shape,dtype,row_bytes", [
    ((1000, 16), "float32", 64), ((10, 3, 5), "float16", 30), ((7,), "float64", 8), ((1, 9), "bfloat16", 18)
])  # fmt: skip
def test_the_bytes_of_a_row_are_those_of_all_axes_but_the_first(shape, dtype, row_bytes):
    (bucket,) = plan([VariableSpec("a/w", shape, dtype)], rows=[0]).buckets
    assert bucket.row_bytes == row_bytes and bucket.nbytes == math.prod(shape) * item_bytes(dtype)


@pytest.mark.parametrize("divisible", [False, True])
@pytest.mark.parametrize("piece_bytes", [1024, 4 * MIB])
def test_a_bucket_of_rows_is_one_piece_and_one_unit_even_in_a_divisible_plan(divisible, piece_bytes):
    variables = [*dense("a", 300, 10), TABLE, *dense("b", 300, 10)]
    made = plan(variables, piece_bytes=piece_bytes, divisible=divisible, rows=[2])
    bucket = made.buckets[1]
    (piece,) = bucket.pieces
    assert (piece.bucket, piece.offset, piece.nbytes) == (1, 0, min(piece_bytes, TABLE.nbytes))
    (unit,) = [unit for unit in made.units if unit.bucket == 1]
    assert unit.pieces == bucket.pieces and unit.row_bytes == 64 and unit.dtype == "float32"
    assert regions(unit) == [(2, 0, 16000)]
    assert {other.row_bytes for other in made.units if other is not unit} == {0}
    assert [unit.index for unit in made.units] == list(range(len(made.units)))
    assert made.unit_of == tuple(unit.index for unit in made.units for _ in unit.pieces)
    assert_tags_are_valid(made)


@pytest.mark.parametrize("divisible", [False, True])
def test_an_exact_bucket_travels_in_pieces_and_units_like_any_other(divisible):
    usual, exact = (plan([TABLE], piece_bytes=1024, divisible=divisible, **a) for a in ({}, {"exact": [0]}))
    assert exact.pieces == usual.pieces and exact.units == usual.units and len(exact.pieces) > 1
    assert [bucket.exact for bucket in (*usual.buckets, *exact.buckets)] == [False, True]


def test_variables_of_rows_or_exact_ones_without_a_gradient_are_in_no_bucket():
    assert groups(plan([*dense("a", 4, 4), TABLE], [True, False, False], rows=[2], exact=[1])) == [(0,)]


def test_a_variable_of_rows_of_size_0_is_in_no_bucket():
    assert plan([VariableSpec("t/w", (0, 7), "float32")], rows=[0]).buckets == ()


# ---------------------------------------------------------------------------------------------------- for any model

SPECS = st.builds(
    lambda layer, name, shape, dtype: VariableSpec(f"l{layer}/{name}", tuple(shape), dtype),
    st.integers(0, 5),
    st.sampled_from(["kernel", "bias", "gamma"]),
    st.lists(st.integers(0, 40), max_size=3),
    st.sampled_from(["float32", "float16", "bfloat16", "float64", "complex128"]),
)
MODELS = st.lists(st.tuples(SPECS, st.booleans()), max_size=30)
SIZES = {
    "piece_bytes": st.integers(1024, 9000),
    "fuse_bytes": st.integers(0, 20_000),
    "max_buckets": st.integers(1, 12),
}


@settings(max_examples=60, deadline=None)
@given(model=MODELS, **SIZES)
def test_each_variable_with_a_gradient_is_in_exactly_one_bucket(model, piece_bytes, fuse_bytes, max_buckets):
    variables, marks = [v for v, _ in model], [m for _, m in model]
    made = plan(variables, marks, piece_bytes, fuse_bytes, max_buckets)
    carried = [v for bucket in made.buckets for v in bucket.variables]
    assert carried == [i for i, (v, wanted) in enumerate(model) if wanted and v.nbytes]
    for bucket in made.buckets:
        assert bucket.nbytes == sum(variables[v].nbytes for v in bucket.variables) > 0
        assert {variables[v].dtype for v in bucket.variables} == {bucket.dtype}


@settings(max_examples=60, deadline=None)
@given(model=MODELS, divisible=st.booleans(), **SIZES)
def test_the_pieces_of_a_bucket_cover_it_exactly_once_in_whole_elements(
    model, divisible, piece_bytes, fuse_bytes, max_buckets
):
    made = plan([v for v, _ in model], [m for _, m in model], piece_bytes, fuse_bytes, max_buckets, divisible)
    assert_tags_are_valid(made)
    for bucket in made.buckets:
        end = 0
        for piece in bucket.pieces:
            assert piece.bucket == bucket.index and piece.offset == end and piece.nbytes > 0
            assert piece.offset % item_bytes(bucket.dtype) == piece.nbytes % item_bytes(bucket.dtype) == 0
            end += piece.nbytes
        assert end == bucket.nbytes


@settings(max_examples=60, deadline=None)
@given(model=MODELS, divisible=st.booleans(), **SIZES)
def test_units_cover_each_variable_with_a_gradient_exactly_once_and_each_has_the_elements_of_its_pieces(
    model, divisible, piece_bytes, fuse_bytes, max_buckets
):
    variables = [v for v, _ in model]
    made = plan(variables, [m for _, m in model], piece_bytes, fuse_bytes, max_buckets, divisible)
    assert [unit.index for unit in made.units] == list(range(len(made.units)))
    assert [piece for unit in made.units for piece in unit.pieces] == list(made.pieces)
    assert [made.unit_of[piece.index] for unit in made.units for piece in unit.pieces] == list(made.unit_of)
    reached = {i: 0 for i, (v, wanted) in enumerate(model) if wanted and v.nbytes}
    for unit in made.units:
        bucket, item = made.buckets[unit.bucket], item_bytes(unit.dtype)
        assert {piece.bucket for piece in unit.pieces} == {unit.bucket} and unit.dtype == bucket.dtype
        assert unit.nbytes == sum(piece.nbytes for piece in unit.pieces)
        # Where the variables before the first region end in the bucket is where its first piece begins.
        before = bucket.variables[: bucket.variables.index(unit.regions[0].variable)]
        at = sum(variables[v].nbytes for v in before) + unit.regions[0].start * item
        assert at == unit.pieces[0].offset
        assert unit.nbytes == sum(region.size for region in unit.regions) * item
        for region in unit.regions:
            assert region.start == reached[region.variable] < region.stop and region.variable in bucket.variables
            reached[region.variable] = region.stop
    assert reached == {v: math.prod(variables[v].shape) for v in reached}


@settings(max_examples=60, deadline=None)
@given(model=MODELS, **SIZES)
def test_pieces_of_a_divisible_plan_are_made_of_whole_blocks_and_near_the_size_asked_for(
    model, piece_bytes, fuse_bytes, max_buckets
):
    variables = [v for v, _ in model]
    made = plan(variables, [m for _, m in model], piece_bytes, fuse_bytes, max_buckets, divisible=True)
    for unit in made.units:
        for region in unit.regions:
            shape = variables[region.variable].shape
            # What 0, 1, 2, ... leading indices leave; the largest that is no longer than a piece.
            blocks = [math.prod(shape[depth:]) for depth in range(len(shape) + 1)]
            block = next(b for b in blocks if b * item_bytes(unit.dtype) <= piece_bytes)
            assert region.start % block == 0
            assert region.stop % block == 0
    for bucket in made.buckets:
        sizes, item = [piece.nbytes for piece in bucket.pieces], item_bytes(bucket.dtype)
        most = math.ceil(bucket.nbytes / (piece_bytes - piece_bytes % item))
        size = math.ceil(bucket.nbytes / most / item) * item
        assert max(sizes) < 2 * piece_bytes + item
        assert len(bucket.variables) > 1 or min(sizes[:-1], default=size) >= size / 2
        assert len(sizes) <= most
        for piece in bucket.pieces[1:]:
            wanted = round(piece.offset / size) * size  # the places are a size apart, and moved by less than that
            assert min(abs(piece.offset - at) for at in (wanted - size, wanted, wanted + size)) <= piece_bytes / 2


@settings(max_examples=40, deadline=None)
@given(model=MODELS, divisible=st.booleans(), **SIZES)
def test_a_rank_that_is_told_the_variables_makes_the_same_plan(model, divisible, piece_bytes, fuse_bytes, max_buckets):
    variables, marks = [v for v, _ in model], [m for _, m in model]
    told = from_json(to_json(variables))
    assert told == tuple(variables)
    ours = plan(variables, marks, piece_bytes, fuse_bytes, max_buckets, divisible)
    theirs = plan(told, marks, piece_bytes, fuse_bytes, max_buckets, divisible)
    assert ours == theirs and ours.digest == theirs.digest and ours.units == theirs.units


def test_plans_that_differ_in_anything_on_the_wire_have_different_digests():
    variables = dense("a", 40, 40) + dense("b", 40, 40)
    made = [
        plan(variables),
        plan(variables, [True, True, True, False]),
        plan(variables, piece_bytes=1024),
        plan(variables, fuse_bytes=1 << 20),
        plan(variables, divisible=True),
        plan(variables, piece_bytes=1024, divisible=True),
        plan([replace(v, dtype="float64") for v in variables]),
        plan(dense("a", 40, 40) + dense("b", 40, 20)),
        plan(variables, rows=[0]),
        plan(variables, rows=[2]),
        plan(variables, exact=[0]),
        plan(variables, exact=[1]),
    ]
    assert len({p.digest for p in made}) == len(made)


def test_plans_that_differ_only_in_whether_rows_travel_or_what_is_exact_have_different_digests():
    table = [VariableSpec("table/embeddings", (10, 4), "float32")]
    made = [plan(table), plan(table, rows=[0]), plan(table, exact=[0])]
    assert len({groups(each)[0] for each in made}) == len({each.pieces for each in made}) == 1
    assert len({each.digest for each in made}) == 3
    assert plan(table, rows=[0]).digest == plan(table, rows=(0,), exact=[]).digest


# ----------------------------------------------------------------------------------------------------- two models


def test_equal_models_have_no_difference():
    assert first_difference(dense("a", 3, 4), dense("a", 3, 4)) is None


def test_layers_that_are_only_numbered_differently_make_no_difference():
    assert first_difference(dense("dense_1", 3, 4), dense("dense_7", 3, 4)) is None


def test_a_different_shape_is_a_difference():
    assert first_difference(dense("a", 3, 4) + dense("b", 4, 5), dense("a", 3, 4) + dense("b", 4, 6)) == 2


def test_a_different_dtype_is_a_difference():
    assert first_difference(dense("a", 3, 4), dense("a", 3, 4, "bfloat16")) == 0


@pytest.mark.parametrize("longer", [0, 1])
def test_a_missing_layer_is_a_difference(longer):
    sides = [dense("a", 3, 4), dense("a", 3, 4)]
    sides[longer] += dense("b", 4, 5)
    assert first_difference(*sides) == 2
