"""Muon in several ranks: each orthogonalises some of the matrices, which takes longer than all else that an optimizer does.

On a CPU in float32: bfloat16, in which torch's Muon does it, is emulated there, at a fifth of the speed.
"""

from collections.abc import Callable, Sequence

import torch

from .ranks import Ranks

_STEPS_TOGETHER = 3  # of Newton-Schulz
_LONG = 2  # times as long as wide is where taking them together is less work


class SharedMuon(torch.optim.Muon):
    """torch's Muon, its orthogonalisation shared by the ranks. Every rank has all of the state, and the same gradients."""

    def __init__(self, optimizer: torch.optim.Muon, dtype: torch.dtype, ranks: Ranks) -> None:
        """With the parameters and settings of another. dtype: of the orthogonalisation; torch's own is bfloat16."""
        super().__init__(optimizer.param_groups, **optimizer.defaults)
        self.dtype, self.ranks = dtype, ranks

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step, as torch.optim.Muon's documentation gives it."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            updates = []
            for parameter, owner in zip(parameters, owners([parameter.shape for parameter in parameters], self.ranks.count), strict=True):
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                momentum = state["momentum_buffer"]
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                if owner == self.ranks.rank:
                    update = parameter.grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
                    update = orthogonalize(update.to(self.dtype), group["ns_coefficients"], group["ns_steps"], group["eps"]).contiguous()
                else:
                    update = torch.empty_like(parameter, dtype=self.dtype)
                updates.append((update, owner))
            # Not before all is computed: one that waits for its owner keeps a part of the GPU from computing.
            arrivals = [self.ranks.spread(update, owner) for update, owner in updates]
            for parameter, (update, _), arrived in zip(parameters, updates, arrivals, strict=True):
                arrived()
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * _size_factor(parameter.shape, group["adjust_lr_fn"]))


def owners(shapes: Sequence[torch.Size], ranks: int) -> list[int]:
    """Which rank orthogonalises which matrix: the largest first, each by the rank that has least to do so far."""
    work, owner = [0] * ranks, [0] * len(shapes)
    costs = [rows * columns * min(rows, columns) for rows, columns in shapes]
    for place in sorted(range(len(shapes)), key=lambda place: -costs[place]):
        owner[place] = min(range(ranks), key=lambda rank: work[rank])
        work[owner[place]] += costs[place]
    return owner


def orthogonalize(matrix: torch.Tensor, coefficients: Sequence[float], steps: int, eps: float) -> torch.Tensor:
    """The quintic Newton-Schulz iteration of torch.optim.Muon, in the matrix's own dtype.

    It takes X to (a + bG + cG^2) X, with G = X X^T. The factors of several steps are all polynomials of the first G, so for a
    matrix much longer than wide they are multiplied with each other, and X with their product (Gram Newton-Schulz,
    https://dao-lab.ai/blog/2026/gram-newton-schulz). After three steps X and G are made anew, else rounding grows.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    result = matrix.T if tall else matrix
    result = result / result.norm().clamp(min=eps)
    together = _STEPS_TOGETHER if result.shape[1] >= _LONG * result.shape[0] else 1
    for done in range(0, steps, together):
        result = _factor(result @ result.T, coefficients, min(together, steps - done)) @ result
    return result.T if tall else result


def _factor(gram: torch.Tensor, coefficients: Sequence[float], steps: int) -> torch.Tensor:
    """What so many steps multiply X with, where `gram` is X X^T."""
    a, b, c = coefficients
    product = None
    for step in range(steps):
        factor = torch.addmm(gram, gram, gram, beta=b, alpha=c)  # less a, which is added to what it is multiplied with
        if step + 1 < steps:
            halfway = torch.addmm(gram, gram, factor, beta=a)
            gram = torch.addmm(halfway, factor, halfway, beta=a)
        if product is None:
            product = factor
            product.diagonal().add_(a)
        else:
            product = torch.addmm(product, product, factor, beta=a)
    return product


def _size_factor(shape: torch.Size, rule: str | None) -> float:
    """How Muon's learning rate depends on a matrix's size [rows, columns]."""
    rows, columns = shape
    if rule == "match_rms_adamw":
        return float(0.2 * max(rows, columns) ** 0.5)
    return float(max(1, rows / columns) ** 0.5)
