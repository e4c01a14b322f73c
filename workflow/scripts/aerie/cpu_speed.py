"""What makes training on a CPU about twice as fast; the results are those of the code it stands in for, but for rounding.

Attention: a packed row's samples do not see each other, but dense attention computes every pair and masks it. Here each
sample attends on its own. (On a GPU, flex attention skips the masked blocks.)
Loss: speculators' forward computes logits of every row, each step's loss from scratch, and masks the rows that are not
supervised. Here only supervised rows have logits, a block at a time, the target's probabilities are computed once, and
the steps after the first compute only the rows at which drafting of a supervised token starts.
Muon: torch orthogonalises in bfloat16, which a CPU without such instructions emulates, at a fifth of float32's speed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from speculators.losses.utils import _LOSS_REDUCTION_EPS
from speculators.models.eagle3 import Eagle3DraftModel
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache
from transformers.modeling_utils import AttentionInterface

PACKED_ATTENTION = "aerie_packed"
_HEAD_ROWS = 128  # whose logits fit into a processor's cache


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    document_lengths: Sequence[int] = (),
    later_rows: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a packed row, one sample at a time, with transformers' signature.

    document_lengths add up to rows; later_rows, int64 [later] and rising, are those that the steps of training-time test
    after the first compute (None: all). query [1, heads, rows or later, dim]; key and value [1, kv heads, rows + steps *
    later, dim], a block of rows for each step so far. As in speculators' mask, which is not looked at, a row sees the rows
    before it in the first block and itself in each later one.
    """
    rows = sum(document_lengths)
    later = torch.arange(rows) if later_rows is None else later_rows
    blocks, rest = divmod(key.shape[2] - rows, len(later)) if len(later) else (0, 0)
    if rest or blocks < 0 or query.shape[2] != (len(later) if blocks else rows):
        raise ValueError(f"document_lengths {list(document_lengths)} do not add up to {query.shape[2]} rows")
    groups = query.shape[1] // key.shape[1]
    longest = max(document_lengths)
    causal = torch.ones(longest, longest, dtype=torch.bool).tril()
    ends = torch.tensor(document_lengths).cumsum(0)
    later_ends = torch.searchsorted(later, ends).tolist()
    outputs, start, later_start = [query[:, :, :0]], 0, 0
    for end, later_end in zip(ends.tolist(), later_ends, strict=True):
        own, own_later = slice(start, end), slice(later_start, later_end)
        if blocks:
            itself = torch.eye(later_end - later_start, dtype=torch.bool)
            seen = torch.cat([causal[later[own_later] - start, : end - start], *[itself] * blocks], dim=1)
        else:
            seen = causal[: end - start, : end - start]
        keys, values = (
            torch.cat(
                [part[:, :, own], *[block[:, :, own_later] for block in part[:, :, rows:].split(len(later) or 1, dim=2)]], dim=2
            ).repeat_interleave(groups, dim=1)
            for part in (key, value)
        )
        queries = query[:, :, own_later if blocks else own]
        if queries.shape[2]:
            outputs.append(scaled_dot_product_attention(queries, keys, values, attn_mask=seen, scale=scaling))
        start, later_start = end, later_end
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)


class _HeadDivergence(torch.autograd.Function):
    """(divergence, best): Kullback-Leibler divergence of the draft from the target, float32 [rows], and the draft's best
    token, int64 [rows].

    hidden float32 [rows, hidden] goes through the frozen head [vocabulary, hidden]; probabilities [rows, vocabulary] are the
    target's and negentropy [rows] their sum of p log p. The logits' gradient is the difference of both distributions, so the
    gradient of hidden is made while a block's logits are in the processor's cache, and the logits are kept nowhere.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, head: torch.Tensor, probabilities: torch.Tensor, negentropy: torch.Tensor) -> Any:
        divergence, best = torch.empty_like(negentropy), torch.empty(len(hidden), dtype=torch.long)
        gradient = torch.empty_like(hidden)
        for start in range(0, len(hidden), _HEAD_ROWS):
            own = slice(start, start + _HEAD_ROWS)
            logits = hidden[own] @ head.T
            expected = torch.linalg.vecdot(probabilities[own], logits)
            top = logits.max(-1, keepdim=True)
            best[own] = top.indices[:, 0]
            odds = logits.sub_(top.values).exp_()
            total = odds.sum(-1, keepdim=True)
            divergence[own] = negentropy[own] - expected + (top.values + total.log())[:, 0]
            torch.mm(odds.div_(total).sub_(probabilities[own]), head, out=gradient[own])
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(best)
        return divergence, best

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.saved_tensors[0] * gradients[0][:, None], None, None, None


@torch.no_grad()
def _target_distribution(model: Eagle3DraftModel, last_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(probabilities, negentropy, best token) of the target over the draft's vocabulary at rows [rows, hidden]."""
    probabilities = model.verifier_lm_head(model.verifier_norm(last_states))
    negentropy, best = torch.empty(len(last_states)), torch.empty(len(last_states), dtype=torch.long)
    for start in range(0, len(last_states), _HEAD_ROWS):
        own = slice(start, start + _HEAD_ROWS)
        logs = probabilities[own].log_softmax(-1)
        best[own] = logs.argmax(-1)
        torch.exp(logs, out=probabilities[own])
        negentropy[own] = torch.linalg.vecdot(probabilities[own], logs.clamp_(min=torch.finfo(logs.dtype).min))
    return probabilities, negentropy, best


def supervised_loss(
    model: Eagle3DraftModel,
    hidden_states: torch.Tensor,
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    position_ids: torch.Tensor,
    verifier_last_hidden_states: torch.Tensor,
    document_lengths: Sequence[int],
    ttt_steps: int,
    ttt_step_loss_decay: float = 1.0,
    **_: Any,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss, metrics) of Eagle3DraftModel.forward with its kl_div loss, float32; the arguments are those of that forward.

    The model's head must be frozen. Draft step k at row t is judged by the target's distribution at row t + k.
    """
    supervised = loss_mask[0].nonzero()[:, 0]
    probabilities, negentropy, target_best = _target_distribution(model, verifier_last_hidden_states[0, supervised])
    if model.input_norm is not None:
        hidden_states = model.input_norm(hidden_states)
    hidden_states, cache, tokens = model.fc(hidden_states), DynamicCache(), input_ids
    loss = torch.zeros(())
    right = torch.ones(input_ids.shape[1], dtype=torch.bool)  # in all steps so far, by the row at which drafting starts
    rows = torch.arange(input_ids.shape[1])  # that a step computes: all, then those at which drafting starts
    later_rows = (supervised - torch.arange(1, ttt_steps)[:, None]).clamp(min=0).unique()
    metrics: dict[str, torch.Tensor] = {}
    for step in range(ttt_steps):
        hidden_states = torch.cat([model.embed_tokens(tokens[:, rows]), hidden_states], dim=-1)
        rotation = model.rotary_emb(hidden_states, position_ids[:, rows] + step)
        for layer in model.layers:
            hidden_states = layer(
                hidden_states,
                past_key_values=cache,
                position_embeddings=rotation,
                document_lengths=document_lengths,
                later_rows=later_rows,
            )
        normed = model.norm(hidden_states)
        if model.config.norm_output:
            hidden_states = normed
        judged = supervised >= step
        starts = supervised[judged] - step
        drafted = normed[0, torch.searchsorted(rows, starts)]
        divergence, best = _HeadDivergence.apply(drafted, model.lm_head.weight, probabilities[judged], negentropy[judged])
        step_loss = ttt_step_loss_decay**step * divergence.sum() / (len(starts) + _LOSS_REDUCTION_EPS)
        loss = loss + step_loss
        right[starts] &= best == target_best[judged]
        hits = right[starts].sum()
        metrics[f"loss_{step}_sum"], metrics[f"loss_{step}_total"] = step_loss.detach(), torch.tensor(1.0)
        metrics[f"full_acc_{step}_sum"], metrics[f"full_acc_{step}_total"] = hits, torch.tensor(float(len(starts)))
        tokens = torch.cat([tokens[:, 1:], tokens.new_zeros(1, 1)], dim=-1)  # teacher forcing
        if not step:
            rows, hidden_states = later_rows, hidden_states[:, later_rows]
    return loss, metrics


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
