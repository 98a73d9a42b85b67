#!/usr/bin/env bash
# Installs the Debian 12 packages that Kvasir needs. Does nothing when all are installed; otherwise needs
# root or sudo.
#
#   deploy/install_packages.sh            to build and to test
#   deploy/install_packages.sh --build    to build
#   deploy/install_packages.sh --runtime  to run the installed programs
set -euo pipefail

# ocl-icd-opencl-dev: the CMake package of Debian's oneDNN asks for OpenCL, but libdnnl-dev does not depend on it.
build_packages=(
  g++ cmake ninja-build pkg-config
  libabsl-dev libprotobuf-dev protobuf-compiler libgrpc-dev libgrpc++-dev protobuf-compiler-grpc
  libspdlog-dev libfmt-dev prometheus-cpp-dev libcpp-httplib-dev libboost1.74-dev
  libdnnl-dev ocl-icd-opencl-dev libgloo-dev libxxhash-dev libssl-dev liburing-dev librocksdb-dev
  libucx-dev libjemalloc-dev
  nlohmann-json3-dev libyaml-cpp-dev libpcre2-dev libutf8proc-dev
  libzmq3-dev cppzmq-dev libmsgpack-cxx-dev
)
test_packages=(
  libgtest-dev libgmock-dev libbenchmark-dev
  ucx-utils
  curl python3 python3-grpcio python3-protobuf prometheus zsh
  python3-venv python3-yaml systemd chromium openssl python3-cryptography
)
# Libraries that kvasir and kvasir-worker name; tests/deploy/install_test.py compares them.
runtime_packages=(
  libabsl20220623 libprotobuf32 libgrpc29 libgrpc++1.51 libspdlog1.10 libfmt9 libprometheus-cpp-core1.0
  libdnnl2 libgloo0 libgomp1 libxxhash0 libssl3 liburing2 librocksdb7.8 libyaml-cpp0.7 libpcre2-8-0 libutf8proc2
  libzmq5 libucx0 libjemalloc2
)

case "${1:-}" in
  "") wanted=("${build_packages[@]}" "${test_packages[@]}") ;;
  --build) wanted=("${build_packages[@]}") ;;
  --runtime) wanted=("${runtime_packages[@]}") ;;
  *) sed -n '2,8p' "$0" >&2; exit 2 ;;
esac

missing=()
for package in "${wanted[@]}"; do
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
