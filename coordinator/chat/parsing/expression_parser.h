// Parses the expressions of Jinja, with its precedence: conditional, or, and, not, comparison,
// + -, ~, * / // %, **, unary, then calls, attributes, filters and tests. Called by the template
// parser, which shares its position. Belongs to one parse.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "coordinator/chat/parsing/lexer.h"
#include "coordinator/chat/parsing/syntax.h"

namespace kvasir::coordinator {

// The tokens of a template and the place that has been reached.
class TokenReader {
 public:
  explicit TokenReader(std::vector<TemplateToken> tokens) : tokens_(std::move(tokens)) {}

  const TemplateToken& Peek(size_t ahead = 0) const;
  const TemplateToken& Next();
  bool IsOperator(absl::string_view text, size_t ahead = 0) const;
  bool IsName(absl::string_view text, size_t ahead = 0) const;
  // Take the token if it is this one.
  bool TakeOperator(absl::string_view text);
  bool TakeName(absl::string_view text);
  absl::Status ExpectOperator(absl::string_view text);
  absl::StatusOr<std::string> ExpectName();
  // "line 3: <message>, found ')'".
  absl::Status Error(absl::string_view message) const;

 private:
  std::vector<TemplateToken> tokens_;
  size_t pos_ = 0;
};

class ExpressionParser {
 public:
  static constexpr int kMaxDepth = 128;

  // `reader` outlives the parser.
  explicit ExpressionParser(TokenReader* reader) : reader_(*reader) {}

  absl::StatusOr<ExpressionPtr> Parse();
  // An expression, or several with commas, which are a tuple.
  absl::StatusOr<ExpressionPtr> ParseTuple();
  // An expression without a conditional at its top, as a loop's sequence.
  absl::StatusOr<ExpressionPtr> ParseUnconditional() { return ParseOr(); }

 private:
  using Parts = std::vector<ExpressionPtr>;
  // Makes the node; an error when it is nested too deeply.
  absl::StatusOr<ExpressionPtr> Make(Expression node);
  absl::StatusOr<ExpressionPtr> MakeBinary(Expression::Kind kind, std::string name,
                                           ExpressionPtr left, ExpressionPtr right);

  absl::StatusOr<ExpressionPtr> ParseOr();
  absl::StatusOr<ExpressionPtr> ParseAnd();
  absl::StatusOr<ExpressionPtr> ParseNot();
  absl::StatusOr<ExpressionPtr> ParseComparison();
  // Parses operators of one level and of those that bind tighter.
  absl::StatusOr<ExpressionPtr> ParseBinary(size_t level);
  enum class Filters { kAllowed, kNone };
  absl::StatusOr<ExpressionPtr> ParseUnary(Filters filters);
  absl::StatusOr<ExpressionPtr> ParsePrimary();
  absl::StatusOr<ExpressionPtr> ParseParentheses();
  absl::StatusOr<ExpressionPtr> ParseDict();
  absl::StatusOr<ExpressionPtr> ParsePostfix(ExpressionPtr node);
  absl::StatusOr<ExpressionPtr> ParseSubscript(ExpressionPtr node);
  absl::StatusOr<ExpressionPtr> ParseFilters(ExpressionPtr node);
  absl::StatusOr<ExpressionPtr> ParseTest(ExpressionPtr node);
  absl::StatusOr<Parts> ParseList(absl::string_view end);
  absl::StatusOr<Arguments> ParseArguments();
  absl::StatusOr<ExpressionPtr> ParseCall(ExpressionPtr callee);

  TokenReader& reader_;
  int depth_ = 0;  // of brackets and prefixes that are open
};

}  // namespace kvasir::coordinator
