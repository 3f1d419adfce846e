#!/usr/bin/env bash
# Installs what bitattn builds with, from Debian 12's own packages. Does nothing where all of it is there.
set -euo pipefail

packages=(
  build-essential cmake ninja-build pkg-config      # 12.9, 3.25, 1.11, 1.8
  libhdf5-dev libdeflate-dev                        # 1.10.8, 1.14
  libmpfr-dev libgmp-dev libboost1.81-dev           # 4.2.0, 6.2.1, 1.81
  python3-dev pybind11-dev                          # 3.11, 2.10: the Python module
  libzip-dev                                        # 1.7: .npz
  libtbb-dev libhwy-dev                             # oneTBB 2021.8, Highway 1.0.3
  libcli11-dev libfmt-dev nlohmann-json3-dev        # 2.1.2, 9.1, 3.11.2
  libgtest-dev libgmock-dev libbenchmark-dev        # 1.12.1, 1.7.1
  python3 python3-h5py python3-numpy                # 3.11, 3.7, 1.24: tests read what bitattn writes with h5py
  python3-matplotlib python3-nbclient               # 3.6, 0.7: the notebooks, executed as a test
  python3-nbformat python3-ipykernel                # 5.5, 6.17
)

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "bitattn: needs these packages, and neither root nor sudo is at hand: ${missing[*]}" >&2; exit 2; }
  as_root=(sudo)
fi
echo "installing ${missing[*]}" >&2
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
