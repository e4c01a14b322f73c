"""The draft's loss, computed only where it is judged; else that of speculators' Eagle3DraftModel.forward with its kl_div loss.

That forward computes logits of every row, each step's divergence from scratch, and masks the rows that are not supervised.
Here only supervised rows have logits, a block at a time, the target's probabilities are computed once, and the steps of
training-time test after the first compute only the rows at which drafting of a supervised token starts.
"""

from typing import Any, NamedTuple

import torch
from speculators.losses.utils import _LOSS_REDUCTION_EPS
from speculators.models.eagle3 import Eagle3DraftModel
from transformers import DynamicCache

from .draft_attention import BLOCK, FLEX_ATTENTION, Packing
from .gpu_speed import fused, sent

# Rows whose logits are computed at a time: on a CPU, so many as fit into its cache.
_HEAD_ROWS = {"cpu": 128, "cuda": 2048}


class Judged(NamedTuple):
    """What came of a batch.

    loss: scalar with gradient. sums: float32 [steps, 2], each step's summed divergence and its number of rows where the
    draft's best token is the target's within the draft's vocabulary. supervised: int64 [rows] on the CPU, ascending; draft
    step k starts at row supervised - k. best: int64 [steps, rows], the draft's best tokens as draft ids.
    """

    loss: torch.Tensor
    sums: torch.Tensor
    supervised: torch.Tensor
    best: torch.Tensor


class _HeadDivergence(torch.autograd.Function):
    """(divergence, best): Kullback-Leibler divergence of the draft from the target, float32 [rows], and the draft's best
    token, int64 [rows].

    hidden [rows, hidden] goes through the frozen head [vocabulary, hidden]; probabilities float32 [rows, vocabulary] are the
    target's and negentropy float32 [rows] their sum of p log p. The logits' gradient is the difference of both distributions,
    so the gradient of hidden is made while a block's logits are there, and the logits are kept nowhere.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, head: torch.Tensor, probabilities: torch.Tensor, negentropy: torch.Tensor) -> Any:
        divergence, best = torch.empty_like(negentropy), torch.empty(len(hidden), dtype=torch.long, device=hidden.device)
        gradient = torch.empty_like(hidden)
        judge = fused(_judge, hidden.device)
        for own in _blocks(hidden):
            divergence[own], best[own], slope = judge(hidden[own] @ head.T, probabilities[own], negentropy[own])
            torch.mm(slope, head, out=gradient[own])
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(best)
        return divergence, best

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        gradient = ctx.saved_tensors[0]
        return (gradient * gradients[0][:, None]).to(gradient.dtype), None, None, None


def _judge(logits: torch.Tensor, probabilities: torch.Tensor, negentropy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(divergence, best, gradient of the logits in their dtype) of a block of rows; the logits are overwritten."""
    values = logits.float()
    expected = _dot(probabilities, values)
    top = values.max(-1, keepdim=True)
    odds = values.sub_(top.values).exp_()
    total = odds.sum(-1, keepdim=True)
    divergence = negentropy - expected + (top.values + total.log())[:, 0]
    return divergence, top.indices[:, 0], odds.div_(total).sub_(probabilities).to(logits.dtype)


def _distribution(logits: torch.Tensor, soft_cap: float | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(probabilities, sum of p log p, best token) of a block of rows, float32 and int64."""
    logs = capped(logits.float(), soft_cap).log_softmax(-1)
    probabilities = logs.exp()
    return probabilities, _dot(probabilities, logs.clamp(min=torch.finfo(logs.dtype).min)), logs.argmax(-1)


def capped(logits: torch.Tensor, soft_cap: float | None) -> torch.Tensor:
    """A target's logits after its cap, if it has one, see draft_model.logit_scale."""
    return logits if soft_cap is None else soft_cap * (logits / soft_cap).tanh()


def _dot(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Of each row; torch.linalg.vecdot is taken to half precision where autocast is on."""
    return (one * other).sum(-1)


def _blocks(rows: torch.Tensor) -> list[slice]:
    size = _HEAD_ROWS[rows.device.type]
    return [slice(start, start + size) for start in range(0, len(rows), size)]


@torch.no_grad()
def _target_distribution(
    model: Eagle3DraftModel, last_states: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(probabilities, negentropy, best token) of the target over the draft's vocabulary at rows [rows, hidden]."""
    head, rows = model.verifier_lm_head.weight.to(dtype), len(last_states)
    probabilities = torch.empty(rows, len(head), device=head.device)
    negentropy, best = torch.empty(rows, device=head.device), torch.empty(rows, dtype=torch.long, device=head.device)
    distribution = fused(_distribution, head.device)
    for own in _blocks(last_states):
        logits = model.verifier_norm(last_states[own]).to(dtype) @ head.T
        probabilities[own], negentropy[own], best[own] = distribution(logits, model.verifier_soft_cap)
    return probabilities, negentropy, best


def supervised_loss(
    model: Eagle3DraftModel, batch: dict[str, Any], ttt_steps: int, ttt_step_loss_decay: float, window: int | None = None
) -> Judged | None:
    """The loss of a packed batch (aerie.training_data) on the model's device; None if it has no supervised row.

    The model's head must be frozen, and its attention one of aerie.draft_attention. Step k at row t is judged by the target's
    distribution at row t + k, so the first ttt_steps - 1 rows of a sample must not be supervised. window: of the draft's
    sliding attention.
    """
    supervised = batch["loss_mask"][0].nonzero()[:, 0].cpu()
    if not len(supervised):
        return None
    device = model.fc.weight.device
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else torch.float32
    later = (supervised - torch.arange(1, ttt_steps)[:, None]).unique()
    flex = model.config.transformer_layer_config._attn_implementation == FLEX_ATTENTION
    if flex:  # whole blocks, so that few shapes occur; the repeated row is judged once
        later = torch.cat([later, later[-1:].expand(-len(later) % BLOCK)])
    packing = Packing(batch["document_ids"][0].cpu(), later, window)
    if flex:
        packing.with_masks(device)
    # Indices are made on the CPU: to ask the GPU how many rows there are would wait, too.
    rows_now = torch.arange(packing.rows)
    later_rows, judged_rows = sent(later, device), sent(supervised, device)
    hidden_states, tokens, positions, last_states = (
        batch[name].to(device, non_blocking=True) for name in ("hidden_states", "input_ids", "position_ids", "verifier_last_hidden_states")
    )
    probabilities, negentropy, target_best = _target_distribution(model, last_states[0, judged_rows], dtype)
    head = model.lm_head.weight.to(dtype)
    if model.input_norm is not None:
        hidden_states = model.input_norm(hidden_states)
    hidden_states, cache = model.fc(hidden_states), DynamicCache()
    loss, sums, bests = torch.zeros((), device=device), [], []
    right = torch.ones(packing.rows, dtype=torch.bool, device=device)  # in all steps so far, by the row at which drafting starts
    for step in range(ttt_steps):
        hidden_states = torch.cat([model.embed_tokens(tokens), hidden_states], dim=-1)
        rotation = model.rotary_emb(hidden_states, positions + step)
        for layer in model.layers:
            hidden_states = layer(hidden_states, past_key_values=cache, position_embeddings=rotation, packing=packing)
        normed = model.norm(hidden_states)
        if model.config.norm_output:
            hidden_states = normed
        starts = judged_rows - step
        drafted = normed[0, sent(torch.searchsorted(rows_now, supervised - step), device)].to(dtype)
        divergence, best = _HeadDivergence.apply(drafted, head, probabilities, negentropy)
        divergence_sum = divergence.sum()
        loss = loss + ttt_step_loss_decay**step * divergence_sum / (len(supervised) + _LOSS_REDUCTION_EPS)
        right[starts] &= best == target_best
        sums.append(torch.stack([divergence_sum.detach(), right[starts].sum().float()]))
        bests.append(best)
        if step + 1 < ttt_steps:
            if not step:
                rows_now, hidden_states, positions = later, hidden_states[:, later_rows], positions[:, later_rows]
            # Teacher forcing: the sample's own next token. Past the pack's end no row is judged.
            following = (later_rows + step + 1).clamp(max=packing.rows - 1)
            tokens = batch["input_ids"].to(device, non_blocking=True)[:, following]
    return Judged(loss, torch.stack(sums), supervised, torch.stack(bests))
