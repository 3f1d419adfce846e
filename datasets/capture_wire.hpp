#pragma once
// A capture as a stream of bytes between two processes of this program. One list of fields serves both
// directions: carry(wire, capture) writes or reads them in order, as the wire does.

#include <cstdint>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "datasets/foreign.hpp"
#include "datasets/result.hpp"

namespace bitattn::wire {

/// Sends through `Pipe`, which has put(const void*, std::size_t).
template <class Pipe>
class Sender {
 public:
  explicit Sender(Pipe& pipe) : pipe_(pipe) {}
  void bytes(void* data, std::size_t size) { pipe_.put(data, size); }
  std::uint64_t count(std::uint64_t n, std::size_t /*size*/) {
    pipe_.put(&n, sizeof n);
    return n;
  }
  std::uint64_t kind(std::uint64_t k, std::uint64_t /*kinds*/) { return count(k, 1); }
  static constexpr bool kReceives = false;

 private:
  Pipe& pipe_;
};

/// Receives through `Pipe`, which has get(void*, std::size_t), most() (bytes that one piece may take) and
/// refuse_nonsense() (does not return).
template <class Pipe>
class Receiver {
 public:
  explicit Receiver(Pipe& pipe) : pipe_(pipe) {}
  void bytes(void* data, std::size_t size) { pipe_.get(data, size); }
  /// A number of elements, each of `size` bytes or more.
  std::uint64_t count(std::uint64_t /*n*/, std::size_t size) {
    std::uint64_t n = 0;
    pipe_.get(&n, sizeof n);
    if (n > pipe_.most() / size) pipe_.refuse_nonsense();
    return n;
  }
  std::uint64_t kind(std::uint64_t /*k*/, std::uint64_t kinds) {
    const std::uint64_t k = count(0, 1);
    if (k >= kinds) pipe_.refuse_nonsense();
    return k;
  }
  static constexpr bool kReceives = true;

 private:
  Pipe& pipe_;
};

// Only 0 and 1 may ever stand in a bool, and only named values in an enumeration; all of ours have two.
template <class Wire, class T>
requires(std::is_same_v<T, bool> || std::is_enum_v<T>) void carry(Wire& wire, T& value) {
  constexpr std::uint64_t kKinds = 2;
  value = static_cast<T>(wire.kind(static_cast<std::uint64_t>(value), kKinds));
}

template <class Wire, class T>
requires(std::is_arithmetic_v<T> && !std::is_same_v<T, bool>) void carry(Wire& wire, T& value) {
  wire.bytes(&value, sizeof value);
}

template <class Wire>
void carry(Wire& wire, std::string& text) {
  text.resize(wire.count(text.size(), 1));
  wire.bytes(text.data(), text.size());
}

template <class Wire, class T>
void carry(Wire& wire, std::vector<T>& values) {
  values.resize(wire.count(values.size(), sizeof(T)));
  if constexpr (std::is_arithmetic_v<T>) {
    wire.bytes(values.data(), values.size() * sizeof(T));
  } else {
    for (T& value : values) carry(wire, value);
  }
}

template <class Wire, class... Types>
void carry(Wire& wire, std::variant<Types...>& value) {
  const std::uint64_t kind = wire.kind(value.index(), sizeof...(Types));
  std::uint64_t at = 0;
  // Makes the alternative of that number, if it is not there already.
  ((at++ == kind && value.index() != kind ? void(value.template emplace<Types>()) : void()), ...);
  std::visit([&](auto& held) { carry(wire, held); }, value);
}

template <class Wire>
void carry(Wire& wire, AttributeArray& array) {
  carry(wire, array.shape);
  carry(wire, array.values);
}

template <class Wire, class Value>
void carry(Wire& wire, std::map<std::string, Value>& map) {
  const std::uint64_t n = wire.count(map.size(), sizeof(Value));
  if constexpr (Wire::kReceives) {
    for (std::uint64_t i = 0; i < n; ++i) {
      std::string name;
      carry(wire, name);
      carry(wire, map[name]);
    }
  } else {
    for (auto& [name, value] : map) {
      std::string copy = name;
      carry(wire, copy);
      carry(wire, value);
    }
  }
}

template <class Wire, class T>
void carry(Wire& wire, Tensor<T>& tensor) {
  carry(wire, tensor.shape);
  carry(wire, tensor.data);
}

template <class Wire, class... Fields>
void carry_all(Wire& wire, Fields&... fields) {
  (carry(wire, fields), ...);
}

template <class Wire>
void carry(Wire& wire, Problem& p) {
  carry_all(wire, p.layout, p.batch, p.seqlen_q, p.seqlen_k, p.heads_q, p.heads_kv, p.head_dim, p.head_dim_v,
            p.q, p.k, p.v, p.dout, p.cu_seqlens_q, p.cu_seqlens_k, p.softmax_scale, p.causal, p.window_left,
            p.window_right, p.softcap, p.deterministic, p.causal_alignment, p.attributes, p.array_attributes);
}

/// All that a file can hold of a result.
template <class Wire>
void carry(Wire& wire, Result& r) {
  carry_all(wire, r.backend, r.out, r.dq, r.dk, r.dv, r.lse, r.intermediates.dpsum, r.intermediates.lse_log2,
            r.intermediates.dq_accum, r.intermediates.dk_accum, r.intermediates.dv_accum, r.uncast.out,
            r.uncast.lse, r.uncast.dq, r.uncast.dk, r.uncast.dv, r.dq_order_fixed, r.dkv_order_fixed,
            r.notes);
}

template <class Wire>
void carry(Wire& wire, Capture& capture) {
  carry_all(wire, capture.name, capture.problem, capture.recorded);
}

template <class Wire>
void carry(Wire& wire, ForeignTensor& tensor) {
  carry_all(wire, tensor.type, tensor.shape, tensor.bytes);
}

template <class Wire>
void carry(Wire& wire, ForeignFile& file) {
  carry_all(wire, file.tensors, file.attributes);
}

}  // namespace bitattn::wire
