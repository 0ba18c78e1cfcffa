// Streams, and their capture as graphs. All work is done when its call returns, so there is never anything to wait for.
#include <set>

#include "runtime.h"

using namespace stand_in;

namespace {
struct Graph {
  std::vector<Work> nodes;
};

std::set<Stream *> &streams() {
  static auto *streams = new std::set<Stream *>;
  return *streams;
}

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
thread_local int captures_of_thread = 0;
std::atomic<int> global_captures{0};

cudaError_t create(cudaStream_t *handle, const char *function) {
  if (cudaError_t error = enter(function)) return error;
  if (!ensure_context(current_device())) return fail(cudaErrorMemoryAllocation, function);
  auto *stream = new Stream{current_device()};
  Guard guard(mutex());
  streams().insert(stream);
  *handle = reinterpret_cast<cudaStream_t>(stream);
  return cudaSuccess;
}

bool is_legacy(cudaStream_t handle) { return reinterpret_cast<size_t>(handle) <= 1; }

/// Waiting for a stream is not permitted while it is captured, and makes the capture invalid.
cudaError_t wait(cudaStream_t handle, const char *function) {
  if (cudaError_t error = enter(function)) return error;
  Stream *stream = stream_of(handle);
  if (stream->capture == cudaStreamCaptureStatusNone) return cudaSuccess;
  stream->capture = cudaStreamCaptureStatusInvalidated;
  return fail(cudaErrorStreamCaptureUnsupported, function);
}
}  // namespace

namespace stand_in {

Stream *stream_of(cudaStream_t handle) {
  static Stream defaults[kDevices];
  if (reinterpret_cast<size_t>(handle) > 2) return reinterpret_cast<Stream *>(handle);
  Stream *stream = &defaults[current_device()];
  stream->device = current_device();
  return stream;
}

void perform(cudaStream_t handle, Work work) {
  Stream *stream = stream_of(handle);
  if (stream->capture == cudaStreamCaptureStatusNone)
    work(false);
  else
    stream->nodes.push_back(std::move(work));
}

bool capture_forbids() {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return false;
  return captures_of_thread > 0 || (thread_mode == cudaStreamCaptureModeGlobal && global_captures > 0);
}

void invalidate_captures() {
  Guard guard(mutex());
  for (Stream *stream : streams())
    if (stream->capture == cudaStreamCaptureStatusActive) stream->capture = cudaStreamCaptureStatusInvalidated;
}

}  // namespace stand_in

EXPORT cudaError_t cudaStreamCreate(cudaStream_t *stream) { return create(stream, __func__); }

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) { return create(stream, __func__); }

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int) {
  return create(stream, __func__);
}

EXPORT cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  {
    Guard guard(mutex());
    auto *stream = reinterpret_cast<Stream *>(handle);
    if (!streams().erase(stream)) return fail(cudaErrorInvalidResourceHandle, __func__);
    delete stream;
  }
  CALL();
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return wait(stream, __func__); }

EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) { return wait(stream, __func__); }

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t, int *priority) {
  CALL();
  *priority = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  CALL();
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void *data, unsigned) {
  CALL();
  callback(stream, cudaSuccess, data);
  return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void *data) {
  CALL();
  function(data);
  return cudaSuccess;
}

// Captures.

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
  std::swap(thread_mode, *mode);
  CALL();
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  CALL();
  if (is_legacy(handle)) return fail(cudaErrorStreamCaptureUnsupported, __func__);
  Stream *stream = stream_of(handle);
  if (stream->capture != cudaStreamCaptureStatusNone) return fail(cudaErrorIllegalState, __func__);
  static std::atomic<unsigned long long> count{0};
  stream->capture = cudaStreamCaptureStatusActive;
  stream->mode = mode;
  stream->nodes.clear();
  stream->capture_id = ++count;
  if (mode != cudaStreamCaptureModeRelaxed) captures_of_thread++;
  if (mode == cudaStreamCaptureModeGlobal) global_captures++;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t, const cudaGraphNode_t *,
                                                 const cudaGraphEdgeData *, size_t, cudaStreamCaptureMode mode) {
  return cudaStreamBeginCapture(stream, mode);
}

EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
  *graph = nullptr;
  Stream *stream = stream_of(handle);
  if (stream->capture == cudaStreamCaptureStatusNone) return fail(cudaErrorIllegalState, __func__);
  bool valid = stream->capture == cudaStreamCaptureStatusActive;
  if (stream->mode != cudaStreamCaptureModeRelaxed) captures_of_thread--;
  if (stream->mode == cudaStreamCaptureModeGlobal) global_captures--;
  stream->capture = cudaStreamCaptureStatusNone;
  CALL();
  if (++control().captures == control().invalid_capture_at) {
    control().faults++;
    valid = false;
  }
  if (!valid) return fail(cudaErrorStreamCaptureInvalidated, __func__);
  *graph = reinterpret_cast<cudaGraph_t>(new Graph{std::move(stream->nodes)});
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
  CALL();
  *status = stream_of(stream)->capture;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph,
                                            const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges,
                                            size_t *count) {
  CALL();
  *status = stream_of(stream)->capture;
  if (id) *id = stream_of(stream)->capture_id;
  if (graph) *graph = nullptr;
  if (dependencies) *dependencies = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t *, const cudaGraphEdgeData *,
                                                       size_t, unsigned) {
  CALL();
  return cudaSuccess;
}

// Graphs: a replay does in turn what was recorded; kernels do nothing there, too.

EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long) {
  CALL();
  *executable = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph *>(graph)));
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph,
                                                 unsigned long long flags) {
  return cudaGraphInstantiate(executable, graph, flags);
}

EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) {
  if (cudaError_t error = enter_launch(__func__)) return error;
  for (const Work &node : reinterpret_cast<Graph *>(executable)->nodes) node(true);
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph *>(graph);
  CALL();
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete reinterpret_cast<Graph *>(executable);
  CALL();
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *, size_t *count) {
  CALL();
  *count = reinterpret_cast<Graph *>(graph)->nodes.size();
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t *, cudaGraphEdgeData *,
                                                size_t *count) {
  CALL();
  *count = 0;
  return cudaSuccess;
}
