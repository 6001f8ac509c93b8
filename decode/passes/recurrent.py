"""Passes of models with recurrent layers: states are saved at committed tokens, and later tokens are recomputed.

A recurrent or convolution layer holds its state after the last token that it read, so a discarded draft cannot be
removed from it. A `Mixer` saves the state at a committed token, and keeps the inputs of the layer since then:

    saved state | committed since, recomputed | draft ......... |

Only the mixers recompute tokens, in the same pass as the next draft; attention and feed-forward layers do not.
After `MOST_RECOMPUTED` tokens, one more pass of the mixer moves the saved state to the last committed token. The inputs
of committed tokens never change, so the states equal those of a sequence without drafts.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import lru_cache, partial
from inspect import getmembers, isfunction, signature, unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionLayer

from draftsmith.decode.cache.rollback import RollbackCache
from draftsmith.decode.passes.eager import EagerPasses
from draftsmith.decode.passes.plan import MOST_RECOMPUTED, Output, Plan, Reading
from draftsmith.heads.hidden_states import ProcessorInputs
from draftsmith.heads.model_config import text_config
from draftsmith.heads.rows import Counts, Rows, rows_of

_UPDATES = ("update_conv_state", "update_recurrent_state")
LOCK = threading.RLock()
"""Held while forward methods of mixers are replaced, and while they are looked up."""

# Shapes: B rows, P inputs that are kept of each row, Q tokens fed.

Method = tuple[nn.Module, Callable[..., Any]]
"""A module, and the function that replaces its forward method."""
Inputs = dict[str, Tensor]
"""The arguments of a mixer that have a value for each token, [B, P, ...]."""


class Mixer:
    """The states of the sequences in one mixer of a model.

    Args:
        cache: the cache in the mixer's arguments, which is replaced by one with the mixer's own states.
        states: number of convolution and recurrent states of a layer.
    """

    def __init__(self, module: nn.Module, cache: RollbackCache, states: int) -> None:
        rows, device = len(cache.lengths), cache.lengths.device
        self._module, self._cache = module, cache
        self._names = [*signature(module.forward).parameters]
        self._saved = LinearAttentionLayer(number_of_states=states)
        self._last: LinearAttentionLayer | None = None
        """The states after all inputs, where every row has equally many and none was discarded."""
        self._inputs: Inputs = {}
        """Those since the saved states: of each row the committed tokens, the draft tokens, padding."""
        self._committed = Counts([0] * rows, device)
        self._drafted = 0
        self._one_by_one = False
        self._steps: list[LinearAttentionLayer] = []
        """The states after each draft token, of a mixer that reads them one by one."""

    def method(self, width: int, counts: Counts | None) -> Method:
        """Return the context for `width` tokens of each row, of which `counts` are committed; None: draft tokens."""
        forward = self._module.forward

        def read(*args: Any, **kwargs: Any) -> Any:
            arguments = {**dict(zip(self._names, args, strict=False)), **kwargs}
            return self._read(MixerCall(self._module, forward, arguments, self._cache), width, counts)

        return self._module, read

    def _read(self, call: "MixerCall", width: int, counts: Counts | None) -> Any:
        inputs = call.inputs(len(self._committed), width)
        self._one_by_one = self._one_by_one or _reads_one_by_one(type(self._module), call, self._saved, inputs)
        if counts is not None:
            return self._read_committed(call, inputs, width, counts)
        if self._one_by_one:
            return self._read_singly(call, inputs, width)
        if self._last is not None:
            self._inputs = {name: torch.cat([self._inputs[name], new], 1) for name, new in inputs.items()}
            self._drafted += width
            return call(self._last, inputs)
        if not self._drafted and max(self._committed) >= MOST_RECOMPUTED:
            self._advance(call, self._inputs, [count if count >= MOST_RECOMPUTED else 0 for count in self._committed])
            self._committed = self._committed.map(lambda count: count * (count < MOST_RECOMPUTED))
        before = self._committed + self._drafted
        self._inputs = {name: _joined(self._inputs.get(name), new, before) for name, new in inputs.items()}
        self._drafted += width
        last = copied(self._saved)
        outputs = call(last, self._inputs)
        self._last = last if before.equal else None
        return tree_map(lambda output: _taken(output, before, width), outputs)

    def _read_committed(self, call: "MixerCall", inputs: Inputs, width: int, counts: Counts) -> Any:
        """Read `counts` tokens of each row, after the recomputed ones, and save the states after them."""
        before, self._committed = self._committed, _none(counts)
        joined = {name: _joined(self._inputs.get(name), new, before) for name, new in inputs.items()}
        self._inputs = {}
        outputs = self._advance(call, joined, (before + counts).values)
        return tree_map(lambda output: _taken(output, before, width), outputs)

    def _read_singly(self, call: "MixerCall", inputs: Inputs, width: int) -> Any:
        """Read draft tokens one by one and keep the states after each."""
        outputs = []
        for column in range(width):
            self._steps.append(copied(self._steps[-1] if self._steps else self._saved))
            outputs.append(call(self._steps[-1], _columns(inputs, column, column + 1)))
        return _together(outputs)

    def _advance(self, call: "MixerCall", inputs: Inputs, lengths: list[int]) -> Any:
        """Read `lengths` inputs of each row, save the states after them and return the outputs [B, P, ...]."""
        width = max(value.shape[1] for value in inputs.values())
        if min(lengths) == width:
            return self._continue(call, self._saved, inputs, width)
        whole: Any = None
        for length in sorted(set(lengths) - {0}):
            rows = [row for row, own in enumerate(lengths) if own == length]
            states, part = copied(self._saved, rows), _columns(inputs, 0, length)
            part = {name: rows_of(value, rows) for name, value in part.items()}
            outputs = self._continue(call, states, part, length)
            _put(self._saved, states, rows, len(lengths))
            if whole is None:
                whole = tree_map(lambda output: output.new_zeros(len(lengths), width, *output.shape[2:]), outputs)
            tree_map(partial(_write, rows), whole, outputs)
        return whole

    def _continue(self, call: "MixerCall", states: LinearAttentionLayer, inputs: Inputs, width: int) -> Any:
        """Read all inputs from `states`, which are updated."""
        if not self._one_by_one or not any(states.has_previous_state.values()):
            return call(states, inputs)
        return _together([call(states, _columns(inputs, column, column + 1)) for column in range(width)])

    def keep(self, counts: Counts) -> None:
        """Commit this many draft tokens of each row and discard the others."""
        if self._steps:
            for count, states in enumerate(self._steps, start=1):
                rows = [row for row, own in enumerate(counts) if own == count]
                if rows:
                    _put(self._saved, copied(states, rows), rows, len(counts))
            self._steps = []
            return
        self._committed = self._committed + counts
        self._drafted = 0
        if self._inputs:
            kept, length = max(self._committed), next(iter(self._inputs.values())).shape[1]
            if self._last is not None and min(self._committed) == length:
                self._saved, self._committed, kept = self._last, _none(counts), 0
            self._inputs = _columns(self._inputs, 0, kept) if kept else {}
        self._last = None

    def drop(self, rows: list[int]) -> None:
        """Keep only these rows."""
        self._saved, self._last = copied(self._saved, rows), None
        self._inputs = {name: rows_of(value, rows) for name, value in self._inputs.items()}
        self._committed = self._committed.keep(rows)


class RecurrentPasses(EagerPasses):
    """Passes in which mixers recompute the tokens that were committed since their states were saved."""

    rewinds = False

    def __init__(self, model: PreTrainedModel, plan: Plan, cache: RollbackCache) -> None:
        super().__init__(model, plan, cache)
        states = getattr(text_config(model), "number_of_conv_states", 1)
        with LOCK:
            self._mixers = [Mixer(module, cache, states) for module in mixers_of(model)]

    @contextmanager
    def _mixing(self, width: int, counts: Counts | None) -> Iterator[None]:
        """Let the mixers of the model continue from their states, inside the context; see `Mixer.method`."""
        # Another thread may have replaced the methods: they are looked up once this one has the lock.
        with LOCK, replaced([mixer.method(width, counts) for mixer in self._mixers]):
            yield

    def prompt(self, row: int, ids: list[int], given: ProcessorInputs | None) -> Output:
        with self._mixing(len(ids), Counts([len(ids)], self._device)):
            return super().prompt(row, ids, given)

    def read(self, reading: Reading) -> Output:
        with self._mixing(reading.width, reading.counts):
            return super().read(reading)

    def keep(self, slots: Rows) -> None:
        for mixer in self._mixers:
            mixer.keep(slots.counts)
        super().keep(slots)

    def drop(self, rows: list[int]) -> None:
        for mixer in self._mixers:
            mixer.drop(rows)
        super().drop(rows)


@contextmanager
def replaced(methods: Sequence[Method]) -> Iterator[None]:
    """Let modules run these functions instead of their forward methods, inside the context."""
    with LOCK:
        own = [vars(module).get("forward") for module, _ in methods]
        for module, read in methods:
            vars(module)["forward"] = read  # assignment to an attribute of a module takes more than ten times as long
        try:
            yield
        finally:
            for (module, _), forward in zip(methods, own, strict=True):
                if forward is None:
                    del vars(module)["forward"]
                else:
                    vars(module)["forward"] = forward


class MixerCall:
    """A call of a mixer's forward method, whose inputs and states are replaced."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any], arguments: dict[str, Any], cache: Cache) -> None:
        self._module, self._forward, self._arguments, self._cache = module, forward, arguments, cache

    def inputs(self, rows: int, width: int) -> Inputs:
        """Return the arguments with a value for each token."""
        return {
            name: value
            for name, value in self._arguments.items()
            if isinstance(value, Tensor) and value.shape[:2] == (rows, width) and name != "attention_mask"
        }

    def __call__(self, states: LinearAttentionLayer, inputs: Inputs) -> Any:
        """Return the output for these inputs, continued from `states`, which are updated."""
        layers: list[Any] = [states] * len(self._cache)
        cache = Cache(layers=layers)
        arguments = {name: cache if value is self._cache else value for name, value in self._arguments.items()}
        if "attention_mask" in arguments:  # it would mask padding, and rows have none between their tokens
            arguments["attention_mask"] = None
        with _short_chunks(self._module, next(iter(inputs.values()))):
            return self._forward(**{**arguments, **inputs})


@contextmanager
def _short_chunks(module: nn.Module, value: Tensor) -> Iterator[None]:
    """Let Mamba-2's scan in PyTorch read as many tokens as `value` [B, P, ...] has; it pads to chunks, often of 256.

    On a CPU only: kernels do not pad, and compile for each size of a chunk.
    """
    chunk, width = vars(module).get("chunk_size"), value.shape[1]
    shorter = isinstance(chunk, int) and width < chunk and value.device.type == "cpu"
    if shorter:
        module.chunk_size = width  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        if shorter:
            module.chunk_size = chunk  # pyright: ignore[reportArgumentType]


def is_recurrent(model: nn.Module) -> bool:
    """Return whether a model has mixers; it reads chains only."""
    return bool(mixers_of(model))


def mixers_of(module: nn.Module) -> list[nn.Module]:
    """Return the outermost modules whose methods update a recurrent or convolution state of a cache."""
    if _updates_states(type(module)):
        return [module]
    return [mixer for child in module.children() for mixer in mixers_of(child)]


@lru_cache(maxsize=1024)
def _updates_states(kind: type[nn.Module]) -> bool:
    """Return whether a method of this class names one of the cache's updates of states."""
    functions = (unwrap(function) for _, function in getmembers(kind, isfunction))
    return any(name in function.__code__.co_names for function in functions for name in _UPDATES)


def _joined(old: Tensor | None, new: Tensor, before: Counts) -> Tensor:
    """Return the first `before` columns of each row of `old` followed by its row of `new`, padded on the right."""
    if max(before) == 0:
        return new
    assert old is not None
    if before.equal:
        return torch.cat([old[:, : before[0]], new], 1)
    joined = new.new_zeros(new.shape[0], max(before) + new.shape[1], *new.shape[2:])
    joined[:, : max(before)] = old[:, : max(before)]
    joined[_columns_after(before, new.shape[1])] = new
    return joined


def _taken(output: Tensor, before: Counts, width: int) -> Tensor:
    """Return `width` columns of each row after its first `before` ones."""
    if before.equal:
        return output[:, before[0] : before[0] + width]
    return output[_columns_after(before, width)]


def _columns_after(before: Counts, width: int) -> tuple[Tensor, Tensor]:
    """Return the indices of `width` columns after the first `before` of each row: [B, 1] and [B, width]."""
    rows_B1 = torch.arange(len(before), device=before.device)[:, None]
    return rows_B1, before.on_device_B[:, None] + torch.arange(width, device=before.device)


def _none(counts: Counts) -> Counts:
    """Return 0 for each row."""
    return Counts([0] * len(counts), counts.device)


def _columns(inputs: Inputs, start: int, end: int) -> Inputs:
    """Return these columns of all inputs."""
    return {name: value[:, start:end] for name, value in inputs.items()}


def _write(rows: list[int], whole: Tensor, output: Tensor) -> None:
    """Write the output of these rows to the first columns of `whole`; an index of several rows would be uploaded."""
    for row, own in zip(rows, output, strict=True):
        whole[row, : len(own)] = own


def _together(outputs: list[Any]) -> Any:
    """Return outputs of consecutive tokens as one; a mixer returns a tensor [B, P, ...] or several."""
    return tree_map(lambda *parts: torch.cat(parts, 1), *outputs)


# States.


def copied(states: LinearAttentionLayer, rows: list[int] | None = None) -> LinearAttentionLayer:
    """Return a copy of `states`, or of these rows of them."""
    new = copy(states)
    for name, value in vars(states).items():
        if isinstance(value, dict):
            vars(new)[name] = {key: _copied(one, rows) for key, one in value.items()}
    return new


def _copied(value: Any, rows: list[int] | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.clone() if rows is None else rows_of(value, rows)


def _put(states: LinearAttentionLayer, new: LinearAttentionLayer, rows: list[int], count: int) -> None:
    """Replace these rows of `states`, which has `count` rows or is empty, and take over what `new` knows of them."""
    for old, values in ((states.conv_states, new.conv_states), (states.recurrent_states, new.recurrent_states)):
        for key, value in values.items():
            if value is not None:
                tensor = old[key]
                old[key] = tensor = value.new_zeros(count, *value.shape[1:]) if tensor is None else tensor
                for row, own in zip(rows, value, strict=True):
                    tensor[row] = own
    own = {"conv_states": states.conv_states, "recurrent_states": states.recurrent_states}
    vars(states).update(vars(new) | own)


_ONE_BY_ONE: dict[type, bool] = {}


def _reads_one_by_one(kind: type, call: MixerCall, states: LinearAttentionLayer, inputs: Inputs) -> bool:
    """Return whether mixers of this class continue from a state only with a single token. Checked once a class.

    Those of Mamba 1 begin several tokens with an empty recurrent state: then the output does not depend on it.
    """
    if kind not in _ONE_BY_ONE and any(states.has_previous_state.values()):
        two = {name: torch.cat([value[:, :1], value[:, :1]], 1) for name, value in inputs.items()}
        other = copied(states)
        other.recurrent_states = {
            key: None if value is None else 100 * value + 1 for key, value in other.recurrent_states.items()
        }
        plain, changed = (tree_leaves(tree_map(torch.clone, call(start, two))) for start in (copied(states), other))
        has_recurrent = any(value is not None for value in states.recurrent_states.values())
        _ONE_BY_ONE[kind] = has_recurrent and all(map(torch.equal, plain, changed))
    return _ONE_BY_ONE.get(kind, False)
