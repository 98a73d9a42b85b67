// Reads the fields of a request that are a conversation, for chat completions and /tokenize.
// Function without state: thread-safe.
#pragma once

#include "coordinator/http/requests/json_body.h"
#include "coordinator/http/requests/json_fields.h"
#include "proto/kvasir/v1/generation.pb.h"

namespace kvasir::coordinator {

// Reads messages, tools, tool_choice, chat_template_kwargs, add_generation_prompt and
// continue_final_message; `fields` are those of `body`. What the chat template checks is left to
// it: that a message has a role, and which roles follow each other.
v1::ChatInput ReadConversation(const JsonBody& body, JsonFields& fields);

}  // namespace kvasir::coordinator
