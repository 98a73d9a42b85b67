"""Events of a stream and the answer that they add up to."""

import dataclasses
from typing import List, Optional, Union

from .v1 import generation_pb2


@dataclasses.dataclass(frozen=True)
class Progress:
    """Sent while the prompt is read, and when the request has to wait for a worker."""
    processed_tokens: int
    prompt_tokens: int
    cached_tokens: int
    eta_s: Optional[float]  # to the first token; None: not known yet
    waits_for_worker: bool = False  # perhaps in the middle of the answer, which then goes on


@dataclasses.dataclass(frozen=True)
class Text:
    """A piece of the answer. The text may be empty while a character is incomplete."""
    text: str
    token_ids: List[int]
    logprobs: List[generation_pb2.TokenLogprobs]


@dataclasses.dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_device: int  # prompt tokens whose KV was reused, by the tier that held it
    cached_host: int
    cached_disk: int
    cached_peer: int

    @property
    def cached_tokens(self) -> int:
        return self.cached_device + self.cached_host + self.cached_disk + self.cached_peer


@dataclasses.dataclass
class Answer:
    """A finished answer, and the last event of a stream."""
    text: str
    token_ids: List[int]
    logprobs: List[generation_pb2.TokenLogprobs]
    finish_reason: str  # stop or length
    stopped_by: Union[str, int, None]  # the stop string or stop token
    usage: Usage
    attention: generation_pb2.AttentionReport  # pages skipped, attention mass kept

    @property
    def pages_skipped_ratio(self) -> float:
        """Share of the pages of dense decoding that were not read."""
        total = self.attention.decode_blocks_total
        skipped = self.attention.decode_blocks_skipped
        return (skipped.selected_out + skipped.window + skipped.pruned + skipped.terminated) / total if total else 0.0


Event = Union[Progress, Text, Answer]


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    name: str
    max_context_length: int
    vocab_size: int
    policies: List[str]


class Assembler:
    """Makes events of the messages of one stream."""

    def __init__(self) -> None:
        self._text: List[str] = []
        self._token_ids: List[int] = []
        self._logprobs: List[generation_pb2.TokenLogprobs] = []

    def take(self, response: generation_pb2.GenerateResponse) -> Event:
        kind = response.WhichOneof("event")
        if kind == "progress":
            said = response.progress
            eta = said.eta.ToTimedelta().total_seconds() if said.HasField("eta") else None
            return Progress(said.processed_tokens, said.prompt_tokens, said.cached_tokens, eta, said.waits_for_worker)
        if kind == "tokens":
            piece = Text(response.tokens.text, list(response.tokens.token_ids), list(response.tokens.logprobs))
            self._text.append(piece.text)
            self._token_ids += piece.token_ids
            self._logprobs += piece.logprobs
            return piece
        return self._answer(response.finish)

    def _answer(self, finish: generation_pb2.Finish) -> Answer:
        cached = finish.usage.cached_tokens
        stop = finish.WhichOneof("matched_stop")
        return Answer(
            "".join(self._text), self._token_ids, self._logprobs,
            "length" if finish.reason == generation_pb2.FINISH_REASON_LENGTH else "stop",
            getattr(finish, stop) if stop else None,
            Usage(finish.usage.prompt_tokens, finish.usage.completion_tokens, cached.device, cached.host, cached.disk, cached.peer),
            finish.attention)


def model_info(message: generation_pb2.GetModelInfoResponse) -> ModelInfo:
    return ModelInfo(message.served_model_name, message.max_context_length, message.vocab_size,
                     [policy.name for policy in message.policies])
