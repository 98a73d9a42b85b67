"""The blocking client. Thread-safe."""

import time
from typing import Any, Callable, Iterator, List, Optional, TypeVar, Union

import grpc

from .contexts import Contexts
from .errors import KvasirError, from_grpc
from .messages import Answer, Assembler, Event, ModelInfo, Text, model_info
from .options import Policy, Prompt, Retry, channel_credentials, make_request
from .v1 import generation_pb2, generation_pb2_grpc

CHANNEL_OPTIONS = [("grpc.max_send_message_length", 64 << 20), ("grpc.max_receive_message_length", 64 << 20)]
Result = TypeVar("Result")


class Client:
    def __init__(self, address: str = "127.0.0.1:50051", *, tls_ca_file: str = "",
                 tls_cert_file: str = "", tls_key_file: str = "", api_key: str = "", retry: Retry = Retry()):
        """`tls_ca_file`: PEM file with the CAs by which the server is known; without it the connection is plain.
        `tls_cert_file`, `tls_key_file`: for a server that asks clients for a certificate. `api_key`: for one that has
        keys. ValueError for files that do not go together."""
        credentials = channel_credentials(tls_ca_file, tls_cert_file, tls_key_file)
        self._channel = (grpc.secure_channel(address, credentials, CHANNEL_OPTIONS) if credentials
                         else grpc.insecure_channel(address, CHANNEL_OPTIONS))
        self._stub = generation_pb2_grpc.GenerationStub(self._channel)
        self._metadata = [("authorization", f"Bearer {api_key}")] if api_key else []
        self._retry = retry
        self.contexts = Contexts(self._channel, self._call)

    def stream(self, prompt: Prompt, *, policy: Union[str, Policy] = "", timeout_s: float = 3600, **options: Any) -> Iterator[Event]:
        """Yields Progress while the prompt is read, Text for each piece of the answer, and at last the Answer.

        `options`: context (the name of one, whose tokens precede the prompt), stop, logit_bias, request_id, tenant_id,
        parse_special_tokens, and the fields of SamplingParams (max_tokens, temperature, seed, ...). Closing the iterator
        cancels the request.
        """
        request = make_request(prompt, policy, **options)
        deadline = time.monotonic() + timeout_s
        attempt = 0
        while True:
            attempt += 1
            call = self._stub.Generate(request, timeout=max(0.0, deadline - time.monotonic()),
                                       metadata=self._metadata)
            assembler, began = Assembler(), False
            try:
                for response in call:
                    began = True
                    yield assembler.take(response)
                return
            except grpc.RpcError as error:
                self._wait_or_raise(from_grpc(error), attempt, began)
            finally:
                call.cancel()  # the request of an iterator that was closed

    def generate(self, prompt: Prompt, *, on_text: Optional[Callable[[str], None]] = None, **options: Any) -> Answer:
        """Returns the whole answer; `on_text` is called with each piece as it comes."""
        for event in self.stream(prompt, **options):
            if isinstance(event, Text) and on_text:
                on_text(event.text)
            if isinstance(event, Answer):
                return event
        raise KvasirError("the stream ended without a finish", grpc.StatusCode.INTERNAL)

    def tokenize(self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = False) -> List[int]:
        request = generation_pb2.TokenizeRequest(text=text, add_special_tokens=add_special_tokens,
                                                 parse_special_tokens=parse_special_tokens)
        return list(self._call(self._stub.Tokenize, request).token_ids)

    def detokenize(self, token_ids: List[int], *, skip_special_tokens: bool = True) -> str:
        request = generation_pb2.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return self._call(self._stub.Detokenize, request).text

    def model_info(self) -> ModelInfo:
        return model_info(self._call(self._stub.GetModelInfo, generation_pb2.GetModelInfoRequest()))

    def server_info(self) -> generation_pb2.GetServerInfoResponse:
        return self._call(self._stub.GetServerInfo, generation_pb2.GetServerInfoRequest())

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, method: Callable[..., Result], request: Any) -> Result:
        attempt = 0
        while True:
            attempt += 1
            try:
                return method(request, timeout=60, metadata=self._metadata)
            except grpc.RpcError as error:
                self._wait_or_raise(from_grpc(error), attempt, began=False)

    def _wait_or_raise(self, error: KvasirError, attempt: int, began: bool) -> None:
        delay = None if began else self._retry.delay(error, attempt)
        if delay is None:
            raise error from None
        time.sleep(delay)
