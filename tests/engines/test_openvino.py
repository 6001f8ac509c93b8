"""OpenVINO GenAI in this process, with a draft model from its GGUF file (docs/guide/serve.md)."""

from typing import Any

import numpy as np
import pytest
from engines.workshop import COUNT, LENGTH, TOKENS, Workshop

from draftsmith.eval.prompts import load_prompts

pytestmark = pytest.mark.engine

EXACT = {"INFERENCE_PRECISION_HINT": "f32"}


def test_a_draft_model_drafts_as_in_a_local_measurement(workshop: Workshop) -> None:
    genai = pytest.importorskip("openvino_genai")
    openvino = pytest.importorskip("openvino")
    pair = workshop.pair("draft_model")
    drafter = pair.exported("gguf", "float16").folder
    genai.LLMPipeline(str(drafter / "drafter.gguf"), "CPU", enable_save_ov_model=True)  # writes openvino_model.xml
    draft = genai.draft_model(str(drafter), "CPU", **EXACT)
    pipeline = genai.LLMPipeline(str(pair.target_file("float16")), "CPU", draft_model=draft, **EXACT)
    options: dict[str, Any] = {"max_new_tokens": TOKENS, "num_assistant_tokens": LENGTH, "do_sample": False}
    config = genai.GenerationConfig(**options, apply_chat_template=False)
    tokens = passes = 0
    for prompt in load_prompts(pair.prompts, pair.loaded.tokenizer, count=COUNT):
        ids = prompt.input_ids
        values = openvino.Tensor(np.array([ids], dtype=np.int64))
        ones = openvino.Tensor(np.ones((1, len(ids)), dtype=np.int64))
        found = pipeline.generate(genai.TokenizedInputs(values, ones), config)
        pair.require_greedy(ids, found.tokens[0])
        committed = found.extended_perf_metrics.main_model_metrics.raw_metrics.m_batch_sizes
        assert sum(committed) == len(found.tokens[0]), "a pass commits the accepted tokens and one more"
        tokens, passes = tokens + sum(committed[1:]), passes + len(committed) - 1
    assert tokens / passes == pytest.approx(pair.local["tau"], rel=0.03)
