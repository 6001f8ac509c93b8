"""Drafters compute states where training reads them, and nowhere else, with the loss and gradients of all positions."""

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from unit.heads.test_families import FAMILIES, make, target_model
from unit.heads.test_packing import OBJECTIVES, packed_and_apart, sums_and_gradients

from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.heads import Eagle3, read_positions
from draftsmith.heads.base import TeacherSignals
from draftsmith.heads.hidden_states import document_positions
from draftsmith.heads.read_positions import ReadPositions
from draftsmith.train.estimate.fake_run import Operations
from draftsmith.train.step import collate

WHOLE = ("draft_model", "dflash", "dspark")
"""Drafters that run a model over whole texts, or choose positions themselves."""
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def signals_of(mask_BT: Tensor, documents_BT: Tensor | None = None, layers: int = 1) -> TeacherSignals:
    hidden_BTH, features_BTF = (torch.randn(*mask_BT.shape, size, dtype=torch.float64) for size in (32, 32 * layers))
    ids_BT = torch.randint(2, 60, mask_BT.shape)
    return TeacherSignals(ids_BT, torch.ones_like(ids_BT), hidden_BTH, mask_BT, features_BTF, documents_BT=documents_BT)


def several_turns(teacher: OnlineTeacher) -> TeacherSignals:
    """A conversation whose answers are far apart, so that two runs of queries see the same keys, and a short one."""
    texts = [torch.randint(2, 64, (length,)).tolist() for length in (40, 9)]
    spans = [[[3, 6], [25, 29]], [[4, 9]]]
    rows = [{"input_ids": text, "spans": of_text} for text, of_text in zip(texts, spans, strict=True)]
    return teacher.signals(collate(Dataset.from_list(rows), [0, 1], torch.device("cpu")))


@pytest.mark.parametrize("name", [name for name in FAMILIES if not name.startswith(WHOLE)])
def test_the_loss_is_that_of_states_everywhere(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded rows and packed ones, with prompts, several spans and texts of one token."""
    target = target_model()
    drafter = make(name, target).double().eval()
    teacher = OnlineTeacher(target.double(), drafter.needs.layers)
    for signals in (*packed_and_apart(teacher), several_turns(teacher)):
        some, gradients = sums_and_gradients(drafter, signals, teacher.lm_head, OBJECTIVES["accepted_length"])
        with monkeypatch.context() as everywhere:
            everywhere.setattr(read_positions, "_trained", lambda given, _: torch.ones_like(given.mask_BT))
            every, expected = sums_and_gradients(drafter, signals, teacher.lm_head, OBJECTIVES["accepted_length"])
        assert some.count_K.tolist() == every.count_K.tolist()
        torch.testing.assert_close((some.loss, some.alpha_K), (every.loss, every.alpha_K), **EXACT)
        assert gradients.keys() == expected.keys()
        for key, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[key], **EXACT, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("length", [26, 30, 48])
def test_as_many_keys_as_queries_once_both_are_filled(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers after the first of an EAGLE-3 have states at queries only, and know them by their number."""
    target = target_model()
    drafter = Eagle3.from_target(target, layers=[1], num_hidden_layers=2).double().eval()
    for parameter in drafter.parameters():
        parameter.data.normal_(std=0.3)
    teacher = OnlineTeacher(target.double(), drafter.needs.layers)
    rows = [{"input_ids": torch.randint(2, 64, (length,)).tolist(), "spans": [[14, length]]}]
    signals = teacher.signals(collate(Dataset.from_list(rows), [0], torch.device("cpu")))
    read = ReadPositions(signals, drafter.train_steps)
    assert read.among_N is not None
    assert read.count != len(read.queries_N)
    some, gradients = sums_and_gradients(drafter, signals, teacher.lm_head, OBJECTIVES["kl"])
    monkeypatch.setattr(read_positions, "_trained", lambda given, _: torch.ones_like(given.mask_BT))
    every, expected = sums_and_gradients(drafter, signals, teacher.lm_head, OBJECTIVES["kl"])
    torch.testing.assert_close((some.loss, some.alpha_K), (every.loss, every.alpha_K), **EXACT)
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[key], **EXACT, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("steps", [1, 3, 40])
def test_the_positions(steps: int, packed: bool) -> None:
    """Against their definition, position by position."""
    torch.manual_seed(steps)
    mask_BT = torch.rand(3, 30) < 0.15
    mask_BT[1] = False
    documents_BT = (torch.rand(3, 30) < 0.2).cumsum(1) if packed else torch.zeros(3, 30, dtype=torch.long)
    signals = signals_of(mask_BT, documents_BT if packed else None)
    read = ReadPositions(signals, steps)

    def trained(row: int, t: int, k: int) -> bool:
        return t + k + 1 < 30 and bool(mask_BT[row, t + k + 1] & (documents_BT[row, t] == documents_BT[row, t + k + 1]))

    wanted = [(row, t) for row in range(3) for t in range(30) if any(trained(row, t, k) for k in range(steps))]
    assert read.queries_N[: len(wanted)].tolist() == [30 * row + t for row, t in wanted]
    for k in range(steps):
        places = read.towards(k + 1).tolist()
        same = [t + k + 1 < 30 and documents_BT[row, t] == documents_BT[row, t + k + 1] for row, t in wanted]
        expected = [30 * row + t + k + 1 if inside else -1 for (row, t), inside in zip(wanted, same, strict=True)]
        assert places == [*expected, *[-1] * (len(places) - len(wanted))]
    assert torch.equal(read.positions(read.first_X)[0], document_positions(documents_BT).flatten()[read.first_X])
    seen = {query: read.first_X[run.keys].tolist() for run in read.runs for query in range(*run.queries.indices(999))}
    assert sorted(seen) == list(range(len(wanted)))
    for number, (row, t) in enumerate(wanted):
        run = next(run for run in read.runs if run.queries.start <= number < run.queries.stop)
        keys = seen[number][: len(seen[number]) - (run.queries.stop - 1 - number)]
        begin = t - int(document_positions(documents_BT)[row, t])
        assert keys == [30 * row + place for place in range(begin, t + 1)]


@pytest.mark.parametrize("name", ["eagle3", "hass", "mtp", "peagle", "medusa"])
def test_prompts_and_padding_cost_keys_at_most(name: str) -> None:
    """With an eighth of the positions trained: in the first step keys and values of the others remain."""
    target = target_model()
    drafter = make(name, target).double().eval()

    def operations(trained: int) -> int:
        mask_BT = torch.zeros(2, 256, dtype=torch.bool)
        mask_BT[:, 255 - trained : 255] = True
        signals = signals_of(mask_BT, layers=len(drafter.needs.layers))
        with Operations() as counted, torch.no_grad():
            drafter.unroll(signals)
        return counted.total

    assert operations(32) < operations(255) / (2 if name == "hass" else 3)
