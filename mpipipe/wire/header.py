"""What stands before the elements of a piece on the wire: the step it belongs to, its number, the samples behind it.

A message without elements asks for the piece. Its number is then written as -1 minus it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mpipipe.protocol.plan import Piece

# The step as an int64, the piece's index as an int32, the number of samples behind a gradient as a uint32 (0 where it
# does not matter). It keeps what follows aligned to 16 bytes.
_HEADER = struct.Struct("=qiI")
HEADER_BYTES = _HEADER.size

MAX_SAMPLES = 2**32 - 1


def read(message: NDArray[np.uint8]) -> tuple[int, int]:
    """(step, piece index) of a message."""
    step, piece, _ = _HEADER.unpack_from(message.data)
    return step, piece


def samples(message: NDArray[np.uint8]) -> int:
    """The number of samples behind the gradient in a message."""
    number: int = _HEADER.unpack_from(message.data)[2]
    return number


def write(message: NDArray[np.uint8], step: int, piece: int, samples: int = 0) -> None:
    """Write (step, piece index, samples) at the start of a message."""
    _HEADER.pack_into(message.data, 0, step, piece, samples)


def question(step: int, piece: int) -> NDArray[np.uint8]:
    """The message that asks for a piece."""
    message = np.empty(HEADER_BYTES, dtype=np.uint8)
    write(message, step, -1 - piece)
    return message


def message_of(image: NDArray[np.uint8], pieces: Sequence[Piece], piece: Piece) -> NDArray[np.uint8]:
    """One piece's message in an *image*: the messages of consecutive pieces, one after the other, header and elements.

    That is how the training step hands them over, so that a message is sent from where TensorFlow has put it.
    """
    first = pieces[0]
    start = piece.offset - first.offset + HEADER_BYTES * (piece.index - first.index)
    return image[start : start + HEADER_BYTES + piece.nbytes]
