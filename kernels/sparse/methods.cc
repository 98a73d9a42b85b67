#include "kernels/sparse/methods.h"

#include "kernels/sparse/all/all_selector.h"
#include "kernels/sparse/hip/hip_selector.h"
#include "kernels/sparse/quest/quest_selector.h"
#include "kernels/sparse/streaming/streaming_selector.h"
#include "kernels/sparse/tokenselect/tokenselect_selector.h"

namespace kvasir::kernels {
namespace {

template <typename T>
std::unique_ptr<Selector> Make() {
  return std::make_unique<T>();
}

constexpr SelectorMethod kSelectors[] = {
    {"all", Make<AllSelector>},     {"streaming", Make<StreamingSelector>},
    {"quest", Make<QuestSelector>}, {"tokenselect", Make<TokenSelectSelector>},
    {"hip", Make<HipSelector>},
};

}  // namespace

std::span<const SelectorMethod> SelectorMethods() { return kSelectors; }

}  // namespace kvasir::kernels
