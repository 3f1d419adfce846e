#pragma once
// Two runs of the same steps, and where they part: the first moment, tensor and element, in the order in
// which a training step makes them, whose bits differ.
//
// Captures are paired by the moment that they say they are of. In a step come the forward passes from the
// first layer to the last, then the backward passes from the last to the first.

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "audit/compare.hpp"
#include "audit/moment.hpp"
#include "datasets/result.hpp"

namespace bitattn::audit {

struct RunCapture {
  std::string name;
  Moment moment;
};

/// Captures of both runs that are of one moment.
struct CapturePair {
  Moment moment;
  std::string a, b;
};

struct PairedRuns {
  std::vector<CapturePair> pairs;  ///< in the order of their moments
  std::vector<std::string> only_in_a, only_in_b;
};

/// One capture against one is a pair whatever they say. `a_name`, `b_name`: of the runs, for errors. Throws
/// InputError where a run has two captures of one moment, or no moment is in both.
PairedRuns pair_runs(const std::string& a_name, const std::vector<RunCapture>& a, const std::string& b_name,
                     const std::vector<RunCapture>& b);

/// A tensor of a pair that differs.
struct Parting {
  TensorComparison tensor;
  bool input = false;     ///< attention was given it: q, k, v, dout
  bool backward = false;  ///< of the backward pass, dout among them
  /// The kernel of one side adds its parts in any order (not deterministic): it may differ from itself.
  bool open_order = false;
  /// Something that is made before it was not recorded on both sides, so it may have differed already.
  bool unseen_before = false;
};

/// A tensor's place in the order in which a step makes them (ComparedPair::partings); one that is not known
/// comes last.
std::size_t place_in_step(std::string_view tensor);

struct ComparedPair {
  CapturePair captures;
  Layout layout = Layout::bshd;
  std::vector<TensorComparison> inputs;
  Comparison results;
  /// Tensors that differ, in the order in which a step makes them: q k v out lse, then dout dpsum lse_log2
  /// dv_accum dv dk_accum dk dq_accum dq. Those whose shapes differ, in which no place does, come last.
  std::vector<Parting> partings;
};

/// Throws InputError where the captures are not of the same problem (problem_difference).
ComparedPair compare_pair(const CapturePair& captures, const Capture& a, const Capture& b);

struct ComparedRuns {
  std::vector<ComparedPair> pairs;
  std::optional<std::size_t> first;  ///< of `pairs`: where the runs part
  std::vector<std::string> only_in_a, only_in_b;
  std::optional<Capture> first_a, first_b;  ///< the captures of pairs[*first], if they were to be kept

  std::size_t differing_pairs() const;
  /// No bit of any pair differs, and every capture is one of a pair.
  bool equal() const;
  /// Where they part, attention was given other inputs: which kernels they follow explains nothing there.
  bool given_other_inputs() const;
};

/// Reads the pairs with `read`, each capture once and a pair at a time. Throws InputError as compare_pair
/// does, and where no output was recorded on both sides because a capture has none.
ComparedRuns compare_runs(const PairedRuns& runs, bool keep_first,
                          const std::function<Capture(const std::string&)>& read);

}  // namespace bitattn::audit
