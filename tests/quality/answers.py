"""How often the service answers exactly: asks it about generated documents under every policy.

The first request reads a document; its questions are asked as requests of their own over what is cached then, by every
policy of the server in turn.
"""

import itertools
import json
import pathlib
import shlex
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

from documents import make_document
from policies import select, servers
from support.service import ROOT, Service

QUESTIONS_A_DOCUMENT = 8
ANSWER_TOKENS = 128  # of a question with its answer, at most
ONE_QUESTION_TASKS = ("pass_key", "common_words")


def questions_of(task):
    return 1 if task in ONE_QUESTION_TASKS else QUESTIONS_A_DOCUMENT


def record_of(model, policy, task, length, seed):
    return {"kind": "answers", "model": model, "policy": policy.name, "spec": policy.spec, "budget": policy.budget,
            "task": task, "length": length, "seed": seed}


def count_attention(answers):
    """Sums over the answers' reports, by the names of the message; nothing where mass was not measured."""
    counts = {"blocks_total": 0, "mass_samples": 0, "mass_sum": 0.0, "mass_minimum": 1.0}
    for attention in (answer.finish.attention for answer in answers):
        counts["blocks_total"] += attention.decode_blocks_total
        for field, value in attention.decode_blocks_skipped.ListFields():
            counts[field.name] = counts.get(field.name, 0) + value
        if attention.HasField("decode_measured_mass"):
            mass = attention.decode_measured_mass
            counts["mass_samples"] += mass.samples
            counts["mass_sum"] += mass.mean * mass.samples
            counts["mass_minimum"] = min(counts["mass_minimum"], mass.minimum)
    return counts


def margins_of(answer):
    """Of each token, between the logarithms of the two largest probabilities."""
    return [round(token.top[0].logprob - token.top[1].logprob, 6) for token in answer.logprobs]


def ask(service, policy, document, streams):
    """What became of one policy's turn at a document that the server has read."""
    numbers = policy.numbers or None

    def answer(question):
        return service.generate(document.text + question.prompt, policy=policy.served_name, decode=numbers, stop=".",
                                max_tokens=40, logprobs=2)
    begin = time.monotonic()
    with ThreadPoolExecutor(streams) as pool:
        answers = list(pool.map(answer, document.questions))
    exact = sum(got.text + "." == question.answer for got, question in zip(answers, document.questions))
    return {"asked": len(answers), "exact": exact, "tokens": sum(len(got.token_ids) for got in answers),
            "seconds": round(time.monotonic() - begin, 3), "attention": count_attention(answers),
            "answers": [{"tokens": got.token_ids, "margins": margins_of(got)} for got in answers]}


def ask_all(service, model, policies, place, results, streams):
    """Lets every policy that has not had its turn answer a document's questions; returns seconds by what took them."""
    task, length, seed = place
    document = make_document(task, length, num_questions=questions_of(task), seed=seed)
    missing = [policy for policy in policies if record_of(model, policy, *place) not in results]
    begin = time.monotonic()
    for prefill in {json.dumps(policy.prefill): policy for policy in missing}.values():
        service.generate(document.text, policy=prefill.served_name, max_tokens=1)
    seconds = {"reading": time.monotonic() - begin}
    for policy in missing:
        record = {**record_of(model, policy, *place), **ask(service, policy, document, streams)}
        results.add(record)
        seconds[f"{policy.name} {policy.budget or ''}".strip()] = record["seconds"]
    return seconds


def context_flags(model, places):
    """A server for documents beyond what the model was trained for, too: that dense attention fails there is to be seen."""
    config = json.loads((ROOT / "tests" / "model" / model / "config.json").read_text())
    needed = max(length for _, length, _ in places) + ANSWER_TOKENS
    if needed <= config["max_position_embeddings"]:
        return []
    return [f"--max-model-len={needed}", "--allow-long-max-model-len"]


def run_server(model, policies, places, arguments, results, folder):
    """All turns of the policies that one server declares, at the documents in these places."""
    declared = {policy.served_name: policy.message() for policy in policies if policy.served_name}
    declarations = pathlib.Path(folder) / "policies.yaml"
    declarations.write_text(json.dumps(list(declared.values())))  # JSON is YAML
    flags = [*policies[0].flags, *context_flags(model, places), *shlex.split(arguments.flags)]
    if declared:
        flags.append(f"--policies={declarations}")
    with Service(f"tests/model/{model}", flags) as service:
        for cell, own in itertools.groupby(places, key=lambda place: place[:2]):
            costs = [ask_all(service, model, policies, place, results, arguments.streams) for place in own]
            seconds = {name: sum(cost.get(name, 0) for cost in costs) for cost in costs for name in cost}
            print(f"{cell[0]}, {cell[1]} tokens, {len(costs)} documents, seconds: "
                  + ", ".join(f"{name} {value:.1f}" for name, value in seconds.items()), flush=True)


def run(arguments, results):
    policies = select(arguments.policies, arguments.sink_tokens, arguments.window_tokens, arguments.budgets)
    for group in servers(policies):
        places = [(task, length, seed) for task in arguments.tasks for length in arguments.lengths
                  for seed in range(arguments.seed, arguments.seed - (-arguments.answers // questions_of(task)))
                  if any(record_of(arguments.model, policy, task, length, seed) not in results for policy in group)]
        if not places:
            continue
        with tempfile.TemporaryDirectory(prefix="kvasir-quality-") as folder:
            run_server(arguments.model, group, places, arguments, results, folder)
