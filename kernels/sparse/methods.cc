#include "kernels/sparse/methods.h"

#include "kernels/base/status_macros.h"
#include "kernels/sparse/all/all_selector.h"
#include "kernels/sparse/art/art_terminator.h"
#include "kernels/sparse/hip/hip_selector.h"
#include "kernels/sparse/infinitehip/infinitehip_selector.h"
#include "kernels/sparse/quest/quest_selector.h"
#include "kernels/sparse/reuse/reuse_rules.h"
#include "kernels/sparse/streaming/streaming_selector.h"
#include "kernels/sparse/tokenselect/tokenselect_selector.h"
#include "kernels/sparse/top_p/top_p_pruner.h"

namespace kvasir::kernels {
namespace {

template <typename T>
absl::StatusOr<std::unique_ptr<Selector>> Make(const MethodOptions& options) {
  KVASIR_RETURN_IF_ERROR(RequireNoOptions(options));
  return std::make_unique<T>();
}

constexpr SelectorMethod kSelectors[] = {
    {"all", Make<AllSelector>},       {"streaming", Make<StreamingSelector>},
    {"quest", QuestSelector::Create}, {"tokenselect", TokenSelectSelector::Create},
    {"hip", Make<HipSelector>},       {"infinitehip", InfiniteHipSelector::Create},
};

constexpr PrunerMethod kPruners[] = {
    {"top_p", [] { return std::unique_ptr<Pruner>(std::make_unique<TopPPruner>()); }},
};

constexpr ReuseMethod kReuseRules[] = {
    {"interval", [] { return std::unique_ptr<ReuseRule>(std::make_unique<IntervalRule>()); }},
    {"cosine", [] { return std::unique_ptr<ReuseRule>(std::make_unique<CosineRule>()); }},
    {"both", [] { return std::unique_ptr<ReuseRule>(std::make_unique<BothRule>()); }},
};

constexpr TerminatorMethod kTerminators[] = {
    {"art", ArtTerminator::Create},
};

}  // namespace

std::span<const SelectorMethod> SelectorMethods() { return kSelectors; }
std::span<const PrunerMethod> PrunerMethods() { return kPruners; }
std::span<const ReuseMethod> ReuseMethods() { return kReuseRules; }
std::span<const TerminatorMethod> TerminatorMethods() { return kTerminators; }

}  // namespace kvasir::kernels
