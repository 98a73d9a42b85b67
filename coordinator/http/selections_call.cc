#include "coordinator/http/selections_call.h"

#include <string>

#include "absl/strings/str_cat.h"

#include "coordinator/http/requests/json_body.h"
#include "coordinator/http/requests/json_fields.h"
#include "coordinator/http/transport/json_reply.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using nlohmann::json;

// An id has at most 128 bytes, escaped six times as many.
constexpr size_t kMostBodyBytes = 1024;

json SelectionsJson(const std::string& request_id, const GenerationApi::Selections& selections) {
  json answer = {{"request_id", request_id}};
  const v1::SelectionMap& map = selections.map;
  if (!selections.is_observed) {
    answer["waiting"] = true;
  } else if (map.counts_size() == 0 || map.num_columns() == 0) {
    answer["unavailable"] =
        "the workers keep no lists of pages by layer: on a GPU only their numbers are known";
  } else {
    answer["age_s"] = absl::ToDoubleSeconds(selections.age);
    answer["layers"] = static_cast<uint32_t>(map.counts_size()) / map.num_columns();
    answer["columns"] = map.num_columns();
    answer["pages"] = map.num_pages();
    answer["pages_per_column"] = map.pages_per_column();
    answer["heads"] = map.num_heads();
    answer["counts"] = map.counts();
  }
  return answer;
}

absl::StatusOr<json> Selections(GenerationApi& api, std::string body) {
  if (body.size() > kMostBodyBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("the body has ", body.size(),
                     " bytes; expected {\"request_id\": ID}, at most ", kMostBodyBytes));
  }
  KVASIR_ASSIGN_OR_RETURN(const JsonBody parsed, ParseBody(std::move(body)));
  JsonFields fields(parsed.object);
  const std::string id = fields.String("request_id").value_or("");
  KVASIR_RETURN_IF_ERROR(fields.status());
  KVASIR_ASSIGN_OR_RETURN(const GenerationApi::Selections selections, api.Observe(id));
  return SelectionsJson(id, selections);
}

}  // namespace

void PostSelections(const HttpCallContext& context, std::shared_ptr<Exchange> exchange) {
  absl::StatusOr<json> answer = Selections(context.api, exchange->TakeBody());
  if (!answer.ok()) return exchange->Refuse(answer.status());
  ReplyJson(*exchange, *std::move(answer));
}

}  // namespace kvasir::coordinator
