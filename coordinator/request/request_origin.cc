#include "coordinator/request/request_origin.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

#include "coordinator/policy/limits.h"

namespace kvasir::coordinator {
namespace {

bool IsLowerHex(absl::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

bool IsId(absl::string_view text) {
  return IsLowerHex(text) && text.find_first_not_of('0') != absl::string_view::npos;
}

bool IsKept(absl::string_view text) { return !text.empty() && text.size() <= kMaxIdBytes; }

bool IsPrintable(char c) { return c >= 0x20 && c < 0x7f; }

}  // namespace

// version "-" trace-id "-" parent-id "-" trace-flags, later versions with more after it:
//   00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01
std::optional<TraceContext> ParseTraceparent(absl::string_view header) {
  constexpr size_t kLength = 55;
  if (header.size() < kLength) return std::nullopt;
  const absl::string_view version = header.substr(0, 2);
  const absl::string_view flags = header.substr(53, 2);
  if (!IsLowerHex(version) || version == "ff" || !IsLowerHex(flags)) return std::nullopt;
  if (header[2] != '-' || header[35] != '-' || header[52] != '-') return std::nullopt;
  const bool is_longer = header.size() > kLength;
  if (is_longer && (version == "00" || header[kLength] != '-')) return std::nullopt;
  TraceContext trace = {.trace_id = std::string(header.substr(3, 32)),
                        .parent_id = std::string(header.substr(36, 16)),
                        .is_sampled = (absl::HexStringToBytes(flags)[0] & 1) != 0};
  if (!IsId(trace.trace_id) || !IsId(trace.parent_id)) return std::nullopt;
  return trace;
}

RequestOrigin OriginOf(const v1::GenerateRequest& request, const OriginHeaders& headers,
                       const std::function<std::string()>& new_id, TimePoint arrived) {
  RequestOrigin origin;
  origin.arrived = arrived;
  origin.trace = ParseTraceparent(headers.traceparent);
  if (IsKept(request.request_id())) {
    origin.request_id = request.request_id();
  } else if (IsKept(headers.request_id)) {
    origin.request_id = std::string(headers.request_id);
  } else {
    origin.request_id = new_id();
  }
  if (IsKept(request.tenant_id())) origin.tenant = request.tenant_id();
  origin.caller = headers.caller;
  origin.authorization = std::string(headers.authorization);
  if (origin.caller != nullptr) origin.tenant = origin.caller->Tenant(origin.tenant);
  return origin;
}

std::string HeaderText(absl::string_view id) {
  if (std::all_of(id.begin(), id.end(), IsPrintable)) return std::string(id);
  std::string text;
  for (const char c : id) {
    if (IsPrintable(c) && c != '%') {
      text.push_back(c);
    } else {
      absl::StrAppend(&text, "%",
                      absl::AsciiStrToUpper(
                          absl::StrCat(absl::Hex(static_cast<unsigned char>(c), absl::kZeroPad2))));
    }
  }
  return text;
}

}  // namespace kvasir::coordinator
