"""How vLLM and SGLang are started with a drafter that was exported for them: what exports and cards print."""

import json
import shlex
from typing import Any

VLLM: dict[str, dict[str, Any]] = {
    "draft_model": {"method": "draft_model"},
    "medusa": {"method": "medusa"},
    "eagle3": {"method": "eagle3"},
    "peagle": {"method": "eagle3", "parallel_drafting": True},
    "dflash": {"method": "dflash"},
    "dspark": {"method": "dspark"},
    "mtp": {"method": "mtp"},
}
"""By type of drafter (DSpark's options make a dflash drafter one), what `--speculative-config` says of it."""
UNSERVED = ("mtp",)
"""Written for vLLM, and not served by it as it is: see docs/serving.md."""
SGLANG = {"draft_model": "STANDALONE", "eagle": "EAGLE", "hass": "EAGLE", "eagle3": "EAGLE3"}
"""By type of drafter, `--speculative-algorithm`."""


def vllm_type(kind: str, drafter: dict[str, Any]) -> str:
    """A key of `VLLM`, or a type that it has no method for; `drafter` is what the checkpoint's config says of it."""
    return "dspark" if kind == "dflash" and (drafter.get("markov_rank") or drafter.get("confidence_head")) else kind


def vllm_command(target: str, plan: dict[str, Any], folder: str, draft_length: int) -> str:
    plan = {**plan, "model": folder, "num_speculative_tokens": draft_length}
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(plan))}"


def sglang_command(target: str, algorithm: str, folder: str, draft_length: int, dtype: str | None = None) -> str:
    """A chain: SGLang counts the last committed token among the draft tokens."""
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm {algorithm} \\\n"
        f"  --speculative-draft-model-path {folder} --speculative-num-steps {draft_length} \\\n"
        f"  --speculative-eagle-topk 1 --speculative-num-draft-tokens {draft_length + 1}"
        + ("" if dtype is None else f" --dtype {dtype}")
    )
