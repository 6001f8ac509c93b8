"""The pointer cache keeps what transformers' own cache keeps, and rolling back is as if the tokens had never been."""

import torch
from transformers import DynamicCache, LlamaForCausalLM

from draftsmith.decode.cache import PointerCache, causal_mask


def test_same_logits_as_the_dynamic_cache(tiny_target: LlamaForCausalLM) -> None:
    ids = torch.randint(2, 64, (1, 20), generator=torch.Generator().manual_seed(0))
    ours, theirs = PointerCache(tiny_target.config, 32), DynamicCache(config=tiny_target.config)
    with torch.inference_mode():
        for start, end in ((0, 9), (9, 10), (10, 15), (15, 20)):
            chunk = ids[:, start:end]
            mask = causal_mask(start, end - start, torch.device("cpu"))
            positions = torch.arange(start, end)[None]
            a = tiny_target(chunk, past_key_values=ours, attention_mask=mask, position_ids=positions).logits
            b = tiny_target(chunk, past_key_values=theirs).logits
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_rollback_forgets_and_storage_stays(tiny_target: LlamaForCausalLM) -> None:
    ids = torch.arange(2, 12)[None]
    cache = PointerCache(tiny_target.config, 32)
    with torch.inference_mode():
        tiny_target(ids, past_key_values=cache)
        storage = cache.layers[0].keys.data_ptr()
        cache.rollback(6)
        assert cache.length == 6
        positions = torch.arange(6, 7)[None]
        again = tiny_target(torch.tensor([[40]]), past_key_values=cache, position_ids=positions).logits
        fresh = tiny_target(torch.cat([ids[:, :6], torch.tensor([[40]])], 1)).logits[:, -1:]
    assert cache.layers[0].keys.data_ptr() == storage
    torch.testing.assert_close(again, fresh, atol=1e-5, rtol=1e-5)


def test_mask_shows_each_token_what_stands_before_it() -> None:
    mask = causal_mask(2, 3, torch.device("cpu"))
    expected = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert mask[0, 0].int().tolist() == expected
    assert causal_mask(7, 1, torch.device("cpu")) is None
