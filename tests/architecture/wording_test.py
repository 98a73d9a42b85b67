"""Comments and titles are written plainly. Prints every place that is not, as file:line, and how many each folder has.

    A comment block, its paragraphs and a Markdown title do not open with "Of ", "What ", "As of " or "Whose ".
    "behind" says where a thing is, never when or in which order (write "after"). SPATIAL lists the uses allowed.

Reads the comments of kernels, worker, kvstore, coordinator and proto, and the Markdown of docs and README.
"""

import collections
import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ("kernels", "worker", "kvstore", "coordinator", "proto")
SOURCES = {".h", ".cc", ".cu", ".cuh", ".proto"}

OPENING = re.compile(r"(?:Of|What|As of|Whose)\s")
TITLE = re.compile(r"#{1,6}\s+(?:\d+:\s+)?(?P<words>.*)")
BEHIND = re.compile(r"\bbehind\b", re.IGNORECASE)

# Allowed uses of "behind", as expressions, each with the reason.
SPATIAL = {
    r"write-behind|look-?behind": "names of techniques",
    r"behind (?:a|the) (?:reverse )?proxy": "a network path",
    r"\bhidden behind \w+": "an interface hides a part",
    r"behind (?:\w+ ){0,2}(?:interface|contracts?|flag)\b": "an interface hides a part",
    r"\bkernels? behind \w+\.h\b": "a header hides its kernels",
    r"\bimplementations? behind \w+\b": "an interface hides its implementations",
    r"behind the (?:PCIe )?bus": "a place in the machine",
    r"\b(?:leav(?:e|es|ing)|left)(?: nothing| anything)? behind\b": "a thing stays where it is",
    r"not \"behind\"": "the rule itself",
    r"groups of \d+ behind \d+/": "text of a stored kv_form",
}
ALLOWED = re.compile("|".join(SPATIAL), re.IGNORECASE)

# A comment, or a thing that may look like one inside: a string or a character. Numbers have separators ('), which open no
# character.
TOKEN = re.compile(
    r"""(?P<line>//[^\n]*)|(?P<block>/\*.*?\*/)
        |R"(?P<tag>[^\s()\\]*)\(.*?\)(?P=tag)"|"(?:\\.|[^"\\\n])*"|\b\d[\w.']*|'(?:\\.|[^'\\\n])*'""",
    re.DOTALL | re.VERBOSE)


def comment_lines(text: str):
    """(line, column, alone, words) of each line of a comment; `alone` when no code is before it."""
    for token in TOKEN.finditer(text):
        comment = token["line"] or token["block"]
        if comment is None:
            continue
        line = text.count("\n", 0, token.start()) + 1
        begin = text.rfind("\n", 0, token.start()) + 1
        alone = not text[begin:token.start()].strip()
        for i, words in enumerate(comment.removesuffix("*/").split("\n")):
            yield line + i, token.start() - begin, alone or i > 0, re.sub(r"^[\s/*!<]+", "", words).strip()


def comment_blocks(text: str):
    """Paragraphs of comments, as lists of (line, words). A comment alone on its line continues the comment of the line
    before when both begin in the same column, even if that one follows code."""
    block, last = [], (0, 0)
    for line, column, alone, words in comment_lines(text):
        continues = alone and line == last[0] + 1 and column == last[1]
        last = (line, column)
        if block and not (continues and words):
            yield block
            block = []
        if words:
            block.append((line, words))
    if block:
        yield block


def markdown_titles(text: str):
    """(line, words) of the titles outside code fences, without marks and numbers ("# 0001: "), the first letter a capital."""
    for line, words in markdown_prose(text):
        if title := TITLE.match(words):
            yield line, title["words"][:1].upper() + title["words"][1:]


def markdown_prose(text: str):
    """(line, words) outside code fences."""
    fenced = False
    for line, words in enumerate(text.split("\n"), 1):
        if words.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield line, words


def openings(path: str, text: str):
    """Places of `path` where a comment block or a title opens with a forbidden word."""
    firsts = markdown_titles(text) if path.endswith(".md") else (block[0] for block in comment_blocks(text))
    for line, words in firsts:
        if OPENING.match(words + " "):
            yield f"{path}:{line}: opens with \"{words[:60]}\""


def behinds(path: str, text: str):
    """Places of `path` where a comment or prose says "behind" in a use that SPATIAL does not list."""
    prose = path.endswith(".md")
    blocks = ([pair] for pair in markdown_prose(text)) if prose else comment_blocks(text)
    for block in blocks:
        # A use may go over two lines, so a block is searched as one text; `line` is the line that has the word.
        joined = " ".join(re.sub(r"`[^`]*`", lambda code: "x" * len(code[0]), words) if prose else words
                          for _, words in block)
        allowed = [match.span() for match in ALLOWED.finditer(joined)]
        for match in BEHIND.finditer(joined):
            if any(begin <= match.start() < end for begin, end in allowed):
                continue
            at, end = 0, -1
            while end < match.start():
                line, words = block[at]
                end, at = end + 1 + len(words), at + 1
            yield f"{path}:{line}: \"...{joined[max(match.start() - 35, 0):match.end() + 25]}...\""


def read_files():
    """path -> text of everything that is checked."""
    files = [p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*")) if p.suffix in SOURCES]
    files += sorted((ROOT / "docs").rglob("*.md")) + [ROOT / "README.md"]
    return {str(p.relative_to(ROOT)): p.read_text() for p in files}


def report(check):
    """(everything that `check` finds, the message that lists it)."""
    found = [place for path, text in read_files().items() for place in check(path, text)]
    counts = collections.Counter(place.split(":")[0].split("/")[0] for place in found)
    return found, f"\n{len(found)} places: " + ", ".join(f"{n} {c}" for n, c in counts.items()) + "\n" + "\n".join(found)


class Wording(unittest.TestCase):
    def check(self, check):
        found, message = report(check)
        if found:
            self.fail(message)

    def test_the_files_are_found(self):
        files = read_files()
        counts = collections.Counter(path.split("/")[0] for path in files)
        expected = {"kernels": 200, "worker": 80, "kvstore": 25, "coordinator": 80, "proto": 15, "docs": 20, "README.md": 1}
        for folder, least in expected.items():
            self.assertGreaterEqual(counts[folder], least, f"{folder}: files were not found")
        comments = sum(len(list(comment_blocks(text))) for path, text in files.items() if not path.endswith(".md"))
        self.assertGreater(comments, 3000, "comments were not found")

    def test_no_comment_and_no_title_opens_with_a_fragment(self):
        self.check(openings)

    def test_behind_is_never_time_or_order(self):
        self.check(behinds)

    def test_a_fragment_is_found(self):
        bad = ["// Of the step.\n", "int x;  // Whose it is.\n", "// Good.\n//\n// As of now.\n", "/* What\n * it is. */\n",
               "f(\"a\\\"\", 1'000, '\"');  // What it does.\n", "int a;  // Good.\nint b;  // Of b.\n", "/// Of it.\n",
               "int a;  // Good.\n// Of b.\nint b;\n", "auto s = R\"(\")\";  // Of s.\n"]
        for text in bad:
            self.assertEqual(1, len(list(openings("worker/x.h", text))), text)
        good = ["// The step.\n// Of two lines this is the second.\n", "const char* s = \"// Of\";\n", "auto s = R\"(// Of)\";\n",
                "int a;  // of the prompt\n", "int a;  // Number of things\n        // Of which a few.\n", "// Offset.\n"]
        for text in good:
            self.assertEqual([], list(openings("worker/x.h", text)), text)
        self.assertEqual(["docs/x.md:3: opens with \"What ranks do\""],
                         list(openings("docs/x.md", "# Good\n\n# 0007: what ranks do\n```\n# Of code\n```\nOf prose.\n")))

    def test_behind_is_found(self):
        for text in ("// Runs behind the step.\n", "// Written to disk, and behind\n// them the rest.\n", "// Behind it.\n"):
            self.assertEqual(1, len(list(behinds("worker/x.h", text))), text)
        for text in ("// Serves behind a proxy.\n", "// All of it is hidden\n// behind it.\n", "int behind = 0;\n",
                     "// The kernels behind quest_cuda.h.\n", "// A write-behind queue.\n"):
            self.assertEqual([], list(behinds("worker/x.h", text)), text)
        self.assertTrue(list(behinds("worker/x.h", "// One.\n// Two, hidden behind it, and three\n// behind that.\n"))[0]
                        .startswith("worker/x.h:3:"))
        self.assertEqual(1, len(list(behinds("docs/x.md", "Sums behind each other; `behind` is a column.\n"))))


if __name__ == "__main__":
    unittest.main()
