#pragma once
// experimental:error-diffusion, experimental:error-diffusion-serial: the cast error of dS at one key is added
// to dS at another before that is cast.

#include "emu/profile/sites.hpp"

namespace bitattn::kernels::remedies {

/// dS_from's error is carried to `to`, unless `to` is masked; both get their words.
template <class Numbers>
class ErrorCarrier {
  using Value = typename Numbers::Value;
  using Word = typename Numbers::Word;

 public:
  explicit ErrorCarrier(const Numbers& numbers) : numbers_(numbers) {}
  /// Casts `ds` plus what was carried here, and keeps the error.
  Word cast(Value ds) {
    const auto site = profile::Site::ds_cast;
    const Value wanted = carried_ == 0 ? ds : numbers_.add(site, ds, carried_);
    const Word word = numbers_.cast(site, wanted);
    carried_ = numbers_.sub(site, wanted, Numbers::value(word));
    return word;
  }
  void reset() { carried_ = 0; }

 private:
  const Numbers& numbers_;
  Value carried_ = 0;
};

/// One key block of a row; keys [first, last) of it are visible. Pairs: keys b and b + 8 of every 16.
template <class Numbers>
void error_diffusion(const Numbers& numbers, const typename Numbers::Value* ds, typename Numbers::Word* words,
                     int n, int first, int last) {
  ErrorCarrier<Numbers> carrier(numbers);
  for (int g = 0; g < n; g += 16) {
    for (int l = 0; l < 8; ++l) {
      carrier.reset();
      for (int j = g + l; j < g + 16; j += 8) {
        if (j < first || j >= last) carrier.reset();
        words[j] = carrier.cast(ds[j]);
      }
    }
  }
}

/// From each visible key to the next of the block.
template <class Numbers>
void error_diffusion_serial(const Numbers& numbers, const typename Numbers::Value* ds,
                            typename Numbers::Word* words, int n, int first, int last) {
  ErrorCarrier<Numbers> carrier(numbers);
  for (int j = 0; j < n; ++j) {
    if (j < first || j >= last) carrier.reset();
    words[j] = carrier.cast(ds[j]);
  }
}

}  // namespace bitattn::kernels::remedies
