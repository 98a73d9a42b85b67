// The tree of a parsed chat template. Made by the parser, walked by the evaluator and the renderer.
// Depth is limited by the parser. Immutable after parsing, so threads may share it.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/chat/values/value.h"

namespace kvasir::coordinator {

struct Expression;
using ExpressionPtr = std::unique_ptr<const Expression>;

struct Arguments {
  std::vector<ExpressionPtr> positional;
  std::vector<std::pair<std::string, ExpressionPtr>> named;
};

struct Expression {
  enum class Kind {
    kLiteral,      // literal
    kName,         // name
    kList,         // parts
    kTuple,        // parts
    kDict,         // parts: key, value, key, value, ...
    kAttribute,    // parts[0].name
    kItem,         // parts[0][parts[1]]
    kSlice,        // parts[0][parts[1]:parts[2]:parts[3]]; null where absent
    kCall,         // parts[0](arguments)
    kFilter,       // parts[0] | name(arguments)
    kTest,         // parts[0] is name(arguments)
    kNot,          // parts[0]
    kNegative,     // parts[0]
    kAnd,          // parts[0], parts[1]
    kOr,           // parts[0], parts[1]
    kBinary,       // parts[0] name parts[1]; name is + - ~ * / // % **
    kComparison,   // parts[0] operators[0] parts[1] operators[1] parts[2] ...
    kConditional,  // parts[0] if parts[1] else parts[2], which may be null
  };
  Kind kind;
  int line;
  int depth = 1;
  Value literal = {};
  std::string name = {};
  std::vector<ExpressionPtr> parts = {};
  std::vector<std::string> operators = {};
  Arguments arguments = {};
};

struct Statement;
using Statements = std::vector<std::unique_ptr<const Statement>>;

struct Statement {
  enum class Kind {
    kText,       // text
    kOutput,     // expressions[0]
    kIf,         // bodies[i] where expressions[i] is true; else the last body, if there is one more
    kFor,        // names in expressions[0], if expressions[1]; bodies[0], else bodies[1]
    kSet,        // names = expressions[0]; or the text of bodies[0] where there is no expression
    kSetMember,  // names[0].names[1] = expressions[0]
    kMacro,      // names[0]; parameters are the names from 1; expressions: the last ones' defaults
    kBlock,      // bodies[0]
    kBreak,
    kContinue,
  };
  Kind kind;
  int line;
  std::string text = {};
  std::vector<std::string> names = {};
  std::vector<ExpressionPtr> expressions = {};
  std::vector<Statements> bodies = {};
};

}  // namespace kvasir::coordinator
