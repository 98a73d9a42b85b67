#include "coordinator/chat/parsing/template_parser.h"

#include <algorithm>
#include <initializer_list>

#include "absl/strings/str_cat.h"

#include "coordinator/chat/parsing/expression_parser.h"
#include "coordinator/chat/parsing/lexer.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using Kind = Statement::Kind;
using TokenKind = TemplateToken::Kind;

constexpr int kMaxDepth = 64;  // of statements within each other

class TemplateParser {
 public:
  explicit TemplateParser(std::vector<TemplateToken> tokens)
      : reader_(std::move(tokens)), expressions_(&reader_) {}

  absl::StatusOr<Statements> Run() { return ParseBody({}); }

 private:
  // Parses until one of the tags `ends`, whose name is the next token then; until the end of the
  // template when there are none.
  absl::StatusOr<Statements> ParseBody(std::initializer_list<absl::string_view> ends) {
    if (depth_ == kMaxDepth) return reader_.Error("statements are nested too deeply");
    ++depth_;
    Statements body;
    while (true) {
      const TemplateToken& token = reader_.Peek();
      if (token.kind == TokenKind::kEnd) {
        if (ends.size() > 0) {
          return reader_.Error(absl::StrCat("'", *(ends.end() - 1), "' is missing"));
        }
        break;
      }
      reader_.Next();
      if (token.kind == TokenKind::kText) {
        body.push_back(std::make_unique<const Statement>(
            Statement{.kind = Kind::kText, .line = token.line, .text = token.text}));
      } else if (token.kind == TokenKind::kOutputBegin) {
        Statement output{.kind = Kind::kOutput, .line = token.line};
        KVASIR_ASSIGN_OR_RETURN(output.expressions.emplace_back(), expressions_.ParseTuple());
        KVASIR_RETURN_IF_ERROR(Expect(TokenKind::kOutputEnd));
        body.push_back(std::make_unique<const Statement>(std::move(output)));
      } else {
        if (std::any_of(ends.begin(), ends.end(),
                        [this](absl::string_view end) { return reader_.IsName(end); })) {
          break;
        }
        KVASIR_ASSIGN_OR_RETURN(Statement statement, ParseStatement());
        body.push_back(std::make_unique<const Statement>(std::move(statement)));
      }
    }
    --depth_;
    return body;
  }

  absl::Status Expect(TokenKind kind) {
    if (reader_.Peek().kind != kind) return reader_.Error("the end of a tag is missing");
    reader_.Next();
    return absl::OkStatus();
  }

  // Takes the name of the end tag and its end.
  absl::Status EndBody() {
    reader_.Next();
    return Expect(TokenKind::kBlockEnd);
  }

  absl::StatusOr<Statement> ParseStatement() {
    const int line = reader_.Peek().line;
    if (reader_.TakeName("if")) return ParseIf(line);
    if (reader_.TakeName("for")) return ParseFor(line);
    if (reader_.TakeName("set")) return ParseSet(line);
    if (reader_.TakeName("macro")) return ParseMacro(line);
    if (reader_.TakeName("generation")) {
      Statement block{.kind = Kind::kBlock, .line = line};
      KVASIR_RETURN_IF_ERROR(Expect(TokenKind::kBlockEnd));
      KVASIR_ASSIGN_OR_RETURN(block.bodies.emplace_back(), ParseBody({"endgeneration"}));
      KVASIR_RETURN_IF_ERROR(EndBody());
      return block;
    }
    for (const Kind kind : {Kind::kBreak, Kind::kContinue}) {
      if (!reader_.TakeName(kind == Kind::kBreak ? "break" : "continue")) continue;
      if (loops_ == 0) return reader_.Error("break and continue belong into a loop");
      KVASIR_RETURN_IF_ERROR(Expect(TokenKind::kBlockEnd));
      return Statement{.kind = kind, .line = line};
    }
    return reader_.Error("this statement is not one that chat templates use");
  }

  absl::StatusOr<Statement> ParseIf(int line) {
    Statement branch{.kind = Kind::kIf, .line = line};
    while (true) {
      KVASIR_ASSIGN_OR_RETURN(branch.expressions.emplace_back(), expressions_.ParseTuple());
      KVASIR_RETURN_IF_ERROR(Expect(TokenKind::kBlockEnd));
      KVASIR_ASSIGN_OR_RETURN(branch.bodies.emplace_back(), ParseBody({"elif", "else", "endif"}));
      if (!reader_.TakeName("elif")) break;
    }
    if (reader_.TakeName("else")) {
      KVASIR_RETURN_IF_ERROR(Expect(TokenKind::kBlockEnd));
      KVASIR_ASSIGN_OR_RETURN(branch.bodies.emplace_back(), ParseBody({"endif"}));
    }
    KVASIR_RETURN_IF_ERROR(EndBody());
    return branch;
  }

  // Names of variables, with or without parentheses around them.
  absl::Status ParseTargets(std::vector<std::string>* names) {
    const bool parentheses = reader_.TakeOperator("(");
    do {
      KVASIR_ASSIGN_OR_RETURN(names->emplace_back(), reader_.ExpectName());
    } while (reader_.TakeOperator(","));
    return parentheses ? reader_.ExpectOperator(")") : absl::OkStatus();
  }

  absl::StatusOr<Statement> ParseFor(int line) {
    Statement loop{.kind = Kind::kFor, .line = line};
    KVASIR_RETURN_IF_ERROR(ParseTargets(&loop.names));
    if (!reader_.TakeName("in")) return reader_.Error("'in' is missing");
    KVASIR_ASSIGN_OR_RETURN(loop.expressions.emplace_back(), expressions_.ParseUnconditional());
    if (reader_.TakeName("if")) {
      KVASIR_ASSIGN_OR_RETURN(loop.expressions.emplace_back(), expressions_.Parse());
    }
    KVASIR_RETURN_IF_ERROR(Expect(TokenKind::kBlockEnd));
    ++loops_;
    KVASIR_ASSIGN_OR_RETURN(loop.bodies.emplace_back(), ParseBody({"else", "endfor"}));
    --loops_;
    if (reader_.TakeName("else")) {
      KVASIR_RETURN_IF_ERROR(Expect(TokenKind::kBlockEnd));
      KVASIR_ASSIGN_OR_RETURN(loop.bodies.emplace_back(), ParseBody({"endfor"}));
    }
    KVASIR_RETURN_IF_ERROR(EndBody());
    return loop;
  }

  absl::StatusOr<Statement> ParseSet(int line) {
    Statement set{.kind = Kind::kSet, .line = line};
    KVASIR_RETURN_IF_ERROR(ParseTargets(&set.names));
    if (set.names.size() == 1 && reader_.TakeOperator(".")) {
      set.kind = Kind::kSetMember;
      KVASIR_ASSIGN_OR_RETURN(set.names.emplace_back(), reader_.ExpectName());
    }
    if (reader_.TakeOperator("=")) {
      KVASIR_ASSIGN_OR_RETURN(set.expressions.emplace_back(), expressions_.ParseTuple());
      KVASIR_RETURN_IF_ERROR(Expect(TokenKind::kBlockEnd));
      return set;
    }
    if (set.kind == Kind::kSetMember || set.names.size() > 1)
      return reader_.Error("'=' is missing");
    KVASIR_RETURN_IF_ERROR(Expect(TokenKind::kBlockEnd));
    KVASIR_ASSIGN_OR_RETURN(set.bodies.emplace_back(), ParseBody({"endset"}));
    KVASIR_RETURN_IF_ERROR(EndBody());
    return set;
  }

  absl::StatusOr<Statement> ParseMacro(int line) {
    Statement macro{.kind = Kind::kMacro, .line = line};
    if (loops_ > 0 || in_macro_)
      return reader_.Error("a macro belongs outside of loops and macros");
    KVASIR_ASSIGN_OR_RETURN(macro.names.emplace_back(), reader_.ExpectName());
    KVASIR_RETURN_IF_ERROR(reader_.ExpectOperator("("));
    while (!reader_.TakeOperator(")")) {
      if (macro.names.size() > 1) KVASIR_RETURN_IF_ERROR(reader_.ExpectOperator(","));
      KVASIR_ASSIGN_OR_RETURN(macro.names.emplace_back(), reader_.ExpectName());
      if (reader_.TakeOperator("=")) {
        KVASIR_ASSIGN_OR_RETURN(macro.expressions.emplace_back(), expressions_.Parse());
      } else if (!macro.expressions.empty()) {
        return reader_.Error("a parameter without a default comes after one with");
      }
    }
    KVASIR_RETURN_IF_ERROR(Expect(TokenKind::kBlockEnd));
    in_macro_ = true;
    KVASIR_ASSIGN_OR_RETURN(macro.bodies.emplace_back(), ParseBody({"endmacro"}));
    in_macro_ = false;
    KVASIR_RETURN_IF_ERROR(EndBody());
    return macro;
  }

  TokenReader reader_;
  ExpressionParser expressions_;
  int depth_ = 0;
  int loops_ = 0;  // that are open here
  bool in_macro_ = false;
};

}  // namespace

absl::StatusOr<Statements> ParseTemplate(absl::string_view source) {
  KVASIR_ASSIGN_OR_RETURN(std::vector<TemplateToken> tokens, ReadTokens(source));
  return TemplateParser(std::move(tokens)).Run();
}

}  // namespace kvasir::coordinator
