#!/usr/bin/env python3
"""Synthetic long documents with questions whose answers are known exactly.

A document is filler sentences with facts at random places, one sentence per line. A request is

    document.text + question.prompt        for example
    "...The magic number for brave-lantern is 482913.\\n...What is the magic number for brave-lantern?
    The magic number for brave-lantern is" (one line)

and a model that reads it must continue with exactly question.answer: " 482913." up to the full stop.

Each line ends with a newline and each prompt begins with a letter. So with a byte-level BPE tokenizer of the
Llama-3 or Qwen2 kind token counts of lines add up, and the tokens of document.text are a prefix of the tokens of
document.text + question.prompt: all questions about one document share its KV pages.

Tasks
    multi_key         "The magic number for brave-lantern is 482913."           many facts, one asked
    pass_key          "The pass key is 68124. Remember it. 68124 is the pass key."       one fact
    key_value         "The value of q7m2 is b3k8."                              many facts of random strings
    variable_tracing  "Variable q7m2 equals b3k8." "Variable b3k8 equals 482913."   2 or 3 hops; the answer has all of
                      them: " b3k8, b3k8 equals 482913."
    common_words      "The word of the hour is falcon."                         which one is the most common?
    mixed             all of them in one document

Plain Python, deterministic by seed, no dependencies.
"""

import argparse
import json
import math
import random
import re
import sys
from dataclasses import asdict, dataclass
from typing import Callable, Dict, Iterator, List, Optional, Tuple

ADJECTIVES = """
able amber ancient arctic autumn bitter black blue bold brave brief bright broken bronze busy calm careful clean clear
clever cold copper coral cosmic crimson crisp curious daily damp dark deep distant double dry dusty eager early eastern
empty faint fair fancy fast fine first flat fresh frosty frozen gentle giant glad golden grand gray great green happy
heavy hidden high hollow honest humble icy inner iron ivory jolly keen kind large late lazy light little lively lone
long loud lucky mellow merry mild misty modern narrow neat noble north odd old open orange pale patient plain polite
proud purple quick quiet rapid rare red rich rough round royal rusty salty sandy secret sharp shy silent silver simple
slow small soft solid spare steady still stone strong sunny
""".split()[:128]

NOUNS = """
acorn anchor angle apple arrow badge bamboo banner barrel basin basket beacon bell blanket blossom boat bottle bridge
bucket button cabin cable camera candle canyon carpet castle cedar chain chair chapel cherry circle cliff clock cloud
compass corner cottage cradle creek crown curtain desert diamond door drum eagle engine feather fiddle field flame
flower forest fountain garden gate glacier glove guitar hammer harbor helmet hill island jacket jungle kettle key
kitchen ladder lake lantern leaf lemon letter lily market marble meadow melon mirror mountain needle ocean olive orchard
paddle palace paper pebble pencil pepper pillow pine planet pocket pony prairie quarry rabbit ribbon ring river robin
rocket saddle sail shadow shell shovel spoon spring stable star stove street sugar summit table temple thunder ticket
tower train tunnel valley
""".split()[:128]

ANIMALS = """
badger beaver camel cat crow deer dog dolphin donkey duck falcon finch fox frog goat goose hare hawk heron horse lamb
lion lizard lynx mole moose mouse otter owl panda parrot pigeon seal sheep snail sparrow spider swan tiger toad trout
turtle walrus whale wolf wren yak zebra
""".split()

PEOPLE = """
Alice Anton Bella Bruno Clara David Elena Emma Felix Grace Hugo Ivan Julia Karl Laura Leo Maria Nina Oscar Paul Rosa
Simon Tara Victor
""".split()

PLACES = """
barn bay church coast courtyard fence ferry fort hall hotel house inn library mill museum park path port road school
shed shop shore station theater wall well wharf wood yard
""".split()

ADVERBS = "almost always barely gladly hardly never nearly often quietly rarely seldom slowly softly soon swiftly usually".split()
VERBS = "calls circles crosses draws finds follows hears leaves likes meets misses paints passes reaches sees watches".split()
TIMES = "dawn dinner dusk lunch midnight night noon sunrise sunset supper".split()
WEATHER = "fog frost hail mist rain sleet snow storm sunshine warmth wind".split()
FOODS = "barley beans bread butter cheese corn figs grain honey milk oats pears plums rice salt soup tea wheat".split()

FILLER_TEMPLATES = (
    "The {adjective} {animal} {adverb} {verb} the {place}.",
    "The {adjective} {animal} {verb} the {adjective} {animal} near the {adjective} {place}.",
    "At {time} the {animal} {verb} the {adjective} {place}.",
    "{person} {adverb} {verb} the {animal} behind the {place}.",
    "{person} and {person} walk from the {place} to the {adjective} {place}.",
    "After {time} there is {weather} over the {adjective} {place}.",
    "No {weather} has come to the {place} since {time}.",
    "One {adjective} {animal} sleeps beside the {place} until {time}.",
    "Before {time} {person} brings {food} and {food} to the {place}.",
    "In the {adjective} {place} {person} keeps the {adjective} {animal}.",
    "The {place} is {adjective}, but the {place} is {adjective}.",
    "{person} says that the {animal} {adverb} {verb} the {place}.",
    "When the {weather} comes, the {animal} hides under the {place}.",
    "People at the {place} sell {food}, {food} and {food}.",
    "It was {adjective} and {adjective} at the {place} that {time}.",
    "Nobody at the {place} {adverb} {verb} the {adjective} {animal}.",
    "{person} wrote about the {adjective} {animal} and the {weather}.",
    "Each {animal} {verb} the {adjective} {place} at {time}.",
    "They eat {food} with {food} at {time} in the {place}.",
    "The {weather} makes the {place} {adjective} and {adjective}.",
    "Some say the {animal} was {adjective}, others say {adjective}.",
    "For {time} {person} has {food} from the {adjective} {place}.",
    "Why the {animal} {verb} the {animal} is known to {person}.",
    "On the way to the {place}, {person} {verb} the {weather}.",
)

_FILLER_WORDS = {
    "adjective": ADJECTIVES, "animal": ANIMALS, "adverb": ADVERBS, "verb": VERBS, "place": PLACES, "time": TIMES,
    "person": PEOPLE, "weather": WEATHER, "food": FOODS,
}
_PAIRS = [f"{letter}{digit}" for letter in "abcdefghijklmnopqrstuvwxyz" for digit in range(10)]
_NUM_STRINGS = len(_PAIRS) ** 2
_CANDIDATE_WORDS = 6  # candidates of the common_words vote


@dataclass(frozen=True)
class Question:
    """One request over a document: the model must continue `document.text + prompt` with exactly `answer`."""

    task: str
    prompt: str
    answer: str  # begins with a space, ends with a full stop


@dataclass(frozen=True)
class Document:
    """A text and questions on it."""

    task: str
    text: str  # ends with a newline
    questions: List[Question]
    num_tokens: int  # of `text`, by the given count_tokens, without a begin-of-text token


def count_tokens(text: str) -> int:
    """Returns the exact number of tokens of a generated `text` under the reference model's tokenizer, without begin-of-text.

    Every word of the generator is one token there, so pieces of the split rule are tokens. For other text the number is a
    lower bound.
    """
    return len(_PIECES(text))


# The split rule of tokenizer.json, for ASCII.
PIECE_PATTERN = r"[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_PIECES = re.compile(PIECE_PATTERN).findall


def make_document(
    task: str,
    length: int,
    num_questions: int = 1,
    seed: int = 0,
    *,
    tokens_per_fact: Optional[int] = None,
    num_parts: Optional[int] = None,
    count_tokens: Callable[[str], int] = count_tokens,
) -> Document:
    """Returns a document of `task` with `length` tokens: exactly that many under the reference model's tokenizer.

    length           tokens of the text by count_tokens, which must not count special tokens. With another
                     tokenizer, or no room for filler, the document may be a few dozen shorter, never longer.
    num_questions    number of questions, all different. pass_key and common_words have one per document, so `mixed`
                     asks each once.
    tokens_per_fact  tokens for each fact; default by task. A chain of variable_tracing is one fact.
    num_parts        number of adjectives and of nouns in names (default by length), and of pairs in strings (default
                     all 260). Fewer make facts more alike.
    Raises ValueError when the facts do not fit.
    """
    if task not in TASKS:
        raise ValueError(f"no task {task!r}; there are {', '.join(TASKS)}")
    rng = random.Random(f"{task}/{length}/{num_questions}/{seed}")
    lines, questions = _facts(rng, task, length, num_questions, tokens_per_fact, num_parts)
    num_tokens = sum(count_tokens(line) for line in lines)
    if num_tokens > length:
        raise ValueError(f"{task} with {num_questions} questions needs {num_tokens} tokens for its facts, length is {length}; "
                         "raise the length or ask fewer questions")
    num_tokens += _fill(rng, lines, length - num_tokens, count_tokens)
    rng.shuffle(lines)
    rng.shuffle(questions)
    return Document(task, "".join(lines), questions, num_tokens)


def _fill(rng: random.Random, lines: List[str], room: int, count_tokens: Callable[[str], int]) -> int:
    """Appends filler of `room` tokens, or a little less if no sentences fill it. Returns its number of tokens."""
    left, misses = room, 0
    while left > 0 and misses < _MAX_MISSES:
        line = _filler(rng)
        rest = left - count_tokens(line)
        if rest >= 0 and -(-rest // _LONGEST_FILLER) * _SHORTEST_FILLER <= rest:
            lines.append(line)
            left = rest
        else:
            misses += 1
    return room - left


_SHORTEST_FILLER, _LONGEST_FILLER = 9, 13  # tokens of a filler sentence
_MAX_MISSES = 1000  # failed draws; a sentence of exactly the tokens left takes about 25, or does not exist


def _filler(rng: random.Random) -> str:
    pick = rng.random
    template = FILLER_TEMPLATES[int(pick() * len(FILLER_TEMPLATES))]
    return _SLOT.sub(lambda slot: _FILLER_WORDS[slot[1]][int(pick() * len(_FILLER_WORDS[slot[1]]))], template) + "\n"


_SLOT = re.compile(r"{(\w+)}")


def _names(rng: random.Random, length: int, num_parts: Optional[int]) -> Iterator[str]:
    """Yields names like brave-lantern, all different, by default enough for `length` tokens and at most 16,384.

    Names come from few words, so that many names share a word: only the whole name distinguishes facts.
    """
    num_words = num_parts or max(8, math.ceil(math.sqrt(length / 8)))
    num_words = min(num_words, len(ADJECTIVES))
    adjectives, nouns = rng.sample(ADJECTIVES, num_words), rng.sample(NOUNS, num_words)
    return (f"{adjectives[index // num_words]}-{nouns[index % num_words]}" for index in _distinct(rng, num_words ** 2))


def _keys(rng: random.Random, num_parts: Optional[int]) -> Iterator[str]:
    """Yields strings like q7m2, all different."""
    if num_parts is None or num_parts >= len(_PAIRS):
        return (_string(_PAIRS, index) for index in _distinct(rng, _NUM_STRINGS))
    pairs = rng.sample(_PAIRS, num_parts)
    return (_string(pairs, index) for index in _distinct(rng, num_parts ** 2))


def _string(pairs: List[str], index: int) -> str:
    """Returns the index-th string of two pairs."""
    return pairs[index % len(pairs)] + pairs[index // len(pairs)]


def _distinct(rng: random.Random, population: int) -> Iterator[int]:
    seen = set()
    while len(seen) < population:
        index = rng.randrange(population)
        if index not in seen:
            seen.add(index)
            yield index
    raise ValueError(f"a document has at most {population} different names; ask for fewer facts")


# A builder makes `count` facts and `num_questions` questions on them: returns lines of the document, and questions.
_Facts = Tuple[List[str], List[Question]]


def _multi_key(rng: random.Random, length: int, num_parts: Optional[int], count: int, num_questions: int) -> _Facts:
    names = _names(rng, length, num_parts)
    facts = [(next(names), rng.randrange(100000, 1000000)) for _ in range(count)]
    return ([f"The magic number for {name} is {number}.\n" for name, number in facts],
            [Question("multi_key", f"What is the magic number for {name}? The magic number for {name} is", f" {number}.")
             for name, number in facts[:num_questions]])


def _pass_key(rng: random.Random, length: int, num_parts: Optional[int], count: int, num_questions: int) -> _Facts:
    key = rng.randrange(10000, 100000)
    return ([f"The pass key is {key}. Remember it. {key} is the pass key.\n"],
            [Question("pass_key", "What is the pass key? The pass key is", f" {key}.")][:num_questions])


def _key_value(rng: random.Random, length: int, num_parts: Optional[int], count: int, num_questions: int) -> _Facts:
    keys = _keys(rng, num_parts)
    facts = [(next(keys), _string(_PAIRS, rng.randrange(_NUM_STRINGS))) for _ in range(count)]
    return ([f"The value of {key} is {value}.\n" for key, value in facts],
            [Question("key_value", f"What is the value of {key}? The value of {key} is", f" {value}.")
             for key, value in facts[:num_questions]])


def _variable_tracing(rng: random.Random, length: int, num_parts: Optional[int], count: int, num_questions: int) -> _Facts:
    keys = _keys(rng, num_parts)
    lines, questions = [], []
    for index in range(count):
        chain = [next(keys) for _ in range(2 + index % 2)] + [str(rng.randrange(100000, 1000000))]
        hops = [f"{variable} equals {value}" for variable, value in zip(chain, chain[1:])]
        lines += [f"Variable {hop}.\n" for hop in hops]
        if index < num_questions:
            questions.append(Question("variable_tracing", f"What does variable {chain[0]} equal? Variable {chain[0]} equals",
                                      ", ".join(hops)[len(f"{chain[0]} equals"):] + "."))
    return lines, questions


def _common_words(rng: random.Random, length: int, num_parts: Optional[int], count: int, num_questions: int) -> _Facts:
    """The winner occurs at least 1.5 times as often as any other word, and at least two times more."""
    words = rng.sample(ANIMALS, _CANDIDATE_WORDS)
    winner_count = max(3, round(count * rng.uniform(0.3, 0.45)))
    limit = min(winner_count - 2, int(winner_count / 1.5))
    hours = [words[0]] * winner_count
    for word in words[1:]:
        hours += [word] * min(limit, rng.randint(limit // 2, limit), max(0, count - len(hours)))
    return ([f"The word of the hour is {word}.\n" for word in hours],
            [Question("common_words", "What is the most common word of the hour? The most common word of the hour is",
                      f" {words[0]}.")][:num_questions])


@dataclass(frozen=True)
class _Task:
    build: Callable[..., _Facts]
    tokens_per_fact: int  # default density
    max_questions: Optional[int] = None


_SINGLE_TASKS: Dict[str, _Task] = {
    "multi_key": _Task(_multi_key, 128),
    "pass_key": _Task(_pass_key, 1, max_questions=1),
    "key_value": _Task(_key_value, 64),
    "variable_tracing": _Task(_variable_tracing, 320),
    "common_words": _Task(_common_words, 64, max_questions=1),
}
TASKS = tuple(_SINGLE_TASKS) + ("mixed",)
_MIXED_THINNING = 4  # factor by which each task's facts are rarer in a mixed document


def _facts(rng: random.Random, task: str, length: int, num_questions: int, tokens_per_fact: Optional[int],
           num_parts: Optional[int]) -> _Facts:
    """Returns facts of one task, or a share of each task for `mixed`."""
    if task != "mixed":
        limit = _SINGLE_TASKS[task].max_questions
        if limit is not None and num_questions > limit:
            raise ValueError(f"a document of {task} answers {limit} question, {num_questions} asked")
        shares = {task: num_questions}
        thinning = 1
    else:
        shares = _mixed_shares(num_questions)
        thinning = _MIXED_THINNING
    lines: List[str] = []
    questions: List[Question] = []
    for name, share in shares.items():
        single = _SINGLE_TASKS[name]
        count = max(share, length // ((tokens_per_fact or single.tokens_per_fact) * thinning))
        more_lines, more_questions = single.build(rng, length, num_parts, count, share)
        lines += more_lines
        questions += more_questions
    return lines, questions


def _mixed_shares(num_questions: int) -> Dict[str, int]:
    """Returns the number of questions of each task: dealt in turn until there are num_questions."""
    shares = dict.fromkeys(_SINGLE_TASKS, 0)
    while sum(shares.values()) < num_questions:
        for name, single in _SINGLE_TASKS.items():
            if shares[name] != single.max_questions and sum(shares.values()) < num_questions:
                shares[name] += 1
    return shares


def _tokens(text: str) -> int:
    """Reads a number of tokens: 8192, 8k or 1m."""
    scale = {"k": 1024, "m": 1024 ** 2}.get(text[-1:].lower(), 1)
    return int(text.rstrip("kKmM")) * scale


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Examples:\n  documents.py --task multi_key --tokens 8000 --questions 16 > document.json\n"
               "  documents.py --task pass_key --tokens 128k --format text > prompt.txt   (the answer goes to stderr)\n")
    parser.add_argument("--task", choices=TASKS, default="multi_key", help="default multi_key")
    parser.add_argument("--tokens", type=_tokens, default=8000, help="most tokens of the document, as 8000, 32k or 1m (default 8000)")
    parser.add_argument("--questions", type=int, default=1, help="questions to ask (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same document (default 0)")
    parser.add_argument("--tokens-per-fact", type=int, help="one fact per so many tokens (default by task)")
    parser.add_argument("--parts", type=int, help="names and strings are made of so many parts; fewer make facts more alike")
    parser.add_argument("--format", choices=("json", "text"), default="json",
                        help="json: the document and its questions; text: the request for the first question, ready to send")
    arguments = parser.parse_args()
    try:
        document = make_document(arguments.task, arguments.tokens, arguments.questions, arguments.seed,
                                 tokens_per_fact=arguments.tokens_per_fact, num_parts=arguments.parts)
    except ValueError as error:
        parser.error(str(error))
    if arguments.format == "json":
        json.dump(asdict(document), sys.stdout)
        print()
    else:
        question = document.questions[0]
        sys.stdout.write(document.text + question.prompt)
        print(f"answer:{question.answer}", file=sys.stderr)


if __name__ == "__main__":
    main()
