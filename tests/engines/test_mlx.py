"""mlx-lm with a draft model in transformers' format, which it loads as it is (docs/guide/serve.md).

`$MLX_PYTHON` is the Python that has mlx-lm; on Linux it computes on the CPU.
"""

import json
import os
import subprocess

import pytest
from engines.workshop import COUNT, LENGTH, TOKENS, Workshop

from draftsmith.distill.embedded import embedded_target
from draftsmith.eval.prompts import PromptRows

pytestmark = pytest.mark.engine

SCRIPT = """
import json, sys
import mlx.core as mx
from mlx_lm.generate import speculative_generate_step
from mlx_lm.utils import load

asked = json.load(sys.stdin)
(target, _), (draft, _) = load(asked["target"]), load(asked["draft"])
for model in (target, draft):
    model.set_dtype(mx.float32)
for prompt in asked["prompts"]:
    lengths = {"num_draft_tokens": asked["length"], "max_tokens": asked["tokens"]}
    rows = speculative_generate_step(mx.array(prompt), target, draft, **lengths)
    print(json.dumps([(int(token), bool(drafted)) for token, _, drafted in rows]))
"""


def test_a_draft_model_drafts_as_in_a_local_measurement(workshop: Workshop) -> None:
    python = os.environ.get("MLX_PYTHON")
    if python is None:
        pytest.skip("MLX_PYTHON is not set; expected the Python that has mlx-lm")
    pair, target = workshop.pair("draft_model"), str(embedded_target())
    folder = pair.exported("transformers", target=target).folder
    rows = PromptRows.read(pair.prompts).encode(pair.loaded.tokenizer, count=COUNT)
    prompts = [prompt.input_ids for prompt in rows]
    asked = {"target": target, "draft": str(folder), "prompts": prompts, "length": LENGTH, "tokens": TOKENS}
    done = subprocess.run([python, "-c", SCRIPT], input=json.dumps(asked), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tokens = passes = 0
    ends = pair.loaded.tokenizer.eos_token_id
    for prompt, line in zip(prompts, done.stdout.splitlines(), strict=True):
        answer = json.loads(line)
        places = [place for place, (token, _) in enumerate(answer) if token == ends]
        answer = answer[: places[0] + 1] if places else answer
        pair.require_greedy(prompt, [token for token, _ in answer])
        tokens, passes = tokens + len(answer), passes + sum(not drafted for _, drafted in answer)
    assert tokens / passes == pytest.approx(pair.local["tau"], rel=0.03)
