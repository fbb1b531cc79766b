"""The plan: which variables travel together, in which pieces, under which tag.

A *bucket* is what a client's training step hands over and waits for: the variables of one layer (or of a few tiny
neighbouring layers), all of one dtype, laid out one after the other. It waits for no other bucket. A *piece* is what
travels as one message: a contiguous part of a bucket, about ``piece_bytes`` long. A piece's number is its MPI tag, so
there may be no more of them than the 32767 tags that MPI guarantees (MPI 4.1, 3.2.2). A *unit* is what the server
updates: a piece where the optimizer allows that, else a bucket.

The server makes the plan and the clients take it over, so that it is the same on every rank even where Keras has
numbered the layers differently.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

MAX_TAG = 32767

_ITEM_BYTES = {
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class VariableSpec:
    """A variable as the plan sees it: where it stands in the model, its shape and its dtype's name."""

    path: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def layer(self) -> str:
        """The path of the layer that the variable belongs to."""
        return self.path.rpartition("/")[0] or self.path

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * item_bytes(self.dtype)

    def __str__(self) -> str:
        return f"{self.path} {self.shape} {self.dtype}"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a bucket that travels as one message; ``index`` is its tag, ``offset`` and ``nbytes`` are in bytes."""

    index: int
    bucket: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Region:
    """Elements ``start`` to ``stop`` of a variable (by position), counted in row-major order."""

    variable: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Bucket:
    """Whole variables that travel together and that a client's forward pass waits for together; sizes in bytes.

    ``priority`` orders buckets that are ready at the same time, least first: the place in the forward pass.
    ``exact`` is true where it travels plain whatever the wire format. ``row_bytes`` is not 0 where it is one variable
    of whose rows, of so many bytes, only those travel that have a gradient or have changed. Its one piece is then as
    long as those are, and the piece's ``nbytes`` only says what counts for the credit. ``owner`` is the index of the
    server that updates the bucket.
    """

    index: int
    regions: tuple[Region, ...]
    dtype: str
    nbytes: int
    pieces: tuple[Piece, ...]
    priority: int
    exact: bool = False
    row_bytes: int = 0
    owner: int = 0

    @property
    def variables(self) -> tuple[int, ...]:
        """The positions of its variables."""
        return tuple(region.variable for region in self.regions)


@dataclass(frozen=True, slots=True)
class Unit:
    """What the server updates and sends on its own: one piece of a bucket, or all of it; sizes in bytes.

    It is one piece where the optimizer treats each element by itself. Then the pieces of a large layer flow through the
    server one after the other, and the last one of a gradient need not be in before the first new weights go out.
    """

    index: int
    bucket: int
    regions: tuple[Region, ...]
    dtype: str
    nbytes: int
    pieces: tuple[Piece, ...]
    row_bytes: int = 0  # see Bucket


@dataclass(frozen=True)
class Plan:
    """All variables of one optimizer and the buckets that carry those of them that get a gradient."""

    variables: tuple[VariableSpec, ...]
    has_gradient: tuple[bool, ...]
    buckets: tuple[Bucket, ...]
    # Whether the server may update a bucket piece by piece.
    divisible: bool = False

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Every piece, by its index."""
        return tuple(piece for bucket in self.buckets for piece in bucket.pieces)

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """What the server updates on its own, in forward order: pieces of a bucket are consecutive."""
        units: list[Unit] = []
        for bucket in self.buckets:
            parts = [(bucket.regions, bucket.nbytes, bucket.pieces)]
            if self.divisible and not bucket.row_bytes:
                parts = [(_within(bucket, p.offset, p.offset + p.nbytes), p.nbytes, (p,)) for p in bucket.pieces]
            for regions, nbytes, pieces in parts:
                units.append(Unit(len(units), bucket.index, regions, bucket.dtype, nbytes, pieces, bucket.row_bytes))
        return tuple(units)

    @cached_property
    def unit_of(self) -> tuple[int, ...]:
        """The number of the unit that each piece belongs to, by the piece's index."""
        return tuple(unit.index for unit in self.units for _ in unit.pieces)

    @property
    def nbytes(self) -> int:
        """Bytes that a client sends in a step, or would if it sent all rows of every variable."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def digest(self) -> str:
        """A fingerprint: plans with the same digest put the same bytes under the same tags."""
        content = (self.variables, self.has_gradient, self.buckets, self.divisible)
        return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def item_bytes(dtype: str) -> int:
    """Bytes of one element of a dtype, by its name.

    Raises:
        ValueError: a dtype that cannot be sent, such as ``string``.
    """
    try:
        return _ITEM_BYTES[dtype]
    except KeyError:
        raise ValueError(f"variables of dtype {dtype} cannot be synchronised") from None


def make_plan(
    variables: Iterable[VariableSpec],
    has_gradient: Iterable[bool],
    *,
    piece_bytes: int,
    fuse_bytes: int,
    max_buckets: int,
    divisible: bool = False,
    rows: Collection[int] = (),
    exact: Collection[int] = (),
) -> Plan:
    """Group variables into buckets: by layer, fusing the tiny, splitting the large into pieces.

    Args:
        variables: the trainable variables in the order of the forward pass.
        has_gradient: for each of them, whether it gets a gradient; those that do not are in no bucket.
        piece_bytes: the size of the pieces of a large layer.
        fuse_bytes: neighbouring groups are fused as long as they stay within this size (0: never).
        max_buckets: neighbours are fused beyond ``fuse_bytes`` where there would be more buckets than this.
        divisible: whether the server may update a bucket piece by piece. Pieces then end where a block of a variable
            does (a row, say), which moves each end by up to half of ``piece_bytes``: some pieces are shorter, and some
            may be almost twice as long as that.
        rows: the positions of variables of which only some rows travel. Each is a bucket of its own.
        exact: the positions of variables that travel plain whatever the wire format. Each is a bucket of its own.
    """
    variables, has_gradient = tuple(variables), tuple(has_gradient)
    if len(variables) != len(has_gradient):
        raise ValueError(f"{len(variables)} variables but {len(has_gradient)} marks")
    alone = {*rows, *exact}
    groups = _by_layer(variables, has_gradient, alone)
    limit = fuse_bytes
    fused = _fuse(groups, variables, limit, alone)
    while len(fused) > max_buckets:
        limit = max(2 * limit, 1024)
        wider = _fuse(groups, variables, limit, alone)
        if len(wider) == len(fused) and limit > sum(v.nbytes for v in variables):
            break  # what is left between them are changes of dtype, and those that are to be alone
        fused = wider
    total = sum(variables[v].nbytes for group in fused for v in group)
    # As many bytes as it takes to stay within the tags, in whole elements of any dtype.
    piece_bytes = max(piece_bytes, math.ceil(total / (MAX_TAG - len(fused)) / 16) * 16)
    buckets, first = [], 0
    for index, group in enumerate(fused):
        specs = [variables[v] for v in group]
        regions = tuple(Region(v, 0, math.prod(variables[v].shape)) for v in group)
        row_bytes = specs[0].nbytes // specs[0].shape[0] if group[0] in rows else 0
        nbytes = sum(spec.nbytes for spec in specs)
        ends = [min(nbytes, piece_bytes)] if row_bytes else _ends(specs, piece_bytes, divisible)
        spans = enumerate(zip([0, *ends[:-1]], ends, strict=True))
        pieces = tuple(Piece(first + i, index, at, end - at) for i, (at, end) in spans)
        first += len(pieces)
        is_exact = row_bytes > 0 or group[0] in exact
        buckets.append(Bucket(index, regions, specs[0].dtype, nbytes, pieces, index, is_exact, row_bytes))
    return Plan(variables, has_gradient, tuple(buckets), divisible)


def _by_layer(
    variables: Sequence[VariableSpec], has_gradient: Sequence[bool], alone: Collection[int]
) -> list[tuple[int, ...]]:
    """Positions of the variables that get a gradient, one group per run of the same layer and dtype."""
    groups: list[list[int]] = []
    for position, (variable, wanted) in enumerate(zip(variables, has_gradient, strict=True)):
        if not wanted or variable.nbytes == 0:
            continue
        last = variables[groups[-1][-1]] if groups and not {groups[-1][-1], position} & {*alone} else None
        if last is not None and (last.layer, last.dtype) == (variable.layer, variable.dtype):
            groups[-1].append(position)
        else:
            groups.append([position])
    return [tuple(group) for group in groups]


def _fuse(
    groups: Sequence[tuple[int, ...]], variables: Sequence[VariableSpec], limit: int, alone: Collection[int]
) -> list[tuple[int, ...]]:
    fused: list[tuple[int, ...]] = []
    size = 0
    for group in groups:
        nbytes = sum(variables[v].nbytes for v in group)
        same = fused and variables[fused[-1][-1]].dtype == variables[group[0]].dtype
        if same and not {fused[-1][-1], group[0]} & {*alone} and size + nbytes <= limit:
            fused[-1] += group
            size += nbytes
        else:
            fused.append(group)
            size = nbytes
    return fused


def _ends(specs: Sequence[VariableSpec], piece_bytes: int, divisible: bool) -> list[int]:
    """Where the pieces of a bucket end, in bytes: about equal, each a whole number of elements."""
    item, total = item_bytes(specs[0].dtype), sum(spec.nbytes for spec in specs)
    count = math.ceil(total / (piece_bytes - piece_bytes % item))
    size = math.ceil(total / count / item) * item
    wanted = range(size, total, size)
    return [*(sorted({_aligned(specs, at, piece_bytes) for at in wanted} - {0, total}) if divisible else wanted), total]


def _aligned(specs: Sequence[VariableSpec], at: int, piece_bytes: int) -> int:
    """The end of a block of a variable next to a place in a bucket.

    A block is what a few leading indices leave of a variable, such as a row: the largest that is no longer than
    ``piece_bytes``. The end of the nearest one is at most half a block away. The server takes pieces out of variables
    and puts them back block by block, so the fewer and larger the blocks, the better.
    """
    before = 0
    for spec in specs:
        if at < before + spec.nbytes:
            block = spec.nbytes
            for length in spec.shape:
                if block <= piece_bytes:
                    break
                block //= length
            return before + round((at - before) / block) * block
        before += spec.nbytes
    return before


def _within(bucket: Bucket, start: int, stop: int) -> tuple[Region, ...]:
    """The regions of a bucket between two places, in bytes."""
    item, at, found = item_bytes(bucket.dtype), 0, []
    for region in bucket.regions:
        a, b = max(start // item - at, 0), min(stop // item - at, region.size)
        if a < b:
            found.append(Region(region.variable, a, b))
        at += region.size
    return tuple(found)


def to_json(variables: Sequence[VariableSpec]) -> str:
    """A description of variables that another rank can compare with its own."""
    return json.dumps([[v.path, list(v.shape), v.dtype] for v in variables])


def from_json(text: str) -> tuple[VariableSpec, ...]:
    """Read what :func:`to_json` wrote."""
    return tuple(VariableSpec(path, tuple(shape), dtype) for path, shape, dtype in json.loads(text))


def first_difference(ours: Sequence[VariableSpec], theirs: Sequence[VariableSpec]) -> int | None:
    """The position of the first variable in which two models differ, or None.

    Paths are not compared: Keras numbers layers per process, so equal models may differ in them.
    """
    for position, (our, their) in enumerate(zip_longest(ours, theirs)):
        if our is None or their is None or (our.shape, our.dtype) != (their.shape, their.dtype):
            return position
    return None
