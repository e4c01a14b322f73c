"""What keeps a GPU busy: between matrix products few compiled kernels instead of many, which take as long as the products;
and copies that nothing waits for.

On a CPU nothing is compiled, which would take a C++ compiler and longer than small work.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_FUSED = ("RMSNorm", "MLP")  # ends of classes' names


def fused(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The function, compiled on a GPU; for any number of rows, since packs differ in theirs."""
    return _compiled(function) if device.type == "cuda" else function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def fuse_modules(model: torch.nn.Module, device: torch.device) -> None:
    """The same for a model's norms and feed-forward parts, in place."""
    if device.type == "cuda":
        # The norms of a class share their code, and differ in width, rank, gradients and autocast: more kinds than the default.
        torch._dynamo.config.recompile_limit = 64
        for module in model.modules():
            if type(module).__name__.endswith(_FUSED):
                module.compile(dynamic=True)


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device. Memory that is not pinned would wait for all that a GPU still has to do."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
