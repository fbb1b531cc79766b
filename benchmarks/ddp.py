"""The column of PyTorch's DistributedDataParallel over Gloo, and the rows' models in PyTorch."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import shapes

# Megabytes. The default, 25, would put most of these models into one bucket, with nothing left to overlap.
_BUCKET = 1


class Ddp:
    """Modes: "training", with DDP's all-reduces during the backward pass; "computing", the bare model."""

    def __init__(self, model: shapes.Shape, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(1)
        distributed.init_process_group("gloo")
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self._shape = model
        self._bare = build(model)
        self._wrapped = DistributedDataParallel(self._bare, bucket_cap_mb=_BUCKET)
        self._sgd = torch.optim.SGD(self._bare.parameters(), 0.01, momentum=0.9)

    def facts(self) -> dict[str, Any]:
        """What the results should name."""
        return {
            "bytes": sum(4 * weight.numel() for weight in self._bare.parameters()),
            "threads": [torch.get_num_threads()],
            "versions": {"torch": torch.__version__, "python": sys.version},
        }

    def prepare(self, batch: int) -> None:
        """Make the data."""
        x, y = shapes.data(self._shape, batch, self.rank)
        # An emulated layer takes part in the backward pass by its input.
        self._x = torch.from_numpy(x).requires_grad_(self._shape.name == "emulated")
        if self._shape.name == "resnet":
            self._x = self._x.permute(0, 3, 1, 2).contiguous()
        self._y = torch.from_numpy(y).long()

    def serve(self) -> bool:
        """Nobody only serves."""
        return False

    def steps(self, mode: str, count: int) -> list[float]:
        """Do steps."""
        model = self._wrapped if mode == "training" else self._bare
        times = [time.perf_counter()]
        for _ in range(count):
            self._sgd.zero_grad()
            nn.functional.cross_entropy(model(self._x), self._y).backward()
            self._sgd.step()
            times.append(time.perf_counter())
        return times

    def close(self) -> None:
        """Leave at once: destroying the group can wait for ranks that are gone."""
        sys.stdout.flush()
        os._exit(0)


def build(model: shapes.Shape) -> nn.Module:
    """The twin of ``models.build``."""
    if model.name == "emulated":
        layers = [_Emulated(model.size, *model.emulated_passes) for _ in range(shapes.EMULATED_LAYERS)]
        return nn.Sequential(*layers, nn.Linear(shapes.EMULATED_WIDTH, shapes.CLASSES))
    make = {"mlp": _mlp, "resnet": _resnet, "transformer": _transformer, "embedding": _embedding}[model.name]
    return make(model.size)


def _mlp(units: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(shapes.MLP_LAYERS):
        layers += [nn.Linear(units, units), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(units, shapes.CLASSES))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(_convolution(inputs, outputs, 3, stride), nn.ReLU())
        self.second = _convolution(outputs, outputs, 3, 1)
        self.shortcut = _convolution(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = nn.functional.relu(self.shortcut(x) + self.second(self.first(x)))
        return result


def _resnet(channels: int) -> nn.Module:
    layers: list[nn.Module] = [_convolution(3, channels, 3, 1), nn.ReLU()]
    inputs = channels
    for stage, factor in enumerate(shapes.RESNET_STAGES):
        for block in range(2):
            layers.append(_Residual(inputs, channels * factor, 2 if stage and not block else 1))
            inputs = channels * factor
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, shapes.CLASSES))


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.dense = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        y = nn.functional.scaled_dot_product_attention(self.query(y), self.key(y), self.value(y), scale=1.0)
        x = x + self.out(y)
        result: torch.Tensor = x + self.dense(self.norms[1](x))
        return result


class _Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


def _transformer(width: int) -> nn.Module:
    blocks = [_Block(width) for _ in range(shapes.TRANSFORMER_BLOCKS)]
    words = nn.Embedding(shapes.TRANSFORMER_WORDS, width)
    return nn.Sequential(words, *blocks, _Mean(), nn.Linear(width, shapes.CLASSES))


def _embedding(words: int) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(words, shapes.EMBEDDING_WIDTH),
        nn.Flatten(),
        nn.Linear(shapes.EMBEDDING_WIDTH * shapes.EMBEDDING_LENGTH, 64),
        nn.ReLU(),
        nn.Linear(64, shapes.CLASSES),
    )


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, kernel: torch.Tensor, there: float, back: float) -> torch.Tensor:
        context.count, context.seconds = kernel.numel(), back
        time.sleep(there)
        return x + kernel[0]

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        (upstream,) = gradients
        time.sleep(context.seconds)
        return upstream, upstream.mean().expand(context.count).contiguous(), None, None


class _Emulated(nn.Module):
    """A layer that takes time but no cores."""

    def __init__(self, weights: int, forward: float, backward: float) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(weights))
        self.seconds = forward, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Pass.apply(x, self.kernel, *self.seconds)
        return result
