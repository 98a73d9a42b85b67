#!/usr/bin/env python3
"""How much of dense attention's answers the sparse policies keep, and of its attention.

Starts the real service with a reference model and asks questions about generated documents, each as a request of its own
over the cached document; counts exact answers by policy, task, length and budget. With --fidelity it compares instead, by
the program quality_fidelity, what each policy selects with what the model's own queries attend to. What is found is kept
in --results and not computed again; --report writes it into docs/quality.md.

    tests/quality/run.py --results out/quality --tasks multi_key pass_key --lengths 2000 8000 --answers 256
    tests/quality/run.py --results out/quality --fidelity --model needle-32k --lengths 32000 --documents 2
    tests/quality/run.py --results out/quality --report
    tests/quality/run.py --results out/gpu --compare out/cpu
    tests/quality/run.py --short
"""

import argparse
import pathlib
import shlex
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import support.service  # noqa: E402,F401  (finds the generator of documents)

import answers  # noqa: E402
import compare  # noqa: E402
import fidelity  # noqa: E402
import report  # noqa: E402
import short  # noqa: E402
from documents import TASKS  # noqa: E402
from policies import POLICIES  # noqa: E402
from results import Results  # noqa: E402


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="the test that ctest runs: a minute, needs no --results")
    parser.add_argument("--report", action="store_true", help="write tables and plots of --results into docs/quality.md")
    parser.add_argument("--fidelity", action="store_true", help="compare selections instead of answers")
    parser.add_argument("--compare", metavar="FOLDER", help="print the answers of --results that are other ones in this folder")
    parser.add_argument("--results", metavar="FOLDER", help="where what is found is kept, as JSON lines")
    parser.add_argument("--model", default="needle-8k", help="folder in tests/model (default needle-8k)")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, metavar="POLICY",
                        default=[name for name, policy in POLICIES.items() if not policy.has_contract],
                        help=f"of {', '.join(POLICIES)} (default those without a contract of quality)")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["multi_key"], help="default multi_key")
    parser.add_argument("--lengths", nargs="+", type=int, default=[8000], help="tokens of a document (default 8000)")
    parser.add_argument("--budgets", nargs="+", type=int, default=[2048], help="tokens to select (default 2048)")
    parser.add_argument("--sink-tokens", type=int, default=128, help="default 128")
    parser.add_argument("--window-tokens", type=int, default=512, help="default 512")
    parser.add_argument("--answers", type=int, default=64, help="answers a cell, at least (default 64)")
    parser.add_argument("--documents", type=int, default=1, help="documents of --fidelity (default 1)")
    parser.add_argument("--questions", type=int, default=8, help="questions a document of --fidelity (default 8)")
    parser.add_argument("--streams", type=int, default=4, help="questions asked at once (default 4)")
    parser.add_argument("--seed", type=int, default=1000, help="seed of the first document (default 1000)")
    parser.add_argument("--flags", default="--mass-sample-rate=0.02",
                        help="further flags of `kvasir serve`, which results are not told apart by (default --mass-sample-rate=0.02)")
    arguments = parser.parse_args()
    if not arguments.short and not arguments.results:
        parser.error("--results is not given: the folder to keep what is found in")
    return arguments


def main():
    arguments = parse_arguments()
    if arguments.short:
        return short.run()
    results = Results(arguments.results)
    if arguments.report:
        report.write(results)
        return 0
    if arguments.compare:
        compare.print_tables(results, Results(arguments.compare))
        return 0
    print(f"{shlex.join(sys.argv)}\nseeds {arguments.seed} and following", flush=True)
    (fidelity if arguments.fidelity else answers).run(arguments, results)
    report.print_tables(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
