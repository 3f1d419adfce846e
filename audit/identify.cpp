#include "audit/identify.hpp"

#include <tbb/parallel_for.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <map>
#include <set>

#include "audit/stochastic.hpp"
#include "audit/unit.hpp"
#include "backends/attention_inputs.hpp"
#include "backends/emulator.hpp"
#include "backends/remedied.hpp"
#include "backends/stages.hpp"
#include "datasets/error.hpp"
#include "emu/profile/flash3.hpp"

namespace bitattn::audit {

namespace {

using profile::Deviation;
using profile::DeviationScope;
using profile::Kind;
using profile::Point;
using profile::PointClass;
using profile::Profile;
using profile::Stage;

constexpr std::size_t kLargeLength = 640;  ///< longer units are searched in parts
constexpr std::size_t kKeptByBits = 24;    ///< candidates that go on where none is exact
constexpr std::size_t kKeptBySize = 16;
constexpr std::size_t kMostEquals = 40;

/// Tensors in the order in which the kernels write them.
constexpr std::array<const char*, 10> kTensorOrder{"out",      "lse", "dpsum",    "lse_log2", "dq_accum",
                                                   "dk_accum", "dk",  "dv_accum", "dv",       "dq"};

std::size_t order_of(const std::string& tensor) {
  return static_cast<std::size_t>(std::find(kTensorOrder.begin(), kTensorOrder.end(), tensor) -
                                  kTensorOrder.begin());
}

bool compared(const TensorComparison& t) {
  return t.verdict != TensorVerdict::only_in_a && t.verdict != TensorVerdict::only_in_b;
}

/// Which kernel's work a tensor shows, given what was recorded before it.
Stage stage_of(const std::string& tensor, const Result& recorded) {
  if (tensor == "out" || tensor == "lse") return Stage::forward;
  if (tensor == "dpsum" || tensor == "lse_log2") return Stage::preprocess;
  if (tensor == "dq" && !recorded.intermediates.dq_accum.empty()) return Stage::postprocess;
  return Stage::main;
}

/// How far a candidate is from the recorded bits.
struct Score {
  std::size_t differing = 0;
  std::map<std::string, std::pair<std::size_t, double>> tensors;  ///< differing elements, relative error
};

Score score_of(const Comparison& comparison) {
  Score score;
  for (const TensorComparison& t : comparison.tensors) {
    if (!compared(t)) continue;
    const std::size_t n =
        t.verdict == TensorVerdict::differs ? std::max<std::size_t>(1, t.differing_bits) : 0;
    score.differing += n;
    const double error = std::isfinite(t.relative_error) ? t.relative_error : 1.0;
    score.tensors[t.tensor] = {n, error};
  }
  return score;
}

void add(Score& to, const Score& other) {
  to.differing += other.differing;
  for (const auto& [name, value] : other.tensors) {
    to.tensors[name].first += value.first;
    to.tensors[name].second = std::hypot(to.tensors[name].second, value.second);
  }
}

/// What is left of the plain kernel's errors, as norms over the tensors that differed.
double residual(const Score& score, const Score& plain) {
  double left = 0;
  double all = 0;
  for (const auto& [name, value] : plain.tensors) {
    if (value.first == 0 || value.second == 0) continue;
    const auto found = score.tensors.find(name);
    const double ratio = found == score.tensors.end() ? 1.0 : found->second.second / value.second;
    left += ratio * ratio;
    all += 1;
  }
  // A candidate that breaks what was equal is no nearer for it.
  for (const auto& [name, value] : score.tensors) {
    const auto found = plain.tensors.find(name);
    if (value.first > 0 && (found == plain.tensors.end() || found->second.first == 0)) left += 1;
  }
  return all == 0 ? (score.differing == 0 ? 0.0 : 1.0) : std::sqrt(left / all);
}

struct Candidate {
  std::vector<Deviation> deviations;
  Score score;
  double left = 1;
};

/// Values that are cast next: narrowing one is the cast rounding twice or otherwise, in other words.
std::optional<Point> cast_after(const Deviation& d) {
  switch (d.kind) {
    case Kind::narrowed:
    case Kind::narrowed_truncated:
    case Kind::narrowed_ties_away:
      break;
    default:
      return std::nullopt;
  }
  switch (d.point) {
    case Point::normalised_o:
      return Point::out_word;
    case Point::ds:
      return Point::ds_word;
    case Point::scaled_dq:
      return Point::dq_word;
    case Point::scaled_dk:
      return Point::dk_word;
    default:
      return std::nullopt;
  }
}

/// Program order, the cast before what says the same of the value just before it, and what changes several
/// places at once last.
int rank(const Deviation& d) {
  const profile::PointInfo& point = profile::info(d.point);
  const int whole = point.stage == Stage::both || point.point_class == PointClass::compiler ? 1 : 0;
  const auto cast = cast_after(d);
  return whole * 10000 + 2 * static_cast<int>(cast ? *cast : d.point) + (cast ? 1 : 0);
}

bool before(const Candidate& a, const Candidate& b) {
  return std::lexicographical_compare(
      a.deviations.begin(), a.deviations.end(), b.deviations.begin(), b.deviations.end(),
      [](const Deviation& x, const Deviation& y) { return rank(x) < rank(y); });
}

class Search {
 public:
  Search(const Capture& capture, const IdentifyOptions& options) : capture_(capture), options_(options) {}

  Identification run() {
    found_.capture = capture_.name;
    if (!capture_.has_recorded()) {
      throw InputError(capture_.name + ": nothing is recorded, so there are no bits to identify");
    }
    report("the plain kernel", 0);
    if (unmodified()) return std::move(found_);
    compare_plain();
    if (found_.plain.equal()) {
      // Each kernel gives its recorded outputs from its recorded inputs; what differed is an order that the
      // kernel leaves open.
      found_.verdict = Verdict::unmodified;
      found_.best = Explanation{"fa3", {}, 0, 0};
      found_.left = found_.plain;
      return std::move(found_);
    }
    choose_units();
    const Profile plain;
    std::vector<Candidate> nearest;
    if (settle("fa3", search(plain, nearest))) return std::move(found_);
    if (settle_stochastic()) return std::move(found_);
    if (options_.with_remedies && try_remedies()) return std::move(found_);
    keep_nearest("fa3", nearest);
    return std::move(found_);
  }

 private:
  void report(const std::string& what, double share) const {
    if (options_.progress) options_.progress(what, share);
  }

  /// The whole capture through the fast emulator.
  bool unmodified() {
    RunOptions run;
    run.want_order_free_parts = true;
    run.progress = [&](double share) { report("the plain kernel", share); };
    const Result emulated = emulator_backend(Profile{})->run(capture_, run);
    ++found_.tried;
    const Comparison c = compare_results(capture_.name, capture_.problem, capture_.recorded, emulated);
    if (c.compared_tensors() == 0) {
      throw InputError(capture_.name + ": no recorded tensor is one that fa3 gives");
    }
    if (!c.equal()) return false;
    found_.verdict = Verdict::unmodified;
    found_.best = Explanation{"fa3", {}, 0, 0};
    found_.plain = found_.left = c;
    return true;
  }

  /// Recorded against a profile, each kernel from its recorded inputs, over the whole capture, a KV head of a
  /// sequence at a time.
  Comparison compare_staged(const Profile& profile, bool all_heads_at_once, bool stop_at_first,
                            std::map<std::pair<std::size_t, std::size_t>, Score>* by_unit = nullptr) const {
    Comparison sum;
    sum.capture = capture_.name;
    sum.a = capture_.recorded.backend;
    sum.b = profile.name;
    const Problem& problem = capture_.problem;
    const std::size_t step = all_heads_at_once ? problem.heads_kv : 1;
    for (std::size_t b = 0; b < problem.batch; ++b) {
      for (std::size_t kv = 0; kv < problem.heads_kv; kv += step) {
        const UnitRange range = whole_unit(problem, b, kv, step);
        if (range.q_end == 0 || range.k_end == 0) continue;
        const Unit unit = make_unit(capture_, range, true, true);
        Comparison c = compare_on(profile, unit, true, true);
        shift_places(range, problem, c);
        if (by_unit != nullptr) (*by_unit)[{b, kv}] = score_of(c);
        merge(sum, c);
        if (stop_at_first && sum.differing() > 0) return sum;
      }
    }
    return sum;
  }

  static void merge(Comparison& sum, const Comparison& part) {
    for (const TensorComparison& t : part.tensors) {
      const auto found = std::find_if(sum.tensors.begin(), sum.tensors.end(),
                                      [&](const TensorComparison& s) { return s.tensor == t.tensor; });
      if (found == sum.tensors.end()) {
        sum.tensors.push_back(t);
        continue;
      }
      TensorComparison& s = *found;
      const auto all = static_cast<double>(s.elements);
      const auto more = static_cast<double>(t.elements);
      if (all + more > 0) {
        s.relative_error = std::sqrt(
            (all * s.relative_error * s.relative_error + more * t.relative_error * t.relative_error) /
            (all + more));
      }
      s.elements += t.elements;
      s.equal_bits += t.equal_bits;
      s.differing_bits += t.differing_bits;
      s.equal_in_one_order += t.equal_in_one_order;
      s.order_not_compared += t.order_not_compared;
      s.not_written += t.not_written;
      s.nan_differences += t.nan_differences;
      s.largest_ulps = std::max(s.largest_ulps, t.largest_ulps);
      if (t.verdict == TensorVerdict::differs || s.verdict == TensorVerdict::equal) s.verdict = t.verdict;
      if (s.differing_bits > 0) s.verdict = TensorVerdict::differs;
      if (!s.first) s.first = t.first;
      if (t.worst && (!s.worst || t.worst->ulps > s.worst->ulps)) s.worst = t.worst;
    }
  }

  Comparison compare_on(const Profile& profile, const Unit& unit, bool forward, bool backward) const {
    StageOptions stages;
    stages.forward = forward;
    stages.backward = backward;
    stages.want_order_free_parts = true;
    Result made = run_stages(pinned(profile, capture_.problem), unit.capture, stages);
    if (!forward) {  // computed only because the backward needed it
      made.out = {};
      made.lse = {};
    }
    return compare_results(capture_.name, unit.capture.problem, unit.capture.recorded, made);
  }

  void compare_plain() {
    report("each kernel from its recorded inputs", 0);
    found_.plain = compare_staged({}, false, false, &plain_by_unit_);
    std::vector<const TensorComparison*> differing;
    for (const TensorComparison& t : found_.plain.tensors) {
      if (compared(t) && t.verdict == TensorVerdict::differs) differing.push_back(&t);
    }
    for (const TensorComparison* t : differing) {
      if (found_.born_in.empty() || order_of(t->tensor) < order_of(found_.born_in)) {
        found_.born_in = t->tensor;
        found_.born = t->first;
      }
      stages_.insert(stage_of(t->tensor, capture_.recorded));
    }
  }

  // --- where to look

  /// The unit with the most differing bits, its parts where it is long, and all heads of its sequence.
  void choose_units() {
    const auto worst = std::max_element(
        plain_by_unit_.begin(), plain_by_unit_.end(),
        [](const auto& a, const auto& b) { return a.second.differing < b.second.differing; });
    const auto [b, kv] = worst->first;
    const Problem& problem = capture_.problem;
    const UnitRange range = whole_unit(problem, b, kv, 1);
    const Unit whole = make_unit(capture_, range, true, true);
    const bool windowed = problem.window_left >= 0 || problem.window_right >= 0;
    const bool large = range.q_end > kLargeLength || range.k_end > kLargeLength;
    const bool recorded_forward = !capture_.recorded.out.empty() && !capture_.recorded.lse.empty();
    const Unit rows = windowed ? whole : rows_part(whole);
    const bool keys_alone = !windowed && recorded_forward;
    const Unit keys = keys_alone ? keys_part(whole) : whole;
    const bool rows_differ = differs_in({"out", "lse", "dpsum", "lse_log2", "dq_accum", "dq"});
    screen_ = {rows_differ ? rows : keys};
    if (large && !windowed) {
      judges_ = {rows, keys};
    } else {
      judges_ = {whole};
    }
    if (problem.heads_kv > 1) {
      all_heads_ = make_unit(capture_, whole_unit(problem, b, 0, problem.heads_kv), true, true);
    }
    scope_.masked = problem.causal || windowed;
    scope_.local = windowed;
    scope_.softcap = problem.softcap > 0;
    scope_.grouped = problem.group() > 1;
    scope_.several_heads = problem.heads_kv > 1;
    scope_.with_lengths_apart = range.q_end != range.k_end;
    ProblemViews views;
    view_problem(problem, false, views);
    const auto blocks = [](std::size_t n, int block) {
      return static_cast<int>((n + static_cast<std::size_t>(block) - 1) / static_cast<std::size_t>(block));
    };
    scope_.key_blocks_forward =
        blocks(range.k_end, profile::flash3_forward_tiles(views.inputs.call, {}).block_n);
    const profile::BackwardTiles backward = profile::flash3_backward_tiles(views.inputs.call, {});
    scope_.key_blocks_backward = blocks(range.k_end, backward.block_n);
    scope_.query_blocks_backward = blocks(range.q_end, backward.block_m);
  }

  bool differs_in(std::initializer_list<const char*> names) const {
    return std::any_of(found_.plain.tensors.begin(), found_.plain.tensors.end(), [&](const auto& t) {
      return t.verdict == TensorVerdict::differs &&
             std::any_of(names.begin(), names.end(), [&](const char* n) { return t.tensor == n; });
    });
  }

  /// Which rows (or keys) of a unit differ from the plain kernels, summed over blocks of `block`.
  std::vector<std::size_t> differing_blocks(const Unit& unit, std::size_t block, bool of_keys) const {
    StageOptions stages;
    const Result made = run_stages(pinned({}, capture_.problem), unit.capture, stages);
    const Result& recorded = unit.capture.recorded;
    const std::size_t rows = of_keys ? unit.range.k_end : unit.range.q_end;
    std::vector<std::size_t> counts((rows + block - 1) / block, 0);
    const auto count = [&](const auto& a, const auto& b, bool tokens_first, std::size_t weight) {
      if (a.empty() || a.shape != b.shape) return;
      const std::size_t columns = a.shape.size() == 4 ? a.shape[3] : 1;
      const std::size_t inner = tokens_first ? a.shape[2] * columns : columns;
      const std::size_t tokens = tokens_first ? a.shape[1] : a.shape[2];
      for (std::size_t i = 0; i < a.size(); ++i) {
        if (std::memcmp(&a.data[i], &b.data[i], sizeof a.data[i]) == 0) continue;
        const std::size_t row = i / inner % tokens;
        if (row < rows) counts[row / block] += weight;
      }
    };
    const std::size_t d = capture_.problem.head_dim;
    if (of_keys) {
      count(recorded.dk, made.dk, true, 1);
      count(recorded.dv, made.dv, true, 1);
    } else {
      count(recorded.out, made.out, true, 1);
      count(recorded.lse, made.lse, false, d);
      count(recorded.intermediates.dpsum, made.intermediates.dpsum, false, d);
      count(recorded.intermediates.lse_log2, made.intermediates.lse_log2, false, d);
      count(recorded.intermediates.dq_accum, made.intermediates.dq_accum, false, 1);
      count(recorded.dq, made.dq, true, 1);
    }
    return counts;
  }

  profile::BackwardTiles backward_tiles() const {
    ProblemViews views;
    view_problem(capture_.problem, false, views);
    return profile::flash3_backward_tiles(views.inputs.call, {});
  }

  /// One backward tile of query rows, the one that differs most, with all keys these rows see.
  Unit rows_part(const Unit& whole) const {
    const auto block = static_cast<std::size_t>(backward_tiles().block_m);
    const std::vector<std::size_t> counts = differing_blocks(whole, block, false);
    std::size_t chosen = 0;
    for (std::size_t i = 0; i < counts.size(); ++i) {
      if (counts[i] >= counts[chosen]) chosen = i;  // the later one: it has more key blocks
    }
    UnitRange range = whole.range;
    const std::size_t sq = range.q_end;
    range.q_begin = chosen * block;
    range.q_end = std::min(sq, range.q_begin + block);
    if (capture_.problem.causal) {
      const std::size_t hidden = sq - range.q_end;  // keys that only later rows see
      if (hidden >= range.k_end) return whole;
      range.k_end -= hidden;
    }
    return make_unit(capture_, range, true, false);
  }

  /// The last keys from the last key block that differs about as much as any, with all queries that see them.
  Unit keys_part(const Unit& whole) const {
    const profile::BackwardTiles tiles = backward_tiles();
    const auto block = static_cast<std::size_t>(tiles.block_n);
    const std::vector<std::size_t> counts = differing_blocks(whole, block, true);
    const std::size_t most = *std::max_element(counts.begin(), counts.end());
    std::size_t chosen = counts.size() - 1;
    while (chosen > 0 && 2 * counts[chosen] < most) --chosen;
    UnitRange range = whole.range;
    const std::size_t sq = range.q_end;
    const std::size_t sk = range.k_end;
    range.k_begin = chosen * block;
    if (capture_.problem.causal && range.k_begin + sq > sk) {
      const std::size_t first_row = range.k_begin + sq - sk;
      range.q_begin = first_row - first_row % static_cast<std::size_t>(tiles.block_m);
    }
    return make_unit(capture_, range, false, true);
  }

  // --- candidates

  bool has(Stage stage) const { return stages_.count(stage) != 0; }

  /// Could a point of this stage explain what differs?
  bool in_question(Stage stage) const {
    const Result& r = capture_.recorded;
    const bool inputs_recorded = !r.out.empty() && !r.lse.empty();
    const bool preprocess_recorded = !r.intermediates.dpsum.empty() && !r.intermediates.lse_log2.empty();
    const bool backward = has(Stage::preprocess) || has(Stage::main) || has(Stage::postprocess);
    switch (stage) {
      case Stage::both:
        return true;
      case Stage::forward:
        return has(Stage::forward) || (backward && !inputs_recorded);
      case Stage::preprocess:
        return has(Stage::preprocess) || (has(Stage::main) && !preprocess_recorded);
      case Stage::main:
        return has(Stage::main) || has(Stage::postprocess);
      case Stage::postprocess:
        return has(Stage::postprocess) || (has(Stage::main) && r.intermediates.dq_accum.empty());
    }
    return true;
  }

  std::vector<Candidate> candidates(bool of_heads) const {
    std::vector<Candidate> all;
    for (std::size_t i = 0; i < profile::kPointCount; ++i) {
      const auto point = static_cast<Point>(i);
      const bool heads = profile::info(point).point_class == PointClass::head_map;
      if (heads != of_heads || !in_question(profile::info(point).stage)) continue;
      for (const Deviation& d : profile::deviations_at(point, scope_)) all.push_back({{d}, {}, 1});
    }
    return all;
  }

  Score score_on(const Profile& base, const std::vector<Deviation>& deviations,
                 const std::vector<Unit>& units) const {
    Profile profile = base;
    profile.deviations = deviations;
    Score sum;
    for (const Unit& unit : units) {
      const bool backward = needs_backward_ || !unit.rows;
      add(sum, score_of(compare_on(profile, unit, unit.rows && needs_forward_, backward)));
    }
    return sum;
  }

  void score_all(const Profile& base, const std::vector<Unit>& units, std::vector<Candidate>& list,
                 const std::string& what) {
    const Score plain = score_on(base, {}, units);
    std::atomic<std::size_t> done{0};
    tbb::parallel_for(std::size_t{0}, list.size(), [&](std::size_t i) {
      list[i].score = score_on(base, list[i].deviations, units);
      list[i].left = residual(list[i].score, plain);
      report(what, static_cast<double>(++done) / static_cast<double>(list.size()));
    });
    found_.tried += list.size();
  }

  /// Those that are exact; where none is, those that come nearest.
  static std::vector<Candidate> keep_best(std::vector<Candidate> list) {
    std::vector<Candidate> exact;
    std::copy_if(list.begin(), list.end(), std::back_inserter(exact),
                 [](const Candidate& c) { return c.score.differing == 0; });
    if (!exact.empty()) return exact;
    std::vector<Candidate> kept;
    const auto take = [&](std::size_t count, auto less) {
      std::stable_sort(list.begin(), list.end(), less);
      const std::size_t n = std::min(count, list.size());
      kept.insert(kept.end(), list.begin(), list.begin() + static_cast<std::ptrdiff_t>(n));
      list.erase(list.begin(), list.begin() + static_cast<std::ptrdiff_t>(n));
    };
    take(kKeptByBits,
         [](const Candidate& a, const Candidate& b) { return a.score.differing < b.score.differing; });
    take(kKeptBySize, [](const Candidate& a, const Candidate& b) { return a.left < b.left; });
    return kept;
  }

  /// The candidates that give every bit of the judging units, in the order in which they are told. `nearest`:
  /// where there are none, those that come nearest.
  std::vector<Candidate> search(const Profile& base, std::vector<Candidate>& nearest) {
    // The passes in which something can differ.
    needs_forward_ = true;
    needs_backward_ = !capture_.problem.dout.empty() && stages_ != std::set<Stage>{Stage::forward};
    std::vector<Candidate> list = candidates(false);
    score_all(base, screen_, list, "one tile");
    list = keep_best(std::move(list));
    needs_backward_ = !capture_.problem.dout.empty();
    score_all(base, judges_, list, "one head");
    if (all_heads_) {
      std::vector<Candidate> heads = candidates(true);
      score_all(base, {*all_heads_}, heads, "heads");
      list.insert(list.end(), heads.begin(), heads.end());
    }
    std::vector<Candidate> exact;
    std::copy_if(list.begin(), list.end(), std::back_inserter(exact),
                 [](const Candidate& c) { return c.score.differing == 0; });
    std::stable_sort(exact.begin(), exact.end(), before);
    if (exact.empty()) exact = one_a_stage(base);
    if (exact.empty()) {
      std::stable_sort(list.begin(), list.end(),
                       [](const Candidate& a, const Candidate& b) { return a.left < b.left; });
      nearest = list;
    }
    return exact;
  }

  /// Where several kernels deviate, each on its own: a deviation for each that gives all of its tensors.
  std::vector<Candidate> one_a_stage(const Profile& base) {
    if (stages_.size() < 2) return {};
    std::vector<Deviation> together;
    for (const Stage stage : stages_) {
      std::vector<Candidate> list;
      for (const Candidate& c : candidates(false)) {
        if (profile::info(c.deviations.front().point).stage == stage) list.push_back(c);
      }
      score_all(base, judges_, list, "one kernel");
      const auto exact_here = [&](const Candidate& c) {
        return std::all_of(c.score.tensors.begin(), c.score.tensors.end(), [&](const auto& t) {
          return t.second.first == 0 || stage_of(t.first, capture_.recorded) != stage;
        });
      };
      std::stable_sort(list.begin(), list.end(), before);
      const auto found = std::find_if(list.begin(), list.end(), exact_here);
      if (found == list.end()) return {};
      together.push_back(found->deviations.front());
    }
    std::vector<Candidate> both{{together, {}, 0}};
    score_all(base, judges_, both, "kernels together");
    if (both.front().score.differing > 0) return {};
    return both;
  }

  // --- verdicts

  /// Confirms candidates over the whole capture; the first that holds is it.
  bool settle(const std::string& name, const std::vector<Candidate>& exact) {
    std::size_t confirmed = 0;
    for (std::size_t i = 0; i < exact.size() && confirmed < kMostEquals; ++i) {
      report("the whole capture", static_cast<double>(i) / static_cast<double>(exact.size()));
      Profile profile = profile_named(name);
      profile.deviations = exact[i].deviations;
      const bool heads = std::any_of(
          exact[i].deviations.begin(), exact[i].deviations.end(),
          [](const Deviation& d) { return profile::info(d.point).point_class == PointClass::head_map; });
      Comparison c = compare_staged(profile, heads, true);
      if (c.differing() > 0) continue;
      Explanation e{name, exact[i].deviations, 0, 0};
      if (confirmed++ == 0) {
        found_.verdict = Verdict::deviation;
        found_.best = std::move(e);
        found_.left = std::move(c);
      } else {
        found_.equals.push_back(std::move(e));
      }
    }
    return confirmed > 0;
  }

  static Profile profile_named(const std::string& name) {
    Profile profile;
    profile.name = name;
    profile.remedies = profile::parse_remedies(name).remedies;
    return profile;
  }

  bool settle_stochastic() {
    report("stochastic rounding", 0);
    const Unit& unit = judges_.front();
    for (const Point point : kStochasticPoints) {
      if (!in_question(profile::info(point).stage)) continue;
      ++found_.tried;
      const std::optional<StochasticFit> fit =
          fit_stochastic(pinned({}, capture_.problem), unit.capture, point, found_.plain);
      if (!fit) continue;
      found_.verdict = Verdict::stochastic;
      found_.stochastic = fit;
      found_.best = Explanation{"fa3", {fit->deviation}, found_.plain.differing(), 1};
      found_.left = found_.plain;
      return true;
    }
    return false;
  }

  bool try_remedies() {
    std::string nearest_name;
    double nearest_left = 0.7;  // a remedy that is no nearer than this is no base to search from
    const Unit& unit = judges_.front();
    const Score plain = score_on({}, {}, judges_);
    std::size_t done = 0;
    for (const profile::RemedyInfo& remedy : profile::kRemedies) {
      report("remedies", static_cast<double>(++done) / static_cast<double>(profile::kRemedyCount));
      const std::string name = "fa3+" + std::string(remedy.name);
      if (remedy.needs_zero_sum && capture_.problem.softcap != 0) continue;
      RunOptions run;
      run.want_order_free_parts = true;
      Result made;
      try {
        made = remedied_backend(name)->run(unit.capture, run);
      } catch (const InputError&) {
        continue;  // a remedy that does not run on this shape did not make it
      }
      ++found_.tried;
      const Comparison c = compare_results(capture_.name, unit.capture.problem, unit.capture.recorded, made);
      const Score score = score_of(c);
      if (score.differing == 0) {
        const Result all = remedied_backend(name)->run(capture_, run);
        Comparison whole = compare_results(capture_.name, capture_.problem, capture_.recorded, all);
        if (!whole.equal()) continue;
        found_.verdict = Verdict::deviation;
        found_.best = Explanation{name, {}, 0, 0};
        found_.left = std::move(whole);
        return true;
      }
      if (residual(score, plain) < nearest_left) {
        nearest_left = residual(score, plain);
        nearest_name = name;
      }
    }
    if (nearest_name.empty() || !runs_in_stages(nearest_name)) return false;
    std::vector<Candidate> nearest;
    return settle(nearest_name, search(profile_named(nearest_name), nearest));
  }

  static bool runs_in_stages(const std::string& name) {
    const profile::RemedySet remedies = profile::parse_remedies(name).remedies;
    return !remedies.has(profile::Remedy::fp32) && !remedies.has(profile::Remedy::fp32_backward) &&
           !remedies.any_of(profile::decides(profile::Decides::input_norm) |
                            profile::decides(profile::Decides::input_centre));
  }

  void keep_nearest(const std::string& name, const std::vector<Candidate>& list) {
    // Something that leaves most of the difference is no explanation.
    if (list.empty() || list.front().left > 0.5) return;
    const Candidate& c = list.front();
    found_.best = Explanation{name, c.deviations, c.score.differing, c.left};
    Profile profile = profile_named(name);
    profile.deviations = c.deviations;
    found_.left = compare_staged(profile, false, false);
    found_.best->differing = found_.left.differing();
  }

  const Capture& capture_;
  const IdentifyOptions& options_;
  Identification found_;
  std::map<std::pair<std::size_t, std::size_t>, Score> plain_by_unit_;
  std::set<Stage> stages_;  ///< whose tensors differ from the plain kernels
  std::vector<Unit> screen_, judges_;
  std::optional<Unit> all_heads_;
  DeviationScope scope_;
  bool needs_forward_ = true, needs_backward_ = true;
};

}  // namespace

Identification identify(const Capture& capture, const IdentifyOptions& options) {
  Identification found = Search(capture, options).run();
  const std::string kernel = capture.problem.text("kernel");
  const bool fits = found.verdict != Verdict::nothing_fits;
  const bool named =
      kernel.starts_with("flash-attention-3") || (fits && kernel == "bitattn " + found.best->profile);
  if (fits && !kernel.empty() && !named) {
    found.notes.push_back("The capture calls its kernel " + kernel +
                          ": on an input as small as this another library's bits may be the same.");
  }
  return found;
}

}  // namespace bitattn::audit
