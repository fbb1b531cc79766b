"""What stands before the elements of a piece on the wire: the step it belongs to, and its number.

A message without elements asks for the piece. Its number is then written as -1 minus it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mpipipe.protocol.plan import Piece

# Two int64: the step, the piece's index. It keeps what follows aligned to 16 bytes.
HEADER_BYTES = 16


def read(message: NDArray[np.uint8]) -> tuple[int, int]:
    """(step, piece index) of a message."""
    step, piece = message[:HEADER_BYTES].view(np.int64)
    return int(step), int(piece)


def write(message: NDArray[np.uint8], step: int, piece: int) -> None:
    """Write (step, piece index) at the start of a message."""
    message[:HEADER_BYTES].view(np.int64)[:] = step, piece


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
