// What the parts of the runtime share: the state of the calling thread and process, errors, and the faults that are made.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <mutex>
#include <vector>

#include "control.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace stand_in {

/// What a stream is given to do, and whether a CUDA graph replays it.
using Work = std::function<void(bool replayed)>;

/// A stream of a device. The two default streams (handles 0 to 2) have one of their own for each device.
struct Stream {
  int device;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  unsigned long long capture_id = 0;
  std::vector<Work> nodes;  // what the capture has recorded
};

/// Guards all that threads share.
std::recursive_mutex &mutex();
using Guard = std::lock_guard<std::recursive_mutex>;

/// The device of the calling thread.
int &current_device();

/// Count a call, and return the error that it must fail with: of a fault, of a fork after CUDA was used, else none.
cudaError_t enter(const char *function);

/// Count a launch; from the chosen one on, the process has a sticky error.
cudaError_t enter_launch(const char *function);

/// Begin a call that CUDA refuses while a stream is captured; the refusal makes the capture invalid.
cudaError_t enter_uncapturable(const char *function);

/// Remember an error as the thread's last one, write it to the log, and return it.
cudaError_t fail(cudaError_t error, const char *function);

/// Resolve a handle; 0 to 2 are the default streams of the thread's device.
Stream *stream_of(cudaStream_t handle);

/// Do work at once, or record it where the stream is captured.
void perform(cudaStream_t handle, Work work);

/// Whether the calling thread may not make a call that is not permitted during a capture.
bool capture_forbids();

/// Make invalid whatever is captured now.
void invalidate_captures();

/// Take bytes of a device for this process, or return false where it has not as many.
bool charge(int device, size_t bytes);

/// Give bytes of a device back.
void release(int device, size_t bytes);

/// What all living processes have taken of a device, in bytes.
size_t used_bytes(int device);

/// Take what a context costs, at the first call that needs one; false where the device has no room for it.
bool ensure_context(int device);

/// Whether this process has a context on a device.
bool has_context(int device);

}  // namespace stand_in

/// Return the error that this call must fail with.
#define CALL()                                                              \
  do {                                                                      \
    if (cudaError_t error = stand_in::enter(__func__)) return error;        \
  } while (0)
#define CALL_UNCAPTURABLE()                                                       \
  do {                                                                            \
    if (cudaError_t error = stand_in::enter_uncapturable(__func__)) return error; \
  } while (0)
