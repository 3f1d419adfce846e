#include <sys/mman.h>
#include <tbb/parallel_for.h>
#include <ucontext.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "tests/gpu/stand_in/cuda_runtime.h"

thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace {

constexpr std::size_t kStackBytes = std::size_t{128} << 10;
constexpr unsigned kWarp = 32;

/// A barrier of some of a block's fibers.
struct Barrier {
  unsigned arrived = 0;
  unsigned generation = 0;
};

/// The fibers of one block. Reused from block to block.
class Block {
 public:
  explicit Block(unsigned threads)
      : fibers_(threads), warps_((threads + kWarp - 1) / kWarp), stacks_(threads * kStackBytes) {}

  void run(dim3 grid, dim3 block, dim3 index, const std::function<void()>& kernel) {
    kernel_ = &kernel;
    alive_ = static_cast<unsigned>(fibers_.size());
    block_ = {};
    for (std::size_t w = 0; w < warps_.size(); ++w) {
      warps_[w] = {};
      warps_[w].alive = std::min(kWarp, alive_ - static_cast<unsigned>(w) * kWarp);
    }
    for (unsigned t = 0; t < fibers_.size(); ++t) {
      Fiber& fiber = fibers_[t];
      fiber.done = false;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = stacks_.data() + t * kStackBytes;
      fiber.context.uc_stack.ss_size = kStackBytes;
      fiber.context.uc_link = &scheduler_;
      makecontext(&fiber.context, &Block::begin, 0);
    }
    Block* const outer = current_;
    current_ = this;
    gridDim = grid;
    blockDim = block;
    blockIdx = index;
    // Round after round until all have ended; a round in which nobody moves is a deadlock.
    while (alive_ > 0) {
      const unsigned before = alive_;
      moved_ = false;
      for (running_ = 0; running_ < fibers_.size(); ++running_) {
        if (fibers_[running_].done) continue;
        threadIdx = dim3(running_ % block.x, running_ / block.x % block.y, running_ / block.x / block.y);
        swapcontext(&scheduler_, &fibers_[running_].context);
        if (error_) break;
      }
      if (error_) break;
      if (alive_ == before && !moved_)
        error_ = std::make_exception_ptr(std::logic_error("threads of a block wait for each other"));
    }
    current_ = outer;
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

  static Block& current() { return *current_; }

  void wait_for_block() {
    wait(block_, [this] { return alive_; });
  }

  /// Exchanges a word with the lanes of this thread's warp.
  std::array<std::uint32_t, kWarp> exchange(std::uint32_t word) {
    Warp& warp = warps_[running_ / kWarp];
    const unsigned turn = warp.barrier.generation % 2;
    warp.words[turn][running_ % kWarp] = word;
    wait(warp.barrier, [&warp] { return warp.alive; });
    return warp.words[turn];  // the other half is written next
  }

 private:
  struct Fiber {
    ucontext_t context;
    bool done;
  };
  struct Warp {
    Barrier barrier;
    unsigned alive = 0;
    std::array<std::array<std::uint32_t, kWarp>, 2> words{};
  };

  static void begin() {
    Block& block = *current_;
    try {
      (*block.kernel_)();
    } catch (...) {
      block.error_ = std::current_exception();
    }
    block.fibers_[block.running_].done = true;
    --block.alive_;
    --block.warps_[block.running_ / kWarp].alive;
    block.moved_ = true;
  }

  /// Until all of `count()` fibers are here. Fibers that have ended do not count, as on the chip.
  template <class Count>
  void wait(Barrier& barrier, Count&& count) {
    const unsigned generation = barrier.generation;
    ++barrier.arrived;
    while (barrier.generation == generation) {
      if (barrier.arrived >= count()) {
        barrier.arrived = 0;
        ++barrier.generation;
        moved_ = true;
        break;
      }
      const unsigned me = running_;
      swapcontext(&fibers_[me].context, &scheduler_);
    }
  }

  static thread_local Block* current_;

  const std::function<void()>* kernel_ = nullptr;
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  std::vector<char> stacks_;
  ucontext_t scheduler_{};
  Barrier block_;
  unsigned alive_ = 0;
  unsigned running_ = 0;
  bool moved_ = false;
  std::exception_ptr error_;
};

thread_local Block* Block::current_ = nullptr;

/// GPU memory: mapped pages, the array at their end, an untouchable page behind it.
class Memory {
 public:
  void set_limit(std::size_t bytes) {
    const std::scoped_lock lock(mutex_);
    limit_ = bytes;
    peak_ = taken_;
  }
  std::size_t free() {
    const std::scoped_lock lock(mutex_);
    return limit_ > taken_ ? limit_ - taken_ : 0;
  }
  std::size_t limit() {
    const std::scoped_lock lock(mutex_);
    return limit_;
  }
  std::size_t peak() {
    const std::scoped_lock lock(mutex_);
    return peak_;
  }
  void* take(std::size_t bytes) {
    const std::scoped_lock lock(mutex_);
    if (taken_ + bytes > limit_) return nullptr;
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    // cudaMalloc aligns to 256 bytes.
    const std::size_t aligned = (bytes + 255) / 256 * 256;
    const std::size_t mapped = (aligned + page - 1) / page * page;
    void* const base =
        mmap(nullptr, mapped + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return nullptr;
    char* const begin = static_cast<char*>(base);
    mprotect(begin + mapped, page, PROT_NONE);
    std::memset(begin, 0xa5, mapped);
    char* const array = begin + mapped - aligned;
    taken_ += bytes;
    peak_ = std::max(peak_, taken_);
    blocks_[array] = {begin, mapped + page, bytes};
    return array;
  }
  bool give(void* array) {
    const std::scoped_lock lock(mutex_);
    const auto found = blocks_.find(array);
    if (found == blocks_.end()) return false;
    munmap(found->second.base, found->second.mapped);
    taken_ -= found->second.bytes;
    blocks_.erase(found);
    return true;
  }

 private:
  struct Taken {
    void* base;
    std::size_t mapped, bytes;
  };
  std::mutex mutex_;
  std::size_t limit_ = std::size_t{2} << 30;
  std::size_t taken_ = 0;
  std::size_t peak_ = 0;
  std::unordered_map<void*, Taken> blocks_;
};

Memory& memory() {
  static Memory instance;
  return instance;
}

}  // namespace

void __syncthreads() {
  Block::current().wait_for_block();
}

int __any_sync(unsigned mask, int predicate) {
  const auto words = Block::current().exchange(predicate != 0 ? 1U : 0U);
  int any = 0;
  for (unsigned lane = 0; lane < kWarp; ++lane) any |= (mask >> lane & 1U) != 0U && words[lane] != 0U ? 1 : 0;
  return any;
}

float __shfl_xor_sync(unsigned /*mask*/, float value, int lane_mask) {
  const auto words = Block::current().exchange(__builtin_bit_cast(std::uint32_t, value));
  return __builtin_bit_cast(float, words[(threadIdx.x % kWarp) ^ static_cast<unsigned>(lane_mask)]);
}

namespace bitattn::gpu {

void run_on_stand_in(const char* /*what*/, dim3 grid, dim3 block, const std::function<void()>& kernel) {
  const std::size_t blocks = std::size_t{grid.x} * grid.y * grid.z;
  tbb::parallel_for(std::size_t{0}, blocks, [&](std::size_t b) {
    thread_local std::unordered_map<unsigned, std::unique_ptr<Block>> sized;
    const unsigned threads = block.x * block.y * block.z;
    std::unique_ptr<Block>& fibers = sized[threads];
    if (!fibers) fibers = std::make_unique<Block>(threads);
    const dim3 index(static_cast<unsigned>(b % grid.x), static_cast<unsigned>(b / grid.x % grid.y),
                     static_cast<unsigned>(b / grid.x / grid.y));
    fibers->run(grid, block, index, kernel);
  });
}

namespace stand_in {

void set_memory(std::size_t bytes) {
  memory().set_limit(bytes);
}
std::size_t peak_memory() {
  return memory().peak();
}

}  // namespace stand_in

}  // namespace bitattn::gpu

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess                 ? "no error"
         : error == cudaErrorMemoryAllocation ? "out of memory"
                                              : "an error";
}
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaSuccess                 ? "cudaSuccess"
         : error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation"
                                              : "other";
}
cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int /*device*/) {
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int /*device*/) {
  *properties = {};
  std::strcpy(properties->name, "a CPU's stand-in for a GPU");
  properties->major = 9;
  properties->multiProcessorCount = 1;
  properties->totalGlobalMem = memory().limit();
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *free = memory().free();
  *total = memory().limit();
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** pointer, std::size_t bytes) {
  *pointer = memory().take(bytes);
  return *pointer != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void* pointer) {
  return pointer == nullptr || memory().give(pointer) ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind /*kind*/) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* pointer, int byte, std::size_t bytes) {
  std::memset(pointer, byte, bytes);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  return cudaSuccess;
}

using Clock = std::chrono::steady_clock;

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new Clock::time_point;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete static_cast<Clock::time_point*>(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, void* /*stream*/) {
  *static_cast<Clock::time_point*>(event) = Clock::now();
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t /*event*/) {
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  const auto elapsed = *static_cast<Clock::time_point*>(end) - *static_cast<Clock::time_point*>(begin);
  *milliseconds = std::chrono::duration<float, std::milli>(elapsed).count();
  return cudaSuccess;
}
