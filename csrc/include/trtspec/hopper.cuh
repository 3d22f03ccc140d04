// Hopper's own instructions: barriers in shared memory, copies of tensors, products by a warpgroup.
//
// A tile in shared memory has rows of 128 bytes, eight of them in a block of 1,024 aligned bytes, and
// the 16-byte pieces of row r lie at piece ^ (r % 8): what is called a swizzle of 128 bytes.
#pragma once

#include <cuda.h>

#include <type_traits>

#include "common.cuh"

namespace trtspec {

constexpr int kTileRowBytes = 128, kTileBlockBytes = 8 * kTileRowBytes;

__device__ inline uint32_t shared_address(const void* x) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(x));
}

// The address of what another block of the cluster has in the same place.
__device__ inline uint32_t remote_address(const void* own, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(rank));
  return address;
}

// A barrier that counts `arrivals`, and bytes of copies where they are announced.
struct Barrier {
  uint64_t word;

  __device__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(arrivals));
  }

  __device__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(this)) : "memory");
  }

  __device__ void arrive_and_expect(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)),
                 "r"(bytes)
                 : "memory");
  }

  // Until the phase of that parity is over. Before the first one, parity 1 is.
  __device__ void wait(int parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(shared_address(this)),
        "r"(parity)
        : "memory");
  }
};

// Writes two numbers to another block's shared memory, whose barrier counts their bytes. Both are remote addresses.
__device__ inline void send_pair(uint32_t to, uint32_t barrier, float x, float y) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to),
               "f"(x), "f"(y), "r"(barrier)
               : "memory");
}

// Makes barriers that were just initialised known to copies.
__device__ inline void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Makes what this thread wrote to shared memory known to products.
__device__ inline void fence_for_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Waits for `threads` threads at the named barrier `id`.
__device__ inline void sync_named(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Changes how many registers a thread of this warpgroup has: those that one gives up another one takes.
template <int kCount>
__device__ inline void keep_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <int kCount>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Copies a box from a tensor of three dimensions to shared memory; `barrier` counts its bytes.
__device__ inline void copy_box(void* target, const CUtensorMap& from, Barrier& barrier, int x, int y,
                                int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(target)),
      "l"(&from), "r"(shared_address(&barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// Copies bytes in one piece, a multiple of 16, to shared memory; `barrier` counts them.
__device__ inline void copy_piece(void* target, const void* from, Barrier& barrier, int bytes) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(target)),
      "l"(from), "r"(bytes), "r"(shared_address(&barrier))
      : "memory");
}

// What a product reads: a tile in shared memory. `apart`: bytes from 64 columns to the next 64, of
// operands whose columns are outputs; others ignore it.
__device__ inline uint64_t tile_operand(const void* tile, int apart = 16) {
  const uint64_t start = (shared_address(tile) & 0x3ffff) >> 4;
  return start | static_cast<uint64_t>(apart >> 4) << 16 |
         static_cast<uint64_t>(kTileBlockBytes >> 4) << 32 | 1ull << 62;
}

// The same operand, some bytes on.
__device__ inline uint64_t moved(uint64_t operand, int bytes) { return operand + (bytes >> 4); }

// Products run beside the warpgroup's other instructions. `products_begin` comes before the first of
// some, `products_commit` after their last.
__device__ inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until at most kPending of the groups committed last are under way.
template <int kPending>
__device__ inline void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving what reads or writes x across this line.
template <int kSize>
__device__ inline void pin(float (&x)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

#define TRTSPEC_SUMS_4(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define TRTSPEC_SUMS_16(x, i) \
  TRTSPEC_SUMS_4(x, i), TRTSPEC_SUMS_4(x, i + 4), TRTSPEC_SUMS_4(x, i + 8), TRTSPEC_SUMS_4(x, i + 12)
#define TRTSPEC_SUMS_32(x) TRTSPEC_SUMS_16(x, 0), TRTSPEC_SUMS_16(x, 16)
#define TRTSPEC_SUMS_64(x) TRTSPEC_SUMS_32(x), TRTSPEC_SUMS_16(x, 32), TRTSPEC_SUMS_16(x, 48)
#define TRTSPEC_REGS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define TRTSPEC_REGS_32                                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TRTSPEC_REGS_64                                                                          \
  TRTSPEC_REGS_32                                                                                \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// sums [64 rows, 128] (+)= a [64, 16] times b [128, 16], both in shared memory, their columns summed
// over. A thread's sums are as of mma.m16n8k16, 8 columns after the other. `adds`: to what is there.
#define TRTSPEC_PRODUCT_128(TYPE)                                                             \
  asm volatile(                                                                               \
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %66, 0;\n"                                      \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" TRTSPEC_REGS_64       \
      "}, %64, %65, adds, 1, 1, 0, 0;\n}"                                                     \
      : TRTSPEC_SUMS_64(sums)                                                                 \
      : "l"(a), "l"(b), "r"(static_cast<int>(adds)))

template <typename T>
__device__ inline void product_of_tiles(float (&sums)[64], uint64_t a, uint64_t b, bool adds) {
  if constexpr (std::is_same_v<T, bf16>) {
    TRTSPEC_PRODUCT_128("bf16");
  } else {
    TRTSPEC_PRODUCT_128("f16");
  }
}

// sums [64 rows, 64 or 128] += a [64, 16], in registers as of mma.m16n8k16, times b [16, 64 or 128] in
// shared memory, its rows summed over.
#define TRTSPEC_PRODUCT_ROWS(SIZE, TYPE, REGS, SUMS, A0, A1, A2, A3, B)                       \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" SIZE "k16.f32." TYPE "." TYPE " {" REGS    \
               "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " B ", 1, 1, 1, 1;"                      \
               : SUMS                                                                         \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define TRTSPEC_PRODUCT_ROWS_64(TYPE)                                                           \
  TRTSPEC_PRODUCT_ROWS("64", TYPE, TRTSPEC_REGS_32, TRTSPEC_SUMS_32(sums), "%32", "%33", "%34", \
                       "%35", "%36")
#define TRTSPEC_PRODUCT_ROWS_128(TYPE)                                                           \
  TRTSPEC_PRODUCT_ROWS("128", TYPE, TRTSPEC_REGS_64, TRTSPEC_SUMS_64(sums), "%64", "%65", "%66", \
                       "%67", "%68")

template <typename T>
__device__ inline void product_with_rows(float (&sums)[32], const uint32_t* a, uint64_t b) {
  if constexpr (std::is_same_v<T, bf16>) {
    TRTSPEC_PRODUCT_ROWS_64("bf16");
  } else {
    TRTSPEC_PRODUCT_ROWS_64("f16");
  }
}

template <typename T>
__device__ inline void product_with_rows(float (&sums)[64], const uint32_t* a, uint64_t b) {
  if constexpr (std::is_same_v<T, bf16>) {
    TRTSPEC_PRODUCT_ROWS_128("bf16");
  } else {
    TRTSPEC_PRODUCT_ROWS_128("f16");
  }
}

// sums [64 rows, 32, 64 or 128] += a [64, 16], in registers as of mma.m16n8k16, times b [32, 64 or 128, 16] in
// shared memory, its columns summed over.
#define TRTSPEC_PRODUCT_COLUMNS(SIZE, REGS, SUMS, A0, A1, A2, A3, B)                                 \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" SIZE "k16.f32.bf16.bf16 {" REGS "}, {" A0 ", " A1 \
               ", " A2 ", " A3 "}, " B ", 1, 1, 1, 0;"                                               \
               : SUMS                                                                                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

__device__ inline void product_with_columns(float (&sums)[16], const uint32_t (&a)[4], uint64_t b) {
  TRTSPEC_PRODUCT_COLUMNS("32", TRTSPEC_REGS_16, TRTSPEC_SUMS_16(sums, 0), "%16", "%17", "%18", "%19", "%20");
}

__device__ inline void product_with_columns(float (&sums)[32], const uint32_t (&a)[4], uint64_t b) {
  TRTSPEC_PRODUCT_COLUMNS("64", TRTSPEC_REGS_32, TRTSPEC_SUMS_32(sums), "%32", "%33", "%34", "%35", "%36");
}

__device__ inline void product_with_columns(float (&sums)[64], const uint32_t (&a)[4], uint64_t b) {
  TRTSPEC_PRODUCT_COLUMNS("128", TRTSPEC_REGS_64, TRTSPEC_SUMS_64(sums), "%64", "%65", "%66", "%67", "%68");
}

}  // namespace trtspec
