#include "tests/quality/facts.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <set>
#include <span>

#include "absl/strings/str_cat.h"

namespace kvasir::quality {
namespace {

constexpr double kTopP = 0.95;
constexpr int kExactBits = 32;  // stands for keys as they are
constexpr int64_t kBranchTokens = 256;

// A key in `bits` bits with a scale and a zero of its own, as key_codes.h has it for four.
void Quantize(const float* key, int64_t d, int bits, float* to) {
  const auto [low, high] = std::minmax_element(key, key + d);
  const float zero = *low;
  const float scale = (*high - zero) / static_cast<float>((1 << bits) - 1);
  for (int64_t i = 0; i < d; ++i) {
    to[i] = scale == 0 ? zero : std::rint((key[i] - zero) / scale) * scale + zero;
  }
}

// The query's logits, unscaled, for keys of so many bits.
std::vector<float> EstimatedLogits(const HeadKv& kv, const QueryAttention& query, int bits) {
  const int64_t d = std::ssize(query.query());
  std::vector<float> key(static_cast<size_t>(d));
  std::vector<float> logits;
  for (int64_t t = 0; t < query.num_tokens(); ++t) {
    Quantize(kv.keys.data() + t * d, d, bits, key.data());
    logits.push_back(std::inner_product(key.begin(), key.end(), query.query().begin(), 0.0f));
  }
  return logits;
}

// The fewest tokens whose mass reaches p if `logits` are right.
std::vector<int32_t> TopP(const std::vector<float>& logits, double scale, double p) {
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto logit = [&](int32_t token) { return logits[static_cast<size_t>(token)]; };
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return logit(a) > logit(b); });
  const auto weight = [&](int32_t token) {
    return std::exp(scale * static_cast<double>(logit(token) - logit(order[0])));
  };
  const double all =
      std::accumulate(order.begin(), order.end(), 0.0,
                      [&](double sum, int32_t token) { return sum + weight(token); });
  double kept = 0;
  size_t count = 0;
  while (count < order.size() && kept < p * all) kept += weight(order[count++]);
  order.resize(count);
  return order;
}

double MassOf(const QueryAttention& query, std::span<const int32_t> tokens) {
  return std::accumulate(tokens.begin(), tokens.end(), 0.0,
                         [&](double sum, int32_t token) { return sum + query.weight(token); });
}

// Tokens of the middle with the largest of `votes`, which are one each.
std::vector<int32_t> MostVoted(const std::vector<double>& votes, const Middle& middle,
                               int64_t budget) {
  std::vector<int32_t> tokens(votes.size());
  std::iota(tokens.begin(), tokens.end(), static_cast<int32_t>(middle.begin));
  const int64_t count = std::min<int64_t>(budget, std::ssize(tokens));
  const auto vote = [&](int32_t token) { return votes[static_cast<size_t>(token - middle.begin)]; };
  std::nth_element(tokens.begin(), tokens.begin() + count, tokens.end(),
                   [&](int32_t a, int32_t b) { return vote(a) > vote(b); });
  tokens.resize(static_cast<size_t>(count));
  return tokens;
}

// Pages of the middle with the most mass of all heads of the group, as many as the budget has.
std::set<int64_t> HeaviestPages(std::span<const std::unique_ptr<QueryAttention>> group,
                                const kernels::PolicyNumbers& numbers) {
  const Middle middle = Middle::Of(numbers, group.front()->num_tokens() - 1);
  std::map<int64_t, double> masses;
  for (int64_t token = middle.begin; token < middle.end; ++token) {
    for (const auto& query : group) masses[token / kernels::kPageTokens] += query->weight(token);
  }
  std::vector<std::pair<double, int64_t>> pages;
  for (const auto& [page, mass] : masses) pages.emplace_back(mass, page);
  const int64_t count =
      std::min(numbers.budget_tokens / kernels::kPageTokens, int64_t{std::ssize(pages)});
  std::partial_sort(pages.begin(), pages.begin() + count, pages.end(), std::greater<>());
  std::set<int64_t> heaviest;
  for (int64_t i = 0; i < count; ++i) heaviest.insert(pages[static_cast<size_t>(i)].second);
  return heaviest;
}

double Cosine(std::span<const float> a, std::span<const float> b) {
  const auto product = [](std::span<const float> x, std::span<const float> y) {
    return std::inner_product(x.begin(), x.end(), y.begin(), 0.0);
  };
  return product(a, b) / std::sqrt(product(a, a) * product(b, b));
}

// Token that stands for [begin, end).
int64_t Representative(const std::string& which, int64_t begin, int64_t end) {
  if (which == "first") return begin;
  return which == "last" ? end - 1 : (begin + end) / 2;
}

}  // namespace

void Facts::Kept::Add(double more_mass, int64_t more_tokens) {
  mass += more_mass;
  tokens += static_cast<double>(more_tokens);
  ++queries;
}

nlohmann::json Facts::Kept::ToJson() const {
  const double n = static_cast<double>(std::max<int64_t>(1, queries));
  return {{"mass", mass / n}, {"tokens", tokens / n}, {"queries", queries}};
}

void Facts::Add(const LayerAttention& layer) {
  CountOccupancy(layer);
  CountBranches(layer);
  KeepBestBlocks(layer);
  CountOverlap(layer);
  Vote(layer);
}

void Facts::CountOccupancy(const LayerAttention& layer) {
  for (const auto& query : layer.queries) {
    const int64_t num_tokens = query->num_tokens();
    const std::vector<int32_t>& by_weight =
        query->MiddleByWeight(Middle::Of(numbers_, num_tokens - 1));
    const std::pair<const char*, int64_t> counts[] = {{"budget", numbers_.budget_tokens},
                                                      {"context / 64", num_tokens / 64}};
    for (const auto& [name, heaviest] : counts) {
      std::vector<int64_t> held(static_cast<size_t>(num_tokens / kChunkTokens + 1));
      const int64_t count = std::min<int64_t>(heaviest, std::ssize(by_weight));
      for (int64_t i = 0; i < count; ++i) {
        ++held[static_cast<size_t>(by_weight[static_cast<size_t>(i)] / kChunkTokens)];
      }
      for (const int64_t tokens : held) ++occupancy_[name][static_cast<size_t>(tokens)];
    }
  }
}

void Facts::CountBranches(const LayerAttention& layer) {
  for (const auto& query : layer.queries) {
    const Middle middle = Middle::Of(numbers_, query->num_tokens() - 1);
    const std::vector<int32_t>& by_weight = query->MiddleByWeight(middle);
    const int64_t heaviest = std::min<int64_t>(numbers_.budget_tokens, std::ssize(by_weight));
    if (heaviest == 0) continue;
    const float least =
        query->logits()[static_cast<size_t>(by_weight[static_cast<size_t>(heaviest - 1)])];
    for (int64_t begin = middle.begin; begin + kBranchTokens <= middle.end;
         begin += kBranchTokens) {
      const int64_t cut = begin + kBranchTokens / 2, end = begin + kBranchTokens;
      const float* logits = query->logits().data();
      const float left = *std::max_element(logits + begin, logits + cut);
      const float right = *std::max_element(logits + cut, logits + end);
      if (std::max(left, right) < least) continue;
      ++branches_;
      for (const std::string which : {"first", "centre", "last"}) {
        const bool goes_left =
            logits[Representative(which, begin, cut)] > logits[Representative(which, cut, end)];
        right_branches_[which] += goes_left == (left > right);
      }
    }
  }
}

void Facts::KeepBestBlocks(const LayerAttention& layer) {
  const int64_t group = layer.num_heads / layer.num_kv_heads;
  for (int64_t i = 0; i < layer.num_steps * layer.num_kv_heads; ++i) {
    const auto first = layer.queries.begin() + i * group;
    const Middle middle = Middle::Of(numbers_, (*first)->num_tokens() - 1);
    for (const int64_t block : {1, 2, 8, 16, 64}) {
      std::vector<double> masses(static_cast<size_t>((middle.end - middle.begin) / block));
      for (int64_t token = 0; token < std::ssize(masses) * block; ++token) {
        for (int64_t g = 0; g < group; ++g) {
          masses[static_cast<size_t>(token / block)] += first[g]->weight(middle.begin + token);
        }
      }
      std::sort(masses.begin(), masses.end(), std::greater<>());
      const int64_t count = std::min(numbers_.budget_tokens / block, int64_t{std::ssize(masses)});
      double mass = std::accumulate(masses.begin(), masses.begin() + count, 0.0);
      for (int64_t g = 0; g < group; ++g) mass += first[g]->MassAround(middle);
      by_block_[block].Add(mass / static_cast<double>(group), count * block);
    }
  }
}

void Facts::CountOverlap(const LayerAttention& layer) {
  const int64_t group = layer.num_heads / layer.num_kv_heads;
  for (int64_t head = 0; head < layer.num_heads; head += group) {
    std::set<int64_t> previous, earlier;
    for (int64_t step = 0; step < layer.num_steps; ++step) {
      const std::span queries = layer.group_at(step, head, group);
      std::set<int64_t> pages = HeaviestPages(queries, numbers_);
      for (const int64_t page : pages) {
        if (step == 0) break;
        ++overlap_.pages;
        overlap_.previous += static_cast<int64_t>(previous.count(page));
        overlap_.earlier += static_cast<int64_t>(earlier.count(page));
      }
      for (int64_t g = 0; step > 0 && g < group; ++g) {
        ++overlap_.queries;
        overlap_.cosine +=
            Cosine(layer.at(step - 1, head + g).query(), queries[static_cast<size_t>(g)]->query());
      }
      earlier.insert(pages.begin(), pages.end());
      previous = std::move(pages);
    }
  }
}

void Facts::AddBits(const LayerAttention& layer, kernels::Executor& executor) {
  for (const int bits : {2, 4, 8, kExactBits}) {
    std::vector<std::pair<double, int64_t>> kept(layer.queries.size());
    executor.ParallelFor(std::ssize(kept), [&](int64_t i, int) {
      const QueryAttention& query = *layer.queries[static_cast<size_t>(i)];
      const HeadKv& kv = layer.kv[static_cast<size_t>(layer.kv_head(i % layer.num_heads))];
      const double scale = 1 / std::sqrt(static_cast<double>(query.query().size()));
      const std::vector<int32_t> tokens =
          bits == kExactBits ? TopP(query.logits(), 1, kTopP)
                             : TopP(EstimatedLogits(kv, query, bits), scale, kTopP);
      kept[static_cast<size_t>(i)] = {MassOf(query, tokens), std::ssize(tokens)};
    });
    for (const auto& [mass, tokens] : kept) by_bits_[bits].Add(mass, tokens);
  }
}

void Facts::Vote(const LayerAttention& layer) {
  const int64_t group = layer.num_heads / layer.num_kv_heads;
  for (int64_t step = 0; step < layer.num_steps; ++step) {
    VoteAmong(layer, step, 0, layer.num_heads, "layer");
    for (int64_t head = 0; head < layer.num_heads; head += group) {
      VoteAmong(layer, step, head, group, "KV group");
    }
  }
}

void Facts::VoteAmong(const LayerAttention& layer, int64_t step, int64_t first_head,
                      int64_t num_heads, const std::string& scope) {
  const Middle middle = Middle::Of(numbers_, layer.at(step, first_head).num_tokens() - 1);
  std::vector<double> soft(static_cast<size_t>(middle.end - middle.begin)), summed(soft.size());
  for (int64_t head = first_head; head < first_head + num_heads; ++head) {
    const QueryAttention& query = layer.at(step, head);
    const double mass = 1 - query.MassAround(middle);
    for (size_t i = 0; i < soft.size(); ++i) {
      const int64_t token = middle.begin + static_cast<int64_t>(i);
      soft[i] += query.weight(token) / mass;
      summed[i] += static_cast<double>(query.logits()[static_cast<size_t>(token)]);
    }
  }
  const std::pair<const char*, const std::vector<double>*> ways[] = {{"soft vote", &soft},
                                                                     {"summed logits", &summed}};
  for (const auto& [way, votes] : ways) {
    const std::vector<int32_t> tokens = MostVoted(*votes, middle, numbers_.budget_tokens);
    for (int64_t head = first_head; head < first_head + num_heads; ++head) {
      const QueryAttention& query = layer.at(step, head);
      by_votes_[{scope, way}].Add(query.MassAround(middle) + MassOf(query, tokens),
                                  std::ssize(tokens));
    }
  }
}

nlohmann::json Facts::ToJson() const {
  nlohmann::json json = {{"occupancy", occupancy_},
                         {"branches", {{"all", branches_}, {"right", right_branches_}}},
                         {"top_p", kTopP}};
  const double pages = static_cast<double>(std::max<int64_t>(1, overlap_.pages));
  json["overlap"] = {
      {"previous", static_cast<double>(overlap_.previous) / pages},
      {"earlier", static_cast<double>(overlap_.earlier) / pages},
      {"cosine", overlap_.cosine / static_cast<double>(std::max<int64_t>(1, overlap_.queries))}};
  for (const auto& [block, kept] : by_block_) json["blocks"][absl::StrCat(block)] = kept.ToJson();
  for (const auto& [bits, kept] : by_bits_) json["bits"][absl::StrCat(bits)] = kept.ToJson();
  for (const auto& [key, kept] : by_votes_) {
    json["votes"][key.first][key.second] = kept.ToJson();
  }
  return json;
}

}  // namespace kvasir::quality
