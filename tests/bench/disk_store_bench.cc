// Speed of the disk tier at the shape of Llama 3 8B in bfloat16: blocks of a rank with 8 KV heads
// in a store for each head, of a rank with one head, and, for comparison, of all 8 heads in one
// store. Beside it a plain sequential read of the same files. Prints a line for each form:
//
//   FORM  write MB/s  restore MB/s  sequential read MB/s  ratio  open files
//
//   disk_store_bench FOLDER GIGABYTES        an empty folder on the disk to measure
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/status_macros.h"
#include "kvstore/format/extent_memory.h"
#include "kvstore/format/head_extent.h"
#include "kvstore/heads/head_stores.h"
#include "kvstore/tiers/disk_tier.h"

namespace kvasir::kvstore {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kInFlight = 64;  // as the KV store has at most

struct Form {
  const char* name;
  int64_t heads;   // of the rank
  bool one_store;  // for all its heads
};

KvShard Shard(int64_t heads) {
  return {.layout = {.num_layers = 32,
                     .num_kv_heads = heads,
                     .head_dim = 128,
                     .dtype = kernels::DType::kBFloat16},
          .weights_hash = std::string(32, 'w'),
          .kv_form = "rotated/bfloat16"};
}

DiskTierOptions Options(const std::string& folder, const KvShard& shard) {
  DiskTierOptions options;
  options.directory = folder;
  options.shard = shard;
  options.capacity_bytes = int64_t{1} << 40;
  return options;
}

std::unique_ptr<Tier> Open(const std::string& folder, const Form& form) {
  const KvShard shard = Shard(form.heads);
  if (form.one_store) return OpenDiskTier(Options(folder + "/all", shard)).value();
  const ExtentFormat rank = ExtentFormat::Create(shard).value();
  std::vector<std::unique_ptr<Tier>> heads;
  for (int64_t head = 0; head < form.heads; ++head) {
    DiskTierOptions options =
        Options(folder + "/head" + std::to_string(head), ShardOfHeads(shard, {head, 1}));
    if (form.heads > 1) options.memory = rank;
    options.group_bytes /= form.heads;
    heads.push_back(OpenDiskTier(std::move(options)).value());
  }
  if (heads.size() == 1) return std::move(heads[0]);
  return std::make_unique<HeadStores>(rank, std::move(heads));
}

double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

PrefixHash HashOf(size_t block) {
  PrefixHash hash{};
  std::memcpy(hash.data(), &block, sizeof(block));
  return hash;
}

// A block of the memory is full of numbers that follow from its place in it.
ExtentMemory MakeBlocks(const ExtentFormat& format) {
  ExtentMemory memory =
      ExtentMemory::Allocate(static_cast<int64_t>(kInFlight), format.extent_bytes()).value();
  for (size_t i = 0; i < kInFlight; ++i) {
    uint64_t number = i;
    for (size_t at = 0; at + 8 <= memory[i].size(); at += 8) {
      number = number * 6364136223846793005u + 1442695040888963407u;
      std::memcpy(memory[i].data() + at, &number, 8);
    }
  }
  return memory;
}

// Gives the extent the identity of a block.
BlockIdentity Seal(const ExtentFormat& format, size_t block, absl::Span<std::byte> extent) {
  const BlockIdentity identity = {.hash = HashOf(block), .generation = block + 1, .tokens = {}};
  const auto page_bytes = static_cast<size_t>(format.shard().layout.page_bytes());
  for (int64_t page = 0; page < format.shard().layout.pages_per_block(); ++page) {
    const uint64_t checksum =
        PageChecksum(format.identity(identity.hash, page),
                     extent.subspan(static_cast<size_t>(format.page_offset(page)), page_bytes));
    std::memcpy(extent.data() + format.checksums_offset() + page * 8, &checksum, 8);
  }
  format.WriteHeader(identity, extent);
  return identity;
}

// Waits until all are done.
void Await(Tier& tier, size_t count) {
  while (count > 0) {
    tier.Wait();
    for (const TierCompletion& completion : tier.Poll().completions) {
      KVASIR_CHECK(completion.status.ok());
      --count;
    }
  }
}

// Returns the seconds of writing, without those of making blocks.
double WriteAll(Tier& tier, const ExtentMemory& memory, size_t blocks) {
  double seconds = 0;
  for (size_t first = 0; first < blocks; first += kInFlight) {
    std::vector<TierWrite> writes;
    for (size_t i = 0; i < kInFlight; ++i) {
      writes.push_back({.ticket = first + i,
                        .block = Seal(tier.format(), first + i, memory[i]),
                        .extent = memory[i]});
    }
    const auto begin = Clock::now();
    tier.Write(std::move(writes));
    Await(tier, kInFlight);
    seconds += SecondsSince(begin);
  }
  return seconds;
}

double ReadAll(Tier& tier, const ExtentMemory& memory, size_t blocks) {
  const auto begin = Clock::now();
  for (size_t first = 0; first < blocks; first += kInFlight) {
    std::vector<TierRead> reads;
    for (size_t i = 0; i < kInFlight; ++i) {
      reads.push_back({.ticket = first + i, .hash = HashOf(first + i), .extent = memory[i]});
    }
    tier.Read(std::move(reads));
    Await(tier, kInFlight);
  }
  return SecondsSince(begin);
}

// Reads all segments in order, 8 requests of 4 MiB at a time, and returns MB/s.
double SequentialSpeed(const std::string& folder) {
  const std::unique_ptr<FileIo> io = MakeFileIo(IoEngine::kIoUringOrThreads);
  const std::unique_ptr<IoQueue> queue = io->NewQueue();
  const ExtentMemory memory = ExtentMemory::Allocate(8, kMergedBytes).value();
  double bytes = 0;
  double seconds = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (entry.path().extension() != ".segment") continue;
    const auto file = io->Open(entry.path(), FileIo::Mode::kExisting).value();
    const int64_t size = io->Size(*file).value() / (8 * kMergedBytes) * (8 * kMergedBytes);
    const auto begin = Clock::now();
    for (int64_t offset = 0; offset < size; offset += 8 * kMergedBytes) {
      std::vector<IoRequest> requests;
      for (size_t i = 0; i < 8; ++i) {
        requests.push_back({.op = IoRequest::Op::kRead,
                            .file = file.get(),
                            .offset = offset + static_cast<int64_t>(i) * kMergedBytes,
                            .memory = memory[i],
                            .result = 0});
      }
      for (const absl::Status& status : RunFully(*queue, absl::MakeSpan(requests))) {
        KVASIR_CHECK(status.ok());
      }
    }
    seconds += SecondsSince(begin);
    bytes += static_cast<double>(size);
  }
  return bytes / seconds / 1e6;
}

void Measure(const std::string& folder, const Form& form, double gigabytes) {
  std::filesystem::remove_all(folder);
  const int64_t block_bytes = Shard(form.heads).layout.block_bytes();
  const auto groups = static_cast<size_t>(gigabytes * 1e9 / static_cast<double>(block_bytes) /
                                          static_cast<double>(kInFlight)) +
                      1;
  const size_t blocks = groups * kInFlight;
  const double megabytes = static_cast<double>(blocks) * static_cast<double>(block_bytes) / 1e6;
  double write = 0, read = 0;
  int64_t files = 0;
  {
    const std::unique_ptr<Tier> tier = Open(folder, form);
    const ExtentMemory memory = MakeBlocks(tier->format());
    write = megabytes / WriteAll(*tier, memory, blocks);
    const auto open = std::filesystem::directory_iterator("/proc/self/fd");
    files = std::distance(begin(open), end(open));
    read = megabytes / ReadAll(*tier, memory, blocks);
  }
  const double plain = SequentialSpeed(folder);
  std::printf("%-28s %8.0f %8.0f %8.0f %6.2f %4ld\n", form.name, write, read, plain, read / plain,
              static_cast<long>(files));
  std::fflush(stdout);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace kvasir::kvstore

int main(int argc, char** argv) {
  using kvasir::kvstore::Form;
  if (argc != 3) {
    std::fprintf(stderr, "usage: disk_store_bench FOLDER GIGABYTES\n");
    return 2;
  }
  for (const Form& form : {Form{"8 heads in one store", 8, true},
                           Form{"8 heads, a store each", 8, false}, Form{"1 head", 1, false}}) {
    kvasir::kvstore::Measure(std::string(argv[1]) + "/bench", form, std::atof(argv[2]));
  }
  return 0;
}
