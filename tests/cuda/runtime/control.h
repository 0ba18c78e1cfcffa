// What the processes of a run share: the memory that each has taken of each device, counts of calls, and faults to make.
//
// ENGINESMITH_STAND_IN_CONTROL names a file of this layout, which the tests write and read (tests/cuda/control.py).
// Without it each process has a card to itself, and no faults are made.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace stand_in {

constexpr int kDevices = 8;
constexpr int kProcesses = 512;

/// What one process has taken; a process that has ended gives back all of it.
struct Process {
  std::atomic<int64_t> pid;              // 0: a free place
  std::atomic<int64_t> bytes[kDevices];  // allocations and the context
};

struct Control {
  // Counted over all processes.
  std::atomic<int64_t> calls;
  std::atomic<int64_t> allocations;
  std::atomic<int64_t> launches;
  std::atomic<int64_t> captures;
  // The call from which a fault is made; 0 makes none.
  std::atomic<int64_t> out_of_memory_at;    // this allocation fails,
  std::atomic<int64_t> out_of_memory_more;  // and so many after it: torch tries again up to three times
  std::atomic<int64_t> sticky_at;         // from this launch on, all calls of its process fail
  std::atomic<int64_t> lost_at;           // from this call on, the device is gone for all processes
  std::atomic<int64_t> invalid_capture_at;  // this capture of a graph ends without one
  std::atomic<int64_t> wrong_columns;     // products of so many columns are doubled where a graph replays them
  // What came of it.
  std::atomic<int64_t> faults;     // how many calls were the first to fail
  std::atomic<int64_t> fault_pid;  // the process of the first of them
  std::atomic<int64_t> lost;       // 1: the device is gone
  // Clocks, as NVML tells them.
  std::atomic<int64_t> looks;    // how often the clock of a device in use was asked for
  std::atomic<int64_t> slow_at;  // from this look on, a power limit lowers it; 0: never
  Process processes[kProcesses];
};

/// The control file, or memory of this process where none is named.
Control &control();

/// A setting from the environment: ENGINESMITH_STAND_IN_<name>.
const char *setting(const char *name, const char *fallback);

/// Whether a process lives; one that has ended and was not waited for has given its memory back, too.
bool alive(int64_t pid);

/// How many devices the machine has: ENGINESMITH_STAND_IN_DEVICES, 1 where it is not given.
int all_devices();

/// How many of them CUDA_VISIBLE_DEVICES leaves; only numbers are understood.
int device_count();

/// The machine's number of a device as CUDA counts those that are visible.
int physical(int device);

/// The version of the driver, as 13000: ENGINESMITH_STAND_IN_DRIVER.
int driver_version();

/// The compute capability as 89: ENGINESMITH_STAND_IN_CAPABILITY is written 8.9.
int compute_capability();

/// A device's memory: ENGINESMITH_STAND_IN_MEMORY_MIB, 24 GiB where it is not given.
size_t device_bytes();

/// Add a line with the process's id to ENGINESMITH_STAND_IN_LOG, where that is given.
void log(const char *format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace stand_in
