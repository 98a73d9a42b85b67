#include "worker/batch/policy_stages.h"

#include <string>
#include <utility>
#include <vector>

#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"

#include "proto/selector_field.h"

namespace kvasir::worker {
namespace {

kernels::MethodOptions OptionsOf(const std::vector<std::pair<std::string, std::string>>& fields) {
  kernels::MethodOptions options;
  for (const auto& [name, value] : fields) options.push_back({.name = name, .value = value});
  return options;
}

}  // namespace

// Clearing by name, not copying, so that a new method is part of the shape without a line here.
v1::AttentionPolicy WithoutNumbers(const v1::AttentionPolicy& policy) {
  v1::AttentionPolicy shape = policy;
  shape.clear_sink_tokens();
  shape.clear_window_tokens();
  shape.clear_token_budget();
  shape.clear_dense_layers();
  shape.clear_layer_budgets();
  shape.clear_patience();
  shape.clear_quality();
  if (policy.top_p() != 0) shape.set_top_p(1);
  shape.clear_reuse();
  if (!policy.reuse().rule().empty()) shape.mutable_reuse()->set_rule(policy.reuse().rule());
  return shape;
}

std::string ShapeBytes(const v1::AttentionPolicy& shape) {
  std::string bytes;
  google::protobuf::io::StringOutputStream stream(&bytes);
  google::protobuf::io::CodedOutputStream coded(&stream);
  coded.SetSerializationDeterministic(true);
  shape.SerializeToCodedStream(&coded);
  coded.Trim();
  return bytes;
}

kernels::MethodOptions SelectorOptions(const v1::AttentionPolicy& policy) {
  return OptionsOf(v1::SelectorFields(policy));
}

kernels::MethodOptions TerminatorOptions(const v1::AttentionPolicy& policy) {
  return OptionsOf(v1::TerminatorFields(policy));
}

}  // namespace kvasir::worker
