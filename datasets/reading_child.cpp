#include "datasets/reading_child.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstring>
#include <functional>
#include <new>

#include "datasets/capture_reader.hpp"
#include "datasets/capture_wire.hpp"
#include "datasets/error.hpp"
#include "datasets/hdf5_support.hpp"
#include "datasets/interrupt.hpp"
#include "datasets/problem_check.hpp"
#include "datasets/shape_text.hpp"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define BITATTN_SHADOW_MEMORY 1  // a sanitizer maps terabytes of address space, which no limit would allow
#else
#define BITATTN_SHADOW_MEMORY 0
#endif

namespace bitattn {
namespace {

/// What the child says: messages of a kind, a length, and so many bytes.
enum class Kind : char { working = 'w', data = 'd', bad_input = 'e', good = 'k' };
struct Header {
  Kind kind = Kind::working;
  std::uint32_t length = 0;
};
constexpr std::size_t kLongestText = 2000;

// --- in the child

class Child {
 public:
  Child(int pipe, const ChildLimits& limits) : pipe_(pipe), limits_(limits) {}

  /// Ends the process.
  [[noreturn]] void run(const std::string& path, const std::function<void(Child&)>& work) {
    try {
      settle();
      work(*this);
      send(Kind::good, nullptr, 0);
    } catch (const InputError& error) {
      refuse(error.what());
    } catch (const std::bad_alloc&) {
      refuse(path + ": reading takes more memory than the sizes in the file explain");
    } catch (const std::exception& error) {
      refuse(path + ": cannot be read: " + error.what());
    }
    ::_exit(0);
  }

  BeforeRead announcer() {
    return [this](std::size_t bytes) { announce(bytes); };
  }

  /// For wire::Sender.
  void put(const void* data, std::size_t size) const {
    constexpr std::size_t kMost = std::size_t{1} << 20U;
    for (std::size_t done = 0; done < size; done += kMost) {
      send(Kind::data, static_cast<const char*>(data) + done, std::min(kMost, size - done));
    }
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
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGE_SIZE));
    return n <= 0 ? 0 : std::strtoull(text.data(), nullptr, 10) * page;
  }

  /// Lets the address space grow by what `bytes` of checked tensors need: the tensors, chunks as stored, and
  /// the filters' copies of them.
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
    send(Kind::working, &bytes, sizeof bytes);
  }

  void refuse(const std::string& line) const {
    send(Kind::bad_input, line.data(), std::min(line.size(), kLongestText));
  }

  void send(Kind kind, const void* data, std::size_t size) const {
    const Header header{kind, static_cast<std::uint32_t>(size)};
    write_all(&header, sizeof header);
    write_all(data, size);
  }

  void write_all(const void* data, std::size_t size) const {
    const auto* from = static_cast<const char*>(data);
    while (size > 0) {
      const ssize_t n = ::write(pipe_, from, size);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) ::_exit(0);
      from += n;
      size -= static_cast<std::size_t>(n);
    }
  }

  int pipe_;
  ChildLimits limits_;
  std::size_t first_size_ = 0;
  std::size_t most_announced_ = 0;
};

// --- in this process

/// The other end: takes the child's messages as they are asked for, until it ends, fails or takes too long.
class Parent {
 public:
  Parent(const std::string& path, pid_t child, int pipe, const ChildLimits& limits)
      : path_(path), child_(child), pipe_(pipe), limits_(limits) {
    allow(0);
  }
  Parent(const Parent&) = delete;
  Parent& operator=(const Parent&) = delete;
  ~Parent() {
    if (child_ > 0) {
      ::kill(child_, SIGKILL);
      reap();
    }
    ::close(pipe_);
  }

  /// For wire::Receiver: the next bytes of data.
  void get(void* data, std::size_t size) {
    auto* to = static_cast<char*>(data);
    while (size > 0) {
      while (unread_data_ == 0) next_message();
      const std::size_t part = std::min(size, unread_data_);
      read_all(to, part);
      to += part;
      size -= part;
      unread_data_ -= part;
    }
  }

  /// The most that one piece of data may be: what the child said it was going to read, and room for
  /// attributes.
  std::size_t most() const {
    constexpr std::size_t kAttributes = std::size_t{64} << 20U;
    return announced_ + kAttributes;
  }

  /// The child sent what it cannot have read: its memory is spoilt.
  [[noreturn]] void refuse_nonsense() { fail_crashed(); }

  /// Waits for the child's good end.
  void finish() {
    if (unread_data_ != 0) fail_crashed();
    while (!good_) {
      next_message();
      if (unread_data_ != 0) fail_crashed();
    }
    reap();
  }

 private:
  using Clock = std::chrono::steady_clock;

  [[noreturn]] void fail_crashed() {
    ::kill(child_, SIGKILL);
    const int status = reap();
    throw_if_interrupted();
    const bool killed_here = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    throw InputError(path_ + ": the HDF5 library " +
                     (WIFSIGNALED(status) && !killed_here
                          ? "crashed (signal " + std::to_string(WTERMSIG(status)) + ")"
                          : "ended without an answer") +
                     " on reading it; the file is damaged");
  }

  void allow(std::size_t bytes) {
    allowed_ = limits_.seconds + static_cast<double>(bytes) / limits_.bytes_per_second;
    deadline_ =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(allowed_));
  }

  void next_message() {
    Header header;
    read_all(&header, sizeof header);
    std::size_t bytes = 0;
    std::string text(std::min<std::size_t>(header.length, kLongestText), '\0');
    switch (header.kind) {
      case Kind::good:
        good_ = true;
        return;
      case Kind::data:
        unread_data_ = header.length;
        return;
      case Kind::working:
        if (header.length != sizeof bytes) break;
        read_all(&bytes, sizeof bytes);
        announced_ = std::max(announced_, std::min(bytes, machine_memory()));
        allow(bytes);
        return;
      case Kind::bad_input:
        read_all(text.data(), text.size());
        throw InputError(text);
    }
    fail_crashed();  // no message of ours: the child has lost its mind
  }

  void read_all(void* data, std::size_t size) {
    auto* to = static_cast<char*>(data);
    while (size > 0) {
      wait_for_bytes();
      const ssize_t n = ::read(pipe_, to, size);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) fail_crashed();
      to += n;
      size -= static_cast<std::size_t>(n);
      // Whatever arrives is progress.
      const auto least = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                            std::chrono::duration<double>(limits_.seconds));
      deadline_ = std::max(deadline_, least);
    }
  }

  void wait_for_bytes() {
    while (true) {
      throw_if_interrupted();
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(deadline_ - Clock::now()).count();
      if (left <= 0) {
        throw InputError(path_ + ": reading made no progress for " +
                         shortest_text(std::round(allowed_ * 10) / 10) +
                         " s; the file is damaged or its disk too slow");
      }
      struct pollfd wanted {
        pipe_, POLLIN, 0
      };
      // Wakes up now and then, for signals that another thread took.
      constexpr std::int64_t kLongestSleep = 200;
      if (::poll(&wanted, 1, static_cast<int>(std::min<std::int64_t>(left, kLongestSleep))) > 0) return;
    }
  }

  int reap() {
    int status = 0;
    while (::waitpid(child_, &status, 0) < 0 && errno == EINTR) {
    }
    child_ = -1;
    return status;
  }

  std::string path_;
  pid_t child_;
  int pipe_;
  ChildLimits limits_;
  Clock::time_point deadline_;
  double allowed_ = 0;
  std::size_t announced_ = 0;
  std::size_t unread_data_ = 0;
  bool good_ = false;
};

/// Forks a child that does `work` with the Child, and lets `take` have the messages.
void with_child(const std::string& path, const ChildLimits& limits, const std::function<void(Child&)>& work,
                const std::function<void(Parent&)>& take) {
  throw_if_interrupted();
  const hdf5::LibraryLock lock;
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    throw InputError(path + ": cannot be read: pipe: " + std::strerror(errno));
  }
  const pid_t child = ::fork();
  if (child < 0) {
    const int reason = errno;
    ::close(ends[0]);
    ::close(ends[1]);
    throw InputError(path + ": cannot be read: fork: " + std::strerror(reason));
  }
  if (child == 0) {
    ::close(ends[0]);
    Child(ends[1], limits).run(path, work);
  }
  ::close(ends[1]);
  Parent parent(path, child, ends[0], limits);
  try {
    take(parent);
  } catch (const std::bad_alloc&) {
    throw InputError(path + ": reading takes more memory than there is");
  }
  parent.finish();
}

}  // namespace

std::vector<std::string> check_in_child(const std::string& path, const std::string& group,
                                        const ChildLimits& limits) {
  std::vector<std::string> groups;
  with_child(
      path, limits,
      [&](Child& child) {
        std::vector<std::string> found{group};
        if (group.empty()) {
          found = capture_groups(path, child.announcer());
        } else {
          expect_capture_group(path, group);
        }
        for (const std::string& g : found) read_capture_group(path, g, machine_memory(), child.announcer());
        wire::Sender sender(child);
        wire::carry(sender, found);
      },
      [&](Parent& parent) {
        wire::Receiver receiver(parent);
        wire::carry(receiver, groups);
      });
  return groups;
}

std::map<std::string, Attributes> attributes_in_child(const std::string& path, const std::string& group,
                                                      const ChildLimits& limits) {
  std::map<std::string, Attributes> attributes;
  with_child(
      path, limits,
      [&](Child& child) {
        std::vector<std::string> groups{group};
        if (group.empty()) {
          groups = capture_groups(path, child.announcer());
        } else {
          expect_capture_group(path, group);
        }
        std::map<std::string, Attributes> found = capture_attributes(path, groups, child.announcer());
        wire::Sender sender(child);
        wire::carry(sender, found);
      },
      [&](Parent& parent) {
        wire::Receiver receiver(parent);
        wire::carry(receiver, attributes);
      });
  return attributes;
}

Capture read_in_child(const std::string& path, const std::string& group, const ChildLimits& limits) {
  Capture capture;
  const std::string where = full_name(path, group);
  with_child(
      path, limits,
      [&](Child& child) {
        expect_capture_group(path, group.empty() ? "/" : group);
        Capture found = read_capture_group(path, group, machine_memory(), child.announcer());
        wire::Sender sender(child);
        wire::carry(sender, found);
      },
      [&](Parent& parent) {
        wire::Receiver receiver(parent);
        wire::carry(receiver, capture);
      });
  // The child checked all this, but on a damaged file its memory is not to be trusted.
  check_problem(capture.problem, where);
  check_result(capture.problem, capture.recorded, where);
  return capture;
}

ForeignFile read_foreign_in_child(const std::string& path, const ChildLimits& limits) {
  ForeignFile file;
  with_child(
      path, limits,
      [&](Child& child) {
        ForeignFile found = read_plain_hdf5(path, child.announcer());
        wire::Sender sender(child);
        wire::carry(sender, found);
      },
      [&](Parent& parent) {
        wire::Receiver receiver(parent);
        wire::carry(receiver, file);
      });
  // The child checked this too, but on a damaged file its memory is not to be trusted.
  for (const auto& [name, tensor] : file.tensors) {
    const std::size_t bytes = checked_elements(tensor.shape, path) * foreign_element_size(tensor.type);
    if (tensor.bytes.size() != bytes) throw InputError(path + ": the file is damaged");
  }
  return file;
}

}  // namespace bitattn
