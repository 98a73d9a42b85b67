"""A client that speaks just enough HTTP/2 to misbehave: it opens gRPC calls, sends what it likes of their messages, and
keeps quiet.

    connection = RawConnection(service.address)
    stream = connection.call("/kvasir.v1.Generation/Tokenize")
    connection.send(stream, message_head(1 << 20) + b"the beginning of a message")
"""

import socket
import struct

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW = 65535
FRAME_BYTES = 16384


def connect(address, timeout_s=10):
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout_s)


def message_head(size, compressed=False):
    """The five bytes before a gRPC message."""
    return struct.pack(">BI", compressed, size)


def literal(name, value):
    """A header as HPACK's literal without indexing."""
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


class RawConnection:
    def __init__(self, address):
        self.socket = connect(address)
        self.next_stream = 1
        self.windows = {0: INITIAL_WINDOW}
        self.initial_window = INITIAL_WINDOW
        self.status = {}  # by stream: the bytes of its last block of headers, where grpc-status lies
        self.reset = set()
        self.gone = False
        self.received = b""
        self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + self._frame(SETTINGS, 0, 0, b""))

    @staticmethod
    def _frame(kind, flags, stream, payload):
        return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload

    def call(self, path, headers=()):
        stream, self.next_stream = self.next_stream, self.next_stream + 2
        self.windows[stream] = self.initial_window
        block = b"".join(literal(name, value) for name, value in [
            (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "test"), ("te", "trailers"),
            ("content-type", "application/grpc"), *headers])
        self.socket.sendall(self._frame(HEADERS, END_HEADERS, stream, block))
        return stream

    def send(self, stream, data, end=False, timeout_s=20):
        """Sends data as the peer's windows allow. False when the peer wants no more of it or does not grant a window in
        time."""
        self.socket.settimeout(timeout_s)
        data, sent = memoryview(data), 0
        try:
            while sent < len(data):
                room = min(FRAME_BYTES, self.windows[0], self.windows[stream], len(data) - sent)
                if room <= 0:
                    self.read_some()
                    if self.gone or stream in self.reset or stream in self.status:
                        return False
                    continue
                last = END_STREAM if end and sent + room == len(data) else 0
                self.socket.sendall(self._frame(DATA, last, stream, data[sent:sent + room]))
                sent += room
                self.windows[0] -= room
                self.windows[stream] -= room
        except OSError:
            self.gone = True
            return False
        return True

    def reset_stream(self, stream):
        self.socket.sendall(self._frame(RST_STREAM, 0, stream, struct.pack(">I", 8)))  # CANCEL

    def read_some(self):
        """Takes in what the peer sent; waits for some."""
        read = self.socket.recv(1 << 16)
        if not read:
            self.gone = True
        self.received += read
        while len(self.received) >= 9:
            length = int.from_bytes(self.received[:3], "big")
            if len(self.received) < 9 + length:
                return
            kind, flags = self.received[3], self.received[4]
            stream = int.from_bytes(self.received[5:9], "big") & 0x7FFFFFFF
            payload, self.received = self.received[9:9 + length], self.received[9 + length:]
            self._take(kind, flags, stream, payload)

    def _take(self, kind, flags, stream, payload):
        if kind == WINDOW_UPDATE:
            self.windows[stream] = self.windows.get(stream, 0) + int.from_bytes(payload, "big")
        elif kind == SETTINGS and not flags & ACK:
            for at in range(0, len(payload), 6):
                name, value = struct.unpack(">HI", payload[at:at + 6])
                if name == 4:  # the initial window
                    for other in self.windows:
                        self.windows[other] += value - self.initial_window if other else 0
                    self.initial_window = value
            self.socket.sendall(self._frame(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK:
            self.socket.sendall(self._frame(PING, ACK, 0, payload))
        elif kind == HEADERS:
            self.status[stream] = payload
        elif kind == RST_STREAM:
            self.reset.add(stream)
        elif kind == GOAWAY:
            self.gone = True

    def await_end(self, stream, timeout_s=20):
        """Waits until the call has ended; returns its last headers (empty: it was reset, or the connection ended)."""
        self.socket.settimeout(timeout_s)
        try:
            while not (self.gone or stream in self.reset or stream in self.status):
                self.read_some()
        except OSError:
            self.gone = True
        return self.status.get(stream, b"")

    def close(self):
        self.socket.close()
