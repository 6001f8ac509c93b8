"""p and q on targets that scale, cap or shift their logits, compared with the logits of the model itself in fp64."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import make_llama
from datasets import Dataset
from recording import decoded_logits
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

from draftsmith import SpeculativeDecoder
from draftsmith.distill.hidden_state_cache import CachedTeacher, SignalCache
from draftsmith.distill.objective import Objective
from draftsmith.distill.teacher import Batch, OnlineTeacher
from draftsmith.errors import ConfigError
from draftsmith.heads import HEADS
from draftsmith.heads.lm_head import logits_head, logits_map
from draftsmith.train.step import AgreementStep, Last

TINY: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128}
TINY |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "initializer_range": 0.3}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
GEMMA3N = {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
GEMMA3N |= {"intermediate_size": [32] * 4, "activation_sparsity_pattern": None, "layer_types": ["full_attention"] * 4}
GEMMA4 = {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "global_head_dim": 16}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma2ForCausalLM": ("Gemma2Config", {"final_logit_softcapping": 2.0}),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", {"final_logit_softcapping": 2.0}),
    "Gemma3nForCausalLM": ("Gemma3nTextConfig", {"final_logit_softcapping": 2.0, **GEMMA3N}),
    "Gemma4ForCausalLM": ("Gemma4TextConfig", {"final_logit_softcapping": 2.0, **GEMMA4}),
    "NanoChatForCausalLM": ("NanoChatConfig", {"final_logit_softcapping": 2.0}),
    "RecurrentGemmaForCausalLM": ("RecurrentGemmaConfig", {"logits_soft_cap": 0.5, "lru_width": 32}),
    "CohereForCausalLM": ("CohereConfig", {"logit_scale": 0.3}),
    "Cohere2ForCausalLM": ("Cohere2Config", {"logit_scale": 0.3}),
    "GraniteForCausalLM": ("GraniteConfig", {"logits_scaling": 3.0, "residual_multiplier": 0.5}),
    "HyperCLOVAXForCausalLM": ("HyperCLOVAXConfig", {"logits_scaling": 3.0}),
    "FalconH1ForCausalLM": ("FalconH1Config", {"lm_head_multiplier": 0.3, **MAMBA}),
}
"""Models whose logits are not those of their lm_head."""
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "MiniCPM3ForCausalLM": ("MiniCPM3Config", {}),  # scales its states, not its logits
    "ModernBertDecoderForCausalLM": (
        "ModernBertDecoderConfig",
        {"bos_token_id": 2},
    ),  # a layer and a norm before the lm_head
    "LlamaForCausalLM": ("LlamaConfig", {}),
}


def target_of(name: str) -> PreTrainedModel:
    if not hasattr(transformers, name):
        pytest.skip(f"{name}: transformers {transformers.__version__} does not have it")
    torch.manual_seed(0)
    config, options = {**FAMILIES, **OTHERS}[name]
    model = getattr(transformers, name)(getattr(transformers, config)(**{**TINY, **options}))
    return model.double().eval().requires_grad_(False)


def batch() -> Batch:
    """Two rows of 9 and 6 tokens."""
    ids_BT = torch.randint(2, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    attention_BT = torch.ones_like(ids_BT)
    attention_BT[1, 6:] = 0
    return Batch(ids_BT, attention_BT, attention_BT.bool(), None, None, [0, 1], None)


def own_logits(model: PreTrainedModel, read: Batch) -> Tensor:
    """Return the model's own logits [N, V] at the trained positions."""
    return model(input_ids=read.input_ids_BT, attention_mask=read.attention_mask_BT).logits[read.mask_BT]


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_p_is_that_of_the_models_own_logits(name: str) -> None:
    target, read = target_of(name), batch()
    teacher = OnlineTeacher(target)
    hidden_NH = teacher.signals(read).hidden_BTH[read.mask_BT]
    expected_NV = own_logits(target, read)
    torch.testing.assert_close(teacher.lm_head(hidden_NH), expected_NV, rtol=1e-13, atol=1e-13)
    lm_head = target.get_output_embeddings()
    assert lm_head is not None
    distance = float((lm_head(hidden_NH).softmax(-1) - expected_NV.softmax(-1)).abs().max())
    assert (distance > 0.01) == (name in FAMILIES), "otherwise the operations after the lm_head do not matter here"


def test_p_of_an_encoder_decoder_model_with_a_bias() -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 64, "init_std": 0.3}
    target = transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes)).double().eval()
    bias = target.get_buffer("final_logits_bias")
    bias += torch.randn_like(bias)
    ids_BT = batch().input_ids_BT
    teacher, mask_BT = OnlineTeacher(target), torch.ones_like(ids_BT)
    hidden_BTH = teacher.signals(Batch(ids_BT, mask_BT, mask_BT.bool(), ids_BT.flip(1))).hidden_BTH
    expected_BTV = target(input_ids=ids_BT.flip(1), decoder_input_ids=ids_BT).logits
    torch.testing.assert_close(teacher.lm_head(hidden_BTH), expected_BTV, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    "name", ["Gemma2ForCausalLM", "Cohere2ForCausalLM", "GraniteForCausalLM", "FalconH1ForCausalLM"]
)
def test_the_loss_of_a_step_is_that_of_the_models_own_logits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Online, and with cached hidden states, which are stored in float32."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    target, read = target_of(name), batch()
    drafter, online = HEADS["medusa"].from_target(target, num_heads=1).double(), OnlineTeacher(target)
    rows = Dataset.from_list(
        [{"input_ids": read.input_ids_BT[0].tolist()}, {"input_ids": read.input_ids_BT[1, :6].tolist()}]
    )
    cache = SignalCache(target, rows, (), "float32")
    cache.build(range(cache.shards), online, lambda: None)
    losses = [
        AgreementStep(drafter, Objective("kl", draft_length=1), teacher)(read, 0.0, Last()).loss
        for teacher in (online, CachedTeacher(online, cache.read))
    ]
    logits_BTV = target(input_ids=read.input_ids_BT, attention_mask=read.attention_mask_BT).logits
    states_BTH = online.signals(read).hidden_BTH
    # Head 1 predicts the token after the next: its state at t is compared with p at t + 1.
    follows_BT = read.mask_BT[:, 1:]
    p_log = logits_BTV[:, 1:][follows_BT].log_softmax(-1)
    q_log = drafter.lm_heads[0](drafter.blocks[0](states_BTH))[:, :-1][follows_BT].log_softmax(-1)
    expected = (p_log.exp() * (p_log - q_log)).sum()
    torch.testing.assert_close(losses[0], expected)
    torch.testing.assert_close(losses[1], expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["eagle", "mtp", "dflash"])
@pytest.mark.parametrize("name", ["Gemma2ForCausalLM", "Cohere2ForCausalLM", "GraniteForCausalLM"])
def test_heads_with_the_targets_lm_head_draft_with_its_operations(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """q in decoding and in training is that of the target's lm_head and the operations after it."""
    in_float32 = Gemma2RMSNorm.forward  # where some CPUs add in an order that depends on the number of tokens

    def in_float64(norm: Gemma2RMSNorm, x: Tensor) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            return in_float32(norm, x)

    monkeypatch.setattr(Gemma2RMSNorm, "forward", in_float64)
    target = target_of(name)
    drafter = HEADS[kind].from_target(target, **({"block_size": 4} if kind == "dflash" else {})).double().eval()
    prompt, after = [5, 9, 33, 2, 11], [23, 60]
    decoded_V = decoded_logits(drafter, target, prompt, after)[0]
    ids_1T = torch.tensor([[*prompt, *after, 6]])
    mask_1T = torch.zeros_like(ids_1T, dtype=torch.bool)
    mask_1T[0, len(prompt) :] = True
    signals = OnlineTeacher(target, drafter.needs.layers).signals(Batch(ids_1T, torch.ones_like(ids_1T), mask_1T))
    entry = drafter.unroll(signals)[0]
    place = len(prompt)  # of the token that the target adds to the prompt before the first draft
    state_D = entry.states_ND[entry.places_N.tolist().index(place)]
    lm_head = target.get_output_embeddings()
    assert lm_head is not None
    plain_V = lm_head(state_D)
    expected_V = {
        "Gemma2ForCausalLM": torch.tanh(plain_V / 2) * 2,
        "Cohere2ForCausalLM": plain_V * 0.3,
        "GraniteForCausalLM": plain_V / 3,
    }[name]
    torch.testing.assert_close(entry.head(state_D), expected_V)
    torch.testing.assert_close(decoded_V, expected_V)


@pytest.mark.parametrize("kind", ["eagle", "hass", "mtp"])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma2ForCausalLM", "GraniteForCausalLM"])
def test_rows_of_all_tokens_are_the_lm_head(name: str, kind: str) -> None:
    """With a draft vocabulary of every token, loss and gradients are those of the whole lm_head, in fp64."""
    target, read = target_of(name), batch()
    made = []
    for vocabulary in ({}, {"draft_vocabulary": list(range(64))}):
        torch.manual_seed(2)
        drafter = HEADS[kind].from_target(target, **vocabulary).double().eval()
        teacher = OnlineTeacher(target, drafter.needs.layers)
        loss = AgreementStep(drafter, Objective("kl"), teacher)(read, 0.0, Last()).loss
        loss.backward()
        made.append({"loss": loss, **{part: weight.grad for part, weight in drafter.named_parameters()}})
    whole, rows = made
    assert all(value is not None for value in whole.values())
    torch.testing.assert_close(rows, whole, rtol=1e-9, atol=1e-12)


def test_other_lm_heads_start_with_the_scale() -> None:
    target = target_of("GraniteForCausalLM")
    lm_head = target.get_output_embeddings()
    assert lm_head is not None
    drafters = [HEADS[kind].from_target(target) for kind in ("medusa", "eagle3")]
    for own in (drafters[0].lm_heads[0], drafters[1].body.lm_head):
        torch.testing.assert_close(own.weight.double(), lm_head.weight / 3, rtol=1e-6, atol=1e-7)


def test_a_final_feature_is_the_input_of_the_lm_head() -> None:
    """MiniCPM3 divides its last hidden state before the lm_head, so EAGLE reads, predicts and drafts divided states."""
    target = target_of("MiniCPM3ForCausalLM")
    drafter = HEADS["eagle"].from_target(target).double().eval()
    signals = OnlineTeacher(target, drafter.needs.layers).signals(batch())
    assert logits_map(target).state_scale not in (1.0, None)
    torch.testing.assert_close(signals.features_BTF, signals.hidden_BTH)
    out = SpeculativeDecoder(target, drafter, draft_length=3).generate([5, 9, 33], max_new_tokens=12)
    assert out.tokens == SpeculativeDecoder(target).generate([5, 9, 33], max_new_tokens=12).tokens


def test_a_final_state_that_the_lm_head_does_not_read_is_refused() -> None:
    target = target_of("ModernBertDecoderForCausalLM")
    with pytest.raises(ConfigError, match="ModernBertDecoderForCausalLM: the input of the lm_head is no multiple"):
        OnlineTeacher(target, HEADS["eagle"].from_target(target).needs.layers)


class Transformed(LlamaForCausalLM):
    """A Llama with an operation after its lm_head."""

    def forward(self, *arguments: Any, **options: Any) -> CausalLMOutputWithPast:  # pyright: ignore
        output = super().forward(*arguments, **options)
        output.logits = self.transform(output.logits)
        return output

    def transform(self, logits_BTV: Tensor) -> Tensor:
        return torch.tanh(logits_BTV / 500) * 500


class Cubed(Transformed):
    def transform(self, logits_BTV: Tensor) -> Tensor:
        return logits_BTV**3


class ScaledByToken(Transformed):
    def transform(self, logits_BTV: Tensor) -> Tensor:
        return logits_BTV * torch.linspace(1, 1.01, logits_BTV.shape[-1])


class Masked(Transformed):
    """As Chameleon, which never generates image tokens."""

    def transform(self, logits_BTV: Tensor) -> Tensor:
        return logits_BTV.index_fill(-1, torch.tensor([3]), torch.finfo(logits_BTV.dtype).min)


@pytest.mark.parametrize("kind", [Cubed, ScaledByToken, Masked])
def test_logits_of_unknown_operations_are_refused(kind: type[Transformed]) -> None:
    target = kind(make_llama().config).eval()
    with pytest.raises(ConfigError, match=f"model {kind.__name__} transforms its logits after the lm_head in an"):
        OnlineTeacher(target)


@pytest.mark.parametrize(
    ("weight", "held"),
    [
        (torch.zeros(64 * 48 // 2, 1, dtype=torch.uint8), "weights of torch.uint8"),
        (torch.zeros(64, 48, dtype=torch.float8_e4m3fn), "weights of torch.float8_e4m3fn"),
        (None, "PackedHead without any"),
    ],
    ids=["4 bits, packed", "8 bits, scales apart", "other tensors"],
)
@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_a_quantized_lm_head_is_refused(kind: str, weight: Tensor | None, held: str) -> None:
    class PackedHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = None if weight is None else nn.Parameter(weight, requires_grad=False)

        def forward(self, states_BTH: Tensor) -> Tensor:
            return states_BTH.new_zeros(*states_BTH.shape[:-1], 64)

    target = make_llama(num_hidden_layers=4)
    target.set_output_embeddings(PackedHead())
    with pytest.raises(ConfigError, match=rf"LlamaForCausalLM has a quantized lm_head \({held}\); expected one in 16"):
        HEADS[kind].from_target(target)


def test_a_weak_cap_is_seen_in_half_precision() -> None:
    """No logit of this model shows the cap in bfloat16, and no key of its config names it."""
    target = Transformed(make_llama().config).bfloat16().eval()
    assert logits_map(target).cap == pytest.approx(500, rel=1e-12)
    assert logits_map(target).scale == 1
    assert logits_head(target) is not target.get_output_embeddings()
