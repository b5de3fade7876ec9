"""Blocks by their representative tokens, and everything far seen at one distance (InfLLM)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from kvatlas.attention.tiles import Wants
from kvatlas.errors import UserError
from kvatlas.strategy.answers import Read
from kvatlas.strategy.budget import resolve
from kvatlas.strategy.place.blockcache import BlockCache
from kvatlas.strategy.read.pages import best_pages, pages_for
from kvatlas.strategy.registry import Preset, register
from kvatlas.strategy.strategy import Strategy
from kvatlas.strategy.view import LayerFacts, Selection, Span, View


class Parts(NamedTuple):
    """What a step reads of each sequence, ``[B]`` int64 each.

    ``near`` latest tokens at most; ``window`` of them stay near when a block leaves; ``blocks`` far ones; and the
    ``distance`` at which those and the first tokens are seen.
    """

    near: Tensor
    window: Tensor
    blocks: Tensor
    distance: Tensor


@dataclass(frozen=True)
class RepresentedBlocks(Read):
    """The ``init`` first tokens, the ``local`` latest ones, and of the blocks between them the best ``topk``.

    A block's key is the mean of its ``repr`` representatives: the keys that were most attended from within the local
    window, per query head. Its score is the product with the query, summed over all heads of the layer: one decision
    for all of them. A block leaves the local window whole, so between ``local`` and ``local + block - 1`` tokens are
    near; the first tokens leave before the first block. What has left is held as if at position 0 and seen from
    position ``local - 1``, as far as the window reaches.

    Under a budget (of the current length, or in tokens) all parts shrink in proportion, ``init`` once for the prompt;
    blocks keep their size. Then a block leaves as early as the budget needs, and the distance is the near part's
    length.

    Where this differs from the authors' code: prompts go through exact attention (theirs pass by the same mechanism,
    512 tokens at a time); a token leaves the window with its block, not alone; a block that generation fills has the
    mean of all its keys as its key, because weights of decode steps are not collected for a reader.
    """

    source: ClassVar[str] = "InfLLM, NeurIPS 2024, section 3"
    selects: ClassVar[bool] = True
    whole_prompt: ClassVar[bool] = True
    init: int = 128
    local: int = 4096
    block: int = 128
    topk: int = 16
    repr: int = 4

    def __post_init__(self) -> None:
        for name, least in (("init", 0), ("local", 1), ("block", 1), ("topk", 0), ("repr", 1)):
            if getattr(self, name) < least:
                raise UserError(f"infllm: {name} must be at least {least}, not {getattr(self, name)}")
        if self.repr > self.block:
            raise UserError(f"infllm: repr={self.repr} representatives do not fit in a block of {self.block} tokens")
        for name in ("init", "local"):
            value, tokens = getattr(self, name), resolve(self.budget, 1)
            written = value != type(self).__dataclass_fields__[name].default
            if written and not 0 < self.budget <= 1 and tokens is not None and value > tokens:
                raise UserError(f"infllm: {name}={value} is above the budget of {tokens} tokens")

    def words(self) -> str:
        size = "" if self.budget == 1.0 else f", scaled to budget {self.budget:g}"
        return (
            f"first {self.init} + latest {self.local} + the best {self.topk} blocks of {self.block} by {self.repr} "
            f"representatives{size}"
        )

    def lossless(self) -> bool:
        return False

    def check(self, strategy: Strategy) -> None:
        if not strategy.encode.raw:
            raise UserError(
                f"'{strategy.name}': infllm turns keys in place when they leave its window, and keys that are stored "
                "as codes would be coded twice; leave the encoder out"
            )
        if strategy.keep.evicts and not strategy.keep.lossless():
            raise UserError(
                f"'{strategy.name}': infllm's blocks are of tokens that follow one another, which a rule that evicts "
                "does not leave; use quest or pqcache beside it"
            )

    # ------------------------------------------------------------------- sizes

    @property
    def most(self) -> int:
        """Tokens that a step reads at most, where there is no budget."""
        return self.init + self.local + self.block - 1 + self.topk * self.block

    def limit(self, length: int) -> int:
        return min(length, self.most, resolve(self.budget, length) or length)

    def first_tokens(self, length: int) -> int:
        """``init`` for a prompt of so many tokens."""
        return self.init * self._total(length) // self.most

    def _total(self, length: int) -> int:
        return min(self.most, resolve(self.budget, length) or self.most)

    def parts(self, lengths: Tensor, first: Tensor) -> Parts:
        """For sequences of ``lengths [B]`` whose first ``first [B]`` tokens are always read."""
        if 0 < self.budget < 1:
            total = (lengths.double() * self.budget + 1e-9).long().clamp_(1, self.most)
        else:
            total = torch.full_like(lengths, self._total(1))
        blocks = (2 * self.topk * total + self.most).div_(2 * self.most, rounding_mode="floor")  # the nearest number
        blocks = blocks.minimum((total - first - 1).div_(self.block, rounding_mode="floor")).clamp_(min=0)
        near = (total - first - blocks * self.block).clamp_(min=1)
        return Parts(near, (near - self.block + 1).clamp_(min=1), blocks, near.clamp(max=self.local) - 1)

    def boundary(self, lengths: Tensor, first: Tensor, window: Tensor) -> Tensor:
        """How many tokens have left the local window, ``[B]``."""
        past = lengths - window - first
        return torch.where(past >= 0, first + past.div(self.block, rounding_mode="floor") * self.block, 0)

    # ------------------------------------------------------------------- state

    def begin(self, facts: LayerFacts, slots: int) -> dict[str, Tensor]:
        """A key for each block, the open one too, the sum of the keys of that one, and four numbers:

        how many tokens come first, how many have left the window, blocks complete, and the distance of the last step.
        """
        number, device = slots // self.block + 1, facts.device
        return {
            "blocks": torch.zeros(number, facts.heads * facts.head_dim, dtype=facts.dtype, device=device),
            "open": torch.zeros(facts.kv_heads, facts.head_dim, device=device),
            "marks": torch.zeros(4, dtype=torch.int64, device=device),
        }

    def state_bytes(self, facts: LayerFacts, slots: int) -> int:
        keys = (slots // self.block + 1) * facts.heads * facts.head_dim * facts.dtype.itemsize
        return keys + 4 * facts.kv_heads * facts.head_dim + 4 * 8

    def wants(self) -> Wants | None:
        return Wants("band", last=self.local)

    def settle(self, view: View) -> None:
        """Keys of the blocks that a prompt or turn completed, and the sum of what it left open."""
        assert view.keys is not None
        marks, n = view.state["marks"][0], view.width
        if marks[1] == 0:  # nothing has left yet: the prompt is what there is now
            marks[0], marks[2] = self.first_tokens(n), 0
        first, _, done, _ = marks.tolist()
        marks[3] = self.parts(view.lengths[:1, 0], marks[:1]).distance[0]
        complete = max(0, n - first) // self.block
        keys = view.keys()[0]
        if complete > done:
            made = self._represented(view, keys, first + done * self.block, complete - done)
            view.state["blocks"][0, done:complete] = made.to(view.layer.dtype)
            marks[2] = complete
        end = min(first + complete * self.block, n - 1)  # at least one key: where none can be turned, say so now
        positions = torch.arange(end, n, device=keys.device).expand(1, view.layer.kv_heads, -1)
        view.state["open"][0] = self._at_origin(view, keys[None, :, end:], positions)[0].float().sum(1)
        self._put_open(view, torch.tensor([complete], device=keys.device), torch.tensor([n - end]))

    def _represented(self, view: View, keys: Tensor, start: int, blocks: int) -> Tensor:
        """Keys ``[blocks, Hq * D]`` of so many blocks from token ``start`` on; ``keys [H, n, D]`` are all there are."""
        layer, device = view.layer, keys.device
        if view.weights is None:  # nobody knows what was attended to: all of a block stand for it
            best = torch.arange(self.block, device=device).expand(layer.heads, blocks, -1)
        else:
            mass = view.weights[0, :, start : start + blocks * self.block]
            best = mass.unflatten(1, (blocks, self.block)).topk(self.repr, dim=-1).indices
        at = best + (start + self.block * torch.arange(blocks, device=device)).view(1, -1, 1)
        head = torch.arange(layer.heads, device=device).div(layer.group, rounding_mode="floor")
        found = keys[head.view(-1, 1), at.flatten(1)].unsqueeze(0)  # [1, Hq, blocks * repr, D]
        found = self._at_origin(view, found, at.flatten(1).unsqueeze(0))[0]
        return found.float().unflatten(1, (blocks, -1)).mean(2).transpose(0, 1).flatten(1)

    def _at_origin(self, view: View, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys ``[B, H, n, D]`` turned back from ``positions [B, H, n]``."""
        assert view.port is not None
        return view.port.rotate(view.layer.layer, keys, positions, torch.zeros_like(positions))

    def _put_open(self, view: View, block: Tensor, filled: Tensor) -> None:
        """The mean of the ``filled [B]`` keys so far is the key of the open ``block [B]``."""
        mean = view.state["open"] / filled.to(block.device).view(-1, 1, 1)
        per_head = mean.repeat_interleave(view.layer.group, 1).flatten(1).to(view.layer.dtype)
        view.state["blocks"][torch.arange(len(block), device=block.device), block] = per_head

    def _note(self, view: View) -> None:
        """The newest key is one more of the open block; while the first tokens are not complete, it opens block 0."""
        assert view.key is not None
        at = view.now.view(-1, 1, 1).expand(-1, view.layer.kv_heads, -1)
        key = self._at_origin(view, view.key.unsqueeze(2), at).squeeze(2).float()
        place = (view.now - view.state["marks"][:, 0]).clamp_(min=0)
        filled, held = place % self.block, view.state["open"]
        held.copy_(torch.where((filled == 0).view(-1, 1, 1), key, held + key))
        self._put_open(view, place.div(self.block, rounding_mode="floor"), filled + 1)

    # ----------------------------------------------------------------- reading

    def turned(self, view: View) -> Tensor | None:
        marks, lengths = view.state["marks"], view.lengths[:, 0]
        left = self.boundary(lengths, marks[:, 0], self.parts(lengths, marks[:, 0]).window).maximum(marks[:, 1])
        most = int((left - marks[:, 1]).max())
        if most == 0:
            return None
        slots = marks[:, 1:2] + torch.arange(most, device=left.device)
        slots = torch.where(slots < left.unsqueeze(1), slots, -1)
        marks[:, 1] = left
        marks[:, 2] = marks[:, 2].maximum((left - marks[:, 0]).div(self.block, rounding_mode="floor"))
        return slots.unsqueeze(1).expand(-1, view.layer.kv_heads, -1).contiguous()

    def spans(self, view: View) -> tuple[Span, ...] | None:
        marks = view.state["marks"]
        if len(marks) != 1 or marks[0, 1] == 0:
            return None
        left = int(marks[0, 1])
        return (Span(0, left, marks[:, 3]), Span(left, None, None))

    def select(self, view: View, q: Tensor, foreseen: Selection | None) -> Selection | None:
        if view.key is None:
            return None
        self._note(view)
        first, left = view.state["marks"][:, 0], view.state["marks"][:, 1]
        lengths, away = view.lengths[:, 0], left > 0
        parts = self.parts(lengths, first)
        view.state["marks"][:, 3] = parts.distance
        count = torch.where(away, parts.blocks.minimum((left - first).div(self.block, rounding_mode="floor")), 0)
        far_count = torch.where(away, first + count * self.block, 0)
        start = torch.where(away, left.maximum(lengths - parts.near), (lengths - parts.near - first).clamp(min=0))
        most, far, near = torch.stack([count, far_count, lengths - start]).amax(1).tolist()
        if not far and near == view.width:
            return None
        chosen, scanned = self._best(view, q, parts.distance, (left - first), count, most)
        index = self._far_slots(chosen, first, max(far, 1)).clamp_(max=view.width - 1)
        beside = (start.unsqueeze(1) + torch.arange(near, device=q.device)).clamp_(max=view.width - 1)
        return Selection(
            *_for_heads(view, index, far_count), scanned, query_at=parts.distance,
            beside=Selection(*_for_heads(view, beside, lengths - start)),
        )  # fmt: skip

    def _best(
        self, view: View, q: Tensor, distance: Tensor, left: Tensor, count: Tensor, most: int
    ) -> tuple[Tensor, int]:
        """The ``count [B]`` best of the blocks that have left, ascending ``[B, most]``; and what was looked at."""
        if most == 0:
            return count.new_zeros(len(count), 1), 0
        assert view.port is not None
        keys = view.state["blocks"][:, : pages_for(view.width, self.block)]
        seen_from = view.port.rotate(view.layer.layer, q.unsqueeze(2), view.now.unsqueeze(1), distance.unsqueeze(1))
        rank = torch.bmm(keys, seen_from.flatten(1).unsqueeze(2)).float().transpose(1, 2)  # [B, 1, blocks]
        ends = torch.arange(1, keys.shape[1] + 1, device=q.device) * self.block
        rank = rank.masked_fill((ends > left.unsqueeze(1)).unsqueeze(1), float("-inf"))
        return best_pages(rank, count.unsqueeze(1), most).squeeze(1), keys.numel() * keys.element_size()

    def _far_slots(self, chosen: Tensor, first: Tensor, width: int) -> Tensor:
        """The first tokens and those of the ``chosen [B, m]`` blocks, ``[B, width]``."""
        at = torch.arange(width, device=first.device).expand(len(first), -1)
        into = at - first.unsqueeze(1)
        number = into.div(self.block, rounding_mode="floor").clamp_(0, chosen.shape[1] - 1)
        slots = first.unsqueeze(1) + chosen.gather(1, number) * self.block + into % self.block
        return torch.where(into < 0, at, slots)


def _for_heads(view: View, index: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """One decision ``[B, n]``, ``[B]`` for every KV head."""
    heads = view.layer.kv_heads
    return index.unsqueeze(1).expand(-1, heads, -1).contiguous(), count.unsqueeze(1).expand(-1, heads).contiguous()


@dataclass(frozen=True)
class RecentBlocks(BlockCache):
    """Host memory; on the device the local window, the first tokens and 32 blocks, those that were read last."""

    source: ClassVar[str] = "InfLLM, NeurIPS 2024, section 3.3"
    cache: int = 4096 + 2 * 128 + 32 * 128
    policy: Literal["lfu", "lru"] = "lru"
    topk: int = 66


register(
    Preset(
        "infllm",
        {"read": RepresentedBlocks, "place": RecentBlocks},
        "first and latest tokens, and the best blocks by their representatives, all far ones at one distance",
        names={"cached": ("place", "cache"), "cached_block": ("place", "block"), "admit": ("place", "topk")},
        yields=("place",),
    )
)
