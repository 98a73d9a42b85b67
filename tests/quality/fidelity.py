"""How much of the model's own attention each policy's selection keeps: runs quality_fidelity over generated documents.

One process reads one document, dense, and compares all policies on the same queries, keys and values.
"""

import json
import subprocess
import time
from dataclasses import asdict

from documents import make_document
from policies import select
from support.service import BUILD, ROOT

PROGRAM = BUILD / "tests" / "quality" / "quality_fidelity"
TASK = "multi_key"


def record_of(kind, model, place, policy, spec):
    length, seed, questions = place
    return {"kind": kind, "model": model, "task": TASK, "length": length, "seed": seed, "questions": questions,
            "policy": policy, "spec": spec}


def compare(model, document, policies, facts, threads):
    """What the program prints, line by line; `facts`: the numbers that the facts are about, or None."""
    job = {"model": str(ROOT / "tests" / "model" / model), "threads": threads, "facts": facts, "document": asdict(document),
           "policies": [{**policy.message(), "name": policy.served_name or "all"} for policy in policies]}
    done = subprocess.run([PROGRAM], input=json.dumps(job), capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{PROGRAM.name} exited with {done.returncode}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def run_document(model, policies, place, results, threads=2):
    """Adds to the results what is missing of the document in this place: its length, seed and number of questions."""
    records = [record_of("fidelity", model, place, policy.name, policy.spec) for policy in policies]
    missing = [(policy, record) for policy, record in zip(policies, records) if record not in results]
    numbers = max((policy.numbers for policy in policies), key=lambda numbers: numbers.get("token_budget", 0))
    facts = record_of("facts", model, place, "", json.dumps(numbers))
    ask_facts = "token_budget" in numbers and facts not in results
    if not missing and not ask_facts:
        return
    length, seed, questions = place
    document = make_document(TASK, length, num_questions=questions, seed=seed)
    lines = compare(model, document, [policy for policy, _ in missing], numbers if ask_facts else None, threads)
    for (policy, record), line in zip(missing, lines):
        results.add({**record, **line, "policy": policy.name, "budget": policy.budget})
    if ask_facts:
        results.add({**facts, **lines[-1]})


def run(arguments, results):
    chosen = select(arguments.policies, arguments.sink_tokens, arguments.window_tokens, arguments.budgets)
    policies = [policy for policy in chosen if policy.only_selects]
    for length in arguments.lengths:
        for seed in range(arguments.seed, arguments.seed + arguments.documents):
            begin = time.monotonic()
            run_document(arguments.model, policies, (length, seed, arguments.questions), results)
            print(f"{length} tokens, seed {seed}, {len(policies)} policies: {time.monotonic() - begin:.1f} s", flush=True)
