"""No source file is longer than 450 lines and no function longer than 64, tests and scripts included.

A function of C++ or CUDA is measured from the line where its head begins to its closing brace; one of
Python from `def` to its last line. Lambdas and functions inside others count with the function around
them. All offenders are printed.
"""

import ast
import pathlib
import re
import sys

FOLDERS = ("kernels", "worker", "kvstore", "coordinator", "proto", "deploy", "tests")
MOST_FILE_LINES = 450
MOST_FUNCTION_LINES = 64
BRACED = {".h", ".cc", ".cu", ".cuh"}
SUFFIXES = BRACED | {".py", ".sh"}

# Comments, raw strings, strings and characters; a quote within a number (10'000) begins none.
QUIET = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(?P<mark>[^(\s]*)\(.*?\)(?P=mark)"'
    r'|"(?:\\.|[^"\\\n])*"|(?<![0-9A-Fa-f])\'(?:\\.|[^\'\\\n])+\'', re.S)
# Lines of the preprocessor with their continuations.
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", re.M)
# A brace after one of these opens a place where functions are defined.
SCOPE = re.compile(r'^(?:inline\s+)?namespace\b|^extern\s*$|^(?:template\s*<.*>\s*)?(?:class|struct|union|enum)\b', re.S)
CONTROL = re.compile(r"^(?:if|for|while|switch|catch|else|do|try|return)\b")


def blanked(match):
    return re.sub(r"[^\n]", " ", match.group())


def is_function(head):
    """True for the text before a brace that opens a function's body: name(parameters) at its top level."""
    if CONTROL.match(head):
        return False
    top, depth = [], 0
    for c in head:
        depth -= c == ")"
        if depth == 0:
            top.append(c)
        depth += c == "("
    text = "".join(top)
    return "()" in text and not re.search(r"(?<![=!<>\w])=(?!=)", re.sub(r"operator\s*[^\s\w(]+", "operator", text))


def braced_functions(text):
    """Yields (first line, last line, head) of each outermost function."""
    text = DIRECTIVE.sub(blanked, QUIET.sub(blanked, text))
    scopes = 0  # open braces of namespaces and classes
    begin, i = 0, 0
    while i < len(text):
        c = text[i]
        if c == ";":
            begin = i + 1
        elif c == "}":
            scopes -= 1
            begin = i + 1
        elif c == ":" and re.search(r"\b(?:public|private|protected)\s*$", text[begin:i]):
            begin = i + 1
        elif c == "{":
            head = text[begin:i].strip()
            if SCOPE.match(head) and not is_function(head):
                scopes += 1
                begin = i + 1
            else:
                end = closing_brace(text, i)
                # An initialiser's brace in a constructor's list, or a value: the head goes on after it.
                goes_on = re.match(r"\s*[,{]", text[end + 1:])
                if is_function(head) and not goes_on:
                    start = begin + len(text[begin:i]) - len(text[begin:i].lstrip())
                    yield text.count("\n", 0, start) + 1, text.count("\n", 0, end) + 1, head
                    begin = end + 1
                i = end
        i += 1


def closing_brace(text, opening):
    depth = 0
    for i in range(opening, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return i
    return len(text) - 1


def python_functions(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.lineno, node.end_lineno, node.name


def offences(name, text):
    """Lines that say what is too long in the file."""
    found = []
    lines = text.count("\n")
    if lines > MOST_FILE_LINES:
        found.append(f"{name}: {lines} lines, more than {MOST_FILE_LINES}")
    suffix = pathlib.PurePath(name).suffix
    functions = braced_functions(text) if suffix in BRACED else python_functions(text) if suffix == ".py" else ()
    for first, last, head in functions:
        if last - first + 1 > MOST_FUNCTION_LINES:
            title = re.sub(r"\s+", " ", head)
            found.append(f"{name}:{first}: {last - first + 1} lines, more than {MOST_FUNCTION_LINES}: {title[:90]}")
    return found


def check_itself():
    """Planted cases: what is too long is found, and what is not is left alone."""
    body = "  if (x) {\n    Use(\"}\", '{');  // }\n  }\n"

    def braced(statements):
        return ("namespace a {\nclass B {\n public:\n  B() : c_{1}, d_(2) {}\n  template <typename T>\n  int Long(T x) const {\n"
                + body * statements + "  }\n  int c_{0};\n};\nconstexpr int kList[] = {1, 2};\n"
                + "int operator==(B, B) { return 1; }\n}  // namespace a\n")

    assert offences("planted.cc", braced(20)) == []
    assert offences("planted.cu", braced(21))[0].startswith("planted.cu:5: 66 lines"), offences("planted.cu", braced(21))
    names = [head for _, _, head in braced_functions(braced(1))]
    assert len(names) == 3, names
    long_initialisers = "C::C()\n    : a_{1},\n" + "      b_{2},\n" * 70 + "      z_(3) {\n}\n"
    assert len(offences("planted.cc", long_initialisers)) == 1
    table = "const T kTable[] = {\n" + "    {F(1), 2},\n" * 70 + "};\n"
    assert offences("planted.cc", table) == []
    assert offences("planted.py", "def f():\n" + "    x = 1\n" * 63) == []
    assert len(offences("planted.py", "def f():\n" + "    x = 1\n" * 64)) == 1
    assert offences("planted.sh", "x\n" * 450) == []
    assert len(offences("planted.sh", "x\n" * 451)) == 1


def main():
    check_itself()
    root = pathlib.Path(__file__).resolve().parents[2]
    found = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                found += offences(str(path.relative_to(root)), path.read_text())
    print(*found, sep="\n")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
