#include "coordinator/request/status_json.h"

#include "absl/strings/str_cat.h"
#include "google/protobuf/util/json_util.h"

#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {

absl::StatusOr<std::string> MessageJson(const google::protobuf::Message& message) {
  std::string text;
  google::protobuf::util::JsonPrintOptions options;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  const auto status = google::protobuf::util::MessageToJsonString(message, &text, options);
  if (!status.ok()) return absl::InternalError(std::string(status.message()));
  return text;
}

absl::StatusOr<std::string> StatusJson(const v1::GetServerInfoResponse& server,
                                       const v1::GetModelInfoResponse* model) {
  KVASIR_ASSIGN_OR_RETURN(const std::string server_text, MessageJson(server));
  std::string model_text = "null";
  if (model != nullptr) {
    KVASIR_ASSIGN_OR_RETURN(model_text, MessageJson(*model));
  }
  return absl::StrCat("{\"server\":", server_text, ",\"model\":", model_text, "}");
}

}  // namespace kvasir::coordinator
