"""The plot of how drafters were trained."""

from typing import Any

import matplotlib.pyplot as plt

from draftsmith.eval.drawing import COLOURS, STYLE, Plot


def plot_training(runs: dict[str, list[dict[str, Any]]]) -> Plot:
    """Loss and teacher-forced alpha a step on the left, measured tau on held-out prompts on the right."""
    title = "Training: agreement with the target, and what it is worth when decoding"
    with plt.rc_context(STYLE):
        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.8))
        for number, (name, metrics) in enumerate(runs.items()):
            colour = COLOURS[number % len(COLOURS)]
            steps = [row for row in metrics if "loss" in row]
            evaluations = [row for row in metrics if "evaluation" in row]
            left.plot([row["step"] for row in steps], [row["loss"] for row in steps], color=colour, label=name)
            for k in range(len(steps[0]["alpha"]) if steps else 0):
                label = name if k == 0 else None
                alphas = [row["alpha"][k] for row in steps]
                middle.plot([row["step"] for row in steps], alphas, color=colour, alpha=1 / (1 + 0.7 * k), label=label)
            taus = [row["evaluation"]["tau"] for row in evaluations]
            right.plot([row["step"] for row in evaluations], taus, "-o", color=colour, label=name)
        for axis, label in (
            (left, "loss (nats per token)"),
            (middle, "alpha on target samples"),
            (right, "measured tau"),
        ):
            axis.set_xlabel("step")
            axis.set_ylabel(label)
            axis.legend(fontsize=8)
        left.set_yscale("log")
        middle.set_title("fainter: later draft positions", fontsize=9)
        right.set_title("held-out prompts, decoded", fontsize=9)
        figure.suptitle(title, fontsize=11)
        figure.tight_layout()
    plt.close(figure)
    return Plot("training", title, figure)
