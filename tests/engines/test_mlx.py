"""mlx-lm with a draft model in transformers' format, which it loads as it is (docs/guide/serve.md).

`$MLX_PYTHON` is the Python that has mlx-lm; on Linux it computes on the CPU.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_llama
from engines.workshop import COUNT, LENGTH, TOKENS, Workshop

from draftsmith.distill.embedded import embedded_target
from draftsmith.eval.prompts import load_prompts
from draftsmith.heads.draft_model import DraftModel
from draftsmith.hub.export import export_drafter

pytestmark = pytest.mark.engine
SCALED = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 32}
LOGITS = """
import json, sys
import mlx.core as mx
from mlx_lm.utils import load_model
from pathlib import Path

model, _ = load_model(Path(sys.argv[1]))
print(json.dumps(model(mx.array([json.load(sys.stdin)]))[0].tolist()))
"""

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


def _python() -> str:
    """Return `$MLX_PYTHON`; skip the test where it is not set."""
    python = os.environ.get("MLX_PYTHON")
    if python is None:
        pytest.skip("MLX_PYTHON is not set; expected the Python that has mlx-lm")
    return python


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 500.0}, SCALED], ids=["base", "scaled"])
def test_positions_are_rotated_as_here(rope: dict[str, Any], tmp_path: Path) -> None:
    target = make_llama(rope_parameters=rope, initializer_range=0.2)
    drafter = DraftModel.from_target(target, init="target_layers").eval()
    out = export_drafter(drafter, target, "transformers", tmp_path / "out", target_name="org/target").folder
    ids = torch.arange(40) % target.config.vocab_size
    command = [_python(), "-c", LOGITS, str(out)]
    done = subprocess.run(command, input=json.dumps(ids.tolist()), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        ours = drafter.model(ids[None]).logits[0]
    # Two libraries in float32: logits of about 1 differ in the last digits.
    torch.testing.assert_close(torch.tensor(json.loads(done.stdout)), ours, rtol=1e-3, atol=1e-3)


def test_a_draft_model_drafts_as_in_a_local_measurement(workshop: Workshop) -> None:
    pair, target = workshop.pair("draft_model"), str(embedded_target())
    folder = pair.exported("transformers", target=target).folder
    rows = load_prompts(pair.prompts, pair.loaded.tokenizer, count=COUNT)
    prompts = [prompt.input_ids for prompt in rows]
    asked = {"target": target, "draft": str(folder), "prompts": prompts, "length": LENGTH, "tokens": TOKENS}
    done = subprocess.run([_python(), "-c", SCRIPT], input=json.dumps(asked), capture_output=True, text=True)
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
