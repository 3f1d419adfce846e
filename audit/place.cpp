#include "audit/place.hpp"

namespace bitattn::audit {

namespace {

bool is_padded(Axes axes) {
  return axes == Axes::padded_query_rows || axes == Axes::padded_query_columns ||
         axes == Axes::padded_key_columns;
}
bool is_of_keys(Axes axes) {
  return axes == Axes::key_columns || axes == Axes::padded_key_columns;
}
bool has_columns(Axes axes) {
  return axes != Axes::query_rows && axes != Axes::padded_query_rows;
}
bool has_tokens_first(Axes axes) {
  return axes == Axes::query_columns || axes == Axes::key_columns;
}

std::size_t block_of(Axes axes, const TileSizes& tiles) {
  return static_cast<std::size_t>(is_of_keys(axes) ? tiles.backward_n : tiles.backward_m);
}

/// First row of sequence b along the token axis of such a tensor.
std::size_t first_row(const Problem& problem, Axes axes, const TileSizes& tiles, std::size_t b) {
  const SequenceSpan span = problem.sequence(b);
  const std::size_t begin = is_of_keys(axes) ? span.k_begin : span.q_begin;
  return is_padded(axes) ? padded_begin(begin, b, block_of(axes, tiles)) : begin;
}

std::size_t length_of(const Problem& problem, Axes axes, std::size_t b) {
  const SequenceSpan span = problem.sequence(b);
  return is_of_keys(axes) ? span.k_length : span.q_length;
}

}  // namespace

Place place_of(const Problem& problem, const std::vector<std::size_t>& shape, Axes axes, bool forward,
               const TileSizes& tiles, std::size_t index) {
  Place place;
  place.of_keys = is_of_keys(axes);
  place.has_column = has_columns(axes);
  std::size_t rest = index;
  const std::size_t columns = place.has_column ? shape.back() : 1;
  if (columns > 0) {
    place.column = rest % columns;
    rest /= columns;
  }
  // What is left of the shape: [B,S,H] or [B,H,S], packed [T,H] or [H,T].
  const std::size_t axes_left = shape.size() - (place.has_column ? 1 : 0);
  const std::size_t last = shape[axes_left - 1];
  const std::size_t before = shape[axes_left - 2];
  std::size_t token = 0;
  if (has_tokens_first(axes)) {
    place.head = rest % last;
    token = rest / last;
    if (problem.layout == Layout::bshd) {
      place.sequence = token / before;
      token %= before;
    }
  } else {
    token = rest % last;
    rest /= last;
    place.head = problem.layout == Layout::bshd ? rest % before : rest;
    if (problem.layout == Layout::bshd) place.sequence = rest / before;
  }
  place.row = token;
  if (problem.layout == Layout::thd) {
    while (place.sequence + 1 < problem.batch &&
           token >= first_row(problem, axes, tiles, place.sequence + 1)) {
      ++place.sequence;
    }
    place.row = token - first_row(problem, axes, tiles, place.sequence);
  }
  place.padding = place.row >= length_of(problem, axes, place.sequence);
  place.backward_tile = !forward;
  const int block = place.of_keys ? tiles.backward_n : forward ? tiles.forward_m : tiles.backward_m;
  if (block > 0) place.tile = static_cast<int>(place.row / static_cast<std::size_t>(block));
  return place;
}

std::size_t index_of(const Problem& problem, const std::vector<std::size_t>& shape, Axes axes,
                     const TileSizes& tiles, std::size_t sequence, std::size_t head, std::size_t row,
                     std::size_t column) {
  const std::size_t columns = has_columns(axes) ? shape.back() : 1;
  const std::size_t axes_left = shape.size() - (has_columns(axes) ? 1 : 0);
  const std::size_t last = shape[axes_left - 1];
  const std::size_t before = shape[axes_left - 2];
  std::size_t flat = 0;
  if (problem.layout == Layout::thd) {
    const std::size_t token = first_row(problem, axes, tiles, sequence) + row;
    flat = has_tokens_first(axes) ? token * last + head : head * last + token;
  } else {
    flat = has_tokens_first(axes) ? (sequence * before + row) * last + head
                                  : (sequence * before + head) * last + row;
  }
  return flat * columns + column;
}

std::string Place::text(Layout layout) const {
  std::string text = layout == Layout::thd ? "sequence " : "b ";
  text += std::to_string(sequence) + ", h " + std::to_string(head) + (of_keys ? ", j " : ", i ") +
          std::to_string(row);
  if (has_column) text += ", d " + std::to_string(column);
  if (padding) text += ", padding";
  if (tile >= 0) {
    text += std::string(" (") + (backward_tile ? "backward" : "forward") + " tile " +
            (of_keys ? "n " : "m ") + std::to_string(tile) + ")";
  }
  return text;
}

}  // namespace bitattn::audit
