#include "coordinator/http/transport/request_id.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/str_cat.h"

namespace kvasir::coordinator {
namespace {

constexpr size_t kMostIdBytes = 128;

}  // namespace

absl::Status CheckRequestId(absl::string_view id) {
  const bool printable =
      std::all_of(id.begin(), id.end(), [](char c) { return c > ' ' && c < '\x7f'; });
  if (id.size() <= kMostIdBytes && printable) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("the header x-request-id has ", id.size(),
                                                 " bytes; it must have at most ", kMostIdBytes,
                                                 ", printable ASCII without blanks"));
}

}  // namespace kvasir::coordinator
