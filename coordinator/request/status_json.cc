#include "coordinator/request/status_json.h"

#include "absl/strings/str_cat.h"
#include "google/protobuf/util/json_util.h"

namespace kvasir::coordinator {

absl::StatusOr<std::string> StatusJson(const v1::GetServerInfoResponse& server,
                                       const v1::GetModelInfoResponse* model) {
  std::string server_text;
  std::string model_text = "null";
  google::protobuf::util::JsonPrintOptions options;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  auto status = google::protobuf::util::MessageToJsonString(server, &server_text, options);
  if (status.ok() && model != nullptr) {
    model_text.clear();
    status = google::protobuf::util::MessageToJsonString(*model, &model_text, options);
  }
  if (!status.ok()) return absl::InternalError(std::string(status.message()));
  return absl::StrCat("{\"server\":", server_text, ",\"model\":", model_text, "}");
}

}  // namespace kvasir::coordinator
