"""The rate of a link, by a plain TCP stream: run with RANK=0 on one host and RANK=1, MASTER_ADDR=... on another.

RANK 0 receives and prints bytes per second. Nothing of MPI or TensorFlow is in it.
"""

from __future__ import annotations

import os
import socket
import sys
import time

_PORT = 47001
_CHUNK = 1 << 18


def send(address: str, seconds: float) -> None:
    """Send zeros for some seconds."""
    chunk = bytes(_CHUNK)
    end = time.monotonic() + 10
    while True:
        try:
            stream = socket.create_connection((address, _PORT), timeout=5)
            break
        except OSError:  # the receiver is not there yet
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
    with stream:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            stream.sendall(chunk)


def receive(start_up: float = 0.3) -> float:
    """Bytes per second of one stream, without its first moments, in which TCP finds its pace."""
    with socket.create_server(("", _PORT)) as server:
        stream, _ = server.accept()
        with stream:
            buffer = bytearray(_CHUNK)
            begin = time.perf_counter() + start_up
            counted, first, last = 0, 0.0, 0.0
            while got := stream.recv_into(buffer):
                now = time.perf_counter()
                if now < begin:
                    continue
                if not first:
                    first = now
                else:
                    counted, last = counted + got, now
    return counted / (last - first)


if __name__ == "__main__":
    if os.environ["RANK"] == "0":
        print(receive(), flush=True)
    else:
        send(os.environ["MASTER_ADDR"], float(sys.argv[1]))
