"""The online teacher: the target's states, without logits that nothing reads."""

import torch
from conftest import make_llama
from torch import Tensor, nn

from draftsmith.distill.teacher import Batch, OnlineTeacher


def test_the_lm_head_computes_no_position() -> None:
    target = make_llama()
    teacher, computed = OnlineTeacher(target), list[Tensor]()

    def record(_: nn.Module, arguments: object, logits: Tensor) -> None:
        computed.append(logits)

    target.lm_head.register_forward_hook(record)
    ids_BT = torch.randint(2, 64, (3, 7), generator=torch.Generator().manual_seed(0))
    seen_BT = torch.ones_like(ids_BT)
    signals = teacher.signals(Batch(ids_BT, seen_BT, seen_BT.bool()))
    assert [logits.numel() for logits in computed] == [0]
    expected_BTV = target(ids_BT).logits
    torch.testing.assert_close(teacher.lm_head(signals.hidden_BTH), expected_BTV, rtol=1e-5, atol=1e-5)
