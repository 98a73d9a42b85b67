// POST /status/selections: which pages a running request selects, by layer and by run of pages, for
// the heat map of the status page. Each call tells what the last observed step selected and has the
// next one observed, so steps cost nothing while nobody asks. Functions without state.
//
//   {"request_id": "a"}  ->  {"request_id": "a", "age_s": 0.4, "layers": 12, "columns": 100,
//                             "pages": 200, "pages_per_column": 2, "heads": 4, "counts": [...]}
//
// counts[layer * columns + column]: pages of the column that were selected, summed over KV heads.
// Without them: "waiting": true, or "unavailable" with the reason.
#pragma once

#include <memory>

#include "coordinator/http/http_call.h"

namespace kvasir::coordinator {

void PostSelections(const HttpCallContext& context, std::shared_ptr<Exchange> exchange);

}  // namespace kvasir::coordinator
