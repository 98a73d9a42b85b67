// A request that was accepted, as its log line and its trace name it. Values only.
#pragma once

#include <cstdint>
#include <string>

#include "coordinator/request/request_origin.h"

namespace kvasir::coordinator {

struct AcceptedRequest {
  RequestOrigin origin;
  std::string policy;  // name
  int64_t prompt_tokens = 0;
  bool is_conversation = false;  // its prompt was made by the chat template
  int64_t max_tokens = 0;
  float temperature = 0;
  float top_p = 1;
  uint32_t top_k = 0;  // 0: off
};

}  // namespace kvasir::coordinator
