#include "proto/selector_field.h"

#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"

namespace kvasir::v1 {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::OneofDescriptor;

const OneofDescriptor& SelectorOneof() {
  return *AttentionPolicy::descriptor()->FindOneofByName("selector");
}

// Null when none is set.
const FieldDescriptor* SelectorOf(const AttentionPolicy& policy) {
  return AttentionPolicy::GetReflection()->GetOneofFieldDescriptor(policy, &SelectorOneof());
}

}  // namespace

std::string SelectorName(const AttentionPolicy& policy) {
  const FieldDescriptor* field = SelectorOf(policy);
  return field == nullptr ? "" : field->name();
}

void SetSelector(absl::string_view name, AttentionPolicy& policy) {
  policy.clear_selector();
  for (int i = 0; i < SelectorOneof().field_count(); ++i) {
    const FieldDescriptor& field = *SelectorOneof().field(i);
    if (field.name() == name) AttentionPolicy::GetReflection()->MutableMessage(&policy, &field);
  }
}

std::vector<std::pair<std::string, std::string>> SelectorFields(const AttentionPolicy& policy) {
  std::vector<std::pair<std::string, std::string>> fields;
  const FieldDescriptor* selector = SelectorOf(policy);
  if (selector == nullptr) return fields;
  const google::protobuf::Message& message =
      AttentionPolicy::GetReflection()->GetMessage(policy, selector);
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* field = message.GetDescriptor()->field(i);
    std::string value = message.GetReflection()->GetString(message, field);
    if (!value.empty()) fields.emplace_back(field->name(), std::move(value));
  }
  return fields;
}

}  // namespace kvasir::v1
