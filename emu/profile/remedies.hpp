#pragma once
// Remedies: changes of a kernel's operation order, or of its inputs, that are meant to remove a fault. Plain
// data, and the one place where their names are read; every backend takes them from here. What each one does,
// step by step: docs/remedies.md. How it is run: one file a remedy in emu/kernels/remedies.

#include <array>
#include <bitset>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace bitattn::profile {

enum class Remedy : std::uint8_t {
  // forward
  subtract_first,
  shifted_max,
  rounded_sum,
  // where D comes from
  o_residual,
  o_residual8,
  consistent_d,
  // dS and its products
  centred_keys,
  gproj,
  gproj_weighted,
  heavy_low,
  heavy_projection,
  ds_split,
  // the whole or half of it in fp32
  fp32_backward,
  fp32,
  // in the model
  mean_free_keys,
  mean_free_keys_bf16,
  qk_norm,
  qk_norm_gain,
  // known to hurt or to do nothing somewhere
  integer_reference,
  in_tile_feedback,
  in_tile_feedback_uniform,
  error_diffusion,
  error_diffusion_serial,
  top_key,
  uniform_shares,
  // lower precision: what they are for is to show what it costs
  p_e4m3,
  p_e5m2,
  ds_e4m3,
  ds_e5m2,
  ds_e4m3_tensor,
  ds_e5m2_tensor,
  fp8_forward,
  fp8_backward,
};

inline constexpr std::size_t kRemedyCount = static_cast<std::size_t>(Remedy::fp8_backward) + 1;

/// What a remedy decides. Two remedies that decide the same thing cannot be combined.
enum class Decides : std::uint16_t {
  reference = 1U << 0U,         ///< which number the forward subtracts from a row's scores
  exponent = 1U << 1U,          ///< how an exponent's argument is formed
  output_sum = 1U << 2U,        ///< which sum normalises O
  d_source = 1U << 3U,          ///< where D comes from
  key_operand = 1U << 4U,       ///< which keys dS is multiplied with
  row_sum = 1U << 5U,           ///< where the row sum of dS goes
  ds_cast = 1U << 6U,           ///< how dS becomes BF16
  low_parts = 1U << 7U,         ///< what the cast of dS drops
  input_norm = 1U << 8U,        ///< the norms of q and k
  input_centre = 1U << 9U,      ///< the mean of k
  p_cast = 1U << 10U,           ///< how the forward's P becomes narrow
  p_cast_backward = 1U << 11U,  ///< how the backward's P becomes narrow
};

struct DecisionName {
  Decides decision;
  std::string_view name;
};
inline constexpr std::array<DecisionName, 12> kDecisions{{
    {Decides::reference, "which number is subtracted from a row's scores"},
    {Decides::exponent, "how the exponent is formed"},
    {Decides::output_sum, "which sum normalises O"},
    {Decides::d_source, "where D comes from"},
    {Decides::key_operand, "which keys dS is multiplied with"},
    {Decides::row_sum, "where the row sum of dS goes"},
    {Decides::ds_cast, "how dS becomes BF16"},
    {Decides::low_parts, "what becomes of the bits that the cast of dS drops"},
    {Decides::input_norm, "the norms of q and k"},
    {Decides::input_centre, "the mean of k"},
    {Decides::p_cast, "how the forward's P becomes narrow"},
    {Decides::p_cast_backward, "how the backward's P becomes narrow"},
}};

/// What a remedy costs beyond the kernel's own work. The kernel's own: 2 products forward, 5 backward, a
/// product being one multiplication for every (query, key) pair and column of a head.
struct RemedyCost {
  double forward_ops = 0, backward_ops = 0;  ///< fp32 operations for every (query, key) pair
  double forward_products = 0;               ///< on the tensor core
  double backward_products = 0;              ///< on the tensor core
  double backward_columns = 0;               ///< columns of one product on the tensor core
  double fp32_products = 0;                  ///< without the tensor core
  double bytes_per_out = 0;                  ///< written and read, for every element of O
  double bytes_per_q = 0, bytes_per_k = 0;   ///< for every element of q, of k
  double bytes_per_row = 0;                  ///< for every query row of a head
  std::string_view measured{};               ///< in a real kernel, forward and backward together; empty: not
  double measured_low = -1, measured_high = -1;  ///< the same as shares of the unmodified kernel's time
};

/// Work that several remedies rest on; done once for a set of them, however many need it.
enum class SharedWork : std::uint8_t {
  pair_list = 1U << 0U,  ///< pairs with P' > 1/16: found, written, read, and a row of K and of Q gathered
  fp32_dk = 1U << 1U,    ///< dK leaves the main kernel in fp32
};

struct SharedCost {
  SharedWork work;
  RemedyCost cost;
};
/// A compare for every pair; 2.2 listed pairs a row (real runs), 24 bytes and two BF16 rows each.
inline constexpr std::array<SharedCost, 2> kSharedCosts{{
    {SharedWork::pair_list, {.backward_ops = 1, .bytes_per_q = 8.8, .bytes_per_row = 53}},
    {SharedWork::fp32_dk, {.bytes_per_k = 8}},
}};

struct RemedyInfo {
  Remedy remedy;
  std::string_view name;         ///< as users type it
  std::string_view description;  ///< one line
  std::string_view warning;      ///< its worst regime, or where it must not be used; empty: none known
  std::uint16_t decides;         ///< set of Decides
  bool experimental;             ///< for comparison only; its name begins with experimental:
  bool needs_zero_sum;           ///< rests on sum_j dS_ij = 0, which a softcap breaks
  RemedyCost cost;               ///< its own, without what it shares
  std::uint8_t shares = 0;       ///< set of SharedWork
};

constexpr std::uint8_t operator|(SharedWork a, SharedWork b) {
  return static_cast<std::uint8_t>(static_cast<unsigned>(a) | static_cast<unsigned>(b));
}
constexpr bool has(std::uint8_t set, SharedWork work) {
  return (set & static_cast<unsigned>(work)) != 0;
}

constexpr std::uint16_t decides(Decides a) {
  return static_cast<std::uint16_t>(a);
}
constexpr std::uint16_t operator|(Decides a, Decides b) {
  return static_cast<std::uint16_t>(decides(a) | decides(b));
}
constexpr std::uint16_t operator|(std::uint16_t a, Decides b) {
  return static_cast<std::uint16_t>(a | decides(b));
}

inline constexpr std::uint16_t kDecidesBackward = Decides::d_source | Decides::key_operand |
                                                  Decides::row_sum | Decides::ds_cast | Decides::low_parts |
                                                  Decides::p_cast_backward;

/// All remedies. Costs are counts (docs/remedies.md derives them); measured shares are of an H200.
inline constexpr std::array<RemedyInfo, kRemedyCount> kRemedies{{
    {Remedy::subtract_first,
     "subtract-first",
     "the row max is subtracted before the scale is multiplied on",
     "changes nothing but ties; dK up to 1.8 times worse in single captures there, 1.4 in late",
     decides(Decides::exponent),
     false,
     false,
     {.forward_ops = 1, .backward_ops = 2, .bytes_per_row = 8}},
    {Remedy::shifted_max,
     "shifted-max",
     "several maxima within 1e-3: twice a positive maximum, 0 for a negative one, is subtracted",
     "4.4 times worse dQ in ties; p underflows where a tied logit exceeds 87: O = 0 and no gradient",
     decides(Decides::reference),
     false,
     false,
     {.forward_ops = 2}},
    {Remedy::rounded_sum,
     "rounded-sum",
     "O is normalised by the sum of the rounded p",
     "alone about 1, dK up to 1.8 times worse in ties: it pays only with an unrounded O in D",
     decides(Decides::output_sum),
     false,
     false,
     {.forward_ops = 2, .measured = "2.4-4.5%", .measured_low = 0.024, .measured_high = 0.045}},
    {Remedy::o_residual,
     "o-residual",
     "D from an O that is kept to 16 more bits",
     "",
     decides(Decides::d_source),
     false,
     false,
     {.bytes_per_out = 4}},
    {Remedy::o_residual8,
     "o-residual8",
     "D from an O that is kept to 8 more bits",
     "",
     decides(Decides::d_source),
     false,
     false,
     {.bytes_per_out = 2, .measured = "0.0-1.5%", .measured_low = 0.0, .measured_high = 0.015}},
    {Remedy::consistent_d,
     "consistent-d",
     "D = sum P'dP / sum P', from a pass before dS is formed",
     "two more products",
     decides(Decides::d_source),
     false,
     false,
     {.backward_ops = 3, .backward_products = 2, .bytes_per_row = 8}},
    {Remedy::centred_keys,
     "centred-keys",
     "dS.K with keys shifted by one vector a head, exactly",
     "does nothing where keys share no direction",
     decides(Decides::key_operand),
     false,
     true,
     {.bytes_per_k = 6, .measured = "1.6-6.9%", .measured_low = 0.016, .measured_high = 0.069}},
    {Remedy::gproj,
     "gproj",
     "the row sum of the cast dS is taken out evenly over the visible keys, in fp32",
     "1.5 times worse dQ where a key with all the weight opposes the others (opposed-sink, opposed-cluster)",
     decides(Decides::row_sum),
     false,
     true,
     {.backward_columns = 8, .bytes_per_q = 10, .bytes_per_k = 10, .bytes_per_row = 8},
     static_cast<std::uint8_t>(SharedWork::fp32_dk)},
    {Remedy::gproj_weighted,
     "gproj-weighted",
     "the row sum of the cast dS is taken out in proportion to P'",
     "a second pass: S again, and two products without the tensor core",
     decides(Decides::row_sum),
     false,
     true,
     {.backward_ops = 3,
      .backward_products = 1,
      .backward_columns = 8,
      .fp32_products = 2,
      .bytes_per_q = 10,
      .bytes_per_k = 10,
      .bytes_per_row = 16},
     static_cast<std::uint8_t>(SharedWork::fp32_dk)},
    {Remedy::heavy_low,
     "heavy-low",
     "what the cast of dS drops is given back for pairs with P' > 1/16",
     "lists a pair for every row at a key that all rows look at",
     decides(Decides::low_parts),
     false,
     false,
     {},
     SharedWork::pair_list | SharedWork::fp32_dk},
    {Remedy::heavy_projection,
     "heavy-projection",
     "the row sum of the cast dS is taken out of pairs with P' > 1/16, in proportion to P'",
     "does nothing in rows without such a pair (16 or more equal maxima, diffuse rows)",
     decides(Decides::row_sum),
     false,
     true,
     {.backward_columns = 8},
     SharedWork::pair_list | SharedWork::fp32_dk},
    {Remedy::ds_split,
     "ds-split",
     "dS as two BF16 numbers, both multiplied with K and Q",
     "alone nearly nothing in late and peaky, dK up to 1.1 times worse in ties: D has to become better first",
     Decides::ds_cast | Decides::low_parts,
     false,
     false,
     {.backward_ops = 1.5, .backward_products = 2}},
    {Remedy::fp32_backward,
     "fp32-backward",
     "the backward in fp32, from its own m, L and O of q, k and v",
     "every product without the tensor core",
     kDecidesBackward,
     false,
     false,
     {.backward_products = -5, .fp32_products = 7, .bytes_per_row = 8}},
    {Remedy::fp32,
     "fp32",
     "forward and backward in fp32",
     "every product without the tensor core",
     static_cast<std::uint16_t>(kDecidesBackward | Decides::reference | Decides::exponent |
                                Decides::output_sum | Decides::p_cast),
     false,
     false,
     {.forward_products = -2, .backward_products = -5, .fp32_products = 7}},
    {Remedy::mean_free_keys,
     "mean-free-keys",
     "in the model: k minus its mean over the sequence in fp32, then the cast to BF16",
     "cast again, dQ is 23 times worse in wild, 1.5 times in normal; not for keys that arrive one by one",
     decides(Decides::input_centre),
     false,
     true,
     {.bytes_per_k = 6}},
    {Remedy::mean_free_keys_bf16,
     "mean-free-keys-bf16",
     "in the model: BF16 k minus its BF16 mean over the sequence",
     "cast again, dQ is 23 times worse in wild, 1.5 times in normal; not for keys that arrive one by one",
     decides(Decides::input_centre),
     false,
     true,
     {.bytes_per_k = 6}},
    {Remedy::qk_norm,
     "qk-norm",
     "in the model: q and k divided by their root mean square",
     "another function: errors are those of the normalised problem",
     decides(Decides::input_norm),
     false,
     false,
     {.bytes_per_q = 4, .bytes_per_k = 4}},
    {Remedy::qk_norm_gain,
     "qk-norm-gain",
     "in the model: q and k normalised, then a gain that gives each head its mean norm back",
     "another function: errors are those of the normalised problem",
     decides(Decides::input_norm),
     false,
     false,
     {.bytes_per_q = 4, .bytes_per_k = 4}},
    {Remedy::integer_reference,
     "experimental:integer-reference",
     "the row max rounded up to a whole power of two is subtracted",
     "dQ up to 17 times worse (wild, ties, real runs): the largest p is no longer exactly 1",
     Decides::reference | Decides::exponent,
     true,
     false,
     {.backward_ops = 1, .bytes_per_row = 8}},
    {Remedy::in_tile_feedback,
     "experimental:in-tile-feedback",
     "a tile's cast error of dS is taken out of its largest dS, which is cast again",
     "1.1-1.3 times worse dQ and dK in normal",
     decides(Decides::ds_cast),
     true,
     false,
     {.backward_ops = 4}},
    {Remedy::in_tile_feedback_uniform,
     "experimental:in-tile-feedback-uniform",
     "a tile's cast error of dS is taken out evenly over its keys, in fp32",
     "does nothing (0.97-1.01)",
     decides(Decides::ds_cast),
     true,
     false,
     {.backward_ops = 3, .fp32_products = 2}},
    {Remedy::error_diffusion,
     "experimental:error-diffusion",
     "the cast error of dS at a key is carried to the key eight further on",
     "up to 1.3 times worse dQ and dK in normal",
     decides(Decides::ds_cast),
     true,
     false,
     {.backward_ops = 2}},
    {Remedy::error_diffusion_serial,
     "experimental:error-diffusion-serial",
     "the cast error of dS at a key is carried to the next key of the tile",
     "1.2-1.4 times worse dQ and dK in normal, and no kernel could",
     decides(Decides::ds_cast),
     true,
     false,
     {.backward_ops = 3}},
    {Remedy::top_key,
     "experimental:top-key",
     "the row sum of dS out of dQ: the largest P' at its key, the rest evenly",
     "1.4 times worse dQ in opposed-cluster; dK stays as it is",
     Decides::row_sum | Decides::low_parts,
     true,
     true,
     {.backward_columns = 8, .bytes_per_q = 2, .bytes_per_k = 10, .bytes_per_row = 24}},
    {Remedy::uniform_shares,
     "experimental:uniform-shares",
     "as heavy-projection, and the rest of the row sum evenly over the visible keys",
     "1.5 times worse dQ in opposed-cluster",
     decides(Decides::row_sum),
     true,
     true,
     {.backward_columns = 8, .bytes_per_q = 10, .bytes_per_k = 10},
     SharedWork::pair_list | SharedWork::fp32_dk},
    {Remedy::p_e4m3,
     "experimental:p-e4m3",
     "P as e4m3 times 2^-8, forward and backward, in BF16 products",
     "the row sum up to 11 times larger (real run: 13% of dQ is leak); 1-3% of dV",
     Decides::p_cast | Decides::p_cast_backward,
     true,
     false,
     {}},
    {Remedy::p_e5m2,
     "experimental:p-e5m2",
     "P as e5m2 times 2^-8, forward and backward, in BF16 products",
     "the row sum up to 19 times larger (real run: 24% of dQ is leak); 2-5% of dV",
     Decides::p_cast | Decides::p_cast_backward,
     true,
     false,
     {}},
    {Remedy::ds_e4m3,
     "experimental:ds-e4m3",
     "dS as e4m3 with one scale a tile, in BF16 products",
     "2.5% of dQ and dK; the row sum 4 to 9 times larger in normal and late",
     decides(Decides::ds_cast),
     true,
     false,
     {}},
    {Remedy::ds_e5m2,
     "experimental:ds-e5m2",
     "dS as e5m2 with one scale a tile, in BF16 products",
     "5-8% of dQ and dK; the row sum 9 to 19 times larger in normal and late",
     decides(Decides::ds_cast),
     true,
     false,
     {}},
    {Remedy::ds_e4m3_tensor,
     "experimental:ds-e4m3-tensor",
     "dS as e4m3 with one scale for all, in BF16 products",
     "2.5% of dQ and dK; the row sum 4 to 9 times larger in normal and late",
     decides(Decides::ds_cast),
     true,
     false,
     {}},
    {Remedy::ds_e5m2_tensor,
     "experimental:ds-e5m2-tensor",
     "dS as e5m2 with one scale for all, in BF16 products",
     "5-8% of dQ and dK; the row sum 9 to 19 times larger in normal and late",
     decides(Decides::ds_cast),
     true,
     false,
     {}},
    {Remedy::fp8_forward,
     "experimental:fp8-forward",
     "q, k, v and P in e4m3: both forward products on the FP8 tensor core",
     "not with a BF16 backward: its P does not sum to 1 (real run: 32% of dQ; late: 5000 times dQ)",
     decides(Decides::p_cast),
     true,
     false,
     {}},
    {Remedy::fp8_backward,
     "experimental:fp8-backward",
     "q, k, v, dO, P and dS in e4m3: the five backward products on the FP8 tensor core",
     "not with a BF16 forward: P does not sum to 1 (real run: 41% of dQ; late: 10^7 times dQ)",
     Decides::p_cast_backward | Decides::ds_cast,
     true,
     false,
     {}},
}};

constexpr const RemedyInfo& info(Remedy remedy) {
  return kRemedies[static_cast<std::size_t>(remedy)];
}

/// Makes some captures more than 1.1 times worse than the plain kernel, alone (docs/findings.md, 5): whoever
/// runs it is told where, by its warning.
constexpr bool known_to_hurt(const RemedyInfo& remedy) {
  switch (remedy.remedy) {
    case Remedy::subtract_first:
    case Remedy::shifted_max:
    case Remedy::rounded_sum:
    case Remedy::gproj:
    case Remedy::ds_split:
    case Remedy::mean_free_keys:
    case Remedy::mean_free_keys_bf16:
      return true;
    default:
      return remedy.experimental;
  }
}

/// P' above which a pair is heavy; a row lists at most 1/kHeavy pairs.
inline constexpr double kHeavy = 1.0 / 16;

/// A set of remedies.
class RemedySet {
 public:
  bool has(Remedy remedy) const { return bits_[static_cast<std::size_t>(remedy)]; }
  RemedySet& add(Remedy remedy) {
    bits_.set(static_cast<std::size_t>(remedy));
    return *this;
  }
  bool empty() const { return bits_.none(); }
  bool any_of(std::uint16_t decisions) const {
    for (const RemedyInfo& i : kRemedies) {
      if (has(i.remedy) && (i.decides & decisions) != 0) return true;
    }
    return false;
  }
  /// The backward takes the forward's reference and row sum in place of its log-sum-exp.
  bool split_statistic() const { return has(Remedy::subtract_first) || has(Remedy::integer_reference); }
  /// dS is cast with a scale that is found in a pass before.
  bool scales_ds_by_tensor() const { return has(Remedy::ds_e4m3_tensor) || has(Remedy::ds_e5m2_tensor); }
  bool narrows_ds() const {
    return scales_ds_by_tensor() || has(Remedy::ds_e4m3) || has(Remedy::ds_e5m2) || has(Remedy::fp8_backward);
  }
  bool keeps_residual() const { return has(Remedy::o_residual) || has(Remedy::o_residual8); }
  bool operator==(const RemedySet&) const = default;

 private:
  std::bitset<kRemedyCount> bits_;
};

/// A name as users type it: what is remedied, and the remedies, in any order.
struct RemediedName {
  std::string base;
  RemedySet remedies;
};

/// "fa3+subtract-first+gproj" and the like; without a '+' the whole text is the base. Throws
/// std::invalid_argument with a clear line for a remedy that does not exist, comes twice, or decides what
/// another one of the name decides.
inline RemediedName parse_remedies(std::string_view text) {
  RemediedName name;
  std::size_t plus = text.find('+');
  name.base = std::string(text.substr(0, plus));
  const auto fail = [&](const std::string& why) {
    throw std::invalid_argument("'" + std::string(text) + "': " + why);
  };
  while (plus != std::string_view::npos) {
    const std::size_t begin = plus + 1;
    plus = text.find('+', begin);
    const std::string_view part = text.substr(begin, plus == std::string_view::npos ? plus : plus - begin);
    const RemedyInfo* found = nullptr;
    std::string known;
    for (const RemedyInfo& i : kRemedies) {
      if (i.name == part) found = &i;
      known += (known.empty() ? "" : ", ") + std::string(i.name);
    }
    if (found == nullptr) fail("no remedy is called '" + std::string(part) + "'; there are " + known);
    if (name.remedies.has(found->remedy)) fail(std::string(part) + " comes twice");
    for (const RemedyInfo& other : kRemedies) {
      const auto both = static_cast<std::uint16_t>(other.decides & found->decides);
      if (!name.remedies.has(other.remedy) || both == 0) continue;
      std::string_view what;
      for (const DecisionName& d : kDecisions) {
        if (what.empty() && (both & decides(d.decision)) != 0) what = d.name;
      }
      fail(std::string(other.name) + " and " + std::string(part) + " cannot be combined: both decide " +
           std::string(what));
    }
    name.remedies.add(found->remedy);
  }
  return name;
}

/// The remedies' names joined by '+', in the table's order.
inline std::string text(const RemedySet& remedies) {
  std::string out;
  for (const RemedyInfo& i : kRemedies) {
    if (remedies.has(i.remedy)) out += (out.empty() ? "" : "+") + std::string(i.name);
  }
  return out;
}

}  // namespace bitattn::profile
