// Takes what the engine says of the request that reads a context. Part of Contexts; nobody else
// sees it. Called by one thread at a time, except Abandon.
#pragma once

#include <memory>
#include <utility>

#include "coordinator/contexts/contexts.h"

namespace kvasir::coordinator {

class Contexts::ReadSink final : public ClientSink {
 public:
  ReadSink(Contexts& contexts, std::shared_ptr<const NamedContext> context)
      : contexts_(contexts), context_(std::move(context)) {}

  const NamedContext& context() const { return *context_; }
  void Abandon(const absl::Status& why) { Cancel(why); }

  void Write(v1::GenerateResponse response) override {
    if (!response.has_progress()) return;
    began_ = true;
    contexts_.OnProgress(*context_, response.progress());
  }
  void Close(const absl::Status& status) override {
    contexts_.OnEnd({.context = context_, .status = status, .began = began_});
  }

 private:
  Contexts& contexts_;
  const std::shared_ptr<const NamedContext> context_;
  bool began_ = false;  // by the thread that writes
};

}  // namespace kvasir::coordinator
