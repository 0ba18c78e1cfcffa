// libnvidia-ml: the state of devices, as nvidia-ml-py and torch ask for it. Memory and processes are those of the control
// file; clocks fall when the control file says so. The layouts are those of nvml.h, which no package of
// PyPI has; tests/cuda/test_nvml.py compares them with those of nvidia-ml-py.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "control.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace stand_in;

namespace {

enum Result {
  kSuccess = 0,
  kInvalidArgument = 2,
  kNotSupported = 3,
  kNotFound = 6,
  kInsufficientSize = 7,
  kLost = 15,
};

struct Memory {
  unsigned long long total, free, used;
};

struct Utilization {
  unsigned gpu, memory;
};

/// Of nvmlDeviceGetComputeRunningProcesses, which torch calls; versions 2 and 3 have the slice (MIG), too.
struct ProcessV1 {
  unsigned pid;
  unsigned long long used;
};

struct ProcessV2 {
  unsigned pid;
  unsigned long long used;
  unsigned gpu_instance, compute_instance;
};

constexpr int kSm = 1;
constexpr unsigned kSmMhz = 2520, kSlowMhz = 1500, kIdleMhz = 210, kMemoryMhz = 10501;
constexpr unsigned long long kIdle = 0x1, kPowerLimit = 0x4, kHiddenBytes = ~0ULL;
constexpr int kSlices = 7;

/// A device, or the slice of it that this process has.
struct Handle {
  int device;
  bool slice;
};
Handle handles[2][kDevices];

bool divided() {
  static bool mig = atoi(setting("MIG", "0"));
  return mig;
}

/// What the processes share; without a control file it is known to the runtime of this process alone.
Control &shared() {
  static auto find = reinterpret_cast<Control *(*)()>(dlsym(RTLD_DEFAULT, "cudaStandInControl"));
  return find ? *find() : control();
}

Result give(int device, bool slice, Handle **handle) {
  if (device < 0 || device >= all_devices()) return kNotFound;
  handles[slice][device] = {device, slice};
  *handle = &handles[slice][device];
  return kSuccess;
}

/// Call a function with each living process that has a context on a device.
template <typename Function>
void each_process(int device, Function &&function) {
  for (Process &process : shared().processes) {
    int64_t pid = process.pid, bytes = process.bytes[device];
    if (pid && bytes && alive(pid)) function(pid, bytes);
  }
}

unsigned long long used(int device) {
  unsigned long long sum = 0;
  each_process(device, [&](int64_t, int64_t bytes) { sum += bytes; });
  return sum;
}

bool slowed() {
  int64_t from = shared().slow_at;
  return from && shared().looks >= from;
}

/// The number of a process for the driver: in a container it may be the host's.
unsigned number_of(int64_t pid) {
  static int64_t more = atoll(setting("PID_OFFSET", "0"));
  return static_cast<unsigned>(pid + more);
}

/// Drivers give 0 for processes of containers, and a value for "not available" where the system manages memory (WDDM).
unsigned long long told(int64_t bytes) {
  static const char *how = setting("PROCESS_BYTES", "real");
  return !strcmp(how, "zero") ? 0 : !strcmp(how, "hidden") ? kHiddenBytes : bytes;
}

template <typename Entry>
Result list_processes(const Handle *handle, unsigned *count, Entry *entries) {
  unsigned room = entries ? *count : 0, found = 0;
  each_process(handle->device, [&](int64_t pid, int64_t bytes) {
    if (found < room) {
      entries[found] = {};
      entries[found].pid = number_of(pid);
      entries[found].used = told(bytes);
    }
    ++found;
  });
  *count = found;
  return found > room ? kInsufficientSize : kSuccess;
}

Result write(char *text, unsigned length, const char *value) {
  if (strlen(value) >= length) return kInsufficientSize;
  strcpy(text, value);
  return kSuccess;
}

}  // namespace

/// Begin a question about a device, which a lost one does not answer.
#define ASK(handle)                       \
  do {                                    \
    if (!(handle)) return kInvalidArgument; \
    if (shared().lost) return kLost;      \
  } while (0)

EXPORT int nvmlInitWithFlags(unsigned) { return kSuccess; }
EXPORT int nvmlInit() { return kSuccess; }
EXPORT int nvmlInit_v2() { return kSuccess; }
EXPORT int nvmlShutdown() { return kSuccess; }

EXPORT const char *nvmlErrorString(int result) {
  switch (result) {
    case kSuccess: return "Success";
    case kInvalidArgument: return "Invalid Argument";
    case kNotSupported: return "Not Supported";
    case kNotFound: return "Not Found";
    case kInsufficientSize: return "Insufficient Size";
    case kLost: return "GPU is lost";
    default: return "Unknown Error";
  }
}

EXPORT int nvmlSystemGetDriverVersion(char *text, unsigned length) {
  return write(text, length, driver_version() >= 13000 ? "580.65.06" : "570.124.06");
}

EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version) {
  *version = driver_version();
  return kSuccess;
}

/// All that the machine has: CUDA_VISIBLE_DEVICES is none of NVML's.
EXPORT int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = all_devices();
  return kSuccess;
}

/// The bus is that of cuDeviceGetPCIBusId (driver.cpp).
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *address, Handle **handle) {
  unsigned domain, bus;
  if (sscanf(address, "%x:%x:", &domain, &bus) != 2) return kInvalidArgument;
  if (shared().lost) return kLost;
  return give(static_cast<int>(bus) - 1, false, handle);
}

/// A slice's, as the driver writes it: the first byte of cuDeviceGetUuid_v2 is the device's number.
EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, Handle **handle) {
  unsigned number;
  if (!divided() || sscanf(uuid, "MIG-%2x", &number) != 1) return kNotFound;
  return give(static_cast<int>(number) - 1, true, handle);
}

EXPORT int nvmlDeviceGetMigMode(Handle *handle, unsigned *current, unsigned *pending) {
  ASK(handle);
  *current = *pending = divided();
  return kSuccess;
}

EXPORT int nvmlDeviceGetName(Handle *handle, char *name, unsigned length) {
  ASK(handle);
  char text[64];
  snprintf(text, sizeof text, "Stand-in without a GPU, sm%d", compute_capability());
  return write(name, length, text);
}

EXPORT int nvmlDeviceGetCudaComputeCapability(Handle *handle, int *major, int *minor) {
  ASK(handle);
  *major = compute_capability() / 10;
  *minor = compute_capability() % 10;
  return kSuccess;
}

EXPORT int nvmlDeviceGetMemoryInfo(Handle *handle, Memory *memory) {
  ASK(handle);
  memory->used = used(handle->device);
  memory->total = device_bytes() * (divided() && !handle->slice ? kSlices : 1);
  memory->free = memory->total - memory->used;
  return kSuccess;
}

EXPORT int nvmlDeviceGetComputeRunningProcesses(Handle *handle, unsigned *count, ProcessV1 *entries) {
  ASK(handle);
  return list_processes(handle, count, entries);
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(Handle *handle, unsigned *count, ProcessV2 *entries) {
  ASK(handle);
  return list_processes(handle, count, entries);
}

EXPORT int nvmlDeviceGetClockInfo(Handle *handle, int kind, unsigned *mhz) {
  ASK(handle);
  if (kind != kSm) return *mhz = kMemoryMhz, kSuccess;
  bool idle = !used(handle->device);
  if (!idle) ++shared().looks;
  *mhz = idle ? kIdleMhz : slowed() ? kSlowMhz : kSmMhz;
  return kSuccess;
}

EXPORT int nvmlDeviceGetMaxClockInfo(Handle *handle, int kind, unsigned *mhz) {
  ASK(handle);
  *mhz = kind == kSm ? kSmMhz : kMemoryMhz;
  return kSuccess;
}

EXPORT int nvmlDeviceGetCurrentClocksEventReasons(Handle *handle, unsigned long long *reasons) {
  ASK(handle);
  *reasons = !used(handle->device) ? kIdle : slowed() ? kPowerLimit : 0;
  return kSuccess;
}

EXPORT int nvmlDeviceGetUtilizationRates(Handle *handle, Utilization *rates) {
  ASK(handle);
  if (divided()) return kNotSupported;
  *rates = {0, 0};
  return kSuccess;
}

EXPORT int nvmlDeviceGetComputeMode(Handle *handle, int *mode) {
  ASK(handle);
  *mode = atoi(setting("COMPUTE_MODE", "0"));
  return kSuccess;
}

/// A number that never changes.
#define ANSWER(function, number, ...)                             \
  EXPORT int function(Handle *handle, ##__VA_ARGS__, unsigned *value) { \
    ASK(handle);                                                  \
    *value = number;                                              \
    return kSuccess;                                              \
  }
#define REFUSE(function) \
  EXPORT int function(Handle *) { return kNotSupported; }

ANSWER(nvmlDeviceGetTemperature, 45, int)
ANSWER(nvmlDeviceGetPowerUsage, 60'000)
ANSWER(nvmlDeviceGetEnforcedPowerLimit, 450'000)
ANSWER(nvmlDeviceGetPerformanceState, 2)
ANSWER(nvmlDeviceGetPersistenceMode, 1)
// A GeForce does not tell for how long it was held back, and has no ECC.
REFUSE(nvmlDeviceGetViolationStatus)
REFUSE(nvmlDeviceGetEccMode)
REFUSE(nvmlDeviceGetNvLinkRemoteDeviceType)
REFUSE(nvmlDeviceGetNvLinkRemotePciInfo_v2)
