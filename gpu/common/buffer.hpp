#pragma once
// Memory of the GPU that frees itself.

#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "gpu/common/device.hpp"

namespace bitattn::gpu {

/// An array of T on the GPU. Throws Error where the GPU has too little memory, with what was asked for and
/// what is free.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t size, const char* what = "a buffer") { allocate(size, what); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer(Buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~Buffer() { cudaFree(data_); }

  /// Replaces the array; contents are undefined. `what` names it in an error.
  void allocate(std::size_t size, const char* what) {
    check(cudaFree(data_), "freeing GPU memory");
    data_ = nullptr;
    size_ = 0;
    if (size == 0) return;
    void* data = nullptr;
    const cudaError_t status = cudaMalloc(&data, size * sizeof(T));
    if (status == cudaErrorMemoryAllocation) {
      (void)cudaGetLastError();
      throw Error("too little GPU memory: " + std::string(what) + " needs " + bytes_text(size * sizeof(T)) +
                  ", " + bytes_text(free_memory()) + " are free");
    }
    check(status, what);
    data_ = static_cast<T*>(data);
    size_ = size;
  }

  void upload(std::span<const T> values, const char* what) {
    allocate(values.size(), what);
    if (size_ > 0) check(cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice), what);
  }
  /// The first `count` elements to `target`; waits for the work before it.
  void download(T* target, std::size_t count, const char* what) const {
    if (count > 0) check(cudaMemcpy(target, data_, count * sizeof(T), cudaMemcpyDeviceToHost), what);
  }
  std::vector<T> download(const char* what) const {
    std::vector<T> values(size_);
    download(values.data(), size_, what);
    return values;
  }
  /// Every byte of it.
  void fill_bytes(int byte, const char* what) {
    if (size_ > 0) check(cudaMemset(data_, byte, size_ * sizeof(T)), what);
  }

  T* data() const { return data_; }
  std::size_t size() const { return size_; }
  std::size_t bytes() const { return size_ * sizeof(T); }

 private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace bitattn::gpu
