"""How often the draft says what the target would, on the validation split, counted as serving counts it.

A drafting step starts at each row whose token is supervised (speculators' row: states of a position and the token after
it). Its k-th draft token is right if it is the target's greedy token, the argmax over the target's full vocabulary: what
the draft's vocabulary lacks is a miss. Only draft tokens at supervised positions count. Inputs of later steps are the
sample's own tokens, which are the target's greedy ones only where answers were regenerated greedily.

Two figures come of it. `accuracy` takes every row as a start, as training does. `accepted_per_position` starts only where
serving would: after k accepted draft tokens and the target's own one, k + 1 rows on. Rows that are easy to draft come in runs,
which serving passes over in one step, so its figure is the lower one.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from speculators.models.eagle3 import Eagle3DraftModel

from . import cli
from .draft_model import logit_scale, norm_gain, sliding_window
from .errors import AerieError
from .ranks import Ranks
from .supervised_loss import capped, supervised_loss
from .training_data import PackLoader

if TYPE_CHECKING:
    from .targets import Target
    from .training import TrainingSettings

_HEAD_ROWS = 512


@dataclass(frozen=True)
class TargetHead:
    """The target's output: gain of the final norm float32 [hidden], its epsilon, lm_head [vocabulary, hidden]; see logit_scale."""

    norm: torch.Tensor
    eps: float
    lm_head: torch.Tensor
    scale: float = 1.0
    soft_cap: float | None = None

    @classmethod
    def of(cls, target: "Target") -> "TargetHead":
        weights, config = target.head_weights(), target.text_config
        return cls(norm_gain(weights["norm"], config), config.rms_norm_eps, weights["lm_head"], *logit_scale(config))

    def greedy(self, last_states: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The target's greedy token at each position, int64 [rows] on the CPU; last_states [rows, hidden] before the norm."""
        # On a GPU in the head's own dtype, as it is served; a CPU has no fast half precision everywhere.
        dtype = self.lm_head.dtype if device.type == "cuda" else torch.float32
        head, gain = self.lm_head.to(device, dtype), self.norm.to(device)
        tokens = []
        for rows in last_states.split(_HEAD_ROWS):
            normed = self._normed(rows.to(device, torch.float32), gain)
            tokens.append((normed.to(dtype) @ head.T).argmax(-1).cpu())
        return torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.long)

    def log_probabilities(self, last_states: torch.Tensor) -> torch.Tensor:
        """Of each token at each position, float32 [rows, vocabulary] on the CPU; last_states [rows, hidden] before the norm."""
        logits = self.scale * (self._normed(last_states.float(), self.norm) @ self.lm_head.float().T)
        return capped(logits, self.soft_cap).log_softmax(-1)

    def _normed(self, states: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.eps) * gain


def count_hits(
    draft_tokens: torch.Tensor, greedy: torch.Tensor, supervised: torch.Tensor, document_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(starts, accepted, reached), each int64 [steps], and what `walk` takes: bool [rows] and bool [steps, rows].

    draft_tokens: int64 [steps, rows], target ids. greedy: int64 [rows], the target's token after row t's. supervised:
    bool [rows]. document_ids: int64 [rows], -1 for padding. starts[k]: drafting steps whose first k + 1 draft tokens are
    all at supervised positions. accepted[k]: those of them in which these k + 1 are all right. reached[k]: those of
    the starts[k] in which the first k are right, so that accepted / reached is conditional on the earlier ones.
    """
    steps, rows = draft_tokens.shape
    starts, accepted, reached = (torch.zeros(steps, dtype=torch.long) for _ in range(3))
    right = torch.ones(rows, dtype=torch.bool)
    starting, accepting = torch.zeros(rows, dtype=torch.bool), torch.zeros(steps, rows, dtype=torch.bool)
    inside = supervised & (document_ids >= 0)
    for step in range(steps):
        # Row t drafts the token after row t + step: its target is there, and it is the input token of row t + step + 1.
        last = step + 1
        if rows <= last:
            break
        inside = inside[: rows - last] & supervised[last:] & (document_ids[: rows - last] == document_ids[last:])
        before = right[: rows - last]
        right = before & (draft_tokens[step, : rows - last] == greedy[step : rows - 1])
        starts[step] = inside.sum()
        if step == 0:
            starting[: rows - last] = inside
        accepting[step, : rows - last] = inside & right
        accepted[step] = accepting[step].sum()
        reached[step] = (inside & before).sum()
    return starts, accepted, reached, starting, accepting


def walk(starts: torch.Tensor, right: torch.Tensor) -> tuple[int, torch.Tensor]:
    """(drafts, accepted): drafting steps that serving would make, and in how many the first k + 1 tokens are accepted, int64 [steps].

    starts: bool [rows], where a drafting step can start. right: bool [steps, rows], whether a start's first k + 1 draft
    tokens are all right, and at supervised positions.
    """
    lengths = right.sum(0).tolist()
    drafts, accepted, next_row = 0, torch.zeros(len(right), dtype=torch.long), 0
    for row in starts.nonzero()[:, 0].tolist():
        if row >= next_row:
            drafts += 1
            accepted[: lengths[row]] += 1
            next_row = row + lengths[row] + 1
    return drafts, accepted


class Validation:
    """Runs a draft over this rank's validation batches, and sums over all ranks. The target's greedy tokens are computed once.

    left_out: samples, of all ranks, whose states are not finite. AerieError where no supervised token is left to be drafted.
    """

    def __init__(self, loader: PackLoader, head: TargetHead, device: torch.device, settings: "TrainingSettings", ranks: Ranks) -> None:
        self.loader, self.device, self.settings, self.ranks = loader, device, settings, ranks
        self._greedy: list[torch.Tensor] = []
        found = torch.zeros(2, dtype=torch.float64)  # supervised tokens that can be drafted, samples left out
        for batch in loader:
            self._greedy.append(head.greedy(batch["verifier_last_hidden_states"][0], device))
            supervised, documents = batch["loss_mask"][0].bool(), batch["document_ids"][0]
            nothing = torch.zeros(1, len(documents), dtype=torch.long)
            found += torch.tensor([int(count_hits(nothing, nothing[0], supervised, documents)[0]), len(batch["bad"])])
            for bad in batch["bad"]:
                cli.say(f"train_draft: left out: {bad}")
        found = found.to(device)
        ranks.sum(found)
        drafted, self.left_out = map(int, found.tolist())
        if not drafted:
            without = f"; {self.left_out} of its samples are left out, since their states are not finite" if self.left_out else ""
            raise AerieError(
                f"the validation split has no supervised token that a draft could propose within max_length {settings.max_length}{without}. "
                "Add samples, or raise max_length or validation_share."
            )

    @torch.no_grad()
    def __call__(self, model: Eagle3DraftModel) -> dict[str, Any]:
        """accuracy, conditional_accuracy, accepted_per_position (lists, one value a step), acceptance_length, loss, drafts."""
        model.eval()
        steps, dtype = self.settings.ttt_steps, self.settings.dtype(self.device)
        window = sliding_window(model.config.transformer_layer_config)
        # On the device, where ranks sum them; float64 holds counts exactly. The last row: loss, its rows, drafting steps.
        totals = torch.zeros(5, max(3, steps), dtype=torch.float64)
        for batch, greedy in zip(self.loader, self._greedy, strict=True):
            with torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32):
                judged = supervised_loss(model, batch, steps, self.settings.ttt_step_loss_decay, window)
            if judged is None:
                continue
            # Where a step is not judged, no draft token counts.
            tokens = torch.zeros(steps, batch["loss_mask"].shape[1], dtype=torch.long)
            for step, best in enumerate(judged.best):
                chosen = best if model.d2t is None else best + model.d2t[best]
                tokens[step, judged.supervised - step] = chosen.cpu()
            supervised, documents = batch["loss_mask"][0].bool(), batch["document_ids"][0]
            *hits, starting, accepting = count_hits(tokens, greedy, supervised, documents)
            drafts, walked = walk(starting, accepting)
            totals[:4, :steps] += torch.stack([*hits, walked])
            rows = len(judged.supervised)
            totals[4, :3] += torch.tensor([float(judged.loss) * rows, rows, drafts], dtype=torch.float64)
        totals = totals.to(self.device)
        self.ranks.sum(totals)
        starts, accepted, reached, walked = totals[:4, :steps].long().tolist()
        loss_sum, weight, drafts = totals[4, :3].tolist()
        served = [hits / drafts for hits in walked]
        return {
            "accuracy": [hits / max(1, total) for hits, total in zip(accepted, starts, strict=True)],
            "conditional_accuracy": [hits / max(1, total) for hits, total in zip(accepted, reached, strict=True)],
            "accepted_per_position": served,
            "acceptance_length": 1 + sum(served),
            "drafts": int(drafts),
            "loss": loss_sum / max(1, weight),
        }
