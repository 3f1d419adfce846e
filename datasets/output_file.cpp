#include "datasets/output_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "datasets/capture_file.hpp"
#include "datasets/error.hpp"
#include "datasets/interrupt.hpp"

namespace bitattn {
namespace {

constexpr mode_t kMode = 0666;  // the user's umask takes away from it

std::string folder_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string base_of(const std::string& path) {
  return path.substr(path.rfind('/') + 1);
}

std::string resolved(const std::string& path) {
  const std::unique_ptr<char, decltype(&std::free)> real(::realpath(path.c_str(), nullptr), &std::free);
  return real ? std::string(real.get()) : path;
}

// So that a hidden name stays within the 255 bytes that a file's name may have.
constexpr std::size_t kLongestBase = 200;

}  // namespace

void OutputFile::fail(const std::string& what, int reason) const {
  throw InputError(path_ + ": cannot be written: " + what +
                   (reason == 0 ? "" : ": " + std::string(std::strerror(reason))));
}

OutputFile::OutputFile(const std::string& path, const std::vector<std::string>& inputs, Until until)
    : path_(path) {
  if (path.empty() || path.back() == '/') fail("not the name of a file", 0);
  // A link's target is replaced, not the link.
  target_ = resolved(path);
  folder_ = folder_of(target_);
  struct stat old {};
  if (::lstat(target_.c_str(), &old) == 0) {
    if (S_ISDIR(old.st_mode)) fail("it is a folder", 0);
    if (!S_ISREG(old.st_mode)) fail("it exists and is not a regular file", 0);
    if (::access(target_.c_str(), W_OK) != 0) fail("the file there may not be changed", errno);
    for (const std::string& input : inputs) {
      struct stat in {};
      if (::stat(parse_capture_name(input).file.c_str(), &in) == 0 && in.st_dev == old.st_dev &&
          in.st_ino == old.st_ino) {
        fail("it is the input " + input + " itself", 0);
      }
    }
  }
  struct stat folder {};
  if (::stat(folder_.c_str(), &folder) != 0) fail("folder " + folder_, errno);
  if (!S_ISDIR(folder.st_mode)) fail(folder_ + " is not a folder", 0);
  if (::access(folder_.c_str(), W_OK | X_OK) != 0) fail("folder " + folder_, errno);
  if (until == Until::nameless) open_nameless();
  if (descriptor_ < 0) open_named();
}

void OutputFile::open_nameless() {
  descriptor_ = ::open(folder_.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, kMode);
  if (descriptor_ < 0) return;
  // Without /proc the file could not be given a name.
  if (::access(link_source().c_str(), F_OK) != 0) {
    ::close(descriptor_);
    descriptor_ = -1;
  }
}

void OutputFile::open_named() {
  temporary_ = folder_ + "/." + base_of(target_).substr(0, kLongestBase) + ".XXXXXX.tmp";
  constexpr int kSuffix = 4;  // ".tmp"
  descriptor_ = ::mkostemps(temporary_.data(), kSuffix, O_CLOEXEC);
  if (descriptor_ < 0) {
    const int reason = errno;
    temporary_.clear();
    fail("folder " + folder_, reason);
  }
  slot_ = detail::remember_temporary(temporary_);
  const mode_t mask = ::umask(0);
  ::umask(mask);
  ::fchmod(descriptor_, kMode & ~mask);
}

std::string OutputFile::link_source() const {
  return "/proc/self/fd/" + std::to_string(descriptor_);
}

OutputFile::~OutputFile() {
  if (!committed_ && !temporary_.empty()) ::unlink(temporary_.c_str());
  detail::forget_temporary(slot_);
  if (descriptor_ >= 0) ::close(descriptor_);
}

void OutputFile::commit() {
  if (::fsync(descriptor_) != 0) fail("flushing to the disk", errno);
  if (temporary_.empty()) {
    const std::string source = link_source();
    if (::linkat(AT_FDCWD, source.c_str(), AT_FDCWD, target_.c_str(), AT_SYMLINK_FOLLOW) == 0) {
      committed_ = true;
      return;
    }
    if (errno != EEXIST) fail("naming the finished file", errno);
    give_name();
  }
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail("renaming the finished file", errno);
  committed_ = true;
}

// A link cannot replace a file, so the nameless one gets a hidden name first, and is then renamed over the
// old one.
void OutputFile::give_name() {
  const std::string source = link_source();
  constexpr int kMostAttempts = 1000;
  for (int attempt = 0; attempt < kMostAttempts; ++attempt) {
    const std::string unique = std::to_string(::getpid()) + "-" + std::to_string(attempt);
    temporary_ = folder_ + "/." + base_of(target_).substr(0, kLongestBase) + "." + unique + ".tmp";
    slot_ = detail::remember_temporary(temporary_);
    if (::linkat(AT_FDCWD, source.c_str(), AT_FDCWD, temporary_.c_str(), AT_SYMLINK_FOLLOW) == 0) return;
    const int reason = errno;
    detail::forget_temporary(slot_);
    slot_ = -1;
    temporary_.clear();
    if (reason != EEXIST) fail("naming the finished file", reason);
  }
  fail("no free temporary name in " + folder_, 0);
}

void write_text_file(const std::string& path, const std::string& text,
                     const std::vector<std::string>& inputs) {
  OutputFile file(path, inputs);
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t n = ::write(file.descriptor(), text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw InputError(path + ": cannot be written: " + std::strerror(errno));
    done += static_cast<std::size_t>(n);
  }
  file.commit();
}

}  // namespace bitattn
