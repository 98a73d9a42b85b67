#include "worker/checkpoint/model_hash.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <memory>
#include <openssl/evp.h>
#include <span>
#include <vector>
#include <xxhash.h>

#include "kernels/base/status_macros.h"
#include "worker/checkpoint/try_parallel_for.h"

namespace kvasir::worker {
namespace {

constexpr int64_t kChunkBytes = int64_t{4} << 20;
constexpr int64_t kReadBytes = int64_t{512} << 10;  // hashed while in a core's cache

// SHA-256 of a sequence of fields, each with its length, so that different sequences never hash the
// same bytes.
class FieldHasher {
 public:
  FieldHasher() : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
    KVASIR_CHECK(context_ != nullptr);
    KVASIR_CHECK(EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1);
  }

  void Add(absl::string_view text) {
    AddNumber(text.size());
    Update(text.data(), text.size());
  }
  void AddNumber(uint64_t value) {
    unsigned char bytes[8];
    for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<unsigned char>(value >> (8 * i));
    Update(bytes, sizeof(bytes));
  }
  void AddInt(int64_t value) { AddNumber(static_cast<uint64_t>(value)); }
  void AddDouble(double value) { AddNumber(std::bit_cast<uint64_t>(value)); }

  ModelHash Finish() {
    ModelHash hash;
    unsigned int size = 0;
    KVASIR_CHECK(EVP_DigestFinal_ex(context_.get(), hash.data(), &size) == 1);
    KVASIR_CHECK(size == hash.size());
    return hash;
  }

 private:
  void Update(const void* data, size_t size) {
    KVASIR_CHECK(EVP_DigestUpdate(context_.get(), data, size) == 1);
  }

  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context_;
};

// One chunk of a file's data.
struct Chunk {
  const SafetensorsFile* file = nullptr;
  int64_t offset = 0;
  int64_t size_bytes = 0;
};

// Reads into `memory`, one part after the other.
absl::Status HashChunk(const Chunk& chunk, std::span<std::byte> memory, XXH128_hash_t& hash) {
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(),
                                                                       XXH3_freeState);
  KVASIR_CHECK(state != nullptr && XXH3_128bits_reset(state.get()) == XXH_OK);
  const auto most = static_cast<int64_t>(memory.size());
  for (int64_t done = 0; done < chunk.size_bytes; done += most) {
    const int64_t size = std::min(most, chunk.size_bytes - done);
    KVASIR_RETURN_IF_ERROR(chunk.file->ReadData(chunk.offset + done, size, memory.data()));
    KVASIR_CHECK(XXH3_128bits_update(state.get(), memory.data(), static_cast<size_t>(size)) ==
                 XXH_OK);
  }
  hash = XXH3_128bits_digest(state.get());
  return absl::OkStatus();
}

std::vector<Chunk> ChunksOf(const SafetensorsFolder& folder) {
  std::vector<Chunk> chunks;
  for (const SafetensorsFile& file : folder.files()) {
    const int64_t bytes = file.data_size_bytes();
    for (int64_t offset = 0; offset < bytes; offset += kChunkBytes) {
      chunks.push_back(
          {.file = &file, .offset = offset, .size_bytes = std::min(kChunkBytes, bytes - offset)});
    }
  }
  return chunks;
}

absl::StatusOr<std::vector<XXH128_hash_t>> HashChunks(const std::vector<Chunk>& chunks,
                                                      kernels::Executor& executor) {
  std::vector<XXH128_hash_t> hashes(chunks.size());
  std::vector<std::vector<std::byte>> memory(static_cast<size_t>(executor.num_threads()));
  KVASIR_RETURN_IF_ERROR(
      TryParallelFor(executor, std::ssize(chunks), [&](int64_t i, int thread) -> absl::Status {
        const Chunk& chunk = chunks[static_cast<size_t>(i)];
        std::vector<std::byte>& data = memory[static_cast<size_t>(thread)];
        data.resize(static_cast<size_t>(kReadBytes));
        return HashChunk(chunk, data, hashes[static_cast<size_t>(i)]);
      }));
  return hashes;
}

void AddConfig(const ModelConfig& config, FieldHasher& hasher) {
  hasher.Add(ModelFamilyName(config.family));
  for (const int64_t number :
       {config.num_layers, config.hidden_size, config.intermediate_size, config.num_heads,
        config.num_kv_heads, config.head_dim, config.vocab_size}) {
    hasher.AddInt(number);
  }
  for (const bool flag : {config.qkv_bias, config.output_bias, config.qk_norm}) {
    hasher.AddInt(flag ? 1 : 0);
  }
  hasher.AddDouble(config.rms_norm_eps);
  // Models without windows keep the hash that they had before there were any.
  if (!config.layer_windows.empty()) hasher.Add("layer windows");
  for (const int64_t window : config.layer_windows) hasher.AddInt(window);
}

// Hashes the parameters and not the frequencies, whose last bits depend on the mathematical
// library.
void AddRope(const ModelConfig& config, int64_t context_length, FieldHasher& hasher) {
  const RopeConfig& rope = config.rope;
  hasher.Add(RopeKindName(rope.kind));
  for (const double number :
       {rope.theta, rope.factor, rope.attention_factor.value_or(0.0), rope.mscale.value_or(0.0),
        rope.mscale_all_dim.value_or(0.0), rope.beta_fast, rope.beta_slow, rope.low_freq_factor,
        rope.high_freq_factor}) {
    hasher.AddDouble(number);
  }
  hasher.AddInt(rope.original_max_position_embeddings);
  hasher.AddInt(rope.truncate ? 1 : 0);
  if (rope.kind == RopeKind::kDynamicNtk) {
    hasher.AddInt(config.max_position_embeddings);
    hasher.AddInt(std::max(config.max_position_embeddings, context_length));
  }
}

void AddIdentity(absl::string_view kind, const ModelIdentity& identity, FieldHasher& hasher) {
  hasher.Add(kind);
  hasher.Add(kernels::DTypeName(identity.dtype));
  if (identity.weights == kernels::WeightForm::kInt8) hasher.Add("int8 weights in groups of 32");
  AddConfig(identity.config, hasher);
  AddRope(identity.config, identity.context_length, hasher);
}

}  // namespace

absl::StatusOr<ModelHash> HashModel(const SafetensorsFolder& folder, const ModelIdentity& identity,
                                    kernels::Executor& executor) {
  const std::vector<Chunk> chunks = ChunksOf(folder);
  KVASIR_ASSIGN_OR_RETURN(const std::vector<XXH128_hash_t> hashes, HashChunks(chunks, executor));
  FieldHasher hasher;
  AddIdentity("kvasir model, by chunks", identity, hasher);
  hasher.AddNumber(folder.files().size());
  for (const SafetensorsFile& file : folder.files()) {
    hasher.Add({file.header().data(), file.header().size()});
    hasher.AddInt(file.data_size_bytes());
  }
  for (const XXH128_hash_t& hash : hashes) {
    hasher.AddNumber(hash.high64);
    hasher.AddNumber(hash.low64);
  }
  return hasher.Finish();
}

ModelHash HashDummyModel(uint64_t seed, const ModelIdentity& identity) {
  FieldHasher hasher;
  AddIdentity("kvasir dummy model", identity, hasher);
  hasher.AddNumber(seed);
  return hasher.Finish();
}

}  // namespace kvasir::worker
