// Export and import of contexts over HTTP: frames (contexts/part_frames.h) in a body. Thread-safe.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "coordinator/contexts/contexts.h"
#include "coordinator/http/transport/exchange.h"

namespace kvasir::coordinator {

// Answers with the frames of the context, and returns when the client has them or is gone. After an
// error the exchange has no answer.
absl::Status SendExport(Contexts& contexts, const std::string& name, const ContextCaller& by,
                        const std::shared_ptr<Exchange>& exchange);
absl::StatusOr<v1::Context> TakeImport(Contexts& contexts, const std::string& name,
                                       const ContextCaller& by, absl::string_view body);

}  // namespace kvasir::coordinator
