#pragma once
// Buffers that begin on a cache line, so that no vector load of an engine straddles two, and that are not
// cleared before they are filled.

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

namespace bitattn::mma {

inline constexpr std::size_t kCacheLine = 64;

template <class T>
struct AlignedAllocator {
  using value_type = T;
  AlignedAllocator() = default;
  template <class U>
  AlignedAllocator(const AlignedAllocator<U>& /*other*/) {
  }  // NOLINT(google-explicit-constructor): an allocator's

  T* allocate(std::size_t n) {
    return static_cast<T*>(::operator new (n * sizeof(T), std::align_val_t{kCacheLine}));
  }
  void deallocate(T* p, std::size_t /*n*/) { ::operator delete (p, std::align_val_t{kCacheLine}); }
  /// Elements of a grown buffer are left as they are: whoever asks for them writes them.
  template <class U>
  void construct(U* p) {
    ::new (static_cast<void*>(p)) U;
  }
  template <class U, class... Arguments>
  void construct(U* p, Arguments&&... arguments) {
    ::new (static_cast<void*>(p)) U(std::forward<Arguments>(arguments)...);
  }
  friend bool operator==(const AlignedAllocator& /*a*/, const AlignedAllocator& /*b*/) { return true; }
};

using AlignedWords = std::vector<std::uint32_t, AlignedAllocator<std::uint32_t>>;

}  // namespace bitattn::mma
