// Reads operations from standard input, has PyTorch's caching allocator do them, and prints what it did.
//   m SIZE STREAM    malloc; the n-th is number n, from 0        f NUMBER   free (of one that failed: nothing)
//   e   empty_cache     p   reset peak statistics     s   print statistics     n   print the segments
#include <c10/cuda/CUDACachingAllocator.h>

#include <cinttypes>
#include <cstdio>
#include <vector>

namespace cca = c10::cuda::CUDACachingAllocator;
using c10::CachingAllocator::Stat;

static void print(const char* name, const char* part, const Stat& s) {
  std::printf("S %s%s %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 "\n", name, part, s.current, s.peak, s.allocated,
              s.freed);
}
static void print(const char* name, const c10::CachingAllocator::StatArray& stats) {
  const char* parts[] = {".all", ".small_pool", ".large_pool"};
  for (int i = 0; i < 3; i++) print(name, parts[i], stats[i]);
}
static void print_stats() {
  auto s = cca::getDeviceStats(0);
  print("allocation", s.allocation), print("segment", s.segment), print("active", s.active);
  print("inactive_split", s.inactive_split), print("allocated_bytes", s.allocated_bytes);
  print("reserved_bytes", s.reserved_bytes), print("active_bytes", s.active_bytes);
  print("inactive_split_bytes", s.inactive_split_bytes), print("requested_bytes", s.requested_bytes);
  print("oversize_allocations", "", s.oversize_allocations), print("oversize_segments", "", s.oversize_segments);
  std::printf("C %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 "\n", s.num_alloc_retries, s.num_ooms,
              s.num_sync_all_streams, s.num_device_alloc, s.num_device_free);
}

int main() {
  const char* actions[] = {"alloc",       "free_requested", "free_completed", "segment_alloc", "segment_free",
                           "segment_map", "segment_unmap",  "snapshot",       "oom"};
  cca::init(1);
  cca::get()->attachAllocatorTraceTracker([&](const c10::CachingDeviceAllocator::TraceEntry& t) {
    std::printf("T %s %zu %zu %zu\n", actions[t.action_], (size_t)t.addr_, (size_t)t.size_, (size_t)t.stream_);
  });
  std::vector<void*> pointers;
  size_t a, b;
  char operation;
  std::printf("N\n");
  while (std::scanf(" %c", &operation) == 1) {
    if (operation == 'm' && std::scanf("%zu %zu", &a, &b) == 2) {
      pointers.push_back(nullptr);
      try {
        pointers.back() = cca::raw_alloc_with_stream(a, (cudaStream_t)b);
      } catch (const c10::OutOfMemoryError&) {
      }
    } else if (operation == 'f' && std::scanf("%zu", &a) == 1) {
      if (pointers.at(a)) cca::raw_delete(pointers[a]);
    } else if (operation == 'e') {
      cca::emptyCache();
    } else if (operation == 'p') {
      cca::resetPeakStats(0);
    } else if (operation == 's') {
      print_stats();
    } else if (operation == 'n') {
      for (auto& segment : cca::snapshot().segments) {
        std::printf("G %zu %zu %zu %zu %zu %zu %d %d\n", segment.address, segment.total_size, segment.allocated_size,
                    segment.active_size, segment.requested_size, (size_t)segment.stream, segment.is_large,
                    segment.is_expandable);
        for (auto& block : segment.blocks)
          std::printf("B %zu %zu %d %d\n", block.size, block.requested_size, block.allocated, block.active);
      }
    } else {
      return 2;
    }
  }
}
