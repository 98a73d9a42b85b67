"""TLS on every port: who gets through with which certificate and key, which protocol is spoken, certificates that are
renewed, and that private keys show nowhere."""

import hashlib
import http.client
import json
import pathlib
import re
import secrets
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.certificates import Authority, end_of, replace  # noqa: E402
from support.service import KVASIR, ROOT, Service, generation_pb2, grpc, make_request, read_stream  # noqa: E402
from support.worker import WORKER, Worker, write_secret  # noqa: E402

from cryptography import x509  # noqa: E402
from cryptography.x509.oid import ExtendedKeyUsageOID  # noqa: E402

MODEL = ROOT / "tests" / "model" / "needle-8k"
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
API_KEY = "sk-" + secrets.token_hex(32)


def port_of(address):
    return int(address.rsplit(":", 1)[1])


def answers(port, context, opening=GET):
    """Whether a server that gets the opening says something that is no alert."""
    context.set_alpn_protocols(["h2" if opening == HTTP2 else "http/1.1"])
    try:
        with socket.create_connection(("127.0.0.1", port), 10) as plain:
            with context.wrap_socket(plain, server_hostname="127.0.0.1") as connection:
                connection.sendall(opening)
                return connection.recv(100) != b""
    except (ssl.SSLError, ConnectionError):
        return False


def serial(port):
    """Serial number of the certificate that new connections get."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port), 10) as plain, context.wrap_socket(plain) as connection:
        return x509.load_der_x509_certificate(connection.getpeercert(binary_form=True)).serial_number


def s_client(port, *flags):
    """What `openssl s_client` says of a port."""
    run = subprocess.run(["openssl", "s_client", "-connect", f"127.0.0.1:{port}", *map(str, flags)], input="",
                         capture_output=True, text=True, errors="replace", timeout=30)
    return run.stdout + run.stderr


def credentials(authority, identity=None):
    return grpc.ssl_channel_credentials(authority.certificate.read_bytes(), identity and identity.key.read_bytes(),
                                        identity and identity.certificate.read_bytes())


def code_of(call):
    try:
        call()
        return None
    except grpc.RpcError as error:
        return error.code()


def documented_expiry():
    """Name, meaning and label of the metric in docs/operations.md, which metrics_test leaves out."""
    row = r"^\| `(kvasir_tls_\w+)` \| `(\w+)` \| both \| (.*) \|$"
    [(name, labels, meaning)] = re.findall(row, (ROOT / "docs" / "operations.md").read_text(), re.M)
    return name, meaning, labels


def write_keys(folder):
    path = pathlib.Path(folder) / "keys.yaml"
    path.write_text(json.dumps({"keys": [{"name": "red", "sha256": hashlib.sha256(API_KEY.encode()).hexdigest(),
                                          "tenant": "red"}]}))
    path.chmod(0o600)
    return path


class TlsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="kvasir-tls-")))
        cls.ca, cls.foreign = Authority(cls.folder, "ca"), Authority(cls.folder, "foreign-ca")
        cls.server = cls.ca.issue("server")

    def private_text(self, *identities):
        return [line for identity in identities for line in identity.key.read_text().splitlines()[1:-1]]


class ServerPorts(TlsTest):
    """A server with a certificate and API keys; clients need no certificate."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.service = cls.enterClassContext(Service(
            flags=[*cls.server.flags(), f"--api-keys-file={write_keys(cls.folder)}", "--host=127.0.0.1"],
            credentials=credentials(cls.ca)))
        cls.ports = {"grpc": port_of(cls.service.address), "http": port_of(cls.service.http_address),
                     "metrics": port_of(cls.service.metrics_address),
                     "worker metrics": port_of(cls.service.worker_metrics[0])}

    def https(self, port="http", headers=None, path="/v1/models"):
        connection = http.client.HTTPSConnection("127.0.0.1", self.ports[port], timeout=20, context=self.ca.context())
        connection.request("GET", path, headers=headers or {})
        reply = connection.getresponse()
        text = reply.read()
        connection.close()
        return reply.status, text

    def test_a_key_is_needed_within_tls_as_without(self):
        info = generation_pb2.GetModelInfoRequest()
        for key, code, status in (("", grpc.StatusCode.UNAUTHENTICATED, 401),
                                  ("sk-wrong", grpc.StatusCode.UNAUTHENTICATED, 401), (API_KEY, None, 200)):
            bearer = f"Bearer {key}"
            self.assertEqual(code_of(lambda: self.service.stub.GetModelInfo(
                info, metadata=[("authorization", bearer)] if key else [])), code)
            self.assertEqual(self.https(headers={"Authorization": bearer} if key else {})[0], status)
        for port in "metrics", "worker metrics":
            self.assertIn(b"kvasir_", self.https(port, path="/metrics")[1])
            self.assertEqual(self.https(port, path="/health")[0], 200)
        self.assertEqual(self.https(path="/")[0], 200, "as liveness probes ask")
        # More than a record, and a stream.
        stream = self.service.stub.Generate(make_request("word " * 5000, max_tokens=20, ignore_eos=True),
                                            metadata=[("authorization", f"Bearer {API_KEY}")])
        self.assertEqual(len(read_stream(stream).token_ids), 20)

    def test_http_streams_keep_alive_and_ends_are_as_without_tls(self):
        context = self.ca.context()
        context.options &= ~ssl.OP_IGNORE_UNEXPECTED_EOF
        connection = http.client.HTTPSConnection("127.0.0.1", self.ports["http"], timeout=60, context=context)
        headers = {"Authorization": f"Bearer {API_KEY}"}
        for stream in (True, False, True):
            connection.request("POST", "/v1/completions", json.dumps(
                {"prompt": "word " * 3000, "max_tokens": 30, "ignore_eos": True, "stream": stream}), headers)
            text = connection.getresponse().read()
            self.assertEqual(text.endswith(b"data: [DONE]\n\n"), stream, text[-100:])
        sock = connection.sock
        sock.suppress_ragged_eofs = False
        # Requests sent at once, and an end after the last.
        sock.sendall(2 * b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n" + b"GET /ping HTTP/1.0\r\n\r\n")
        told = b""
        while piece := sock.recv(4096):  # raises without the end that TLS wants
            told += piece
        self.assertEqual(told.count(b"HTTP/1.1 200"), 3)
        connection.close()

    def test_who_does_not_trust_the_server_tells_it_nothing(self):
        for name, port in self.ports.items():
            opening = HTTP2 if name == "grpc" else GET
            self.assertTrue(answers(port, self.ca.context(), opening), name)
            self.assertFalse(answers(port, self.foreign.context(), opening), name)

    def test_openssl_sees_tls_1_2_and_1_3_with_aead_and_nothing_else(self):
        for name, port in self.ports.items():
            flags = ["-CAfile", self.ca.certificate, "-verify_return_error", "-alpn", "h2" if name == "grpc" else "http/1.1"]
            for version, cipher in (("1_3", "TLS_(AES_128|AES_256|CHACHA20)_"), ("1_2", "ECDHE-ECDSA-.*(GCM|POLY1305)")):
                said = s_client(port, *flags, f"-tls{version}")
                self.assertRegex(said, rf"New, TLSv1\.\d, Cipher is {cipher}", f"{name} {version}")
                self.assertIn("Verify return code: 0 (ok)", said)
                self.assertIn("ALPN protocol: " + ("h2" if name == "grpc" else "http/1.1"), said, f"{name} {version}")
            for refused in (["-tls1_1", "-cipher", "ALL:@SECLEVEL=0"], ["-tls1", "-cipher", "ALL:@SECLEVEL=0"],
                            ["-tls1_2", "-cipher", "ECDHE-ECDSA-AES128-SHA:ECDHE-ECDSA-AES128-SHA256:AES128-GCM-SHA256"]):
                said = s_client(port, *flags, *refused)
                with self.subTest(name, flags=refused):
                    self.assertIn("Cipher is (NONE)", said)
                    if name != "grpc":  # whose handshaker closes without a word
                        self.assertRegex(said, "alert (protocol version|handshake failure)")
            if name != "grpc":
                self.assertIn("alert no application protocol", s_client(port, "-alpn", "h2"), name)

    def test_clients_without_tls_are_told_and_the_log_says_so(self):
        logged = (r"HTTP port: refused 127\.0\.0\.1:\d+: this port speaks TLS", "coordinator: metrics port: a client speaks without TLS",
                  "worker 0: metrics port: a client speaks without TLS", "gRPC: .* the peer speaks without TLS")
        deadline = time.monotonic() + 30  # other lines of a port may keep these out for 10 s
        while not all(re.search(line, self.service.log()) for line in logged):
            self.assertLess(time.monotonic(), deadline, self.service.log())
            for name in "http", "metrics", "worker metrics":
                with socket.create_connection(("127.0.0.1", self.ports[name]), 10) as plain:
                    plain.sendall(GET)
                    told = plain.recv(1000).decode()
                    self.assertTrue(told.startswith("HTTP/1.1 400 "), told)
                    self.assertIn("https://", told)
            with grpc.insecure_channel(self.service.address) as channel:
                info = channel.unary_unary("/kvasir.v1.Generation/GetModelInfo")
                self.assertEqual(code_of(lambda: info(b"", timeout=20)), grpc.StatusCode.UNAVAILABLE)
            time.sleep(1)

    def test_a_handshake_that_is_not_finished_holds_nobody_up(self):
        idle = []
        for port in self.ports.values():
            for opening in b"", b"\x16", b"\x16\x03\x01\x02\x00\x01\x00":
                idle.append(socket.create_connection(("127.0.0.1", port)))
                idle[-1].sendall(opening)
        begin = time.monotonic()
        for name, port in self.ports.items():
            self.assertTrue(answers(port, self.ca.context(), HTTP2 if name == "grpc" else GET), name)
        self.assertLess(time.monotonic() - begin, 3)
        for connection in idle:
            connection.settimeout(15)
            try:
                while connection.recv(1000):
                    pass
            except ConnectionResetError:
                pass
            connection.close()
        self.assertLess(time.monotonic() - begin, 14, "all have ended")

    def test_private_keys_and_api_keys_show_nowhere(self):
        config = subprocess.run([KVASIR, "serve", f"--model={MODEL}", *self.server.flags(), "--print-config"],
                                capture_output=True, text=True, timeout=30)
        self.assertIn(str(self.server.key), config.stdout)
        said = self.service.log() + config.stdout + config.stderr
        said += subprocess.run(["ps", "axwwe", "-o", "args"], capture_output=True, text=True).stdout
        for line in [*self.private_text(self.server), API_KEY]:
            self.assertNotIn(line, said)

    def test_metrics_are_printed_by_the_ca_of_a_file(self):
        for flags, code in (([], 1), ([f"--tls-ca-file={self.foreign.certificate}"], 1), ([f"--tls-ca-file={self.ca.certificate}"], 0)):
            run = subprocess.run([sys.executable, ROOT / "deploy" / "print_metrics.py", *flags, self.service.metrics_address,
                                  "kvasir_num_requests_running"], capture_output=True, text=True, timeout=60)
            self.assertEqual(run.returncode, code, f"{flags}\n{run.stdout}{run.stderr}")

    def test_commands_trust_the_ca_of_a_file(self):
        key = self.folder / "red.key"
        key.write_text(API_KEY)
        for command in (["generate", "--prompt=x", "--max-tokens=1"], ["status"],
                        ["bench", "--streams=1", "--requests=1", "--prompt-tokens=20", "--max-tokens=2"]):
            for flags, code in (([], 1), ([f"--tls-ca-file={self.foreign.certificate}"], 1),
                                ([f"--tls-ca-file={self.ca.certificate}"], 0)):
                run = subprocess.run([KVASIR, *command, f"--server={self.service.address}", f"--api-key-file={key}", *flags],
                                     capture_output=True, text=True, timeout=60)
                self.assertEqual(run.returncode, code, f"{command} {flags}\n{run.stdout}{run.stderr}")


class Renewal(TlsTest):
    def test_a_renewed_certificate_serves_within_seconds_and_connections_go_on(self):
        current, renewed, other = self.ca.issue("current"), self.ca.issue("renewed", days=60), self.ca.issue("other", days=40)
        end, new_end = end_of(current), end_of(renewed)
        with Service(flags=current.flags(), credentials=credentials(self.ca)) as service:
            ports = [port_of(address) for address in (service.address, service.http_address, service.metrics_address,
                                                      *service.worker_metrics)]
            self.assertEqual({serial(port) for port in ports}, {current.serial})
            for port in ports[2:]:
                self.assertEqual(self.ends(port), {"certificate": end})
            connection = http.client.HTTPSConnection("127.0.0.1", ports[1], timeout=20, context=self.ca.context())
            connection.request("GET", "/ping")
            connection.getresponse().read()
            stream = service.stream("x", max_tokens=4000, ignore_eos=True)
            next(stream)

            replace(current.certificate, other.certificate)  # without its key
            service.wait_for_log("the TLS certificate in force stays")
            self.assertEqual({serial(port) for port in ports}, {current.serial})
            self.assertEqual(self.ends(ports[2]), {"certificate": end})

            replace(current.certificate, renewed.certificate)
            replace(current.key, renewed.key)
            begin = time.monotonic()
            while {serial(port) for port in ports} != {renewed.serial}:
                self.assertLess(time.monotonic() - begin, 5, [serial(port) for port in ports])
                time.sleep(0.1)
            for port, opening in zip(ports, (HTTP2, GET, GET, GET)):
                self.assertTrue(answers(port, self.ca.context(), opening))
            self.assertEqual(self.ends(ports[2]), {"certificate": new_end})
            self.assertEqual(self.ends(ports[3]), {"certificate": new_end})
            connection.request("GET", "/ping")
            self.assertEqual(connection.getresponse().status, 200)
            next(stream)
            stream.cancel()
            connection.close()


    def ends(self, port, identity=None):
        """When certificates expire, by role, as a metrics port says it."""
        with urllib.request.urlopen(f"https://127.0.0.1:{port}/metrics", context=self.ca.context(identity)) as reply:
            text = reply.read().decode()
        name, meaning, labels = documented_expiry()
        self.assertIn(f"# HELP {name} {meaning}\n", text)
        self.assertEqual(labels, "role")
        return {role: float(end) for role, end in re.findall(name + r'\{role="(\w+)"\} (\S+)', text)}

    def test_the_end_of_the_cas_of_clients_is_shown_too(self):
        server, client = self.ca.issue("server-of-clients"), self.ca.issue("client-of-metrics")
        old = Authority(self.folder, "old-ca", days=3)
        both = self.folder / "client-cas.pem"
        both.write_bytes(self.ca.certificate.read_bytes() + old.certificate.read_bytes())
        with Service(flags=[*server.flags(), f"--tls-client-ca-file={both}"]) as service:
            self.assertEqual(self.ends(port_of(service.metrics_address), client),
                             {"certificate": end_of(server), "client_ca": end_of(old)})


class MutualTls(TlsTest):
    """Clients must show a certificate."""

    def identities(self):
        """name -> (identity, whether it gets in)"""
        return {"none": (None, False), "right": (self.ca.issue("client"), True),
                "expired": (self.ca.issue("expired", expired=True), False),
                "not valid yet": (self.ca.issue("early", early=True), False),
                "a server's": (self.ca.issue("servers", usage=[ExtendedKeyUsageOID.SERVER_AUTH]), False),
                "foreign": (self.foreign.issue("foreign"), False)}

    def test_who_shows_no_valid_certificate_is_refused_in_the_handshake(self):
        flags = [*self.server.flags(), f"--tls-client-ca-file={self.ca.certificate}", f"--api-keys-file={write_keys(self.folder)}"]
        with Service(flags=flags) as service:
            ports = [(port_of(service.address), HTTP2), (port_of(service.http_address), GET),
                     (port_of(service.metrics_address), GET), (port_of(service.worker_metrics[0]), GET)]
            for name, (identity, gets_in) in self.identities().items():
                for listener, (port, opening) in zip(("gRPC", "HTTP", "metrics", "worker metrics"), ports):
                    with self.subTest(name, port=listener):
                        self.assertEqual(answers(port, self.ca.context(identity), opening), gets_in)
            client = self.ca.issue("client")
            shown = s_client(ports[1][0], "-CAfile", self.ca.certificate, "-cert", client.certificate, "-key", client.key)
            self.assertIn("Acceptable client certificate CA names\nCN = ca", shown)
            # The certificate lets a client ask, and its key says for whom.
            with grpc.secure_channel(service.address, credentials(self.ca, client)) as channel:
                info = channel.unary_unary("/kvasir.v1.Generation/GetModelInfo")
                for key, code in ("", grpc.StatusCode.UNAUTHENTICATED), (API_KEY, None):
                    metadata = [("authorization", f"Bearer {key}")] if key else []
                    self.assertEqual(code_of(lambda: info(b"", timeout=20, metadata=metadata)), code)
            for flags, code in (([], 1), (client.flags(), 0)):
                run = subprocess.run([KVASIR, "status", f"--server={service.address}", f"--tls-ca-file={self.ca.certificate}",
                                      f"--api-key-file={self.write_api_key()}", *flags], capture_output=True, text=True, timeout=60)
                self.assertEqual(run.returncode, code, run.stderr)

    def write_api_key(self):
        path = self.folder / "api-key"
        path.write_text(API_KEY)
        return path


class WorkerPort(TlsTest):
    """The coordinator shows its certificate to the worker, and both prove the group secret within TLS."""

    def setUp(self):
        self.secret, self.wrong_secret = write_secret(self.folder, "secret"), write_secret(self.folder, "wrong")
        self.coordinator = self.ca.issue("coordinator")

    def worker(self, *flags):
        return Worker(self.folder, *self.server.flags(), f"--tls-client-ca-file={self.ca.certificate}",
                      f"--group-secret-file={self.secret}", *flags)

    def serve(self, worker, secret, *flags):
        return [f"--workers=127.0.0.1:{worker.port}", f"--group-secret-file={secret}", *flags]

    def test_a_coordinator_with_certificate_and_secret_is_served(self):
        with self.worker() as worker:
            flags = self.serve(worker, self.secret, *self.coordinator.flags(), f"--tls-ca-file={self.ca.certificate}")
            with Service(flags=flags, credentials=credentials(self.ca)) as service:
                self.assertTrue(service.generate("What is the code?", max_tokens=4).token_ids)
                said = service.log() + worker.log()
            for line in self.private_text(self.server, self.coordinator):
                self.assertNotIn(line, said)

    def test_others_are_refused(self):
        trusted = f"--tls-ca-file={self.ca.certificate}"
        expired, foreign = self.ca.issue("expired-coordinator", expired=True), self.foreign.issue("foreign-coordinator")
        with self.worker() as worker:
            for name, secret, flags, word in (
                    ("wrong secret", self.wrong_secret, [*self.coordinator.flags(), trusted], "--group-secret-file"),
                    ("no TLS", self.secret, [], "--startup-timeout"),
                    ("no certificate", self.secret, [trusted], "--startup-timeout"),
                    ("another CA", self.secret, [f"--tls-ca-file={self.foreign.certificate}", *self.coordinator.flags()], "--startup-timeout"),
                    ("foreign certificate", self.secret, [*foreign.flags(), trusted], "--startup-timeout")):
                run = subprocess.run([KVASIR, "serve", f"--model={MODEL}", "--port=0", "--http-port=0", "--metrics-port=0",
                                      "--startup-timeout=1", *self.serve(worker, secret, *flags)],
                                     capture_output=True, text=True, timeout=60)
                self.assertEqual(run.returncode, 1, f"{name}\n{run.stdout}{run.stderr}")
                self.assertIn(word, run.stderr, name)
            for name, identity, gets_in in (("none", None, False), ("expired", expired, False), ("foreign", foreign, False),
                                            ("right", self.coordinator, True)):
                for listener, port, opening in ("gRPC", worker.port, HTTP2), ("metrics", worker.metrics_port, GET):
                    with self.subTest(name, port=listener):
                        self.assertEqual(answers(port, self.ca.context(identity), opening), gets_in)
            self.assertRegex(s_client(worker.port, "-CAfile", self.ca.certificate, "-alpn", "h2"), "New, TLSv1.3, Cipher is TLS_")
            self.assertIn("Cipher is (NONE)", s_client(worker.port, "-tls1_1", "-cipher", "ALL:@SECLEVEL=0"))


class Start(TlsTest):
    """Files that cannot serve end the process with what to change."""

    def test_files_that_do_not_serve_are_named(self):
        good, other = self.ca.issue("good"), self.ca.issue("another")
        expired, early = self.ca.issue("old", expired=True), self.ca.issue("young", early=True)
        client = self.ca.issue("only-client", usage=[ExtendedKeyUsageOID.CLIENT_AUTH])
        text = self.folder / "text"
        text.write_text("no certificate")
        text.chmod(0o600)
        open_key = self.folder / "open.key"
        open_key.write_bytes(good.key.read_bytes())
        open_key.chmod(0o644)
        encrypted = self.folder / "encrypted.key"
        subprocess.run(["openssl", "pkey", "-in", good.key, "-aes128", "-passout", "pass:secret", "-out", encrypted], check=True)
        encrypted.chmod(0o600)
        for certificate, key, ca, words in (
                (good.certificate, other.key, "", ["is not the key of the certificate", str(good.certificate)]),
                (expired.certificate, expired.key, "", ["expired on 20", "renew"]),
                (early.certificate, early.key, "", ["not valid before", "clock"]),
                (client.certificate, client.key, "", ["serverAuth"]),
                (good.certificate, open_key, "", ["chmod 600"]),
                (good.certificate, encrypted, "", ["passphrase"]),
                (text, good.key, "", ["--tls-cert-file", "holds no certificate"]),
                (good.certificate, text, "", ["--tls-key-file", "holds no private key"]),
                (good.certificate, good.key, text, ["--tls-client-ca-file", "holds no certificate"]),
                (self.folder / "none", good.key, "", ["cannot be read"]),
                (good.certificate, "", "", ["--tls-key-file", "both"]),
                ("", "", self.ca.certificate, ["--tls-cert-file"])):
            flags = [f"--tls-cert-file={certificate}", f"--tls-key-file={key}", f"--tls-client-ca-file={ca}"]
            with self.subTest(words):
                run = subprocess.run([WORKER, "--listen=127.0.0.1:0", "--metrics-port=0", *flags], capture_output=True, text=True,
                                     timeout=20)
                self.assertEqual(run.returncode, 2, run.stderr)
                for word in words:
                    self.assertIn(word, run.stderr)

    def test_open_ports_with_keys_and_without_tls_get_one_warning(self):
        with Service(flags=["--host=0.0.0.0", f"--api-keys-file={write_keys(self.folder)}"]) as service:
            self.assertEqual(service.log().count("in the clear"), 1, service.log())

    def test_a_client_that_speaks_tls_to_plain_ports_is_told(self):
        with Service() as service:
            self.assertNotIn("in the clear", service.log())
            for address in service.http_address, service.metrics_address:
                with socket.create_connection(("127.0.0.1", port_of(address)), 10) as plain:
                    plain.sendall(bytes.fromhex("16030100050100000100"))
                    told = plain.recv(1000).decode()
                    self.assertTrue(told.startswith("HTTP/1.1 400 "), told)
                    self.assertIn("http://", told)
            service.wait_for_log("this port speaks no TLS")


if __name__ == "__main__":
    unittest.main(verbosity=2)
