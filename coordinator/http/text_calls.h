// Calls of the HTTP API with a body: completions, chat, tokenize, detokenize, and what clients ask
// about the tokenizer. Long bodies are parsed on threads that serve no streams. Thread-safe.
#pragma once

#include <memory>

#include "coordinator/http/http_call.h"
#include "coordinator/http/transport/exchange.h"

namespace kvasir::coordinator {

void PostChatCompletions(const HttpCallContext& context, std::shared_ptr<Exchange> exchange);
void PostCompletions(const HttpCallContext& context, std::shared_ptr<Exchange> exchange);
void PostTokenize(const HttpCallContext& context, std::shared_ptr<Exchange> exchange);
void PostDetokenize(const HttpCallContext& context, std::shared_ptr<Exchange> exchange);

}  // namespace kvasir::coordinator
