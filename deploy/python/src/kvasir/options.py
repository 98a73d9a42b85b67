"""Options of a request, and how they become the message."""

import dataclasses
import pathlib
import random
from typing import Any, Mapping, Optional, Sequence, Union

import grpc

from .errors import KvasirError
from .v1 import generation_pb2, sparsity_pb2

Prompt = Union[str, Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy that the server declared, and numbers of its parts for this request (fields of AttentionPolicy).

        Policy("long-context", decode={"token_budget": 4096, "window_tokens": 1024})
    """
    name: str = ""
    prefill: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    decode: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Retry:
    """When a call is tried again: the server is unavailable, or full and says when to come back. A stream that has
    brought something is never tried again."""
    attempts: int = 5
    first_delay_s: float = 0.25
    longest_delay_s: float = 10.0

    def delay(self, error: KvasirError, attempt: int) -> Optional[float]:
        """Seconds to wait after the failed attempt (1, 2, ...); None: give up."""
        full = error.code == grpc.StatusCode.RESOURCE_EXHAUSTED and error.retry_after_s is not None
        if attempt >= self.attempts or not (full or error.code == grpc.StatusCode.UNAVAILABLE):
            return None
        if error.retry_after_s is not None:
            return error.retry_after_s
        longest = min(self.longest_delay_s, self.first_delay_s * 2 ** (attempt - 1))
        return longest * random.uniform(0.5, 1)  # clients that were refused together come back apart


NO_RETRY = Retry(attempts=1)


def policy_choice(policy: Union[str, Policy]) -> sparsity_pb2.PolicyChoice:
    chosen = Policy(policy) if isinstance(policy, str) else policy
    choice = sparsity_pb2.PolicyChoice(name=chosen.name)
    if chosen.prefill:
        choice.prefill_overrides.CopyFrom(sparsity_pb2.AttentionPolicy(**chosen.prefill))
    if chosen.decode:
        choice.decode_overrides.CopyFrom(sparsity_pb2.AttentionPolicy(**chosen.decode))
    return choice


def make_request(prompt: Prompt, policy: Union[str, Policy], *, context: str = "", request_id: str = "", tenant_id: str = "",
                 parse_special_tokens: bool = False, add_special_tokens: Optional[bool] = None, stop: Union[str, Sequence[str]] = (),
                 logit_bias: Optional[Mapping[int, float]] = None, **sampling: Any) -> generation_pb2.GenerateRequest:
    """`sampling`: fields of SamplingParams. TypeError names a field that there is not. Special tokens precede the prompt
    unless a context does, or `add_special_tokens` says otherwise."""
    request = generation_pb2.GenerateRequest(request_id=request_id, tenant_id=tenant_id, context=context)
    if isinstance(prompt, str):
        request.text = prompt
        request.parse_special_tokens = parse_special_tokens
        request.add_special_tokens = not context if add_special_tokens is None else add_special_tokens
    else:
        request.token_ids.ids.extend(prompt)
    known = generation_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    unknown = sorted(set(sampling) - set(known))
    if unknown:
        raise TypeError(f"no sampling option {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    request.sampling.CopyFrom(generation_pb2.SamplingParams(**{k: v for k, v in sampling.items() if v is not None}))
    request.sampling.stop.extend([stop] if isinstance(stop, str) else stop)
    for token, bias in (logit_bias or {}).items():
        request.sampling.logit_bias.add(token_id=token, bias=bias)
    request.policy.CopyFrom(policy_choice(policy))
    return request


def channel_credentials(ca_file: str, cert_file: str, key_file: str) -> Optional[grpc.ChannelCredentials]:
    """Credentials of TLS from PEM files; None without a CA: the connection is plain."""
    if bool(cert_file) != bool(key_file) or (cert_file and not ca_file):
        raise ValueError("tls_cert_file and tls_key_file belong together, and to a tls_ca_file")
    if not ca_file:
        return None
    ca, key, certificate = (pathlib.Path(file).read_bytes() if file else None for file in (ca_file, key_file, cert_file))
    return grpc.ssl_channel_credentials(ca, key, certificate)
