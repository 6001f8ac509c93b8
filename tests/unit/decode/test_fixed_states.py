"""States of recurrent layers in compiled passes: their logits are those of plain passes over the same texts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import mostly_slow
from recurrent_models import FAMILIES, build, noisy
from torch import Tensor

from draftsmith import SpeculativeDecoder
from draftsmith.decode.cache import fixed as fixed_states
from draftsmith.decode.cache.fixed import FixedMixer, FixedStates
from draftsmith.decode.cache.recurrent import MOST_AGAIN
from draftsmith.decode.passes import compiled, graphs
from draftsmith.decode.passes.base import Plan
from draftsmith.decode.passes.compiled import CompiledRecurrentPasses
from draftsmith.decode.passes.graphs import MOST_WIDTH, RECORDING, Graph
from draftsmith.decode.passes.runner import ModelRunner
from draftsmith.errors import ConfigError
from draftsmith.heads.base import Level
from draftsmith.heads.rows import Rows

ONE_BY_ONE = ("mamba", "falcon_mamba", "jamba")
COMPILED = [family for family in FAMILIES if family not in ONE_BY_ONE]
ROUNDING = 1e-3
"""Relative to the standard deviation of the logits: scans are computed in float32. A wrong state changes them by more
than 0.1."""
PROMPTS = (7, 4, 1)
"""Tokens of three texts before the first pass that is compiled."""
ROUNDS = ((1, 3, 5), (5, 5, 5), (1, 1, 1), (2, 5, 4), (5, 4, 5), (1, 2, 5), (5, 5, 2))
"""Committed tokens of each text after every draft: more than are read again."""
WIDTH = 5


@pytest.fixture(autouse=True)
def _untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the code of compiled passes as it is; `test_compiled` has torch trace it."""
    monkeypatch.setitem(graphs.OPTIONS, "cpu", {"disable": True})


class Followed:
    """Texts that a runner with compiled passes reads, and the logits that it should return."""

    def __init__(self, family: str, rows: int) -> None:
        self.model = build(family, max_position_embeddings=256)
        generator = torch.Generator().manual_seed(0)
        self.texts = torch.randint(3, 61, (rows, 180), generator=generator).tolist()
        ids = torch.tensor(self.texts)
        self.expected_BTV = self.model(input_ids=ids, use_cache=False).logits
        self.runner = ModelRunner(self.model, rows, Plan(compile=True, longest=190))
        self.runner.append([text[:length] for text, length in zip(self.texts, PROMPTS, strict=False)])
        self.gap = 0.0

    def see(self, logits_BQV: Tensor, starts: list[int], counts: list[int]) -> None:
        """Compare the logits of the first tokens of each row, which are those of its text."""
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            if count == 0:
                continue
            difference = logits_BQV[row, :count] - self.expected_BTV[row, start : start + count]
            gap = difference.abs().max().nan_to_num(torch.inf) / self.expected_BTV.std()
            self.gap = max(self.gap, float(gap))

    def draft(self, width: int, counts: list[int]) -> None:
        """Read drafts of which the first tokens are the text's, and commit those."""
        starts = list(self.runner.lengths)
        drafts = [
            text[start : start + count] + text[: width - count]
            for text, start, count in zip(self.texts, starts, counts, strict=True)
        ]
        self.see(self.runner.tree(torch.tensor(drafts), [tuple(range(-1, width - 2))]), starts, counts)
        self.runner.commit([list(range(count)) for count in counts])

    def append(self, counts: list[int]) -> None:
        """Read the next tokens of the texts."""
        starts = list(self.runner.lengths)
        rows = [text[start : start + count] for text, start, count in zip(self.texts, starts, counts, strict=True)]
        logits_BV = self.runner.append(rows)
        lasts = [start + count - 1 for start, count in zip(starts, counts, strict=True)]
        self.see(logits_BV[:, None], lasts, [min(count, 1) for count in counts])

    def draft_steps(self, count: int) -> None:
        """Read the next tokens as drafts, one a pass, and commit all but the last two."""
        starts = list(self.runner.lengths)
        for step in range(count):
            tokens_B1 = torch.tensor([[text[start + step]] for text, start in zip(self.texts, starts, strict=True)])
            logits_BnV = self.runner.extend(Level(tokens_B1, None, step + 1))
            self.see(logits_BnV, [start + step for start in starts], [1] * len(starts))
        self.runner.commit([list(range(count - 2))] * len(starts))

    def drop(self, rows: list[int]) -> None:
        self.runner.drop(rows)
        self.texts = [self.texts[row] for row in rows]
        self.expected_BTV = self.expected_BTV[rows]


@torch.inference_mode()
def largest_gap(family: str, rows: int) -> float:
    """Return the largest difference of logits over rounds of all kinds."""
    followed = Followed(family, rows)
    for counts in ROUNDS:
        followed.draft(WIDTH, list(counts[:rows]))
    followed.append([2, 1, 1][:rows])
    followed.draft_steps(6)
    followed.append([1] * rows)
    if rows > 1:
        followed.drop([2, 0])
        followed.draft(WIDTH, [3, 5])
        followed.append([2, 1])
    followed.runner.close()
    return followed.gap


@pytest.mark.parametrize("family", COMPILED)
def test_logits_are_those_of_plain_passes(family: str) -> None:
    assert largest_gap(family, 1) < ROUNDING
    assert largest_gap(family, 3) < ROUNDING, "in a ragged batch"


@pytest.mark.parametrize("family", mostly_slow(COMPILED, "qwen3_5_text", "mamba2", "lfm2"))
@torch.inference_mode()
def test_the_target_alone_reads_nothing_again(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens go straight into the saved states, unless committed tokens of a draft are not in them yet."""
    columns, aim = [], FixedStates.aim
    monkeypatch.setattr(FixedStates, "aim", lambda self, *where: [aim(self, *where), columns.append(where[1:])])
    for rows in (1, 2):
        followed = Followed(family, rows)
        columns.clear()
        for _ in range(MOST_AGAIN + 2):
            followed.draft(1, [1] * rows)
        followed.append([1] * rows)
        assert set(columns) == {(0, 1), (0, 0)}
        followed.draft_steps(2)  # of which nothing is committed
        assert columns[-2] == (MOST_AGAIN, 1)
        followed.append([1, 0][:rows])
        followed.draft(WIDTH, [3, 1][:rows])
        followed.draft(1, [1] * rows)
        assert columns[-2] == (MOST_AGAIN - 1, 1)
        followed.runner.close()
        assert followed.gap < ROUNDING


@torch.inference_mode()
def test_single_draft_tokens_need_few_graphs() -> None:
    """The number of draft tokens before is rounded up to a power of two, each of which has one graph."""
    followed = Followed("lfm2", 2)
    followed.append([MOST_AGAIN - 1, 2])
    followed.draft_steps(MOST_WIDTH)  # to the last column of the first row
    followed.draft_steps(6)
    widths = [key[-1] for key in followed.runner.passes._graphs._graphs if key[0] == 1]
    assert widths == [MOST_AGAIN - 1 + drafted for drafted in (0, 1, 2, 4, 8, 16, 32, 64, MOST_WIDTH - 1)]
    assert followed.gap < ROUNDING


@pytest.mark.parametrize("family", mostly_slow(COMPILED, "qwen3_5_text", "mamba2"))
@torch.inference_mode()
def test_wide_passes_between_compiled_ones(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not compiled and read the same states: whole drafts, committed tokens, the end of a draft."""
    for module in (compiled, graphs):
        monkeypatch.setattr(module, "MOST_WIDTH", 8)
    for rows in (1, 2):
        followed = Followed(family, rows)
        for width, counts in ((WIDTH, (2, 4)), (12, (9, 3)), (WIDTH, (4, 4)), (12, (12, 10)), (12, (1, 2))):
            followed.draft(width, list(counts[:rows]))
        followed.append([11, 9][:rows])
        followed.draft(WIDTH, [2, 5][:rows])
        followed.draft_steps(24)
        followed.draft(WIDTH, [5, 1][:rows])
        followed.runner.close()
        assert followed.gap < ROUNDING


@pytest.mark.parametrize("family", mostly_slow(COMPILED, "qwen3_5_text", "mamba2", "lfm2"))
@torch.inference_mode()
def test_recording_a_graph_reads_no_token_twice(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA the first use of every graph runs it several times: passes of all kinds, and the chains of a drafter."""
    build_graph = Graph.__init__

    def built(graph: Graph, *arguments: Any) -> None:
        build_graph(graph, *arguments)
        graph._runs = RECORDING

    monkeypatch.setattr(Graph, "__init__", built)
    for rows in (1, 3):
        followed = Followed(family, rows)
        for _ in range(2):
            followed.draft(1, [1] * rows)
            followed.append([1] * rows)
        followed.runner.close()
        assert followed.gap < ROUNDING, "passes that replace the saved states"
        assert largest_gap(family, rows) < ROUNDING
    model, settings = build(family), {"max_new_tokens": 40, "eos_token_id": None}
    plain, decoder = (SpeculativeDecoder(model, noisy(model), draft_length=3, compile=on) for on in (False, True))
    for temperature in (0.0, 1.0):
        expected = plain.generate([5, 9, 33, 2], temperature=temperature, **settings).tokens
        assert decoder.generate([5, 9, 33, 2], temperature=temperature, **settings).tokens == expected


@torch.inference_mode()
def test_states_that_another_call_has_left_are_not_read() -> None:
    """NaN in a column or a state that no token reads would reach others through products with zero."""
    model, settings = build("qwen3_5_text"), {"max_new_tokens": 40, "eos_token_id": None}
    drafter = noisy(model)
    plain, decoder = (SpeculativeDecoder(model, drafter, draft_length=3, compile=on) for on in (False, True))
    expected = plain.generate([5, 9, 33, 2], **settings).tokens
    assert decoder.generate([5, 9, 33, 2], **settings).tokens == expected
    for owner in (model, drafter.model):
        (passes,) = graphs._FREE[owner]
        for mixer in passes.states.mixers:
            for tensor in mixer.tensors():
                tensor.fill_(torch.nan)
    assert decoder.generate([5, 9, 33, 2], **settings).tokens == expected


@pytest.mark.parametrize("part", ["module", "method"])
def test_layers_that_are_replaced_between_calls(part: str) -> None:
    """The states of a layer belong to its module, whose forward method the passes replace."""
    model, other = build("lfm2"), build("lfm2", 1)
    plain, decoder = (SpeculativeDecoder(model, noisy(model), draft_length=3, compile=on) for on in (False, True))
    texts = []
    for replaced in (False, True):
        layer, new = model.model.layers[0], other.model.layers[0].conv
        if replaced and part == "module":
            layer.conv = new
        elif replaced:  # as hooks of accelerate do
            layer.conv.forward = new.forward
        expected = plain.generate([5, 9, 33, 2], max_new_tokens=30, eos_token_id=None).tokens
        assert decoder.generate([5, 9, 33, 2], max_new_tokens=30, eos_token_id=None).tokens == expected
        texts.append(expected)
    assert texts[0] != texts[1]


def later_columns(self: FixedStates, again_B: Tensor | None, most: int, width: int) -> None:
    AIM(self, None if again_B is None else again_B.clamp(min=1), most, width)


def no_states(self: FixedMixer, states: Any, rows_B: Tensor | None) -> None:
    pass


def states_of_all(rows_B: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return new


def one_less(self: CompiledRecurrentPasses, slots: Rows) -> None:
    committed = self._committed
    KEEP(self, slots)
    self._committed = committed + slots.counts.map(lambda count: count - (count > 1))


def none_dropped(self: FixedMixer, rows: list[int]) -> None:
    pass


AIM, KEEP = FixedStates.aim, CompiledRecurrentPasses.keep


@pytest.mark.parametrize(
    ("owner", "name", "mutant", "rows"),
    [
        (FixedStates, "aim", later_columns, 1),
        (FixedMixer, "_save", no_states, 1),
        (fixed_states, "_chosen", states_of_all, 3),
        (CompiledRecurrentPasses, "keep", one_less, 1),
        (FixedMixer, "drop", none_dropped, 3),
    ],
)
def test_the_comparison_notices_wrong_states(
    owner: Any, name: str, mutant: Callable[..., Any], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    assert largest_gap("mamba2", rows) > 0.1


@pytest.mark.parametrize("family", [family for family in ONE_BY_ONE if family in FAMILIES])
def test_layers_that_continue_with_single_tokens_are_refused(family: str) -> None:
    with pytest.raises(ConfigError, match="its recurrent layers continue with single tokens only; expected compile"):
        SpeculativeDecoder(build(family), compile=True)
    with pytest.raises(ConfigError, match="its recurrent layers continue with single tokens only; expected compile"):
        SpeculativeDecoder(build("mamba2"), noisy(build(family)), compile=True)


@torch.inference_mode()
def test_layers_that_read_other_tensors_are_refused() -> None:
    """Later passes would get the values of the prompt."""
    model = build("mamba2")
    runner = ModelRunner(model, 1, Plan(compile=True, longest=100))
    runner.append([[5, 6]])
    for mixer in runner.passes._eager.mixers.all:
        mixer.example[0]["scale"] = torch.ones(1)
    with pytest.raises(ConfigError, match="compile=True: recurrent layers read scale; expected compile=False"):
        runner.tree(torch.tensor([[7]]), [()])
