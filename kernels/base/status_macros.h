// Early return on errors, and the check for broken invariants. The only macros of the project.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define KVASIR_CONCAT_INNER_(a, b) a##b
#define KVASIR_CONCAT_(a, b) KVASIR_CONCAT_INNER_(a, b)

// Returns from the enclosing function when `expr` (an absl::Status) is not OK.
#define KVASIR_RETURN_IF_ERROR(expr)                 \
  do {                                               \
    ::absl::Status kvasir_status_ = (expr);          \
    if (!kvasir_status_.ok()) return kvasir_status_; \
  } while (false)

// KVASIR_ASSIGN_OR_RETURN(auto x, F()): declares or assigns x from an absl::StatusOr, or returns.
#define KVASIR_ASSIGN_OR_RETURN(lhs, expr) \
  KVASIR_ASSIGN_OR_RETURN_IMPL_(KVASIR_CONCAT_(kvasir_statusor_, __LINE__), lhs, expr)
#define KVASIR_ASSIGN_OR_RETURN_IMPL_(var, lhs, expr) \
  auto var = (expr);                                  \
  if (!var.ok()) return std::move(var).status();      \
  lhs = std::move(var).value()

// Aborts with the condition and its place. For broken invariants that would corrupt KV, never for
// input, configuration, peers or memory (those give an absl::Status).
#define KVASIR_CHECK(condition)                                                              \
  do {                                                                                       \
    if (!(condition)) [[unlikely]] {                                                         \
      std::fprintf(stderr, "%s:%d: broken invariant: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                          \
    }                                                                                        \
  } while (false)
