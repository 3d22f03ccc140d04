// Acceptance, drafts and what ranks exchange, as Python sees them.
#include "bindings.cuh"

namespace {

using namespace bindings;

// Calls `run` with a value of the logits' element type.
template <typename Run>
void by_type(const TensorView& logits, Run run) {
  const DLDataType type = logits.dtype();
  if (type.code == kDLBfloat) {
    check(run(trtspec::bf16()));
  } else if (type.bits == 16) {
    check(run(trtspec::half_t()));
  } else {
    check(type.code == kDLFloat && type.bits == 32, "float32, bfloat16 or float16");
    check(run(float()));
  }
}

// What this rank knows of all ranks' memory: [4 + n] int64 on the host, as `PeerMemory.handle`.
trtspec::Peers peers_of(const TensorView& handle) {
  const int64_t* values = static_cast<const int64_t*>(handle.data_ptr());
  trtspec::Peers peers = {};
  peers.rank = static_cast<int>(values[0]), peers.size = static_cast<int>(values[1]);
  peers.part_packets = values[2];
  peers.state = reinterpret_cast<trtspec::ExchangeState*>(values[3]);
  check(peers.size <= trtspec::kMaxRanks && handle.size(0) == 4 + peers.size, "at most 16 ranks");
  for (int r = 0; r < peers.size; ++r) peers.memory[r] = reinterpret_cast<uint4*>(values[4 + r]);
  return peers;
}

trtspec::CollectiveParams collective(const TensorView& x, const TensorView& handle,
                                     const TensorView& out) {
  const int64_t bytes = x.numel() * x.dtype().bits / 8;
  const trtspec::Peers peers = peers_of(handle);
  check(is_dense(x) && is_dense(out) && bytes % 16 == 0, "16 bytes at a time, in one piece");
  check(is_aligned(x.data_ptr()) && is_aligned(out.data_ptr()), "16 bytes must be aligned");
  check(bytes / 16 <= peers.part_packets, "more than the ranks' memory holds");
  return {peers, static_cast<const uint4*>(x.data_ptr()), static_cast<uint4*>(out.data_ptr()),
          static_cast<int>(bytes / 16)};
}

// out may be x.
void all_reduce(TensorView x, TensorView handle, TensorView out) {
  const trtspec::CollectiveParams p = collective(x, handle, out);
  check(out.numel() == x.numel(), "room for the sum");
  if (p.packets == 0) return;
  by_type(x, [&](auto type) {
    return trtspec::launch_all_reduce<decltype(type)>(p, stream_of(x));
  });
}

void all_gather(TensorView x, TensorView handle, TensorView out) {
  const trtspec::CollectiveParams p = collective(x, handle, out);
  check(out.numel() == x.numel() * p.peers.size, "room for all parts");
  if (p.packets > 0) check(trtspec::launch_all_gather(p, stream_of(x)));
}

// Logits of which every rank has a part: `handle` and the part's first index.
struct Ranks {
  const Optional<TensorView>& handle;
  int64_t first_index;
};

// partial [R, chunks, 5] and tickets [>= B] int32.
trtspec::ChooseParams chooser(const TensorView& logits, int num_contexts, int rows,
                              const TensorView& partial, const TensorView& tickets,
                              const Ranks& ranks) {
  const int count = static_cast<int>(logits.size(0)), chunks = static_cast<int>(partial.size(1));
  check(chunks <= trtspec::kMaxChunks && rows <= trtspec::kMaxRowsPerRequest, "too many rows");
  check(partial.size(0) >= count && sizeof(trtspec::ChunkBest) == 20, "room for partial results");
  check(tickets.size(0) >= num_contexts + (count - num_contexts) / rows, "a ticket per request");
  check(is_dense(logits, 1), "logits must have rows in one piece");
  trtspec::ChooseParams p = {logits.data_ptr(), logits.stride(0), static_cast<int>(logits.size(1)),
                             num_contexts, rows, chunks,
                             static_cast<trtspec::ChunkBest*>(partial.data_ptr()),
                             static_cast<int*>(tickets.data_ptr())};
  if (ranks.handle.has_value()) {
    check(count <= trtspec::kMaxRowsOverRanks, "too many rows for all blocks to run at once");
    p.peers = peers_of(ranks.handle.value());
    check(count <= p.peers.part_packets, "more rows than the ranks' memory holds");
    p.first_index = static_cast<int>(ranks.first_index);
  }
  return p;
}

void accept_greedy(TensorView logits, TensorView drafts, int64_t num_contexts, int64_t forced_len,
                   Optional<TensorView> deltas, Optional<TensorView> slots, int64_t top_k,
                   int64_t end_token, Optional<TensorView> handle, int64_t first_index,
                   TensorView partial, TensorView tickets, TensorView tokens, TensorView lens,
                   TensorView num_accepted_drafts, TensorView bad) {
  const int num_rows = static_cast<int>(logits.size(0));
  if (num_rows == 0) return;
  trtspec::AcceptParams p = {};
  const int rows = static_cast<int>(drafts.size(1)) + 1;
  p.choose = chooser(logits, static_cast<int>(num_contexts), rows, partial, tickets,
                     {handle, first_index});
  check(is_dense(drafts, 1), "drafts must have rows in one piece");
  p.drafts = static_cast<const int*>(drafts.data_ptr()), p.draft_stride = drafts.stride(0);
  p.width = static_cast<int>(tokens.size(1)), p.forced_len = static_cast<int>(forced_len);
  check(p.width >= rows && is_dense(tokens), "room for the tokens");
  p.tokens = static_cast<int*>(tokens.data_ptr()), p.lens = static_cast<int*>(lens.data_ptr());
  p.num_accepted_drafts = static_cast<int*>(num_accepted_drafts.data_ptr());
  p.bad = static_cast<bool*>(bad.data_ptr());
  p.deltas = static_cast<float*>(data(deltas));
  p.slots = static_cast<const int64_t*>(data(slots));
  p.top_k = static_cast<int>(top_k), p.end_token = static_cast<int>(end_token);
  check(p.deltas == nullptr || !handle.has_value(), "relaxed acceptance needs all logits");
  by_type(logits, [&](auto type) {
    return trtspec::launch_accept<decltype(type)>(p, num_rows, stream_of(logits));
  });
}

void choose_drafts(TensorView logits, Optional<TensorView> d2t, Optional<TensorView> handle,
                   int64_t first_index, TensorView partial, TensorView tickets,
                   TensorView tokens) {
  const int num_rows = static_cast<int>(logits.size(0));
  if (num_rows == 0) return;
  const trtspec::DraftParams p = {chooser(logits, 0, 1, partial, tickets, {handle, first_index}),
                                  static_cast<const int64_t*>(data(d2t)),
                                  static_cast<int*>(tokens.data_ptr())};
  by_type(logits, [&](auto type) {
    return trtspec::launch_choose<decltype(type)>(p, num_rows, stream_of(logits));
  });
}

// logits [P * B, Vd], before [B] int32, taken [P, B] int32. memory: int64, zeros at first; a state, then
// [2, kWalkRequests, blocks]. chunk: entries of a block.
void walk_markov(TensorView logits, TensorView before, TensorView w1, TensorView w2,
                 Optional<TensorView> d2t, int64_t chunk, TensorView memory, TensorView taken) {
  trtspec::WalkParams p = {};
  p.logits = logits.data_ptr(), p.row_stride = logits.stride(0);
  p.before = static_cast<const int*>(before.data_ptr()), p.before_stride = before.stride(0);
  p.w1 = w1.data_ptr(), p.w2 = w2.data_ptr(), p.d2t = static_cast<const int64_t*>(data(d2t));
  p.taken = static_cast<int*>(taken.data_ptr());
  p.state = static_cast<trtspec::WalkState*>(memory.data_ptr());
  p.places = static_cast<uint64_t*>(memory.data_ptr()) + 1;
  p.count = static_cast<int>(taken.size(0)), p.batch = static_cast<int>(taken.size(1));
  p.tokens = static_cast<int>(w1.size(0)), p.drafts = static_cast<int>(w2.size(0));
  p.chunk = static_cast<int>(chunk);
  const int blocks = static_cast<int>((memory.size(0) - 1) / (2 * trtspec::kWalkRequests));
  check(is_dense(logits, 1) && is_dense(w1) && is_dense(w2) && is_dense(taken), "rows in one piece");
  check(logits.size(0) == taken.numel() && logits.size(1) == p.drafts, "logits of each draft");
  check(before.size(0) == p.batch && p.batch <= trtspec::kWalkRequests, "at most 8 requests");
  check(w1.size(1) == w2.size(1) && p.drafts < static_cast<int>(trtspec::kNoIndex), "two tables");
  check(blocks > 0 && blocks <= trtspec::kMaxWalkBlocks, "room for what blocks send");
  check(chunk % 16 == 0 && chunk * blocks >= p.drafts, "blocks have all entries");
  if (taken.numel() == 0) return;
  by_half_type(logits, [&](auto type) {
    return trtspec::launch_walk<decltype(type)>(p, static_cast<int>(w1.size(1)), blocks,
                                                stream_of(logits));
  });
}

void update_window(TensorView hidden, TensorView ids, TensorView last, TensorView slots,
                   TensorView window_hidden, TensorView window_ids) {
  const int size = static_cast<int>(hidden.size(1)) * hidden.dtype().bits / 8;
  const int width = static_cast<int>(window_ids.size(1)), count = static_cast<int>(last.size(0));
  if (width == 0 || count == 0) return;
  check(is_dense(hidden) && is_dense(window_hidden) && is_dense(window_ids), "contiguous windows");
  check(trtspec::launch_window(
      {hidden.data_ptr(), static_cast<const int64_t*>(ids.data_ptr()),
       static_cast<const int64_t*>(last.data_ptr()), static_cast<const int64_t*>(slots.data_ptr()),
       window_hidden.data_ptr(), static_cast<int64_t*>(window_ids.data_ptr()), size, width},
      count, stream_of(hidden)));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(accept_greedy, accept_greedy);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(choose_drafts, choose_drafts);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(walk_markov, walk_markov);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(update_window, update_window);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(all_reduce, all_reduce);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(all_gather, all_gather);
