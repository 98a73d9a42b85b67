#!/usr/bin/env python3
"""Makes the golden files of tokenizers in the form of SentencePiece with Hugging Face `tokenizers`.

    python tests/coordinator/tokenizer/make_sentencepiece_golden.py    (after make_golden.py)

Trains one small vocabulary of characters and writes it in the forms that published files have:

    llama2       Llama 2, Mistral v0.1: Prepend and Replace, byte fallback (legacy: a space after special tokens)
    mistral      later files: Metaspace that prepends to the begin of the text only, byte fallback
    gemma        Replace only, a Split without effect, tokens for runs of spaces, ignore_merges
    metaspace    Metaspace before every piece, split into words, an unknown token, Metaspace as decoder
    odd_pieces   half of the bytes, unknown tokens that do not fuse, NFC, added tokens of every flag
"""

import json
import random

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers.decoders import DecodeStream

import make_golden
from make_golden import GOLDEN, HOSTILE, record, sweep_text, write_json
from mixed_text import mixed_text

MARK = "▁"
TEXTS = [
    "Hello", " Hello", "  Hello", "Hello ", "Hello  ", "  ", MARK, f"a{MARK}b", f"{MARK}a", f"{MARK} a", "\u00a0a", "\t a",
    "<s>", "<s>Hello", "<s> Hello", " <s>Hello", "Hello<s>", "Hello <s> there", "<s><s>a</s>", "a</s> b<unk>c", "</s>",
    "<s>[INST] Hi [/INST] Sure </s><s>[INST] More [/INST]", "<0x41>", "<0x41><0xFF>", "<0xE2><0x96><0x81>", "<pad>", " <pad> x",
    "ключ 鍵 مفتاح 🔑 a", "a🔑🔑b", "🔑", "é🔑é", "\ue000\ue000 \ue000a\ue000", "a\ue000\U000f0000b", "e\u0301e\u0301",
    "q" * 3000, "the" * 1000, "the " * 200, "🔑" * 100, (" " * 17 + "x") * 5, "a\0\0b", "\x01\x02\x7f", "<l> <r>  x", "word words  word",
]


def trained():
    """Returns the characters and words of the vocabulary, in order of rank, and the merges."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Metaspace(MARK, "always", True)
    trainer = trainers.BpeTrainer(vocab_size=1100, show_progress=False, limit_alphabet=150)
    text = mixed_text(seed=20240917, num_bytes=400_000, with_garbage=False)
    tok.train_from_iterator(text.splitlines(keepends=True), trainer)
    model = json.loads(tok.to_str())["model"]
    return list(model["vocab"]), [tuple(merge) for merge in model["merges"]]


def vocabulary(words, byte_values):
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for word in [f"<0x{byte:02X}>" for byte in byte_values] + words:
        vocab.setdefault(word, len(vocab))
    return vocab


def begins_with(tok, token):
    tok.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token}:1 $B:1", special_tokens=[(token, tok.token_to_id(token))])


def add_specials(tok, normalized=False):
    tok.add_special_tokens([AddedToken(c, special=True, normalized=normalized) for c in ("<unk>", "<s>", "</s>")])


def bytes_then_text(*last):
    return decoders.Sequence([decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *last])


def llama2(words, merges):
    tok = Tokenizer(models.BPE(vocabulary(words, range(256)), merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)])
    tok.decoder = bytes_then_text(decoders.Strip(" ", 1, 0))
    add_specials(tok)
    tok.add_tokens([AddedToken("<pad>", normalized=True), AddedToken("<l>", lstrip=True, normalized=False), AddedToken("<r>", rstrip=True, normalized=True)])
    begins_with(tok, "<s>")
    return tok


def mistral(words, merges):
    tok = Tokenizer(models.BPE(vocabulary(words, range(256)), merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tok.pre_tokenizer = pre_tokenizers.Metaspace(MARK, "first", False)
    tok.decoder = bytes_then_text(decoders.Strip(" ", 1, 0))
    add_specials(tok)
    tok.add_special_tokens([AddedToken(c, special=True, normalized=False) for c in ("[INST]", "[/INST]")])
    begins_with(tok, "<s>")
    return tok


def gemma(words, merges):
    runs = [MARK * n for n in range(2, 17)]
    pairs = [(MARK * (n // 2), MARK * (n - n // 2)) for n in range(2, 17)]
    vocab = vocabulary(words + runs + ["haystack", f"{MARK}xyzzy{MARK}plugh"], range(256))
    tok = Tokenizer(models.BPE(vocab, merges + pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True, ignore_merges=True))
    tok.normalizer = normalizers.Replace(" ", MARK)
    tok.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tok.decoder = bytes_then_text()
    add_specials(tok)
    begins_with(tok, "<s>")
    return tok


def metaspace(words, merges):
    tok = Tokenizer(models.BPE(vocabulary(words, []), merges, unk_token="<unk>", fuse_unk=True))
    tok.pre_tokenizer = pre_tokenizers.Metaspace(MARK, "always", True)
    tok.decoder = decoders.Metaspace(MARK, "always", True)
    add_specials(tok, normalized=True)
    return tok


def odd_pieces(words, merges):
    tok = Tokenizer(models.BPE(vocabulary(words, range(0x80, 0xF0)), merges, unk_token="<unk>", byte_fallback=True))
    tok.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("ll", "L")])
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Metaspace(MARK, "never", True)])
    tok.decoder = decoders.Sequence([decoders.Metaspace(MARK, "first", False), decoders.ByteFallback()])
    add_specials(tok)
    tok.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True, special=True, normalized=False)])
    tok.add_tokens([AddedToken("word", single_word=True, normalized=True), AddedToken("e\u0301e", normalized=True)])
    return tok


def streamed(tok, ids):
    stream = DecodeStream(skip_special_tokens=True)
    return [stream.step(tok, i) or "" for i in ids]


def decoding(tok, ids):
    return {"ids": ids, "decoded": tok.decode(ids, skip_special_tokens=False),
            "decoded_skipping_special": tok.decode(ids, skip_special_tokens=True)}


def id_cases(tok):
    """Returns the answers for ids that no text has: bytes alone and in runs, and ids drawn at random."""
    vocab = tok.get_vocab()
    byte = {b: vocab[f"<0x{b:02X}>"] for b in range(256) if f"<0x{b:02X}>" in vocab}
    word, begin = vocab[f"{MARK}the"], vocab["<s>"]
    runs = [[b] for b in byte]
    if len(byte) == 256:
        runs += [list(range(0x80)), [0x20], [0x20, 0x20, 0x41], list(MARK.encode()), list("é🔑".encode()), [0xFF, 0xC3, 0xF0, 0x9F]]
    cases = []
    for run in runs:
        ids = [byte[b] for b in run]
        cases += [decoding(tok, ids), decoding(tok, [word] + ids), decoding(tok, ids + [word]), decoding(tok, [begin] + ids + [begin, word])]
    draw = random.Random(3)
    whole = [i for i in range(tok.get_vocab_size()) if i not in byte.values()]
    for _ in range(200):
        cases.append(decoding(tok, [draw.choice(whole) for _ in range(draw.randrange(12))]))
    return cases


def write_tokenizer(name, tok, mixed, sweep):
    write_json(GOLDEN / name / "tokenizer.json", json.loads(tok.to_str()))
    texts = TEXTS + HOSTILE
    cases = [record(tok, text) for text in texts]
    for case in cases:
        if "\ufffd" not in case["text"]:
            case["streamed"] = streamed(tok, case["ids"])
    cases += [record(tok, text, parse_special_tokens=False) for text in texts if "<" in text]
    write_json(GOLDEN / name / "cases.json", {
        "made_with": f"tokenizers {make_golden.tokenizers.__version__}", "cases": cases, "id_cases": id_cases(tok),
        "mixed_text": make_golden.long_text(tok, mixed), "sweep": make_golden.long_text(tok, sweep)})


def main():
    words, merges = trained()
    mixed = (GOLDEN / "mixed_text.txt").read_bytes().decode("utf-8")
    sweep = sweep_text(json.loads((GOLDEN / "unicode_ranges.json").read_text()))
    for make in (llama2, mistral, gemma, metaspace, odd_pieces):
        write_tokenizer(make.__name__, make(list(words), list(merges)), mixed, sweep)


if __name__ == "__main__":
    main()
