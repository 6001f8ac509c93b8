"""A target divided among processes computes what the whole target computes: two groups of two gloo processes."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import make_llama
from forked import run_group
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, T5Config
from transformers import Qwen3MoeConfig as Config
from transformers import Qwen3MoeForCausalLM as Experts

from draftsmith.distill.load_target import load_target
from draftsmith.distill.teacher import Batch, OnlineTeacher
from draftsmith.distill.tensor_parallel import (
    GroupTeacher,
    group_of,
    is_supported,
    require_same_input,
    whole_without_weights,
)
from draftsmith.errors import ConfigError
from draftsmith.heads import HEADS
from draftsmith.heads.hidden_states import document_numbers
from draftsmith.provenance import model_fingerprints

pytestmark = pytest.mark.skipif(not is_supported(), reason="this version of transformers divides no targets in groups")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
"""Sums of float32 in another order; states are of the order of 1."""
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64}
LAYERS = (1, 2)


def require_parts(rank: int, place: Path) -> None:
    """In one of four processes: compare the target of its group with the whole one."""
    parts = load_target(str(place), tensor_parallel=2, device="cpu").model
    whole = load_target(str(place), device="cpu").model
    held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parts.parameters())
    assert held < 0.7 * sum(p.numel() for p in whole.parameters())
    assert parts.get_output_embeddings().weight.shape == whole.get_output_embeddings().weight.shape
    assert model_fingerprints(parts) == model_fingerprints(whole)
    assert dist.get_process_group_ranks(group_of(parts)) == ([0, 1] if rank < 2 else [2, 3])

    ours, theirs = GroupTeacher(OnlineTeacher(parts, LAYERS), group_of(parts)), OnlineTeacher(whole, LAYERS)
    generator = torch.Generator().manual_seed(rank)
    for packed in (False, True):  # each process has rows of another length
        ids_BT = torch.randint(2, 60, (2, 9 + rank), generator=generator)
        seen_BT = torch.ones_like(ids_BT)
        documents_BT = document_numbers([[4, 3], [5]], 9 + rank) if packed else None
        given = {"input_ids_BT": ids_BT, "attention_mask_BT": seen_BT, "mask_BT": ids_BT > 30}
        mine, wanted = (teacher.signals(Batch(**given, documents_BT=documents_BT)) for teacher in (ours, theirs))
        for name, value in vars(wanted).items():
            torch.testing.assert_close(getattr(mine, name), value, **CLOSE)

    drafters = [HEADS["draft_model"].from_target(model, init="target_layers", keep=[1]) for model in (parts, whole)]
    weights = [drafter.state_dict() for drafter in drafters]
    assert all(torch.equal(weights[0][name], value) for name, value in weights[1].items())
    require_same_input(torch.tensor([[5, 6]]), group_of(parts))
    for read in (torch.tensor([[5, 6 + rank]]), torch.tensor([[5 + rank, 6 - rank]]), torch.zeros(1, rank + 1)):
        with pytest.raises(RuntimeError, match="different tokens"):
            require_same_input(read, group_of(parts))


def test_groups_compute_what_one_process_computes(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Hidden states, features, packed rows, fingerprints and drafters of the target's layers."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    llama = make_llama(**{**SIZES, **heads}, tie_word_embeddings=True, attention_bias=True)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    torch.manual_seed(0)
    experts = Experts(Config(vocab_size=64, head_dim=8, initializer_range=0.2, **SIZES, **heads, **experts))
    for name, model in {"llama": llama, "experts": experts}.items():
        model.save_pretrained(tmp_path / name)
        tiny_tokenizer.save_pretrained(tmp_path / name)

    def compare(rank: int) -> None:
        for name in ("llama", "experts"):
            require_parts(rank, tmp_path / name)

    run_group(compare, 4, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 1}, "its num_key_value_heads=1; expected a divisor of 1"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "expected a decoder-only model"),
        ({"model_type": "hrm_text"}, "transformers divides its fused matrices wrongly"),
        ({"model_type": "gpt2"}, "GPT2LMHeadModel has no tensor-parallel plan; expected target.sharded"),
    ],
)
def test_targets_that_cannot_be_divided_are_refused(changes: dict[str, object], message: str) -> None:
    config = make_llama().config
    if changes.get("model_type") == "gpt2":
        config = AutoConfig.for_model("gpt2", n_layer=1, n_embd=8, n_head=2, vocab_size=64)
    else:
        config.update(changes)
    with pytest.raises(ConfigError, match=f"target.tensor_parallel=2 with a target of model_type=.*{message}"):
        whole_without_weights(AutoModelForCausalLM, config, 2)
    with pytest.raises(ConfigError, match="model_type='t5'; expected a decoder-only model"):
        whole_without_weights(AutoModelForCausalLM, T5Config(), 2)


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"target\.tensor_parallel=2 with target=.*, an adapter; expected 1"):
        load_target(str(tmp_path), tensor_parallel=2)
