"""The files of a run's state: whole ones come back bit for bit, and all others are refused with a reason."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import sys
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipipe import checkpoint
from mpipipe.checkpoint import Checkpoint, CheckpointError, newest, read, write
from mpipipe.errors import MpipipeError

fuzz = settings(max_examples=150, deadline=None)

HEADER_SIZE = len("mpipipe checkpoint 1 sha256 \n") + 64
DTYPES = (
    *(np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
    *(np.float16, np.float32, np.float64, np.complex64, np.complex128),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
)
SHAPES = ((), (0,), (1,), (7,), (3, 4), (2, 0, 5), (0, 2**40), (2, 3, 1, 2), (1,) * 20)


@pytest.fixture
def warned():
    """The lines that mpipipe warns with, whether or not its logger has been set up."""
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record):
            assert record.levelno == logging.WARNING
            lines.append(record.getMessage())

    listener = Listener()
    logger = logging.getLogger("mpipipe")
    logger.addHandler(listener)
    yield lines
    logger.removeHandler(listener)


def state(seed: int = 0) -> Checkpoint:
    rng = np.random.default_rng(seed)
    arrays = {
        "kernel": rng.standard_normal((3, 4)).astype(np.float32),
        "step": np.array(seed),
        "none": np.empty((0, 2)),
    }
    return Checkpoint({"seed": seed, "names": ["a", None, 1.5]}, arrays)


def assert_same(one: Checkpoint, other: Checkpoint) -> None:
    assert one.manifest == other.manifest
    assert list(one.arrays) == list(other.arrays)
    for name, array in one.arrays.items():
        found = other.arrays[name]
        assert found.dtype == array.dtype.newbyteorder("=") and found.shape == array.shape, name
        assert found.tobytes() == array.astype(array.dtype.newbyteorder("=")).tobytes(), name
        assert found.flags.writeable


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def numbers(folder: Path) -> list[int]:
    assert all(re.fullmatch(r"checkpoint-\d{12}\.mpipipe", name) for name in names(folder)), names(folder)
    return [int(name[11:23]) for name in names(folder)]


def flip(path: Path, place: int, bits: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= bits
    path.write_bytes(data)


def reason(path: Path) -> str:
    """Why a file is refused."""
    with pytest.raises(CheckpointError) as caught:
        read(path)
    found = re.fullmatch(rf"Checkpoint {re.escape(str(path))} cannot be used: (.+)\.", str(caught.value))
    assert found, str(caught.value)
    return found[1]


def with_sum(rest: bytes, version: int = 1) -> bytes:
    """A file with the right checksum of whatever follows its first line."""
    return f"mpipipe checkpoint {version} sha256 {hashlib.sha256(rest).hexdigest()}\n".encode() + rest


def with_text(text: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return with_sum((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def with_json(value: object, data: bytes = b"") -> bytes:
    return with_text(json.dumps(value).encode(), data)


def parts(arrays: object = (), **entries: object) -> dict[str, object]:
    return {"byteorder": sys.byteorder, "manifest": {}, "arrays": arrays, **entries}


def array(name: object = "a", dtype: object = "float32", shape: object = (2,), **entries: object) -> dict[str, object]:
    return {"name": name, "dtype": dtype, "shape": shape, **entries}


# ---------------------------------------------------------------------------------------------------------- round trip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_arrays_of_all_dtypes_come_back_bit_for_bit(tmp_path, shape):
    rng = np.random.default_rng(len(shape))
    arrays = {}
    for dtype in map(np.dtype, DTYPES):
        count = int(np.prod(shape))
        data = rng.integers(0, 2 if dtype.kind == "b" else 256, count * dtype.itemsize, np.uint8)
        arrays[dtype.name] = data.view(dtype).reshape(shape)
    written = Checkpoint({}, arrays)
    assert_same(written, read(write(tmp_path, 3, written, 1)))


def test_what_a_nan_carries_comes_back(tmp_path):
    bits = np.array([0x7FA00001, 0x7FC12345, 0xFFFFFFFF, 0x80000000, 0x7F800000], np.uint32)
    short = np.array([0x7FA1, 0x7FC1, 0xFFFF, 0x8000], np.uint16)
    swapped = bits.astype(bits.dtype.newbyteorder("S"))
    written = Checkpoint(
        {},
        {
            "float32": bits.view(np.float32),
            "bfloat16": short.view(ml_dtypes.bfloat16),
            "strided": np.repeat(bits, 3).view(np.float32)[::3],
            "swapped": swapped.view(np.dtype(np.float32).newbyteorder("S")),
        },
    )
    found = read(write(tmp_path, 0, written, 1)).arrays
    for name in ("float32", "strided", "swapped"):
        assert found[name].dtype == np.float32 and (found[name].view(np.uint32) == bits).all(), name
    assert (found["bfloat16"].view(np.uint16) == short).all()


@pytest.mark.parametrize("block", [16, 40, 1 << 22])
def test_any_layout_in_memory_comes_back_in_c_order(tmp_path, monkeypatch, block):
    monkeypatch.setattr(checkpoint, "_BLOCK", block)
    plain = np.arange(60, dtype=np.float64).reshape(3, 4, 5)
    written = Checkpoint(
        {},
        {
            "plain": plain,
            "transposed": plain.T,
            "fortran": np.asfortranarray(plain),
            "reversed": plain[::-1, :, ::-2],
            "broadcast": np.broadcast_to(np.float32(1.5), (4, 3)),
            "bfloat16": plain.astype(ml_dtypes.bfloat16).swapaxes(0, 1),
            "big": plain.astype(">f8").T,
            "little": plain.astype("<f8").T,
        },
    )
    assert_same(written, read(write(tmp_path, 0, written, 1)))


NAMES = ("", " ", "a/b:0", "../../a", "ä\n\0", "日本", "\ud800", "a" * 1000, '"\\')


def test_names_and_manifest_come_back(tmp_path):
    manifest = {"": None, "nested": {"a": [1, -2, 2**70, 0.1, True, "ä\ud800\0"]}, "arrays": [], "inf": float("inf")}
    written = Checkpoint(manifest, {name: np.array(place) for place, name in enumerate(NAMES)})
    assert_same(written, read(write(tmp_path, 0, written, 1)))
    assert_same(Checkpoint({}, {}), read(write(tmp_path, 1, Checkpoint({}, {}), 1)))


KEYS = st.text(max_size=5)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@fuzz
@given(
    manifest=st.dictionaries(KEYS, VALUES, max_size=4),
    layouts=st.dictionaries(
        KEYS, st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=4)), max_size=4
    ),
    seed=st.integers(0, 99),
)
def test_whatever_is_written_comes_back(manifest, layouts, seed):
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, (dtype, shape) in layouts.items():
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        arrays[name] = rng.integers(0, 2, size, np.uint8).view(dtype).reshape(shape)
    with tempfile.TemporaryDirectory() as folder:
        written = Checkpoint(manifest, arrays)
        assert_same(written, read(write(Path(folder), 1, written, 1)))


@pytest.mark.parametrize(
    "wrong",
    [
        np.array([object()]),
        np.array(["a"]),
        np.array([b"a"]),
        np.array([0], "M8[s]"),
        np.zeros(2, [("a", "f4"), ("b", "i4")]),
        np.zeros(2, "V4"),
        np.zeros(2, np.longdouble),
        np.zeros(2, ml_dtypes.float8_e4m3b11fnuz),
    ],
    ids=lambda wrong: str(wrong.dtype),
)
def test_an_array_of_anything_else_is_refused(tmp_path, wrong):
    with pytest.raises(TypeError, match="cannot hold array 'wrong'"):
        write(tmp_path / "made", 0, Checkpoint({}, {"right": np.zeros(2), "wrong": wrong}), 1)
    assert names(tmp_path) == []


def test_what_json_cannot_hold_is_refused(tmp_path):
    for manifest in ({"a": object()}, {"a": np.float32(1)}, ["a"]):
        with pytest.raises(TypeError):
            write(tmp_path, 0, Checkpoint(manifest, {}), 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is a string"):
        write(tmp_path, 0, Checkpoint({}, {1: np.zeros(1)}), 1)  # type: ignore[dict-item]
    for number, keep in ((-1, 1), (0, 0)):
        with pytest.raises(ValueError):
            write(tmp_path, number, state(), keep)
    assert names(tmp_path) == []


def test_no_second_copy_of_the_arrays_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_BLOCK", 1 << 16)
    size = 1 << 24
    written = Checkpoint({}, {"c": np.zeros((1024, size // 8192)), "f": np.zeros((1024, size // 8192)).T})
    tracemalloc.start()
    try:
        path = write(tmp_path, 0, written, 1)
        assert tracemalloc.get_traced_memory()[1] < 1 << 21
        tracemalloc.reset_peak()
        found = read(path)
        assert tracemalloc.get_traced_memory()[1] < 2 * size + (1 << 21)
    finally:
        tracemalloc.stop()
    assert_same(written, found)


# ---------------------------------------------------------------------------------------------------------- the folder


def test_the_folder_is_made_and_the_file_has_the_number_in_its_name(tmp_path):
    folder = tmp_path / "a" / "b"
    assert newest(folder) is None
    path = write(folder, 120, state(), 2)
    assert path == folder / "checkpoint-000000000120.mpipipe" and names(folder) == [path.name]
    assert path.read_bytes().startswith(b"mpipipe checkpoint 1 sha256 ")
    found = newest(folder)
    assert found and found[0] == path
    assert_same(state(), found[1])


@pytest.mark.parametrize("keep", [1, 2, 3, 99])
def test_the_newest_stay(tmp_path, keep, warned):
    for number in range(0, 60, 10):
        write(tmp_path, number, state(number), keep)
        assert numbers(tmp_path) == list(range(0, number + 10, 10))[-keep:]
    assert not warned


def test_a_file_of_the_same_number_is_replaced(tmp_path):
    write(tmp_path, 5, state(1), 2)
    path = write(tmp_path, 5, state(2), 2)
    assert_same(state(2), read(path))
    assert numbers(tmp_path) == [5]


def test_the_order_is_by_number(tmp_path):
    for number in (9, 10**12, 100, 20):
        path = write(tmp_path, number, state(number), 9)
        os.utime(path, (number % 7, number % 7))
    found = newest(tmp_path)
    assert found and found[0].name == "checkpoint-1000000000000.mpipipe"
    found[0].unlink()
    found = newest(tmp_path)
    assert found and found[1].manifest["seed"] == 100
    write(tmp_path, 101, state(), 3)
    assert numbers(tmp_path) == [20, 100, 101]


def test_the_file_just_written_stays_although_newer_ones_are_there(tmp_path):
    for number in (70, 80, 90):
        write(tmp_path, number, state(), 3)
    write(tmp_path, 10, state(), 2)
    assert numbers(tmp_path) == [10, 80, 90]


def test_a_newer_file_that_is_not_whole_does_not_count(tmp_path):
    # As after a run that went on from 20, because 30 could not be read.
    for number in (10, 20, 30):
        write(tmp_path, number, state(), 3)
    torn = tmp_path / "checkpoint-000000000030.mpipipe"
    torn.write_bytes(torn.read_bytes()[:-1])
    write(tmp_path, 25, state(), 2)
    assert numbers(tmp_path) == [20, 25, 30]
    write(tmp_path, 35, state(), 2)
    assert numbers(tmp_path) == [25, 35]


def test_temporary_files_are_deleted_and_others_are_not(tmp_path, warned):
    others = [
        "checkpoint-12.mpipipe",
        "checkpoint-0000000000001.mpipipe",
        "checkpoint-٠٠٠٠٠٠٠٠٠٠٠٠.mpipipe",
        "model.keras",
    ]
    others += [
        ".checkpoint-000000000001.mpipipe",
        "checkpoint-000000000001.mpipipe.tmp",
        "checkpoint-000000000001.mpipipe~",
    ]
    stale = [f".checkpoint-000000000001.mpipipe.{pid}.tmp" for pid in (1, os.getpid(), 2**22)]
    for name in others + stale:
        (tmp_path / name).write_bytes(b"x")
    assert newest(tmp_path) is None
    path = write(tmp_path, 2, state(), 1)
    assert names(tmp_path) == sorted([*others, path.name])
    assert not warned


def test_a_folder_with_the_name_of_a_checkpoint_does_no_harm(tmp_path, warned):
    (tmp_path / "checkpoint-000000000005.mpipipe").mkdir()
    (tmp_path / "checkpoint-000000000001.mpipipe").mkdir()
    write(tmp_path, 3, state(), 1)
    assert numbers(tmp_path) == [1, 3, 5] and not warned
    found = newest(tmp_path)
    assert found and found[0].name == "checkpoint-000000000003.mpipipe"
    assert len(warned) == 1 and "it is not a file" in warned[0]


def test_a_file_that_cannot_be_deleted_is_only_warned_of(tmp_path, monkeypatch, warned):
    write(tmp_path, 1, state(), 1)

    def unlink(path, missing_ok=False):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "unlink", unlink)
    write(tmp_path, 2, state(), 1)
    assert numbers(tmp_path) == [1, 2]
    assert len(warned) == 1 and "checkpoint-000000000001.mpipipe" in warned[0] and "Permission denied" in warned[0]


# -------------------------------------------------------------------------------------------------- writing that fails


class Full:
    """A file on a disk that has room for so many bytes."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, data):
        size = memoryview(data).nbytes
        self.file.write(memoryview(data).cast("B")[: self.room])
        self.room -= size
        if self.room < 0:
            no_space()
        return size


def no_space(*_: object, **__: object) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def assert_unchanged_by(folder: Path, failing: Any, error: type[BaseException] = OSError) -> None:
    before = {entry.name: entry.read_bytes() for entry in folder.iterdir()}
    with pytest.raises(error):
        failing()
    assert {entry.name: entry.read_bytes() for entry in folder.iterdir()} == before


@pytest.mark.parametrize("number", [2, 3])
def test_a_full_disk_leaves_the_older_files(tmp_path, monkeypatch, number):
    for old in (1, 2):
        path = write(tmp_path, old, state(old), 2)
    for room in (0, 1, HEADER_SIZE, HEADER_SIZE + 8, path.stat().st_size - 1, path.stat().st_size + 10):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "open", lambda *a, room=room: Full(open(*a), room), raising=False)
            assert_unchanged_by(tmp_path, lambda: write(tmp_path, number, state(9), 1))
    found = newest(tmp_path)
    assert found
    assert_same(state(2), found[1])


@pytest.mark.parametrize("where", [(checkpoint, "open"), (os, "fsync"), (os, "replace")], ids=lambda where: where[1])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, MemoryError])
def test_a_write_that_fails_anywhere_leaves_the_older_files(tmp_path, monkeypatch, where, error):
    for old in (1, 2):
        write(tmp_path, old, state(old), 2)

    def fail(*_):
        raise error(errno.ENOSPC, "no")

    with monkeypatch.context() as patch:
        patch.setattr(*where, fail, raising=False)
        assert_unchanged_by(tmp_path, lambda: write(tmp_path, 3, state(9), 1), error)
    write(tmp_path, 3, state(), 1)
    assert numbers(tmp_path) == [3]


def test_where_only_the_folder_fails_the_file_is_there_and_the_older_stay(tmp_path, monkeypatch):
    write(tmp_path, 1, state(1), 1)
    sync, calls = os.fsync, []

    def second(descriptor):
        calls.append(descriptor)
        if len(calls) == 2:
            no_space()
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", second)
        with pytest.raises(OSError):
            write(tmp_path, 2, state(2), 1)
    assert numbers(tmp_path) == [1, 2]
    assert_same(state(2), read(tmp_path / "checkpoint-000000000002.mpipipe"))


def test_a_file_system_that_cannot_sync_a_folder_is_good_enough(tmp_path, monkeypatch):
    sync = os.fsync

    def only_files(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "no")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", only_files)
    write(tmp_path, 1, state(), 1)
    assert numbers(tmp_path) == [1]


def test_the_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    order = []
    for name in ("fsync", "replace"):
        plain = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, plain=plain: (order.append(name), plain(*a)))
    write(tmp_path, 1, state(), 1)
    assert order == ["fsync", "replace", "fsync"]


def test_a_folder_that_is_a_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x")
    with pytest.raises(OSError):
        write(path, 1, state(), 1)
    with pytest.raises(CheckpointError, match=re.escape(f"{path} cannot be read: Not a directory")):
        newest(path)
    assert issubclass(CheckpointError, MpipipeError)


# ---------------------------------------------------------------------------------------------------------- the newest


def test_each_file_that_cannot_be_used_is_warned_of_once(tmp_path, warned):
    paths = [write(tmp_path, number, state(number), 9) for number in range(5)]
    paths[4].write_bytes(paths[4].read_bytes()[:-1])
    flip(paths[3], -1)
    paths[2].write_bytes(b"")
    found = newest(tmp_path)
    assert found and found[0] == paths[1]
    assert_same(state(1), found[1])
    reasons = ("its checksum is wrong, so it was cut short or altered",) * 2 + ("it is too short",)
    assert warned == [
        f"Checkpoint {path} cannot be used: {reason}. The one before it is used."
        for path, reason in zip(paths[4:1:-1], reasons, strict=True)
    ]


def test_there_may_be_none_that_can_be_used(tmp_path, warned):
    assert newest(tmp_path) is None and not warned
    path = write(tmp_path, 1, state(), 1)
    flip(path, HEADER_SIZE)
    assert newest(tmp_path) is None
    assert len(warned) == 1 and str(path) in warned[0] and warned[0].endswith("There is none before it.")


def test_a_newer_file_hides_an_older_one_that_cannot_be_used(tmp_path, warned):
    flip(write(tmp_path, 1, state(), 9), -1)
    path = write(tmp_path, 2, state(), 9)
    found = newest(tmp_path)
    assert found and found[0] == path and not warned


# ------------------------------------------------------------------------------------------------ files that are wrong


def test_a_path_that_is_no_file(tmp_path):
    assert reason(tmp_path / "missing") == "no such file or directory"
    assert reason(tmp_path) == "it is not a file"
    os.mkfifo(tmp_path / "pipe")
    assert reason(tmp_path / "pipe") == "it is not a file"
    assert "null byte" in reason(tmp_path / "a\0b") or "null character" in reason(tmp_path / "a\0b")


def test_an_error_of_the_disk_is_a_reason(tmp_path, monkeypatch):
    path = write(tmp_path, 1, state(), 1)

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(checkpoint, "open", fail, raising=False)
    assert reason(path) == "input/output error"


def test_a_file_that_shrinks_while_it_is_read(tmp_path, monkeypatch):
    path = write(tmp_path, 1, Checkpoint({}, {"a": np.zeros(100_000)}), 1)
    plain = checkpoint._read_text

    def then_cut(*arguments):
        found = plain(*arguments)
        os.truncate(path, 200_000)
        return found

    monkeypatch.setattr(checkpoint, "_read_text", then_cut)
    assert reason(path) == "it was changed while it was read"


@pytest.mark.parametrize(
    "data, expected",
    [
        (b"", "it is too short"),
        (b"mpipipe check", "it is too short"),
        (with_sum(b"")[:-1], "it is too short"),
        (with_sum(b""), "it is too short"),
        (with_sum(b"1234567"), "it is too short"),
        (b"\x89HDF\r\n", "it is not in the format of a checkpoint"),
        (b"x" * 1000, "it is not in the format of a checkpoint"),
        (with_sum(b"\0" * 8, version=2), "it has version 2 of the format, and this mpipipe reads 1"),
        (with_sum(b"\0" * 8, version=123456), "it has version 123456 of the format, and this mpipipe reads 1"),
        (with_json(parts()).upper(), "it is not in the format of a checkpoint"),
        (with_text(b"{}", length=3), "its manifest would take 3 bytes, and 2 are left"),
        (with_text(b"{}", length=2**64 - 1), "its manifest would take 18446744073709551615 bytes, and 2 are left"),
        (with_text(b""), "its manifest is malformed"),
        (with_text(b"{} {}"), "its manifest is malformed"),
        (with_text(b'{"a": "\xff"}'), "its manifest is malformed"),
        (with_text(b"\xef\xbb\xbf{}"), "its manifest is malformed"),
        (with_text(b"9" * 5000), "its manifest "),
        (with_text(b"[" * 100_000), "its manifest is nested too deeply"),
        (with_text(b'{"a":' * 100_000), "its manifest is nested too deeply"),
        (with_json([]), "its manifest has not the entries of a checkpoint's"),
        (with_json({"byteorder": "little", "manifest": {}}), "its manifest has not the entries of a checkpoint's"),
        (with_json(parts(more=1)), "its manifest has not the entries of a checkpoint's"),
        (with_json(parts(byteorder="middle")), "its byte order is 'middle', and this machine's is"),
        (with_json(parts(byteorder=[1])), "its byte order is [1], and this machine's is"),
        (with_json(parts(manifest=[])), "its manifest is malformed"),
        (with_json(parts({})), "its manifest is malformed"),
        (with_json(parts([1])), "the entry 1 is not that of an array"),
        (with_json(parts([{}])), "the entry {} is not that of an array"),
        (with_json(parts([array(more=1)])), "is not that of an array"),
        (with_json(parts([array(name=None)]), b"\0" * 8), "the name of an array is None"),
        (with_json(parts([array(name=[])]), b"\0" * 8), "the name of an array is []"),
        (with_json(parts([array(), array()]), b"\0" * 16), "it has two arrays with the name 'a'"),
        (with_json(parts([array(shape=[3])]), b"\0" * 8), "its arrays do not take the 8 bytes that are left for them"),
        (with_json(parts([array()]), b"\0" * 9), "its arrays do not take the 9 bytes that are left for them"),
        (with_json(parts([array(shape=[2**40])]), b"\0" * 8), "its arrays do not take the 8 bytes"),
        (with_json(parts([array(shape=[2**62] * 60)]), b"\0" * 8), "its arrays do not take the 8 bytes"),
        (with_json(parts([array(shape=[0] + [2**62] * 9)])), "the shape of array 'a' cannot be"),
        (with_json(parts([array(shape=[0] + [1] * 63)])), None if np.__version__ >= "2" else "cannot be"),
        (with_json(parts([array(shape=[1] * 65)]), b"\0" * 4), "the shape of array 'a' is [1, 1"),
        (with_json(parts([array(shape=[2**63, 0])])), "the shape of array 'a' is [9223372036854775808, 0]"),
        (with_json(parts([array(shape=[-1])])), "the shape of array 'a' is [-1]"),
        (with_json(parts([array(shape=[-2, -1])]), b"\0" * 8), "the shape of array 'a' is [-2, -1]"),
        (with_json(parts([array(shape=[True, 2])]), b"\0" * 8), "the shape of array 'a' is [True, 2]"),
        (with_json(parts([array(shape=[2.0])]), b"\0" * 8), "the shape of array 'a' is [2.0]"),
        (with_json(parts([array(shape=2)]), b"\0" * 8), "the shape of array 'a' is 2"),
        (with_json(parts([array(shape=None)]), b"\0" * 8), "the shape of array 'a' is None"),
        (with_json(parts([array(shape="2")]), b"\0" * 8), "the shape of array 'a' is '2'"),
        *(
            (with_json(parts([array(dtype=dtype)]), b"\0" * 16), "which is not known")
            for dtype in (
                "O",
                "object",
                "f4",
                ">f4",
                "S8",
                "str",
                "V8",
                "f4,f4",
                "(2,)f4",
                "M8[s]",
                "float128",
                "",
                None,
                [],
                {},
            )
        ),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else None,
)
def test_a_malformed_file_is_refused_with_a_reason(tmp_path, data, expected):
    path = tmp_path / "file"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        if expected is None:
            read(path)
        else:
            assert expected in reason(path)
        # The block that is hashed at once, what the JSON text becomes, and no more.
        assert tracemalloc.get_traced_memory()[1] < checkpoint._BLOCK + (1 << 21)
    finally:
        tracemalloc.stop()


def test_any_depth_of_nesting_is_read_or_refused(tmp_path):
    path = tmp_path / "file"
    for depth in range(sys.getrecursionlimit() - 200, sys.getrecursionlimit() + 20, 7):
        deep = b"[" * depth + b"]" * depth
        for text in (
            b'{"byteorder": 1, "manifest": %s, "arrays": 1}',
            b'{"byteorder": %s, "manifest": {}, "arrays": []}',
        ):
            path.write_bytes(with_text(text % deep))
            assert reason(path)
        entry = json.dumps(parts("?")).encode().replace(b'"?"', b"[%s]" % deep)
        path.write_bytes(with_text(entry))
        assert reason(path)


# ----------------------------------------------------------------------------------------- files that are wrong, drawn


def whole() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return write(Path(folder), 1, state(), 1).read_bytes()


WHOLE = whole()


def assert_refused(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint-000000000001.mpipipe"
        path.write_bytes(data)
        assert reason(path)


def assert_refused_or_read(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint-000000000001.mpipipe"
        path.write_bytes(data)
        try:
            read(path)
        except CheckpointError:
            assert reason(path)


@fuzz
@given(length=st.integers(0, len(WHOLE) - 1))
def test_any_truncated_file_is_refused(length):
    assert_refused(WHOLE[:length])


def test_every_altered_byte_is_found(tmp_path):
    path = tmp_path / "file"
    for place in range(len(WHOLE)):
        for bits in (0x01, 0x20, 0x80):
            path.write_bytes(WHOLE)
            flip(path, place, bits)
            assert reason(path)


@fuzz
@given(place=st.integers(0, len(WHOLE) - 1), bits=st.integers(1, 255))
def test_any_altered_byte_is_found(place, bits):
    data = bytearray(WHOLE)
    data[place] ^= bits
    assert_refused(bytes(data))


@fuzz
@given(more=st.binary(min_size=1, max_size=50))
def test_anything_more_is_found(more):
    assert_refused(WHOLE + more)


@fuzz
@given(data=st.binary(max_size=300), start=st.sampled_from([0, 8, 19, 28, HEADER_SIZE]))
def test_any_bytes_are_refused(data, start):
    assert_refused(WHOLE[:start] + data)


@fuzz
@given(data=st.binary(max_size=100))
def test_any_bytes_with_their_checksum_are_refused(data):
    assert_refused(with_sum(data))
    assert_refused(with_text(data))


@fuzz
@given(text=VALUES)
def test_any_other_json_is_refused(text):
    assert_refused(with_json(text))


@fuzz
@given(place=st.integers(HEADER_SIZE, len(WHOLE) - 1), bits=st.integers(1, 255), cut=st.integers(0, 3))
def test_an_altered_file_with_a_right_checksum_does_no_harm(place, bits, cut):
    data = bytearray(WHOLE)
    data[place] ^= bits
    assert_refused_or_read(with_sum(bytes(data[HEADER_SIZE : len(data) - cut])))


WRONG = VALUES | st.sampled_from([10**30, -1, 2**63, "object", "O", "float32,O", [[1]], [-1], [2**62, 2**62], [1e30]])
FIELDS = {
    "name": st.sampled_from(["a", "b"]),
    "dtype": st.sampled_from([np.dtype(dtype).name for dtype in DTYPES]),
    "shape": st.lists(st.integers(-1, 3) | st.sampled_from([2**31, 2**62, 2**63, 10**40]), max_size=4),
}


@fuzz
@given(
    arrays=st.lists(
        st.fixed_dictionaries({name: right | WRONG for name, right in FIELDS.items()})
        | st.fixed_dictionaries(FIELDS)
        | st.fixed_dictionaries({}, optional=FIELDS)
        | WRONG,
        max_size=3,
    )
    | WRONG,
    data=st.binary(max_size=40),
)
def test_any_arrays_in_a_manifest_are_taken_or_refused(arrays, data):
    assert_refused_or_read(with_json(parts(arrays), data))


@fuzz
@given(wrong=WRONG, key=st.sampled_from(["byteorder", "manifest", "arrays", "name", "dtype", "shape"]))
def test_any_wrong_entry_is_taken_or_refused(wrong, key):
    entry = [array(**({key: wrong} if key in FIELDS else {}))]
    whole = parts(entry) if key in FIELDS else {**parts(entry), key: wrong}
    assert_refused_or_read(with_json(whole, b"\0" * 8))
