#include "coordinator/policy/limits.h"

#include <algorithm>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "google/protobuf/descriptor.h"

#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

constexpr double kMaxUint64 = 18446744073709551616.0;
constexpr double kContext = static_cast<double>(kMaxContextTokens);
// Smallest top_p: below it rounding decides which tokens are left.
constexpr double kMinTopP = 1e-6;

constexpr FieldLimit kLimits[] = {
    {"GenerateRequest", "request_id", LimitKind::kBytes, 0, kMaxIdBytes},
    {"GenerateRequest", "text", LimitKind::kBytes, 0, kMaxMessageBytes},
    {"GenerateRequest", "tenant_id", LimitKind::kBytes, 0, kMaxIdBytes},
    {"GenerateRequest", "context", LimitKind::kName, 0, kMaxContextNameBytes},
    {"GenerateRequest", "read_here", LimitKind::kNumber, 0, 1},
    {"GenerateRequest", "add_special_tokens", LimitKind::kNumber, 0, 1},
    {"GenerateRequest", "parse_special_tokens", LimitKind::kNumber, 0, 1},
    {"ChatInput", "messages", LimitKind::kBytes, 0, kMaxMessageBytes},
    {"ChatInput", "tools", LimitKind::kBytes, 0, kMaxMessageBytes},
    {"ChatInput", "template_kwargs", LimitKind::kBytes, 0, kMaxMessageBytes},
    {"ChatInput", "add_generation_prompt", LimitKind::kNumber, 0, 1},
    {"ChatInput", "continue_final_message", LimitKind::kNumber, 0, 1},
    {"Resume", "token_ids", LimitKind::kCount, 1, kContext},
    {"Resume", "token_ids", LimitKind::kNumber, 0, 2147483647},
    {"TokenIds", "ids", LimitKind::kCount, 0, kContext},
    {"TokenIds", "ids", LimitKind::kNumber, 0, 2147483647},
    {"SamplingParams", "temperature", LimitKind::kNumber, 0, 100},
    {"SamplingParams", "top_p", LimitKind::kNumber, kMinTopP, 1},
    {"SamplingParams", "top_k", LimitKind::kNumber, 0, 1048576},
    {"SamplingParams", "min_p", LimitKind::kNumber, 0, 1},
    {"SamplingParams", "frequency_penalty", LimitKind::kNumber, -2, 2},
    {"SamplingParams", "presence_penalty", LimitKind::kNumber, -2, 2},
    {"SamplingParams", "repetition_penalty", LimitKind::kNumber, 0.01, 100},
    {"SamplingParams", "max_tokens", LimitKind::kNumber, 1, kContext},
    {"SamplingParams", "min_tokens", LimitKind::kNumber, 0, kContext},
    {"SamplingParams", "stop", LimitKind::kCount, 0, 64},
    {"SamplingParams", "stop", LimitKind::kBytes, 1, 1024},
    {"SamplingParams", "stop_token_ids", LimitKind::kCount, 0, 256},
    {"SamplingParams", "stop_token_ids", LimitKind::kNumber, 0, 2147483647},
    {"SamplingParams", "skip_special_tokens", LimitKind::kNumber, 0, 1},
    {"SamplingParams", "ignore_eos", LimitKind::kNumber, 0, 1},
    {"SamplingParams", "logprobs", LimitKind::kNumber, 0, 20},
    {"SamplingParams", "prompt_logprobs", LimitKind::kNumber, 0, 20},
    {"SamplingParams", "logprobs_text", LimitKind::kNumber, 0, 1},
    {"SamplingParams", "seed", LimitKind::kNumber, 0, kMaxUint64},
    {"SamplingParams", "include_stop_str_in_output", LimitKind::kNumber, 0, 1},
    {"SamplingParams", "logit_bias", LimitKind::kCount, 0, 1024},
    {"LogitBias", "token_id", LimitKind::kNumber, 0, 2147483647},
    {"LogitBias", "bias", LimitKind::kNumber, -100, 100},
    {"TokenizeRequest", "text", LimitKind::kBytes, 0, kMaxMessageBytes},
    {"TokenizeRequest", "add_special_tokens", LimitKind::kNumber, 0, 1},
    {"TokenizeRequest", "parse_special_tokens", LimitKind::kNumber, 0, 1},
    {"DetokenizeRequest", "token_ids", LimitKind::kCount, 0, kContext},
    {"DetokenizeRequest", "token_ids", LimitKind::kNumber, 0, 2147483647},
    {"DetokenizeRequest", "skip_special_tokens", LimitKind::kNumber, 0, 1},
    {"GetServerInfoRequest", "max_requests", LimitKind::kNumber, 0, kMaxListedRequests},
    {"CreateContextRequest", "name", LimitKind::kName, 1, kMaxContextNameBytes},
    {"CreateContextRequest", "tenant_id", LimitKind::kBytes, 0, kMaxIdBytes},
    {"CreateContextRequest", "text", LimitKind::kBytes, 0, kMaxMessageBytes},
    {"CreateContextRequest", "add_special_tokens", LimitKind::kNumber, 0, 1},
    {"CreateContextRequest", "parse_special_tokens", LimitKind::kNumber, 0, 1},
    {"ForkContextRequest", "name", LimitKind::kName, 1, kMaxContextNameBytes},
    {"ForkContextRequest", "into", LimitKind::kName, 1, kMaxContextNameBytes},
    {"ForkContextRequest", "tenant_id", LimitKind::kBytes, 0, kMaxIdBytes},
    {"ForkContextRequest", "text", LimitKind::kBytes, 0, kMaxMessageBytes},
    {"ForkContextRequest", "add_special_tokens", LimitKind::kNumber, 0, 1},
    {"ForkContextRequest", "parse_special_tokens", LimitKind::kNumber, 0, 1},
    {"GetContextRequest", "name", LimitKind::kName, 1, kMaxContextNameBytes},
    {"GetContextRequest", "tenant_id", LimitKind::kBytes, 0, kMaxIdBytes},
    {"DeleteContextRequest", "name", LimitKind::kName, 1, kMaxContextNameBytes},
    {"DeleteContextRequest", "tenant_id", LimitKind::kBytes, 0, kMaxIdBytes},
    {"PinContextRequest", "name", LimitKind::kName, 1, kMaxContextNameBytes},
    {"PinContextRequest", "tenant_id", LimitKind::kBytes, 0, kMaxIdBytes},
    {"UnpinContextRequest", "name", LimitKind::kName, 1, kMaxContextNameBytes},
    {"UnpinContextRequest", "tenant_id", LimitKind::kBytes, 0, kMaxIdBytes},
    {"PrefetchContextRequest", "name", LimitKind::kName, 1, kMaxContextNameBytes},
    {"PrefetchContextRequest", "tenant_id", LimitKind::kBytes, 0, kMaxIdBytes},
    {"DemoteContextRequest", "name", LimitKind::kName, 1, kMaxContextNameBytes},
    {"DemoteContextRequest", "tenant_id", LimitKind::kBytes, 0, kMaxIdBytes},
    {"PinContextRequest", "tier", LimitKind::kNumber, 0, 3},
    {"PinContextRequest", "ttl_s", LimitKind::kNumber, 1, 31622400},
    {"PinContextRequest", "refresh_on_hit", LimitKind::kNumber, 0, 1},
    {"UnpinContextRequest", "tier", LimitKind::kNumber, 0, 3},
    {"EvictRequest", "tenant", LimitKind::kNumber, 0, 1},
    {"EvictRequest", "all", LimitKind::kNumber, 0, 1},
    {"ExportContextRequest", "name", LimitKind::kName, 1, kMaxContextNameBytes},
    {"ExportContextRequest", "tenant_id", LimitKind::kBytes, 0, kMaxIdBytes},
    {"ImportContextRequest", "name", LimitKind::kName, 0, kMaxContextNameBytes},
    {"ImportContextRequest", "tenant_id", LimitKind::kBytes, 0, kMaxIdBytes},
    {"ContextHead", "token_ids", LimitKind::kCount, 0, kContext},
    {"ContextHead", "token_ids", LimitKind::kNumber, 0, 2147483647},
    {"ContextHead", "weights_hash", LimitKind::kBytes, 0, 64},
    {"ContextHead", "kv_form", LimitKind::kBytes, 0, 64},
    {"ContextExtent", "block", LimitKind::kNumber, 0, kContext},
    {"ContextExtent", "head", LimitKind::kNumber, 0, 65535},
    {"ContextExtent", "extent", LimitKind::kBytes, 0, kMaxMessageBytes},
    {"EvictRequest", "tenant_id", LimitKind::kBytes, 0, kMaxIdBytes},
    {"EvictRequest", "context", LimitKind::kName, 1, kMaxContextNameBytes},
    {"ListContextsRequest", "tenant_id", LimitKind::kBytes, 0, kMaxIdBytes},
    {"PolicyChoice", "name", LimitKind::kName, 0, 64},
    {"SparsityPolicy", "name", LimitKind::kName, 1, 64},
    {"SparsityPolicy", "tail_tokens", LimitKind::kNumber, 0, 4096},
    {"AttentionPolicy", "sink_tokens", LimitKind::kNumber, 0, 1048576},
    {"AttentionPolicy", "window_tokens", LimitKind::kNumber, 0, 1048576},
    {"AttentionPolicy", "token_budget", LimitKind::kNumber, 0, kContext},
    {"AttentionPolicy", "dense_layers", LimitKind::kNumber, 0, 1024},
    {"AttentionPolicy", "layer_budgets", LimitKind::kCount, 0, 16},
    {"LayerBudget", "first_layer", LimitKind::kNumber, 0, 1023},
    {"LayerBudget", "last_layer", LimitKind::kNumber, 0, 1023},
    {"LayerBudget", "token_budget", LimitKind::kNumber, 1, kContext},
    {"AttentionPolicy", "top_p", LimitKind::kNumber, 0, 1},
    {"AttentionPolicy", "patience", LimitKind::kNumber, 0, 1048576},
    {"ReusePolicy", "rule", LimitKind::kName, 0, 16},
    {"ReusePolicy", "interval", LimitKind::kNumber, 0, 64},
    {"ReusePolicy", "theta", LimitKind::kNumber, 0, 1},
    {"ReusePolicy", "theta_force", LimitKind::kNumber, 0, 1},
    {"ReusePolicy", "max_age", LimitKind::kNumber, 0, 64},
    {"QualityPolicy", "min_mass", LimitKind::kNumber, 0, 1},
    {"QualityPolicy", "on_violation", LimitKind::kName, 0, 16},
    {"QualityPolicy", "max_budget_tokens", LimitKind::kNumber, 0, kContext},
    {"QuestSelector", "score", LimitKind::kName, 0, 16},
    {"TokenSelectSelector", "scope", LimitKind::kName, 0, 16},
    {"InfiniteHipSelector", "preset", LimitKind::kName, 0, 16},
    {"InfiniteHipSelector", "probe", LimitKind::kName, 0, 16},
    {"InfiniteHipSelector", "scope", LimitKind::kName, 0, 16},
    {"ArtTerminator", "probe", LimitKind::kName, 0, 16},
    {"ArtTerminator", "guard", LimitKind::kName, 0, 16},
    {"ArtTerminator", "order", LimitKind::kName, 0, 16},
    {"ArtTerminator", "scale", LimitKind::kName, 0, 16},
    {"ArtTerminator", "scale_tolerance", LimitKind::kNumber, 0, 1},
    {"ArtTerminator", "direction_tolerance", LimitKind::kNumber, 0, 1},
    {"ArtTerminator", "mass_tolerance", LimitKind::kNumber, 0, 1},
    {"ArtTerminator", "unread_mass", LimitKind::kNumber, 0, 1},
};

std::string FieldPath(absl::string_view where, const FieldDescriptor& field) {
  return where.empty() ? field.name() : absl::StrCat(where, ".", field.name());
}

// Returns the value of a number or the length of a string.
double Measure(const Message& message, const FieldDescriptor& field, int element) {
  const Reflection& r = *message.GetReflection();
  const bool repeated = field.is_repeated();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_FLOAT:
      return static_cast<double>(repeated ? r.GetRepeatedFloat(message, &field, element)
                                          : r.GetFloat(message, &field));
    case FieldDescriptor::CPPTYPE_UINT32:
      return static_cast<double>(repeated ? r.GetRepeatedUInt32(message, &field, element)
                                          : r.GetUInt32(message, &field));
    case FieldDescriptor::CPPTYPE_UINT64:
      return static_cast<double>(repeated ? r.GetRepeatedUInt64(message, &field, element)
                                          : r.GetUInt64(message, &field));
    case FieldDescriptor::CPPTYPE_BOOL:
      return r.GetBool(message, &field) ? 1 : 0;
    case FieldDescriptor::CPPTYPE_ENUM:
      return static_cast<double>(r.GetEnumValue(message, &field));
    case FieldDescriptor::CPPTYPE_STRING: {
      std::string scratch;
      const std::string& value =
          repeated ? r.GetRepeatedStringReference(message, &field, element, &scratch)
                   : r.GetStringReference(message, &field, &scratch);
      return static_cast<double>(value.size());
    }
    default:
      return std::numeric_limits<double>::quiet_NaN();  // no such field in the table's messages
  }
}

absl::string_view What(LimitKind kind) {
  switch (kind) {
    case LimitKind::kNumber:
      return " is ";
    case LimitKind::kBytes:
    case LimitKind::kName:
      return " has a length in bytes of ";
    case LimitKind::kCount:
      return " has a number of elements of ";
  }
  return " is ";
}

bool InRange(const FieldLimit& limit, double value) {
  return value >= limit.min && value <= limit.max;
}

absl::Status OutOfRange(const std::string& path, const FieldLimit& limit, double value) {
  // Ten digits distinguish all 32-bit integers.
  return absl::InvalidArgumentError(absl::StrFormat("%s%s%.10g; it must be in [%.10g, %.10g]", path,
                                                    What(limit.kind), value, limit.min, limit.max));
}

absl::Status CheckName(const std::string& path, absl::string_view name) {
  const bool good = std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
  });
  if (good) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(path, " has a character outside [a-z0-9_-]"));
}

absl::Status CheckField(absl::string_view where, const Message& message,
                        const FieldDescriptor& field, const FieldLimit& limit) {
  const std::string path = FieldPath(where, field);
  const Reflection& reflection = *message.GetReflection();
  if (limit.kind == LimitKind::kCount) {
    const double size = reflection.FieldSize(message, &field);
    return InRange(limit, size) ? absl::OkStatus() : OutOfRange(path, limit, size);
  }
  const int elements = field.is_repeated() ? reflection.FieldSize(message, &field) : 1;
  for (int i = 0; i < elements; ++i) {
    const double value = Measure(message, field, i);
    if (InRange(limit, value)) continue;
    return OutOfRange(field.is_repeated() ? absl::StrCat(path, "[", i, "]") : path, limit, value);
  }
  if (limit.kind == LimitKind::kName) {
    return CheckName(path, reflection.GetString(message, &field));
  }
  return absl::OkStatus();
}

// Checks the messages in a field, when it holds messages.
absl::Status CheckParts(absl::string_view where, const Message& message,
                        const FieldDescriptor& field) {
  if (field.cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) return absl::OkStatus();
  const std::string path = FieldPath(where, field);
  const Reflection& reflection = *message.GetReflection();
  if (!field.is_repeated()) return CheckLimits(path, reflection.GetMessage(message, &field));
  for (int i = 0; i < reflection.FieldSize(message, &field); ++i) {
    KVASIR_RETURN_IF_ERROR(CheckLimits(absl::StrCat(path, "[", i, "]"),
                                       reflection.GetRepeatedMessage(message, &field, i)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Span<const FieldLimit> FieldLimits() { return kLimits; }

absl::Status CheckLimits(absl::string_view where, const Message& message) {
  const auto& type = *message.GetDescriptor();
  const Reflection& reflection = *message.GetReflection();
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor& field = *type.field(i);
    if (field.has_presence() && !reflection.HasField(message, &field)) continue;
    for (const FieldLimit& limit : kLimits) {
      if (limit.message != type.name() || limit.field != field.name()) continue;
      KVASIR_RETURN_IF_ERROR(CheckField(where, message, field, limit));
    }
    KVASIR_RETURN_IF_ERROR(CheckParts(where, message, field));
  }
  return absl::OkStatus();
}

absl::Status CheckPromptLength(int64_t prompt_tokens, int64_t max_tokens, int64_t max_model_len) {
  if (prompt_tokens < 1) {
    return absl::InvalidArgumentError("the prompt is empty; it needs at least one token");
  }
  if (prompt_tokens + max_tokens <= max_model_len) return absl::OkStatus();
  if (max_tokens >= max_model_len) {
    return absl::InvalidArgumentError(
        absl::StrCat("sampling.max_tokens is ", max_tokens,
                     ", which leaves no room for a prompt in the context of ", max_model_len,
                     " tokens; lower it to ", max_model_len - 1, " at most"));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the prompt has ", prompt_tokens, " tokens and sampling.max_tokens is ",
                   max_tokens, ", together more than the context of ", max_model_len,
                   "; shorten the prompt or lower max_tokens"));
}

}  // namespace kvasir::coordinator
