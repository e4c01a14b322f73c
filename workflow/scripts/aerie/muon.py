"""Muon for a CPU: torch's orthogonalises in bfloat16, which a CPU without such instructions emulates, at a fifth of float32's speed."""

from collections.abc import Callable, Sequence

import torch


class Float32Muon(torch.optim.Muon):
    """torch's Muon with the orthogonalisation in float32."""

    @classmethod
    def instead_of(cls, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The same optimizer, with the same parameters and settings; any other kind is returned as it is."""
        if type(optimizer) is not torch.optim.Muon:
            return optimizer
        return cls(optimizer.param_groups, **optimizer.defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step, as torch.optim.Muon's documentation gives it."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                momentum = state["momentum_buffer"]
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
                update = orthogonalize(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * _size_factor(parameter.shape, group["adjust_lr_fn"]))


def orthogonalize(matrix: torch.Tensor, coefficients: Sequence[float], steps: int, eps: float) -> torch.Tensor:
    """The quintic Newton-Schulz iteration of torch.optim.Muon, in the matrix's own dtype."""
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    result = matrix.T if tall else matrix
    result = result / result.norm().clamp(min=eps)
    for _ in range(steps):
        gram = result @ result.T
        result = torch.addmm(result, torch.addmm(gram, gram, gram, beta=b, alpha=c), result, beta=a)
    return result.T if tall else result


def _size_factor(shape: torch.Size, rule: str | None) -> float:
    """How Muon's learning rate depends on a matrix's size [rows, columns]."""
    rows, columns = shape
    if rule == "match_rms_adamw":
        return float(0.2 * max(rows, columns) ** 0.5)
    return float(max(1, rows / columns) ** 0.5)
