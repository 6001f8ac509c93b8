"""Compiled passes return the texts of uncompiled ones, and each is built once."""

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compiled_cases import CASES, PROMPTS, SETTINGS, eagle, target_model
from conftest import make_llama, make_t5, mostly_slow, spread
from torch._dynamo.utils import counters
from torch._inductor import cpu_vec_isa
from transformers import BloomConfig, BloomForCausalLM, GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from draftsmith import SpeculativeDecoder
from draftsmith.decode.costs import Costs
from draftsmith.decode.passes import graphs
from draftsmith.decode.passes.eager import EagerPasses
from draftsmith.decode.passes.graphs import CompiledPasses, built_graphs
from draftsmith.decode.passes.runner import ModelRunner
from draftsmith.errors import ConfigError
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.medusa import Medusa


@pytest.fixture(autouse=True)
def _no_second_graph() -> Iterator[None]:
    """torch raises an error instead of compiling the same pass again."""
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace passes and run their graphs as they are: the path of a compiled pass without its minutes of compilation."""
    monkeypatch.setitem(graphs.OPTIONS, "cpu", {"backend": "eager"})


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the code of compiled passes as it is, where their graphs are not what is tested."""
    monkeypatch.setitem(graphs.OPTIONS, "cpu", {"disable": True})


def compare(target: torch.nn.Module, case: str) -> int:
    """Check the texts of a ragged batch, and that a second call builds no graph; return the number of graphs."""
    make, plan = CASES[case]
    torch.manual_seed(1)
    drafter = None if make is None else make(target).eval()
    eager = SpeculativeDecoder(target, drafter, **plan)
    fast = SpeculativeDecoder(target, drafter, compile=True, **plan)
    before, lengths = built_graphs(), []
    for temperature in (0.0, 1.0):
        settings = {**SETTINGS, "temperature": temperature}
        expected = [out.tokens for out in eager.generate_batch(PROMPTS, **settings)]
        assert [out.tokens for out in fast.generate_batch(PROMPTS, **settings)] == expected
        graphs = built_graphs(), counters["stats"]["unique_graphs"]
        assert [out.tokens for out in fast.generate_batch(PROMPTS, **settings)] == expected
        assert (built_graphs(), counters["stats"]["unique_graphs"]) == graphs
        lengths.append(set(map(len, expected)))
    assert max(map(len, lengths)) > 1, "the texts should end at different times"
    return built_graphs() - before


@pytest.mark.parametrize(
    ("case", "graphs"),
    [
        ("draft_model", 3),  # the target's pass; the drafter's over 1 and 2 tokens
        pytest.param("eagle3", 3, marks=pytest.mark.slow),
        pytest.param("mtp", 3, marks=pytest.mark.slow),
        pytest.param("mtp of 3 modules", 10, marks=pytest.mark.slow),  # each module's over 1, 2 and 4 tokens
        pytest.param("peagle", 2, marks=pytest.mark.slow),
        ("dflash", 2),  # features and the block are one pass
        pytest.param("dspark, tree", 3, marks=pytest.mark.slow),
        pytest.param("medusa", 1, marks=pytest.mark.slow),
        pytest.param("dspark", 2, marks=pytest.mark.slow),
    ],
)
def test_texts_equal_those_of_uncompiled_passes(traced: None, case: str, graphs: int) -> None:
    assert compare(target_model(), case) == graphs


@pytest.mark.parametrize("vectors", mostly_slow([False, True], False))
def test_inductor_on_a_cpu(vectors: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With vector instructions, torch first compiles three programs to find out which ones this machine has."""
    if not vectors:
        monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)
    assert compare(target_model(), "target alone") == 1


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_inductor_for_every_kind_of_pass(case: str) -> None:
    compare(target_model(), case)


def mistral() -> MistralForCausalLM:
    """A model whose layers attend to the last 2 tokens: fewer than a draft has."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 2, "initializer_range": 0.5}
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**sizes, max_position_embeddings=128)).eval().double()


def gpt2() -> GPT2LMHeadModel:
    """A model with 32 learned positions, which a text fills to the last, and attention with additive masks."""
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32, "initializer_range": 0.2}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1)).eval().double()
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("model", [mistral, gpt2])
@pytest.mark.parametrize("passes", mostly_slow(["untraced", "traced"], "untraced"))
def test_windows_and_the_end_of_the_context(
    model: Callable[[], torch.nn.Module], passes: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(passes)
    target = model()
    drafter = DraftModel(model())
    for policy in ("chain:draft_length=3", "best-first:size=9,depth=3"):
        decoders = [SpeculativeDecoder(target, drafter, policy=policy, compile=on) for on in (False, True)]
        texts = [
            # Sampled, so that a tree's other branches are accepted too.
            decoder.generate(PROMPTS[2], max_new_tokens=100, eos_token_id=None, temperature=1.0).tokens
            for decoder in decoders
        ]
        assert texts[0] == texts[1]
        assert len(texts[0]) >= 23


WHOLE = {"eos_token_id": None, "temperature": 1.0}
COSTS = Costs({1: 1.0, 64: 1.1}, {1: 0.01, 64: 0.02})


WIDE = "best-first:size=56,depth=3"


@pytest.mark.parametrize("policy", mostly_slow([WIDE, "sampled-tree:width=20,depth=3", "best-first:size=40"], WIDE))
def test_trees_at_the_end_of_the_storage(untraced: None, policy: str) -> None:
    """The slots of storage are a power of two above the longest text; the nodes of its last drafts have slots too."""
    target = make_llama(num_hidden_layers=1, max_position_embeddings=512).double()
    drafter = DraftModel(make_llama(1, num_hidden_layers=1, max_position_embeddings=512).double())
    plain, fast = (SpeculativeDecoder(target, drafter, policy=policy, costs=COSTS, compile=on) for on in (False, True))
    for seed in range(4):
        prompt = [5 + seed, 9] * 50
        settings = {**WHOLE, "max_new_tokens": 127 - len(prompt), "seed": seed}
        assert fast.generate(prompt, **settings).tokens == plain.generate(prompt, **settings).tokens


def sharp(seed: int, factor: float) -> torch.nn.Module:
    model = make_llama(seed, num_hidden_layers=1, max_position_embeddings=512)
    model.lm_head.weight.data *= factor
    return model


@pytest.mark.parametrize(
    ("policy", "factor"), spread(["sampled-tree:width=4,depth=4", "best-first:size=6,depth=6"], [0.3, 6.0])
)
def test_trees_have_no_more_nodes_than_they_say(policy: str, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled passes have slots for these; the slots that a drafter has taken are counted after each of its passes."""
    target, drafter, read, verified = sharp(0, factor), DraftModel(sharp(0, factor)), [0], [0]
    extend = ModelRunner.extend

    def counted(runner: ModelRunner, *arguments: Any) -> torch.Tensor:
        logits = extend(runner, *arguments)
        read.append(runner._drafted)
        return logits

    monkeypatch.setattr(ModelRunner, "extend", counted)
    for temperature in (0.0, 1.0):
        decoder = SpeculativeDecoder(target, drafter, policy=policy, costs=COSTS)
        decoder.calibrate([[5, 9]], temperature=temperature, max_new_tokens=40)
        for seed in range(3):
            settings = {**WHOLE, "temperature": temperature, "max_new_tokens": 100, "seed": seed}
            verified += [record.drafted for record in decoder.generate([5, 9, 33], **settings).rounds]
    most = decoder.policy.most_nodes
    assert 3 < max(verified) <= most.verified
    assert (3 if factor > 1 else 0) <= max(read) <= most.read


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[torch.nn.Module, bool], set[int]]:
    """The widths of passes after the prompt, by model and whether they were compiled, where a decoder compiles."""
    seen = defaultdict[tuple[torch.nn.Module, bool], set[int]](set)

    def recorded(read: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
        def record(self: Any, *inputs: Any) -> Any:
            if max(self.cache.lengths) > 0:
                seen[self.model, compiled].add(inputs[-1].width)
            return read(self, *inputs)

        return record

    monkeypatch.setattr(CompiledPasses, "_compiled", recorded(CompiledPasses._compiled, True))
    monkeypatch.setattr(EagerPasses, "read", recorded(EagerPasses.read, False))
    return seen


def test_widths_of_passes(untraced: None, widths: dict) -> None:
    """Those of the target are as wide as its drafts, to the end of the text; the drafter's are a power of two."""
    target = target_model()
    drafter = DraftModel(target_model())  # of which everything is accepted
    decoder = SpeculativeDecoder(target, drafter, draft_length=9, compile=True)
    decoder.generate(PROMPTS[2], max_new_tokens=24, eos_token_id=None)
    compiled = {model: seen for (model, is_compiled), seen in widths.items() if is_compiled}
    assert compiled == {target: {10}, drafter.model: {1, 2}}


def test_wide_passes_are_neither_padded_nor_compiled(
    untraced: None, widths: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for those of the usual width."""
    monkeypatch.setattr("draftsmith.decode.passes.graphs.MOST_WIDTH", 1)
    target = target_model()
    drafter = DraftModel(target_model())  # of which everything is accepted
    decoder = SpeculativeDecoder(target, drafter, draft_length=9, compile=True)
    text = decoder.generate(PROMPTS[2], max_new_tokens=24, eos_token_id=None).tokens
    assert widths == {(target, True): {10}, (drafter.model, True): {1}, (drafter.model, False): {2}}
    assert text == SpeculativeDecoder(target).generate(PROMPTS[2], max_new_tokens=24, eos_token_id=None).tokens


def hooks_of(model: torch.nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())


@pytest.mark.parametrize("compile", [False, True])
def test_hooks_are_removed(untraced: None, compile: bool) -> None:
    """Compiled passes have hooks while they run; others until the call ends, as it does by an error."""
    target = target_model()
    drafter = eagle(target)
    decoder = SpeculativeDecoder(target, drafter, draft_length=3, compile=compile)
    hooks = []

    def count(tokens: list[int], _: object) -> None:
        hooks.append(hooks_of(target))
        if len(hooks) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decoder.generate(PROMPTS[0], on_tokens=count, max_new_tokens=24, eos_token_id=None)
    assert hooks == [0 if compile else 3] * 4  # of two layers' features, and of the lm_head's input
    assert hooks_of(target) == hooks_of(drafter) == 0


def test_a_call_inside_another_has_storage_of_its_own(untraced: None) -> None:
    target = target_model()
    outer, inner = (SpeculativeDecoder(target, compile=True) for _ in range(2))
    expected = SpeculativeDecoder(target).generate(PROMPTS[0], **SETTINGS).tokens
    texts = []

    def decode_again(tokens: list[int], _: object) -> None:
        if len(texts) < 2:
            texts.append(inner.generate(PROMPTS[0], **SETTINGS).tokens)

    for _ in range(2):  # the second time with storage that was used before
        texts.clear()
        assert outer.generate(PROMPTS[0], on_tokens=decode_again, **SETTINGS).tokens == expected
        assert texts == [expected, expected]


def test_nothing_of_an_earlier_text_is_read(untraced: None) -> None:
    """NaN in a slot that no token sees would reach every token through attention: 0 * NaN is NaN."""
    target = target_model()
    decoder = SpeculativeDecoder(target, compile=True)
    expected = decoder.generate(PROMPTS[0], **SETTINGS).tokens
    (passes,) = graphs._FREE[target]
    with torch.inference_mode():
        for layer in passes.cache.layers:
            layer.keys.fill_(torch.nan)
            layer.values.fill_(torch.nan)
    assert decoder.generate(PROMPTS[0], **SETTINGS).tokens == expected


def test_graphs_are_compared_with_their_model_once_in_a_call(traced: None) -> None:
    """A module that is replaced is not noticed by the call in which that happens, but by the next one."""
    target = target_model()
    drafter = Medusa.from_target(target, num_heads=1).double().eval()
    parent, name = target.model.layers[0].mlp, "act_fn"
    decoder = SpeculativeDecoder(target, drafter, compile=True)
    settings = {"max_new_tokens": 16, "eos_token_id": None}
    own, expected = getattr(parent, name), decoder.generate(PROMPTS[0], **settings).tokens
    rounds = 0

    def replace_part(tokens: list[int], record: object) -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 3:
            setattr(parent, name, torch.nn.ReLU())

    assert decoder.generate(PROMPTS[0], on_tokens=replace_part, **settings).tokens == expected
    assert rounds > 4
    with pytest.raises(ConfigError, match=r"compile=True: torch\.compile fails"):  # see `_no_second_graph`
        decoder.generate(PROMPTS[0], **settings)
    setattr(parent, name, own)
    assert decoder.generate(PROMPTS[0], **settings).tokens == expected


def test_passes_are_freed_with_their_model(traced: None) -> None:
    target = target_model()
    SpeculativeDecoder(target, compile=True).generate(PROMPTS[0], **SETTINGS)
    gone = weakref.ref(target)
    del target
    gc.collect()
    assert gone() is None


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="compile=True with an encoder-decoder target"):
        SpeculativeDecoder(make_t5(1), compile=True)
    bloom = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2)).eval()
    with pytest.raises(ConfigError, match="model_type='bloom': it takes its masks and positions from indices"):
        SpeculativeDecoder(bloom, compile=True)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"compile=True without a C\+\+ compiler"):
        SpeculativeDecoder(target_model(), compile=True)
