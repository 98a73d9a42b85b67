// Parts of a context (contexts.proto) one after the other as bytes: in files of `kvasir context`,
// and over HTTP. Pure functions and values: thread-compatible.
//
//   file := frame*     frame := length of the part (4 bytes, little-endian) ContextPart
#pragma once

#include <optional>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"

#include "proto/kvasir/v1/contexts.pb.h"

namespace kvasir::coordinator {

std::string FrameOf(const v1::ContextPart& part);

// Reads the next frame; nothing at the end. `read` appends up to so many bytes to a text and
// returns how many there were. INVALID_ARGUMENT for what is no frame, or too long.
absl::StatusOr<std::optional<v1::ContextPart>> ReadFrame(
    absl::FunctionRef<size_t(size_t bytes, std::string& text)> read);

}  // namespace kvasir::coordinator
