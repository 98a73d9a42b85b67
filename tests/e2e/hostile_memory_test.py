"""Messages that clients never finish, or send compressed, take bounded memory and end no other client's stream."""

import pathlib
import re
import sys
import threading
import time
import unittest
import zlib

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.innocent_stream import InnocentStream  # noqa: E402
from support.raw_http2 import RawConnection, message_head  # noqa: E402
from support.service import Service  # noqa: E402

TOKENIZE = "/kvasir.v1.Generation/Tokenize"
UNPACKED = 1 << 28
QUOTA = 256 << 20  # proto/grpc_listener.h
MIB = 1 << 20


def memory(pid, field="VmRSS"):
    return int(re.search(field + r":\s+(\d+)", pathlib.Path(f"/proc/{pid}/status").read_text())[1]) << 10


class Memory(unittest.TestCase):
    def setUp(self):
        self.service = self.enterContext(Service(flags=["--kv-host-size-gb=0.1", "--kv-device-size-gb=0.05"]))
        self.pid = self.service.process.pid

    def growth(self, before, field="VmHWM"):
        return memory(self.pid, field) - before

    def test_a_packed_message_is_refused_before_it_is_unpacked(self):
        packed = zlib.compressobj(9, wbits=31)
        bomb = b"".join(packed.compress(bytes(1 << 24)) for _ in range(UNPACKED >> 24)) + packed.flush()
        before = memory(self.pid)
        with InnocentStream(self.service) as innocent:
            for encoding in ("gzip", "deflate"):
                connection = RawConnection(self.service.address)
                stream = connection.call(TOKENIZE, [("grpc-encoding", encoding)])
                connection.send(stream, message_head(len(bomb), compressed=True) + bomb, end=True)
                headers = connection.await_end(stream)
                self.assertTrue(headers == b"" or b"12" in headers, headers)  # UNIMPLEMENTED, if there is a status
                connection.close()
        grown = self.growth(before)
        print(f"{len(bomb)} bytes that unpack to {UNPACKED >> 20} MiB: {grown / MIB:+.0f} MiB at most")
        innocent.check(self, longest_gap_s=2)
        self.assertLess(grown, 32 * MIB)

    def test_messages_that_are_never_finished_are_bounded_in_total(self):
        before = memory(self.pid)
        connections = [RawConnection(self.service.address) for _ in range(12)]

        def send(connection):
            stream = connection.call(TOKENIZE)
            connection.send(stream, message_head(63 * MIB) + bytes(60 * MIB), timeout_s=5)

        with InnocentStream(self.service) as innocent:
            senders = [threading.Thread(target=send, args=(connection,)) for connection in connections]
            for sender in senders:
                sender.start()
            for sender in senders:
                sender.join()
            self.assertEqual(self.service.generate("hello", max_tokens=1).finish.usage.completion_tokens, 1)
        grown = self.growth(before)
        print(f"12 unfinished messages of 60 MiB: {grown / MIB:+.0f} MiB at most")
        innocent.check(self, longest_gap_s=2)
        self.assertLess(grown, 2 * QUOTA)  # allows for growth between two looks, and for the allocator
        for connection in connections:
            connection.close()
        deadline = time.monotonic() + 15
        while self.growth(before, "VmRSS") > 64 * MIB:
            self.assertLess(time.monotonic(), deadline,
                            f"{self.growth(before, 'VmRSS') / MIB:.0f} MiB are not given back")
            time.sleep(0.1)
        self.assertGreater(self.service.metric("kvasir_connections_dropped_total"), 0)


if __name__ == "__main__":
    unittest.main(verbosity=2)
