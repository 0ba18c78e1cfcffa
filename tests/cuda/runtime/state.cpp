// Errors, faults, and how much each process has taken of each device.
#include <pthread.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "runtime.h"

namespace stand_in {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local const char *last_call = "";
std::atomic<int> sticky_error{cudaSuccess};
std::atomic<bool> forked_after_use{false};
bool contexts[kDevices];
Process *own_place = nullptr;

bool in_use() {
  for (bool context : contexts)
    if (context) return true;
  return false;
}

/// A child has nothing of its parent's: CUDA does not outlive a fork.
void after_fork() {
  forked_after_use = in_use();
  own_place = nullptr;
}

void leave() {
  if (!own_place) return;
  for (auto &bytes : own_place->bytes) bytes = 0;
  own_place->pid = 0;
}

/// The place of this process in the control file; that of a process that has ended is taken over.
Process &place() {
  Guard guard(mutex());
  if (own_place) return *own_place;
  static bool registered = atexit(leave) == 0 && pthread_atfork(nullptr, nullptr, after_fork) == 0;
  if (!registered) abort();
  for (Process &process : control().processes) {
    int64_t pid = process.pid;
    if (pid && alive(pid)) continue;
    if (!process.pid.compare_exchange_strong(pid, getpid())) continue;
    for (auto &bytes : process.bytes) bytes = 0;
    return *(own_place = &process);
  }
  fprintf(stderr, "stand-in: more than %d processes\n", kProcesses);
  abort();
}

void note_fault(const char *kind, const char *function) {
  if (control().faults++ == 0) control().fault_pid = getpid();
  log("FAULT %s at %s", kind, function);
}

/// What a call fails with once the device is gone: a process that used it sees an error without a name, others none.
cudaError_t lost_error() { return in_use() ? cudaErrorUnknown : cudaErrorNoDevice; }

}  // namespace

std::recursive_mutex &mutex() {
  static auto *mutex = new std::recursive_mutex;  // never destroyed: libraries call until the very end
  return *mutex;
}

cudaError_t fail(cudaError_t error, const char *function) {
  if (error) {
    last_error = error;
    log("ERROR %d %s", static_cast<int>(error), function);
  }
  return error;
}

cudaError_t enter(const char *function) {
  last_call = function;
  Control &state = control();
  int64_t call = ++state.calls;
  if (int64_t chosen = state.lost_at; chosen && call >= chosen && !state.lost.exchange(1)) note_fault("lost", function);
  if (state.lost) return fail(lost_error(), function);
  if (int error = sticky_error) return fail(static_cast<cudaError_t>(error), function);
  if (forked_after_use) return fail(cudaErrorInitializationError, function);
  return cudaSuccess;
}

cudaError_t enter_launch(const char *function) {
  if (cudaError_t error = enter(function)) return error;
  int64_t chosen = control().sticky_at;
  if (++control().launches == chosen) {
    note_fault("sticky", function);
    // A kernel's fault is told by a later call; this one has only queued it.
    sticky_error = cudaErrorIllegalAddress;
  }
  return cudaSuccess;
}

cudaError_t enter_uncapturable(const char *function) {
  if (cudaError_t error = enter(function)) return error;
  if (!capture_forbids()) return cudaSuccess;
  invalidate_captures();
  return fail(cudaErrorStreamCaptureUnsupported, function);
}

bool charge(int device, size_t bytes) {
  place().bytes[physical(device)] += static_cast<int64_t>(bytes);
  if (used_bytes(device) <= device_bytes()) return true;
  release(device, bytes);
  return false;
}

void release(int device, size_t bytes) { place().bytes[physical(device)] -= static_cast<int64_t>(bytes); }

size_t used_bytes(int device) {
  int64_t bytes = 0;
  for (Process &process : control().processes) {
    int64_t pid = process.pid;
    if (!pid) break;  // places are filled from the first on, and only a process's end makes a gap
    if (pid == getpid() || alive(pid)) bytes += process.bytes[physical(device)];
  }
  return static_cast<size_t>(bytes);
}

bool has_context(int device) { return contexts[device] && !forked_after_use; }

bool ensure_context(int device) {
  Guard guard(mutex());
  if (contexts[device]) return true;
  static const size_t bytes = static_cast<size_t>(atoll(setting("CONTEXT_MIB", "300"))) << 20;
  if (!charge(device, bytes)) return false;
  contexts[device] = true;
  log("context on device %d by %s", physical(device), last_call);
  return true;
}

}  // namespace stand_in

using namespace stand_in;

/// Of our own: what the driver's library asks.
EXPORT int cudaStandInHasContext(int device) { return has_context(device); }

/// What NVML's library reads.
EXPORT Control *cudaStandInControl() { return &control(); }

EXPORT cudaError_t cudaGetLastError() {
  if (int error = sticky_error) return static_cast<cudaError_t>(error);
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

EXPORT cudaError_t cudaPeekAtLastError() {
  if (int error = sticky_error) return static_cast<cudaError_t>(error);
  return last_error;
}

namespace {
struct ErrorText {
  cudaError_t error;
  const char *name;
  const char *text;
};

// Those that the runtime gives, in CUDA's words.
const ErrorText kErrors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorIllegalState, "cudaErrorIllegalState",
     "the operation cannot be performed in the present state"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};
}  // namespace

EXPORT const char *cudaGetErrorName(cudaError_t error) {
  for (const auto &known : kErrors)
    if (known.error == error) return known.name;
  return "unrecognized error code";
}

EXPORT const char *cudaGetErrorString(cudaError_t error) {
  for (const auto &known : kErrors)
    if (known.error == error) return known.text;
  return "unrecognized error code";
}
