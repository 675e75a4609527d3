// What kernels for Hopper share: barriers in shared memory, dependent launches, and errors that Python sees.
//
// Never knows what a kernel computes. Elements are bf16. Whoever includes it defines SOURCE, its name in errors.

#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <atomic>
#include <cstdint>

using tvm::ffi::TensorView;

namespace {

using Element = __nv_bfloat16;

inline __device__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

inline __device__ void barrier_init(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count));
}

// By whoever initialised barriers, before others meet it: copies and the cluster's other blocks then see them, too.
inline __device__ void barriers_are_set_up() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

inline __device__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

inline __device__ void barrier_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// As `barrier_expect`, with the arrival yet to come.
inline __device__ void barrier_announce(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

inline __device__ void barrier_wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nWAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra READY;\nbra WAIT;\nREADY:\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Whether this thread is the one of its warp, all of which is here, that acts for the others. The compiler then knows that
// there is one, and hands it to the copy engine without asking each thread for its operands.
inline __device__ bool is_elected() {
  uint32_t elected;
  asm volatile("{\n.reg .pred one;\nelect.sync _|one, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, one;\n}" : "=r"(elected));
  return elected != 0;
}

// Neither does anything in a launch that is not programmatically dependent.
inline __device__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }
inline __device__ void wait_for_last_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// --- on the host

constexpr int kMostDevices = 64;  // of a process

inline void require(bool holds, const char* what) {
  if (!holds) TVM_FFI_THROW(ValueError) << SOURCE ": " << what;
}

inline bool holds_elements(const TensorView& tensor) { return tensor.dtype().code == kDLBfloat && tensor.dtype().bits == 16; }

// Whether the elements of a dimension lie `stride` apart; where there is one, its stride means nothing.
inline bool lies(const TensorView& tensor, int dimension, int64_t stride) {
  return tensor.size(dimension) < 2 || tensor.stride(dimension) == stride;
}

inline void check(cudaError_t status) {
  if (status != cudaSuccess) TVM_FFI_THROW(RuntimeError) << SOURCE ": " << cudaGetErrorString(status);
}

// Lets a block of `kKernel` have `bytes` of dynamic shared memory, always as many, on the device of `on`.
template <auto kKernel>
void allow_shared_memory(const TensorView& on, int bytes) {
  static std::atomic<bool> allowed[kMostDevices];
  const int device = on.device().device_id;
  require(device < kMostDevices, "too many devices");
  if (allowed[device]) return;
  check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  allowed[device] = true;
}

inline cudaStream_t stream_of(const TensorView& tensor) {
  const auto device = tensor.device();
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
}

}  // namespace
