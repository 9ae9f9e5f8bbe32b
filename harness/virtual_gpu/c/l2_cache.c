// What the second-level cache of a device still holds of the tensors that operators touch: the same account as
// harness/simulate/l2_cache.py keeps for a simulated device, which says why it is so. An operator's results are known
// when it has returned, and its kernels are put on a stream before: they take what the call before took for its results.
#include <math.h>

#include "clock.h"
#include "virtual_gpu.h"

#define MAX_DEVICES 64
enum { PLACES = 14, REST = 32 - PLACES };  // bits of a place's number: far more numbers than the cache holds tensors
static double room, evicted;
typedef struct {
  double touched, filled, dirty;  // bytes: all that was touched; of late brought into the cache; and written there
} Cache;
static Cache caches[MAX_DEVICES];
static struct {
  uint64_t rest : REST, touched : 64 - REST;  // the place's other bits; by its device when it was touched last, in UNITs
} last[1 << PLACES];                           // of two places with the same number the older is forgotten
enum { UNIT = 64 };                            // bytes

// Called from Python: the bytes that may be touched before anything is evicted, and by how much more is evicted than is
// touched beyond them.
void virtual_gpu_set_cache(double room_bytes, double more) { room = room_bytes, evicted = more; }

static double least(double a, double b) { return a < b ? a : b; }
static Place number_of(Place place) { return place >> REST; }
static Place rest_of(Place place) { return place & ((1 << REST) - 1); }
// The bytes of a tensor that the cache does not hold when its device has touched `total` bytes.
void virtual_gpu_will_touch(Place place) { __builtin_prefetch(&last[number_of(place)]); }
static double missed(Place place, double bytes, double total) {
  Place number = number_of(place);
  int is_it = last[number].rest == rest_of(place) && last[number].touched;
  double distance = is_it ? total - (double)last[number].touched * UNIT : INFINITY;
  return distance > room ? bytes * least(1, (1 + evicted) * (1 - room / distance)) : 0;
}
static void keep(Place place, double total) {
  Place number = number_of(place);
  last[number].rest = rest_of(place), last[number].touched = total / UNIT;
}
// exp(-x), by a Padé approximant to seven digits: libm's reads a table, which the program between two calls has driven out
// of the processor's cache.
static double decay(double x) {
  if (x > 40) return 0;
  int squared = 0;
  for (; x > 0.5; x /= 2) squared++;
  double result = (120 - x * (60 - x * (12 - x))) / (120 + x * (60 + x * (12 + x)));
  while (squared--) result *= result;
  return result;
}

double virtual_gpu_missed_share(int slot, const Touch* touches, const Place* places, int count, Results results) {
  double moved = results.bytes, read = 0, filled = results.filled, dirty = results.filled, waits = 0;
  Cache* cache = &caches[slot % MAX_DEVICES];
  double total = cache->touched + results.bytes;
  for (int i = 0; i < count; i++) total += touches[i].bytes;
  cache->touched = total;
  for (int i = 0; i < count; i++) {
    double each = missed(places[i], touches[i].bytes, total);
    moved += touches[i].bytes * (touches[i].is_read + touches[i].is_written);
    filled += each;
    if (touches[i].is_read) read += each;
    if (touches[i].is_written) dirty += each;
  }
  for (int i = 0; i < count; i++) keep(places[i], total);
  if (filled && room) {
    double stays = decay(filled / room);
    cache->filled = cache->filled * stays + filled;
    cache->dirty = cache->dirty * stays + dirty;
    waits = read + filled * cache->dirty / cache->filled;
  } else if (filled) {
    waits = moved;
  }
  return moved ? least(1, waits / moved) : 0;
}
Results virtual_gpu_results(int slot, const Touch* touches, const Place* places, int count) {
  double bytes = 0, filled = 0, total = caches[slot % MAX_DEVICES].touched;
  for (int i = 0; i < count; i++) {
    bytes += touches[i].bytes;
    filled += missed(places[i], touches[i].bytes, total);
  }
  for (int i = 0; i < count; i++) keep(places[i], total);
  return (Results){bytes, filled};
}
