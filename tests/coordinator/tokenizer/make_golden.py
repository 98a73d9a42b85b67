#!/usr/bin/env python3
"""Makes the golden files of the tokenizer tests with Hugging Face `tokenizers`.

    python tests/coordinator/tokenizer/make_golden.py        (needs tokenizers 0.23, Python 3.11)

Trains small byte-level BPE tokenizers with the exact pre-tokenization of GPT-2, Llama 3 and Qwen2
and records the answers of `tokenizers`. (Agreement does not need pretrained vocabularies: the merge
rule is the same at any size.) Writes into golden/ beside this file:

    mixed_text.txt          1 MB of text, the same for every tokenizer
    unicode_ranges.json     the code points assigned in Unicode 14, PCRE2 10.42's version
    <name>/tokenizer.json   the tokenizer
    <name>/cases.json       ids of hostile short texts in full, digests of the ids of the long ones
    split_behaviors.json    pieces of the Split pre-tokenizer for every behaviour
"""

import hashlib
import json
import pathlib
import struct
import unicodedata

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers, processors, trainers

from mixed_text import mixed_text

GOLDEN = pathlib.Path(__file__).parent / "golden"
DIGEST_EVERY = 4096  # ids per digest; a mismatch is located to this many ids

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")

HOSTILE = [
    "", " ", "  ", "\n", "a", "\0", "a\0b", "\x7f\x80\x9f", "\r\n \r\n\n\r", " \n  \n   x   \n",
    "I'll I'LL I'Ll we'Re it'S'T 'sa ''s '’s 'ſ I'ſt ſ K'ſ", "don’t can't", "'", "''''", " 's",
    "1234567890", "1 22 333 4444 55555", "٣٤٥٦٧ ४५६ Ⅷ½²③ 1٣a", "3.14159e-10 0x1F 1_000_000",
    "\u00a0a\u00a0\u00a0b", "\u3000\u3000日本\u3000", "a\u2028b\u2029c\u0085d", "\u180e \u180e a", "\ufeffa",
    "x \t\t y\t \tz", "end   ", "   start", "tab\tnew\nline\r\n", "\u200b\u200c\u200d\u2060",
    "👩‍👩‍👧‍👦👍🏽🇨🇭1️⃣❤️", "שלום עולם مرحبا بالعالم", "नमस्ते दुनिया", "สวัสดีชาวโลก", "中文字符，标点。「」", "한국어 ᄒ\u1161ᆫ",
    "e\u0301 E\u0301\u0323 a\u0323\u0302 \u1e9b\u0323 \u212b \u2126 \u0958 \uf900 \ufb01 \ufdfa",
    "\u0301leading mark", "a" + "\u0301\u0323" * 60 + "b", "\u1100\u1161\u11a8\u1100\u1161", "\u0344\u0385",
    "\ud7ff\ue000\uffff\U0010ffff\ufffd", "naïve café œuvre Straße ĲSSELMEER ǅ ﬀ", "aaaaaaaaaaaaaaaaaaaaaaaa" * 10,
    " " * 300, "\n" * 300, " \n" * 150, "!" * 300, "ab" * 200, "\u3000" * 100, "x" + " " * 100 + "\n" + " " * 99 + "y",
    "<|endoftext|>", "a<|endoftext|>b <|endoftext|> <|endoftext|><|endoftext|>", "<|endoftext|", "<|<|endoftext|>|>",
    "<|begin_of_text|>hello<|eot_id|>\n\n", "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>", "<think", "<tool_call>{\"a\": 1}</tool_call>",
    "the haystack of the needle", " haystack", "haystack haystacks", "xyzzy plugh",
]

ODD = [
    "", "a", " a", "a  <mask>\n\u3000b", "<mask> <mask>", "<mask><mask><mask>", " <mask>", "<mask> ", "\u180e<mask>\u0085x",
    "words word sword word_ word\u0301 word- ⓦword wordⓦ word\u200d", "word", "word word", "e\u0301t\u00e9", "\u00e9t\u00e9 e\u0301te\u0301",
    "a\u0301y \u00e1y", "a\u0301\u0327y", "two words, two  words", "日本語 日本", "1234 56 ७८", "x\u00a0<mask>", "left <l> right<l>",
    " \n <r> \n <r>  z", "<l><r> <l> <r>", "abc<sp>def <sp> ghi", "caf\u00e9 cafe\u0301", "<mask>word<mask>", "word<mask> word",
]

SPLITS = [
    (r"\s+", " a  b c ", None), (r"\s", "a  b\n\nc", None), (r"\p{N}", "12a3 4", None), (r"[,.]", ",a,,b.c.", None),
    (r"\p{N}{1,3}", "1234567a12", None), (r"\p{L}+|\p{N}+", "ab1 2cd!", None), (r"(?i:'s|'t)|x", "a's'Tx'ſ", None),
    (r"[^\S\n]+", "a \t\n \u3000\u180eb", None), (r"\d+", "a1٣b", None), (r"\p{Han}+", "日本々〆ー〇ab漢", None),
    (r"[一-龥぀-ゟ゠-ヿ]+", "日本のカタカナab", None), (r"\S+\s?", "ab cd  ef", None),
    (r"[\p{P}\p{S}]", "a+b=c!", None), (r"[\r\n]", "a\r\n\nb", None), (r"a.b", "axb a\nb a\rb", None),
    (r"(?<=a)b|b(?=c)", "ab bc b", None), (r"\u0061\x{62}", "ab aab", None), (r"[!-/\[\\\]^`{|}~]", "a[b]^c\\d", None),
    (None, "a  b c", " "), (None, "a.b..c", "."), (None, "aXXaXXa", "aXX"),
]


def digests(ids):
    out = []
    for begin in range(0, len(ids), DIGEST_EVERY):
        part = ids[begin:begin + DIGEST_EVERY]
        out.append(hashlib.sha256(struct.pack(f"<{len(part)}i", *part)).hexdigest()[:16])
    return out


def assigned_ranges():
    assert unicodedata.unidata_version == "14.0.0", "run with Python 3.11: PCRE2 10.42 knows Unicode 14"
    ranges = []
    for c in range(0x110000):
        if unicodedata.category(chr(c)) in ("Cn", "Cs", "Co"):
            continue
        if ranges and ranges[-1][1] == c - 1:
            ranges[-1][1] = c
        else:
            ranges.append([c, c])
    return ranges


def sweep_text(ranges):
    """Returns every code point beside a letter, a digit, itself and white space; the C++ test rebuilds it."""
    return "".join(f"a{c}1{c}{c} {c}'{c}\n" for low, high in ranges for c in map(chr, range(low, high + 1)))


def specials(*contents):
    return [AddedToken(c, special=True, normalized=False) for c in contents]


def add_unreachable_words(tok, words):
    """Adds words to the vocabulary that no merge makes: only ignore_merges finds them."""
    spec = json.loads(tok.to_str())
    vocab = spec["model"]["vocab"]
    for word in words:
        vocab[word] = len(vocab)
    return Tokenizer.from_str(json.dumps(spec))


def train(name):
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tok = Tokenizer(models.BPE(ignore_merges=name == "llama3"))
    tok.decoder = decoders.ByteLevel()
    if name == "gpt2":
        tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tok.post_processor = processors.ByteLevel(trim_offsets=False)
    else:
        pattern = LLAMA3_PATTERN if name == "llama3" else QWEN2_PATTERN
        tok.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    if name == "qwen2":
        tok.normalizer = normalizers.NFC()
        tok.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet,
                                  show_progress=False, limit_alphabet=256)
    training_text = mixed_text(seed=20240917, num_bytes=600_000, with_garbage=False)
    tok.train_from_iterator(training_text.splitlines(keepends=True), trainer)
    if name == "gpt2":
        tok.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=True)])
    if name == "llama3":
        tok = add_unreachable_words(tok, ["Ġhaystack", "xyzzy", "Ġplugh"])
        tok.add_special_tokens(specials(
            "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|start_header_id|>",
            "<|end_header_id|>", "<|eot_id|>"))
        begin = tok.token_to_id("<|begin_of_text|>")
        tok.post_processor = processors.Sequence([
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin_of_text|> $A", pair="<|begin_of_text|> $A <|begin_of_text|>:1 $B:1",
                special_tokens=[("<|begin_of_text|>", begin)])])
    if name == "qwen2":
        tok.add_special_tokens(specials("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
        tok.add_tokens([AddedToken(c, normalized=False) for c in
                        ("<think>", "</think>", "<tool_call>", "</tool_call>")])
    return json.loads(tok.to_str())


def edit_to_real_form(name, spec):
    """Changes the file to the form of published files, which the trainer does not write."""
    model = spec["model"]
    if name == "gpt2":  # an old file: merges as strings, no model.type, no use_regex, token in vocab
        model["merges"] = [" ".join(m) for m in model["merges"]]
        del model["type"]
        del spec["pre_tokenizer"]["use_regex"]
        model["vocab"]["<|endoftext|>"] = spec["added_tokens"][0]["id"]
    return spec


def odd_spec():
    """Returns a tokenizer with added tokens of every flag, a prefix space, single digits and two splits in a row."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for left, right in (("o", "r"), ("w", "or"), ("Ġ", "wor"), ("wor", "d"), ("1", "2"), ("Ġ", "a"), ("Ã", "©")):
        vocab[left + right] = len(vocab)
        merges.append([left, right])
    tok = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(m) for m in merges]))
    tok.normalizer = normalizers.Sequence([normalizers.NFC()])
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.Split(Regex(r"[一-龥]+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)])
    tok.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False)])
    tok.decoder = decoders.Sequence([decoders.ByteLevel()])
    tok.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True, special=True, normalized=False)])
    tok.add_tokens([
        AddedToken("word", single_word=True, normalized=False), AddedToken("<mask><mask>", normalized=False),
        AddedToken("e\u0301te\u0301", normalized=True), AddedToken("a\u0301y", normalized=False),
        AddedToken("two words", normalized=False), AddedToken("日本", normalized=False),
        AddedToken("<l>", lstrip=True, normalized=False), AddedToken("<r>", rstrip=True, normalized=True)])
    tok.add_special_tokens([AddedToken("<sp>", special=True, normalized=True)])
    return json.loads(tok.to_str())


def write_json(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


def record(tok, text, add_special_tokens=True, parse_special_tokens=True):
    tok.encode_special_tokens = not parse_special_tokens
    ids = tok.encode(text, add_special_tokens=add_special_tokens).ids
    return {"text": text, "add_special_tokens": add_special_tokens,
            "parse_special_tokens": parse_special_tokens, "ids": ids,
            "decoded": tok.decode(ids, skip_special_tokens=False),
            "decoded_skipping_special": tok.decode(ids, skip_special_tokens=True)}


def long_text(tok, text):
    tok.encode_special_tokens = False
    ids = tok.encode(text).ids
    decoded = tok.decode(ids, skip_special_tokens=False)
    return {"num_ids": len(ids), "digests": digests(ids),
            "decoded_sha256": hashlib.sha256(decoded.encode("utf-8")).hexdigest()}


def write_tokenizer(name, spec, texts, mixed, sweep):
    write_json(GOLDEN / name / "tokenizer.json", spec)
    tok = Tokenizer.from_file(str(GOLDEN / name / "tokenizer.json"))
    for token in spec["added_tokens"]:
        assert tok.token_to_id(token["content"]) == token["id"], token
    cases = [record(tok, text) for text in texts]
    cases += [record(tok, text, parse_special_tokens=False) for text in texts if "<" in text]
    cases.append(record(tok, "no template", add_special_tokens=False))
    write_json(GOLDEN / name / "cases.json", {
        "made_with": f"tokenizers {tokenizers.__version__}", "cases": cases,
        "mixed_text": long_text(tok, mixed), "sweep": long_text(tok, sweep)})


def write_splits():
    out = []
    for pattern, text, literal in SPLITS:
        for behavior in ("isolated", "removed", "contiguous", "merged_with_previous", "merged_with_next"):
            for invert in (False, True):
                split = pre_tokenizers.Split(literal if pattern is None else Regex(pattern), behavior, invert)
                out.append({"pattern": json.loads(split.__getstate__())["pattern"],
                            "behavior": json.loads(split.__getstate__())["behavior"], "invert": invert,
                            "text": text, "pieces": [p for p, _ in split.pre_tokenize_str(text)]})
    write_json(GOLDEN / "split_behaviors.json", out)


def main():
    mixed = mixed_text(seed=7, num_bytes=1_000_000)
    GOLDEN.mkdir(exist_ok=True)
    (GOLDEN / "mixed_text.txt").write_bytes(mixed.encode("utf-8"))
    ranges = assigned_ranges()
    write_json(GOLDEN / "unicode_ranges.json", ranges)
    sweep = sweep_text(ranges)
    for name in ("gpt2", "llama3", "qwen2"):
        write_tokenizer(name, edit_to_real_form(name, train(name)), HOSTILE, mixed, sweep)
    write_tokenizer("odd", odd_spec(), ODD + HOSTILE, mixed, sweep)
    write_splits()


if __name__ == "__main__":
    main()
