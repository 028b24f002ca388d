#!/usr/bin/env bash
# Tests the ARM64 code of the native core on another processor: `make emulate-arm`. Arguments go to pytest. With WHEEL, the
# file of a wheel for ARM64, it tries that and builds nothing.
#
# Debian's cross compiler builds the core, and qemu-user runs its tests: with a Python that is unpacked from Debian's
# packages for ARM64, and with JAX from its wheels. Nothing is installed outside of the folder VENV.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=$(realpath "${VENV:?the folder of an environment}")
root=$here/debian site=$here/site-arm64

missing() { echo "cannot emulate ARM64: $1" >&2 && exit 1; }
for command in aarch64-linux-gnu-g++ qemu-aarch64 apt-get dpkg-deb; do
    type "$command" >/dev/null 2>&1 ||
        missing "there is no $command. On Debian: apt-get install g++-aarch64-linux-gnu qemu-user"
done

# Lists and packages of apt for ARM64, beside those of this machine, which are not touched.
packages() {
    apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State="$here/apt" \
        -o Dir::State::status="$here/apt/status" -o Dir::Cache="$here/apt/cache" -o APT::Sandbox::User="$(id -un)" "$@"
}
if [ ! -e "$root/.complete" ]; then
    echo "unpacking Python for ARM64"
    mkdir -p "$here"/apt/{lists,cache/archives}/partial "$root"
    touch "$here/apt/status"
    packages update && packages install --yes --no-install-recommends --download-only python3 libstdc++6 zlib1g ||
        missing "apt's sources have no packages of Python for it"
    for package in "$here"/apt/cache/archives/*.deb; do dpkg-deb --extract "$package" "$root"; done
    touch "$root/.complete"
fi
python=$(realpath "$root/usr/bin/python3")

pip() { "$here/bin/python" -m pip --disable-pip-version-check -qq install --prefer-binary "$@"; }
if [ ! -e "$site/.complete" ]; then
    echo "unpacking JAX for ARM64"
    pip cmake ninja jaxlib==0.10.2
    mapfile -t platforms < <(printf -- '--platform=manylinux_2_%s_aarch64\n' {17..34}; echo --platform=manylinux2014_aarch64)
    pip --upgrade --target "$site" "${platforms[@]}" --only-binary=:all: --python-version "${python##*python}" \
        'jax>=0.10.2' 'numpy>=2.0' 'ml_dtypes>=0.5' 'pytest>=8' ||
        missing "there are no wheels of JAX for Python ${python##*python} and ARM64"
    touch "$site/.complete"
fi

# Runs Python on a processor.
on() { qemu-aarch64 -L "$root" -cpu "$1" -E PYTHONPATH="$site" "$python" "${@:2}"; }

rm -rf "$site/eformer"
if [ -n "${WHEEL:-}" ]; then
    "$here/bin/python" -m zipfile -e "$WHEEL" "$site"
    on max -W error::UserWarning .ci/try_wheel.py
    exit
fi

echo "building the core for ARM64"
PATH=$here/bin:$PATH
cmake -S . -B "$here/build" -G Ninja -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
    -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DPython_EXECUTABLE="$here/bin/python" \
    >"$here/cmake.log" || missing "cmake failed: $here/cmake.log"
cmake --build "$here/build"
cp -r src/eformer "$site"
cmake --install "$here/build" --prefix "$site" >/dev/null

for each in cortex-a72:neon neoverse-n1:neon_dot max:neon_i8mm; do
    best=$(on "${each%:*}" -c 'from eformer.kernels import cpu; print(cpu.instruction_sets()[0])')
    echo "${each%:*} takes $best and should take ${each#*:}"
    [ "$best" = "${each#*:}" ]
done
on max -W ignore -m tests.kernels.fuzz_core --seconds 60 --seed 0
export EFORMER_NEED_CORE=neon_i8mm
on max -m pytest -q -p no:cacheprovider tests/kernels/test_cpu.py tests/kernels/test_int8.py "$@"
