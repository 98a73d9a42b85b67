"""Two folders of results beside each other, answer by answer: what another backend, size of a tier or number of ranks changed.

Both were asked the same questions, greedily, so answers differ where rounding decides between two tokens that the model holds
for almost equally likely: every one that does is listed with the margin between the two most probable tokens there.
"""

from collections import defaultdict

from report import in_order, table


def least_difference(left, right):
    """Where two answers part: the place of the token, and the margins of both sides there."""
    for place, (own, other) in enumerate(zip(left["tokens"], right["tokens"])):
        if own != other:
            return place, left["margins"][place], right["margins"][place]
    return min(len(left["tokens"]), len(right["tokens"])), None, None


def text_of(margin):
    return "one ends" if margin is None else f"{margin:.4f}"


def print_tables(results, others):
    cells = defaultdict(lambda: [0, 0, 0, 0])
    parted = []
    theirs = {(record["policy"], record["spec"], record["model"], record["task"], record["length"], record["seed"]): record
              for record in others.records("answers")}
    for record in results.records("answers"):
        place = (record["policy"], record["spec"], record["model"], record["task"], record["length"], record["seed"])
        if place not in theirs or "answers" not in record or "answers" not in theirs[place]:
            continue
        other = theirs[place]
        key = (record["policy"], record["budget"], record["model"], record["task"], record["length"])
        cell = cells[key]
        cell[0] += record["asked"]
        cell[1] += record["exact"]
        cell[2] += other["exact"]
        for question, (own, its) in enumerate(zip(record["answers"], other["answers"])):
            if own["tokens"] == its["tokens"]:
                continue
            cell[3] += 1
            token, *margins = least_difference(own, its)
            parted.append((*key, record["seed"], question, token, *map(text_of, margins)))
    header = ("policy", "budget", "model", "task", "tokens")
    print(table((*header, "answers", "exact", "exact in the other", "other answers"),
                [(*key, *map(int, cells[key])) for key in in_order(cells)]), "\n")
    print(table((*header, "seed", "question", "first other token", "margin of its two best", "margin in the other"), parted))
