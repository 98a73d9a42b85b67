#include "coordinator/policy/policy_file.h"

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "google/protobuf/util/json_util.h"
#include "nlohmann/json.hpp"
#include "yaml-cpp/yaml.h"

#include "kernels/base/status_macros.h"
#include "proto/text_file.h"

namespace kvasir::coordinator {
namespace {

using nlohmann::json;

constexpr int kMaxDepth = 8;

// Converts YAML to JSON, which protobuf reads strictly: unknown fields are errors.
absl::StatusOr<json> ToJson(const YAML::Node& node, int depth) {
  if (depth > kMaxDepth) return absl::InvalidArgumentError("policies are nested too deeply");
  switch (node.Type()) {
    case YAML::NodeType::Map: {
      json object = json::object();
      for (const auto& entry : node) {
        KVASIR_ASSIGN_OR_RETURN(object[entry.first.as<std::string>()],
                                ToJson(entry.second, depth + 1));
      }
      return object;
    }
    case YAML::NodeType::Scalar: {
      int64_t number = 0;
      const std::string text = node.Scalar();
      if (absl::SimpleAtoi(text, &number)) return json(number);
      return json(text);
    }
    case YAML::NodeType::Sequence: {
      json list = json::array();
      for (const YAML::Node& element : node) {
        KVASIR_ASSIGN_OR_RETURN(list.emplace_back(), ToJson(element, depth + 1));
      }
      return list;
    }
    case YAML::NodeType::Null:
    case YAML::NodeType::Undefined:
      break;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("line ", node.Mark().line + 1, ": a value, a list or a map is expected here"));
}

absl::StatusOr<v1::SparsityPolicy> ToPolicy(const YAML::Node& node) {
  KVASIR_ASSIGN_OR_RETURN(json object, ToJson(node, 0));
  // A name may look like a number.
  if (const YAML::Node name = node["name"]; name.IsScalar()) object["name"] = name.Scalar();
  v1::SparsityPolicy policy;
  const auto status = google::protobuf::util::JsonStringToMessage(object.dump(), &policy);
  if (status.ok()) return policy;
  return absl::InvalidArgumentError(
      absl::StrCat("line ", node.Mark().line + 1, ": ", std::string(status.message().ToString())));
}

}  // namespace

absl::StatusOr<std::vector<v1::SparsityPolicy>> ParsePolicies(const std::string& yaml) {
  std::vector<v1::SparsityPolicy> policies;
  try {
    const YAML::Node document = YAML::Load(yaml);
    if (!document.IsSequence()) {
      return absl::InvalidArgumentError("the document is not a list of policies");
    }
    for (const YAML::Node& node : document) {
      if (!node.IsMap()) {
        return absl::InvalidArgumentError(
            absl::StrCat("line ", node.Mark().line + 1, ": a policy is expected here"));
      }
      KVASIR_ASSIGN_OR_RETURN(policies.emplace_back(), ToPolicy(node));
    }
  } catch (const YAML::Exception& e) {
    return absl::InvalidArgumentError(e.what());
  }
  return policies;
}

absl::StatusOr<std::vector<v1::SparsityPolicy>> LoadPolicyFile(const std::string& path) {
  KVASIR_ASSIGN_OR_RETURN(const std::string text, proto::ReadTextFile("--policies", path));
  absl::StatusOr<std::vector<v1::SparsityPolicy>> policies = ParsePolicies(text);
  if (policies.ok()) return policies;
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", policies.status().message()));
}

}  // namespace kvasir::coordinator
