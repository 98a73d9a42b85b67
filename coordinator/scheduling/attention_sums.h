// Sums and summarizes the attention statistics of ranks and steps, for the client.
// Called where replies are merged and where a request is accounted for. Thread-safe.
#pragma once

#include "proto/kvasir/v1/generation.pb.h"
#include "proto/kvasir/v1/worker.pb.h"

namespace kvasir::coordinator {

void AddMassSamples(const v1::MassSamples& from, v1::MassSamples& to);

// Adds pages and measured mass of one phase.
void AddPhase(const v1::PhaseAccounting& from, v1::PhaseAccounting& to);

void AddContract(const v1::ContractReport& from, v1::ContractReport& to);

// REQUIRES: `mass` has samples.
v1::MassSummary Summarize(const v1::MassSamples& mass);

}  // namespace kvasir::coordinator
