// The terminator `art` (attention run-time termination) ends a row once `patience` pages in a row
// have left its output nearly unchanged and the unread pages cannot matter. After page t let head g
// of the row have m_t, l_t, acc_t: the maximum and sum of its weights and their sum of values. It
// watches
//
//   x_t = { acc_t[d] / l_t : d mod 8 in {0, 1} }        (probe raw: acc_t[d], in units of exp(m_t))
//
// The page is calm for the head if all of
//   scale      |x_t - x_(t-1)| < scale_tolerance        (scale relative: times |x_t|)
//   direction  1 - cos(x_t, x_(t-1)) < direction_tolerance
//   mass       1 - l_(t-1) exp(m_(t-1) - m_t) / l_t < mass_tolerance         (probe raw: no test)
// hold and neither |x| is below 1e-20. The row has settled when the last `patience` pages were calm
// for all heads of its group. It ends there if for each head also
//   guard      sum over unread pages u of n_u exp(b_u - m_t) / l_t < unread_mass    (none: no test)
// where n_u is the page's number of attended tokens and b_u, from its page bounds
// (kernels/append/digests.h), is at least every logit of the page.
//
// Guarantees: the first watched page is never calm, so at least patience + 1 pages are read. Rows
// of fewer than patience + 3 pages are read whole. NaN is never calm. Which pages are read depends
// on the row alone. A group's heads decide together, so all of them must be in the row. Cost:
// head_dim / 4 values per head and page. The guard is made when a row first settles, from the
// bounds of its unread pages (1/64 of their bytes), and takes 8 bytes per page and head. Source:
// ART, with additions. Its paper watches the raw sum of one thread's fragment, without mass test
// and guard, and ends before a far needle; see docs/sparse_methods.md. Thread-compatible.
#pragma once

#include <memory>

#include "absl/status/statusor.h"

#include "kernels/attention/terminator.h"
#include "kernels/sparse/art/art_rule.h"
#include "kernels/sparse/common/method_options.h"

namespace kvasir::kernels {

class ArtTerminator : public Terminator {
 public:
  // Options are the fields of the message ArtTerminator of sparsity.proto.
  static absl::StatusOr<ArtOptions> Parse(const MethodOptions& options);
  static absl::StatusOr<std::unique_ptr<Terminator>> Create(const MethodOptions& options);
  explicit ArtTerminator(const ArtOptions& options) : options_(options) {}

  ReadingOrder order() const override { return options_.order; }
  int64_t RowBytes(int64_t group, int64_t head_dim, int64_t skippable) const override;
  RowTerminator* Begin(const TerminatedRow& row, std::byte* memory) const override;

 private:
  const ArtOptions options_;
};

}  // namespace kvasir::kernels
