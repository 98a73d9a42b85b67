#include "coordinator/http/http_call.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "coordinator/http/transport/error_reply.h"
#include "coordinator/tokenizer/json_value.h"
#include "coordinator/tokenizer/unicode/utf8.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {

absl::Status CheckModel(const HttpCallContext& context, const nlohmann::json& body) {
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
