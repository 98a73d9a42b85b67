#include "proto/selector_field.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"

namespace kvasir::v1 {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::OneofDescriptor;
using google::protobuf::Reflection;

const OneofDescriptor& Selectors() {
  return *AttentionPolicy::descriptor()->FindOneofByName("selector");
}
const OneofDescriptor& Terminators() {
  return *AttentionPolicy::descriptor()->FindOneofByName("terminator");
}

// Returns null when none is set.
const FieldDescriptor* MethodOf(const AttentionPolicy& policy, const OneofDescriptor& methods) {
  return AttentionPolicy::GetReflection()->GetOneofFieldDescriptor(policy, &methods);
}

std::string Name(const AttentionPolicy& policy, const OneofDescriptor& methods) {
  const FieldDescriptor* field = MethodOf(policy, methods);
  return field == nullptr ? "" : field->name();
}

void Set(absl::string_view name, const OneofDescriptor& methods, AttentionPolicy& policy) {
  const Reflection& reflection = *AttentionPolicy::GetReflection();
  reflection.ClearOneof(&policy, &methods);
  for (int i = 0; i < methods.field_count(); ++i) {
    const FieldDescriptor& field = *methods.field(i);
    if (field.name() == name) reflection.MutableMessage(&policy, &field);
  }
}

// Returns an empty string where the field has its default.
std::string Value(const Message& message, const FieldDescriptor* field) {
  const Reflection& reflection = *message.GetReflection();
  if (field->cpp_type() == FieldDescriptor::CPPTYPE_STRING) {
    return reflection.GetString(message, field);
  }
  const float value = reflection.GetFloat(message, field);
  return value == 0 ? "" : absl::StrFormat("%.9g", value);
}

std::vector<std::pair<std::string, std::string>> Fields(const AttentionPolicy& policy,
                                                        const OneofDescriptor& methods) {
  std::vector<std::pair<std::string, std::string>> fields;
  const FieldDescriptor* method = MethodOf(policy, methods);
  if (method == nullptr) return fields;
  const Message& message = AttentionPolicy::GetReflection()->GetMessage(policy, method);
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* field = message.GetDescriptor()->field(i);
    std::string value = Value(message, field);
    if (!value.empty()) fields.emplace_back(field->name(), std::move(value));
  }
  return fields;
}

}  // namespace

SelectorFacts FactsOf(const AttentionPolicy& policy) {
  SelectorFacts facts;
  if (const FieldDescriptor* method = MethodOf(policy, Selectors()); method != nullptr) {
    facts = method->options().GetExtension(selector_facts);
    const auto options = Fields(policy, Selectors());
    const SelectorFacts declared = facts;
    for (const SelectorFacts::Variant& variant : declared.variants()) {
      const std::pair<std::string, std::string> option = {variant.option(), variant.value()};
      if (std::find(options.begin(), options.end(), option) != options.end()) {
        facts.MergeFrom(variant.facts());
      }
    }
  }
  facts.set_chunk_tokens(std::max<uint32_t>(facts.chunk_tokens(), 1));
  facts.set_min_window_tokens(std::max<uint32_t>(facts.min_window_tokens(), 1));
  return facts;
}

std::string SelectorName(const AttentionPolicy& policy) { return Name(policy, Selectors()); }
std::string TerminatorName(const AttentionPolicy& policy) { return Name(policy, Terminators()); }

void SetSelector(absl::string_view name, AttentionPolicy& policy) {
  Set(name, Selectors(), policy);
}
void SetTerminator(absl::string_view name, AttentionPolicy& policy) {
  Set(name, Terminators(), policy);
}

std::vector<std::pair<std::string, std::string>> SelectorFields(const AttentionPolicy& policy) {
  return Fields(policy, Selectors());
}
std::vector<std::pair<std::string, std::string>> TerminatorFields(const AttentionPolicy& policy) {
  return Fields(policy, Terminators());
}

}  // namespace kvasir::v1
