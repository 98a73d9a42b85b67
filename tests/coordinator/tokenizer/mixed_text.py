"""Deterministic mixed text for the tokenizer's golden files: prose, code, many scripts, emoji, odd
white space. Plain Python without dependencies; the same seed gives the same text everywhere."""

import random
import unicodedata

_COMMON = (
    "the of and to in is that for it with as was on are by this be from or have an they which one "
    "you were all their there can has more if will would about when what some other than into only "
    "time could new them these two may then do first any my now such like our over man even most "
    "made after also did many before must through years where much your way well down should "
    "because each just those people how too little state good very make world still own see men "
    "work long get here between both life being under never day same another know while last might "
    "us great old year off come since against go came right used take three"
).split()

_CONTRACTIONS = ["don't", "it's", "we'll", "I'm", "they've", "he'd", "you're", "CAN'T", "IT'S",
                 "O'Brien's", "’tis", "rock'n'roll", "y'all'd've"]

_CODE = [
    "def {a}({b}, {c}=None):\n    \"\"\"{w} {w2}.\"\"\"\n    for i in range({n}):\n"
    "        if {b}[i] != {c}:\n            return {a}({b}[{n}:], i)\n    return None\n\n",
    "for (int64_t {a} = 0; {a} < {n}; ++{a}) {{\n\t{b}[{a}] = static_cast<float>({c} * {n}.5e-3f);"
    "\n\tif ({b}[{a}] >= {c}) break;  // {w} {w2}\n}}\n",
    '{{"{a}": [{n}, {n2}, -{n}.25], "{b}": {{"{c}": null, "{w}": "{w2}\\n"}}}}\n',
    "SELECT {a}, COUNT(*) FROM {b} WHERE {c} >= {n} AND {w} LIKE '%{w2}%' GROUP BY 1;\r\n",
    "#include <{a}.h>\n#define {b} ((1u << {n2}) - 1)\n\n\n",
    "$ {a} --{b}={n} -{c} /usr/{w}/{w2}.tar.gz | grep -v '^#' && echo \"done: $?\"\n",
    "<div class=\"{a}\"><a href='https://{b}.example/{c}?q={n}&amp;r={n2}'>{w}</a></div>\n",
    "x_{{{n}}} = \\frac{{{n2}}}{{\\sqrt{{2\\pi}}}} \\int_0^\\infty {a}({b})\\,d{c}\n",
]

_RANGES = {  # scripts: the range of their common code points
    "han": [(0x4E00, 0x5FFF), (0x6C00, 0x7000)],
    "kana": [(0x3041, 0x3096), (0x30A1, 0x30FA)],
    "hangul": [(0xAC00, 0xB000)],
    "cyrillic": [(0x430, 0x44F)],
    "greek": [(0x3B1, 0x3C9)],
    "arabic": [(0x627, 0x64A)],
    "hebrew": [(0x5D0, 0x5EA)],
    "devanagari": [(0x905, 0x939), (0x93E, 0x94D)],
    "thai": [(0xE01, 0xE3A), (0xE40, 0xE4E)],
    "armenian": [(0x561, 0x586)],
    "rare": [(0x10000, 0x100FA), (0x1D400, 0x1D454), (0x20000, 0x20100), (0xA000, 0xA100)],
}

_EMOJI = ["😀", "👍🏽", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇨🇭", "🇯🇵🇧🇷", "❤️", "☂", "1️⃣", "🤷🏿‍♀️", "✈︎", "🧑‍💻", "🫠"]
_SPACES = [" ", "  ", "    ", "\t", "\n", "\r\n", "\r", "\n\n\n", "\u00a0", "\u2003", "\u3000",
           "\u2028", "\u0085", "\u200b", "\ufeff", "\u180e", "\x0b", "\x0c", "\u202f", "\x1f", "\0"]
_MARKS = [0x300, 0x301, 0x302, 0x303, 0x308, 0x30A, 0x30C, 0x323, 0x327, 0x328, 0x331, 0x345, 0x5B0]
_PUNCTUATION = list(".,;:!?-_/\\|()[]{}<>@#$%^&*+=~`\"'") + ["…", "—", "«", "»", "、", "。", "！", "€",
                                                             "©", "½", "²", "Ⅷ", "①", "٣", "५"]


class _Writer:
    def __init__(self, seed):
        self.random = random.Random(seed)
        self.names = [self._name() for _ in range(400)]

    def _name(self):
        r = self.random
        return "".join(r.choice("bcdfghklmnprstvz") + r.choice("aeiou") for _ in range(r.randint(1, 4)))

    def _word(self):
        r = self.random
        kind = r.random()
        word = r.choice(_COMMON) if kind < 0.6 else r.choice(self.names)
        if kind > 0.97:
            word = r.choice(_CONTRACTIONS)
        if r.random() < 0.1:
            word = word.capitalize() if r.random() < 0.8 else word.upper()
        return word

    def prose(self):
        r = self.random
        sentences = []
        for _ in range(r.randint(1, 5)):
            words = [self._word() for _ in range(r.randint(3, 18))]
            if r.random() < 0.3:
                words.insert(r.randrange(len(words)), str(r.randrange(10 ** r.randint(1, 12))))
            sentences.append(" ".join(words).capitalize() + r.choice([".", ".", "!", "?", "...", ";"]))
        return " ".join(sentences) + r.choice(["\n", "\n\n", " ", "\r\n"])

    def code(self):
        r = self.random
        pick = lambda: r.choice(self.names)
        return r.choice(_CODE).format(
            a=pick(), b=pick() + "_" + pick(), c=pick()[:1], w=self._word(), w2=pick(),
            n=r.randrange(10000), n2=r.randrange(64))

    def script(self):
        r = self.random
        ranges = _RANGES[r.choice(sorted(_RANGES))]
        words = []
        for _ in range(r.randint(2, 12)):
            low, high = r.choice(ranges)
            words.append("".join(chr(r.randint(low, high)) for _ in range(r.randint(1, 9))))
        return r.choice(["", " ", "、", "-"]).join(words) + r.choice(["。", ".", "\n", " ", "؟"])

    def emoji(self):
        r = self.random
        return "".join(r.choice(_EMOJI) + r.choice(["", "", " "]) for _ in range(r.randint(1, 6)))

    def spaces(self):
        r = self.random
        if r.random() < 0.1:
            return r.choice(" \t\n\u3000") * r.randint(10, 200)
        return "".join(r.choice(_SPACES) for _ in range(r.randint(1, 6)))

    def marks(self):
        """Returns letters with combining marks in any order, so that NFC composes and reorders."""
        r = self.random
        letters = []
        for _ in range(r.randint(1, 10)):
            letters.append(r.choice("aceinosuyAEIOU가ᄀα"))
            letters.extend(chr(r.choice(_MARKS)) for _ in range(r.randint(0, 3)))
        if r.random() < 0.2:
            letters.append(r.choice(["\u1100\u1161\u11a8", "\u212b", "\u2126", "\u0958", "\uf900"]))
        return "".join(letters) + " "

    def punctuation(self):
        r = self.random
        if r.random() < 0.1:
            return r.choice(_PUNCTUATION) * r.randint(3, 80)
        return "".join(r.choice(_PUNCTUATION) for _ in range(r.randint(1, 8)))

    def garbage(self):
        r = self.random
        out = []
        while len(out) < 8:
            c = r.randrange(0x110000) if r.random() < 0.3 else r.randrange(0x3000)
            # Every Python has the database of Unicode 3.2; later additions are left out.
            if unicodedata.ucd_3_2_0.category(chr(c)) not in ("Cn", "Cs"):
                out.append(chr(c))
        return "".join(out)


def mixed_text(seed, num_bytes, with_garbage=True):
    """Returns text of at most `num_bytes` bytes of UTF-8 and at least that less 64 KiB."""
    writer = _Writer(seed)
    kinds = [(writer.prose, 30), (writer.code, 22), (writer.script, 16), (writer.emoji, 5),
             (writer.spaces, 9), (writer.marks, 7), (writer.punctuation, 9)]
    if with_garbage:
        kinds.append((writer.garbage, 2))
    makers, weights = zip(*kinds)
    parts, size = [], 0
    while True:
        part = writer.random.choices(makers, weights)[0]()
        size += len(part.encode("utf-8"))
        if size > num_bytes:
            return "".join(parts)
        parts.append(part)
