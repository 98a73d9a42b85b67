// Every sparse method there is and every pair of them that a policy may name, found in the list of
// methods: a selector alone, with each pruner, each reuse rule, each terminator, and with a pruner
// and a terminator. For tests of what holds of all of them.
#pragma once

#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "kernels/sparse/methods.h"

namespace kvasir::kernels {

// Stages by their names; empty: none.
struct SparseMethod {
  std::string selector;
  std::string pruner = "";
  std::string rule = "";
  std::string terminator = "";

  // Whether it chooses between sink and window.
  bool lists() const { return selector != "all" && selector != "streaming"; }
  // Whether anything is left between sink and window that a terminator may leave unread.
  bool reads_between() const { return selector != "streaming"; }
  std::string Name() const {
    std::string name = selector;
    for (const std::string& stage : {pruner, rule, terminator}) {
      if (!stage.empty()) name += "+" + stage;
    }
    return name;
  }
  friend void PrintTo(const SparseMethod& method, std::ostream* out) { *out << method.Name(); }
};

template <typename Method>
std::vector<std::string> NamesOf(std::span<const Method> methods) {
  std::vector<std::string> names;
  for (const Method& method : methods) names.emplace_back(method.name.data(), method.name.size());
  return names;
}

inline std::vector<SparseMethod> AllSparseMethods() {
  std::vector<SparseMethod> all;
  for (const std::string& selector : NamesOf(SelectorMethods())) {
    const SparseMethod alone = {.selector = selector};
    all.push_back(alone);
    const auto terminators =
        alone.reads_between() ? NamesOf(TerminatorMethods()) : std::vector<std::string>{};
    for (const std::string& terminator : terminators) {
      all.push_back({.selector = selector, .terminator = terminator});
    }
    if (!alone.lists()) continue;
    for (const std::string& rule : NamesOf(ReuseMethods())) {
      all.push_back({.selector = selector, .rule = rule});
    }
    for (const std::string& pruner : NamesOf(PrunerMethods())) {
      all.push_back({.selector = selector, .pruner = pruner});
      for (const std::string& terminator : terminators) {
        all.push_back({.selector = selector, .pruner = pruner, .terminator = terminator});
      }
    }
  }
  return all;
}

}  // namespace kvasir::kernels
