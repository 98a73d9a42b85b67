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

}  // namespace

std::string SelectorName(const AttentionPolicy& policy) {
  const FieldDescriptor* field =
      AttentionPolicy::GetReflection()->GetOneofFieldDescriptor(policy, &SelectorOneof());
  return field == nullptr ? "" : field->name();
}

void SetSelector(absl::string_view name, AttentionPolicy& policy) {
  policy.clear_selector();
  for (int i = 0; i < SelectorOneof().field_count(); ++i) {
    const FieldDescriptor& field = *SelectorOneof().field(i);
    if (field.name() == name) AttentionPolicy::GetReflection()->MutableMessage(&policy, &field);
  }
}

}  // namespace kvasir::v1
