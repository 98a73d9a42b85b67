"""Server reflection through grpcio-reflection, unmodified, from PyPI: what grpcurl asks before it can list or call."""

import pathlib
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support import pypi  # noqa: E402
from support.service import Service  # noqa: E402

PACKAGES = ("grpcio-reflection==1.85.1",)
# Knows no proto of ours: everything, the messages too, comes from the server.
CLIENT = """
import sys
import grpc
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

channel = grpc.insecure_channel(sys.argv[1])
database = ProtoReflectionDescriptorDatabase(channel)
print("services", *sorted(database.get_services()))
pool = descriptor_pool.DescriptorPool(database)
generate = pool.FindServiceByName("kvasir.v1.Generation").FindMethodByName("Generate")
print("Generate", generate.input_type.full_name, generate.output_type.full_name, generate.server_streaming)
print("fields", *(field.name for field in generate.input_type.fields))
request = message_factory.GetMessageClass(generate.input_type)(text="Once upon a time")
request.sampling.max_tokens = 4
request.sampling.ignore_eos = True
call = channel.unary_stream("/kvasir.v1.Generation/Generate", request_serializer=type(request).SerializeToString,
                            response_deserializer=message_factory.GetMessageClass(generate.output_type).FromString)
events = [event for event in call(request, timeout=60)]
print("tokens", sum(len(event.tokens.token_ids) for event in events))
"""


class Reflection(unittest.TestCase):
    def test_a_client_without_protos_lists_describes_and_calls(self):
        python = pypi.environment(*PACKAGES) / "bin" / "python"
        with Service() as service:
            run = subprocess.run([python, "-c", CLIENT, service.address], capture_output=True, text=True, timeout=120,
                                 check=False)
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
        told = dict(line.split(" ", 1) for line in run.stdout.splitlines())
        self.assertEqual(told["services"].split(), [
            "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection", "kvasir.v1.Contexts",
            "kvasir.v1.Generation", "vllm.grpc.engine.VllmEngine"])
        self.assertEqual(told["Generate"], "kvasir.v1.GenerateRequest kvasir.v1.GenerateResponse True")
        self.assertLessEqual({"text", "token_ids", "sampling", "policy"}, set(told["fields"].split()))
        self.assertEqual(told["tokens"], "4")


if __name__ == "__main__":
    unittest.main(verbosity=2)
