// Clients of two standard services of which Debian ships no generated code: grpc.health.v1.Health
// and grpc.reflection.v1alpha.ServerReflection. The few bytes of their messages are written here.
#pragma once

#include <memory>
#include <string>

#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/support/byte_buffer.h"

namespace kvasir::testing {

inline grpc::ByteBuffer ToBuffer(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

inline std::string ToBytes(const grpc::ByteBuffer& buffer) {
  grpc::Slice slice;
  if (!buffer.DumpToSingleSlice(&slice).ok()) return "";
  return {reinterpret_cast<const char*>(slice.begin()), slice.size()};
}

enum class Health { kUnknown = 0, kServing = 1, kNotServing = 2, kServiceUnknown = 3 };

// HealthCheckRequest {string service = 1}, HealthCheckResponse {ServingStatus status = 1}.
inline Health CheckHealth(const std::shared_ptr<grpc::Channel>& channel,
                          const std::string& service) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  std::string request;
  if (!service.empty()) {
    request = std::string("\x0a") + static_cast<char>(service.size()) + service;
  }
  auto call =
      stub.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check", ToBuffer(request), &queue);
  call->StartCall();
  grpc::ByteBuffer reply;
  grpc::Status status;
  call->Finish(&reply, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  if (status.error_code() == grpc::StatusCode::NOT_FOUND) return Health::kServiceUnknown;
  const std::string bytes = ToBytes(reply);
  if (!status.ok() || bytes.size() != 2 || bytes[0] != '\x08') return Health::kUnknown;
  return static_cast<Health>(bytes[1]);
}

// The bytes of a ServerReflectionResponse to {string list_services = 7}.
inline std::string ListServices(const std::shared_ptr<grpc::Channel>& channel) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  void* tag = nullptr;
  bool ok = false;
  auto call = stub.PrepareCall(
      &context, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue);
  call->StartCall(nullptr);
  queue.Next(&tag, &ok);
  call->Write(ToBuffer(std::string("\x3a\x01*", 3)), nullptr);
  queue.Next(&tag, &ok);
  grpc::ByteBuffer reply;
  call->Read(&reply, nullptr);
  queue.Next(&tag, &ok);
  const std::string bytes = ok ? ToBytes(reply) : "";
  context.TryCancel();
  grpc::Status status;
  call->Finish(&status, nullptr);
  queue.Next(&tag, &ok);
  return bytes;
}

}  // namespace kvasir::testing
