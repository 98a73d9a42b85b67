#!/usr/bin/env python3
"""Asks servers the same questions about the same document over HTTP, and prints their answers side by side.

    deploy/side_by_side.py DOCUMENT.json NAME=HOST:PORT [NAME=HOST:PORT ...]

DOCUMENT.json is what tests/model/documents.py writes. The first question to a server takes the time that it needs to
read the document; for the later ones it finds the document in its cache. "read" is the share of pages of the context
that attention read, over all layers and tokens of a request. Exits with 1 unless the last server answers all but at
most one question exactly.
"""

import json
import sys
import time
import urllib.request


def ask(address, prompt):
    """Returns the answer up to its full stop, the number of prompt tokens, the share of pages read and the seconds."""
    body = {"prompt": prompt, "max_tokens": 24, "stop": ".", "temperature": 0}
    request = urllib.request.Request(f"http://{address}/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    start = time.monotonic()
    with urllib.request.urlopen(request, timeout=1800) as reply:
        answer = json.load(reply)
    usage = answer["usage"]
    return (answer["choices"][0]["text"].strip(), usage["prompt_tokens"], 1 - usage["kvasir"]["sparsity"],
            time.monotonic() - start)


def main(path, *servers):
    with open(path, encoding="utf-8") as file:
        document = json.load(file)
    names, addresses = zip(*(server.split("=", 1) for server in servers))
    questions = document["questions"]
    exact = dict.fromkeys(names, 0)
    print(f"{'question':42}  {'expected':8}" + "".join(f"  | {name + ' answers':20} {'read':>5} {'time':>8}" for name in names))
    for question in questions:
        expected = question["answer"].strip().rstrip(".")
        line = f"{question['prompt'].split('?')[0].removeprefix('What is ') + '?':42}  {expected:8}"
        for name, address in zip(names, addresses):
            text, tokens, read, seconds = ask(address, document["text"] + question["prompt"])
            exact[name] += text == expected
            line += f"  | {text[:20]:20} {read:5.0%} {seconds:6.1f} s"
        print(line, flush=True)
    print(f"{tokens} tokens a prompt; exact answers: "
          + ", ".join(f"{name} {exact[name]} of {len(questions)}" for name in names))
    return 0 if exact[names[-1]] >= len(questions) - 1 else 1


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
