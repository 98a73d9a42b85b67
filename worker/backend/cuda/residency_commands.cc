#include "worker/backend/cuda/residency_commands.h"

#include <algorithm>
#include <cstddef>

#include "kernels/base/scratch.h"
#include "kernels/base/status_macros.h"

namespace kvasir::worker {
namespace {

// Least size of the command buffers, enough for decoding: growing them waits for the device.
constexpr int64_t kLeastCommandBytes = int64_t{64} << 10;

template <typename T>
std::span<T> Take(kernels::ScratchPieces& pieces, size_t count) {
  T* const begin = pieces.Take<T>(static_cast<int64_t>(count));
  return {begin, begin == nullptr ? 0 : count};
}

}  // namespace

absl::StatusOr<CommandUpload> CommandUpload::Create() {
  CommandUpload upload;
  KVASIR_ASSIGN_OR_RETURN(upload.uploaded_, CudaEvent::Create());
  return upload;
}

absl::StatusOr<DeviceCommands> CommandUpload::Upload(const ResidencyCommands& commands,
                                                     std::span<const int32_t> block_extents,
                                                     const CudaStream& stream) {
  if (commands.empty()) return DeviceCommands();
  const auto lay_out = [&](std::byte* memory, int64_t& bytes) {
    kernels::ScratchPieces pieces(memory);
    DeviceCommands lists = {
        .sealed = Take<int32_t>(pieces, commands.sealed.size()),
        .freed = Take<int32_t>(pieces, commands.freed.size()),
        .restored = Take<int32_t>(pieces, commands.restored.size()),
        .opened = Take<int32_t>(pieces, commands.opened.size()),
        .bound = Take<kernels::BlockExtentChange>(pieces, commands.bound.size()),
        .promoted = Take<int32_t>(pieces, commands.promoted.size()),
        .running = Take<uint8_t>(pieces, commands.running.size())};
    bytes = pieces.bytes();
    return lists;
  };
  int64_t bytes = 0;
  lay_out(nullptr, bytes);
  bytes = std::max(bytes, kLeastCommandBytes);
  KVASIR_RETURN_IF_ERROR(uploaded_.Wait());
  if (bytes > device_.size_bytes()) KVASIR_RETURN_IF_ERROR(stream.Wait());
  KVASIR_ASSIGN_OR_RETURN(std::byte* const host, Reserve<std::byte>(bytes, host_));
  KVASIR_ASSIGN_OR_RETURN(std::byte* const device, Reserve<std::byte>(bytes, device_));
  const DeviceCommands on_host = lay_out(host, bytes);
  std::copy(commands.sealed.begin(), commands.sealed.end(), on_host.sealed.begin());
  std::copy(commands.freed.begin(), commands.freed.end(), on_host.freed.begin());
  std::copy(commands.restored.begin(), commands.restored.end(), on_host.restored.begin());
  std::copy(commands.opened.begin(), commands.opened.end(), on_host.opened.begin());
  std::transform(commands.bound.begin(), commands.bound.end(), on_host.bound.begin(),
                 [&](int64_t entry) {
                   return kernels::BlockExtentChange{
                       .entry = entry, .extent = block_extents[static_cast<size_t>(entry)]};
                 });
  std::copy(commands.promoted.begin(), commands.promoted.end(), on_host.promoted.begin());
  std::copy(commands.running.begin(), commands.running.end(), on_host.running.begin());
  KVASIR_RETURN_IF_ERROR(stream.CopyToDevice(device, host, bytes));
  KVASIR_RETURN_IF_ERROR(uploaded_.Record(stream));
  return lay_out(device, bytes);
}

}  // namespace kvasir::worker
