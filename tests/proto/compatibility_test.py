"""The public protos beside those of every release: whatever a release had is there still, with the same number, name and
type; a field or an enum's value that was removed has its number and its name reserved. And public protos are apart from
internal ones.

A release adds its snapshot: tests/proto/compatibility_test.py --write VERSION
"""

import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

from google.protobuf import descriptor_pb2

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROTOS = ROOT / "proto" / "kvasir" / "v1"
RELEASED = ROOT / "tests" / "proto" / "released"
KIND = re.compile(r"^// (Public|Internal)\b")
FIELD = descriptor_pb2.FieldDescriptorProto


def files_of(kind):
    return sorted(path for path in PROTOS.glob("*.proto") if KIND.match(path.read_text()).group(1) == kind)


def describe_field(field, message):
    kind = field.type_name.lstrip(".") or FIELD.Type.Name(field.type)[len("TYPE_"):].lower()
    words = [kind]
    if field.label == FIELD.LABEL_REPEATED:
        words.insert(0, "repeated")
    if field.proto3_optional:
        words.insert(0, "optional")
    elif field.HasField("oneof_index"):
        words.append(f"in {message.oneof_decl[field.oneof_index].name}")
    return " ".join(words)


def message_lines(name, message):
    for field in message.field:
        yield f"field {name} {field.number} {field.name}: {describe_field(field, message)}"
    for taken in message.reserved_range:
        yield from (f"reserved {name} {number}" for number in range(taken.start, taken.end))
    yield from (f"reserved {name} {taken}" for taken in message.reserved_name)
    for nested in message.nested_type:
        yield from message_lines(f"{name}.{nested.name}", nested)
    for nested in message.enum_type:
        yield from enum_lines(f"{name}.{nested.name}", nested)


def enum_lines(name, enum):
    yield from (f"value {name} {value.number} {value.name}: enum" for value in enum.value)
    for taken in enum.reserved_range:
        yield from (f"reserved {name} {number}" for number in range(taken.start, taken.end + 1))
    yield from (f"reserved {name} {taken}" for taken in enum.reserved_name)


def service_lines(name, service):
    for method in service.method:
        stream_in, stream_out = ("stream " * flag for flag in (method.client_streaming, method.server_streaming))
        yield (f"call {name}.{method.name}: {stream_in}{method.input_type[1:]} -> "
               f"{stream_out}{method.output_type[1:]}")


def api_lines(folder):
    """Returns a line for each thing that clients of the public protos in `folder` rely on."""
    names = [path.name for path in files_of("Public")]
    with tempfile.TemporaryDirectory() as scratch:
        out = pathlib.Path(scratch) / "set"
        run = subprocess.run(["protoc", f"-I{folder}", f"--descriptor_set_out={out}",
                              *(f"kvasir/v1/{name}" for name in names)], capture_output=True, text=True, check=False)
        if run.returncode != 0:
            raise ValueError(run.stderr)
        files = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    lines = []
    for file in files:
        for message in file.message_type:
            lines += message_lines(f"{file.package}.{message.name}", message)
        for enum in file.enum_type:
            lines += enum_lines(f"{file.package}.{enum.name}", enum)
        for service in file.service:
            lines += service_lines(f"{file.package}.{service.name}", service)
    return sorted(lines)


def broken_promises(released, now):
    """Returns the lines of a release that hold no more."""
    now = set(now)

    def was_removed_properly(line):
        kind, owner, number, name = line.split(":")[0].split(" ")[:4] if line[0] in "fv" else ("", "", "", "")
        return kind and {f"reserved {owner} {number}", f"reserved {owner} {name}"} <= now
    return [line for line in released if line not in now and not was_removed_properly(line)]


class Compatibility(unittest.TestCase):
    def test_what_a_release_had_is_there_still(self):
        releases = sorted(RELEASED.glob("*.txt"))
        self.assertTrue(releases, "no release has a snapshot")
        now = api_lines(ROOT / "proto")
        for release in releases:
            with self.subTest(release=release.stem):
                self.assertEqual(broken_promises(release.read_text().splitlines(), now), [])

    def changed(self, old, new):
        """Returns what breaks when `old` in generation.proto becomes `new`, beside the tree as it is."""
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(folder) / "kvasir" / "v1"
            copy.mkdir(parents=True)
            for path in PROTOS.glob("*.proto"):
                text = path.read_text()
                if path.name == "generation.proto":
                    self.assertIn(old, text)
                    text = text.replace(old, new, 1)
                (copy / path.name).write_text(text)
            return broken_promises(api_lines(ROOT / "proto"), api_lines(folder))

    def test_each_kind_of_break_is_seen(self):
        seed = "  optional uint64 seed = 24;"
        for what, old, new in (
                ("type", seed, "  optional int64 seed = 24;"),
                ("name", seed, "  optional uint64 sed = 24;"),
                ("number", seed, "  optional uint64 seed = 9024;"),
                ("presence", seed, "  uint64 seed = 24;"),
                ("removal", seed, ""),
                ("number reserved only", seed, "  reserved 24;"),
                ("name reserved only", seed, '  reserved "seed";'),
                ("reuse", seed, "  optional string salt = 24;"),
                ("oneof", "    uint32 matched_token_id = 3;\n", ""),
                ("enum", "FINISH_REASON_STOP = 1", "FINISH_REASON_STOP = 1001"),
                ("call", "rpc Tokenize(TokenizeRequest)", "rpc Encode(TokenizeRequest)"),
                ("stream", "returns (stream GenerateResponse)", "returns (GenerateResponse)")):
            with self.subTest(what=what):
                self.assertTrue(self.changed(old, new))

    def test_an_addition_and_a_proper_removal_break_nothing(self):
        seed = "  optional uint64 seed = 24;"
        self.assertEqual(self.changed(seed, seed + "\n  optional uint64 more = 9000;"), [])
        self.assertEqual(self.changed(seed, '  reserved 24;\n  reserved "seed";'), [])

    def test_a_reserved_number_stays_reserved(self):
        [field] = [line for line in api_lines(ROOT / "proto") if line == "reserved kvasir.v1.AttentionReport 5"]
        self.assertEqual(broken_promises([field], []), [field])


class PublicAndInternal(unittest.TestCase):
    def test_every_proto_says_which_it_is(self):
        self.assertEqual({path.name for path in PROTOS.glob("*.proto") if not KIND.match(path.read_text())}, set())

    def test_public_protos_import_no_internal_ones(self):
        internal = {path.name for path in files_of("Internal")}
        self.assertIn("worker.proto", internal)
        for path in files_of("Public"):
            self.assertEqual(set(re.findall(r'import "kvasir/v1/(\w+\.proto)"', path.read_text())) & internal, set())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        (RELEASED / f"{sys.argv[2]}.txt").write_text("\n".join(api_lines(ROOT / "proto")) + "\n")
    else:
        unittest.main(verbosity=2)
