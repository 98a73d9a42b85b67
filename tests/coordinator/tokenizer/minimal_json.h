// The smallest tokenizer.json that loads, for tests to change: every byte is a token whose id is
// the byte, there are no merges, no added tokens, and text is not split.
#pragma once

#include <string>
#include <vector>

#include "nlohmann/json.hpp"

#include "coordinator/tokenizer/byte_level.h"
#include "coordinator/tokenizer/unicode/utf8.h"

namespace kvasir::coordinator {

inline std::string Symbol(int byte) {
  std::string symbol;
  AppendUtf8(SymbolOfByte(static_cast<uint8_t>(byte)), &symbol);
  return symbol;
}

inline nlohmann::json MinimalJson() {
  nlohmann::json vocab = nlohmann::json::object();
  for (int byte = 0; byte < 256; ++byte) vocab[Symbol(byte)] = byte;
  const nlohmann::json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
  return {{"version", "1.0"},
          {"added_tokens", nlohmann::json::array()},
          {"normalizer", nullptr},
          {"pre_tokenizer", byte_level},
          {"post_processor", nullptr},
          {"decoder", {{"type", "ByteLevel"}}},
          {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", nlohmann::json::array()}}}};
}

inline nlohmann::json AddedTokenJson(int id, const std::string& content) {
  return {{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", false}, {"special", true}};
}

// Adds begin and end of text around every text: ids 256 and 257.
inline nlohmann::json JsonWithTemplate() {
  nlohmann::json document = MinimalJson();
  document["added_tokens"] = {AddedTokenJson(256, "<s>"), AddedTokenJson(257, "</s>")};
  const auto special = [](const char* name) {
    return nlohmann::json{{"SpecialToken", {{"id", name}, {"type_id", 0}}}};
  };
  const auto ids = [](const char* name, int id) {
    return nlohmann::json{{"id", name}, {"ids", {id}}, {"tokens", {name}}};
  };
  document["post_processor"] = {
      {"type", "TemplateProcessing"},
      {"single", {special("<s>"), {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}, special("</s>")}},
      {"special_tokens", {{"<s>", ids("<s>", 256)}, {"</s>", ids("</s>", 257)}}}};
  return document;
}

}  // namespace kvasir::coordinator
