#include "control.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace stand_in {

const char *setting(const char *name, const char *fallback) {
  const char *value = getenv((std::string("ENGINESMITH_STAND_IN_") + name).c_str());
  return value && *value ? value : fallback;
}

Control &control() {
  static Control *shared = [] {
    const char *path = setting("CONTROL", nullptr);
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (path && file < 0) {
      fprintf(stderr, "stand-in: the control file %s cannot be opened\n", path);
      abort();
    }
    int flags = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    void *memory = mmap(nullptr, sizeof(Control), PROT_READ | PROT_WRITE, flags, file, 0);
    if (file >= 0) close(file);
    if (memory == MAP_FAILED) abort();
    return static_cast<Control *>(memory);
  }();
  return *shared;
}

bool alive(int64_t pid) {
  if (kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH) return false;
  char path[40];
  snprintf(path, sizeof path, "/proc/%d/stat", static_cast<int>(pid));
  FILE *file = fopen(path, "re");
  if (!file) return false;
  char state = 0;
  bool read = fscanf(file, "%*d (%*[^)]) %c", &state) == 1;
  fclose(file);
  return !read || state != 'Z';
}

namespace {
/// The devices that CUDA shows, up to the first entry that is none.
const std::vector<int> &visible() {
  static const std::vector<int> devices = [] {
    std::vector<int> shown;
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    if (!text) {
      for (int device = 0; device < all_devices(); ++device) shown.push_back(device);
      return shown;
    }
    for (char *end; *text; text = *end == ',' ? end + 1 : end) {
      long device = strtol(text, &end, 10);
      if (end == text || device < 0 || device >= all_devices()) break;
      shown.push_back(static_cast<int>(device));
    }
    return shown;
  }();
  return devices;
}
}  // namespace

int all_devices() {
  static int count = atoi(setting("DEVICES", "1"));
  return count < kDevices ? count : kDevices;
}

int device_count() { return static_cast<int>(visible().size()); }

int physical(int device) { return visible().at(device); }

int driver_version() {
  static int version = atoi(setting("DRIVER", "13000"));
  return version;
}

int compute_capability() {
  static int capability = [] {
    int major = 8, minor = 9;
    sscanf(setting("CAPABILITY", "8.9"), "%d.%d", &major, &minor);
    return 10 * major + minor;
  }();
  return capability;
}

size_t device_bytes() {
  static size_t bytes = static_cast<size_t>(atoll(setting("MEMORY_MIB", "24576"))) << 20;
  return bytes;
}

void log(const char *format, ...) {
  static const char *path = setting("LOG", nullptr);
  if (!path) return;
  char line[300];
  int length = snprintf(line, sizeof line, "%d ", static_cast<int>(getpid()));
  va_list values;
  va_start(values, format);
  length += vsnprintf(line + length, sizeof line - length - 1, format, values);
  va_end(values);
  if (length > static_cast<int>(sizeof line) - 2) length = sizeof line - 2;
  line[length++] = '\n';
  int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (file < 0) return;
  if (write(file, line, length) < 0) perror("stand-in log");
  close(file);
}

}  // namespace stand_in
