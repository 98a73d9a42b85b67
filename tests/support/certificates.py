"""Certificates for tests: an authority, and what it issues, as PEM files.

    ca = Authority(folder, "ca")
    server = ca.issue("server")          # server.certificate and server.key are paths
    client = ca.issue("client", expired=True)
"""

import datetime
import ipaddress
import pathlib
import ssl
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = datetime.timedelta(days=1)


@dataclass
class Identity:
    certificate: pathlib.Path
    key: pathlib.Path
    serial: int

    def flags(self):
        return [f"--tls-cert-file={self.certificate}", f"--tls-key-file={self.key}"]


def write_key(path, key, encryption=serialization.NoEncryption()):
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))
    path.chmod(0o600)
    return path


def replace(path, source):
    """Puts the content of `source` in place of `path` at once, as programs that renew certificates do."""
    draft = path.with_suffix(".new")
    draft.write_bytes(source.read_bytes())
    draft.chmod(source.stat().st_mode & 0o777)
    draft.rename(path)


def end_of(owner):
    """When the certificate of an authority or identity ends, in seconds since 1970."""
    end = x509.load_pem_x509_certificate(owner.certificate.read_bytes()).not_valid_after
    return end.replace(tzinfo=datetime.timezone.utc).timestamp()


class Authority:
    def __init__(self, folder, name, days=365):
        self.folder, self.name = pathlib.Path(folder), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        made = self._build(self.name, self._key, -DAY, days * DAY).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True).sign(self._key, hashes.SHA256())
        self.certificate = self._write(f"{name}.pem", made)

    def issue(self, name, *, expired=False, early=False, days=30,
              usage=(ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)):
        """A certificate for 127.0.0.1 and localhost, and its key. `early`: it is not valid before tomorrow."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = self._build(subject, key, DAY if early else -2 * DAY, -DAY if expired else days * DAY).add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]),
            critical=False).add_extension(x509.ExtendedKeyUsage(list(usage)), critical=False).sign(self._key, hashes.SHA256())
        return Identity(self._write(f"{name}.pem", made), write_key(self.folder / f"{name}.key", key), made.serial_number)

    def context(self, identity=None):
        """What a client of Python's ssl needs to trust this authority, and to show `identity`."""
        context = ssl.create_default_context(cafile=str(self.certificate))
        if identity:
            context.load_cert_chain(identity.certificate, identity.key)
        return context

    def _build(self, subject, key, begin, end):
        now = datetime.datetime.utcnow()
        return (x509.CertificateBuilder().subject_name(subject).issuer_name(self.name).public_key(key.public_key())
                .serial_number(x509.random_serial_number()).not_valid_before(now + begin).not_valid_after(now + end))

    def _write(self, name, certificate):
        path = self.folder / name
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return path
