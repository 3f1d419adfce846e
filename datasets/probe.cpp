#include "datasets/probe.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstring>
#include <map>
#include <new>
#include <set>
#include <tuple>

#include "datasets/capture_file.hpp"
#include "datasets/capture_reader.hpp"
#include "datasets/error.hpp"
#include "datasets/hdf5_support.hpp"
#include "datasets/interrupt.hpp"
#include "datasets/shape_text.hpp"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define BITATTN_SHADOW_MEMORY 1  // a sanitizer maps terabytes of address space, which no limit would allow
#else
#define BITATTN_SHADOW_MEMORY 0
#endif

namespace bitattn {
namespace {

// What the child says, in messages of one kind byte, a length and a text or number.
enum class Message : char { working = 'w', bad_input = 'e', good = 'k' };

// --- in the child

class Child {
 public:
  Child(int pipe, const ProbeLimits& limits) : pipe_(pipe), limits_(limits) {}

  [[noreturn]] void run(const std::string& path, const std::string& group) {
    try {
      settle();
      const BeforeRead before_read = [this](std::size_t bytes) { announce(bytes); };
      const std::size_t memory = machine_memory();
      std::vector<std::string> groups{group};
      if (group.empty()) {
        groups = capture_groups(path);
      } else {
        expect_capture_group(path, group);
      }
      for (const std::string& g : groups) read_capture_group(path, g, memory, before_read);
      send(Message::good, "", 0);
    } catch (const InputError& error) {
      send(Message::bad_input, error.what(), std::strlen(error.what()));
    } catch (const std::bad_alloc&) {
      const std::string text = path + ": reading takes more memory than the sizes in the file explain";
      send(Message::bad_input, text.data(), text.size());
    } catch (const std::exception& error) {
      const std::string text = path + ": cannot be read: " + error.what();
      send(Message::bad_input, text.data(), text.size());
    }
    ::_exit(0);
  }

 private:
  /// Nothing that goes wrong from here on shall print, dump core, run handlers of this program or outlive it.
  void settle() {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::prctl(PR_SET_DUMPABLE, 0);
    for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGINT, SIGTERM, SIGPIPE}) {
      ::signal(signal, SIG_DFL);
    }
    const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
    for (const int fd : {0, 1, 2}) {
      if (null >= 0 && fd != pipe_) ::dup2(null, fd);
    }
    first_size_ = address_space();
    allow_memory(0);
  }

  static std::size_t address_space() {
    std::array<char, 64> text{};
    const int fd = ::open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    const ssize_t n = ::read(fd, text.data(), text.size() - 1);
    ::close(fd);
    return n <= 0
               ? 0
               : std::strtoull(text.data(), nullptr, 10) * static_cast<std::size_t>(::sysconf(_SC_PAGE_SIZE));
  }

  /// Lets the address space grow by what `bytes` of checked tensors need: the tensor, a chunk as stored, and
  /// the filters' copies of it.
  void allow_memory(std::size_t bytes) const {
    if (BITATTN_SHADOW_MEMORY || first_size_ == 0) return;
    constexpr std::size_t kCopies = 5;
    struct rlimit limit {};
    if (::getrlimit(RLIMIT_AS, &limit) != 0) return;
    limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, first_size_ + limits_.spare_memory + kCopies * bytes);
    ::setrlimit(RLIMIT_AS, &limit);
  }

  void announce(std::size_t bytes) {
    if (bytes > most_announced_) {
      most_announced_ = bytes;
      allow_memory(bytes);
    }
    send(Message::working, &bytes, sizeof bytes);
  }

  void send(Message kind, const void* data, std::size_t size) const {
    // One write of at most PIPE_BUF bytes, so that a message is never torn.
    std::array<char, 2048> buffer{};
    const auto length = static_cast<std::uint16_t>(std::min(size, buffer.size() - 3));
    buffer[0] = static_cast<char>(kind);
    std::memcpy(&buffer[1], &length, 2);
    std::memcpy(&buffer[3], data, length);
    std::size_t done = 0;
    while (done < length + std::size_t{3}) {
      const ssize_t n = ::write(pipe_, buffer.data() + done, length + std::size_t{3} - done);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) ::_exit(0);
      done += static_cast<std::size_t>(n);
    }
  }

  int pipe_;
  ProbeLimits limits_;
  std::size_t first_size_ = 0;
  std::size_t most_announced_ = 0;
};

// --- in the parent

/// The child's messages, until it ends or takes too long.
class Watch {
 public:
  Watch(pid_t child, int pipe, const ProbeLimits& limits) : child_(child), pipe_(pipe), limits_(limits) {
    allow(0);
  }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;
  ~Watch() {
    if (child_ > 0) {
      ::kill(child_, SIGKILL);
      reap();
    }
    ::close(pipe_);
  }

  /// Throws InputError unless the child says that all is good.
  void wait(const std::string& path) {
    while (true) {
      throw_if_interrupted();
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(deadline_ - Clock::now()).count();
      if (left <= 0) {
        throw InputError(path + ": reading made no progress for " +
                         shortest_text(std::round(allowed_ * 10) / 10) +
                         " s; the file is damaged or its disk too slow");
      }
      struct pollfd wanted {
        pipe_, POLLIN, 0
      };
      // Wakes up now and then, for signals that another thread took.
      if (::poll(&wanted, 1, static_cast<int>(std::min<std::int64_t>(left, 200))) <= 0) continue;
      std::array<char, 4096> bytes{};
      const ssize_t n = ::read(pipe_, bytes.data(), bytes.size());
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) break;
      unread_.append(bytes.data(), static_cast<std::size_t>(n));
      take_messages();
    }
    const int status = reap();
    if (good_) return;
    throw_if_interrupted();
    if (!error_.empty()) throw InputError(error_);
    throw InputError(path + ": the HDF5 library " +
                     (WIFSIGNALED(status) ? "crashed (signal " + std::to_string(WTERMSIG(status)) + ")"
                                          : "ended without an answer") +
                     " on reading it; the file is damaged");
  }

 private:
  using Clock = std::chrono::steady_clock;

  void allow(std::size_t bytes) {
    allowed_ = limits_.seconds + static_cast<double>(bytes) / limits_.bytes_per_second;
    deadline_ =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(allowed_));
  }

  void take_messages() {
    while (unread_.size() >= 3) {
      std::uint16_t length = 0;
      std::memcpy(&length, &unread_[1], 2);
      if (unread_.size() < std::size_t{3} + length) return;
      const std::string text = unread_.substr(3, length);
      std::size_t bytes = 0;
      switch (static_cast<Message>(unread_[0])) {
        case Message::good:
          good_ = true;
          break;
        case Message::bad_input:
          error_ = text;
          break;
        case Message::working:
          std::memcpy(&bytes, text.data(), std::min(sizeof bytes, text.size()));
          allow(bytes);
          break;
      }
      unread_.erase(0, std::size_t{3} + length);
    }
  }

  int reap() {
    int status = 0;
    while (::waitpid(child_, &status, 0) < 0 && errno == EINTR) {
    }
    child_ = -1;
    return status;
  }

  pid_t child_;
  int pipe_;
  ProbeLimits limits_;
  Clock::time_point deadline_;
  double allowed_ = 0;
  std::string unread_, error_;
  bool good_ = false;
};

/// Which bytes of which file have passed.
struct Identity {
  dev_t device = 0;
  ino_t inode = 0;
  off_t size = 0;
  std::int64_t modified = 0, changed = 0;  // nanoseconds
  auto key() const { return std::tie(device, inode, size, modified, changed); }
  bool operator<(const Identity& other) const { return key() < other.key(); }
};

Identity identity_of(const std::string& path) {
  struct stat s {};
  if (::stat(path.c_str(), &s) != 0) return {};
  constexpr std::int64_t kBillion = 1'000'000'000;
  return {s.st_dev, s.st_ino, s.st_size, s.st_mtim.tv_sec * kBillion + s.st_mtim.tv_nsec,
          s.st_ctim.tv_sec * kBillion + s.st_ctim.tv_nsec};
}

}  // namespace

void probe_in_child(const std::string& path, const std::string& group, const ProbeLimits& limits) {
  const hdf5::LibraryLock lock;
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    throw InputError(path + ": cannot be checked: pipe: " + std::strerror(errno));
  }
  const pid_t child = ::fork();
  if (child < 0) {
    const int reason = errno;
    ::close(ends[0]);
    ::close(ends[1]);
    throw InputError(path + ": cannot be checked: fork: " + std::strerror(reason));
  }
  if (child == 0) {
    ::close(ends[0]);
    Child(ends[1], limits).run(path, group);
  }
  ::close(ends[1]);
  Watch(child, ends[0], limits).wait(path);
}

void probe_once(const std::string& path, const std::string& group) {
  const hdf5::LibraryLock lock;
  static std::map<Identity, std::set<std::string>> passed;
  const Identity before = identity_of(path);
  const auto found = passed.find(before);
  if (found != passed.end() && (found->second.contains("") || found->second.contains(group))) return;
  probe_in_child(path, group, {});
  passed[before].insert(group);
}

}  // namespace bitattn
