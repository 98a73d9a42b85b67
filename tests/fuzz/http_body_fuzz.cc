// Input: the body of an HTTP request. What is accepted as a completion or a conversation has texts
// in UTF-8, and the text of every member is the member's value; what is refused says why in UTF-8.
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

#include "coordinator/http/requests/chat_request.h"
#include "coordinator/http/requests/completion_request.h"
#include "coordinator/http/requests/json_body.h"
#include "coordinator/http/transport/error_reply.h"
#include "coordinator/tokenizer/unicode/utf8.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

void CheckRefusal(const absl::Status& status) {
  KVASIR_CHECK(HttpStatusOf(status) == 400);
  KVASIR_CHECK(!FindInvalidUtf8(ErrorJson(status)).has_value());
}

void CheckMembers(const JsonBody& body) {
  for (const auto& [name, value] : body.object.items()) {
    const absl::string_view text = body.MemberText(name);
    KVASIR_CHECK(value.is_null() ? text.empty() : nlohmann::json::parse(text) == value);
  }
}

void Check(absl::string_view input) {
  const absl::StatusOr<JsonBody> body = ParseBody(std::string(input));
  if (!body.ok()) return CheckRefusal(body.status());
  CheckMembers(*body);
  const auto completion = ParseCompletion(body->object);
  if (!completion.ok()) CheckRefusal(completion.status());
  const auto chat = ParseChat(*body);
  if (!chat.ok()) return CheckRefusal(chat.status());
  KVASIR_CHECK(!FindInvalidUtf8(chat->request.chat().messages()).has_value());
}

}  // namespace
}  // namespace kvasir::coordinator

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  kvasir::coordinator::Check(absl::string_view(reinterpret_cast<const char*>(data), size));
  return 0;
}
