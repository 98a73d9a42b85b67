"""Contexts: documents with a name, which the server reads once for the requests that name them. `client.contexts`."""

import asyncio
import time
from typing import Any, Awaitable, Callable, List, Union

import grpc

from .errors import DeadlineExceeded, KvasirError
from .options import Policy, Prompt, policy_choice
from .v1 import contexts_pb2, contexts_pb2_grpc

POLL_S = 0.1


def _create(name: str, document: Prompt, policy: Union[str, Policy], add_special_tokens: bool, parse_special_tokens: bool,
            tenant_id: str) -> contexts_pb2.CreateContextRequest:
    request = contexts_pb2.CreateContextRequest(name=name, tenant_id=tenant_id, policy=policy_choice(policy))
    if isinstance(document, str):
        request.text = document
        request.add_special_tokens = add_special_tokens
        request.parse_special_tokens = parse_special_tokens
    else:
        request.token_ids.ids.extend(document)
    return request


def _pin(name: str, tier: str, ttl_s: int, refresh_on_hit: bool, tenant_id: str) -> contexts_pb2.PinContextRequest:
    return contexts_pb2.PinContextRequest(name=name, tenant_id=tenant_id, tier=_tier(tier), ttl_s=ttl_s, refresh_on_hit=refresh_on_hit)


def _tier(name: str) -> str:
    return f"TIER_{name.upper()}"


def _is_read(context: contexts_pb2.Context, deadline: float) -> bool:
    """Raises what keeps it from being read."""
    if context.state == contexts_pb2.CONTEXT_STATE_READY:
        return True
    if context.state in (contexts_pb2.CONTEXT_STATE_FAILED, contexts_pb2.CONTEXT_STATE_EVICTED):
        state = contexts_pb2.ContextState.Name(context.state).removeprefix("CONTEXT_STATE_").lower()
        raise KvasirError(f"context {context.name} is {state}: {context.state_reason}", grpc.StatusCode.FAILED_PRECONDITION)
    if time.monotonic() >= deadline:
        raise DeadlineExceeded(f"{context.processed_tokens} of {context.tokens} tokens of context {context.name} are read",
                               grpc.StatusCode.DEADLINE_EXCEEDED)
    return False


class Contexts:
    """Calls return the server's messages (contexts.proto)."""

    def __init__(self, channel: grpc.Channel, call: Callable[..., Any]):
        self._stub = contexts_pb2_grpc.ContextsStub(channel)
        self._call = call

    def create(self, name: str, document: Prompt, *, policy: Union[str, Policy] = "", add_special_tokens: bool = True,
               parse_special_tokens: bool = False, tenant_id: str = "") -> contexts_pb2.Context:
        """Names the document, which is then read in the background; wait() returns when it is."""
        return self._call(self._stub.Create, _create(name, document, policy, add_special_tokens, parse_special_tokens, tenant_id))

    def wait(self, name: str, *, timeout_s: float = 3600, tenant_id: str = "") -> contexts_pb2.Context:
        """Returns the context when it is read. KvasirError when it cannot be, DeadlineExceeded when it takes longer."""
        deadline = time.monotonic() + timeout_s
        while not _is_read(context := self.get(name, tenant_id=tenant_id), deadline):
            time.sleep(POLL_S)
        return context

    def get(self, name: str, *, tenant_id: str = "") -> contexts_pb2.Context:
        return self._call(self._stub.Get, contexts_pb2.GetContextRequest(name=name, tenant_id=tenant_id))

    def list(self, *, tenant_id: str = "") -> List[contexts_pb2.Context]:
        return [*self._call(self._stub.List, contexts_pb2.ListContextsRequest(tenant_id=tenant_id)).contexts]

    def delete(self, name: str, *, tenant_id: str = "") -> None:
        self._call(self._stub.Delete, contexts_pb2.DeleteContextRequest(name=name, tenant_id=tenant_id))

    def pin(self, name: str, *, tier: str = "host", ttl_s: int = 3600, refresh_on_hit: bool = False,
            tenant_id: str = "") -> contexts_pb2.ContextHint:
        """Keeps its KV in the tier, "host" or "disk", for a time. A hint: its outcome says what was granted."""
        return self._call(self._stub.Pin, _pin(name, tier, ttl_s, refresh_on_hit, tenant_id))

    def unpin(self, name: str, *, tier: str = "host", tenant_id: str = "") -> contexts_pb2.ContextHint:
        return self._call(self._stub.Unpin, contexts_pb2.UnpinContextRequest(name=name, tenant_id=tenant_id, tier=_tier(tier)))


class AsyncContexts:
    """As Contexts, with coroutines."""

    def __init__(self, channel: Any, call: Callable[..., Awaitable[Any]]):
        self._stub = contexts_pb2_grpc.ContextsStub(channel)
        self._call = call

    async def create(self, name: str, document: Prompt, *, policy: Union[str, Policy] = "", add_special_tokens: bool = True,
                     parse_special_tokens: bool = False, tenant_id: str = "") -> contexts_pb2.Context:
        return await self._call(self._stub.Create, _create(name, document, policy, add_special_tokens, parse_special_tokens, tenant_id))

    async def wait(self, name: str, *, timeout_s: float = 3600, tenant_id: str = "") -> contexts_pb2.Context:
        deadline = time.monotonic() + timeout_s
        while not _is_read(context := await self.get(name, tenant_id=tenant_id), deadline):
            await asyncio.sleep(POLL_S)
        return context

    async def get(self, name: str, *, tenant_id: str = "") -> contexts_pb2.Context:
        return await self._call(self._stub.Get, contexts_pb2.GetContextRequest(name=name, tenant_id=tenant_id))

    async def list(self, *, tenant_id: str = "") -> List[contexts_pb2.Context]:
        return [*(await self._call(self._stub.List, contexts_pb2.ListContextsRequest(tenant_id=tenant_id))).contexts]

    async def delete(self, name: str, *, tenant_id: str = "") -> None:
        await self._call(self._stub.Delete, contexts_pb2.DeleteContextRequest(name=name, tenant_id=tenant_id))

    async def pin(self, name: str, *, tier: str = "host", ttl_s: int = 3600, refresh_on_hit: bool = False,
                  tenant_id: str = "") -> contexts_pb2.ContextHint:
        return await self._call(self._stub.Pin, _pin(name, tier, ttl_s, refresh_on_hit, tenant_id))

    async def unpin(self, name: str, *, tier: str = "host", tenant_id: str = "") -> contexts_pb2.ContextHint:
        return await self._call(self._stub.Unpin, contexts_pb2.UnpinContextRequest(name=name, tenant_id=tenant_id, tier=_tier(tier)))
