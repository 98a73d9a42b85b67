// Marks functions that run on both sides: layout arithmetic, state merges.
#pragma once

#if defined(__CUDACC__)
#define KVASIR_HOST_DEVICE __host__ __device__
#else
#define KVASIR_HOST_DEVICE
#endif
