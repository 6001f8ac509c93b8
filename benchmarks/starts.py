"""The loss of untrained drafters by family and target, and that of token frequencies (heads/initial_weights.py).

    python benchmarks/starts.py --targets embedded FOLDER --families eagle3 mtp --rows 32
    python benchmarks/starts.py --targets FOLDER --draft-vocab 8192 --rows 8 --response 64    # a large vocabulary

Both losses are KL divergences from the target in nats, averaged over the draft positions, on texts that the target
sampled from its BOS at T=1 and that the start was not fitted to. Options of the drafters are those of `*/embedded`.
"""

import argparse
import time

import torch
from torch import Tensor

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.distill.load_target import LoadedTarget, load_target
from draftsmith.distill.objective import Objective
from draftsmith.distill.teacher import Batch, OnlineTeacher
from draftsmith.heads import HEADS
from draftsmith.heads.base import TeacherSignals, TrainableDrafter
from draftsmith.heads.initial_weights import fit_start, frequencies, input_scales
from draftsmith.heads.lm_head import most_frequent
from draftsmith.train.recipe import load_recipe

FAMILIES = ("medusa", "eagle", "hass", "eagle3", "mtp", "peagle", "dflash", "dspark")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=["embedded"], help="names or folders")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--rows", type=int, default=32, help="texts that the start is fitted to; as many are measured")
    parser.add_argument("--response", type=int, default=96, help="tokens of a text")
    parser.add_argument("--draft-vocab", type=int)
    return parser.parse_args()


def sampled(target: LoadedTarget, rows: int, tokens: int) -> Tensor:
    """Return texts of the target [rows, tokens], from BOS at T=1; EOS does not end them."""
    bos = target.tokenizer.bos_token_id
    decoder = SpeculativeDecoder(target.model)
    options = {"max_new_tokens": tokens - 1, "temperature": 1.0, "eos_token_id": None, "seeds": 0}
    return torch.tensor([[bos, *output.tokens] for output in decoder.generate_batch([[bos]] * rows, **options)])


def signals_of(teacher: OnlineTeacher, ids_BT: Tensor) -> TeacherSignals:
    mask_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    mask_BT[:, -1] = False
    return teacher.signals(Batch(ids_BT, torch.ones_like(ids_BT), mask_BT))


@torch.no_grad()
def mean_loss(drafter: TrainableDrafter, teacher: OnlineTeacher, signals: TeacherSignals) -> float:
    """Return the KL divergence, averaged over the draft positions."""
    torch.manual_seed(0)
    sums = Objective(position_decay=1.0, confidence_weight=0.0)(drafter.unroll(signals), signals, teacher.lm_head)
    return float(sums.loss / sums.count_K.sum())


@torch.no_grad()
def constant_loss(teacher: OnlineTeacher, signals: TeacherSignals, q_V: Tensor, tokens_D: Tensor | None) -> float:
    """Return the KL divergence of a constant distribution, of the draft vocabulary alone where there is one."""
    total = 0.0
    hidden_NH = signals.hidden_BTH[signals.mask_BT]
    for hidden_nH in hidden_NH.split(64):
        p_nV = teacher.lm_head(hidden_nH).float().softmax(-1)
        p_nD, q_D = (p_nV, q_V) if tokens_D is None else (p_nV[:, tokens_D], q_V[tokens_D] / q_V[tokens_D].sum())
        within_nD = p_nD / p_nD.sum(-1, keepdim=True)
        total += float((torch.xlogy(p_nD, within_nD) - p_nD * q_D.log()).sum())
    return total / len(hidden_NH)


def main() -> None:
    options = arguments()
    for name in options.targets:
        target = load_target(name)
        texts_BT = sampled(target, 2 * options.rows, options.response)
        counts_V = texts_BT[:, 1:].flatten().bincount(minlength=target.model.get_output_embeddings().weight.shape[0])
        for family in options.families:
            recipe = load_recipe(f"{family}/embedded")
            chosen = recipe.drafter_options()
            if options.draft_vocab is not None:
                chosen["draft_vocabulary"] = most_frequent(counts_V, options.draft_vocab)
            torch.manual_seed(0)
            drafter = HEADS[recipe.drafter.type].from_target(target.model, **chosen)
            teacher, q_V = OnlineTeacher(target.model, drafter.needs.layers), frequencies(counts_V)
            first, others = (signals_of(teacher, part_BT) for part_BT in texts_BT.chunk(2))
            tokens_D = None if drafter.draft_vocabulary is None else drafter.draft_vocabulary.tokens_D
            constant, before = constant_loss(teacher, others, q_V, tokens_D), mean_loss(drafter, teacher, others)
            started = time.perf_counter()
            fit_start(drafter.eval(), first, q_V)
            sizes = [f"{size.total:.0f}" for size in input_scales(drafter, first).values()]
            seconds, after = time.perf_counter() - started, mean_loss(drafter, teacher, others)
            print(
                f"{name} {family}: {after:.2f} ({before:.2f} before the fit); frequencies {constant:.2f}; "
                f"sums of inputs {', '.join(sizes) or 'not measured'}; {seconds:.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
