"""Writes llama_logits.json: what transformers computes for tiny Llama checkpoints.

Run once, with transformers installed: `python tests/data/make_llama_logits.py`. The tests read the
result only.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from tandem.testing.tiny import write_tiny_llama
from tandem.testing.variants import add_biases, edit_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"seed": 1},
    "tied": {"seed": 2, "tie_embeddings": True},
    "biased": {"seed": 3, "biases": True},
    "odd head": {"seed": 4, "hidden": 60, "num_heads": 3, "num_kv_heads": 1},
    "llama3 rope": {"seed": 5, "rope_scaling": LLAMA3},
    "linear rope": {"seed": 6, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
}
NUM_TOKENS = 150
SHOWN = (0, 15, 16, 149)


def write_case(folder: Path, case: dict[str, Any]) -> None:
    sizes = {k: v for k, v in case.items() if k not in ("biases", "rope_scaling")}
    write_tiny_llama(folder, **sizes)
    if "rope_scaling" in case:
        edit_config(folder, rope_scaling=case["rope_scaling"])
    if case.get("biases"):
        add_biases(folder)


def main() -> None:
    token_ids = [(7 * i * i + 3 * i) % 256 for i in range(NUM_TOKENS)]
    cases = []
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            write_case(Path(folder), case)
            model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
            with torch.inference_mode():
                logits = model(torch.tensor([token_ids])).logits[0]
        shown = {str(at): [round(x, 5) for x in logits[at].tolist()] for at in SHOWN}
        cases.append({"name": name, **case, "logits": shown})
    source = (
        f"transformers {transformers.__version__} LlamaForCausalLM, torch {torch.__version__}, "
        "float32, checkpoints by tandem.testing; made by make_llama_logits.py"
    )
    path = Path(__file__).with_name("llama_logits.json")
    path.write_text(json.dumps({"source": source, "token_ids": token_ids, "cases": cases}) + "\n")


if __name__ == "__main__":
    main()
