"""Two examples of every command, shown at the end of its `--help`."""

import typer

EXAMPLES = {
    "quickstart": ("", "--out runs/first"),
    "train": ("quickstart/mtp", "eagle3/any_prompts target.model=Qwen/Qwen3-8B data.prompts=prompts.jsonl"),
    "memory": ("eagle3/any_prompts --on rtx4090", "eagle3/any_prompts target.dtype=bfloat16 --processes 8 --sharded"),
    "generate": ('"def main(" --target embedded --drafter suffix', '"Why?" --target Qwen/Qwen3-8B --dtype bfloat16'),
    "demo": ("--target embedded --drafter suffix", "--target embedded --drafter runs/quickstart/mtp --port 8000"),
    "env": ("", "> environment.txt"),
    "recipes": ("", "draft_model/any_prompts > recipe.yaml"),
    "data preview": (
        "prompts.jsonl --target embedded",
        "HuggingFaceH4/ultrachat_200k --split train_sft --target Qwen/Qwen3-8B",
    ),
    "data regenerate": (
        "prompts.jsonl --target Qwen/Qwen3-8B --out answers.jsonl",
        "prompts.jsonl --target Qwen/Qwen3-8B --out answers.jsonl --server http://localhost:8000 --model qwen",
    ),
    "data prepare": ("quickstart/mtp", "eagle3/any_prompts data.prompts=prompts.jsonl"),
    "data server": ("gpt-oss-120b/eagle3_server", "qwen3-30b-a3b/eagle3_server teacher.server.folder=/mnt/states"),
    "eval": (
        "--target embedded --drafter runs/quickstart/mtp --drafter suffix",
        "--target embedded --drafter mine=runs/mine --prompts heldout.jsonl --gamma 3 --gamma 5",
    ),
    "eval server": (
        "http://localhost:8000 --target Qwen/Qwen3-8B --model qwen",
        "http://localhost:8000 --target Qwen/Qwen3-8B --model qwen --baseline http://localhost:8001",
    ),
    "eval compare": ("runs/eval", "runs/eval runs/eval-2"),
    "check": ("--target embedded --drafter suffix", "--target Qwen/Qwen3-8B --server http://localhost:8000"),
    "forecast": (
        "--target embedded --drafter runs/quickstart/mtp",
        "--target embedded --drafter runs/quickstart/mtp --batch-size 1 --batch-size 8",
    ),
    "export": (
        "runs/mine --target Qwen/Qwen3-8B --format vllm --out exported",
        "runs/mine --target model.gguf --format gguf --out exported",
    ),
    "import": (
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --target meta-llama/Llama-3.1-8B-Instruct --out imported",
        "native-mtp --target Qwen/Qwen3.5-9B --out imported",
    ),
    "push": ("runs/mine user/name --eval runs/eval --dry-run", "runs/mine user/name --eval runs/eval --licence mit"),
}
"""The words after a command, by its name."""


def add_examples(app: typer.Typer, before: str = "") -> None:
    """Show its examples at the end of the help of each command."""
    for command in app.registered_commands:
        name = command.name or getattr(command.callback, "__name__", "")
        command.epilog = _shown(f"{before}{name}")
    for group in app.registered_groups:
        group.epilog = _shown(str(group.name)) if group.name in EXAMPLES else None
        if group.typer_instance is not None:
            add_examples(group.typer_instance, f"{group.name} ")


def _shown(name: str) -> str:
    lines = (f"draftsmith {name} {words}".rstrip() for words in EXAMPLES[name])
    return "\n\n".join(("Examples:", *lines))
