"""Drafters of which config, weights, index or tokenizer are damaged; and commands that read them."""

import json
import struct
from contextlib import suppress
from pathlib import Path

from hypothesis import strategies as st

from fuzz.damage import JUNK, TEXTS, as_json, broken, changed
from fuzz.material import KINDS, Material
from fuzz.running import Case

READ = ["num_labels", "id2label", "layer_types", "sliding_window", "rope_scaling", "rope_parameters", "attention_bias"]
READ += ["is_encoder_decoder", "architectures", "auto_map", "quantization_config", "dtype", "transformers_version"]
READ += ["tie_word_embeddings", "initializer_range", "attention_dropout", "use_cache", "num_local_experts", "head_dim"]
"""Keys of a config that transformers reads, also where a file does not hold them."""


def _damage_drafter(draw: st.DrawFn, files: dict[str, bytes]) -> None:
    name = draw(st.sampled_from(["d/config.json"] * 4 + ["d/model.safetensors"] * 2 + sorted(files)))
    content = files.get(name)
    kind = draw(st.sampled_from(["changed", "changed", "read", "broken", "gone", "index"]))
    if name.endswith(".json") and kind == "changed" and content is not None:
        try:
            files[name] = as_json(draw(changed(json.loads(content))))
        except ValueError:
            files[name] = draw(broken(content))
    elif name.endswith(".safetensors") and kind == "changed" and content is not None:
        files[name] = draw(other_header(content))
    elif kind == "read" and (content := files.get("d/config.json")) is not None:
        with suppress(ValueError, TypeError):  # what an earlier change left is no mapping
            files["d/config.json"] = as_json(json.loads(content) | {draw(st.sampled_from(READ)): draw(JUNK)})
    elif kind == "gone":
        files.pop(name, None)
    elif kind == "index":
        names = draw(
            st.one_of(JUNK, st.dictionaries(TEXTS, st.sampled_from(["model.safetensors", "../x.safetensors", ""])))
        )
        files["d/model.safetensors.index.json"] = as_json({"metadata": {}, "weight_map": names})
    elif content is not None:
        files[name] = draw(broken(content))


@st.composite
def other_header(draw: st.DrawFn, content: bytes) -> bytes:
    """Weights whose header is changed, or says another length."""
    try:
        (size,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + size])
    except (ValueError, struct.error):
        return draw(broken(content))
    if draw(st.booleans()):
        new = as_json(draw(changed(header)))
        return struct.pack("<Q", len(new)) + new + content[8 + size :]
    return struct.pack("<Q", draw(st.sampled_from([0, 1, size - 1, 2**40, 2**63]))) + content[8:]


@st.composite
def drafter_cases(draw: st.DrawFn, material: Material) -> Case:
    kind = draw(st.sampled_from(sorted(KINDS)))
    files: dict[str, bytes] = dict(material.files(Path(material.drafter(kind)), "d"))
    for _ in range(draw(st.integers(1, 2))):
        _damage_drafter(draw, files)
    target = ["--target", material.target]
    formats = {"draft_model": "transformers"}
    arguments = draw(
        st.sampled_from(
            [
                ["generate", "abc", *target, "--drafter", "d", "--max-new-tokens", "4"],
                ["generate", "abc", *target, "--drafter", "hybrid:drafter=d", "--max-new-tokens", "4"],
                ["import", "d", *target, "--out", "out"],
                ["export", "d", *target, "--out", "out", "--format", formats.get(kind, "vllm")],
                ["train", str(material.root / f"{kind}.yaml"), "output=out", "start_from=d", "train.steps=1"],
                ["memory", str(material.root / "draft_model.yaml"), "drafter.model=d"],
                ["train", str(material.root / "draft_model.yaml"), "output=out", "drafter.model=d", "train.steps=1"],
            ]
        )
    )
    return Case("drafter", arguments, files)
