"""Error feedback: what a wire format loses of a gradient in one step is added to the gradient of the next.

Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of Speech
DNNs", Interspeech 2014, section 3; with a proof that training converges as fast as it does without compression,
Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019. What is kept is a
gradient, as in the former; a learning rate is the server's business.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpipipe.wire import formats


class Feedback:
    """The encoder of one piece of a bucket's gradient, with a memory of what it still owes, the *residual*.

    After any number of steps, the sum of all that was decoded and the residual make the sum of all gradients, but for
    the rounding of additions in their own dtype; and the residual is no more than the last encoding has lost. Where the
    format sends a dtype plain, there is no residual and encoding is a copy.
    """

    def __init__(self, form: str, dtype: str, nbytes: int) -> None:
        """For a piece of ``nbytes`` bytes of elements of ``dtype``; ValueError if there is no format ``form``."""
        self.form = form
        self.dtype = dtype
        self._residual: NDArray[Any] | None = None
        if formats.narrows(form, dtype):
            self._residual = np.zeros(nbytes, np.uint8).view(dtype)

    def encode(self, data: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        """Encode the gradient whose bytes are ``data``, of shape (nbytes,), and the residual; keep what is lost.

        An element that is sent as an infinity or NaN owes nothing afterwards: no later step could pay that.

        Raises:
            ValueError: ``data`` has not the length of the piece, or ``out`` not its length in the format.
        """
        if self._residual is None:
            formats.encode(self.form, self.dtype, data, out)
            return
        formats.check_lengths(self.form, self.dtype, self._residual.nbytes, out.nbytes)
        gradient, codes = data.view(self.dtype), out.view(np.uint16)
        if gradient.shape != self._residual.shape:
            raise ValueError(f"{data.nbytes} bytes for a piece of {self._residual.nbytes}")
        for start in range(0, gradient.size, formats.BLOCK):
            block = slice(start, start + formats.BLOCK)
            self._encode_block(gradient[block], self._residual[block], codes[block])

    def _encode_block(self, gradient: NDArray[Any], residual: NDArray[Any], codes: NDArray[np.uint16]) -> None:
        with np.errstate(all="ignore"):
            residual += gradient
            formats.encode(self.form, self.dtype, residual.view(np.uint8), codes.view(np.uint8))
            sent = np.empty_like(residual)
            formats.decode(self.form, self.dtype, codes.view(np.uint8), sent.view(np.uint8))
            residual -= sent
            finite = np.isfinite(residual)
            if not finite.all():
                residual[~finite] = 0
