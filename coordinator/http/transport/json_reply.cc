#include "coordinator/http/transport/json_reply.h"

namespace kvasir::coordinator {

using nlohmann::json;

std::string ToText(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

void ReplyJson(Exchange& exchange, const json& answer) { exchange.Reply({.body = ToText(answer)}); }

}  // namespace kvasir::coordinator
