// The one table of limits of requests: every field of every request and of the policies has a row
// with its range. Values from a client are checked against it before anything is computed or
// allocated from them. Called by request parsing and the policy table. Thread-safe.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "google/protobuf/message.h"

namespace kvasir::coordinator {

// Most bytes of one gRPC message, in and out: a million token ids take about 3 MB.
inline constexpr int kMaxMessageBytes = 64 << 20;
// Longest context that any field may ask for, in tokens.
inline constexpr int64_t kMaxContextTokens = int64_t{1} << 24;

// Longest id of a request, and of a tenant, in bytes.
inline constexpr int kMaxIdBytes = 128;

// Longest name of a context, in bytes.
inline constexpr int kMaxContextNameBytes = 64;

// Most requests that one answer of GetServerInfo lists.
inline constexpr int kMaxListedRequests = 256;

enum class LimitKind {
  kNumber,  // the value
  kBytes,   // the length of a string
  kCount,   // the elements of a repeated field
  kName,    // the length of a string of [a-z0-9_-]
};

struct FieldLimit {
  absl::string_view message;  // without package
  absl::string_view field;
  LimitKind kind = LimitKind::kNumber;
  double min = 0;  // inclusive
  double max = 0;  // inclusive
};

absl::Span<const FieldLimit> FieldLimits();

// Checks all fields of `message` and of its parts; skips unset fields with presence. NaN is outside
// every range. `where` may be empty.
// INVALID_ARGUMENT: "<where>.temperature is 101; it must be in [0, 100]".
absl::Status CheckLimits(absl::string_view where, const google::protobuf::Message& message);

// Checks that the prompt has at least one token, and that prompt and answer fit into the context.
absl::Status CheckPromptLength(int64_t prompt_tokens, int64_t max_tokens, int64_t max_model_len);

}  // namespace kvasir::coordinator
