"""Attention of the training-time test, in memory that is linear in the length of the text.

A query of a later step sees the text's keys up to its position, as in the first step, and one key of each later step.
The text's part is computed by a fused kernel, document by document; the few keys of its own are merged into it by the
log-sum-exp of the scores:

    out = exp(L - M) out_text + sum_j exp(s_j - M) v_j        L = log-sum-exp of the text's scores, M = that of all

The gradient with respect to the text's keys is that of the kernel for the merged output and M, since the probability of
each key is exp(score - M). Ring attention merges parts of a text in the same way (Liu et al. 2023, arXiv:2310.01889).
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from draftsmith.errors import reason_of
from draftsmith.heads.model_config import has_data
from draftsmith.heads.read_positions import DocumentSpan, ReadPositions

# Shapes: B rows (1 in training), T positions, N queries, M keys, Q queries and S keys of a run, h heads, g key heads,
# m heads for each key head, d head size.

QUERIES = 512
"""Queries whose scores are in memory at a time where no fused kernel applies."""
ATEN = torch.ops.aten
DIFFERENCE = 0.1
"""Largest difference between kernel and plain path, in standard deviations: above rounding in half precision, below the
effect of an argument with another meaning."""


class UnrolledAttention:
    """Attention in training: query i of step j sees the first step's keys up to i, and of each later step the key at i.

    A draft node sees the same when decoding: the committed tokens, read with the target's features, and its own path,
    read with the drafter's states. Li et al. 2025 (EAGLE-3), arXiv:2503.01840, section 3.2; HASS, arXiv:2408.15766.

    Args:
        read: the positions; queries see only the first step's keys of their own document.
        windows: see `windows_of`; query i of step j is at position i + j.
    """

    def __init__(self, read: ReadPositions, windows: Sequence[int | None]) -> None:
        self._windows, self._read = windows, read
        self._text: dict[int, tuple[Tensor, Tensor]] = {}
        self._own: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, layer: int, q_BhTd: Tensor, k_BhTd: Tensor, v_BhTd: Tensor) -> Tensor:
        """Queries of the first step are at all of its positions, or at `ReadPositions.queries_N` alone."""
        dtype, read = v_BhTd.dtype, self._read  # under autocast rotated queries and keys are float32
        q_BhTd, keys = q_BhTd.to(dtype), (k_BhTd.to(dtype), v_BhTd)
        if layer not in self._text:
            self._text[layer], self._own[layer] = (read.keys(keys[0]), read.keys(keys[1])), []
        else:
            self._own[layer].append(keys)
        own, window = self._own[layer], self._windows[layer]
        reach = None if window is None else window - len(own)
        seen = own if window is None else own[-window:]
        runs = read.runs if q_BhTd.shape[2] == len(read.queries_N) else read.first_runs
        out = _TextAndOwn.apply(runs, reach, q_BhTd, *self._text[layer], *(x for pair in seen for x in pair))
        assert isinstance(out, Tensor)
        return out


class _TextAndOwn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        runs: Sequence[DocumentSpan],
        reach: int | None,
        q_BhTd: Tensor,
        k_BgTd: Tensor,
        v_BgTd: Tensor,
        *own: Tensor,
    ) -> Tensor:
        B, h, T, d = q_BhTd.shape
        # In the layout [B, T, h, d], from which the projection after it reads without a copy. Queries outside of all
        # runs, which fill a row to its length, are not read; they are zero, since 0 times anything else may be nan.
        out_BhTd = q_BhTd.new_zeros(B, T, h, d).transpose(1, 2)
        wide = torch.promote_types(q_BhTd.dtype, torch.float32)
        total_BhT = q_BhTd.new_zeros(B, h, T, dtype=wide)
        for run in runs:
            q, k, v = q_BhTd[:, :, run.queries], k_BgTd[:, :, run.keys], v_BgTd[:, :, run.keys]
            part = _text(q, k, v) if _fused(q, k, reach) else _text_in_parts(q, k, v, reach)
            out_BhTd[:, :, run.queries] = part[0]
            total_BhT[:, :, run.queries] = part[1]
        if own:
            scores = [_own_scores(q_BhTd, k) for k in own[::2]]
            text_BhT = total_BhT
            total_BhT = torch.stack([text_BhT, *scores]).logsumexp(0)
            merged = _by_key_head(out_BhTd, k_BgTd).to(wide) * _weight(text_BhT, total_BhT, k_BgTd)
            for score_BhT, v in zip(scores, own[1::2], strict=True):
                merged += _weight(score_BhT, total_BhT, k_BgTd) * v[:, :, None]
            out_BhTd.copy_(merged.flatten(1, 2))
        ctx.runs, ctx.reach = runs, reach
        ctx.save_for_backward(out_BhTd, total_BhT, q_BhTd, k_BgTd, v_BgTd, *own)
        return out_BhTd

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        out_BhTd, total_BhT, q_BhTd, k_BgTd, v_BgTd, *own = ctx.saved_tensors
        (g_BhTd,) = gradients
        dq, dk, dv = torch.zeros_like(q_BhTd), torch.zeros_like(k_BgTd), torch.zeros_like(v_BgTd)
        for run in ctx.runs:
            g, q, out, total = (x[:, :, run.queries] for x in (g_BhTd, q_BhTd, out_BhTd, total_BhT))
            inputs = (g, q, k_BgTd[:, :, run.keys], v_BgTd[:, :, run.keys], out, total)
            fused = _fused(q, inputs[2], ctx.reach)
            of_run = _text_backward(*inputs) if fused else _backward_in_parts(*inputs, ctx.reach)
            dq[:, :, run.queries] = of_run[0]
            dk[:, :, run.keys] += of_run[1]
            dv[:, :, run.keys] += of_run[2]
        if not own:
            return None, None, dq, dk, dv
        g, q = (_by_key_head(x, k_BgTd).to(total_BhT.dtype) for x in (g_BhTd, q_BhTd))
        mean = (g * _by_key_head(out_BhTd, k_BgTd)).sum(-1, keepdim=True)
        scale, more, of_own = q.shape[-1] ** -0.5, torch.zeros_like(q), []
        for k, v in zip(own[::2], own[1::2], strict=True):
            weight = _weight(_own_scores(q_BhTd, k), total_BhT, k_BgTd)
            slope = weight * ((g * v[:, :, None]).sum(-1, keepdim=True) - mean) * scale
            more += slope * k[:, :, None]
            of_own += [(slope * q).sum(2).to(k.dtype), (weight * g).sum(2).to(v.dtype)]
        return None, None, (dq + more.flatten(1, 2)).to(q_BhTd.dtype), dk, dv, *of_own


def _by_key_head(x_BhTd: Tensor, k_BgTd: Tensor) -> Tensor:
    """Return queries or outputs as [B, g, m, T, d], by the key head that they use."""
    return x_BhTd.unflatten(1, (k_BgTd.shape[1], -1))


def _own_scores(q_BhTd: Tensor, k_BgTd: Tensor) -> Tensor:
    """Return the score [B, h, T] of each query with the key at its position."""
    wide = torch.promote_types(q_BhTd.dtype, torch.float32)
    products = _by_key_head(q_BhTd, k_BgTd).to(wide) * k_BgTd[:, :, None]
    return products.sum(-1).flatten(1, 2) * q_BhTd.shape[-1] ** -0.5


def _weight(score_BhT: Tensor, total_BhT: Tensor, k_BgTd: Tensor) -> Tensor:
    """Return exp(score - total) as [B, g, m, T, 1]."""
    return _by_key_head((score_BhT - total_BhT).exp()[..., None], k_BgTd)


# The text's part. One document: queries at its last positions, and keys at all of them.


def _fused(q_BhTd: Tensor, k_BgTd: Tensor, reach: int | None) -> bool:
    """Return whether a kernel is known that returns the log-sum-exp, and whose gradient is as documented here.

    `reach`: see `UnrolledAttention`; a window that hides keys has no such kernel.
    """
    if reach is not None and reach < k_BgTd.shape[2]:
        return False
    if q_BhTd.device.type != "cuda" or not has_data(q_BhTd):
        return q_BhTd.device.type in ("cpu", "cuda")
    size = q_BhTd.shape[-1]
    if q_BhTd.dtype not in (torch.float16, torch.bfloat16) or size % 8 or size > 256:
        return False
    return _kernel_agrees(q_BhTd.device, q_BhTd.dtype, size, q_BhTd.shape[1] // k_BgTd.shape[1])


@lru_cache
def _kernel_agrees(device: torch.device, dtype: torch.dtype, size: int, groups: int) -> bool:
    """Return whether the kernel of this build of torch has the output and gradient of the plain path on a short text.

    Its signature is not public, and may change between releases. The text is a part of longer rows, as runs are.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, 11 + more, size) for heads, more in ((2 * groups, 0), (2, 4), (2, 4), (2 * groups, 0))]
    q, k, v, g = (torch.randn(shape, generator=generator).to(device, dtype)[:, :, 1:-1] for shape in shapes)
    try:
        found = _text(q, k, v)
        in_rows = [torch.cat([x, x], 2)[:, :, : x.shape[2]] for x in found]
        found += _text_backward(g, q, k, v, *in_rows)
        expected = _text_in_parts(q, k, v, None)
        expected += _backward_in_parts(g, q, k, v, *expected, None)
        gaps = [(a.float() - b.float()).abs().max() / b.float().std() for a, b in zip(found, expected, strict=True)]
        reason = "" if max(gaps) < DIFFERENCE else "its output or gradient differs"
    except (RuntimeError, TypeError) as error:
        reason = reason_of(error)
    if reason:
        warnings.warn(
            f"flash attention is not used in the training-time test, which takes longer: {reason}", stacklevel=2
        )
    return not reason


def _text(q_BhTd: Tensor, k_BgSd: Tensor, v_BgSd: Tensor) -> tuple[Tensor, Tensor]:
    """Return causal attention over the text and the log-sum-exp [B, h, T] of its scores.

    Kernels differ in what they mean by causal if there are more keys than queries; so keys before the first query are
    attended by themselves.
    """
    before = k_BgSd.shape[2] - q_BhTd.shape[2]
    if not before:
        return _fused_text(q_BhTd, k_BgSd, v_BgSd)
    early, early_lse = _fused_text(q_BhTd, k_BgSd[:, :, :before], v_BgSd[:, :, :before], causal=False)
    late, late_lse = _fused_text(q_BhTd, k_BgSd[:, :, before:], v_BgSd[:, :, before:])
    total_BhT = torch.logaddexp(early_lse, late_lse)
    merged = early * (early_lse - total_BhT).exp()[..., None] + late * (late_lse - total_BhT).exp()[..., None]
    return merged.to(q_BhTd.dtype), total_BhT


def _text_backward(
    g_BhTd: Tensor, q_BhTd: Tensor, k_BgSd: Tensor, v_BgSd: Tensor, out_BhTd: Tensor, total_BhT: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values of `_text`."""
    before, read = k_BgSd.shape[2] - q_BhTd.shape[2], (out_BhTd, total_BhT)
    if not before:
        return _fused_backward(g_BhTd, q_BhTd, k_BgSd, v_BgSd, *read)
    early = _fused_backward(g_BhTd, q_BhTd, k_BgSd[:, :, :before], v_BgSd[:, :, :before], *read, causal=False)
    late = _fused_backward(g_BhTd, q_BhTd, k_BgSd[:, :, before:], v_BgSd[:, :, before:], *read)
    return early[0] + late[0], torch.cat([early[1], late[1]], 2), torch.cat([early[2], late[2]], 2)


def _fused_text(q_BhTd: Tensor, k_BgTd: Tensor, v_BgTd: Tensor, causal: bool = True) -> tuple[Tensor, Tensor]:
    """Return attention, causal or over all keys, and the log-sum-exp [B, h, T] of its scores."""
    if q_BhTd.device.type == "cpu":
        return ATEN._scaled_dot_product_flash_attention_for_cpu(q_BhTd, k_BgTd, v_BgTd, 0.0, causal)
    return ATEN._scaled_dot_product_flash_attention(q_BhTd, k_BgTd, v_BgTd, 0.0, causal)[:2]


def _fused_backward(
    g_BhTd: Tensor,
    q_BhTd: Tensor,
    k_BgTd: Tensor,
    v_BgTd: Tensor,
    out_BhTd: Tensor,
    total_BhT: Tensor,
    causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, where key s has the probability exp(score - total)."""
    # FlashAttention-2 reads the log-sum-exp by its address, as if it were contiguous, and the others by their strides.
    inputs = g_BhTd, q_BhTd, k_BgTd, v_BgTd, out_BhTd, total_BhT.contiguous()
    if q_BhTd.device.type == "cpu":
        # In bf16 the kernel took 1.3 to 2.7 times as long, and oneDNN keeps 4 to 5 MiB for each length that occurs.
        wide = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in inputs)
        found = ATEN._scaled_dot_product_flash_attention_for_cpu_backward(*wide, 0.0, causal)
        dq, dk, dv = (x.to(q_BhTd.dtype) for x in found)
        return dq, dk, dv
    T, S, unused = q_BhTd.shape[2], k_BgTd.shape[2], q_BhTd.new_empty(2, dtype=torch.uint64)  # states of no dropout
    return ATEN._scaled_dot_product_flash_attention_backward(
        *inputs, None, None, T, S, 0.0, causal, unused, unused.new_empty(())
    )


def _text_in_parts(q_BhTd: Tensor, k_BgTd: Tensor, v_BgTd: Tensor, reach: int | None) -> tuple[Tensor, Tensor]:
    """Return the result of `_text`, -inf for a query without any key, with the scores of some queries at a time."""
    outs, sums = [], []
    for part in _parts(q_BhTd, k_BgTd, reach):
        scores = part.scores(q_BhTd, k_BgTd)
        lse = scores.logsumexp(-1, keepdim=True)
        weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)).exp()
        out = weights.to(v_BgTd.dtype) @ v_BgTd[:, :, part.keys]
        outs.append(part.by_head(out, q_BhTd))
        sums.append(part.by_head(lse, q_BhTd)[..., 0])
    return torch.cat(outs, 2), torch.cat(sums, 2)


def _backward_in_parts(
    g_BhTd: Tensor,
    q_BhTd: Tensor,
    k_BgTd: Tensor,
    v_BgTd: Tensor,
    out_BhTd: Tensor,
    total_BhT: Tensor,
    reach: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of `_text_backward`, with the scores of some queries at a time."""
    dq, dk, dv = torch.empty_like(q_BhTd), torch.zeros_like(k_BgTd), torch.zeros_like(v_BgTd)
    mean_BhT1 = (g_BhTd.to(total_BhT.dtype) * out_BhTd).sum(-1, keepdim=True)
    for part in _parts(q_BhTd, k_BgTd, reach):
        k, v = k_BgTd[:, :, part.keys], v_BgTd[:, :, part.keys]
        g, q, mean, total = (part.by_key_head(x, k_BgTd) for x in (g_BhTd, q_BhTd, mean_BhT1, total_BhT[..., None]))
        weights = (part.scores(q_BhTd, k_BgTd) - total).exp()
        slope = (weights * ((g @ v.mT) - mean) * q.shape[-1] ** -0.5).to(q.dtype)
        dq[:, :, part.queries] = part.by_head(slope @ k, q_BhTd)
        dk[:, :, part.keys] += slope.mT @ q
        dv[:, :, part.keys] += weights.to(g.dtype).mT @ g
    return dq, dk, dv


@dataclass(frozen=True)
class _Queries:
    """Some queries of a document, and the keys that at least one of them sees."""

    queries: slice
    keys: slice
    reach: int | None
    before: int
    """Keys before the first query."""

    def by_key_head(self, x_BhTd: Tensor, k_BgTd: Tensor) -> Tensor:
        """Return the queries' part as [B, g, m * Q, d]."""
        return _by_key_head(x_BhTd[:, :, self.queries], k_BgTd).flatten(2, 3)

    def by_head(self, x: Tensor, q_BhTd: Tensor) -> Tensor:
        """Return [B, g, m * Q, d] as [B, h, Q, d]."""
        return x.unflatten(2, (-1, self.queries.stop - self.queries.start)).flatten(1, 2)

    def scores(self, q_BhTd: Tensor, k_BgTd: Tensor) -> Tensor:
        """Return the scores [B, g, m * Q, S], -inf for keys that a query does not see."""
        wide = torch.promote_types(q_BhTd.dtype, torch.float32)
        scores = self.by_key_head(q_BhTd, k_BgTd) @ k_BgTd[:, :, self.keys].mT
        query_Q1 = torch.arange(self.queries.start, self.queries.stop, device=q_BhTd.device)[:, None] + self.before
        key_S = torch.arange(self.keys.start, self.keys.stop, device=q_BhTd.device)
        hidden_QS = key_S > query_Q1
        if self.reach is not None:
            hidden_QS = hidden_QS | (key_S <= query_Q1 - self.reach)
        hidden = hidden_QS.repeat(q_BhTd.shape[1] // k_BgTd.shape[1], 1)
        return (scores.to(wide) * q_BhTd.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)


def _parts(q_BhTd: Tensor, k_BgSd: Tensor, reach: int | None) -> list[_Queries]:
    """Divide the queries of a document."""
    parts, length = [], q_BhTd.shape[2]
    before = k_BgSd.shape[2] - length
    for start in range(0, length, QUERIES):
        stop = min(start + QUERIES, length)
        first = 0 if reach is None else max(0, before + start - max(reach, 0) + 1)
        keys = slice(min(first, before + stop - 1), before + stop)
        parts.append(_Queries(slice(start, stop), keys, reach, before))
    return parts
