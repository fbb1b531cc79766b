"""The plan: which variables travel together, in which pieces, under which tag.

A *bucket* is the unit of the pipeline: the variables of one layer (or of a few tiny neighbouring layers), all of one
dtype, laid out one after the other. It is reduced, updated and broadcast on its own and waits for no other bucket. A
*piece* is the unit of the wire: a contiguous part of a bucket, no longer than ``piece_bytes``. A piece's number is its
MPI tag, so there may be no more of them than the 32767 tags that MPI guarantees (MPI 4.1, 3.2.2).

The server makes the plan and the clients take it over, so that it is the same on every rank even where Keras has
numbered the layers differently.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
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
class Bucket:
    """Variables (by position) that are reduced, updated and broadcast together; sizes in bytes.

    ``priority`` orders buckets that are ready at the same time, least first: the place in the forward pass.
    ``owner`` is the index of the server that updates the bucket.
    """

    index: int
    variables: tuple[int, ...]
    dtype: str
    nbytes: int
    pieces: tuple[Piece, ...]
    priority: int
    owner: int = 0


@dataclass(frozen=True)
class Plan:
    """All variables of one optimizer and the buckets that carry those of them that get a gradient."""

    variables: tuple[VariableSpec, ...]
    has_gradient: tuple[bool, ...]
    buckets: tuple[Bucket, ...]

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Every piece, by its index."""
        return tuple(piece for bucket in self.buckets for piece in bucket.pieces)

    @property
    def nbytes(self) -> int:
        """Bytes that a client sends in a step."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def digest(self) -> str:
        """A fingerprint: plans with the same digest put the same bytes under the same tags."""
        return hashlib.sha256(repr((self.variables, self.has_gradient, self.buckets)).encode()).hexdigest()[:16]


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
) -> Plan:
    """Group variables into buckets: by layer, fusing the tiny, splitting the large into pieces.

    Args:
        variables: the trainable variables in the order of the forward pass.
        has_gradient: for each of them, whether it gets a gradient; those that do not are in no bucket.
        piece_bytes: the longest message.
        fuse_bytes: neighbouring groups are fused as long as they stay within this size (0: never).
        max_buckets: neighbours are fused beyond ``fuse_bytes`` where there would be more buckets than this.
    """
    variables, has_gradient = tuple(variables), tuple(has_gradient)
    if len(variables) != len(has_gradient):
        raise ValueError(f"{len(variables)} variables but {len(has_gradient)} marks")
    groups = _by_layer(variables, has_gradient)
    limit = fuse_bytes
    fused = _fuse(groups, variables, limit)
    while len(fused) > max_buckets:
        limit = max(2 * limit, 1024)
        wider = _fuse(groups, variables, limit)
        if len(wider) == len(fused) and limit > sum(v.nbytes for v in variables):
            break  # only changes of dtype are left between them
        fused = wider
    total = sum(variables[v].nbytes for group in fused for v in group)
    # As many bytes as it takes to stay within the tags, in whole elements of any dtype.
    piece_bytes = max(piece_bytes, math.ceil(total / (MAX_TAG - len(fused)) / 16) * 16)
    buckets, first = [], 0
    for index, group in enumerate(fused):
        nbytes = sum(variables[v].nbytes for v in group)
        pieces = _split(index, nbytes, piece_bytes, item_bytes(variables[group[0]].dtype), first)
        first += len(pieces)
        buckets.append(Bucket(index, group, variables[group[0]].dtype, nbytes, pieces, priority=index))
    return Plan(variables, has_gradient, tuple(buckets))


def _by_layer(variables: Sequence[VariableSpec], has_gradient: Sequence[bool]) -> list[tuple[int, ...]]:
    """Positions of the variables that get a gradient, one group per run of the same layer and dtype."""
    groups: list[list[int]] = []
    for position, (variable, wanted) in enumerate(zip(variables, has_gradient, strict=True)):
        if not wanted or variable.nbytes == 0:
            continue
        last = variables[groups[-1][-1]] if groups else None
        if last is not None and (last.layer, last.dtype) == (variable.layer, variable.dtype):
            groups[-1].append(position)
        else:
            groups.append([position])
    return [tuple(group) for group in groups]


def _fuse(groups: Sequence[tuple[int, ...]], variables: Sequence[VariableSpec], limit: int) -> list[tuple[int, ...]]:
    fused: list[tuple[int, ...]] = []
    size = 0
    for group in groups:
        nbytes = sum(variables[v].nbytes for v in group)
        same = fused and variables[fused[-1][-1]].dtype == variables[group[0]].dtype
        if same and size + nbytes <= limit:
            fused[-1] += group
            size += nbytes
        else:
            fused.append(group)
            size = nbytes
    return fused


def _split(bucket: int, nbytes: int, piece_bytes: int, item: int, first: int) -> tuple[Piece, ...]:
    """Pieces of equal size (but the last), each a whole number of elements."""
    count = math.ceil(nbytes / (piece_bytes - piece_bytes % item))
    size = math.ceil(nbytes / count / item) * item
    offsets = range(0, nbytes, size)
    return tuple(Piece(first + i, bucket, at, min(size, nbytes - at)) for i, at in enumerate(offsets))


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
