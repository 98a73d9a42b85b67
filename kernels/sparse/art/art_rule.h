// The numbers of `art` (art_terminator.h), shared by CPU and GPU. Plain data.
#pragma once

#include "kernels/attention/terminator.h"

namespace kvasir::kernels {

struct ArtOptions {
  enum class Probe { kNormalised, kRaw };
  enum class Guard { kBounds, kNone };
  enum class Scale { kAbsolute, kRelative };

  Probe probe = Probe::kNormalised;
  Guard guard = Guard::kBounds;
  Scale scale = Scale::kAbsolute;
  ReadingOrder order = ReadingOrder::kRecency;
  double scale_tolerance = 1e-5;
  double direction_tolerance = 1e-3;
  double mass_tolerance = 1e-5;
  double unread_mass = 1e-3;
};

// Below this length a direction means nothing.
inline constexpr double kArtNoLength = 1e-20;

}  // namespace kvasir::kernels
