#!/usr/bin/env bash
# Installs the Debian 12 packages that building and testing Kvasir need. Does nothing when all are
# installed; otherwise needs root or sudo.
set -euo pipefail

# ocl-icd-opencl-dev: the CMake package of Debian's oneDNN asks for OpenCL, but libdnnl-dev does not depend on it.
build_packages=(
  g++ cmake ninja-build pkg-config
  libabsl-dev libprotobuf-dev protobuf-compiler libgrpc-dev libgrpc++-dev protobuf-compiler-grpc
  libspdlog-dev libfmt-dev prometheus-cpp-dev libcpp-httplib-dev
  libdnnl-dev ocl-icd-opencl-dev libgloo-dev libxxhash-dev libssl-dev liburing-dev librocksdb-dev
  nlohmann-json3-dev libyaml-cpp-dev libpcre2-dev libutf8proc-dev
)
test_packages=(
  libgtest-dev libgmock-dev libbenchmark-dev
  python3 python3-grpcio python3-protobuf prometheus zsh
)

missing=()
for package in "${build_packages[@]}" "${test_packages[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' ||
    missing+=("$package")
done
if ((${#missing[@]} == 0)); then
  exit 0
fi
echo "installing: ${missing[*]}"
sudo=()
if ((EUID != 0)); then
  sudo=(sudo)
fi
export DEBIAN_FRONTEND=noninteractive
"${sudo[@]}" apt-get update -qq
"${sudo[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
