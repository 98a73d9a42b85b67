// Load of tests/bench/http_front.py: streams over gRPC and over HTTP in turn, a thread each, so
// that the client is no bottleneck. Prints a line a round:
//
//   grpc first_p50 first_p99 gap_p50 gap_p99 tokens     (seconds; gaps are from token to token)
//
//   http_front_bench GRPC_HOST:PORT HTTP_HOST:PORT STREAMS TOKENS ROUNDS
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <grpcpp/grpcpp.h>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "boost/asio/connect.hpp"
#include "boost/asio/io_context.hpp"
#include "boost/asio/ip/tcp.hpp"
#include "boost/asio/read_until.hpp"
#include "boost/asio/streambuf.hpp"
#include "boost/asio/write.hpp"
#include "proto/kvasir/v1/generation.grpc.pb.h"

namespace kvasir {
namespace {

using Clock = std::chrono::steady_clock;
using boost::asio::ip::tcp;

struct Load {
  std::string grpc;
  std::string http;
  int streams = 0;
  int tokens = 0;
  int rounds = 0;
};

// When a stream was asked for, and when each of its tokens came.
struct Times {
  Clock::time_point asked;
  std::vector<Clock::time_point> tokens;
};

// A prompt that no other stream of the round has.
std::string PromptOf(int round, int stream) {
  return absl::StrCat("Stream ", stream, " of round ", round, " tells of");
}

Times ReadGrpc(const Load& load, v1::Generation::Stub& stub, const std::string& prompt) {
  v1::GenerateRequest request;
  request.set_text(prompt);
  request.mutable_sampling()->set_max_tokens(static_cast<uint32_t>(load.tokens));
  request.mutable_sampling()->set_ignore_eos(true);
  grpc::ClientContext context;
  Times times = {.asked = Clock::now(), .tokens = {}};
  const auto reader = stub.Generate(&context, request);
  v1::GenerateResponse response;
  while (reader->Read(&response)) {
    // Tokens that waited for this thread come in one message.
    const auto count = static_cast<size_t>(response.tokens().token_ids_size());
    times.tokens.insert(times.tokens.end(), count, Clock::now());
  }
  if (const grpc::Status status = reader->Finish(); !status.ok()) {
    std::fprintf(stderr, "gRPC: %s\n", status.error_message().c_str());
    std::exit(1);
  }
  return times;
}

Times ReadHttp(const Load& load, tcp::socket& socket, const std::string& prompt) {
  const std::string body =
      absl::StrCat("{\"prompt\": \"", prompt, "\", \"max_tokens\": ", load.tokens,
                   ", \"ignore_eos\": true, \"stream\": true}");
  const std::string request = absl::StrCat(
      "POST /v1/completions HTTP/1.1\r\nContent-Length: ", body.size(), "\r\n\r\n", body);
  Times times = {.asked = Clock::now(), .tokens = {}};
  boost::asio::write(socket, boost::asio::buffer(request));
  boost::asio::streambuf received;
  std::istream lines(&received);
  for (std::string line;;) {
    boost::asio::read_until(socket, received, '\n');
    std::getline(lines, line);
    if (absl::StartsWith(line, "data: {")) times.tokens.push_back(Clock::now());
    if (absl::StartsWith(line, "data: [DONE]")) return times;
  }
}

double At(std::vector<double>& sorted, double share) {
  if (sorted.empty()) return 0;
  return sorted[static_cast<size_t>(share * static_cast<double>(sorted.size() - 1))];
}

void Print(const char* front, const std::vector<Times>& streams) {
  std::vector<double> first, gaps;
  for (const Times& times : streams) {
    Clock::time_point before = times.asked;
    for (const Clock::time_point token : times.tokens) {
      (before == times.asked ? first : gaps)
          .push_back(std::chrono::duration<double>(token - before).count());
      before = token;
    }
  }
  std::sort(first.begin(), first.end());
  std::sort(gaps.begin(), gaps.end());
  std::printf("%s %.6f %.6f %.6f %.6f %zu\n", front, At(first, 0.5), At(first, 0.99), At(gaps, 0.5),
              At(gaps, 0.99), first.size() + gaps.size());
  std::fflush(stdout);
}

template <typename Read>
void RunRound(const Load& load, const char* front, Read read) {
  std::vector<Times> times(static_cast<size_t>(load.streams));
  std::vector<std::thread> threads;
  for (int i = 0; i < load.streams; ++i) {
    threads.emplace_back([&, i] { times[static_cast<size_t>(i)] = read(i); });
  }
  for (std::thread& thread : threads) thread.join();
  Print(front, times);
}

void Run(const Load& load) {
  const auto stub =
      v1::Generation::NewStub(grpc::CreateChannel(load.grpc, grpc::InsecureChannelCredentials()));
  boost::asio::io_context io;
  const std::vector<std::string> address = absl::StrSplit(load.http, ':');
  const auto endpoints = tcp::resolver(io).resolve(address[0], address[1]);
  std::vector<tcp::socket> sockets;
  for (int i = 0; i < load.streams; ++i) {
    boost::asio::connect(sockets.emplace_back(io), endpoints);
    sockets.back().set_option(tcp::no_delay(true));
  }
  // The first round warms both up.
  for (int round = 0; round <= load.rounds; ++round) {
    RunRound(load, round == 0 ? "warm" : "grpc",
             [&](int i) { return ReadGrpc(load, *stub, PromptOf(2 * round, i)); });
    RunRound(load, round == 0 ? "warm" : "http", [&](int i) {
      return ReadHttp(load, sockets[static_cast<size_t>(i)], PromptOf(2 * round + 1, i));
    });
  }
}

}  // namespace
}  // namespace kvasir

int main(int argc, char** argv) {
  kvasir::Load load;
  if (argc != 6 || !absl::SimpleAtoi(argv[3], &load.streams) ||
      !absl::SimpleAtoi(argv[4], &load.tokens) || !absl::SimpleAtoi(argv[5], &load.rounds)) {
    std::fprintf(stderr, "http_front_bench GRPC_HOST:PORT HTTP_HOST:PORT STREAMS TOKENS ROUNDS\n");
    return 2;
  }
  load.grpc = argv[1];
  load.http = argv[2];
  kvasir::Run(load);
  return 0;
}
