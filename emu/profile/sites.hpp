#pragma once
// Rounding sites: the named places in the operation order where a value is rounded or approximated. Each can
// be run as the chip does or exactly, alone or in sets; `bitattn sites` lists them.

#include <array>
#include <bitset>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace bitattn::profile {

enum class Site : std::uint8_t {
  // forward
  score_mma,
  softcap,
  score_scale,
  row_max_scale,
  exp2,
  row_sum,
  rescale,
  p_cast,
  pv_mma,
  rcp,
  lse,
  o_cast,
  // backward
  dpsum_o_cast,
  dpsum,
  lse_log2,
  score_mma_backward,
  softcap_backward,
  p_backward,
  dp_mma,
  ds_sub,
  ds_mul,
  pb_cast,
  ds_cast,
  dv_mma,
  dk_mma,
  dq_mma,
  dq_reduce,
  dkv_reduce,
  dq_cast,
  dk_cast,
  dv_cast,
};

inline constexpr std::size_t kSiteCount = static_cast<std::size_t>(Site::dv_cast) + 1;

struct SiteInfo {
  Site site;
  std::string_view name;
  std::string_view description;
};

/// All sites in program order.
inline constexpr std::array<SiteInfo, kSiteCount> kSites{{
    {Site::score_mma, "score_mma", "forward scores: alignment and truncation in the tensor core"},
    {Site::softcap, "softcap", "forward softcap: scaling and approximated tanh of a score"},
    {Site::score_scale, "score_scale",
     "exponent argument: the fp32 constant c = scale*log2(e) and the rounding of fma(x, c, -m*c)"},
    {Site::row_max_scale, "row_max_scale",
     "the rounded product m*c that the exponent subtracts: the row-max residue"},
    {Site::exp2, "exp2", "the chip's exp2 in the forward"},
    {Site::row_sum, "row_sum", "fp32 row sum of p, four partial sums"},
    {Site::rescale, "rescale", "factor between key blocks, and the rescaling of O by it"},
    {Site::p_cast, "p_cast", "P cast to BF16 before P.V"},
    {Site::pv_mma, "pv_mma", "P.V: alignment and truncation in the tensor core"},
    {Site::rcp, "rcp", "the chip's reciprocal of the row sum, and O's multiply by it"},
    {Site::lse, "lse", "log-sum-exp in fp32, the chip's log2"},
    {Site::o_cast, "o_cast", "O cast to BF16 as it is stored"},
    {Site::dpsum_o_cast, "dpsum_o_cast", "O cast to BF16 as D = rowsum(dO.O) reads it"},
    {Site::dpsum, "dpsum", "fp32 sum D = rowsum(dO.O)"},
    {Site::lse_log2, "lse_log2", "log-sum-exp scaled to base 2 in fp32"},
    {Site::score_mma_backward, "score_mma_backward",
     "backward scores: alignment and truncation in the tensor core"},
    {Site::softcap_backward, "softcap_backward", "backward softcap: approximated tanh and its derivative"},
    {Site::p_backward, "p_backward", "backward exponent argument and the chip's exp2"},
    {Site::dp_mma, "dp_mma", "dP = dO.V: alignment and truncation in the tensor core"},
    {Site::ds_sub, "ds_sub", "rounding of dP - D"},
    {Site::ds_mul, "ds_mul", "rounding of P*(dP - D), and of the softcap derivative's multiply"},
    {Site::pb_cast, "pb_cast", "backward P cast to BF16 before P^T.dO"},
    {Site::ds_cast, "ds_cast", "dS cast to BF16 before dS.K and dS^T.Q"},
    {Site::dv_mma, "dv_mma", "P^T.dO: alignment and truncation in the tensor core"},
    {Site::dk_mma, "dk_mma", "dS^T.Q: alignment and truncation in the tensor core"},
    {Site::dq_mma, "dq_mma", "dS.K of one key block: alignment and truncation in the tensor core"},
    {Site::dq_reduce, "dq_reduce", "fp32 additions of dQ over key blocks"},
    {Site::dkv_reduce, "dkv_reduce", "fp32 additions of dK and dV over the query heads of a group"},
    {Site::dq_cast, "dq_cast", "dQ's multiply by the fp32 scale and its cast to BF16"},
    {Site::dk_cast, "dk_cast", "dK's multiply by the fp32 scale and its cast to BF16"},
    {Site::dv_cast, "dv_cast", "dV's cast to BF16"},
}};

constexpr std::string_view name(Site site) {
  return kSites[static_cast<std::size_t>(site)].name;
}

/// A set of sites.
class SiteSet {
 public:
  SiteSet() = default;
  bool has(Site site) const { return bits_[static_cast<std::size_t>(site)]; }
  SiteSet& add(Site site) {
    bits_.set(static_cast<std::size_t>(site));
    return *this;
  }
  SiteSet& remove(Site site) {
    bits_.reset(static_cast<std::size_t>(site));
    return *this;
  }
  bool empty() const { return bits_.none(); }
  std::size_t size() const { return bits_.count(); }
  SiteSet operator|(const SiteSet& other) const { return SiteSet(bits_ | other.bits_); }
  SiteSet operator&(const SiteSet& other) const { return SiteSet(bits_ & other.bits_); }
  SiteSet operator~() const { return SiteSet(~bits_); }
  bool operator==(const SiteSet&) const = default;
  /// For maps: an order without meaning.
  bool operator<(const SiteSet& other) const { return bits_.to_ullong() < other.bits_.to_ullong(); }
  static SiteSet all() {
    SiteSet set;
    set.bits_.set();
    return set;
  }

 private:
  using Bits = std::bitset<kSiteCount>;
  explicit SiteSet(const Bits& bits) : bits_(bits) {}
  Bits bits_;
};

/// "o_cast,ds_cast", or "all". Throws std::invalid_argument with a clear line for a site that does not exist
/// or comes twice.
inline SiteSet parse_sites(std::string_view text) {
  if (text == "all") return SiteSet::all();
  SiteSet set;
  std::size_t begin = 0;
  while (true) {
    const std::size_t comma = text.find(',', begin);
    const std::string_view part =
        text.substr(begin, comma == std::string_view::npos ? std::string_view::npos : comma - begin);
    const SiteInfo* found = nullptr;
    for (const SiteInfo& i : kSites) {
      if (i.name == part) found = &i;
    }
    if (found == nullptr) {
      throw std::invalid_argument("no rounding site is called '" + std::string(part) +
                                  "' (bitattn sites lists them, 'all' is all of them)");
    }
    if (set.has(found->site)) throw std::invalid_argument("site " + std::string(part) + " comes twice");
    set.add(found->site);
    if (comma == std::string_view::npos) return set;
    begin = comma + 1;
  }
}

}  // namespace bitattn::profile
