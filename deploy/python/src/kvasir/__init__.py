"""Client of Kvasir's gRPC API.

    with kvasir.Client("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", max_tokens=64).text)
        client.contexts.create("contract", document)
        print(client.generate("What does clause 7 say?", context="contract").text)

Client blocks, AsyncClient is for asyncio; both have the same methods. Errors are KvasirError with the server's message.
"""

from .aio import AsyncClient
from .client import Client
from .contexts import AsyncContexts, Contexts
from .errors import (DataLost, DeadlineExceeded, Exhausted, InvalidRequest, KvasirError, Unauthenticated,
                     Unavailable)
from .messages import Answer, Event, ModelInfo, Progress, Text, Usage
from .options import Policy, Retry

__all__ = ["Answer", "AsyncClient", "AsyncContexts", "Client", "Contexts", "DataLost", "DeadlineExceeded", "Event", "Exhausted", "InvalidRequest",
           "KvasirError", "ModelInfo", "Policy", "Progress", "Retry", "Text",
           "Unauthenticated", "Unavailable", "Usage"]
