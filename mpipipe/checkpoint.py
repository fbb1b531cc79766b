"""The files that a run's whole state is kept in, so that a later run can go on from the newest whole one.

A file is one line of ASCII, which names the format and its version and has the SHA-256 of all that follows; the length
of a JSON text in 8 bytes, little-endian; the JSON text, with the caller's manifest and with name, dtype and shape of
each array; and the arrays' bytes in that order, each in C order.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from mpipipe.errors import MpipipeError
from mpipipe.logs import logger
from mpipipe.wire import plain

_VERSION = 1
_HEADER = "mpipipe checkpoint {version} sha256 {digest}\n"
_HEADER_SIZE = len(_HEADER.format(version=_VERSION, digest="0" * 64))
_ANY_VERSION = re.compile(rb"mpipipe checkpoint ([0-9]{1,9}) ")
_LENGTH_SIZE = 8

_FILE = re.compile(r"checkpoint-([0-9]{12,})\.mpipipe")
_TEMPORARY = re.compile(r"\.checkpoint-[0-9]{12,}\.mpipipe\.[0-9]+\.tmp")

# Names that mean the same bytes on every machine, which a long double's does not. A name that a file gives never
# reaches numpy unless it is one of these: numpy would also read whole structures and Python objects out of a string.
_DTYPES = frozenset(
    ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    + ("float16", "float32", "float64", "complex64", "complex128", "bfloat16", "float8_e4m3fn", "float8_e5m2")
)
_MOST_DIMENSIONS = 64
_LONGEST_DIMENSION = 2**63 - 1

# How much is hashed and written or read at once.
_BLOCK = 1 << 22


class CheckpointError(MpipipeError):
    """A file or folder of checkpoints cannot be used; says which and why."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run.

    Attributes:
        manifest: What JSON can hold.
        arrays: The arrays, each by its name.
    """

    manifest: dict[str, Any]
    arrays: dict[str, NDArray[Any]]


def write(folder: Path, number: int, checkpoint: Checkpoint, keep: int) -> Path:
    """Write a checkpoint into a folder, and delete those that are too old.

    The file has its name only once all of it is on the disk. Where that fails the older files stay as they were.

    Args:
        folder: Where to; it is made if need be.
        number: How many steps are done.
        checkpoint: What to write; nobody may change it meanwhile.
        keep: How many whole files stay, those with the highest numbers. The one that is written always does.

    Returns:
        The file.

    Raises:
        OSError: The file cannot be written.
        TypeError: JSON cannot hold the manifest, a name is not a string, or an array is not of numbers.
        ValueError: The number is negative, or nothing would be kept.
    """
    if number < 0:
        raise ValueError(f"The number of a checkpoint cannot be {number}: it counts the steps that are done.")
    if keep < 1:
        raise ValueError(f"At least one checkpoint has to be kept, not {keep}.")
    arrays = {name: np.asarray(array) for name, array in checkpoint.arrays.items()}
    text = _text(checkpoint.manifest, arrays)

    folder.mkdir(parents=True, exist_ok=True)
    # Before the new file is written, which may need the room that a killed run's half-written one takes.
    _remove_temporary(folder)
    path = folder / f"checkpoint-{number:012d}.mpipipe"
    temporary = folder / f".{path.name}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            _write(file, text, arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync(folder)
    try:
        _prune(folder, number, keep)
    except (OSError, CheckpointError) as error:
        logger.warning("older checkpoints than %s stay: %s", path, error)
    return path


def read(path: Path) -> Checkpoint:
    """Read a checkpoint.

    Nothing in the file is run, and the arrays never take more than the file's own size, whatever it says.

    Raises:
        CheckpointError: The file cannot be read, is not whole, or is not a checkpoint.
    """
    with _opened(path) as (file, size):
        _check_sum(file, path)
        manifest, specs = _read_text(file, size, path)
        arrays: dict[str, NDArray[Any]] = {}
        for name, (dtype, shape) in specs.items():
            flat = np.empty(math.prod(shape), dtype)
            # A reader that gets less than it asked for has met the end of a file that was whole a moment ago.
            if file.readinto(plain.encode(flat).data) != flat.nbytes:
                raise _unusable(path, "it was changed while it was read")
            try:
                # Only here is an empty array's shape made, so that its other dimensions take no memory.
                arrays[name] = flat.reshape(shape)
            except (ValueError, OverflowError):
                raise _unusable(path, f"the shape of array {_short(name)} cannot be") from None
        return Checkpoint(manifest, arrays)


def newest(folder: Path) -> tuple[Path, Checkpoint] | None:
    """The newest whole checkpoint in a folder, by number; each newer one that cannot be used is named in a warning.

    Returns:
        The file and what is in it, or nothing where the folder does not exist or has none that is whole.

    Raises:
        CheckpointError: The folder is no folder, or cannot be read.
    """
    paths = [path for _, path in _numbered(folder)]
    for place, path in enumerate(paths, start=1):
        try:
            return path, read(path)
        except CheckpointError as error:
            before = "The one before it is used." if place < len(paths) else "There is none before it."
            logger.warning("%s %s", error, before)
    return None


# ------------------------------------------------------------------------------------------------------------- writing


def _text(manifest: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """The JSON text of a file."""
    if not isinstance(manifest, dict):
        raise TypeError(f"The manifest of a checkpoint is a dictionary, not {type(manifest).__name__}.")
    for name, array in arrays.items():
        if not isinstance(name, str):
            raise TypeError(f"The name of an array in a checkpoint is a string, not {name!r}.")
        if array.dtype.name not in _DTYPES or plain.dtype_of(array.dtype.name) != _native(array.dtype):
            raise TypeError(f"A checkpoint cannot hold array {name!r}, which is of {array.dtype}.")
    specs = [{"name": name, "dtype": a.dtype.name, "shape": list(a.shape)} for name, a in arrays.items()]
    return json.dumps({"byteorder": sys.byteorder, "manifest": manifest, "arrays": specs}).encode("ascii")


def _write(file: BinaryIO, text: bytes, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write all of a file in one pass; its first line comes last, with the checksum of the rest."""
    digest = hashlib.sha256()
    file.write(b"\0" * _HEADER_SIZE)
    head = len(text).to_bytes(_LENGTH_SIZE, "little") + text
    digest.update(head)
    file.write(head)
    for array in arrays.values():
        for block in _blocks(array):
            digest.update(block)
            file.write(block)
    file.seek(0)
    file.write(_HEADER.format(version=_VERSION, digest=digest.hexdigest()).encode("ascii"))


def _blocks(array: NDArray[Any]) -> Iterator[memoryview]:
    """The bytes of an array in C order and the machine's byte order, with no copy of more than a block."""
    step = _BLOCK // array.itemsize
    flat = array.reshape(-1) if array.flags.c_contiguous else array.flat
    for start in range(0, array.size, step):
        yield plain.encode(np.asarray(flat[start : start + step], _native(array.dtype))).data


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("=")


def _sync(folder: Path) -> None:
    """Have the folder's own entries on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems have no such thing for a folder.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _prune(folder: Path, number: int, keep: int) -> None:
    """Delete all but the newest files, and never the one that was just written.

    A file that is not whole does not count. If it is newer than the one just written then it stays for the user to
    look at, until a later file is newer.
    """
    kept = 0
    for other, path in _numbered(folder):
        whole = other == number or _fits(path)
        if other == number or (whole and kept < keep):
            kept += 1
        elif (whole or other < number) and not path.is_dir():
            _remove(path)


def _fits(path: Path) -> bool:
    """Whether a file has the size that it says, without the time to read all of it."""
    try:
        with _opened(path) as (file, size):
            _read_text(file, size, path)
    except CheckpointError:
        return False
    return True


def _remove_temporary(folder: Path) -> None:
    for entry in list(folder.iterdir()):
        if _TEMPORARY.fullmatch(entry.name):
            _remove(entry)


def _remove(path: Path) -> None:
    # What was to be written has been or can be: a file too many is no reason to end a run.
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s is not needed any more and cannot be deleted: %s.", path, error.strerror)


# ------------------------------------------------------------------------------------------------------------- reading


def _unusable(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"Checkpoint {path} cannot be used: {reason}.")


def _short(value: object) -> str:
    """A value out of a file as a message shows it."""
    try:
        text = ascii(value)
    except RecursionError:
        return "nested too deeply"
    return text if len(text) <= 60 else text[:57] + "..."


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints in a folder with their numbers, the newest first."""
    found = []
    try:
        for entry in folder.iterdir():
            match = _FILE.fullmatch(entry.name)
            # With a zero too many it would be a second file of the same number.
            if match and f"{int(match[1]):012d}" == match[1]:
                found.append((int(match[1]), entry))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"The folder of checkpoints {folder} cannot be read: {error.strerror}.") from error
    return sorted(found, reverse=True)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[BufferedReader, int]]:
    """A checkpoint's open file and its size; an error of the system, here or in the block, becomes a checkpoint's."""
    try:
        # Before it is opened, which for a pipe would wait for a writer.
        if not stat.S_ISREG(path.stat().st_mode):
            raise _unusable(path, "it is not a file")
        with open(path, "rb") as file:
            yield file, os.fstat(file.fileno()).st_size
    except OSError as error:
        raise _unusable(path, (error.strerror or str(error) or type(error).__name__).lower()) from error
    except ValueError as error:
        # A name with a null byte in it.
        raise _unusable(path, str(error)) from error


def _read_digest(file: BufferedReader, path: Path) -> str:
    """Read the first line, and return the checksum in it."""
    line = file.read(_HEADER_SIZE)
    match = _ANY_VERSION.match(line)
    if match and int(match[1]) != _VERSION:
        raise _unusable(path, f"it has version {int(match[1])} of the format, and this mpipipe reads {_VERSION}")
    digest = line[-65:-1].decode("latin-1")
    if line != _HEADER.format(version=_VERSION, digest=digest).encode("latin-1"):
        start = _HEADER.format(version=_VERSION, digest="").encode("ascii")[:-1]
        short = start.startswith(line[: len(start)]) and len(line) < _HEADER_SIZE
        raise _unusable(path, "it is too short" if short else "it is not in the format of a checkpoint")
    return digest


def _check_sum(file: BufferedReader, path: Path) -> None:
    """Compare the checksum with what follows the first line."""
    file.seek(0)
    expected = _read_digest(file, path)
    digest = hashlib.sha256()
    block = memoryview(bytearray(_BLOCK))
    while count := file.readinto(block):
        digest.update(block[:count])
    if digest.hexdigest() != expected:
        raise _unusable(path, "its checksum is wrong, so it was cut short or altered")


_Specs = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]


def _read_text(file: BufferedReader, size: int, path: Path) -> tuple[dict[str, Any], _Specs]:
    """Read all that comes before the arrays, and see that the arrays' bytes are all that is left of the file."""
    file.seek(0)
    _read_digest(file, path)
    left = size - _HEADER_SIZE - _LENGTH_SIZE
    if left < 0:
        raise _unusable(path, "it is too short")
    length = int.from_bytes(file.read(_LENGTH_SIZE), "little")
    if length > left:
        raise _unusable(path, f"its manifest would take {length} bytes, and {left} are left")
    try:
        text = json.loads(file.read(length).decode("ascii"))
    except RecursionError:
        raise _unusable(path, "its manifest is nested too deeply") from None
    except ValueError as error:
        raise _unusable(path, f"its manifest is malformed: {_short(str(error))}") from None
    if not isinstance(text, dict) or text.keys() != {"byteorder", "manifest", "arrays"}:
        raise _unusable(path, "its manifest has not the entries of a checkpoint's")
    if text["byteorder"] != sys.byteorder:
        raise _unusable(path, f"its byte order is {_short(text['byteorder'])}, and this machine's is {sys.byteorder}")
    if not isinstance(text["manifest"], dict) or not isinstance(text["arrays"], list):
        raise _unusable(path, "its manifest is malformed: a dictionary and a list are expected in it")

    specs: _Specs = {}
    expected = 0
    for entry in text["arrays"]:
        name, dtype, shape = _spec(entry, path)
        if name in specs:
            raise _unusable(path, f"it has two arrays with the name {_short(name)}")
        specs[name] = dtype, shape
        expected += dtype.itemsize * math.prod(shape)
    if expected != left - length:
        raise _unusable(path, f"its arrays do not take the {left - length} bytes that are left for them")
    return text["manifest"], specs


def _spec(entry: object, path: Path) -> tuple[str, np.dtype[Any], tuple[int, ...]]:
    """Name, dtype and shape of an array, as a file has them."""
    if not isinstance(entry, dict) or entry.keys() != {"name", "dtype", "shape"}:
        raise _unusable(path, f"the entry {_short(entry)} is not that of an array")
    name, dtype, shape = entry["name"], entry["dtype"], entry["shape"]
    if not isinstance(name, str):
        raise _unusable(path, f"the name of an array is {_short(name)}")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise _unusable(path, f"the dtype of array {_short(name)} is {_short(dtype)}, which is not known")
    # Not isinstance, for which True is a number.
    sound = isinstance(shape, list) and all(type(n) is int and 0 <= n <= _LONGEST_DIMENSION for n in shape)
    if not sound or len(shape) > _MOST_DIMENSIONS:
        raise _unusable(path, f"the shape of array {_short(name)} is {_short(shape)}")
    try:
        return name, plain.dtype_of(dtype), tuple(shape)
    except TypeError:
        # An older ml_dtypes may not tell numpy of all its names.
        raise _unusable(path, f"the dtype of array {_short(name)} is {dtype}, which is not known here") from None
