"""Talks HTTP to the service: whole answers, streams of events, and raw bytes for clients that misbehave.

    reply = ask(service, "POST", "/v1/completions", {"prompt": "Once", "max_tokens": 4})
    assert reply.status == 200 and reply.json["choices"][0]["text"]
    stream = read_events(service, "/v1/completions", {"prompt": "Once", "stream": True})
"""

import http.client
import json
import socket
from dataclasses import dataclass, field
from typing import Dict, List


@dataclass
class Reply:
    status: int
    headers: Dict[str, str]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        return self.json["error"]


@dataclass
class Events:
    """A stream of server-sent events that ended with [DONE]."""
    chunks: List[dict] = field(default_factory=list)
    comments: List[str] = field(default_factory=list)

    @property
    def told(self):
        """Chunks that tell tokens."""
        return [chunk for chunk in self.chunks if chunk.get("choices")]

    def text(self, choice=0):
        return "".join(c["text"] for chunk in self.told for c in chunk["choices"] if c["index"] == choice)


def open_connection(service, timeout_s=60):
    return http.client.HTTPConnection(service.http_address, timeout=timeout_s)


def send(connection, method, path, body=None, headers=None):
    """Asks on an open connection; `body` is bytes, or an object that is sent as JSON."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, data, headers or {})


def receive(connection):
    answer = connection.getresponse()
    return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())


def ask(service, method, path, body=None, headers=None, timeout_s=60):
    connection = open_connection(service, timeout_s)
    try:
        send(connection, method, path, body, headers)
        return receive(connection)
    finally:
        connection.close()


def parse_events(text):
    """Splits a body at blank lines, as clients do, and checks that [DONE] is the last event."""
    events = Events()
    blocks = text.split("\n\n")
    if blocks[-2:] != ["data: [DONE]", ""]:
        raise AssertionError(f"the stream does not end with [DONE]: {text[-200:]!r}")
    for block in blocks[:-2]:
        if block.startswith(":"):
            events.comments.append(block[1:].strip())
        elif block.startswith("data: "):
            events.chunks.append(json.loads(block[len("data: "):]))
        else:
            raise AssertionError(f"not an event: {block!r}")
    return events


def read_events(service, path, body, headers=None, timeout_s=60):
    reply = ask(service, "POST", path, {**body, "stream": True}, headers, timeout_s)
    if reply.status != 200:
        raise AssertionError(f"{reply.status}: {reply.body!r}")
    return parse_events(reply.body.decode())


def raw_connection(service, timeout_s=30):
    host, port = service.http_address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout_s)


def read_to_end(connection):
    """Everything until the server closes; what came when it resets."""
    data = b""
    try:
        while piece := connection.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data
