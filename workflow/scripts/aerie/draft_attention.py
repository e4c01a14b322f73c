"""Attention of a packed row: samples do not see each other, and later steps of training-time test compute only some rows.

As in speculators' mask, a row sees the rows before it of its sample and itself in the first step's keys, and in the keys of
each later step only itself. Dense attention would compute every pair and mask it. On a CPU each sample attends on its own.
On a GPU flex attention skips the blocks of other samples; the one key that a row sees of each later step joins afterwards,
which needs no mask of its own. With a sliding window a row sees so many rows of the first step's keys, itself included.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import AttentionInterface

from .gpu_speed import sent

PACKED_ATTENTION = "aerie_packed"
FLEX_ATTENTION = "aerie_flex"
BLOCK = 128  # rows: flex attention's


def attention_for(device: torch.device) -> str:
    """transformers' name of the attention for a device."""
    return FLEX_ATTENTION if device.type == "cuda" else PACKED_ATTENTION


class Packing:
    """Where the samples of a packed row lie, and which rows the steps after the first compute.

    document_ids: int64 [rows] on the CPU, the same number for a sample's rows, -1 for padding, which sees only itself.
    later: int64 [later] on the CPU, rising. window: of sliding attention, in rows.
    """

    def __init__(self, document_ids: torch.Tensor, later: torch.Tensor, window: int | None = None) -> None:
        self.rows, self.later = len(document_ids), later
        _, lengths = torch.unique_consecutive(document_ids, return_counts=True)
        ends = lengths.cumsum(0)
        row = torch.arange(self.rows)
        first = torch.repeat_interleave(ends - lengths, lengths)
        first = torch.where(document_ids < 0, row, first)
        self.first_seen = first if window is None else torch.maximum(first, row - window + 1)
        self.lengths: list[int] = lengths.tolist()
        self.later_ends: list[int] = torch.searchsorted(later, ends).tolist()
        self.masks: tuple[BlockMask, BlockMask] | None = None

    def with_masks(self, device: torch.device) -> "Packing":
        """Adds what flex attention needs: the block masks of the first step and of later ones, on the device."""
        masks = [_block_mask(row, self.first_seen[row], self.rows, device) for row in (torch.arange(self.rows), self.later) if len(row)]
        self.masks = (masks[0], masks[-1])
        return self


def _block_mask(last: torch.Tensor, first: torch.Tensor, keys: int, device: torch.device) -> BlockMask:
    """Query i sees the keys from first[i] to last[i]; both int64 [queries] on the CPU, last rising."""
    queries = len(last)
    blocks = -(-queries // BLOCK)
    padded = torch.arange(blocks * BLOCK).clamp(max=queries - 1)
    last_of, first_of = last[padded].view(blocks, BLOCK), first[padded].view(blocks, BLOCK)
    start = torch.arange(-(-keys // BLOCK))[None] * BLOCK
    end = start + BLOCK - 1
    some = (end >= first_of.amin(1)[:, None]) & (start <= last_of.amax(1)[:, None])
    full = (start >= first_of.amax(1)[:, None]) & (end <= last_of.amin(1)[:, None])
    seen_first, seen_last = sent(first, device), sent(last, device)

    def sees(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key >= seen_first[query]) & (key <= seen_last[query])

    listed = [sent(part, device) for part in (*_listed(some & ~full), *_listed(full))]
    return BlockMask.from_kv_blocks(*listed, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(queries, keys))


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A bool matrix [query blocks, key blocks] as counts [1, 1, query blocks] and the columns that are true, first."""
    columns = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1).int()[None, None], columns.int()[None, None]


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    packing: Packing,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """One sample at a time, with transformers' signature; query [1, heads, rows or later, dim]; key and value
    [1, kv heads, rows + steps * later, dim], a block of rows for each step so far. Returns [1, rows or later, heads, dim]."""
    rows, later = packing.rows, packing.later
    blocks = _later_blocks(query, key, packing)
    groups = query.shape[1] // key.shape[1]
    outputs, start, later_start = [query[:, :, :0]], 0, 0
    for length, later_end in zip(packing.lengths, packing.later_ends, strict=True):
        end = start + length
        own, own_later = slice(start, end), slice(later_start, later_end)
        row = later[own_later] if blocks else torch.arange(start, end)
        position = torch.arange(start, end)
        seen = (position <= row[:, None]) & (position >= packing.first_seen[row][:, None])
        if blocks:
            seen = torch.cat([seen, *[torch.eye(len(row), dtype=torch.bool)] * blocks], dim=1)
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


def flex_packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    packing: Packing,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """`packed_attention` by flex attention; packing has its masks."""
    assert packing.masks is not None
    if torch.is_autocast_enabled(query.device.type):  # what was rotated has become float32, and with it what is cached
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    blocks, rows = _later_blocks(query, key, packing), packing.rows
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attend = _flex(query.device.type)
    first_key, first_value = key[:, :, :rows].contiguous(), value[:, :, :rows].contiguous()
    options: dict[str, Any] = {"block_mask": packing.masks[bool(blocks)], "scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    if not blocks:
        output = attend(query.contiguous(), first_key, first_value, **options)
        return output.transpose(1, 2).contiguous(), None
    output, aux = attend(query.contiguous(), first_key, first_value, return_aux=AuxRequest(lse=True), **options)
    # Softmax over the first step's keys, of which flex attention gives the sum, and the row itself in each later step.
    shape = (key.shape[1], query.shape[1] // key.shape[1])  # query heads by their key's
    queries = query.unflatten(1, shape).float()
    own_keys, own_values = (part[:, :, rows:].unflatten(2, (blocks, -1)).float() for part in (key, value))
    scores = [(queries * own_keys[:, :, None, block]).sum(-1) * scale for block in range(blocks)]
    weights = torch.stack([aux.lse.unflatten(1, shape), *scores], dim=-1).softmax(-1)
    merged = output.unflatten(1, shape) * weights[..., :1]
    for block in range(blocks):
        merged = merged + own_values[:, :, None, block] * weights[..., block + 1 : block + 2]
    return merged.flatten(1, 2).to(query.dtype).transpose(1, 2).contiguous(), None


def _later_blocks(query: torch.Tensor, key: torch.Tensor, packing: Packing) -> int:
    """How many later steps' keys there are; ValueError where the shapes are not those of the packing."""
    later = len(packing.later)
    blocks, rest = divmod(key.shape[2] - packing.rows, later) if later else (0, key.shape[2] - packing.rows)
    if rest or blocks < 0 or query.shape[2] != (later if blocks else packing.rows):
        raise ValueError(f"samples of {packing.lengths} rows do not add up to {query.shape[2]} queries of {key.shape[2]} keys")
    return blocks


@cache
def _flex(device: str) -> Callable[..., Any]:
    """flex attention, compiled where it would else compute every pair."""
    return torch.compile(flex_attention) if device == "cuda" else flex_attention


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionInterface.register(FLEX_ATTENTION, flex_packed_attention)
