#include "coordinator/chat/renderer.h"

#include <memory>

#include "absl/strings/str_cat.h"

#include "coordinator/chat/evaluator.h"
#include "coordinator/chat/values/python_text.h"
#include "coordinator/tokenizer/unicode/utf8.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using Kind = Statement::Kind;

constexpr size_t kMaxMessageBytes = 1000;

class Renderer final : public Evaluator {
 public:
  Renderer(std::vector<std::pair<std::string, Value>> variables, absl::Time now, Budget* budget)
      : Evaluator(now, budget) {
    for (auto& [name, value] : variables) globals_.Set(name, std::move(value));
  }

  absl::StatusOr<MarkedText> Run(const Statements& statements) {
    const absl::StatusOr<Flow> flow = RunBody(statements);
    if (flow.ok()) return std::move(out_);
    // A client's text may be in it.
    std::string message;
    const size_t used =
        AppendLossyUtf8(flow.status().message().substr(0, kMaxMessageBytes), &message);
    if (used < flow.status().message().size()) message += "...";
    return absl::Status(flow.status().code(),
                        raised_ ? message : absl::StrCat("line ", line_, ": ", message));
  }

 private:
  enum class Flow { kNext, kBreak, kContinue };

  absl::StatusOr<Flow> RunBody(const Statements& body) {
    KVASIR_RETURN_IF_ERROR(budget_.Enter());
    for (const auto& statement : body) {
      line_ = statement->line;
      KVASIR_RETURN_IF_ERROR(budget_.Spend(1));
      KVASIR_ASSIGN_OR_RETURN(const Flow flow, RunStatement(*statement));
      if (flow == Flow::kNext) continue;
      budget_.Leave();
      return flow;
    }
    budget_.Leave();
    return Flow::kNext;
  }

  absl::StatusOr<Flow> RunStatement(const Statement& statement) {
    switch (statement.kind) {
      case Kind::kText:
        KVASIR_RETURN_IF_ERROR(budget_.SpendBytes(statement.text.size()));
        out_.Append(statement.text, MarkedText::Source::kTemplate);
        return Flow::kNext;
      case Kind::kOutput: {
        KVASIR_ASSIGN_OR_RETURN(const Value value, Evaluate(*statement.expressions[0]));
        KVASIR_ASSIGN_OR_RETURN(const MarkedText text, PythonText(value, &budget_));
        KVASIR_RETURN_IF_ERROR(budget_.SpendBytes(text.size()));
        out_.Append(text);
        return Flow::kNext;
      }
      case Kind::kIf:
        return RunIf(statement);
      case Kind::kFor:
        return RunFor(statement);
      case Kind::kSet:
      case Kind::kSetMember:
        KVASIR_RETURN_IF_ERROR(RunSet(statement));
        return Flow::kNext;
      case Kind::kMacro:
        scope_->Set(statement.names[0],
                    Value(Function{.name = statement.names[0], .macro = &statement}));
        return Flow::kNext;
      case Kind::kBlock:
        return RunBody(statement.bodies[0]);
      case Kind::kBreak:
        return Flow::kBreak;
      case Kind::kContinue:
        return Flow::kContinue;
    }
    return Flow::kNext;
  }

  absl::StatusOr<Flow> RunIf(const Statement& statement) {
    for (size_t i = 0; i < statement.expressions.size(); ++i) {
      KVASIR_ASSIGN_OR_RETURN(const Value condition, Evaluate(*statement.expressions[i]));
      if (condition.IsTrue()) return RunBody(statement.bodies[i]);
    }
    if (statement.bodies.size() == statement.expressions.size()) return Flow::kNext;
    return RunBody(statement.bodies.back());
  }

  // Gives the names the value, or its elements when there are several.
  absl::Status Assign(const std::vector<std::string>& names, const Value& value) {
    if (names.size() == 1) {
      scope_->Set(names[0], value);
      return absl::OkStatus();
    }
    KVASIR_ASSIGN_OR_RETURN(const std::vector<Value> elements, Elements(value, &budget_));
    if (elements.size() != names.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat(elements.size(), " values are assigned to ", names.size(), " names"));
    }
    for (size_t i = 0; i < names.size(); ++i) scope_->Set(names[i], elements[i]);
    return absl::OkStatus();
  }

  // Returns the elements for which the loop's condition holds.
  absl::StatusOr<std::vector<Value>> LoopElements(const Statement& loop) {
    KVASIR_ASSIGN_OR_RETURN(const Value sequence, Evaluate(*loop.expressions[0]));
    KVASIR_ASSIGN_OR_RETURN(std::vector<Value> elements, Elements(sequence, &budget_));
    if (loop.expressions.size() == 1) return elements;
    std::vector<Value> chosen;
    for (const Value& element : elements) {
      Scope scope{.parent = scope_};
      scope_ = &scope;
      const absl::Status assigned = Assign(loop.names, element);
      const absl::StatusOr<Value> holds =
          assigned.ok() ? Evaluate(*loop.expressions[1]) : absl::StatusOr<Value>(assigned);
      scope_ = scope.parent;
      KVASIR_RETURN_IF_ERROR(holds.status());
      if (holds->IsTrue()) chosen.push_back(element);
    }
    return chosen;
  }

  // Sets what `loop` tells in round `i`.
  static void Describe(const std::vector<Value>& elements, size_t i, Namespace& loop) {
    const auto length = static_cast<int64_t>(elements.size());
    const auto index = static_cast<int64_t>(i);
    const bool first = i == 0;
    const bool last = i + 1 == elements.size();
    loop.members.clear();
    loop.members.emplace_back("index", index + 1);
    loop.members.emplace_back("index0", index);
    loop.members.emplace_back("first", first);
    loop.members.emplace_back("last", last);
    loop.members.emplace_back("length", length);
    loop.members.emplace_back("revindex", length - index);
    loop.members.emplace_back("revindex0", length - index - 1);
    loop.members.emplace_back("previtem",
                              first ? Value(Undefined{"loop.previtem"}) : elements[i - 1]);
    loop.members.emplace_back("nextitem",
                              last ? Value(Undefined{"loop.nextitem"}) : elements[i + 1]);
  }

  absl::StatusOr<Flow> RunFor(const Statement& loop) {
    KVASIR_ASSIGN_OR_RETURN(const std::vector<Value> elements, LoopElements(loop));
    if (elements.empty() && loop.bodies.size() > 1) return RunBody(loop.bodies[1]);
    if (loop_depth_ == loops_.size()) loops_.push_back(std::make_unique<Namespace>());
    Namespace& told = *loops_[loop_depth_++];
    for (size_t i = 0; i < elements.size(); ++i) {
      Scope scope{.parent = scope_};
      Describe(elements, i, told);
      scope.Set("loop", Value(&told));
      scope_ = &scope;
      const absl::Status assigned = Assign(loop.names, elements[i]);
      const absl::StatusOr<Flow> flow =
          assigned.ok() ? RunBody(loop.bodies[0]) : absl::StatusOr<Flow>(assigned);
      scope_ = scope.parent;
      KVASIR_RETURN_IF_ERROR(flow.status());
      if (*flow == Flow::kBreak) break;
    }
    --loop_depth_;
    return Flow::kNext;
  }

  absl::Status RunSet(const Statement& set) {
    if (set.expressions.empty()) {
      KVASIR_ASSIGN_OR_RETURN(MarkedText text, Capture(set.bodies[0]));
      return Assign(set.names, Value(std::move(text)));
    }
    KVASIR_ASSIGN_OR_RETURN(Value value, Evaluate(*set.expressions[0]));
    if (set.kind == Kind::kSet) return Assign(set.names, value);
    Namespace* space = nullptr;
    for (Scope* scope = scope_; scope != nullptr && space == nullptr; scope = scope->parent) {
      for (const auto& [name, variable] : scope->variables) {
        if (name == set.names[0]) space = variable.space();
      }
    }
    if (space == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat("'", set.names[0], "' is no namespace"));
    }
    if (Value* member = space->Find(set.names[1])) {
      *member = std::move(value);
    } else {
      space->members.emplace_back(set.names[1], std::move(value));
    }
    return absl::OkStatus();
  }

  // Returns what the body writes.
  absl::StatusOr<MarkedText> Capture(const Statements& body) {
    MarkedText outer;
    std::swap(outer, out_);
    KVASIR_RETURN_IF_ERROR(RunBody(body).status());
    std::swap(outer, out_);
    return outer;
  }

  absl::StatusOr<Value> CallMacro(const Statement& macro, CallArguments arguments) override {
    const size_t parameters = macro.names.size() - 1;
    if (arguments.positional.size() > parameters) {
      return absl::InvalidArgumentError(
          absl::StrCat("the macro ", macro.names[0], " takes ", parameters, " arguments"));
    }
    Scope scope{.parent = &globals_};
    Scope* const caller = scope_;
    scope_ = &scope;
    for (size_t i = 0; i < parameters; ++i) {
      const std::string& name = macro.names[i + 1];
      const size_t defaults_begin = parameters - macro.expressions.size();
      Value value(Undefined{name});
      if (const Value* given = arguments.Find(i, name)) {
        value = *given;
      } else if (i >= defaults_begin) {
        KVASIR_ASSIGN_OR_RETURN(value, Evaluate(*macro.expressions[i - defaults_begin]));
      }
      scope.Set(name, std::move(value));
    }
    const int line = line_;
    KVASIR_ASSIGN_OR_RETURN(MarkedText text, Capture(macro.bodies[0]));
    line_ = line;
    scope_ = caller;
    return Value(std::move(text));
  }

  MarkedText out_;
  int line_ = 1;  // of the statement that runs
  size_t loop_depth_ = 0;
  std::vector<std::unique_ptr<Namespace>> loops_;  // by depth; kept, because values point to them
};

}  // namespace

absl::StatusOr<MarkedText> RenderStatements(const Statements& statements,
                                            std::vector<std::pair<std::string, Value>> variables,
                                            absl::Time now, Budget* budget) {
  return Renderer(std::move(variables), now, budget).Run(statements);
}

}  // namespace kvasir::coordinator
