"""The sizes of the rows' models, for whichever framework builds them, and their data.

Data are random numbers: what is measured is how long a step takes, not what it learns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

CLASSES = 10
MLP_LAYERS = 8
RESNET_STAGES, RESNET_IMAGE = (1, 2, 4), 16
TRANSFORMER_BLOCKS, TRANSFORMER_LENGTH, TRANSFORMER_WORDS = 4, 32, 256
EMBEDDING_WIDTH, EMBEDDING_LENGTH = 32, 16
EMULATED_LAYERS, EMULATED_WIDTH, EMULATED_ROW = 10, 8, 50

NAMES = ("resnet", "mlp", "transformer", "embedding", "emulated")


@dataclass(frozen=True)
class Shape:
    """A model.

    Attributes:
        name: which one.
        size: the one size (channels, units, width, words, weights of a layer) that sets how many weights it has.
        seconds: of the emulated model alone: how long its layers' forward and backward passes take together.
    """

    name: str
    size: int
    seconds: float = 0.0

    @property
    def emulated_passes(self) -> tuple[float, float]:
        """Seconds of an emulated layer's forward and backward pass."""
        return self.seconds / EMULATED_LAYERS / 3, self.seconds / EMULATED_LAYERS * 2 / 3


def shape(name: str, weight_bytes: float) -> Shape:
    """The model of that name that has about so many bytes of weights, in float32."""
    weights = weight_bytes / 4
    if name == "mlp":
        size = math.sqrt(weights / MLP_LAYERS)
    elif name == "resnet":
        # Two blocks of two 3 x 3 convolutions in each of three stages, with c, 2c and 4c channels: 36, 128, 512 c^2.
        size = math.sqrt(weights / 676)
    elif name == "transformer":
        size = math.sqrt(weights / (12 * TRANSFORMER_BLOCKS))
    elif name == "embedding":
        return Shape(name, max(100, round(weights / EMBEDDING_WIDTH)))
    elif name == "emulated":
        return Shape(name, max(2, round(weights / EMULATED_LAYERS / EMULATED_ROW)) * EMULATED_ROW)
    else:
        raise ValueError(f"unknown model {name!r}: {', '.join(NAMES)}")
    return Shape(name, max(8, round(size / 4) * 4))


def data(model: Shape, batch: int, seed: int) -> tuple[Any, Any]:
    """A batch of inputs and labels."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, CLASSES, batch).astype(np.int32)
    if model.name == "mlp":
        return random.standard_normal((batch, model.size), dtype=np.float32), labels
    if model.name == "resnet":
        return random.standard_normal((batch, RESNET_IMAGE, RESNET_IMAGE, 3), dtype=np.float32), labels
    if model.name == "emulated":
        return np.ones((batch, EMULATED_WIDTH), np.float32), labels
    words, length = (
        (TRANSFORMER_WORDS, TRANSFORMER_LENGTH) if model.name == "transformer" else (model.size, EMBEDDING_LENGTH)
    )
    return random.integers(0, words, (batch, length)).astype(np.int32), labels
