// Small helpers of all kernels: element types, programmatic dependent launch, launching.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace trtspec {

using bf16 = __nv_bfloat16;
using half_t = __half;

__device__ inline float to_float(bf16 x) { return __bfloat162float(x); }
__device__ inline float to_float(half_t x) { return __half2float(x); }
__device__ inline float to_float(float x) { return x; }

template <typename T>
__device__ T from_float(float x);
template <>
__device__ inline bf16 from_float<bf16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ inline half_t from_float<half_t>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}

// A thread block's shared memory beside its variables.
__device__ inline char* dynamic_shared() {
  extern __shared__ __align__(128) char shared[];
  return shared;
}

// Programmatic dependent launch. A kernel may start while the one before it still runs; before
// `wait_for_previous` it may only read what no kernel writes (weights) or what is older than that
// kernel. `let_next_start` comes after that: so at most two kernels of a chain overlap, and when a kernel
// has waited, everything before it is done.
//
// One kernel waits at its end (cluster_attention with `is_beside`), and three overlap. The one before it
// must wait first, in every block, and write nothing that it reads. The one after it may read neither's
// output, nor what they read, before it has waited itself.
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A barrier of a cluster's threads that have not returned, in two halves. What a thread wrote before it
// arrived, in any block's shared memory, is there after the wait.
__device__ inline void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ inline void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// 16 bytes from global to shared memory, asynchronously; visible to this thread after `copies_wait`.
__device__ inline void copy_16(void* target, const void* source) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(target))),
               "l"(source)
               : "memory");
}

// As copy_16, or zeros.
__device__ inline void copy_16_if(void* target, const void* source, bool is_there) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(target))),
               "l"(source), "r"(is_there ? 16 : 0)
               : "memory");
}

__device__ inline void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most kPending of the groups committed last are under way.
template <int kPending>
__device__ inline void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Asks for as much of a multiprocessor's memory as can be as shared memory, as all kernels of a small
// model's layers do. Another division can only be made when nothing runs there: the kernel could not
// start early.
template <typename... Params>
void keep_shared_memory(void (*kernel)(Params...)) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                       cudaSharedmemCarveoutMaxShared);
}

// Launches with programmatic dependent launch allowed towards the kernel before this one, in clusters
// of `cluster` thread blocks.
template <typename... Params, typename... Args>
cudaError_t launch_clusters(void (*kernel)(Params...), dim3 grid, int cluster, dim3 block,
                            size_t shared, cudaStream_t stream, Args... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = static_cast<unsigned>(cluster);
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

template <typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared,
                   cudaStream_t stream, Args... args) {
  return launch_clusters(kernel, grid, 1, block, shared, stream, args...);
}

// How many clusters of `size` blocks run at once on the current GPU. This sets how much shared memory the kernel
// may have there.
template <typename... Params>
int clusters_at_once(void (*kernel)(Params...), int size, int threads, size_t shared) {
  cudaLaunchAttribute of_cluster = {};
  of_cluster.id = cudaLaunchAttributeClusterDimension;
  of_cluster.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(size), config.blockDim = dim3(threads), config.dynamicSmemBytes = shared;
  config.attrs = &of_cluster, config.numAttrs = 1;
  int clusters = 0;
  cudaError_t raised = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(shared));
  if (raised == cudaSuccess) raised = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
  if (raised == cudaSuccess) return clusters;
  cudaGetLastError();  // it is no error of what comes
  return 0;
}

}  // namespace trtspec
