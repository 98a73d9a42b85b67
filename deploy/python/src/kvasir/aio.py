"""The client for asyncio. One event loop at a time."""

import asyncio
import time
from typing import Any, AsyncIterator, Callable, List, Optional, Union

import grpc
import grpc.aio

from .client import CHANNEL_OPTIONS
from .contexts import AsyncContexts
from .errors import KvasirError, from_grpc
from .messages import Answer, Assembler, Event, ModelInfo, Text, model_info
from .options import Policy, Prompt, Retry, channel_credentials, make_request
from .v1 import generation_pb2, generation_pb2_grpc


class AsyncClient:
    """As Client, with coroutines."""

    def __init__(self, address: str = "127.0.0.1:50051", *, tls_ca_file: str = "",
                 tls_cert_file: str = "", tls_key_file: str = "", api_key: str = "", retry: Retry = Retry()):
        credentials = channel_credentials(tls_ca_file, tls_cert_file, tls_key_file)
        self._channel = (grpc.aio.secure_channel(address, credentials, CHANNEL_OPTIONS) if credentials
                         else grpc.aio.insecure_channel(address, CHANNEL_OPTIONS))
        self._stub = generation_pb2_grpc.GenerationStub(self._channel)
        self._metadata = [("authorization", f"Bearer {api_key}")] if api_key else []
        self._retry = retry
        self.contexts = AsyncContexts(self._channel, self._call)

    async def stream(self, prompt: Prompt, *, policy: Union[str, Policy] = "", timeout_s: float = 3600,
                     **options: Any) -> AsyncIterator[Event]:
        request = make_request(prompt, policy, **options)
        deadline = time.monotonic() + timeout_s
        attempt = 0
        while True:
            attempt += 1
            call = self._stub.Generate(request, timeout=max(0.0, deadline - time.monotonic()),
                                       metadata=self._metadata)
            assembler, began = Assembler(), False
            try:
                async for response in call:
                    began = True
                    yield assembler.take(response)
                return
            except grpc.RpcError as error:
                await self._wait_or_raise(from_grpc(error), attempt, began)
            finally:
                call.cancel()

    async def generate(self, prompt: Prompt, *, on_text: Optional[Callable[[str], None]] = None, **options: Any) -> Answer:
        async for event in self.stream(prompt, **options):
            if isinstance(event, Text) and on_text:
                on_text(event.text)
            if isinstance(event, Answer):
                return event
        raise KvasirError("the stream ended without a finish", grpc.StatusCode.INTERNAL)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = False) -> List[int]:
        request = generation_pb2.TokenizeRequest(text=text, add_special_tokens=add_special_tokens,
                                                 parse_special_tokens=parse_special_tokens)
        return list((await self._call(self._stub.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: List[int], *, skip_special_tokens: bool = True) -> str:
        request = generation_pb2.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return (await self._call(self._stub.Detokenize, request)).text

    async def model_info(self) -> ModelInfo:
        return model_info(await self._call(self._stub.GetModelInfo, generation_pb2.GetModelInfoRequest()))

    async def server_info(self) -> generation_pb2.GetServerInfoResponse:
        return await self._call(self._stub.GetServerInfo, generation_pb2.GetServerInfoRequest())

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call(self, method: Callable[..., Any], request: Any) -> Any:
        attempt = 0
        while True:
            attempt += 1
            try:
                return await method(request, timeout=60, metadata=self._metadata)
            except grpc.RpcError as error:
                await self._wait_or_raise(from_grpc(error), attempt, began=False)

    async def _wait_or_raise(self, error: KvasirError, attempt: int, began: bool) -> None:
        delay = None if began else self._retry.delay(error, attempt)
        if delay is None:
            raise error from None
        await asyncio.sleep(delay)
