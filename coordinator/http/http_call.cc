#include "coordinator/http/http_call.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "coordinator/http/transport/error_reply.h"
#include "coordinator/tokenizer/json_value.h"
#include "coordinator/tokenizer/utf8.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using nlohmann::json;

// Four million token ids, more than a body of 64 MiB has of words.
constexpr JsonLimits kBodyLimits = {.max_values = 1 << 22, .max_keys = 4096, .max_depth = 32};

}  // namespace

std::string ToText(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

void ReplyJson(Exchange& exchange, const absl::StatusOr<json>& answer) {
  if (!answer.ok()) return exchange.Reply(ErrorReply(answer.status()));
  exchange.Reply({.body = ToText(*answer)});
}

absl::StatusOr<json> ParseBody(const std::string& body) {
  KVASIR_ASSIGN_OR_RETURN(json parsed, ParseJson(body, kBodyLimits));
  if (parsed.is_object()) return parsed;
  return absl::InvalidArgumentError("the body is not a JSON object");
}

absl::Status CheckModel(const HttpCallContext& context, const json& body) {
  const auto model = body.find("model");
  if (model == body.end() || model->is_null()) return absl::OkStatus();
  if (!model->is_string()) {
    return AboutField(absl::InvalidArgumentError("model is not a string"), "model");
  }
  const std::string& name = model->get_ref<const std::string&>();
  if (name == context.model) return absl::OkStatus();
  return AboutField(WithErrorCode(absl::NotFoundError(absl::StrCat("the model \"", ForMessage(name),
                                                                   "\" does not exist; \"",
                                                                   context.model, "\" is served")),
                                  "model_not_found"),
                    "model");
}

}  // namespace kvasir::coordinator
