#include "coordinator/http/context_calls.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "google/protobuf/util/json_util.h"

#include "coordinator/http/context_transfers.h"
#include "coordinator/http/requests/conversation_fields.h"
#include "coordinator/http/requests/generate_fields.h"
#include "coordinator/http/requests/json_body.h"
#include "coordinator/http/requests/json_fields.h"
#include "coordinator/http/transport/error_reply.h"
#include "coordinator/policy/limits.h"
#include "coordinator/request/status_json.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

constexpr absl::string_view kPath = "/v1/contexts";

// One call: its body's fields, the name in its path, and who asks.
struct ContextCall {
  const HttpCallContext& context;
  const JsonBody& body;
  JsonFields& fields;
  const std::string& name;
  ContextCaller by;
};

template <typename Response>
absl::StatusOr<std::string> AnswerOf(const absl::StatusOr<Response>& response) {
  KVASIR_RETURN_IF_ERROR(response.status());
  return MessageJson(*response);
}

// Reads text, tokens or messages.
template <typename Request>
void ReadInput(const ContextCall& call, Request& request) {
  JsonFields& fields = call.fields;
  if (const auto text = fields.String("text")) request.set_text(*text);
  if (fields.Has("tokens")) {
    const std::vector<uint32_t> ids = fields.Ids("tokens", static_cast<size_t>(kMaxContextTokens));
    request.mutable_token_ids()->mutable_ids()->Assign(ids.begin(), ids.end());
  }
  if (fields.Has("messages")) *request.mutable_chat() = ReadConversation(call.body, fields);
  const int inputs = (fields.Has("text") ? 1 : 0) + (fields.Has("tokens") ? 1 : 0) +
                     (fields.Has("messages") ? 1 : 0);
  if (inputs > 1) fields.Refuse("text", "expected one of text, tokens and messages");
  if (const auto value = fields.Bool("add_special_tokens")) request.set_add_special_tokens(*value);
  if (const auto value = fields.Bool("parse_special_tokens")) {
    request.set_parse_special_tokens(*value);
  }
}

// Takes the answer of a call, or its error.
using ContextDone = std::function<void(const absl::StatusOr<std::string>&)>;

// Makes a call of a function that answers at once.
template <absl::StatusOr<std::string> (*kCall)(const ContextCall&)>
void AtOnce(const ContextCall& call, const ContextDone& done) {
  done(kCall(call));
}

absl::StatusOr<std::string> Create(const ContextCall& call) {
  v1::CreateContextRequest request;
  request.set_name(call.fields.String("name").value_or(""));
  v1::GenerateRequest shared;  // the fields that it has in common with completions
  ReadGenerateFields(call.fields, shared);
  *request.mutable_policy() = shared.policy();
  ReadInput(call, request);
  KVASIR_RETURN_IF_ERROR(call.fields.status());
  return AnswerOf(call.context.contexts.Create(request, call.by));
}

absl::StatusOr<std::string> Fork(const ContextCall& call) {
  v1::ForkContextRequest request;
  request.set_name(call.name);
  request.set_into(call.fields.String("into").value_or(""));
  ReadInput(call, request);
  KVASIR_RETURN_IF_ERROR(call.fields.status());
  return AnswerOf(call.context.contexts.Fork(request, call.by));
}

absl::StatusOr<std::string> List(const ContextCall& call) {
  return AnswerOf(call.context.contexts.List({}, call.by));
}

absl::StatusOr<std::string> Get(const ContextCall& call) {
  v1::GetContextRequest request;
  request.set_name(call.name);
  return AnswerOf(call.context.contexts.Get(request, call.by));
}

absl::StatusOr<std::string> Delete(const ContextCall& call) {
  v1::DeleteContextRequest request;
  request.set_name(call.name);
  KVASIR_RETURN_IF_ERROR(call.context.contexts.Delete(request, call.by));
  return MessageJson(v1::DeleteContextResponse());
}

// Reads the request from the body, in protobuf's JSON form, with the name of the path.
template <typename Request>
absl::StatusOr<Request> ReadHint(const ContextCall& call) {
  Request request;
  google::protobuf::util::JsonParseOptions options;
  options.ignore_unknown_fields = true;
  const auto read = google::protobuf::util::JsonStringToMessage(
      call.body.object.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace), &request,
      options);
  if (!read.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the body is not as docs/api.md says: ", read.message().ToString()));
  }
  return request;
}

template <typename Request, typename Response>
void AskHint(const ContextCall& call, const ContextDone& done,
             void (Contexts::*ask)(const Request&, const ContextCaller&,
                                   Contexts::Done<Response>)) {
  absl::StatusOr<Request> request = ReadHint<Request>(call);
  if (!request.ok()) return done(request.status());
  request->set_name(call.name);
  (call.context.contexts.*ask)(
      *request, call.by, [done](const absl::StatusOr<Response>& hint) { done(AnswerOf(hint)); });
}

void Pin(const ContextCall& call, const ContextDone& done) { AskHint(call, done, &Contexts::Pin); }
void Unpin(const ContextCall& call, const ContextDone& done) {
  AskHint(call, done, &Contexts::Unpin);
}
void Prefetch(const ContextCall& call, const ContextDone& done) {
  AskHint(call, done, &Contexts::Prefetch);
}
void Demote(const ContextCall& call, const ContextDone& done) {
  AskHint(call, done, &Contexts::Demote);
}

void AskEvict(const ContextCall& call, const ContextDone& done, const v1::EvictRequest& request) {
  call.context.contexts.Evict(
      request, call.by,
      [done](const absl::StatusOr<v1::EvictResponse>& evicted) { done(AnswerOf(evicted)); });
}

void EvictOne(const ContextCall& call, const ContextDone& done) {
  v1::EvictRequest request;
  request.set_context(call.name);
  AskEvict(call, done, request);
}

// Evicts a tenant, everything or a prefix, as the body says.
void Evict(const ContextCall& call, const ContextDone& done) {
  const absl::StatusOr<v1::EvictRequest> request = ReadHint<v1::EvictRequest>(call);
  if (!request.ok()) return done(request.status());
  AskEvict(call, done, *request);
}

struct ContextRoute {
  absl::string_view method;
  bool names_context;
  absl::string_view action;  // the last part of the path; empty: none
  void (*call)(const ContextCall&, const ContextDone&);
  bool is_transfer = false;  // of bytes: there is no JSON body
};

// Exports for GET, imports for POST. The tenant is that of the key, or the one without a name.
absl::Status Transfer(const HttpCallContext& context, const std::shared_ptr<Exchange>& exchange,
                      const ContextRoute& route, const std::string& name, const std::string& body) {
  const ContextCaller by = ContextCallerOf(exchange->caller(), "");
  if (route.method == "GET") return SendExport(context.contexts, name, by, exchange);
  KVASIR_ASSIGN_OR_RETURN(std::string answer,
                          AnswerOf(TakeImport(context.contexts, name, by, body)));
  exchange->Reply({.body = std::move(answer)});
  return absl::OkStatus();
}

constexpr ContextRoute kContextRoutes[] = {
    {"POST", false, "", AtOnce<Create>},    {"GET", false, "", AtOnce<List>},
    {"GET", true, "", AtOnce<Get>},         {"DELETE", true, "", AtOnce<Delete>},
    {"POST", true, "fork", AtOnce<Fork>},   {"POST", true, "pin", Pin},
    {"POST", true, "unpin", Unpin},         {"POST", true, "prefetch", Prefetch},
    {"POST", true, "demote", Demote},       {"POST", true, "evict", EvictOne},
    {"GET", true, "export", nullptr, true}, {"POST", true, "import", nullptr, true},
};
// In the place of a name, which this one cannot be.
constexpr ContextRoute kEvictRoute = {"POST", false, ":evict", Evict};

// Makes the call, whose end answers the exchange.
absl::Status Answer(const HttpCallContext& context, const std::shared_ptr<Exchange>& exchange,
                    const ContextRoute& route, const std::string& name) {
  // A body is optional where its fields are.
  std::string text = exchange->TakeBody();
  if (route.is_transfer) return Transfer(context, exchange, route, name, text);
  KVASIR_ASSIGN_OR_RETURN(const JsonBody body, ParseBody(text.empty() ? "{}" : std::move(text)));
  JsonFields fields(body.object);
  const std::string part = fields.String("cache_salt").value_or("");
  KVASIR_RETURN_IF_ERROR(fields.status());
  const ContextCall call = {.context = context,
                            .body = body,
                            .fields = fields,
                            .name = name,
                            .by = ContextCallerOf(exchange->caller(), part)};
  route.call(call, [exchange](const absl::StatusOr<std::string>& answer) {
    if (!answer.ok()) return exchange->Refuse(answer.status());
    exchange->Reply({.body = *answer});
  });
  return absl::OkStatus();
}

void Serve(const HttpCallContext& context, const std::shared_ptr<Exchange>& exchange,
           const ContextRoute& route, const std::string& name) {
  const auto work = [&context, exchange, &route, name] {
    const absl::Status answered = Answer(context, exchange, route, name);
    if (!answered.ok()) exchange->Refuse(answered);
  };
  // Records are files: never written on a thread that serves streams.
  const size_t bytes = std::max(exchange->request().body.size(), kFileWorkBytes);
  const absl::Status taken = context.api.RunText(bytes, work);
  if (!taken.ok()) exchange->Refuse(taken);
}

}  // namespace

bool IsContextPath(absl::string_view path) {
  return path == kPath || path == absl::StrCat(kPath, kEvictRoute.action) ||
         absl::StartsWith(path, absl::StrCat(kPath, "/"));
}

void ServeContexts(const HttpCallContext& context, std::shared_ptr<Exchange> exchange) {
  const HttpRequest& request = exchange->request();
  const std::vector<std::string> parts =
      absl::StrSplit(absl::string_view(request.path).substr(kPath.size()), '/');
  const std::string name = parts.size() > 1 ? parts[1] : "";
  const std::string action = parts.size() > 2 ? parts[2] : "";
  if (request.method == "POST" && request.path == absl::StrCat(kPath, kEvictRoute.action)) {
    return Serve(context, exchange, kEvictRoute, {});
  }
  std::vector<absl::string_view> allowed;
  for (const ContextRoute& route : kContextRoutes) {
    if (parts.size() > 3 || route.names_context != (parts.size() > 1) || route.action != action) {
      continue;
    }
    allowed.push_back(route.method);
    // HEAD is answered as GET, and the connection leaves out the body. A stream is nothing else.
    const bool as_get = request.method == "HEAD" && !route.is_transfer;
    if (route.method != (as_get ? "GET" : request.method)) continue;
    return Serve(context, exchange, route, name);
  }
  if (allowed.empty()) {
    return exchange->Refuse(absl::NotFoundError(
        absl::StrCat("there is no ", request.path, "; docs/api.md lists what there is")));
  }
  const std::string allow = absl::StrJoin(allowed, ", ");
  exchange->Refuse(WithAllowedMethods(
      absl::InvalidArgumentError(
          absl::StrCat(request.path, " is not served for ", request.method, ", only for ", allow)),
      allow));
}

}  // namespace kvasir::coordinator
