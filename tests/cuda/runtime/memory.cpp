// Memory: the host's, counted per device and process, and never more than the device has.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <map>

#include "runtime.h"

using namespace stand_in;

namespace {
struct Block {
  size_t bytes;
  int device;
};

constexpr size_t kAlignment = 512;  // of cudaMalloc

std::map<char *, Block> &blocks() {
  static auto *blocks = new std::map<char *, Block>;
  return *blocks;
}

std::map<void *, size_t> &pinned() {
  static auto *pinned = new std::map<void *, size_t>;
  return *pinned;
}

cudaError_t take(void **address, size_t size, const char *function) {
  *address = nullptr;
  int64_t chosen = control().out_of_memory_at;
  int64_t count = ++control().allocations;
  if (chosen && count >= chosen && count <= chosen + control().out_of_memory_more) {
    control().faults++;
    log("FAULT out of memory at %s of %zu bytes", function, size);
    return fail(cudaErrorMemoryAllocation, function);
  }
  if (!size) return cudaSuccess;
  Guard guard(mutex());
  int device = current_device();
  size_t bytes = (size + kAlignment - 1) / kAlignment * kAlignment;
  if (!ensure_context(device) || !charge(device, bytes)) return fail(cudaErrorMemoryAllocation, function);
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (memory == MAP_FAILED) {
    release(device, bytes);
    return fail(cudaErrorMemoryAllocation, function);
  }
  blocks()[static_cast<char *>(memory)] = {bytes, device};
  *address = memory;
  return cudaSuccess;
}

cudaError_t give_back(void *address, const char *function) {
  if (!address) return cudaSuccess;
  Guard guard(mutex());
  auto place = blocks().find(static_cast<char *>(address));
  if (place == blocks().end()) return fail(cudaErrorInvalidValue, function);
  release(place->second.device, place->second.bytes);
  munmap(address, place->second.bytes);
  blocks().erase(place);
  return cudaSuccess;
}
}  // namespace

EXPORT cudaError_t cudaMalloc(void **address, size_t size) {
  CALL_UNCAPTURABLE();
  return take(address, size, __func__);
}

EXPORT cudaError_t cudaFree(void *address) {
  CALL_UNCAPTURABLE();
  if (!address && !ensure_context(current_device())) return fail(cudaErrorMemoryAllocation, __func__);
  return give_back(address, __func__);
}

EXPORT cudaError_t cudaMallocAsync(void **address, size_t size, cudaStream_t) {
  CALL();
  return take(address, size, __func__);
}

EXPORT cudaError_t cudaMallocFromPoolAsync(void **address, size_t size, cudaMemPool_t, cudaStream_t) {
  CALL();
  return take(address, size, __func__);
}

EXPORT cudaError_t cudaFreeAsync(void *address, cudaStream_t) {
  CALL();
  return give_back(address, __func__);
}

EXPORT cudaError_t cudaHostAlloc(void **address, size_t size, unsigned) {
  CALL();
  *address = calloc(1, size ? size : 1);
  Guard guard(mutex());
  pinned()[*address] = size;
  return cudaSuccess;
}

EXPORT cudaError_t cudaMallocHost(void **address, size_t size) { return cudaHostAlloc(address, size, 0); }

EXPORT cudaError_t cudaFreeHost(void *address) {
  Guard guard(mutex());
  if (pinned().erase(address)) free(address);
  CALL();
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostRegister(void *, size_t, unsigned) {
  CALL();
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostUnregister(void *) {
  CALL();
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
  CALL();
  if (!ensure_context(current_device())) return fail(cudaErrorMemoryAllocation, __func__);
  *total_bytes = device_bytes();
  *free_bytes = device_bytes() - used_bytes(current_device());
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind) {
  CALL_UNCAPTURABLE();
  if (size) memmove(to, from, size);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  CALL();
  if (size) perform(stream, [=](bool) { memmove(to, from, size); });
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t size, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, stream);
}

EXPORT cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                     size_t height, cudaMemcpyKind, cudaStream_t stream) {
  CALL();
  perform(stream, [=](bool) {
    for (size_t row = 0; row < height; row++)
      memmove(static_cast<char *>(to) + row * to_pitch, static_cast<const char *>(from) + row * from_pitch, width);
  });
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemset(void *to, int value, size_t size) {
  CALL_UNCAPTURABLE();
  if (size) memset(to, value, size);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) {
  CALL();
  if (size) perform(stream, [=](bool) { memset(to, value, size); });
  return cudaSuccess;
}

// Constants of kernels: nothing reads them, as kernels do nothing.

EXPORT cudaError_t cudaMemcpyFromSymbol(void *, const void *, size_t, size_t, cudaMemcpyKind) {
  CALL();
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyToSymbol(const void *, const void *, size_t, size_t, cudaMemcpyKind) {
  CALL();
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetSymbolAddress(void **address, const void *) {
  CALL();
  static char room[1 << 16];
  *address = room;
  return cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *address) {
  CALL();
  memset(attributes, 0, sizeof *attributes);
  attributes->device = current_device();
  attributes->hostPointer = const_cast<void *>(address);
  Guard guard(mutex());
  auto *wanted = const_cast<char *>(static_cast<const char *>(address));
  auto next = blocks().upper_bound(wanted);
  if (next != blocks().begin()) {
    auto &[start, block] = *std::prev(next);
    if (wanted < start + block.bytes) {
      attributes->type = cudaMemoryTypeDevice;
      attributes->device = block.device;
      attributes->devicePointer = wanted;
      attributes->hostPointer = nullptr;
      return cudaSuccess;
    }
  }
  bool is_pinned = pinned().count(wanted) != 0;
  attributes->type = is_pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}

// Pools: one for all, which holds nothing back.

namespace {
char pool;
cudaMemPool_t the_pool() { return reinterpret_cast<cudaMemPool_t>(&pool); }
}  // namespace

EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *made, int) {
  CALL();
  *made = the_pool();
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemPoolCreate(cudaMemPool_t *made, const cudaMemPoolProps *) {
  CALL();
  *made = the_pool();
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemPoolDestroy(cudaMemPool_t) {
  CALL();
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *value) {
  CALL();
  *static_cast<uint64_t *>(value) = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *) {
  CALL();
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc *, size_t) {
  CALL();
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) {
  CALL();
  return cudaSuccess;
}
