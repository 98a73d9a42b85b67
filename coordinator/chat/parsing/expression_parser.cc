#include "coordinator/chat/parsing/expression_parser.h"

#include <algorithm>
#include <iterator>
#include <optional>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

#include "coordinator/chat/values/operations.h"
#include "coordinator/chat/values/python_text.h"
#include "coordinator/tokenizer/unicode/utf8.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using Kind = Expression::Kind;

std::optional<Value> Constant(absl::string_view name) {
  if (name == "true" || name == "True") return Value(true);
  if (name == "false" || name == "False") return Value(false);
  if (name == "none" || name == "None") return Value();
  return std::nullopt;
}

}  // namespace

const TemplateToken& TokenReader::Peek(size_t ahead) const {
  return tokens_[std::min(pos_ + ahead, tokens_.size() - 1)];
}

const TemplateToken& TokenReader::Next() {
  const TemplateToken& token = Peek();
  if (pos_ + 1 < tokens_.size()) ++pos_;
  return token;
}

bool TokenReader::IsOperator(absl::string_view text, size_t ahead) const {
  return Peek(ahead).kind == TemplateToken::Kind::kOperator && Peek(ahead).text == text;
}

bool TokenReader::IsName(absl::string_view text, size_t ahead) const {
  return Peek(ahead).kind == TemplateToken::Kind::kName && Peek(ahead).text == text;
}

bool TokenReader::TakeOperator(absl::string_view text) {
  if (!IsOperator(text)) return false;
  Next();
  return true;
}

bool TokenReader::TakeName(absl::string_view text) {
  if (!IsName(text)) return false;
  Next();
  return true;
}

absl::Status TokenReader::ExpectOperator(absl::string_view text) {
  return TakeOperator(text) ? absl::OkStatus() : Error(absl::StrCat("'", text, "' is missing"));
}

absl::StatusOr<std::string> TokenReader::ExpectName() {
  if (Peek().kind != TemplateToken::Kind::kName) return Error("a name is missing");
  return Next().text;
}

absl::Status TokenReader::Error(absl::string_view message) const {
  const TemplateToken& token = Peek();
  const std::string found = token.text.empty() ? "the end of a tag" : ForMessage(token.text);
  return absl::InvalidArgumentError(
      absl::StrCat("line ", token.line, ": ", message, "; found ", found));
}

absl::StatusOr<ExpressionPtr> ExpressionParser::Make(Expression node) {
  const auto include = [&node](const ExpressionPtr& part) {
    if (part != nullptr) node.depth = std::max(node.depth, part->depth + 1);
  };
  for (const ExpressionPtr& part : node.parts) include(part);
  for (const ExpressionPtr& part : node.arguments.positional) include(part);
  for (const auto& [name, part] : node.arguments.named) include(part);
  if (node.depth > kMaxDepth) return reader_.Error("an expression is nested too deeply");
  return std::make_unique<const Expression>(std::move(node));
}

absl::StatusOr<ExpressionPtr> ExpressionParser::MakeBinary(Kind kind, std::string name,
                                                           ExpressionPtr left,
                                                           ExpressionPtr right) {
  Expression node{.kind = kind, .line = left->line, .name = std::move(name)};
  node.parts.push_back(std::move(left));
  node.parts.push_back(std::move(right));
  return Make(std::move(node));
}

absl::StatusOr<ExpressionPtr> ExpressionParser::Parse() {
  if (depth_ == kMaxDepth) return reader_.Error("an expression is nested too deeply");
  ++depth_;
  KVASIR_ASSIGN_OR_RETURN(ExpressionPtr node, ParseOr());
  while (reader_.TakeName("if")) {
    Expression conditional{.kind = Kind::kConditional, .line = node->line};
    KVASIR_ASSIGN_OR_RETURN(ExpressionPtr condition, ParseOr());
    ExpressionPtr otherwise;
    if (reader_.TakeName("else")) {
      KVASIR_ASSIGN_OR_RETURN(otherwise, Parse());
    }
    conditional.parts.push_back(std::move(node));
    conditional.parts.push_back(std::move(condition));
    conditional.parts.push_back(std::move(otherwise));
    KVASIR_ASSIGN_OR_RETURN(node, Make(std::move(conditional)));
  }
  --depth_;
  return node;
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParseTuple() {
  KVASIR_ASSIGN_OR_RETURN(ExpressionPtr node, Parse());
  if (!reader_.IsOperator(",")) return node;
  Expression tuple{.kind = Kind::kTuple, .line = node->line};
  tuple.parts.push_back(std::move(node));
  while (reader_.TakeOperator(",")) {
    if (reader_.IsOperator(")") || reader_.Peek().kind == TemplateToken::Kind::kBlockEnd) break;
    KVASIR_ASSIGN_OR_RETURN(tuple.parts.emplace_back(), Parse());
  }
  return Make(std::move(tuple));
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParseOr() {
  KVASIR_ASSIGN_OR_RETURN(ExpressionPtr node, ParseAnd());
  while (reader_.TakeName("or")) {
    KVASIR_ASSIGN_OR_RETURN(ExpressionPtr right, ParseAnd());
    KVASIR_ASSIGN_OR_RETURN(node, MakeBinary(Kind::kOr, "or", std::move(node), std::move(right)));
  }
  return node;
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParseAnd() {
  KVASIR_ASSIGN_OR_RETURN(ExpressionPtr node, ParseNot());
  while (reader_.TakeName("and")) {
    KVASIR_ASSIGN_OR_RETURN(ExpressionPtr right, ParseNot());
    KVASIR_ASSIGN_OR_RETURN(node, MakeBinary(Kind::kAnd, "and", std::move(node), std::move(right)));
  }
  return node;
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParseNot() {
  const int line = reader_.Peek().line;
  int negations = 0;
  while (reader_.TakeName("not")) ++negations;
  KVASIR_ASSIGN_OR_RETURN(ExpressionPtr node, ParseComparison());
  for (; negations > 0; --negations) {
    Expression negated{.kind = Kind::kNot, .line = line};
    negated.parts.push_back(std::move(node));
    KVASIR_ASSIGN_OR_RETURN(node, Make(std::move(negated)));
  }
  return node;
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParseComparison() {
  KVASIR_ASSIGN_OR_RETURN(ExpressionPtr first, ParseBinary(0));
  Expression node{.kind = Kind::kComparison, .line = first->line};
  node.parts.push_back(std::move(first));
  while (true) {
    constexpr absl::string_view kComparisons[] = {"==", "!=", "<=", ">=", "<", ">"};
    const auto* op =
        std::find_if(std::begin(kComparisons), std::end(kComparisons),
                     [this](absl::string_view text) { return reader_.TakeOperator(text); });
    if (op != std::end(kComparisons)) {
      node.operators.emplace_back(*op);
    } else if (reader_.TakeName("in")) {
      node.operators.emplace_back("in");
    } else if (reader_.IsName("not") && reader_.IsName("in", 1)) {
      reader_.Next();
      reader_.Next();
      node.operators.emplace_back("not in");
    } else {
      break;
    }
    KVASIR_ASSIGN_OR_RETURN(node.parts.emplace_back(), ParseBinary(0));
  }
  if (node.operators.empty()) return std::move(node.parts[0]);
  return Make(std::move(node));
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParseBinary(size_t level) {
  static constexpr absl::string_view kLevels[][4] = {
      {"+", "-"}, {"~"}, {"*", "/", "//", "%"}, {"**"}};
  if (level == std::size(kLevels)) return ParseUnary(Filters::kAllowed);
  KVASIR_ASSIGN_OR_RETURN(ExpressionPtr node, ParseBinary(level + 1));
  while (true) {
    const auto* op =
        std::find_if(std::begin(kLevels[level]), std::end(kLevels[level]),
                     [this](auto text) { return !text.empty() && reader_.TakeOperator(text); });
    if (op == std::end(kLevels[level])) return node;
    KVASIR_ASSIGN_OR_RETURN(ExpressionPtr right, ParseBinary(level + 1));
    KVASIR_ASSIGN_OR_RETURN(
        node, MakeBinary(Kind::kBinary, std::string(*op), std::move(node), std::move(right)));
  }
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParseUnary(Filters filters) {
  const int line = reader_.Peek().line;
  int signs = 0;
  std::vector<bool> negative;
  while (reader_.IsOperator("-") || reader_.IsOperator("+")) {
    if (++signs > kMaxDepth) return reader_.Error("an expression is nested too deeply");
    negative.push_back(reader_.Next().text == "-");
  }
  KVASIR_ASSIGN_OR_RETURN(ExpressionPtr node, ParsePrimary());
  KVASIR_ASSIGN_OR_RETURN(node, ParsePostfix(std::move(node)));
  for (; !negative.empty(); negative.pop_back()) {
    if (!negative.back()) continue;
    Expression negated{.kind = Kind::kNegative, .line = line};
    negated.parts.push_back(std::move(node));
    KVASIR_ASSIGN_OR_RETURN(node, Make(std::move(negated)));
  }
  return filters == Filters::kNone ? std::move(node) : ParseFilters(std::move(node));
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParsePrimary() {
  using TokenKind = TemplateToken::Kind;
  Expression node{.kind = Kind::kLiteral, .line = reader_.Peek().line};
  switch (reader_.Peek().kind) {
    case TokenKind::kName: {
      node.name = reader_.Next().text;
      if (const std::optional<Value> constant = Constant(node.name)) {
        node.literal = *constant;
      } else {
        node.kind = Kind::kName;
      }
      return Make(std::move(node));
    }
    case TokenKind::kString: {
      std::string text;
      while (reader_.Peek().kind == TokenKind::kString) text += reader_.Next().text;
      node.literal = Value::Text(std::move(text));
      return Make(std::move(node));
    }
    case TokenKind::kInteger: {
      int64_t value = 0;
      if (!absl::SimpleAtoi(reader_.Peek().text, &value)) {
        return reader_.Error("a number has more than 64 bits");
      }
      reader_.Next();
      node.literal = Value(value);
      return Make(std::move(node));
    }
    case TokenKind::kFloat: {
      node.literal = Value(*ParseReal(reader_.Next().text));
      return Make(std::move(node));
    }
    case TokenKind::kOperator:
      if (reader_.TakeOperator("(")) return ParseParentheses();
      if (reader_.TakeOperator("{")) return ParseDict();
      if (reader_.TakeOperator("[")) {
        node.kind = Kind::kList;
        KVASIR_ASSIGN_OR_RETURN(node.parts, ParseList("]"));
        return Make(std::move(node));
      }
      break;
    default:
      break;
  }
  return reader_.Error("an expression is missing");
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParseParentheses() {
  if (reader_.TakeOperator(")")) {
    return Make({.kind = Kind::kTuple, .line = reader_.Peek().line});
  }
  KVASIR_ASSIGN_OR_RETURN(ExpressionPtr node, ParseTuple());
  KVASIR_RETURN_IF_ERROR(reader_.ExpectOperator(")"));
  return node;
}

absl::StatusOr<ExpressionParser::Parts> ExpressionParser::ParseList(absl::string_view end) {
  Parts parts;
  while (!reader_.TakeOperator(end)) {
    if (!parts.empty()) {
      KVASIR_RETURN_IF_ERROR(reader_.ExpectOperator(","));
      if (reader_.TakeOperator(end)) break;
    }
    KVASIR_ASSIGN_OR_RETURN(parts.emplace_back(), Parse());
  }
  return parts;
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParseDict() {
  Expression node{.kind = Kind::kDict, .line = reader_.Peek().line};
  while (!reader_.TakeOperator("}")) {
    if (!node.parts.empty()) {
      KVASIR_RETURN_IF_ERROR(reader_.ExpectOperator(","));
      if (reader_.TakeOperator("}")) break;
    }
    KVASIR_ASSIGN_OR_RETURN(node.parts.emplace_back(), Parse());
    KVASIR_RETURN_IF_ERROR(reader_.ExpectOperator(":"));
    KVASIR_ASSIGN_OR_RETURN(node.parts.emplace_back(), Parse());
  }
  return Make(std::move(node));
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParsePostfix(ExpressionPtr node) {
  while (true) {
    const int line = reader_.Peek().line;
    if (reader_.TakeOperator("[")) {
      KVASIR_ASSIGN_OR_RETURN(node, ParseSubscript(std::move(node)));
    } else if (reader_.IsOperator("(")) {
      KVASIR_ASSIGN_OR_RETURN(node, ParseCall(std::move(node)));
    } else if (reader_.TakeOperator(".")) {
      Expression attribute{.kind = Kind::kAttribute, .line = line};
      attribute.parts.push_back(std::move(node));
      if (reader_.Peek().kind == TemplateToken::Kind::kInteger) {  // x.0 is x[0]
        attribute.kind = Kind::kItem;
        KVASIR_ASSIGN_OR_RETURN(attribute.parts.emplace_back(), ParsePrimary());
      } else {
        KVASIR_ASSIGN_OR_RETURN(attribute.name, reader_.ExpectName());
      }
      KVASIR_ASSIGN_OR_RETURN(node, Make(std::move(attribute)));
    } else {
      return node;
    }
  }
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParseSubscript(ExpressionPtr node) {
  Expression item{.kind = Kind::kItem, .line = node->line};
  item.parts.push_back(std::move(node));
  while (!reader_.TakeOperator("]")) {
    if (reader_.TakeOperator(":")) {
      item.kind = Kind::kSlice;
      if (item.parts.size() == 1) item.parts.emplace_back();
      if (reader_.IsOperator("]") || reader_.IsOperator(":")) item.parts.emplace_back();
      continue;
    }
    KVASIR_ASSIGN_OR_RETURN(item.parts.emplace_back(), Parse());
    if (!reader_.IsOperator("]") && !reader_.IsOperator(":")) {
      return reader_.Error("']' is missing");
    }
  }
  if (item.kind == Kind::kSlice) {
    if (item.parts.size() > 4) return reader_.Error("a slice has at most three parts");
    item.parts.resize(4);
  } else if (item.parts.size() != 2) {
    return reader_.Error("an index is missing");
  }
  return Make(std::move(item));
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParseFilters(ExpressionPtr node) {
  while (true) {
    const int line = reader_.Peek().line;
    if (reader_.TakeOperator("|")) {
      Expression filter{.kind = Kind::kFilter, .line = line};
      KVASIR_ASSIGN_OR_RETURN(filter.name, reader_.ExpectName());
      if (!IsFilter(filter.name)) {
        return reader_.Error(absl::StrCat("there is no filter '", filter.name, "'"));
      }
      if (reader_.IsOperator("(")) {
        KVASIR_ASSIGN_OR_RETURN(filter.arguments, ParseArguments());
      }
      filter.parts.push_back(std::move(node));
      KVASIR_ASSIGN_OR_RETURN(node, Make(std::move(filter)));
    } else if (reader_.TakeName("is")) {
      KVASIR_ASSIGN_OR_RETURN(node, ParseTest(std::move(node)));
    } else if (reader_.IsOperator("(")) {
      KVASIR_ASSIGN_OR_RETURN(node, ParseCall(std::move(node)));
    } else {
      return node;
    }
  }
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParseTest(ExpressionPtr node) {
  Expression test{.kind = Kind::kTest, .line = node->line};
  const bool negated = reader_.TakeName("not");
  KVASIR_ASSIGN_OR_RETURN(test.name, reader_.ExpectName());
  if (!IsTest(test.name)) {
    return reader_.Error(absl::StrCat("there is no test '", test.name, "'"));
  }
  using TokenKind = TemplateToken::Kind;
  const TemplateToken& next = reader_.Peek();
  constexpr absl::string_view kNoArgument[] = {"else", "or", "and", "is", "if", "in", "not"};
  if (reader_.IsOperator("(")) {
    KVASIR_ASSIGN_OR_RETURN(test.arguments, ParseArguments());
  } else if (next.kind == TokenKind::kString || next.kind == TokenKind::kInteger ||
             next.kind == TokenKind::kFloat || reader_.IsOperator("[") ||
             (next.kind == TokenKind::kName &&
              std::find(std::begin(kNoArgument), std::end(kNoArgument), next.text) ==
                  std::end(kNoArgument))) {
    KVASIR_ASSIGN_OR_RETURN(test.arguments.positional.emplace_back(), ParseUnary(Filters::kNone));
  }
  test.parts.push_back(std::move(node));
  KVASIR_ASSIGN_OR_RETURN(ExpressionPtr made, Make(std::move(test)));
  if (!negated) return made;
  Expression negation{.kind = Kind::kNot, .line = made->line};
  negation.parts.push_back(std::move(made));
  return Make(std::move(negation));
}

absl::StatusOr<Arguments> ExpressionParser::ParseArguments() {
  Arguments arguments;
  KVASIR_RETURN_IF_ERROR(reader_.ExpectOperator("("));
  while (!reader_.TakeOperator(")")) {
    if (!arguments.positional.empty() || !arguments.named.empty()) {
      KVASIR_RETURN_IF_ERROR(reader_.ExpectOperator(","));
      if (reader_.TakeOperator(")")) break;
    }
    if (reader_.Peek().kind == TemplateToken::Kind::kName && reader_.IsOperator("=", 1)) {
      std::string name = reader_.Next().text;
      reader_.Next();
      KVASIR_ASSIGN_OR_RETURN(ExpressionPtr value, Parse());
      arguments.named.emplace_back(std::move(name), std::move(value));
    } else {
      KVASIR_ASSIGN_OR_RETURN(arguments.positional.emplace_back(), Parse());
    }
  }
  return arguments;
}

absl::StatusOr<ExpressionPtr> ExpressionParser::ParseCall(ExpressionPtr callee) {
  Expression call{.kind = Kind::kCall, .line = reader_.Peek().line};
  KVASIR_ASSIGN_OR_RETURN(call.arguments, ParseArguments());
  call.parts.push_back(std::move(callee));
  return Make(std::move(call));
}

}  // namespace kvasir::coordinator
