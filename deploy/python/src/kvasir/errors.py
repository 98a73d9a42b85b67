"""Errors of calls, by what a caller can do about them."""

from typing import Optional, Tuple

import grpc
from google.rpc import error_details_pb2, status_pb2

_DETAILS = "grpc-status-details-bin"


class KvasirError(Exception):
    """A call that failed. `code` is its gRPC status."""

    def __init__(self, message: str, code: grpc.StatusCode, retry_after_s: Optional[float] = None):
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s  # the server's advice; None: it gave none


class InvalidRequest(KvasirError):
    """A field is out of its limits, or the prompt is too long: the message names it."""


class Exhausted(KvasirError):
    """The queue is full, or the request can never fit (then without retry_after_s)."""


class Unavailable(KvasirError):
    """Starting, draining, or the workers are forming a group: try again."""


class Unauthenticated(KvasirError):
    """The server wants an API key, and this one is not valid."""


class DeadlineExceeded(KvasirError):
    """The deadline passed, the client's or the server's."""


class DataLost(KvasirError):
    """KV was corrupt and could not be computed again: try again."""


_CLASSES = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Exhausted,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.DATA_LOSS: DataLost,
}


def _retry_after(metadata: Optional[Tuple[Tuple[str, bytes], ...]]) -> Optional[float]:
    for key, value in metadata or ():
        if key == _DETAILS:
            for detail in status_pb2.Status.FromString(value).details:
                info = error_details_pb2.RetryInfo()
                if detail.Unpack(info):
                    return info.retry_delay.ToTimedelta().total_seconds()
    return None


def from_grpc(error: grpc.RpcError) -> KvasirError:
    """Returns the error of a call, which both kinds of client raise."""
    code = error.code()
    return _CLASSES.get(code, KvasirError)(error.details() or code.name, code, _retry_after(error.trailing_metadata()))
