#include "kernels/sparse/art/art_terminator.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

#include "kernels/attention/attend.h"
#include "kernels/base/scratch.h"
#include "kernels/base/status_macros.h"
#include "kernels/sparse/art/unread_mass.h"

namespace kvasir::kernels {
namespace {

// The watched elements of a head: two of every eight.
constexpr int64_t kProbeStep = 8;
constexpr int64_t kProbeWidth = 2;
constexpr int64_t ProbeSize(int64_t head_dim) {
  return head_dim / kProbeStep * kProbeWidth + std::min(kProbeWidth, head_dim % kProbeStep);
}

// The state of one query head after the previous page.
struct Head {
  AttentionState state;
  double length = 0;  // of its probe
  int64_t calm = 0;   // number of calm pages in a row
};

class ArtRow final : public RowTerminator {
 public:
  static int64_t MemoryBytes(int64_t group, int64_t head_dim, int64_t skippable) {
    ScratchPieces pieces(nullptr);
    pieces.Take<ArtRow>(1);
    Memory(pieces, group, head_dim);
    UnreadMass::Take(pieces, group, head_dim, skippable);
    return pieces.bytes();
  }
  static ArtRow* Make(const ArtOptions& options, const TerminatedRow& row, std::byte* memory) {
    ScratchPieces pieces(memory);
    return new (pieces.Take<ArtRow>(1)) ArtRow(options, row, pieces);
  }

  bool Settles(const RowProgress& progress, int64_t next) override {
    bool settled = true;
    for (int64_t g = 0; g < group_; ++g) {
      const bool calm =
          Watch(progress.closed[static_cast<size_t>(g)], progress.open[static_cast<size_t>(g)], g);
      Head& head = memory_.heads[g];
      head.calm = calm && has_previous_ ? head.calm + 1 : 0;
      settled = settled && head.calm >= row_.patience;
    }
    has_previous_ = true;
    return settled && RestIsSmall(next);
  }

  bool MaySettle(int64_t next) const override {
    for (int64_t g = 0; g < group_; ++g) {
      if (memory_.heads[g].calm + 1 < row_.patience) return false;
    }
    if (options_.guard == ArtOptions::Guard::kNone || !guard_.is_made()) return true;
    for (int64_t g = 0; g < group_; ++g) {
      if (!guard_.MayFallBelow(options_.unread_mass, memory_.heads[g].state, g, next)) return false;
    }
    return true;
  }

 private:
  struct Memory {
    Memory(ScratchPieces& pieces, int64_t group, int64_t head_dim)
        : heads(pieces.Take<Head>(group)),
          probes(pieces.Take<float>(group * ProbeSize(head_dim))) {}
    Head* heads;    // [group]
    float* probes;  // [group, probe size], after the previous page
  };

  ArtRow(const ArtOptions& options, const TerminatedRow& row, ScratchPieces& pieces)
      : options_(options),
        row_(row),
        head_dim_(row.params.kv.layout.head_dim),
        group_(row.params.q.dim(1) / row.params.kv.layout.num_kv_heads),
        memory_(pieces, group_, head_dim_),
        guard_(row, UnreadMass::Take(pieces, group_, head_dim_, std::ssize(row.skippable))) {
    std::fill_n(memory_.heads, group_, Head{});
  }

  // Takes in a head's present state and returns whether the page was calm for it. Meaningless
  // before the second page.
  bool Watch(const PartialOutput& closed, const PartialOutput& open, int64_t g) {
    Head& head = memory_.heads[g];
    AttentionState now = closed.state;
    const MergeWeights weights = MergeInto(now, open.state);
    const bool raw = options_.probe == ArtOptions::Probe::kRaw;
    const float unit = raw ? 1 : 1 / now.sum;
    float* probe = memory_.probes + g * ProbeSize(head_dim_);
    double step = 0, product = 0, square = 0;
    for (int64_t d = 0; d < head_dim_; d += d % kProbeStep + 1 < kProbeWidth ? 1 : 7) {
      const double before = double{*probe};
      *probe = (weights.left * closed.out[d] + weights.right * open.out[d]) * unit;
      const double x = double{*probe++};
      step += (x - before) * (x - before);
      product += x * before;
      square += x * x;
    }
    const double length = std::sqrt(square);
    const double lengths = length * head.length;
    const double scale = options_.scale == ArtOptions::Scale::kRelative ? length : 1;
    const double kept = double{head.state.sum} / double{now.sum} *
                        std::exp(double{head.state.max} - double{now.max});
    const bool has_direction = length >= kArtNoLength && head.length >= kArtNoLength;
    const bool calm = has_direction && std::sqrt(step) < options_.scale_tolerance * scale &&
                      1 - product / lengths < options_.direction_tolerance &&
                      (raw || 1 - kept < options_.mass_tolerance);
    head.state = now;
    head.length = length;
    return calm;
  }

  bool RestIsSmall(int64_t next) {
    if (options_.guard == ArtOptions::Guard::kNone) return true;
    if (!guard_.is_made()) guard_.Make();
    for (int64_t g = 0; g < group_; ++g) {
      if (!(guard_.Share(memory_.heads[g].state, g, next) < options_.unread_mass)) return false;
    }
    return true;
  }

  const ArtOptions& options_;
  const TerminatedRow& row_;
  const int64_t head_dim_;
  const int64_t group_;
  const Memory memory_;
  UnreadMass guard_;
  bool has_previous_ = false;
};

template <typename Value, size_t kCount>
absl::Status Choose(const MethodOption& option,
                    const std::pair<absl::string_view, Value> (&choices)[kCount], Value& value) {
  std::string known;
  for (const auto& [name, choice] : choices) {
    if (name == option.value) {
      value = choice;
      return absl::OkStatus();
    }
    absl::StrAppend(&known, known.empty() ? "" : ", ", name);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("art: ", option.name, " is '", option.value, "'; there is ", known));
}

absl::Status Read(const MethodOption& option, double& value) {
  float number = 0;
  if (absl::SimpleAtof(option.value, &number) && number > 0 && number <= 1) {
    value = static_cast<double>(number);
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("art: ", option.name, " is '", option.value, "'; it is above 0, at most 1"));
}

absl::Status Set(const MethodOption& option, ArtOptions& options) {
  using Probe = ArtOptions::Probe;
  using Guard = ArtOptions::Guard;
  using Scale = ArtOptions::Scale;
  if (option.name == "probe") {
    return Choose<Probe>(option, {{"normalised", Probe::kNormalised}, {"raw", Probe::kRaw}},
                         options.probe);
  }
  if (option.name == "guard") {
    return Choose<Guard>(option, {{"bounds", Guard::kBounds}, {"none", Guard::kNone}},
                         options.guard);
  }
  if (option.name == "scale") {
    return Choose<Scale>(option, {{"absolute", Scale::kAbsolute}, {"relative", Scale::kRelative}},
                         options.scale);
  }
  if (option.name == "order") {
    return Choose<ReadingOrder>(
        option, {{"recency", ReadingOrder::kRecency}, {"importance", ReadingOrder::kImportance}},
        options.order);
  }
  if (option.name == "scale_tolerance") return Read(option, options.scale_tolerance);
  if (option.name == "direction_tolerance") return Read(option, options.direction_tolerance);
  if (option.name == "mass_tolerance") return Read(option, options.mass_tolerance);
  if (option.name == "unread_mass") return Read(option, options.unread_mass);
  return absl::InvalidArgumentError(
      absl::StrCat("art has no option '", option.name,
                   "'; it has probe, guard, scale, order, scale_tolerance, direction_tolerance, "
                   "mass_tolerance, unread_mass"));
}

}  // namespace

absl::StatusOr<ArtOptions> ArtTerminator::Parse(const MethodOptions& options) {
  ArtOptions parsed;
  for (const MethodOption& option : options) KVASIR_RETURN_IF_ERROR(Set(option, parsed));
  return parsed;
}

absl::StatusOr<std::unique_ptr<Terminator>> ArtTerminator::Create(const MethodOptions& options) {
  KVASIR_ASSIGN_OR_RETURN(const ArtOptions parsed, Parse(options));
  return std::make_unique<ArtTerminator>(parsed);
}

int64_t ArtTerminator::RowBytes(int64_t group, int64_t head_dim, int64_t skippable) const {
  return ArtRow::MemoryBytes(group, head_dim, skippable);
}

RowTerminator* ArtTerminator::Begin(const TerminatedRow& row, std::byte* memory) const {
  if (row.num_steps < row.patience + 3) return nullptr;
  return ArtRow::Make(options_, row, memory);
}

}  // namespace kvasir::kernels
