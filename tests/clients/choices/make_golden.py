#!/usr/bin/env python3
"""Writes smollm2.json: the log likelihood that transformers gives to each answer of questions.jsonl.

    python3 tests/clients/choices/make_golden.py FOLDER      # FOLDER as deploy/fetch_smollm2.sh writes it

Needs transformers and torch, by hand. The sums are made twice from the weights in bfloat16: with activations in
float32, which is the reference, and in bfloat16, whose distance from it is the tolerance of the test.
"""

import json
import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = pathlib.Path(__file__).resolve().parent


def log_likelihood(model, tokenizer, context, answer):
    """Natural logarithm of the probability of `answer`; tokens are cut as lm_eval cuts them."""
    tokens = tokenizer(context + answer, add_special_tokens=False).input_ids
    begin = len(tokenizer(context, add_special_tokens=False).input_ids)
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0, begin - 1:-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[begin:])[:, None]).sum().item()


def main():
    [folder] = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    questions = [json.loads(line) for line in (HERE / "questions.jsonl").read_text().splitlines()]
    golden = {}
    for name in ("float32", "bfloat16"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, name)).eval()
        golden[name] = [[round(log_likelihood(model, tokenizer, f"Question: {question['question']}\nAnswer:",
                                              f" {choice}"), 5) for choice in question["choices"]]
                        for question in questions]
    lines = ",\n".join(f' "{name}": [\n  ' + ",\n  ".join(map(json.dumps, rows)) + "]" for name, rows in golden.items())
    (HERE / "smollm2.json").write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
