"""Measures exact-answer rates of the reference model, as a service would serve it: each question is a separate request
over a document whose KV is cached, with greedy decode.

Two ways to attend:
    dense     all tokens at their true positions.
    selected  the document is read with sink + window. Each token of question and answer then attends to the sink, the
              `top` keys of the document with the best scores, the window, and itself, at compact positions 0, 1, 2, ... .
              The score of a key is the softmax over the document, with keys unrotated and all at one common distance,
              summed over the query heads of a KV head. top = 0 leaves only sink + window.
"""

from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing.pool import Pool
from typing import Callable, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

import documents
from needle_data import ROOM, SINK, Encoder
from needle_model import Needle, Rope, rotate

SELECTION_DISTANCE = 1024  # tokens between query and every key while scoring
GROUP_TOKENS = 2 ** 17  # most tokens of documents worked on at a time
READ_CHUNK = 512  # tokens of the document read at once under sink + window
MAX_TOKENS = 2 ** 23  # of all documents of an evaluation; long documents with one question give fewer answers


@dataclass(frozen=True)
class Selection:
    top: int  # selected keys besides sink and window
    window: int  # tokens before the query that are always attended to


@dataclass(frozen=True)
class Score:
    exact: int
    answers: int

    def __str__(self) -> str:
        return f"{self.exact / self.answers:.3f} ({self.exact}/{self.answers})"


@torch.inference_mode()
def evaluate(model: Needle, encoder: Encoder, task: str, length: int, answers: int, seed: int = 10 ** 6,
             selection: Optional[Selection] = None, *, pool: Pool) -> Score:
    """Asks at least `answers` questions over documents that fill `length` tokens together with question and answer.

    The model must be in bf16 on its device. `pool` makes the documents; a few are worked on at a time.
    """
    num_questions = 1 if task in ("pass_key", "common_words") else min(16, length // 64)
    num_documents = min(-(-answers // num_questions), MAX_TOKENS // length)
    group = max(1, min(16, GROUP_TOKENS // length))
    exact = 0
    made = pool.imap(partial(documents.make_document, task, length - ROOM, num_questions), range(seed, seed + num_documents))
    while texts := list(islice(made, group)):
        questions = [question for document in texts for question in document.questions]
        cache = read_documents(model, [[encoder.begin] + encoder(document.text) for document in texts], selection)
        given = answer(model, cache, [encoder(question.prompt) for question in questions], encoder.end)
        exact += sum(encoder.decode(tokens) == question.answer for tokens, question in zip(given, questions))
    return Score(exact, num_documents * num_questions)


@dataclass
class DocumentCache:
    """Unrotated keys, and values: a pair of [documents, KV heads, tokens, head_dim] per layer."""

    layers: List[Tuple[Tensor, Tensor]]
    selection: Optional[Selection]


def read_documents(model: Needle, tokens: List[List[int]], selection: Optional[Selection]) -> DocumentCache:
    """Reads documents of one length."""
    device = model.lm_head.weight.device
    rope = Rope(model.config, device)
    layers: List[Tuple[Tensor, Tensor]] = []
    for part in torch.tensor(tokens, device=device).split(len(tokens[0]) if selection is None else READ_CHUNK, 1):

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if layer == len(layers):
                layers.append((k, v))
            else:
                layers[layer] = tuple(torch.cat(pair, 2) for pair in zip(layers[layer], (k, v)))
            keys, values = layers[layer]
            if selection is not None:
                keys, values = (_sink_and_window(x, selection.window + q.shape[2]) for x in (keys, values))
            return attend_causally(q, keys, values, rope)

        model.model(part, attend)
    return DocumentCache(layers, selection)


def _sink_and_window(x: Tensor, window: int) -> Tensor:
    """Returns the first SINK and the last `window` of tokens [.., .., tokens, head_dim]; all when there are no more."""
    if x.shape[2] <= SINK + window:
        return x
    return torch.cat((x[:, :, :SINK], x[:, :, -window:]), 2)


def attend_causally(q: Tensor, k: Tensor, v: Tensor, rope: Rope) -> Tensor:
    """Returns causal attention. Queries are of the last tokens of k; positions are 0, 1, 2, ... along k."""
    num_keys, num_queries = k.shape[2], q.shape[2]
    tables = rope.tables(torch.arange(num_keys, device=q.device))
    q = rotate(q, tuple(table[num_keys - num_queries:] for table in tables))
    k = rotate(k, tables)
    if num_keys == num_queries:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril(num_keys - num_queries)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def answer(model: Needle, cache: DocumentCache, prompts: List[List[int]], end: int, max_tokens: int = 48) -> List[List[int]]:
    """Returns greedy continuations of the prompts, without the end token. Each document has the same number of prompts,
    which are in the order of documents.

    All go token by token in the same steps: a prompt that has ended goes on with the model's tokens.
    """
    device = model.lm_head.weight.device
    attend = _QuestionAttention(cache, Rope(model.config, device))
    given: List[List[int]] = [[] for _ in prompts]
    done = [False] * len(prompts)
    tokens = [prompt[0] for prompt in prompts]
    for step in range(1, max(map(len, prompts)) + max_tokens):
        logits = model(torch.tensor(tokens, device=device)[:, None], attend)
        said = logits[:, -1].argmax(-1).tolist()
        for index, prompt in enumerate(prompts):
            if step < len(prompt):
                tokens[index] = prompt[step]
                continue
            tokens[index] = said[index]
            done[index] = done[index] or said[index] == end
            if not done[index]:
                given[index].append(said[index])
        if all(done):
            break
    return given


class _QuestionAttention:
    """Attention of the next token of each question over its document and its own tokens."""

    def __init__(self, cache: DocumentCache, rope: Rope):
        self._cache, self._rope = cache, rope
        self._own: List[Tuple[Tensor, Tensor]] = []  # per layer: [questions, KV heads, tokens so far, head_dim]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer == len(self._own):
            self._own.append((k, v))
        else:
            self._own[layer] = tuple(torch.cat(pair, 2) for pair in zip(self._own[layer], (k, v)))
        own_k, own_v = self._own[layer]
        keys, values = self._cache.layers[layer]
        q = q.unflatten(1, (k.shape[1], -1)).squeeze(3)  # [questions, KV heads, heads of a group, head_dim]
        if self._cache.selection is not None:
            keys, values = self._selected(q, keys, values)
        num_document, num_own = keys.shape[2], own_k.shape[2]
        tables = self._rope.tables(torch.arange(num_document + num_own, device=q.device))
        q = rotate(q, tuple(table[-1] for table in tables))
        keys = rotate(keys, tuple(table[:num_document] for table in tables))
        own_k = rotate(own_k, tuple(table[num_document:] for table in tables))
        scores = torch.cat((_each_question(_dot, q, keys), _dot(q, own_k)), -1)
        weights = (scores / q.shape[-1] ** 0.5).softmax(-1).to(q.dtype)
        out = _each_question(torch.matmul, weights[..., :num_document], values) + weights[..., num_document:] @ own_v
        return out.flatten(1, 2).unsqueeze(2)

    def _selected(self, q: Tensor, keys: Tensor, values: Tensor) -> Tuple[Tensor, Tensor]:
        """Returns, for each question and KV head, the sink, the best `top` keys in document order, and the window."""
        selection, num_tokens = self._cache.selection, keys.shape[2]
        middle = slice(SINK, max(SINK, num_tokens - selection.window))
        top = min(selection.top, middle.stop - middle.start)
        distant_q = rotate(q, self._rope.tables(torch.tensor(SELECTION_DISTANCE, device=q.device)))
        scores = _each_question(_dot, distant_q, keys[:, :, middle]) / q.shape[-1] ** 0.5
        chosen = scores.softmax(-1).sum(2).topk(top, -1).indices.sort(-1).values + SINK
        index = chosen[..., None].expand(-1, -1, -1, q.shape[-1])
        parts = []
        for x in (keys, values):
            x = x.repeat_interleave(q.shape[0] // x.shape[0], 0)
            parts.append(torch.cat((x[:, :, :SINK], x.gather(2, index), x[:, :, middle.stop:]), 2))
        return tuple(parts)


def _each_question(product: Callable[[Tensor, Tensor], Tensor], rows: Tensor, shared: Tensor) -> Tensor:
    """Returns product(rows of a question, its shared matrix) for rows [questions, KV heads, group, .]. `shared` is
    [questions, ...], or [documents, KV heads, ., .], each shared by questions / documents consecutive questions."""
    per_document = rows.shape[0] // shared.shape[0]
    folded = rows.unflatten(0, (-1, per_document)).transpose(1, 2).flatten(2, 3)
    return product(folded, shared).unflatten(2, (per_document, -1)).transpose(1, 2).flatten(0, 1)


def _dot(q: Tensor, k: Tensor) -> Tensor:
    """Returns scores in float32: bf16 would round them by more than the difference between neighbours."""
    return q.float() @ k.float().transpose(-1, -2)
