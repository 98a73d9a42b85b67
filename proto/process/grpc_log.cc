#include "proto/process/grpc_log.h"

#include <cstdint>
#include <cstdio>
#include <grpc/support/log.h>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

#include "proto/process/rare_warnings.h"
#include "proto/security/tls_material.h"

namespace kvasir::proto {
namespace {

// Returns the message; one that quotes an error of OpenSSL ("...: error:0A00009C:...") in words.
std::string Words(absl::string_view message) {
  constexpr absl::string_view kQuote = "error:";
  constexpr size_t kDigits = 8;
  const size_t quote = message.find(kQuote);
  uint64_t error = 0;
  if (quote == message.npos || !absl::StrContains(message, "andshake") ||
      !absl::SimpleHexAtoi(message.substr(quote + kQuote.size(), kDigits), &error)) {
    return std::string(message);
  }
  return absl::StrCat("a TLS handshake failed: ", DescribeTlsError(error));
}

void Log(gpr_log_func_args* line) {
  // gRPC hands its function nothing of ours.
  static RareWarnings warnings("gRPC");
  if (line->severity != GPR_LOG_SEVERITY_ERROR) return;
  warnings.Warn(Words(line->message));
  // The process ends at once, before the log's thread writes.
  if (absl::StartsWith(line->message, "assertion failed")) {
    std::fprintf(stderr, "gRPC: %s:%d: %s\n", line->file, line->line, line->message);
  }
}

}  // namespace

void RouteGrpcLog() { gpr_set_log_function(Log); }

}  // namespace kvasir::proto
