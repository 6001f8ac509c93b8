"""Seconds of an engine for answers and their states: in one request, and in two.

    python benchmarks/served_answers.py --url http://127.0.0.1:8000 --folder /dev/shm/states --target FOLDER

The engine runs with the printed command of `draftsmith data server`, and `--no-enable-prefix-caching`. Both ways answer
the same prompts, pieces of the documentation, in alternating groups; medians over the groups are printed.
"""

import argparse
import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

import httpx
from transformers import AutoTokenizer

from draftsmith.distill.data_section import TeacherServerSection
from draftsmith.distill.server.transport import Transport, opened

OUTPUTS = {"kv_transfer_params": {"include_output_tokens": True}}


async def states_of(client: httpx.AsyncClient, transport: Transport, body: dict[str, Any]) -> list[int]:
    """Send a request, read and delete its states, and return the tokens of the answer."""
    answer = await client.post("/v1/completions", json={"model": "target", "return_token_ids": True, **body})
    payload = answer.raise_for_status().json()
    named = transport.named(payload["kv_transfer_params"])
    await transport.read(named)
    await transport.delete(named)
    return payload["choices"][0]["token_ids"]


async def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    transport = opened(TeacherServerSection(urls=options.url, folder=options.folder))
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    text = "".join(file.read_text() for file in sorted(Path("docs").rglob("*.md")))
    ids = tokenizer(text).input_ids
    size, number = options.prompt_tokens, options.group
    seconds: dict[str, list[float]] = {"one request": [], "two requests": []}
    async with httpx.AsyncClient(base_url=options.url, timeout=600, trust_env=False) as client:

        async def one(prompt: list[int]) -> None:
            await states_of(client, transport, {**asked, "prompt": prompt, **OUTPUTS})

        async def two(prompt: list[int]) -> list[int]:
            return [*prompt, *await states_of(client, transport, {**asked, "prompt": prompt})]

        asked = {"max_tokens": options.answer_tokens, "temperature": 1.0, "seed": 0, "ignore_eos": True}
        for group in range(options.groups + 1):
            prompts = [ids[i * size : (i + 1) * size] for i in range(group * number, (group + 1) * number)]
            for way in list(seconds)[:: 1 if group % 2 else -1]:
                started = time.perf_counter()
                if way == "one request":
                    await asyncio.gather(*map(one, prompts))
                else:
                    rows = await asyncio.gather(*map(two, prompts))
                    again = ({"prompt": row, "max_tokens": 1} for row in rows)
                    await asyncio.gather(*(states_of(client, transport, body) for body in again))
                if group > 0:  # the first one allocates
                    seconds[way].append(time.perf_counter() - started)
    transport.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--group", type=int, default=16, help="prompts at a time")
    parser.add_argument("--groups", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--answer-tokens", type=int, default=64)
    seconds = asyncio.run(measure(parser.parse_args()))
    medians = {way: statistics.median(each) for way, each in seconds.items()}
    for way, median in medians.items():
        print(f"{way}: {median:.2f} s ({min(seconds[way]):.2f} to {max(seconds[way]):.2f})")
    print(f"ratio {medians['one request'] / medians['two requests']:.3f}")


if __name__ == "__main__":
    main()
