// Events: the host's clock at the moment of the record, which is when all earlier work is done.
#include <chrono>

#include "runtime.h"

using namespace stand_in;

namespace {
struct Event {
  int device;
  bool timed;
  bool recorded;
  std::chrono::steady_clock::time_point time;
};

Event *event_of(cudaEvent_t handle) { return reinterpret_cast<Event *>(handle); }

cudaError_t create(cudaEvent_t *handle, unsigned flags, const char *function) {
  if (cudaError_t error = enter(function)) return error;
  if (!ensure_context(current_device())) return fail(cudaErrorMemoryAllocation, function);
  *handle = reinterpret_cast<cudaEvent_t>(new Event{current_device(), !(flags & cudaEventDisableTiming), false, {}});
  return cudaSuccess;
}
}  // namespace

EXPORT cudaError_t cudaEventCreate(cudaEvent_t *event) { return create(event, 0, __func__); }

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  return create(event, flags, __func__);
}

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event_of(event);
  CALL();
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  CALL();
  Event *event = event_of(handle);
  if (event->device != stream_of(stream)->device) return fail(cudaErrorInvalidResourceHandle, __func__);
  event->time = std::chrono::steady_clock::now();
  event->recorded = true;
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t) {
  CALL();
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t) {
  CALL();
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t first, cudaEvent_t second) {
  CALL();
  Event *start = event_of(first), *end = event_of(second);
  for (Event *event : {start, end})
    if (!event->recorded || !event->timed) return fail(cudaErrorInvalidResourceHandle, __func__);
  *milliseconds = std::chrono::duration<float, std::milli>(end->time - start->time).count();
  return cudaSuccess;
}
