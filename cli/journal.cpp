#include "cli/journal.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <libdeflate.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string_view>

#include "datasets/capture_file.hpp"
#include "datasets/error.hpp"

namespace bitattn::cli {

namespace {

constexpr const char* kFirstLine = "{\"journal\":\"bitattn diagnose\",\"format\":2}\n";

std::string dumped(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

/// What a line begins with; the checksum is that of the rest.
std::string head_of(std::string_view rest) {
  return fmt::format("{{\"crc32\":\"{:08x}\",", libdeflate_crc32(0, rest.data(), rest.size()));
}

constexpr std::string_view kBeforeKey = "\"key\":";
constexpr std::string_view kBeforeEntry = ",\"entry\":";

struct Line {
  std::string_view key, entry;  ///< JSON
};

/// The parts of a line, none where it is not as it was written.
std::optional<Line> parts_of(std::string_view line) {
  const std::size_t head = head_of({}).size();
  if (line.size() < head) return std::nullopt;
  const std::string_view rest = line.substr(head);
  if (line.substr(0, head) != head_of(rest)) return std::nullopt;
  // Quotes within a key's texts are escaped: this is where it ends.
  const std::size_t end = rest.find(kBeforeEntry);
  if (!rest.starts_with(kBeforeKey) || end == std::string_view::npos || !rest.ends_with('}'))
    return std::nullopt;
  const std::size_t entry = end + kBeforeEntry.size();
  return Line{rest.substr(kBeforeKey.size(), end - kBeforeKey.size()),
              rest.substr(entry, rest.size() - 1 - entry)};
}

/// A path in letters that any JSON holds, no two paths alike.
std::string in_ascii(const std::string& path) {
  std::string text;
  for (const char c : path) {
    if (c < ' ' || c > '~' || c == '\\') {
      text += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    } else {
      text += c;
    }
  }
  return text;
}

}  // namespace

Journal::Journal(const std::string& path, std::string settings)
    : path_(path), settings_(std::move(settings)) {
  constexpr mode_t kMode = 0666;  // the user's umask takes away from it
  descriptor_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK, kMode);
  if (descriptor_ < 0) throw InputError(path + ": the journal cannot be opened: " + std::strerror(errno));
  try {
    struct stat about {};
    if (::fstat(descriptor_, &about) != 0 || !S_ISREG(about.st_mode))
      throw InputError(path + ": the journal is not a regular file");
    // Where the file system has no locks, the user sees to it.
    if (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
      throw InputError(path + ": another run writes this journal");
    load();
  } catch (...) {
    ::close(descriptor_);
    throw;
  }
}

Journal::~Journal() {
  ::close(descriptor_);
}

void Journal::load() {
  const InputError no_journal(path_ + ": is no journal of bitattn diagnose");
  const std::string first = kFirstLine;
  std::ifstream file(path_, std::ios::binary);
  std::string line;
  std::size_t number = 1;
  off_t whole = 0;  // where the last line that is not cut off ends
  for (bool header = true; std::getline(file, line); header = false) {
    if (file.eof()) {
      if (header && first.rfind(line, 0) != 0) throw no_journal;
      break;
    }
    const Place place{whole, line.size()};
    whole += static_cast<off_t>(line.size()) + 1;
    if (header) {
      if (line + "\n" != first) throw no_journal;
      continue;
    }
    ++number;
    if (const std::optional<Line> parts = parts_of(line)) {
      kept_[std::string(parts->key)] = place;
    } else {
      warn(fmt::format("{}: line {} is damaged: its capture is done again", path_, number));
    }
  }
  if (file.bad()) throw InputError(path_ + ": the journal cannot be read");
  if (::ftruncate(descriptor_, whole) != 0)
    throw InputError(path_ + ": the journal cannot be written: " + std::strerror(errno));
  if (whole == 0) append(first);
}

std::string Journal::key(const std::string& capture) const {
  const CaptureName name = parse_capture_name(capture);
  struct stat about {};
  ::stat(name.file.c_str(), &about);
  constexpr std::int64_t kNanoseconds = 1000000000;
  const std::int64_t changed = about.st_mtim.tv_sec * kNanoseconds + about.st_mtim.tv_nsec;
  std::error_code error;  // a file that is gone is told by whoever reads it
  const std::string file = std::filesystem::weakly_canonical(name.file, error).string();
  return dumped(Json::array(
      {in_ascii(file + ":" + name.group), static_cast<std::int64_t>(about.st_size), changed, settings_}));
}

Json Journal::find(const std::string& key) const {
  const std::lock_guard lock(mutex_);
  const auto found = kept_.find(key);
  if (found == kept_.end()) return nullptr;
  std::string line(found->second.length, '\0');
  const ssize_t n = ::pread(descriptor_, line.data(), line.size(), found->second.begin);
  if (n != static_cast<ssize_t>(line.size())) return nullptr;
  const std::optional<Line> parts = parts_of(line);
  return parts ? Json::parse(parts->entry, nullptr, false) : Json(nullptr);
}

void Journal::add(const std::string& key, const Json& entry) {
  const std::string rest = fmt::format("{}{}{}{}}}", kBeforeKey, key, kBeforeEntry, dumped(entry));
  const std::lock_guard lock(mutex_);
  append(head_of(rest) + rest + "\n");
}

void Journal::append(const std::string& line) {
  const off_t before = ::lseek(descriptor_, 0, SEEK_END);
  std::size_t done = 0;
  while (done < line.size()) {
    const ssize_t n = ::write(descriptor_, line.data() + done, line.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      const int reason = errno;
      // What stands there of the line would be dropped by the next run anyway.
      if (::ftruncate(descriptor_, before) != 0) errno = reason;
      throw InputError(path_ + ": the journal cannot be written: " + std::strerror(reason));
    }
    done += static_cast<std::size_t>(n);
  }
  if (::fsync(descriptor_) != 0)
    throw InputError(path_ + ": the journal cannot be written: " + std::strerror(errno));
}

}  // namespace bitattn::cli
